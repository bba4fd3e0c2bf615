"""The headline: the variants of a case by effective members per millisecond, and what is behind the rate."""

from collections.abc import Callable, Sequence

import msgspec

from esbench.report import captions
from esbench.report.analysis.pivot import PEAK, Trace, headings, operators
from esbench.report.analysis.quality import EXACT
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
    ends,
    known_ends,
    mean,
    members,
    one,
    said,
    section,
    table,
)
from esbench.report.text import counted, one_line
from esbench.schema import Case, Measurement, Run
from esbench.stats import median

TITLE = "Effective members per millisecond"


RATE, COST = f"rate, x {DENSE}", "time, x base"
"""Headings of multiples: of a rate more is better, of a time less."""


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


_N_EFF = (
    "n / (1 + kappa n / d) by the closed form of kappa where the fit does not contradict it, otherwise one "
    "over the mean of the replicates' reciprocals"
)


_KAPPA = "its closed form where the fit does not contradict it, otherwise the mean of the replicates"


_AGAINST = f"n_eff over the median of the step, by that of {DENSE}"


GLANCE_TITLE = "Which scheme at which shape"


_SHOWN = (RATE, COST, "step (ms)", "peak (MB)")


_ALIKE = "≈"


_NOTE = (
    ": by effective members per millisecond of a whole step, what it costs, and the first of "
    f"another scheme, with {_ALIKE} where the intervals do not tell the two apart. Multiples of the rate of "
    f"{DENSE} (dense noise), more is better, and of the time of base (the plain layer, which learns by "
    "backpropagation), less is better, in the same run. exact: a linear fitness's gradient without error."
)


def headlines(run: Run, operator: str) -> list[Section]:
    """The rankings of an operator, each shape with its largest population, by each method of timing."""
    return [headline(one, case) for one in rankings(run, operator) for case in one.largest]


def headline(found: Rankings, case: Case, standings: Sequence[RankedVariant] | None = None) -> Section:
    """Effective members per millisecond of a case's variants, sorted, with what stands behind them.

    Args:
        found: the rankings of an operator.
        case: one of theirs.
        standings: what to show of it; all, where nothing is said.

    """
    standings = found.of(case) if standings is None else standings
    by_variant = {each.variant: each for each in standings}
    notes = Footnotes()
    columns = [
        Column(heading, lambda variant, show=show: show(by_variant[variant]))  # type: ignore[misc]  # bound here, not late
        for heading, show in Figures(found, case, dense(standings), notes).columns
    ]
    shown = table(case, list(by_variant), columns, lambda variant: by_variant[variant].skipped, notes)
    block = Block(TITLE, _RATE_NOTE, shown)
    first = next((each for each in standings if each.rate is not None), None)
    alike = first.alike(standings) if first else ""
    words = [f"first, {first.variant.label(case.operator)}: {alike}"] if first and alike else []
    words += [_EXACT_NOTE] if any(each.is_exact for each in standings) else []
    footnotes = [*notes, *words, *found.qualities.remarks(case)]
    return section(found.grid, case, TITLE.lower(), block, footnotes, captions.method(found.grid))


class Figures:
    """The cells of a variant's row, each with the rows that it comes from."""

    def __init__(
        self, found: Rankings, case: Case, reference: RankedVariant | None, notes: Footnotes
    ) -> None:
        """Take the rankings, one of their cases, what others are compared with, and where hints go."""
        self._found, self._case, self._reference, self._notes = found, case, reference, notes
        self._missing = _missing(found, case, reference)
        self.columns: list[tuple[str, Callable[[RankedVariant], Cell | None]]] = [
            ("n_eff / ms", self._rate),
            (RATE, self._against),
            ("n_eff", lambda each: members("effective_members", each.effective, self._n_eff(each))),
            (INTERVAL, lambda each: ends(each.effective)),
            ("n_eff / n (%)", self._kept),
            ("kappa", lambda each: mean("kappa", each.kappa, self._trace(each, _KAPPA, self._behind(each)))),
            ("step (ms)", self._step),
            (COST, self._times_base),
            ("noise (MB)", lambda each: self._most(each, NOISE)),
            ("peak (MB)", lambda each: self._most(each, PEAK)),
        ]

    def _rate(self, each: RankedVariant) -> Cell | None:
        if each.rate is None:
            return None
        if each.is_exact:
            return said(EXACT)
        low, high = each.rate_between or (None, None)
        trace = self._trace(each, "n_eff over the median of the step in ms", self._behind_rate(each))
        least = "at least {}" if each.effective and each.effective.is_bound else "{}"
        return one(Reading(RATE_PER_MS, each.rate, trace, low, high, kind="number"), least)

    def _against(self, each: RankedVariant) -> Cell | None:
        if each.is_exact:
            return said(EXACT)
        if self._missing and each.rate is not None:
            return said(self._notes.hint(NOTHING, self._missing))
        if self._reference is None or each.rate is None:
            return None
        if single := next((one for one in (self._reference, each) if one.is_single), None):
            return said(self._notes.hint(NOTHING, self._single(single)))
        times = each.times(self._reference)
        if times is None:
            return None
        rows = (*self._behind_rate(each), *self._behind_rate(self._reference))
        least = "at least {}" if each.effective and each.effective.is_bound else "{}"
        return one(Reading(RATE_MULTIPLIER, times, self._trace(each, _AGAINST, rows), kind="multiple"), least)

    def _kept(self, each: RankedVariant) -> Cell | None:
        if each.effective is None or each.share is None:
            return None
        words = each.kept.removesuffix(" %")
        if each.is_exact or words.startswith("about"):
            return said(words)
        low, high = (100 * end / each.case.members if end else None for end in known_ends(each.effective))
        least = "at least {}" if words.startswith("at least") else "{}"
        share = 100 * (each.effective.value if least == "{}" else each.effective.low) / each.case.members
        trace = self._trace(each, f"n_eff over the members, {_N_EFF}", self._behind(each))
        return one(Reading(EFFECTIVE_PERCENT, share, trace, low, high, kind="number"), least)

    def _step(self, each: RankedVariant) -> Cell | None:
        row = self._found.step(each.variant, self._case)
        if row is None or median(row) is None:
            return None
        shown, rounds = reading(self._found.grid.run, row), len(row.samples)
        if shown.half is not None:
            return one(shown)
        note = f"{counted(rounds, 'round')} of the step: too few for an interval"
        return one(shown, self._notes.hint("{}", note))

    def _single(self, each: RankedVariant) -> str:
        """Why a multiple would rest on chance."""
        row = self._found.step(each.variant, self._case)
        label = each.variant.label(self._case.operator)
        why = f" ({one_line(row.stop)})" if row and row.stop else ""
        return f"no multiple: {label} has a single round of its step{why}"

    def _times_base(self, each: RankedVariant) -> Cell | None:
        if each.multiplier and each.is_single:
            return said(self._notes.hint(NOTHING, self._single(each)))
        shown = multiple(self._found.grid, each.variant, self._case, TIME)
        return one(shown) if shown else None

    def _most(self, each: RankedVariant, metric: str) -> Cell | None:
        row = self._found.most(each.variant, self._case, metric)
        return one(reading(self._found.grid.run, row)) if row else None

    def _n_eff(self, each: RankedVariant) -> Trace | None:
        return self._trace(each, _N_EFF, self._behind(each))

    def _behind(self, each: RankedVariant) -> tuple[Measurement, ...]:
        return self._found.qualities.behind(each.variant, self._case)

    def _behind_rate(self, each: RankedVariant) -> tuple[Measurement, ...]:
        step = self._found.step(each.variant, self._case)
        return (*([step] if step else []), *self._behind(each))

    def _trace(self, each: RankedVariant, rule: str, rows: tuple[Measurement, ...]) -> Trace | None:
        ours = tuple(row for row in rows if row.variant == each.variant)
        return Trace(self._found.grid.run.header.run_id, rule, rows) if ours else None


