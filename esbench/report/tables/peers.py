"""Tables of suite ``peers``: generations of esbench beside those of other libraries."""

from esbench.report import captions
from esbench.report.analysis.peers import NETWORKS, Generations, evaluations, heading, name
from esbench.report.tables.measured import median_number
from esbench.report.tables.table import Block, Cell, CellNumber, Footnotes, Section, Table, number_cell
from esbench.schema import QUALITY, Case, Measurement, Run, Skipped, Variant
from esbench.stats import median
from esbench.units import format_cell

MEMORY = ("process_peak_bytes", "fresh process")
SET_UP = ("set_up_ns", "first generation")
N_EFF = ("n_eff_count", "quality law")
CORNER = "evaluations x rows"
TIMED = 3
"""Columns of times in the summary, of the largest populations."""


def peer_sections(run: Run) -> list[Section]:
    """Return the times of all variants on all cases, and what else was measured; nothing for other runs."""
    return [
        _section(generations, f"A generation of {network}")
        for operator, (network, _) in NETWORKS.items()
        if (generations := Generations.of(run, operator))
    ]


def _section(generations: Generations, title: str) -> Section:
    notes, run = Footnotes(), generations.grid.run
    blocks = [_times(generations, notes), _multiples(generations, notes), _others(generations, notes)]
    return Section(
        title=title,
        origin=captions.origin(run),
        conditions=captions.conditions(generations.grid, generations.cases),
        blocks=tuple(blocks),
        footnotes=tuple(notes),
        run_id=run.header.run_id,
    )


