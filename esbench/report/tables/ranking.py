"""Tables of rankings: the variants of a case by n_eff per ms, and the best variant of each shape."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from esbench.report import captions
from esbench.report.analysis.pivot import PEAK, Trace, headings, operators
from esbench.report.analysis.quality import EXACT, percent_of_members
from esbench.report.analysis.ranking import DENSE, NOISE, RankedVariant, Rankings, dense, rankings
from esbench.report.tables.measured import TIME, multiple, reading
from esbench.report.tables.table import (
    EFFECTIVE_PERCENT,
    INTERVAL,
    NOTHING,
    RATE_MULTIPLIER,
    RATE_PER_MS,
    Block,
    Cell,
    Column,
    Footnotes,
    Reading,
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
from esbench.schema import Case, Measurement, Run
from esbench.stats import median
from esbench.units import format_number

RATE, RELATIVE_RATE, COST = "n_eff / ms", f"rate, x {DENSE}", "time, x base"
BEST_TITLE = "Which scheme at which shape"
_TIED = "≈"
_BEST_COLUMNS = (RATE, RELATIVE_RATE, COST, "step (ms)", "peak (MB)")
_RATE_NOTE = (
    f": n_eff independent members give as good a gradient, and a step is all that one update takes. Sorted; "
    f"multiples of {DENSE} and of base in the same run. Kappa is that of the closed form, which has no "
    "interval, unless the fit contradicts it; of a fit the interval is that of the reciprocals of n_eff, in "
    "which the law is linear."
)
_EXACT_NOTE = (
    f"{EXACT}: 1 + kappa n / d is 0 by the closed form: the gradient of a linear fitness without error, "
    "which no number of independent members equals; before all others, by time"
)
_BEST_NOTE = (
    ": by n_eff per ms of a whole step (effective population per ms), what it costs, and the first of "
    f"another scheme, with {_TIED} if the two are tied within their intervals. Multiples of the rate of "
    f"{DENSE} (dense noise), more is better, and of the time of base (the plain layer, which learns by "
    f"backpropagation), less is better, in the same run. {EXACT}: a linear fitness's gradient without error."
)
_N_EFF = (
    "n / (1 + kappa n / d) by the closed form of kappa where the fit does not contradict it, otherwise one "
    "over the mean of the replicates' reciprocals"
)
_KAPPA = "its closed form where the fit does not contradict it, otherwise the mean of the replicates"
_RELATIVE = f"n_eff over the median of the step, by that of {DENSE}"


def ranking_sections(run: Run, operator: str) -> list[Section]:
    """The rankings of an operator, each shape with its largest population, by each method of timing."""
    return [ranking_section(one, case) for one in rankings(run, operator) for case in one.largest]


def ranking_section(rankings: Rankings, case: Case, ranked: Sequence[RankedVariant] | None = None) -> Section:
    """The variants of a case by n_eff per ms, with what the rate is made of.

    Args:
        rankings: the rankings of an operator.
        case: one of their cases.
        ranked: the variants to show, by default all.

    """
    ranked = rankings.of(case) if ranked is None else ranked
    by_variant = {one.variant: one for one in ranked}
    notes = Footnotes()
    columns = [
        Column(heading, lambda variant, cell=cell: cell(by_variant[variant]))  # type: ignore[misc]  # bound now
        for heading, cell in RankingCells(rankings, case, dense(ranked), notes).columns
    ]
    table = variants_table(
        case, list(by_variant), columns, lambda variant: by_variant[variant].skipped, notes
    )
    first = next((one for one in ranked if one.rate is not None), None)
    tied = first.tied_with(ranked) if first else ""
    footnotes = [
        *notes,
        *([f"first, {first.label}: {tied}"] if first and tied else []),
        *([_EXACT_NOTE] if any(one.is_exact for one in ranked) else []),
        *rankings.qualities.repeated_rows(case),
    ]
    block = Block("n_eff per ms (effective population per ms)", _RATE_NOTE, table)
    return case_section(rankings.grid, case, "n_eff per ms", block, footnotes, captions.method(rankings.grid))


def rate_text(one: RankedVariant) -> str:
    """The rate of a variant, with "at least" if only a bound is known."""
    if one.is_exact:
        return EXACT
    least = "at least " if one.effective and one.effective.is_bound else ""
    between = one.rate_interval
    half = max(between[1] - one.rate, one.rate - between[0]) if between and one.rate else None
    return f"{least}{format_number(one.rate, half)}"


class RankingCells:
    """The cells of a ranked variant, by column."""

    def __init__(
        self, rankings: Rankings, case: Case, reference: RankedVariant | None, notes: Footnotes
    ) -> None:
        """Take the rankings, one of their cases, the variant to compare with, and the footnotes to add to."""
        self._rankings, self._case, self._reference, self._notes = rankings, case, reference, notes
        self._no_reference = _no_reference(rankings, case, reference)
        self.columns: list[tuple[str, Callable[[RankedVariant], Cell | None]]] = [
            (RATE, self._rate),
            (RELATIVE_RATE, self._relative_rate),
            ("n_eff", self._n_eff),
            (INTERVAL, lambda one: n_eff_interval_cell(one.effective)),
            ("n_eff / n (%)", self._percent),
            ("kappa", self._kappa),
            ("step (ms)", self._step),
            (COST, self._cost),
            ("noise (MB)", partial(self._most, metric=NOISE)),
            ("peak (MB)", partial(self._most, metric=PEAK)),
        ]

    def _rate(self, one: RankedVariant) -> Cell | None:
        if one.rate is None:
            return None
        if one.is_exact:
            return Cell(EXACT)
        low, high = one.rate_interval or (None, None)
        trace = self._trace(one, "n_eff over the median of the step in ms", self._rows_of_rate(one))
        return number_cell(Reading(RATE_PER_MS, one.rate, trace, low, high, kind="number"), _template(one))

    def _relative_rate(self, one: RankedVariant) -> Cell | None:
        if one.is_exact:
            return Cell(EXACT)
        if one.rate is None or (self._reference is None and not self._no_reference):
            return None
        if self._no_reference or self._reference is None:
            return Cell(self._notes.mark(NOTHING, self._no_reference))
        if single := next((each for each in (self._reference, one) if each.is_single), None):
            return Cell(self._notes.mark(NOTHING, self._single_round(single)))
        times = one.times(self._reference)
        if times is None:
            return None
        rows = (*self._rows_of_rate(one), *self._rows_of_rate(self._reference))
        trace = self._trace(one, _RELATIVE, rows)
        return number_cell(Reading(RATE_MULTIPLIER, times, trace, kind="multiple"), _template(one))

    def _n_eff(self, one: RankedVariant) -> Cell | None:
        return n_eff_cell(
            "effective_members", one.effective, self._trace(one, _N_EFF, self._rows_of_law(one))
        )

    def _percent(self, one: RankedVariant) -> Cell | None:
        if one.effective is None:
            return None
        text = percent_of_members(one.effective, self._case.members).removesuffix(" %")
        if one.is_exact or text.startswith("about"):
            return Cell(text)
        is_bound = text.startswith("at least")
        value = one.effective.low if is_bound else one.effective.value
        low, high = (100 * end / self._case.members if end else None for end in n_eff_ends(one.effective))
        trace = self._trace(one, f"n_eff over the members, {_N_EFF}", self._rows_of_law(one))
        shown = Reading(EFFECTIVE_PERCENT, 100 * value / self._case.members, trace, low, high, kind="number")
        return number_cell(shown, "at least {}" if is_bound else "{}")

    def _kappa(self, one: RankedVariant) -> Cell | None:
        return estimate_cell("kappa", one.kappa, self._trace(one, _KAPPA, self._rows_of_law(one)))

    def _step(self, one: RankedVariant) -> Cell | None:
        row = self._rankings.step(one.variant, self._case)
        if row is None or median(row) is None:
            return None
        shown = reading(self._rankings.grid.run, row)
        if shown.half is not None:
            return number_cell(shown)
        note = f"{counted(len(row.samples), 'round')} of the step: too few for an interval"
        return number_cell(shown, self._notes.mark("{}", note))

    def _cost(self, one: RankedVariant) -> Cell | None:
        if one.multiplier and one.is_single:
            return Cell(self._notes.mark(NOTHING, self._single_round(one)))
        shown = multiple(self._rankings.grid, one.variant, self._case, TIME)
        return number_cell(shown) if shown else None

    def _most(self, one: RankedVariant, metric: str) -> Cell | None:
        row = self._rankings.most(one.variant, self._case, metric)
        return number_cell(reading(self._rankings.grid.run, row)) if row else None

    def _single_round(self, one: RankedVariant) -> str:
        row = self._rankings.step(one.variant, self._case)
        why = f" ({one_line(row.stop)})" if row and row.stop else ""
        return f"no multiple: {one.label} has a single round of its step{why}"

    def _rows_of_law(self, one: RankedVariant) -> tuple[Measurement, ...]:
        return self._rankings.qualities.rows_of_law(one.variant, self._case)

    def _rows_of_rate(self, one: RankedVariant) -> tuple[Measurement, ...]:
        step = self._rankings.step(one.variant, self._case)
        return (*([step] if step else []), *self._rows_of_law(one))

    def _trace(self, one: RankedVariant, rule: str, rows: tuple[Measurement, ...]) -> Trace | None:
        has_own = any(row.variant == one.variant for row in rows)
        return Trace(self._rankings.grid.run.header.run_id, rule, rows) if has_own else None


def _template(one: RankedVariant) -> str:
    return "at least {}" if one.effective and one.effective.is_bound else "{}"


def _no_reference(rankings: Rankings, case: Case, reference: RankedVariant | None) -> str:
    """Why there is no multiple of dense noise, if the run has dense noise; else empty."""
    if reference is None:
        known = dense(rankings.of(case))
        return f"{known.label} is not among those that were asked for" if known else ""
    if reference.rate is not None:
        return ""
    why = one_line(reference.skipped.reason) if reference.skipped else "the run lacks its step or its quality"
    return f"{reference.label} has no rate: {why}"


def best_of_each_shape(runs: Sequence[Run], layers: Sequence[str] = ("Linear", "Conv2d")) -> Section | None:
    """The best variant of each shape and population of these operators, None if no run ranks any.

    A shape that several runs rank is taken from the first of them. Baselines are left out.
    """
    found: dict[tuple[str, Case], tuple[Rankings, list[RankedVariant]]] = {}
    for run in runs:
        for operator in (name for name in operators(run) if name in layers):
            for ranking in rankings(run, operator):
                for case in ranking.cases:
                    found.setdefault((ranking.grid.method, case), (ranking, ranking.of(case)))
    found = {key: value for key, value in found.items() if _candidates(value[1])}
    if not found:
        return None
    shapes = [msgspec.structs.replace(case, members=1) for _, case in found]
    names = dict(zip(dict.fromkeys(shapes), headings(dict.fromkeys(shapes)), strict=True))
    methods = list(dict.fromkeys(method for method, _ in found))
    notes = Footnotes()
    table = Table(
        corner="layer",
        headings=("members", "first", *_BEST_COLUMNS, "then"),
        labels=tuple(
            f"{case.operator} {names[case]}" + (f", {method}" if len(methods) > 1 else "")
            for case, (method, _) in zip(shapes, found, strict=True)
        ),
        cells=tuple(
            tuple(_best_row(ranking, ranked, case, notes)) for (_, case), (ranking, ranked) in found.items()
        ),
    )
    shown = {ranking.grid.run.header.run_id for ranking, _ in found.values()}
    dtypes = " and ".join(dict.fromkeys(case.dtype for _, case in found))
    timed = "" if methods == ["host"] else f", method {' and '.join(methods)}"
    return Section(
        title=BEST_TITLE,
        origin=" ".join(captions.origin(run) for run in runs if run.header.run_id in shown),
        conditions=f"{dtypes}, 1 row per member{timed}.",
        blocks=(Block("The first of each", _BEST_NOTE, table),),
        footnotes=tuple(notes),
    )


def _best_row(
    rankings: Rankings, ranked: Sequence[RankedVariant], case: Case, notes: Footnotes
) -> list[Cell]:
    """The population, the best variant with its figures, and the best of another scheme."""
    cells = dict(RankingCells(rankings, case, dense(ranked), notes).columns)
    first, *others = _candidates(ranked)
    figures = [cells[name](first) or notes.missing() for name in _BEST_COLUMNS]
    second = next((one for one in others if one.variant.scheme != first.variant.scheme), None)
    if second is None:
        then = notes.missing()
    else:
        then = Cell(f"{_TIED} {second.variant.name}" if first.tied_with([second]) else second.variant.name)
    return [Cell(str(case.members)), Cell(first.variant.name), *figures, then]


def _candidates(ranked: Sequence[RankedVariant]) -> list[RankedVariant]:
    return [one for one in ranked if one.rate is not None and not one.variant.baseline]
