"""The tables of quality: the law behind the headline, and a trained network.

The law: for a locally linear fitness the estimate of n members has cos^2 = 1 / (1 + kappa + d / n) with the
true gradient of d entries, as n_eff = n / (1 + kappa n / d) independent members have; kappa belongs to the
scheme alone.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from esbench.report.analysis.pivot import Grid, Trace, by_size
from esbench.report.analysis.quality import (
    ABSOLUTE,
    CLOSED,
    CURVED,
    EFFECTIVE,
    KAPPA,
    LINEAR,
    RELATIVE,
    UNSEEN,
    Estimate,
    Qualities,
    Worth,
    holds,
)
from esbench.report.analysis.ranking import rankings
from esbench.report.tables.ranking import headline
from esbench.report.tables.table import (
    INTERVAL,
    Block,
    Cell,
    Column,
    Footnotes,
    Reading,
    Section,
    ends,
    half,
    mean,
    members,
    number,
    one,
    said,
    section,
    table,
)
from esbench.schema import QUALITY, Case, Run, Skipped, Variant
from esbench.units import format_number, quantity

COSINE = "cosine"


_DOTS = "pairs"


_SPECTRUM = "one perturbation"


_ACROSS = ("layers", "members", "steps")


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


LAW = frozenset(
    {
        *("kappa", "effective_members", "dot_mean", "dot_variance", "correlation"),
        *("stable_rank", "singular_values", "cosine"),
    }
)
"""What has tables of its own."""


"""How a figure of quality follows from its row."""


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


def _law(qualities: Qualities, case: Case) -> Section:
    def found(metric: str, method: str) -> Callable[[Variant], Estimate | None]:
        return lambda variant: qualities.estimate(variant, case, metric, method)

    def kappa(method: str) -> Callable[[Variant], Trace | None]:
        return lambda variant: qualities.trace(variant, case, KAPPA, method)

    notes = Footnotes()
    fitted, closed, unseen = found(KAPPA, LINEAR), found(KAPPA, CLOSED), found(KAPPA, UNSEEN)

    def compared(show: Callable[[Variant, Estimate, float], Cell | None]) -> Callable[[Variant], Cell | None]:
        def cell(variant: Variant) -> Cell | None:
            here, there = fitted(variant), closed(variant)
            return show(variant, here, there.mean) if here and there else said("no form") if here else None

        return cell

    def difference(variant: Variant, here: Estimate, there: float) -> Cell | None:
        own, other = kappa(LINEAR)(variant), kappa(CLOSED)(variant)
        rows = (*(own.rows if own else ()), *(other.rows if other else ()))
        trace = Trace(qualities.run.header.run_id, "kappa as it was fitted, less its closed form", rows)
        return number("kappa_difference", here.mean - there, trace)

    def verdict(variant: Variant) -> Cell | None:
        here, there, rest = fitted(variant), closed(variant), unseen(variant)
        if not here or not there:
            return said("no form") if here else None
        words = holds(here, there.mean, rest.mean if rest else math.inf)
        hidden = words != holds(here, there.mean, 0.0)
        return said(notes.hint(words, _HIDDEN) if hidden else words)

    columns = [
        Column("kappa", lambda variant: mean("kappa_fitted", fitted(variant), kappa(LINEAR)(variant))),
        Column("±", lambda variant: half(fitted(variant))),
        Column(
            "closed form",
            compared(lambda variant, _, closed: number("kappa_closed_form", closed, kappa(CLOSED)(variant))),
        ),
        Column("difference", compared(difference)),
        Column("holds", verdict),
        *_means(qualities, case, (("dot mean", "dot_mean", _DOTS), ("dot variance", "dot_variance", _DOTS))),
        *_means(qualities, case, (("stable rank", "stable_rank", _SPECTRUM),)),
        *_means(qualities, case, [(f"correlation of {across}", "correlation", across) for across in _ACROSS]),
    ]
    asked = {LINEAR, CLOSED, _DOTS, _SPECTRUM, *_ACROSS}
    return _quality_section(
        qualities, case, "quality of the gradient", ("Quality law", _LAW_NOTE), columns, asked, notes
    )


def _trained(qualities: Qualities, case: Case) -> Section:
    def found(metric: str, method: str) -> Callable[[Variant], Estimate | None]:
        return lambda variant: qualities.estimate(variant, case, metric, method)

    def curved(show: Callable[[Variant, Worth | None], Cell | None]) -> Callable[[Variant], Cell | None]:
        def cell(variant: Variant) -> Cell | None:
            here = qualities.effective(variant, case, CURVED)
            return show(variant, here if isinstance(here, Worth) else None)

        return cell

    def trace(variant: Variant) -> Trace | None:
        return qualities.trace(variant, case, EFFECTIVE, CURVED)

    def share(variant: Variant, here: Worth | None) -> Cell | None:
        kept = 100 * here.value / case.members if here else None
        return number("effective_percent_at_sigma", kept, trace(variant))

    methods = sorted(qualities.methods(case, COSINE), key=_sigma)
    columns = [
        *_means(qualities, case, [(method, COSINE, method) for method in methods]),
        Column(
            f"n_eff at {case.sigma:g}",
            curved(lambda variant, here: members("effective_members_at_sigma", here, trace(variant))),
        ),
        Column(INTERVAL, curved(lambda _, here: ends(here))),
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


def _means(qualities: Qualities, case: Case, columns: Iterable[tuple[str, str, str]]) -> list[Column]:
    """Columns of means: (heading, metric, method)."""

    def column(heading: str, metric: str, method: str) -> Column:
        name = metric if method in {_DOTS, _SPECTRUM} else f"{metric}_{method}"

        def cell(variant: Variant) -> Cell | None:
            found = qualities.estimate(variant, case, metric, method)
            return mean(name, found, qualities.trace(variant, case, metric, method))

        return Column(heading, cell)

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

    found = table(case, variants, columns, reason, notes)
    grid = Grid(qualities.run, case.operator, case.dtype, case.antithetic, QUALITY, KAPPA, LINEAR)
    return section(grid, case, what, Block(*block, found), [*notes, *qualities.remarks(case)])


def figure_sections(qualities: Qualities, case: Case) -> list[Section]:
    """The table of a case's own figures, if it has some."""
    keys = [
        (metric, method) for metric in _metrics(qualities, case) for method in qualities.methods(case, metric)
    ]
    if not keys:
        return []
    notes, methods = Footnotes(), {method for _, method in keys}
    columns = [
        _column(qualities, case, metric, method, is_alone=len(qualities.methods(case, metric)) == 1)
        for metric, method in keys
    ]

    def reason(variant: Variant) -> Skipped | None:
        return qualities.reason(variant, case, methods)

    filled = table(case, qualities.variants(case), columns, reason, notes)
    grid = Grid(qualities.run, case.operator, case.dtype, case.antithetic, QUALITY, *keys[0])
    block = Block(
        "Figures", ": means of replicates, ± half of their 95 % interval where there are several.", filled
    )
    return [section(grid, case, "figures", block, [*notes, *qualities.remarks(case)])]


def sections(run: Run, operator: str) -> list[Section]:
    """The tables of an operator's cases, by size."""
    qualities = Qualities(run)
    cases = sorted((case for case in qualities.cases if case.operator == operator), key=by_size)
    return [one for case in cases for one in figure_sections(qualities, case)]


def _metrics(qualities: Qualities, case: Case) -> list[str]:
    rows = (row for row in qualities.run.measurements if row.case == case and row.phase == QUALITY)
    return [metric for metric in dict.fromkeys(row.metric for row in rows) if metric not in LAW]


def _column(qualities: Qualities, case: Case, metric: str, method: str, *, is_alone: bool) -> Column:
    symbol = quantity(metric).column.symbol
    words = metric.rpartition("_")[0].replace("_", " ") or metric
    heading = f"{words}{f' ({symbol})' if symbol else ''}{'' if is_alone else f', {method}'}"

    def cell(variant: Variant) -> Cell | None:
        found = qualities.estimate(variant, case, metric, method)
        if found is None:
            return None
        low, high = (found.mean - found.half, found.mean + found.half) if found.half else (None, None)
        trace = qualities.trace(variant, case, metric, method)
        return one(Reading(metric, found.mean, trace, low, high, is_between=True))

    return Column(heading, cell)
