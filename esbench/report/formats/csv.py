"""Numbers and tables as comma-separated values."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence

from esbench.report.tables.table import CellNumber, Section
from esbench.schema import Row, Run
from esbench.text import one_line

_KEY = (
    *("run_id", "device", "operator", "variant", "case", "shape", "dtype", "members", "repeats"),
    *("antithetic", "phase", "method"),
)
"""The columns that identify an observation."""
_FORMULA_STARTS = ("=", "+", "-", "@")
_APOSTROPHE = "'"
"""In front of a text it tells a spreadsheet that this is no formula."""


def comma_separated(columns: Sequence[str], lines: Iterable[Mapping[str, object]]) -> str:
    """Return lines under a heading, with floats in full and each text on one line.

    A text that a spreadsheet would evaluate as a formula gets an apostrophe.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(map(_without_formula, columns)), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {str(_without_formula(name)): _without_formula(value) for name, value in line.items()}
        for line in lines
    )
    return text.getvalue()


def _without_formula(value: object) -> object:
    if not isinstance(value, str):
        return value
    line = one_line(value)
    # A text's own apostrophe gets a second one, because the first is not shown.
    return f"{_APOSTROPHE}{line}" if line.startswith((*_FORMULA_STARTS, _APOSTROPHE)) else line


def tidy_numbers(runs: Iterable[Run], sections: Iterable[Section]) -> str:
    """Return the numbers in the cells of some tables as tidy data, with all digits.

    One line is a variant on a case in a phase by a method; one column is a metric, whose suffix is its unit:
    ``latency_ns``. The interval is in ``latency_ns_low`` and ``latency_ns_high``. A variant without a number
    has its ``status`` and ``reason``. The text is empty if no cell has a number.
    """
    devices = {run.header.run_id: run.header.environment.device_name for run in runs}
    lines: dict[tuple[object, ...], dict[str, object]] = {}
    columns: dict[str, None] = {}

    def line_of(run_id: str, row: Row) -> dict[str, object]:
        key = (run_id, row.variant, row.case, row.phase, row.method)
        return lines.setdefault(key, _key(run_id, devices.get(run_id, ""), row))

    tables = ((section.run_id, block.table) for section in sections for block in section.blocks)
    cells = ((run_id, cell) for run_id, table in tables for row in table.cells for cell in row)
    for run_id, cell in cells:
        for number in cell.numbers:
            values = _values(number)
            columns |= dict.fromkeys(values)
            if number.rows and values:
                line_of(run_id, number.rows[0]).update(values)
        if cell.skipped:
            reason_columns = {"status": cell.skipped.status, "reason": cell.skipped.reason}
            line_of(run_id, cell.skipped).update(reason_columns)
    return comma_separated([*_KEY, *columns, "status", "reason"], lines.values()) if lines else ""


def _key(run_id: str, device: str, row: Row) -> dict[str, object]:
    case = row.case
    values = (
        *(run_id, device, case.operator, row.variant.label(case.operator), case.label),
        *(case.shape, case.dtype, case.members, case.repeats, str(case.antithetic).lower()),
        *(row.phase or "all", row.method or "all"),
    )
    return dict(zip(_KEY, values, strict=True))


def _values(number: CellNumber) -> dict[str, object]:
    """Return the number and the ends of its interval, if they are finite."""
    values = {number.name: number.value, f"{number.name}_low": number.low, f"{number.name}_high": number.high}
    return {key: value for key, value in values.items() if value is not None and math.isfinite(value)}
