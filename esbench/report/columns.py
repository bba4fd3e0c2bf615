"""The columns of tables of quality, and how their cells are printed."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from esbench.records import Case, Run, Skipped, Variant
from esbench.report import captions
from esbench.report.estimates import EXACT, Estimate, Worth
from esbench.report.footnotes import Footnotes
from esbench.report.grid import Grid, headings
from esbench.report.tables import Block, Section
from esbench.units import format_cell, format_multiplier, format_number

INTERVAL = "95 % interval"
BLANK = ""
"""The cell of a number that the reason beside it explains."""


class Column(NamedTuple):
    """A column of a table: its heading, and the cell of a variant, nothing where it has no number."""

    heading: str
    cell: Callable[[Variant], str | None]


def section(grid: Grid, case: Case, what: str, block: Block, footnotes: Iterable[str]) -> Section:
    """A section of one table, with what its footnotes hint at."""
    (heading,) = (name for one, name in _headings(grid.run, case.operator) if one == case)
    return Section(
        title=f"{case.operator} {heading}: {what}",
        origin=captions.origin(grid.run),
        conditions=captions.conditions(grid, [case]),
        blocks=(block,),
        footnotes=tuple(footnotes),
    )


def _headings(run: Run, operator: str) -> list[tuple[Case, str]]:
    cases = list(dict.fromkeys(row.case for row in run.rows if row.case.operator == operator))
    return list(zip(cases, headings(cases), strict=True))


def frame(
    case: Case,
    variants: Sequence[Variant],
    columns: Sequence[Column],
    reason: Callable[[Variant], Skipped | None],
    notes: Footnotes,
) -> pd.DataFrame:
    """Print the cells; the first that a variant has no number for holds the reason, if there is one."""
    cells = []
    for variant in variants:
        shown, why = [column.cell(variant) for column in columns], reason(variant)
        if why and None in shown:
            shown[shown.index(None)] = notes.reason(why)
        cells.append([one if one is not None else BLANK if why else notes.hole() for one in shown])
    labels = pd.Index([variant.label(case.operator) for variant in variants], name=case.operator)
    return pd.DataFrame(cells, index=labels, columns=[column.heading for column in columns])


def number(value: float | None) -> str | None:
    """A number, where there is one."""
    return None if value is None else format_number(value)


def quantity_cell(metric: str, value: float | None) -> str | None:
    """A number in the unit of its metric's column, where there is one."""
    return None if value is None else format_cell(metric, value)


def multiple(value: float | None) -> str | None:
    """A multiple, where there is one."""
    return None if value is None else format_multiplier(value)


def mean(found: Estimate | None) -> str | None:
    """A mean over replicates, where there is one."""
    return format_number(found.mean) if found else None


def members(found: Worth | None) -> str | None:
    """The independent members that a population is worth, where that is a number."""
    if found is None:
        return None
    return EXACT if found.is_exact else f"{'at least ' if found.is_bound else ''}{format_number(found.value)}"


def ends(found: Worth | None) -> str | None:
    """The interval of n_eff; a single replicate has none, and a closed form needs none."""
    if found is None:
        return None
    if not found.replicates:
        return "closed form"
    if found.replicates == 1:
        return "one value"
    low, high = format_number(found.low), format_number(found.high)
    return f"{low} to {high}" if math.isfinite(found.high) else f"at least {low}"


def half(found: Estimate | None) -> str | None:
    """Half the interval; a single replicate has none."""
    return (format_number(found.half) if found.half is not None else "one value") if found else None
