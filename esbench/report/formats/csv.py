"""Figures and tables as comma-separated values."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence

from esbench.report.formats.exporters import plain_cell
from esbench.report.tables.table import Cell, CellNumber, Section
from esbench.schema import Case, Row, Run, Variant

KEY = (
    *("run_id", "device", "operator", "variant", "case", "shape", "dtype", "members", "repeats"),
    *("antithetic", "phase", "method"),
)
"""The columns that identify an observation."""

Observation = tuple[str, Variant, Case, str, str]
"""Run id, variant, case, phase and method."""


def figures(runs: Iterable[Run], sections: Iterable[Section]) -> str:
    """Return the figures in the cells of some tables as tidy data, with all digits.

    One line is a variant on a case in a phase by a method; one column is a metric, whose suffix is its unit:
    ``latency_ns``. The interval is in ``latency_ns_low`` and ``latency_ns_high``. A variant without a number
    has its ``status`` and ``reason``. The text is empty if no cell has a figure.

    Args:
        runs: the runs that the tables are made from.
        sections: the tables.

    """
    devices = {run.header.run_id: run.header.environment.device_name for run in runs}
    lines: dict[Observation, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for run_id, cell in _cells(sections):
        for number in cell.numbers:
            values = _values(number)
            columns |= dict.fromkeys(values)
            if number.trace and values:
                place = _observation(number.trace.run_id, number.trace.rows[0])
                lines.setdefault(place, _key(place, devices)).update(values)
        if cell.skipped:
            place = _observation(run_id, cell.skipped)
            why = {"status": cell.skipped.status, "reason": plain_cell(cell.skipped.reason)}
            lines.setdefault(place, _key(place, devices)).update(why)
    return _text([*KEY, *columns, "status", "reason"], list(lines.values()))


def shown_tables(sections: Iterable[Section]) -> str:
    """Return tables as they are shown, one line per row; empty if there is no row."""
    lines = []
    for section in sections:
        for block in section.blocks:
            names = (block.table.corner, *block.table.headings)
            for label, texts in zip(block.table.labels, block.table.texts(), strict=True):
                line = dict(zip(names, (label, *texts), strict=True))
                lines.append({"section": section.heading, "table": block.title} | line)
    plain = [{plain_cell(name): plain_cell(value) for name, value in line.items()} for line in lines]
    return _text(list(dict.fromkeys(name for line in plain for name in line)), plain)


def _text(columns: Sequence[str], lines: Sequence[dict[str, str]]) -> str:
    if not lines:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _cells(sections: Iterable[Section]) -> Iterator[tuple[str, Cell]]:
    """Yield every cell with the run of its section."""
    for section in sections:
        for block in section.blocks:
            yield from ((section.run_id, cell) for row in block.table.cells for cell in row)


def _observation(run_id: str, row: Row) -> Observation:
    return run_id, row.variant, row.case, row.phase or "all", row.method or "all"


def _key(place: Observation, devices: dict[str, str]) -> dict[str, str]:
    run_id, variant, case, phase, method = place
    values = (
        *(run_id, devices.get(run_id, ""), case.operator, variant.label(case.operator), case.label),
        *(case.shape, case.dtype, str(case.members), str(case.repeats), str(case.antithetic).lower()),
        *(phase, method),
    )
    return {name: plain_cell(value) for name, value in zip(KEY, values, strict=True)}


def _values(number: CellNumber) -> dict[str, str]:
    """Return the number and the ends of its interval, if they are finite."""
    name = plain_cell(number.name)
    found = {name: number.value, f"{name}_low": number.low, f"{name}_high": number.high}
    return {key: repr(value) for key, value in found.items() if value is not None and math.isfinite(value)}
