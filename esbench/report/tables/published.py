"""Tables of measured multipliers beside published ones, for variants and shapes that both have."""

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
    """A published grid, and its cases by their geometry."""

    grid: Grid
    cases: dict[Case, Case]

    def reading(self, variant: Variant, case: Case, multiplier: Multiplier) -> Reading:
        """The published multiplier, or a reading without a value if none was published."""
        other_case = self.cases.get(_geometry(case))
        found = multiple(self.grid, variant, other_case, multiplier) if other_case else None
        return found or Reading(multiplier.name, None, kind="multiple")


def beside(measured: Run, *published: Run) -> list[Section]:
    """The tables of each operator and phase of which the same variants and shapes were published.

    Batch and dtype may differ; the captions say both.
    """
    every = [grid for operator in operators(measured) for grid in grids(measured, operator, TIMES)]
    return [section for here in every if (section := _section(here, published))]


def _section(here: Grid, published: Sequence[Run]) -> Section | None:
    others = [
        other for run in published for there in _comparable(here, run) if (other := _paired(here, there))
    ]
    notes = Footnotes()
    blocks = [
        block
        for together in _groups(here, others)
        for multiplier in (SPEED, TIME)
        if (block := _block(here, together, multiplier, notes))
    ]
    if not blocks:
        return None
    words = (
        f"Beside it: {captions.origin(other.grid.run)} {captions.conditions(other.grid, other.grid.cases)}"
        for other in others
    )
    known = {other_case for other in others for other_case in other.cases}
    shown = [case for case in here.cases if _geometry(case) in known]
    return Section(
        title=f"{here.operator}, {here.phase}: measured / published",
        origin=f"Measured: {captions.origin(here.run)} {captions.conditions(here, shown)}",
        conditions=" ".join(words),
        blocks=tuple(blocks),
        footnotes=tuple(notes),
    )


def _groups(here: Grid, others: Sequence[_Published]) -> list[list[_Published]]:
    """Groups that share a table: those with our batch and dtype, and each other one alone."""
    same = [other for other in others if _batches(other.grid) <= _batches(here)]
    return ([same] if same else []) + [[other] for other in others if other not in same]


def _batches(grid: Grid) -> set[tuple[str, int, int]]:
    return {(case.dtype, case.members, case.repeats) for case in grid.cases}


def _comparable(here: Grid, run: Run) -> list[Grid]:
    """The grids of a published run that can be compared with one of ours."""
    wanted = (here.phase, here.metric, here.antithetic)
    every = grids(run, here.operator, TIMES)
    return [there for there in every if (there.phase, there.metric, there.antithetic) == wanted]


def _paired(here: Grid, there: Grid) -> _Published | None:
    """The published grid if it shares a shape, and a variant that is no baseline, with ours."""
    cases = {_geometry(case): case for case in there.cases}
    shapes = {_geometry(case) for case in here.cases} & set(cases)
    shared = [variant for variant in here.variants if variant in there.variants and not variant.baseline]
    return _Published(there, cases) if shapes and shared else None


def _block(
    here: Grid, others: Sequence[_Published], multiplier: Multiplier, notes: Footnotes
) -> Block | None:
    """Our multipliers beside the published ones, None if one side lacks the baseline."""
    others = [other for other in others if other.grid.reference(multiplier.mode)]
    if not others or not here.reference(multiplier.mode):
        return None
    shapes = {other_case for other in others for other_case in other.cases}
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
    other_batch = (
        "" if _batches(others[0].grid) <= _batches(here) else f" {_difference(here, others[0].grid)}"
    )
    title = f"{multiplier.title}, measured / {names}"
    return Block(title, f": {multiplier.formula}.{other_batch}", filled.table(number))


def _difference(here: Grid, there: Grid) -> str:
    """A warning that batch or dtype differ."""
    ours, theirs = (captions.conditions(grid, grid.cases).removesuffix(".") for grid in (here, there))
    return f"Not the same batch or number format: measured with {ours}, published with {theirs}."


def _geometry(case: Case) -> Case:
    return msgspec.structs.replace(case, members=1, repeats=1, dtype="any", antithetic=False)
