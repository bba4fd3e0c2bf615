"""The columns of tables of quality, and how their cells are printed."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from esbench.report import captions
from esbench.report.cells import Cell, Reading, Table, Trace, one, said
from esbench.report.estimates import EXACT, Estimate, Worth
from esbench.report.footnotes import Footnotes
from esbench.report.grid import Grid, headings
from esbench.report.tables import Block, Section
from esbench.schema import Case, Run, Skipped, Variant
from esbench.units import format_number

INTERVAL = "95 % interval"
BLANK = ""
"""The cell of a number that the reason beside it explains."""

_SEVERAL = 2


class Column(NamedTuple):
    """A column of a table: its heading, and the cell of a variant, nothing where it has no number."""

    heading: str
    cell: Callable[[Variant], Cell | None]


def section(  # noqa: PLR0913, PLR0917  # the parts of a section
    grid: Grid, case: Case, what: str, block: Block, footnotes: Iterable[str], apart: str = ""
) -> Section:
    """A section of one table, with what its footnotes hint at."""
    (heading,) = (name for one, name in _headings(grid.run, case.operator) if one == case)
    return Section(
        title=f"{case.operator} {heading}: {what}",
        origin=captions.origin(grid.run),
        conditions=captions.conditions(grid, [case]),
        blocks=(block,),
        footnotes=tuple(footnotes),
        run_id=grid.run.header.run_id,
        apart=apart,
    )


def _headings(run: Run, operator: str) -> list[tuple[Case, str]]:
    cases = list(dict.fromkeys(row.case for row in run.rows if row.case.operator == operator))
    return list(zip(cases, headings(cases), strict=True))


def table(
    case: Case,
    variants: Sequence[Variant],
    columns: Sequence[Column],
    reason: Callable[[Variant], Skipped | None],
    notes: Footnotes,
) -> Table:
    """Fill the cells; the first that a variant has no number for holds the reason, if there is one."""
    cells = []
    for variant in variants:
        shown, why = [column.cell(variant) for column in columns], reason(variant)
        if why and None in shown:
            shown[shown.index(None)] = Cell(notes.reason(why), skipped=why)
        filled = (cell if cell is not None else said(BLANK if why else notes.hole()) for cell in shown)
        cells.append(tuple(filled))
    return Table(
        corner=case.operator,
        headings=tuple(column.heading for column in columns),
        labels=tuple(variant.label(case.operator) for variant in variants),
        cells=tuple(cells),
    )


def number(name: str, value: float | None, trace: Trace | None) -> Cell | None:
    """A number as it is, where there is one."""
    return None if value is None else one(Reading(name, value, trace, kind="number"))


def mean(name: str, found: Estimate | None, trace: Trace | None) -> Cell | None:
    """A mean over replicates, where there is one."""
    if found is None:
        return None
    half = found.half
    low, high = (None, None) if half is None else (found.mean - half, found.mean + half)
    return one(Reading(name, found.mean, trace, low, high, kind="number"))


def members(name: str, found: Worth | None, trace: Trace | None) -> Cell | None:
    """The independent members that a population is worth, where that is a number."""
    if found is None:
        return None
    if found.is_exact:
        return said(EXACT)
    if found.is_bound:
        return one(Reading(name, found.value, trace, kind="number"), "at least {}")
    low, high = known_ends(found)
    return one(Reading(name, found.value, trace, low, high, kind="number"))


def known_ends(found: Worth) -> tuple[float | None, float | None]:
    """The interval of n_eff, where its replicates give it two ends."""
    if found.replicates < _SEVERAL or not math.isfinite(found.high):
        return None, None
    return found.low, found.high


def ends(found: Worth | None) -> Cell | None:
    """The interval of n_eff; a single replicate has none, and a closed form needs none."""
    if found is None:
        return None
    if not found.replicates:
        return said("closed form")
    if found.replicates == 1:
        return said("one value")
    low, high = format_number(found.low), format_number(found.high)
    return said(f"{low} to {high}" if math.isfinite(found.high) else f"at least {low}")


def half(found: Estimate | None) -> Cell | None:
    """Half the interval; a single replicate has none."""
    return said(format_number(found.half) if found.half is not None else "one value") if found else None
