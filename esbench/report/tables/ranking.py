"""Tables of rankings: the variants of a case by n_eff per ms, and the best variant of each shape."""

from collections.abc import Callable, Sequence

import msgspec

from esbench.report import captions
from esbench.report.analysis.pivot import Grid, Trace, operators
from esbench.report.analysis.quality import EXACT, percent_of_members
from esbench.report.analysis.ranking import RankedVariant, Rankings, dense, rankings, recommended
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
from esbench.report.text import counted, one_line
from esbench.schema import DENSE, Case, Measurement, Run, Variant

RATE, RELATIVE_RATE, COST = "n_eff / ms", f"rate, x {DENSE}", "time, x base"
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
_N_EFF = (
    "n / (1 + kappa n / d) by the closed form of kappa where the fit does not contradict it, otherwise one "
    "over the mean of the replicates' reciprocals"
)
_KAPPA = "its closed form where the fit does not contradict it, otherwise the mean of the replicates"
_RELATIVE = f"n_eff over the median of the step, by that of {DENSE}"


def ranking_sections(run: Run, operator: str) -> list[Section]:
    """Return the rankings of an operator for the largest population of each shape, per timing method."""
    return [ranking_section(one, case) for one in rankings(run, operator) for case in one.largest]


def ranking_section(rankings: Rankings, case: Case, ranked: Sequence[RankedVariant] | None = None) -> Section:
    """Return the variants of a case ranked by n_eff per ms, with n_eff, times and memory.

    Args:
        rankings: the rankings of an operator.
        case: one of their cases.
        ranked: the variants to show, by default all.

    """
    every = rankings.of(case)
    ranked = every if ranked is None else ranked
    by_variant = {one.variant: one for one in ranked}
    reference, measured = dense(ranked), dense(every)
    missing = f"{measured.label} is not among the requested variants" if measured else ""
    notes = Footnotes()

    def cells(variant: Variant) -> dict[str, Cell | None]:
        columns = ranking_columns(rankings.grid, by_variant[variant], reference, notes, missing)
        return {heading: cell() for heading, cell in columns.items()}

    table = variants_table(
        case,
        list(by_variant),
        cells,
        lambda variant: by_variant[variant].skipped,
        notes,
    )
    first = next((one for one in ranked if one.rate is not None), None)
    tied = first.tied_with(ranked) if first else ""
    footnotes = [
        *notes,
        *([f"first, {first.label}: {tied}"] if first and tied else []),
        *([_EXACT_NOTE] if any(one.is_exact for one in ranked) else []),
    ]
    block = Block("n_eff per ms (effective population per ms)", _RATE_NOTE, table)
    return case_section(rankings.grid, case, "n_eff per ms", block, footnotes, captions.method(rankings.grid))


def rate_cell(one: RankedVariant, trace: Trace | None = None) -> Cell | None:
    """Return the rate of a variant, with "at least" if only a bound is known; None without a rate."""
    if one.rate is None:
        return None
    if one.is_exact:
        return Cell(EXACT)
    low, high = one.rate_interval or (None, None)
    return number_cell(CellNumber(RATE_PER_MS, one.rate, trace, low, high, kind="number"), _template(one))


