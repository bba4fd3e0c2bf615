"""Tables of rankings: the variants of a case by n_eff per ms, and the best variant of each shape."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec

from esbench.report import captions
from esbench.report.analysis.pivot import Grid, operators
from esbench.report.analysis.quality import ABOUT_ALL, EXACT, MORE_THAN_DENSE, percent_of_members
from esbench.report.analysis.ranking import RankedVariant, Rankings, dense, rankings, recommended, tied
from esbench.report.tables.measured import TIME, median_number, multiple
from esbench.report.tables.table import (
    EFFECTIVE_PERCENT,
    INTERVAL,
    NOTHING,
    RATE_MULTIPLIER,
    RATE_PER_MS,
    Block,
    Cell,
    CellNumber,
    Footnotes,
    Section,
    Table,
    case_section,
    estimate_cell,
    n_eff_cell,
    n_eff_ends,
    n_eff_interval_cell,
    number_cell,
    variants_table,
)
from esbench.schema import DENSE, Case, Measurement, Run, Variant
from esbench.text import first_names, one_line, pluralize
from esbench.units import format_number

RATE, RELATIVE_RATE, COST = "n_eff / ms", f"rate, x {DENSE}", "time, x base"
KEPT, STEP, PEAK_MEMORY = "n_eff / n (%)", "step (ms)", "peak (MB)"
BEST_TITLE = "Which scheme at which shape"
_RATE_NOTE = (
    ": n_eff independent members give as good a gradient; a step is everything that an update takes. Sorted; "
    f"multiples of {DENSE} and of base in the same run. Kappa is that of the closed form, which has no "
    "interval, unless the fit contradicts it; of a fit the interval is that of the reciprocals of n_eff, in "
    "which the law is linear."
)
_EXACT_NOTE = (
    f"{EXACT}: 1 + kappa n / d is 0 by the closed form: the gradient of a linear fitness has no error; these "
    "variants come first, sorted by time"
)
_MORE_NOTE = (
    f"{MORE_THAN_DENSE}: n_eff is above the members: the gradient is better than that of n independent "
    "members"
)
_MARK = re.compile(r" \[\d+\]$")
"""The number of a footnote at the end of a cell."""


def ranking_sections(run: Run, operator: str, history: Iterable[Run] = ()) -> list[Section]:
    """Return the rankings of an operator for the largest population of each shape, per timing method."""
    by_method = rankings(run, operator, history)
    return [ranking_section(ranking, case) for ranking in by_method for case in ranking.largest]


def ranking_section(rankings: Rankings, case: Case, ranked: Sequence[RankedVariant] | None = None) -> Section:
    """Return the variants of a case ranked by n_eff per ms, with n_eff, times and memory.

    ``ranked`` are the variants to show, by default all.
    """
    all_ranked = rankings.of(case)
    ranked = all_ranked if ranked is None else ranked
    by_variant = {entry.variant: entry for entry in ranked}
    reference, measured_dense = dense(ranked), dense(all_ranked)
    missing = f"{measured_dense.label} is not among the requested variants" if measured_dense else ""
    notes = Footnotes()

    def cells(variant: Variant) -> dict[str, Cell | None]:
        columns = ranking_columns(rankings.grid, by_variant[variant], reference, notes, missing)
        return {heading: cell() for heading, cell in columns.items()}

    table = variants_table(case, list(by_variant), cells, lambda variant: by_variant[variant].skipped, notes)
    first = next((entry for entry in ranked if entry.rate is not None), None)
    ties = [entry.label for entry in tied(first, ranked)] if first else []
    wasteful = [entry for entry in ranked if entry.wastes_members]
    footnotes = [
        *notes,
        *([f"first, {first.label}: tied with {first_names(ties)}"] if first and ties else []),
        *([_wasted_note(case, wasteful)] if wasteful else []),
        *([_EXACT_NOTE] if any(entry.is_exact for entry in ranked) else []),
        *([_MORE_NOTE] if any(cell.text() == MORE_THAN_DENSE for row in table.cells for cell in row) else []),
    ]
    block = Block("n_eff per ms (effective population per ms)", _RATE_NOTE, table)
    return case_section(rankings.grid, case, "n_eff per ms", block, footnotes, captions.method(rankings.grid))


def _wasted_note(case: Case, ranked: Sequence[RankedVariant]) -> str:
    """Return a note on variants whose members share most of their noise, fewest kept first."""
    kept = sorted((entry.effective.value, entry.label) for entry in ranked if entry.effective)
    names = ", ".join(f"{label} {format_number(n_eff)}" for n_eff, label in kept)
    return f"n_eff below a tenth of the {case.members:,} members: {names}"


def _ranked_cell(number: CellNumber, template: str = "{}") -> Cell:
    """Return a cell with at least three digits: rounded further, sorted numbers would look unsorted."""
    return number_cell(replace(number, least_digits=3), template)


def rate_cell(ranked: RankedVariant, rows: tuple[Measurement, ...] = ()) -> Cell | None:
    """Return the cell of n_eff per ms: ``exact``, ``at least 12`` for a lower bound, None without a rate."""
    if ranked.rate is None:
        return None
    if ranked.is_exact:
        return Cell(EXACT)
    low, high = ranked.rate_interval or (None, None)
    return _ranked_cell(
        CellNumber(RATE_PER_MS, ranked.rate, rows, low, high, kind="number"), _bound_template(ranked)
    )


def ranking_columns(
    grid: Grid,
    ranked: RankedVariant,
    reference: RankedVariant | None,
    notes: Footnotes,
    no_reference: str = "",
) -> dict[str, Callable[[], Cell | None]]:
    """Return the columns of a ranking: heading -> function that builds a cell and adds its footnotes.

    ``reference`` is dense noise, which rates are shown as multiples of; ``no_reference`` says why it is not
    shown although the run has it.
    """
    law = ranked.rows_of_law
    step_and_law = (*([ranked.step] if ranked.step else []), *law)

    def relative_rate() -> Cell | None:
        if ranked.is_exact:
            return Cell(EXACT)
        if ranked.rate is None:
            return None
        if reference is None or reference.rate is None:
            why_not = no_reference if reference is None else _why_no_rate(reference)
            return Cell(notes.mark(NOTHING, why_not)) if why_not else None
        if single := next((entry for entry in (reference, ranked) if entry.is_single), None):
            return Cell(notes.mark(NOTHING, _why_no_multiple(single)))
        gain = ranked.rate_over(reference)
        if gain is None:
            return None
        rows = (*step_and_law, *([reference.step] if reference.step else []), *reference.rows_of_law)
        return _ranked_cell(CellNumber(RATE_MULTIPLIER, gain, rows, kind="multiple"), _bound_template(ranked))

    def max_bytes(row: Measurement | None) -> Cell | None:
        return _ranked_cell(median_number(row)) if row else None

    return {
        RATE: lambda: rate_cell(ranked, step_and_law),
        RELATIVE_RATE: relative_rate,
        "n_eff": lambda: n_eff_cell("effective_members", ranked.effective, law),
        INTERVAL: lambda: n_eff_interval_cell(ranked.effective),
        KEPT: lambda: _percent_cell(ranked, law),
        "kappa": lambda: estimate_cell("kappa", ranked.kappa, law),
        STEP: lambda: _step_cell(ranked, notes),
        COST: lambda: _cost_cell(grid, ranked, notes),
        "noise (MB)": lambda: max_bytes(ranked.noise),
        PEAK_MEMORY: lambda: max_bytes(ranked.peak),
    }


def ranking_texts(
    grid: Grid, ranked: RankedVariant, reference: RankedVariant | None, notes: Footnotes | None = None
) -> dict[str, str]:
    """Return heading -> text of each column of a ranking, without footnotes; empty for a missing number."""
    columns = ranking_columns(grid, ranked, reference, notes or Footnotes())
    cells = {heading: cell() for heading, cell in columns.items()}
    texts = {heading: _MARK.sub("", cell.text()) if cell else "" for heading, cell in cells.items()}
    return {heading: "" if text == NOTHING else text for heading, text in texts.items()}


def _percent_cell(ranked: RankedVariant, rows: tuple[Measurement, ...]) -> Cell | None:
    if ranked.effective is None:
        return None
    members = ranked.case.members
    text = percent_of_members(ranked.effective, members)
    if text in {EXACT, ABOUT_ALL}:
        return Cell(text.removesuffix(" %"))
    is_bound = text.startswith("at least")
    value = ranked.effective.low if is_bound else ranked.effective.value
    low, high = (100 * end / members if end else None for end in n_eff_ends(ranked.effective))
    number = CellNumber(EFFECTIVE_PERCENT, 100 * value / members, rows, low, high, kind="number")
    if text == MORE_THAN_DENSE:
        return _ranked_cell(number, MORE_THAN_DENSE)  # exports have the number, tables only the text
    return _ranked_cell(number, "at least {}" if is_bound else "{}")


def _step_cell(ranked: RankedVariant, notes: Footnotes) -> Cell | None:
    """Return the time of a step, with a footnote if it has too few rounds for an interval."""
    if ranked.step is None or ranked.step_ns is None:
        return None
    number = median_number(ranked.step)
    if number.half is not None:
        return _ranked_cell(number)
    note = f"{pluralize(len(ranked.step.samples), 'round')} of the step: too few for an interval"
    return _ranked_cell(number, notes.mark("{}", note))


def _cost_cell(grid: Grid, ranked: RankedVariant, notes: Footnotes) -> Cell | None:
    if ranked.multiplier and ranked.is_single:
        return Cell(notes.mark(NOTHING, _why_no_multiple(ranked)))
    number = multiple(grid, ranked.variant, ranked.case, TIME)
    return _ranked_cell(number) if number else None


def _why_no_rate(ranked: RankedVariant) -> str:
    reason = one_line(ranked.skipped.reason) if ranked.skipped else "the run lacks its step or its quality"
    return f"{ranked.label} has no rate: {reason}"


def _why_no_multiple(ranked: RankedVariant) -> str:
    reason = f" ({one_line(ranked.step.stop)})" if ranked.step and ranked.step.stop else ""
    return f"no multiple: {ranked.label} has a single round of its step{reason}"


def _bound_template(ranked: RankedVariant) -> str:
    return "at least {}" if ranked.effective and ranked.effective.is_bound else "{}"


def best_schemes(runs: Sequence[Run], layers: Sequence[str], *, largest_only: bool) -> Section | None:
    """Return the best scheme of each shape of these operators, None if no run ranks dense noise.

    A row is a shape and population at which dense noise has a rate; with ``largest_only`` the largest of
    each shape. If the best scheme is exact, the best of the others follows in a second row. A case that
    several runs rank is taken from the first.
    """
    shown: dict[Case, tuple[Case, list[tuple[Cell, ...]]]] = {}
    notes = Footnotes()
    for run in runs:
        for operator in (name for name in operators(run) if name in layers):
            for ranking in rankings(run, operator)[:1]:
                for case in sorted(ranking.cases, key=lambda case: -case.members):
                    key = msgspec.structs.replace(case, members=1) if largest_only else case
                    if key not in shown and (rows := _best_rows(ranking, case, notes)):
                        shown[key] = case, rows
    if not shown:
        return None
    table = Table(
        corner="layer",
        headings=("members", "best scheme", "x dense noise", "x plain layer", "step (ms)", "memory (MB)"),
        labels=tuple(captions.layer(case) for case, rows in shown.values() for _ in rows),
        cells=tuple(row for _, rows in shown.values() for row in rows),
    )
    names = " and ".join(dict.fromkeys(captions.device(run) for run in runs))
    origin = f"Measured on {names}: runs {', '.join(run.header.run_id for run in runs)}."
    return Section(BEST_TITLE, origin, "", (Block("By n_eff per ms of a step", "", table),), tuple(notes))


def _best_rows(ranking: Rankings, case: Case, notes: Footnotes) -> list[tuple[Cell, ...]]:
    ranked = ranking.of(case)
    reference = dense(ranked)
    if reference is None or reference.rate_over(reference) is None:
        return []  # no variant can be shown as a multiple of dense noise
    schemes = (entry for entry in ranked if not entry.variant.baseline)
    candidates = [scheme for scheme in schemes if scheme.is_exact or scheme.rate_over(reference)]
    rows = []
    for best in recommended(candidates):
        if best != reference:
            columns = ranking_columns(ranking.grid, best, reference, notes)
            numbers = (columns[name]() for name in (RELATIVE_RATE, COST, STEP, PEAK_MEMORY))
            filled = (cell or notes.missing_cell() for cell in numbers)
            name = best.variant.name
            if best.wastes_members:
                name = notes.mark(name, _wasted_note(case, [best]))
            if tied_names := [entry.variant.name for entry in tied(best, candidates)]:
                name = notes.mark(name, f"tied with {first_names(tied_names)}: their intervals overlap")
            rows.append((Cell(f"{case.members:,}"), Cell(name), *filled))
    return rows
