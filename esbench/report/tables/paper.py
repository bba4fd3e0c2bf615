"""Small tables for a paper: the best schemes of a layer by n_eff per ms, and by the time of its forward."""

from collections.abc import Iterator, Sequence

from esbench.report import captions
from esbench.report.analysis.pivot import UNMEASURED, Grid, latency_grids, operators
from esbench.report.analysis.ranking import RankedVariant, Rankings, best_of_each_scheme, dense, rankings
from esbench.report.tables.measured import SPEED, TIME, median_number, multiple
from esbench.report.tables.ranking import KEPT, PEAK_MEMORY, RATE, RELATIVE_RATE, STEP, ranking_columns
from esbench.report.tables.table import Block, Cell, Footnotes, Section, Table, case_section, number_cell
from esbench.schema import DENSE, Case, Run, Variant

_RANKED = {
    RATE: "n_eff / ms",
    RELATIVE_RATE: "x dense",
    KEPT: "kept (%)",
    STEP: STEP,
    PEAK_MEMORY: PEAK_MEMORY,
}
"""Columns of the ranking -> their headings in a paper."""


def paper_sections(run: Run, best: int) -> Iterator[Section]:
    """Yield at most two tables per operator, of the ``best`` schemes and dense noise.

    One ranks by n_eff per ms, one by the time of the forward, or of the first phase of a training workload.
    """
    for operator in operators(run):
        for ranking in rankings(run, operator)[:1]:
            if case := ranking.main:
                yield _rank_section(ranking, case, best)
        timed = latency_grids(run, operator)
        is_layer = any(grid.phase in {"sample", "forward"} for grid in timed)
        for grid in [grid for grid in timed if grid.phase == "forward" or not is_layer][:1]:
            if grid.method != UNMEASURED and (times := _time_section(grid, best)):
                yield times


def _rank_section(ranking: Rankings, case: Case, best: int) -> Section:
    ranked = ranking.of(case)
    reference, notes = dense(ranked), Footnotes()
    schemes = best_of_each_scheme(ranked)
    shown = [entry for index, entry in enumerate(schemes) if index < best or entry == reference]

    def cells(entry: RankedVariant) -> tuple[Cell, ...]:
        columns = ranking_columns(ranking.grid, entry, reference, notes)
        return tuple(columns[name]() or notes.missing_cell() for name in _RANKED)

    rows = [(entry.variant, cells(entry)) for entry in shown]
    return _section(ranking.grid, case, "n_eff per ms", list(_RANKED.values()), rows, notes)


def _time_section(grid: Grid, best: int) -> Section | None:
    """Return the times of the case with the most timed variants, of several such cases the largest."""
    by_case = {case: grid.by_median(case) for case in grid.cases}
    # The cases are sorted by size, and max takes the first of equals.
    case = max(reversed(grid.cases), key=lambda case: len(by_case[case]))
    times = by_case[case]
    fastest: dict[str, Variant] = {}
    for variant in times:
        if not variant.baseline:
            fastest.setdefault(variant.unfused_scheme, variant)
    if not fastest:
        return None
    shown = list(fastest.values())[:best]
    shown += [
        variant for variant in times if variant not in shown and (variant.baseline or variant.name == DENSE)
    ]
    notes = Footnotes()

    def cells(variant: Variant) -> tuple[Cell, ...]:
        multiples = (multiple(grid, variant, case, against) for against in (TIME, SPEED))
        filled = (number_cell(number) if number else notes.missing_cell() for number in multiples)
        return number_cell(median_number(times[variant])), *filled

    headings = ["time (ms)", "time, x base", "speed, x naive"]
    rows = [(variant, cells(variant)) for variant in shown]
    return _section(grid, case, f"time of the {grid.phase}", headings, rows, notes)


def _section(  # noqa: PLR0913, PLR0917  # the parts of a table
    grid: Grid,
    case: Case,
    subject: str,
    headings: Sequence[str],
    rows: Sequence[tuple[Variant, tuple[Cell, ...]]],
    notes: Footnotes,
) -> Section:
    names, cells = zip(*((variant.name, cells) for variant, cells in rows), strict=True)
    block = Block(f"{captions.layer(case)}: {subject}", "", Table("scheme", tuple(headings), names, cells))
    return case_section(grid, case, subject, block, notes)