def summary(run: Run) -> Section | None:
    """Return the variant of each library that is fastest with the most evaluations; None for other runs."""
    generations = Generations.of(run)
    if generations is None or generations.ours is None:
        return None
    cases = generations.sweep[-TIMED:]
    notes, labels, rows = Footnotes(), [], []
    best = generations.best_of_libraries(cases)
    reference = best[0]
    middle = cases[len(cases) // 2]
    for variant in best:
        labels.append(name(variant))
        cells = [_time_cell(generations, variant, case, notes) for case in cases]
        cells.append(_ratio_cell(generations, variant, reference, middle))
        cells.append(_per_ms_cell(generations, variant, middle))
        cells.append(_quality_cell(generations, variant, MEMORY))
        cells.append(_loss_cell(generations, variant, notes))
        rows.append(tuple(cells))
    headings = [f"{evaluations(case):,} (ms)" for case in cases]
    at = f"{evaluations(middle):,}"
    headings += [f"x first row at {at}", f"n_eff per ms at {at}", "memory (MB)", "loss"]
    corner = f"evaluations of {middle.repeats // 2} rows"
    table = Table(corner, tuple(headings), tuple(labels), tuple(rows))
    return Section(
        title="",
        origin=captions.origin(run),
        conditions="",
        blocks=(Block("", "", table),),
        footnotes=tuple(notes),
        run_id=run.header.run_id,
    )


def _times(generations: Generations, notes: Footnotes) -> Block:
    cases, variants = generations.cases, generations.grid.variants
    cells = [tuple(_time_cell(generations, variant, case, notes) for case in cases) for variant in variants]
    labels = [name(variant) for variant in variants]
    cells.append(tuple(Cell(_winner(generations, case)) for case in cases))
    table = Table(CORNER, tuple(map(heading, cases)), (*labels, "fastest"), tuple(cells))
    return Block("Time (ms)", ": the median of a generation.", table)


def _winner(generations: Generations, case: Case) -> str:
    fastest = generations.fastest(case)
    return name(fastest[0]) if fastest else ""


def _multiples(generations: Generations, notes: Footnotes) -> Block:
    ours, cases = generations.ours, generations.cases
    variants = [variant for variant in generations.grid.variants if variant != ours]
    cells = [
        tuple(
            _ratio_cell(generations, variant, ours, case) if ours else notes.missing_cell() for case in cases
        )
        for variant in variants
    ]
    labels = tuple(name(variant) for variant in variants)
    table = Table(CORNER, tuple(map(heading, cases)), labels, tuple(cells))
    reference = name(ours) if ours else "esbench"
    ratios = [
        ratio
        for variant in variants
        for case in cases
        if ours and (ratio := generations.ratio(variant, ours, case))
    ]
    methods = captions.ratio_methods(ratios)
    note = f": time(variant) / time({reference}), below 1 the variant is faster{methods}."
    return Block(f"Multiple of {reference}", note, table)


def _others(generations: Generations, notes: Footnotes) -> Block:
    cases, variants = generations.sweep, generations.grid.variants
    columns = {
        f"n_eff per ms, {evaluations(case):,}": [
            _per_ms_cell(generations, variant, case) for variant in variants
        ]
        for case in cases
    }
    columns["memory (MB)"] = [_quality_cell(generations, variant, MEMORY) for variant in variants]
    columns["evaluations per GB"] = [_per_gb_cell(generations, variant) for variant in variants]
    columns["loss"] = [_loss_cell(generations, variant, notes) for variant in variants]
    columns["first generation (ms)"] = [
        _quality_cell(generations, variant, SET_UP, cases[-1]) for variant in variants
    ]
    # Memory and losses are those of one network.
    shown = {heading: cells for heading, cells in columns.items() if any(cell.text() for cell in cells)}
    labels = tuple(map(name, variants))
    table = Table(CORNER, tuple(shown), labels, tuple(zip(*shown.values(), strict=True)))
    return Block("Quality, memory and set-up", "", table)


def _time_cell(generations: Generations, variant: Variant, case: Case, notes: Footnotes) -> Cell:
    row = generations.at(variant, case)
    if row is None:
        return notes.missing_cell()
    if isinstance(row, Skipped):
        return notes.skipped_cell(row)
    is_single = row.stop.startswith("one sample")
    return number_cell(median_number(row), notes.mark("{}", row.stop) if is_single else "{}")


def _ratio_cell(generations: Generations, variant: Variant, other: Variant, case: Case) -> Cell:
    ratio = generations.ratio(variant, other, case)
    if ratio is None:
        return Cell("")
    rows = [row for each in (variant, other) if isinstance(row := generations.at(each, case), Measurement)]
    return number_cell(
        CellNumber("time_multiplier", ratio.value, tuple(rows), ratio.low, ratio.high, kind="multiple")
    )


def _per_ms_cell(generations: Generations, variant: Variant, case: Case) -> Cell:
    n_eff, row = generations.quality(variant, case, *N_EFF), generations.at(variant, case)
    if variant.mode == "base" or n_eff is None or not isinstance(row, Measurement):
        return Cell("")
    members, time_ns = median(n_eff), median(row)
    if members is None or not time_ns:
        return Cell("")
    return number_cell(
        CellNumber("effective_members_per_ms", members / (time_ns / 1e6), (row, n_eff), kind="number")
    )


def _per_gb_cell(generations: Generations, variant: Variant) -> Cell:
    row = generations.anywhere(variant, *MEMORY)
    peak_bytes = median(row) if row else None
    if row is None or not peak_bytes or variant.mode == "base":
        return Cell("")
    per_gb = evaluations(row.case) / (peak_bytes / 1e9)
    return number_cell(CellNumber("evaluations_per_gb", per_gb, (row,), kind="number"))


def _quality_cell(
    generations: Generations, variant: Variant, metric: tuple[str, str], case: Case | None = None
) -> Cell:
    row = generations.quality(variant, case, *metric) if case else None
    row = row or generations.anywhere(variant, *metric)
    return Cell(format_cell(row.metric, median(row))) if row else Cell("")


def _loss_cell(generations: Generations, variant: Variant, notes: Footnotes) -> Cell:
    """Return the loss after training, or the reason if the quality of the variant failed."""
    rows = [
        row
        for row in generations.grid.run.rows
        if (row.variant, row.phase) == (variant, QUALITY) and row.case in generations.cases
    ]
    for row in rows:
        if isinstance(row, Measurement) and row.metric == "loss" and row.method != "start":
            return number_cell(CellNumber("loss", median(row), (row,), kind="number"))
    failed = [row for row in rows if isinstance(row, Skipped) and row.status == "failed"]
    return notes.skipped_cell(failed[0]) if failed else Cell("")
