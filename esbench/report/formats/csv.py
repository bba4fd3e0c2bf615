"""The figures of a page as tidy comma-separated values: a line for an observation, a column for a variable.

An observation is a variant on a case in a phase, by a method. A variable's unit is the suffix of its column's
name, as everywhere in the records: ``latency_ns``, ``peak_bytes``; its interval stands in ``…_low`` and
``…_high``. All digits are there.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator

from esbench.report.formats.exporters import plain_cell
from esbench.report.tables.table import Cell, Reading, Section
from esbench.schema import Case, Row, Run, Variant

KEY = (
    *("run_id", "device", "operator", "variant", "case", "shape", "dtype", "members", "repeats"),
    *("antithetic", "phase", "method"),
)
"""What tells the observations apart."""
REASON = ("status", "reason")

Place = tuple[str, Variant, Case, str, str]


def page(runs: Iterable[Run], sections: Iterable[Section]) -> str:
    """The figures in the cells of these sections, which are of these runs.

    A row that says why a variant has no number is an observation of its own, with ``status`` and ``reason``.
    """
    devices = {run.header.run_id: run.header.environment.device_name for run in runs}
    lines: dict[Place, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for run_id, cell in _cells(sections):
        for reading in cell.readings:
            values = _values(reading)
            columns |= dict.fromkeys(values)
            if reading.trace and values:
                row = reading.trace.rows[0]
                place = _place(reading.trace.run_id, row)
                lines.setdefault(place, _key(place, devices)).update(values)
        if cell.skipped:
            place = _place(run_id, cell.skipped)
            why = {"status": cell.skipped.status, "reason": plain_cell(cell.skipped.reason)}
            lines.setdefault(place, _key(place, devices)).update(why)
    if not lines:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*KEY, *columns, *REASON], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines.values())
    return text.getvalue()


def words(sections: Iterable[Section]) -> str:
    """The tables of sections without a figure of a run, as they are shown: a line for each of their rows."""
    lines = []
    for section in sections:
        for block in section.blocks:
            names = (block.table.corner, *block.table.headings)
            for label, texts in zip(block.table.labels, block.table.texts(), strict=True):
                line = dict(zip(names, (label, *texts), strict=True))
                lines.append({"section": section.heading, "table": block.title} | line)
    if not lines:
        return ""
    text = io.StringIO()
    columns = dict.fromkeys(name for line in lines for name in line)
    writer = csv.DictWriter(text, [*columns], restval="", lineterminator="\n")
    writer.writerow({name: plain_cell(name) for name in columns})
    writer.writerows({name: plain_cell(value) for name, value in line.items()} for line in lines)
    return text.getvalue()


def _cells(sections: Iterable[Section]) -> Iterator[tuple[str, Cell]]:
    """The cells, each with the run of its section."""
    for section in sections:
        for block in section.blocks:
            yield from ((section.run_id, cell) for row in block.table.cells for cell in row)


def _place(run_id: str, row: Row) -> Place:
    return run_id, row.variant, row.case, row.phase or "all", row.method or "all"


def _key(place: Place, devices: dict[str, str]) -> dict[str, str]:
    run_id, variant, case, phase, method = place
    values = (
        *(run_id, devices.get(run_id, ""), case.operator, variant.label(case.operator), case.label),
        *(case.shape, case.dtype, str(case.members), str(case.repeats), str(case.antithetic).lower()),
        *(phase, method),
    )
    return {name: plain_cell(value) for name, value in zip(KEY, values, strict=True)}


def _values(reading: Reading) -> dict[str, str]:
    """The number and the ends of its interval, as far as they are numbers."""
    name = plain_cell(reading.name)
    found = {name: reading.value, f"{name}_low": reading.low, f"{name}_high": reading.high}
    return {key: repr(value) for key, value in found.items() if value is not None and math.isfinite(value)}
