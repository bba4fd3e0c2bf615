"""Measured multipliers beside published ones, for the cells that both have."""

import msgspec

from esbench.records import Case, Measurement, Mode, Run, Variant
from esbench.report import captions
from esbench.report.grid import TIMES, Grid, grids, operators
from esbench.report.tables import SPEED, TIME, Block, Cells, Comparison, Section
from esbench.units import ABSENT, format_multiplier


def beside(measured: Run, published: Run) -> list[Section]:
    """A section for each operator and phase of which both hold the same variants and shapes.

    The batch and the number format may differ; the captions say both.
    """
    theirs = [grid for operator in operators(published) for grid in grids(published, operator, TIMES)]
    pairs = [
        (here, there)
        for there in theirs
        for here in grids(measured, there.operator, TIMES)
        if (here.phase, here.metric, here.antithetic) == (there.phase, there.metric, there.antithetic)
    ]
    return [section for here, there in pairs if (section := _section(here, there))]


def _section(here: Grid, there: Grid) -> Section | None:
    twins = {_geometry(case): case for case in there.cases}
    cases = tuple(case for case in here.cases if _geometry(case) in twins)
    variants = tuple(variant for variant in here.variants if variant in there.variants)
    cells = Cells(here, variants, cases)
    blocks = [
        _block(cells, there, twins, comparison)
        for comparison in (SPEED, TIME)
        if here.reference(comparison.mode) and there.reference(comparison.mode)
    ]
    if not (cases and variants and blocks):
        return None
    return Section(
        title=f"{here.operator}, {here.phase}: measured / published",
        origin=f"Measured: {captions.origin(here.run)} {captions.conditions(here, cases)}",
        conditions=f"Beside it: {captions.origin(there.run)} {captions.conditions(there, there.cases)}",
        blocks=tuple(blocks),
        footnotes=tuple(cells.notes),
    )


def _block(cells: Cells, there: Grid, twins: dict[Case, Case], comparison: Comparison) -> Block:
    def number(variant: Variant, case: Case, _: Measurement) -> str:
        measured = _multiplier(cells.grid, variant, case, comparison.mode)
        return f"{measured} / {_multiplier(there, variant, twins[_geometry(case)], comparison.mode)}"

    return Block(f"{comparison.title}, measured / published", f": {comparison.formula}.", cells.frame(number))


def _multiplier(grid: Grid, variant: Variant, case: Case, mode: Mode) -> str:
    ratio = grid.multiplier(variant, case, mode)
    return format_multiplier(ratio.value) if ratio else ABSENT


def _geometry(case: Case) -> Case:
    return msgspec.structs.replace(case, members=1, repeats=1, dtype="any", antithetic=False)