def _missing(found: Rankings, case: Case, reference: RankedVariant | None) -> str:
    """Why there is no multiple of dense noise, where the run holds some."""
    if reference is None:
        known = dense(found.of(case))
        return f"{known.variant.label(case.operator)} is not among those that were asked for" if known else ""
    if reference.rate is not None:
        return ""
    why = one_line(reference.skipped.reason) if reference.skipped else "the run lacks its step or its quality"
    return f"{reference.variant.label(case.operator)} has no rate: {why}"


def glance(runs: Sequence[Run], layers: Sequence[str] = ("Linear", "Conv2d")) -> Section | None:
    """A row for each shape and population of these operators that a run ranks; ``None`` where none does.

    A shape that several runs have is taken from the first of them. Nothing of base and of other baselines
    takes a place.
    """
    rows: dict[tuple[str, Case], tuple[Rankings, list[RankedVariant]]] = {}
    for run in runs:
        for operator in (name for name in operators(run) if name in layers):
            for ranking in rankings(run, operator):
                for case in ranking.cases:
                    rows.setdefault((ranking.grid.method, case), (ranking, ranking.of(case)))
    known = [key for key in rows if _candidates(rows[key][1])]
    if not known:
        return None
    alike = [msgspec.structs.replace(case, members=1) for _, case in known]
    names = dict(zip(dict.fromkeys(alike), headings(dict.fromkeys(alike)), strict=True))
    several = len({method for method, _ in known}) > 1
    notes = Footnotes()
    table = Table(
        corner="layer",
        headings=("members", "first", "n_eff / ms", *_SHOWN, "then"),
        labels=tuple(
            f"{case.operator} {names[case]}" + (f", {method}" if several else "")
            for case, (method, _) in zip(alike, known, strict=True)
        ),
        cells=tuple(tuple(_row(*rows[key], key[1], notes)) for key in known),
    )
    shown = {rows[key][0].grid.run.header.run_id for key in known}
    dtypes = " and ".join(dict.fromkeys(case.dtype for _, case in known))
    methods = " and ".join(dict.fromkeys(method for method, _ in known))
    return Section(
        title=GLANCE_TITLE,
        origin=" ".join(captions.origin(run) for run in runs if run.header.run_id in shown),
        conditions=f"{dtypes}, one row for each member, method {methods}.",
        blocks=(Block("The first of each", _NOTE, table),),
        footnotes=tuple(notes),
    )


def _row(ranking: Rankings, standings: Sequence[RankedVariant], case: Case, notes: Footnotes) -> list[Cell]:
    """The population, the first, its figures, and the first of another scheme; none of them a baseline."""
    figures = dict(Figures(ranking, case, dense(standings), notes).columns)
    first, *others = _candidates(standings)
    shown = [figures[name](first) or said(notes.hole()) for name in ("n_eff / ms", *_SHOWN)]
    following = next((one for one in others if one.variant.scheme != first.variant.scheme), None)
    if following is None:
        then = notes.hole()
    else:
        then = f"{_ALIKE} {following.variant.name}" if first.alike([following]) else following.variant.name
    return [said(str(case.members)), said(first.variant.name), *shown, said(then)]


def _candidates(standings: Sequence[RankedVariant]) -> list[RankedVariant]:
    return [one for one in standings if one.rate is not None and not one.variant.baseline]
