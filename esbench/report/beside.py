"""Measured multipliers beside published ones, for the cells that others have published too."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from esbench.records import Case, Measurement, Run, Variant
from esbench.report import captions
from esbench.report.cells import Cell, Reading
from esbench.report.grid import TIMES, Grid, grids, operators
from esbench.report.tables import SPEED, TIME, Block, Cells, Comparison, Section, multiple


@dataclass(frozen=True)
class _Published:
    """The grid of others that stands beside one of ours, and their cases by what ours have in common."""

    grid: Grid
    twins: dict[Case, Case]

    def reading(self, variant: Variant, case: Case, comparison: Comparison) -> Reading:
        """Their multiplier, without a value where they published none."""
        twin = self.twins.get(_geometry(case))
        found = multiple(self.grid, variant, twin, comparison) if twin else None
        return found or Reading(comparison.name, None, kind="multiple")


def beside(measured: Run, *published: Run) -> list[Section]:
    """A section for each operator and phase of which somebody published the same variants and shapes.

    The batch and the number format may differ; the captions say both.
    """
    every = [grid for operator in operators(measured) for grid in grids(measured, operator, TIMES)]
    return [section for here in every if (section := _section(here, published))]


def _section(here: Grid, published: Sequence[Run]) -> Section | None:
    others = [other for run in published for there in _like(here, run) if (other := _paired(here, there))]
    known = {twin for other in others for twin in other.twins}
    cases = tuple(case for case in here.cases if _geometry(case) in known)
    theirs = {variant for other in others for variant in other.grid.variants}
    variants = tuple(variant for variant in here.variants if variant in theirs)
    cells = Cells(here, variants, cases)
    blocks = [
        _block(cells, compared, comparison)
        for comparison in (SPEED, TIME)
        if here.reference(comparison.mode)
        and (compared := [other for other in others if other.grid.reference(comparison.mode)])
    ]
    if not (cases and variants and blocks):
        return None
    words = (
        f"Beside it: {captions.origin(other.grid.run)} {captions.conditions(other.grid, other.grid.cases)}"
        for other in others
    )
    return Section(
        title=f"{here.operator}, {here.phase}: measured / published",
        origin=f"Measured: {captions.origin(here.run)} {captions.conditions(here, cases)}",
        conditions=" ".join(words),
        blocks=tuple(blocks),
        footnotes=tuple(cells.notes),
    )


def _like(here: Grid, run: Run) -> list[Grid]:
    """The grids of a run that may stand beside one of ours."""
    wanted = (here.phase, here.metric, here.antithetic)
    every = grids(run, here.operator, TIMES)
    return [there for there in every if (there.phase, there.metric, there.antithetic) == wanted]


def _paired(here: Grid, there: Grid) -> _Published | None:
    """The two, where they share a variant and a shape: baselines alone are no comparison."""
    twins = {_geometry(case): case for case in there.cases}
    shapes = {_geometry(case) for case in here.cases} & set(twins)
    shared = [variant for variant in here.variants if variant in there.variants and not variant.baseline]
    return _Published(there, twins) if shapes and shared else None


def _block(cells: Cells, others: Sequence[_Published], comparison: Comparison) -> Block:
    def number(variant: Variant, case: Case, _: Measurement) -> Cell:
        ours = multiple(cells.grid, variant, case, comparison) or Reading(
            comparison.name, None, kind="multiple"
        )
        theirs = (other.reading(variant, case, comparison) for other in others)
        return Cell(" / ".join(["{}"] * (1 + len(others))), (ours, *theirs))

    names = " / ".join(captions.device(other.grid.run) for other in others)
    title = f"{comparison.title}, measured / {names}"
    return Block(title, f": {comparison.formula}.", cells.table(number))


def _geometry(case: Case) -> Case:
    return msgspec.structs.replace(case, members=1, repeats=1, dtype="any", antithetic=False)
