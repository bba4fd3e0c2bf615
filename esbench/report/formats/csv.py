"""Figures and tables as comma-separated values."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence

from esbench.report.analysis.pivot import TIMES, Grid, grids, operators
from esbench.report.analysis.roofline import bound_ns
from esbench.report.formats.exporters import plain_cell
from esbench.report.tables.table import Cell, Reading, Section
from esbench.schema import Case, Measurement, Row, Run, Variant
from esbench.stats import interval, median_clock, off_clock, outliers, round_medians, spread, throttled

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
        for reading in cell.readings:
            values = _values(reading)
            columns |= dict.fromkeys(values)
            if reading.trace and values:
                place = _observation(reading.trace.run_id, reading.trace.rows[0])
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


def times(run: Run) -> str:
    """Return every time of a run with its quantiles, interval, warnings, multipliers and roofline bound.

    Times are in ns and shares between 0 and 1. ``low`` and ``high`` are the 95 % interval of the median over
    rounds. The text is empty if the run has no times.
    """
    clock_hz = median_clock(run)
    lines = [
        _statistics(grid, row, clock_hz) | _multipliers(grid, variant, case)
        for operator in operators(run)
        for grid in grids(run, operator, TIMES)
        for variant, case, row in grid.cells
    ]
    return _text(list(lines[0]) if lines else [], lines)


def _text(columns: Sequence[str], lines: Sequence[dict[str, str]] | Sequence[dict[str, object]]) -> str:
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


def _values(reading: Reading) -> dict[str, str]:
    """The number and the ends of its interval, if they are finite."""
    name = plain_cell(reading.name)
    found = {name: reading.value, f"{name}_low": reading.low, f"{name}_high": reading.high}
    return {key: repr(value) for key, value in found.items() if value is not None and math.isfinite(value)}


def _statistics(grid: Grid, row: Measurement, clock_hz: float | None) -> dict[str, object]:
    quantiles = spread(row)
    sure = interval([value for value in round_medians(row) if value is not None])
    return {
        "variant": row.variant.label(grid.operator),
        "case": row.case.label,
        "dtype": row.case.dtype,
        "members": row.case.members,
        "phase": row.phase,
        "metric": row.metric,
        "method": row.method,
        "group": row.group,
        "rounds": len(row.samples),
        "samples": sum(map(len, row.samples)),
        "p20": quantiles and quantiles.p20,
        "median": quantiles and quantiles.median,
        "p80": quantiles and quantiles.p80,
        "low": sure and sure.low,
        "high": sure and sure.high,
        "outliers": outliers(row),
        "off_clock": off_clock(row, clock_hz),
        "throttled": throttled(row),
        "floor": bound_ns(grid.run, row.case.dtype, row.work),
        "warm_up": row.warm_up,
        "stop": row.stop,
        "labels": "; ".join(row.labels),
    }


def _multipliers(grid: Grid, variant: Variant, case: Case) -> dict[str, object]:
    cells: dict[str, object] = {}
    for name, ratio in (
        ("naive_by_this", grid.multiplier(variant, case, "naive")),
        ("this_by_base", grid.multiplier(variant, case, "base")),
    ):
        cells |= {
            name: ratio and ratio.value,
            f"{name}_low": ratio and ratio.low,
            f"{name}_high": ratio and ratio.high,
            f"{name}_taken": ratio and ratio.method,
        }
    return cells