def ranking_columns(
    grid: Grid,
    one: RankedVariant,
    reference: RankedVariant | None,
    notes: Footnotes,
    no_reference: str = "",
) -> dict[str, Callable[[], Cell | None]]:
    """Return, by heading, functions that build the cells of a variant and number its footnotes.

    Args:
        grid: the times of a step.
        one: the variant.
        reference: dense noise, which rates are shown as multiples of, None if it is not shown.
        notes: the footnotes to add to.
        no_reference: why dense noise is not shown although it was measured.

    """

    def trace(rule: str, *rows: Measurement | None) -> Trace | None:
        known = tuple(row for row in rows if row)
        has_own = any(row.variant == one.variant for row in known)
        return Trace(grid.run.header.run_id, rule, known) if has_own else None

    def relative_rate() -> Cell | None:
        if one.is_exact:
            return Cell(EXACT)
        if one.rate is None:
            return None
        if reference is None or reference.rate is None:
            why_not = no_reference if reference is None else _no_rate(reference)
            return Cell(notes.mark(NOTHING, why_not)) if why_not else None
        if single := next((each for each in (reference, one) if each.is_single), None):
            return Cell(notes.mark(NOTHING, _single_round(single)))
        times = one.times(reference)
        if times is None:
            return None
        origin = trace(_RELATIVE, one.step, *one.law, reference.step, *reference.law)
        return number_cell(CellNumber(RATE_MULTIPLIER, times, origin, kind="multiple"), _template(one))

    def most_bytes(row: Measurement | None) -> Cell | None:
        return number_cell(median_number(grid.run, row)) if row else None

    return {
        RATE: lambda: rate_cell(one, trace("n_eff over the median of the step in ms", one.step, *one.law)),
        RELATIVE_RATE: relative_rate,
        "n_eff": lambda: n_eff_cell("effective_members", one.effective, trace(_N_EFF, *one.law)),
        INTERVAL: lambda: n_eff_interval_cell(one.effective),
        "n_eff / n (%)": lambda: _percent(one, trace(f"n_eff over the members, {_N_EFF}", *one.law)),
        "kappa": lambda: estimate_cell("kappa", one.kappa, trace(_KAPPA, *one.law)),
        "step (ms)": lambda: _step(grid, one, notes),
        COST: lambda: _cost(grid, one, notes),
        "noise (MB)": lambda: most_bytes(one.noise),
        "peak (MB)": lambda: most_bytes(one.peak),
    }


def _percent(one: RankedVariant, trace: Trace | None) -> Cell | None:
    if one.effective is None:
        return None
    members = one.case.members
    text = percent_of_members(one.effective, members).removesuffix(" %")
    if one.is_exact or text.startswith("about"):
        return Cell(text)
    is_bound = text.startswith("at least")
    value = one.effective.low if is_bound else one.effective.value
    low, high = (100 * end / members if end else None for end in n_eff_ends(one.effective))
    number = CellNumber(EFFECTIVE_PERCENT, 100 * value / members, trace, low, high, kind="number")
    return number_cell(number, "at least {}" if is_bound else "{}")


def _step(grid: Grid, one: RankedVariant, notes: Footnotes) -> Cell | None:
    if one.step is None or one.step_ns is None:
        return None
    number = median_number(grid.run, one.step)
    if number.half is not None:
        return number_cell(number)
    note = f"{counted(len(one.step.samples), 'round')} of the step: too few for an interval"
    return number_cell(number, notes.mark("{}", note))


def _cost(grid: Grid, one: RankedVariant, notes: Footnotes) -> Cell | None:
    if one.multiplier and one.is_single:
        return Cell(notes.mark(NOTHING, _single_round(one)))
    number = multiple(grid, one.variant, one.case, TIME)
    return number_cell(number) if number else None


def _no_rate(one: RankedVariant) -> str:
    why = one_line(one.skipped.reason) if one.skipped else "the run lacks its step or its quality"
    return f"{one.label} has no rate: {why}"


def _single_round(one: RankedVariant) -> str:
    why = f" ({one_line(one.step.stop)})" if one.step and one.step.stop else ""
    return f"no multiple: {one.label} has a single round of its step{why}"


def _template(one: RankedVariant) -> str:
    return "at least {}" if one.effective and one.effective.is_bound else "{}"


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
    if reference is None or reference.times(reference) is None:
        return []
    candidates = [
        one for one in ranked if not one.variant.baseline and (one.is_exact or one.times(reference))
    ]
    rows = []
    for best in recommended(candidates):
        if best != reference:
            columns = ranking_columns(ranking.grid, best, reference, notes)
            figures = (columns[name]() for name in (RELATIVE_RATE, COST, "step (ms)", "peak (MB)"))
            filled = (cell or notes.missing() for cell in figures)
            rows.append((Cell(f"{case.members:,}"), Cell(best.variant.name), *filled))
    return rows
