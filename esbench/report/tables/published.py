"""Measured multipliers beside published ones, for the cells that others have published too."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from esbench.report import captions
from esbench.report.analysis.pivot import TIMES, Grid, grids, operators
from esbench.report.tables.measured import SPEED, TIME, GridTable, Multiplier, multiple
from esbench.report.tables.table import Block, Cell, Footnotes, Reading, Section
from esbench.schema import Case, Measurement, Run, Variant


@dataclass(frozen=True)
class _Published:
    """The grid of others that stands beside one of ours, and their cases by what ours have in common."""

    grid: Grid
    twins: dict[Case, Case]

    def reading(self, variant: Variant, case: Case, multiplier: Multiplier) -> Reading:
        """Their multiplier, without a value where they published none."""
        twin = self.twins.get(_geometry(case))
        found = multiple(self.grid, variant, twin, multiplier) if twin else None
        return found or Reading(multiplier.name, None, kind="multiple")


def beside(measured: Run, *published: Run) -> list[Section]:
    """A section for each operator and phase of which somebody published the same variants and shapes.

    The batch and the number format may differ; the captions say both.
    """
    every = [grid for operator in operators(measured) for grid in grids(measured, operator, TIMES)]
    return [section for here in every if (section := _section(here, published))]


def _section(here: Grid, published: Sequence[Run]) -> Section | None:
    others = [other for run in published for there in _like(here, run) if (other := _paired(here, there))]
    notes = Footnotes()
    blocks = [
        block
        for together in _alike(here, others)
        for multiplier in (SPEED, TIME)
        if (block := _block(here, together, multiplier, notes))
    ]
    if not blocks:
        return None
    words = (
        f"Beside it: {captions.origin(other.grid.run)} {captions.conditions(other.grid, other.grid.cases)}"
        for other in others
    )
    known = {twin for other in others for twin in other.twins}
    shown = [case for case in here.cases if _geometry(case) in known]
    return Section(
        title=f"{here.operator}, {here.phase}: measured / published",
        origin=f"Measured: {captions.origin(here.run)} {captions.conditions(here, shown)}",
        conditions=" ".join(words),
        blocks=tuple(blocks),
        footnotes=tuple(notes),
    )


def _alike(here: Grid, others: Sequence[_Published]) -> list[list[_Published]]:
    """Those that may share a table: of another batch or number format than ours each has one of its own."""
    same = [other for other in others if _batches(other.grid) <= _batches(here)]
    return ([same] if same else []) + [[other] for other in others if other not in same]


def _batches(grid: Grid) -> set[tuple[str, int, int]]:
    return {(case.dtype, case.members, case.repeats) for case in grid.cases}


def _like(here: Grid, run: Run) -> list[Grid]:
    """The grids of a run that may stand beside one of ours."""
    wanted = (here.phase, here.metric, here.antithetic)
    every = grids(run, here.operator, TIMES)
    return [there for there in every if (there.phase, there.metric, there.antithetic) == wanted]


def _paired(here: Grid, there: Grid) -> _Published | None:
    """The two, where they share a variant and a shape: baselines alone are no multiplier."""
    twins = {_geometry(case): case for case in there.cases}
    shapes = {_geometry(case) for case in here.cases} & set(twins)
    shared = [variant for variant in here.variants if variant in there.variants and not variant.baseline]
    return _Published(there, twins) if shapes and shared else None


def _block(
    here: Grid, others: Sequence[_Published], multiplier: Multiplier, notes: Footnotes
) -> Block | None:
    """Ours by theirs, ``None`` where one side has nothing that a multiple could be of."""
    others = [other for other in others if other.grid.reference(multiplier.mode)]
    if not others or not here.reference(multiplier.mode):
        return None
    shapes = {twin for other in others for twin in other.twins}
    theirs = {variant for other in others for variant in other.grid.variants}
    filled = GridTable(
        here,
        tuple(variant for variant in here.variants if variant in theirs),
        tuple(case for case in here.cases if _geometry(case) in shapes),
        notes,
    )

    def number(variant: Variant, case: Case, _: Measurement) -> Cell:
        ours = multiple(here, variant, case, multiplier) or Reading(multiplier.name, None, kind="multiple")
        theirs = (other.reading(variant, case, multiplier) for other in others)
        return Cell(" / ".join(["{}"] * (1 + len(others))), (ours, *theirs))

    names = " / ".join(captions.device(other.grid.run) for other in others)
    other_batch = "" if _batches(others[0].grid) <= _batches(here) else f" {_unlike(here, others[0].grid)}"
    title = f"{multiplier.title}, measured / {names}"
    return Block(title, f": {multiplier.formula}.{other_batch}", filled.table(number))


def _unlike(here: Grid, there: Grid) -> str:
    """A warning: these two are not the same measurement."""
    ours, theirs = (captions.conditions(grid, grid.cases).removesuffix(".") for grid in (here, there))
    return f"Not the same batch or number format: measured with {ours}, published with {theirs}."


def _geometry(case: Case) -> Case:
    return msgspec.structs.replace(case, members=1, repeats=1, dtype="any", antithetic=False)
