"""The tables of quality: effective members per millisecond, the law behind them, and a trained network.

The law: for a locally linear fitness the estimate of n members has cos^2 = 1 / (1 + kappa + d / n) with the
true gradient of d entries, as n_eff = n / (1 + kappa n / d) independent members have; kappa belongs to the
scheme alone.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from esbench.records import QUALITY, Case, Run, Skipped, Variant
from esbench.report.columns import (
    INTERVAL,
    Column,
    ends,
    frame,
    half,
    mean,
    members,
    multiple,
    number,
    quantity_cell,
    section,
)
from esbench.report.estimates import EXACT, Estimate, Worth
from esbench.report.figures import figure_sections
from esbench.report.footnotes import NOTHING, Footnotes
from esbench.report.grid import LATENCY, Grid, by_size
from esbench.report.qualities import (
    ABSOLUTE,
    CLOSED,
    CURVED,
    EFFECTIVE,
    KAPPA,
    LINEAR,
    RELATIVE,
    UNSEEN,
    Qualities,
    holds,
)
from esbench.report.ranking import DENSE, NOISE, Rankings, Standing, dense, rankings
from esbench.report.tables import Block, Section
from esbench.report.words import one_line
from esbench.units import format_number

COSINE = "cosine"
_DOTS = "pairs"
_SPECTRUM = "one perturbation"
_ACROSS = ("layers", "members", "steps")

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
_LAW_NOTE = (
    f": kappa fitted with a linear fitness beside its closed form, which holds where they differ by at most "
    f"{100 * RELATIVE:g} % or {ABSOLUTE:g}; scaled products of two members' perturbations, of mean 0 and "
    "variance 1 where they are independent; one perturbation's stable rank; correlation of entries."
)
_HIDDEN = (
    "below its closed form by more than its interval, which is no contradiction: rare pairs of members that "
    "share much were not met among the few that were looked at, and no interval knows what they add"
)
_COSINE_NOTE = (
    ": cosine between the update and backpropagation's gradient of a trained network, by the scale of the "
    "noise; n_eff there is with the curved fitness at the case's own sigma."
)


def quality_sections(run: Run, operator: str) -> list[Section]:
    """All tables of quality of an operator, the headline first."""
    qualities = Qualities(run)
    cases = sorted((case for case in qualities.cases if case.operator == operator), key=by_size)
    return [
        *(headline(one, case) for one in rankings(run, operator) for case in one.cases),
        *(_law(qualities, case) for case in cases if qualities.methods(case, KAPPA)),
        *(_trained(qualities, case) for case in cases if _has_network(qualities, case)),
        *(one for case in cases for one in figure_sections(qualities, case)),
    ]


def headlines(run: Run, operator: str) -> list[Section]:
    """The rankings of an operator, each shape with its largest population, by each method of timing."""
    return [headline(one, case) for one in rankings(run, operator) for case in one.largest]


def headline(found: Rankings, case: Case, standings: Sequence[Standing] | None = None) -> Section:
    """Effective members per millisecond of a case's variants, sorted, with what stands behind them.

    Args:
        found: the rankings of an operator.
        case: one of theirs.
        standings: what to show of it; all, where nothing is said.

    """
    standings = found.of(case) if standings is None else standings
    reference = dense(standings)
    by_variant = {one.variant: one for one in standings}

    def column(heading: str, show: Callable[[Standing], str | None]) -> Column:
        return Column(heading, lambda variant: show(by_variant[variant]))

    notes = Footnotes()
    missing = _missing(found, case, reference)

    def against(one: Standing) -> str | None:
        if one.is_exact:
            return EXACT
        if missing and one.rate is not None:
            return notes.hint(NOTHING, missing)
        return multiple(one.times(reference))

    columns = [
        column("n_eff / ms", lambda one: None if one.rate is None else one.rate_in_words),
        column(f"x {DENSE}", against),
        column("n_eff", lambda one: members(one.effective)),
        column(INTERVAL, lambda one: ends(one.effective)),
        column("n_eff / n (%)", lambda one: one.kept.removesuffix(" %") if one.effective else None),
        column("kappa", lambda one: mean(one.kappa)),
        column("step (ms)", lambda one: quantity_cell(LATENCY, one.step_ns)),
        column("x base", lambda one: multiple(one.multiplier.value if one.multiplier else None)),
        column("noise (MB)", lambda one: quantity_cell(NOISE, one.noise_bytes)),
        column("peak (MB)", lambda one: quantity_cell(NOISE, one.peak_bytes)),
    ]
    table = frame(case, list(by_variant), columns, lambda variant: by_variant[variant].skipped, notes)
    block = Block("Effective members per millisecond", _RATE_NOTE, table)
    first = next((one for one in standings if one.rate is not None), None)
    alike = first.alike(standings) if first else ""
    said = [f"first, {first.variant.label(case.operator)}: {alike}"] if first and alike else []
    said += [_EXACT_NOTE] if any(one.is_exact for one in standings) else []
    footnotes = [*notes, *said, *found.qualities.remarks(case)]
    return section(found.grid, case, "effective members per millisecond", block, footnotes)


def _missing(found: Rankings, case: Case, reference: Standing | None) -> str:
    """Why there is no multiple of dense noise, where the run holds some."""
    if reference is None:
        known = dense(found.of(case))
        return f"{known.variant.label(case.operator)} is not among those that were asked for" if known else ""
    if reference.rate is not None:
        return ""
    why = one_line(reference.skipped.reason) if reference.skipped else "the run lacks its step or its quality"
    return f"{reference.variant.label(case.operator)} has no rate: {why}"


def _law(qualities: Qualities, case: Case) -> Section:
    def found(metric: str, method: str) -> Callable[[Variant], Estimate | None]:
        return lambda variant: qualities.estimate(variant, case, metric, method)

    notes = Footnotes()
    fitted, closed, unseen = found(KAPPA, LINEAR), found(KAPPA, CLOSED), found(KAPPA, UNSEEN)

    def compared(show: Callable[[Estimate, float], str]) -> Callable[[Variant], str | None]:
        def cell(variant: Variant) -> str | None:
            here, there = fitted(variant), closed(variant)
            return show(here, there.mean) if here and there else "no form" if here else None

        return cell

    def verdict(variant: Variant) -> str | None:
        here, there, rest = fitted(variant), closed(variant), unseen(variant)
        if not here or not there:
            return "no form" if here else None
        said = holds(here, there.mean, rest.mean if rest else math.inf)
        hidden = said != holds(here, there.mean, 0.0)
        return notes.hint(said, _HIDDEN) if hidden else said

    columns = [
        Column("kappa", lambda variant: mean(fitted(variant))),
        Column("±", lambda variant: half(fitted(variant))),
        Column("closed form", compared(lambda _, closed: format_number(closed))),
        Column("difference", compared(lambda fitted, closed: format_number(fitted.mean - closed))),
        Column("holds", verdict),
        *_means(found, (("dot mean", "dot_mean", _DOTS), ("dot variance", "dot_variance", _DOTS))),
        *_means(found, (("stable rank", "stable_rank", _SPECTRUM),)),
        *_means(found, [(f"correlation of {across}", "correlation", across) for across in _ACROSS]),
    ]
    asked = {LINEAR, CLOSED, _DOTS, _SPECTRUM, *_ACROSS}
    return _quality_section(
        qualities, case, "quality of the gradient", ("Quality law", _LAW_NOTE), columns, asked, notes
    )


def _trained(qualities: Qualities, case: Case) -> Section:
    def found(metric: str, method: str) -> Callable[[Variant], Estimate | None]:
        return lambda variant: qualities.estimate(variant, case, metric, method)

    def curved(show: Callable[[Worth | None], str | None]) -> Callable[[Variant], str | None]:
        def cell(variant: Variant) -> str | None:
            here = qualities.effective(variant, case, CURVED)
            return show(here if isinstance(here, Worth) else None)

        return cell

    def share(here: Worth | None) -> str | None:
        return number(100 * here.value / case.members) if here else None

    methods = sorted(qualities.methods(case, COSINE), key=_sigma)
    columns = [
        *_means(found, [(method, COSINE, method) for method in methods]),
        Column(f"n_eff at {case.sigma:g}", curved(members)),
        Column(INTERVAL, curved(ends)),
        Column("n_eff / n (%)", curved(share)),
    ]
    title = "quality on a trained network" if methods else "effective members at sigma"
    cosines = [found(COSINE, method)(variant) for method in methods for variant in qualities.variants(case)]
    widths = [one.half for one in cosines if one and one.half is not None]
    sure = f" 95 % intervals of the cosines: ±{format_number(max(widths))} at most." if widths else ""
    block = ("Cosine to backpropagation", f"{_COSINE_NOTE}{sure}")
    return _quality_section(qualities, case, title, block, columns, {*methods, CURVED}, Footnotes())


def _has_network(qualities: Qualities, case: Case) -> bool:
    return bool(qualities.methods(case, COSINE)) or CURVED in qualities.methods(case, EFFECTIVE)


def _sigma(method: str) -> float:
    """The scale in ``sigma=0.01``; what says it otherwise comes last."""
    try:
        return float(method.partition("=")[2])
    except ValueError:
        return float("inf")


def _means(
    found: Callable[[str, str], Callable[[Variant], Estimate | None]], columns: Iterable[tuple[str, str, str]]
) -> list[Column]:
    """Columns of means: (heading, metric, method)."""

    def column(heading: str, metric: str, method: str) -> Column:
        value = found(metric, method)
        return Column(heading, lambda variant: mean(value(variant)))

    return [column(*one) for one in columns]


def _quality_section(  # noqa: PLR0913, PLR0917  # what a section shows, and where it comes from
    qualities: Qualities,
    case: Case,
    what: str,
    block: tuple[str, str],
    columns: Sequence[Column],
    methods: Collection[str],
    notes: Footnotes,
) -> Section:
    variants = qualities.variants(case)

    def reason(variant: Variant) -> Skipped | None:
        found = qualities.effective(variant, case, CURVED) if CURVED in methods else None
        return qualities.reason(variant, case, methods) or (found if isinstance(found, Skipped) else None)

    table = frame(case, variants, columns, reason, notes)
    grid = Grid(qualities.run, case.operator, case.dtype, case.antithetic, QUALITY, KAPPA, LINEAR)
    return section(grid, case, what, Block(*block, table), [*notes, *qualities.remarks(case)])
