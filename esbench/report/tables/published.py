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

    Batch, dtype and bias may differ; the captions say so.
    """
    all_grids = [grid for operator in operators(measured) for grid in grids(measured, operator, TIMES)]
    return [section for ours in all_grids if (section := _section(ours, published))]


def _section(ours: Grid, published: Sequence[Run]) -> Section | None:
    theirs_of_operator = (theirs for run in published for theirs in grids(run, ours.operator, TIMES))
    published_grids = [theirs for theirs in theirs_of_operator if _is_comparable(ours, theirs)]
    notes = Footnotes()
    pairs = [(theirs, multiplier) for theirs in published_grids for multiplier in (SPEED, TIME)]
    blocks = [block for pair in pairs if (block := _block(ours, *pair, notes))]
    if not blocks:
        return None
    their_conditions = (
        f"Published: {captions.origin(theirs.run)} {captions.conditions(theirs, theirs.cases)}"
        for theirs in published_grids
    )
    shown = [case for case in ours.cases if any(_matching_case(case, theirs) for theirs in published_grids)]
    return Section(
        title=f"{ours.operator}, {ours.phase}: measured / published",
        origin=f"Measured: {captions.origin(ours.run)} {captions.conditions(ours, shown)}",
        conditions=" ".join(their_conditions),
        blocks=tuple(blocks),
        footnotes=tuple(notes),
    )


def _is_comparable(ours: Grid, theirs: Grid) -> bool:
    """Return whether two grids show the same value and share a shape and a variant."""
    return (
        (theirs.phase, theirs.metric, theirs.antithetic) == (ours.phase, ours.metric, ours.antithetic)
        and any(_matching_case(case, theirs) for case in ours.cases)
        and any(variant in theirs.variants for variant in ours.variants if not variant.baseline)
    )


def _block(ours: Grid, theirs: Grid, multiplier: Multiplier, notes: Footnotes) -> Block | None:
    """Return our multipliers next to the published ones, None if one side lacks the baseline."""
    if not theirs.reference(multiplier.mode) or not ours.reference(multiplier.mode):
        return None
    variants = tuple(variant for variant in ours.variants if variant in theirs.variants)
    cases = tuple(case for case in ours.cases if _matching_case(case, theirs))
    filler = GridTable(ours, variants, cases, notes)

    def cell(variant: Variant, case: Case, _: Measurement) -> Cell:
        their_case = _matching_case(case, theirs)
        values = (
            multiple(ours, variant, case, multiplier),
            multiple(theirs, variant, their_case, multiplier) if their_case else None,
        )
        absent = CellNumber(multiplier.name, None, kind="multiple")
        return Cell("{} / {}", tuple(value or absent for value in values))

    note = f": {multiplier.formula}."
    if not _batches(theirs) <= _batches(ours):
        measured, published = (
            captions.conditions(grid, grid.cases).removesuffix(".") for grid in (ours, theirs)
        )
        note += f" Different conditions: measured with {measured}, published with {published}."
    title = f"{multiplier.title}, measured / {captions.device(theirs.run)}"
    return Block(title, note, filler.table(cell))


def _batches(grid: Grid) -> set[tuple[str, int, int, bool]]:
    return {(case.dtype, case.members, case.repeats, case.bias) for case in grid.cases}


def _matching_case(case: Case, grid: Grid) -> Case | None:
    """Return the case of a grid that differs from this one at most in batch, dtype and bias."""
    return next((candidate for candidate in grid.cases if _geometry(candidate) == _geometry(case)), None)


def _geometry(case: Case) -> Case:
    return msgspec.structs.replace(case, members=1, repeats=1, dtype="any", antithetic=False, bias=False)
