"""Tables of measured multipliers next to published ones, for variants and shapes that both have."""

from collections.abc import Sequence

import msgspec

from esbench.report import captions
from esbench.report.analysis.pivot import TIMES, Grid, grids, operators
from esbench.report.tables.measured import SPEED, TIME, GridTable, Multiplier, multiple
from esbench.report.tables.table import Block, Cell, CellNumber, Footnotes, Section
from esbench.schema import Case, Measurement, Run, Variant


def published_sections(measured: Run, *published: Run) -> list[Section]:
    """Return the tables of each operator and phase with published variants and shapes.

    Batch and dtype may differ; the captions say both.
    """
    every = [grid for operator in operators(measured) for grid in grids(measured, operator, TIMES)]
    return [section for here in every if (section := _section(here, published))]


def _section(here: Grid, published: Sequence[Run]) -> Section | None:
    published_grids = [
        there
        for run in published
        for there in grids(run, here.operator, TIMES)
        if _is_comparable(here, there)
    ]
    notes = Footnotes()
    blocks = [
        block
        for their_grid in published_grids
        for multiplier in (SPEED, TIME)
        if (block := _block(here, their_grid, multiplier, notes))
    ]
    if not blocks:
        return None
    others_conditions = (
        f"Published: {captions.origin(their_grid.run)} {captions.conditions(their_grid, their_grid.cases)}"
        for their_grid in published_grids
    )
    shown = [case for case in here.cases if any(_like(case, their_grid) for their_grid in published_grids)]
    return Section(
        title=f"{here.operator}, {here.phase}: measured / published",
        origin=f"Measured: {captions.origin(here.run)} {captions.conditions(here, shown)}",
        conditions=" ".join(others_conditions),
        blocks=tuple(blocks),
        footnotes=tuple(notes),
    )


def _is_comparable(here: Grid, there: Grid) -> bool:
    """Return whether two grids show the same value and share a shape and a variant."""
    return (
        (there.phase, there.metric, there.antithetic) == (here.phase, here.metric, here.antithetic)
        and any(_like(case, there) for case in here.cases)
        and any(variant in there.variants for variant in here.variants if not variant.baseline)
    )


def _block(here: Grid, there: Grid, multiplier: Multiplier, notes: Footnotes) -> Block | None:
    """Return our multipliers next to the published ones, None if one side lacks the baseline."""
    if not there.reference(multiplier.mode) or not here.reference(multiplier.mode):
        return None
    filled = GridTable(
        here,
        tuple(variant for variant in here.variants if variant in there.variants),
        tuple(case for case in here.cases if _like(case, there)),
        notes,
    )

    def cell(variant: Variant, case: Case, _: Measurement) -> Cell:
        like = _like(case, there)
        values = (
            multiple(here, variant, case, multiplier),
            multiple(there, variant, like, multiplier) if like else None,
        )
        absent = CellNumber(multiplier.name, None, kind="multiple")
        return Cell("{} / {}", tuple(value or absent for value in values))

    note = f": {multiplier.formula}."
    if not _batches(there) <= _batches(here):
        ours, theirs = (captions.conditions(grid, grid.cases).removesuffix(".") for grid in (here, there))
        note += f" Not the same batch or number format: measured with {ours}, published with {theirs}."
    title = f"{multiplier.title}, measured / {captions.device(there.run)}"
    return Block(title, note, filled.table(cell))


def _batches(grid: Grid) -> set[tuple[str, int, int]]:
    return {(case.dtype, case.members, case.repeats) for case in grid.cases}


def _like(case: Case, grid: Grid) -> Case | None:
    """Return the case of a grid that differs from this one at most in batch and dtype."""
    return next((candidate for candidate in grid.cases if _geometry(candidate) == _geometry(case)), None)


def _geometry(case: Case) -> Case:
    return msgspec.structs.replace(case, members=1, repeats=1, dtype="any", antithetic=False)
