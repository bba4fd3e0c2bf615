"""The tables of quality: effective members per millisecond, the law behind them, and a trained network.

The law: for a locally linear fitness the estimate of n members has cos^2 = 1 / (1 + kappa + d / n) with the
true gradient of d entries, as n_eff = n / (1 + kappa n / d) independent members have; kappa belongs to the
scheme alone.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from esbench.records import QUALITY, Case, Run, Skipped, Variant
from esbench.report import captions
from esbench.report.estimates import Estimate, Worth
from esbench.report.footnotes import Footnotes
from esbench.report.grid import LATENCY, Grid, by_size, headings
from esbench.report.ranking import (
    CLOSED,
    CURVED,
    DENSE,
    EFFECTIVE,
    KAPPA,
    LINEAR,
    NOISE,
    Qualities,
    Rankings,
    Standing,
    dense,
    rankings,
)
from esbench.report.tables import Block, Section
from esbench.units import format_cell, format_multiplier, format_number

RELATIVE, ABSOLUTE = 0.05, 0.02
"""A fitted kappa may be off its closed form by the larger of the two: a share of it, and a number."""
_INTERVAL = "95 % interval"
BLANK = ""
"""The cell of a number that the reason beside it explains."""
COSINE = "cosine"
_DOTS = "pairs"
_SPECTRUM = "one perturbation"
_ACROSS = ("layers", "members", "steps")

_RATE_NOTE = (
    f": n_eff independent members give as good a gradient, and a step is all that one update takes. Sorted; "
    f"multiples of {DENSE} and of base in the same run; the interval is that of the reciprocals of n_eff, in "
    "which the law is linear."
)
_LAW_NOTE = (
    f": kappa fitted with a linear fitness beside its closed form, which holds where they differ by at most "
    f"{100 * RELATIVE:g} % or {ABSOLUTE:g}; scaled products of two members' perturbations, of mean 0 and "
    "variance 1 where they are independent; one perturbation's stable rank; correlation of entries."
)
_COSINE_NOTE = (
    ": cosine between the update and backpropagation's gradient of a trained network, by the scale of the "
    "noise; n_eff there is with the curved fitness at the case's own sigma."
)


class _Column(NamedTuple):
    """A column of a table: its heading, and the cell of a variant, nothing where it has no number."""

    heading: str
    cell: Callable[[Variant], str | None]


def quality_sections(run: Run, operator: str) -> list[Section]:
    """All tables of quality of an operator, the headline first."""
    qualities = Qualities(run)
    cases = sorted((case for case in qualities.cases if case.operator == operator), key=by_size)
    return [
        *(headline(one, case) for one in rankings(run, operator) for case in one.cases),
        *(_law(qualities, case) for case in cases if qualities.methods(case, KAPPA)),
        *(_trained(qualities, case) for case in cases if _has_network(qualities, case)),
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

    def column(heading: str, show: Callable[[Standing], str | None]) -> _Column:
        return _Column(heading, lambda variant: show(by_variant[variant]))

    columns = [
        column("n_eff / ms", lambda one: _number(one.rate)),
        column(f"x {DENSE}", lambda one: _multiple(one.times(reference))),
        column("n_eff", lambda one: _worth(one.effective)),
        column(_INTERVAL, lambda one: _ends(one.effective)),
        column("n_eff / n (%)", lambda one: _number(one.share and 100 * one.share)),
        column("kappa", lambda one: _mean(one.kappa)),
        column("step (ms)", lambda one: _cell(LATENCY, one.step_ns)),
        column("x base", lambda one: _multiple(one.multiplier.value if one.multiplier else None)),
        column("noise (MB)", lambda one: _cell(NOISE, one.noise_bytes)),
        column("peak (MB)", lambda one: _cell(NOISE, one.peak_bytes)),
    ]
    notes = Footnotes()
    frame = _frame(case, list(by_variant), columns, lambda variant: by_variant[variant].skipped, notes)
    block = Block("Effective members per millisecond", _RATE_NOTE, frame)
    return _section(found.grid, case, "effective members per millisecond", block, notes)


def holds(fitted: Estimate, closed: float) -> str:
    """Whether a fitted kappa is its closed form: unclear where the interval says neither."""
    off, allowed = abs(fitted.mean - closed), max(RELATIVE * abs(closed), ABSOLUTE)
    if off <= allowed:
        return "yes"
    return "NO" if off - fitted.reach > allowed else "unclear"


def _law(qualities: Qualities, case: Case) -> Section:
    def found(metric: str, method: str) -> Callable[[Variant], Estimate | None]:
        return lambda variant: qualities.estimate(variant, case, metric, method)

    fitted, closed = found(KAPPA, LINEAR), found(KAPPA, CLOSED)

    def compared(show: Callable[[Estimate, float], str]) -> Callable[[Variant], str | None]:
        def cell(variant: Variant) -> str | None:
            here, there = fitted(variant), closed(variant)
            return show(here, there.mean) if here and there else "no form" if here else None

        return cell

    columns = [
        _Column("kappa", lambda variant: _mean(fitted(variant))),
        _Column("±", lambda variant: _half(fitted(variant))),
        _Column("closed form", compared(lambda _, closed: format_number(closed))),
        _Column("difference", compared(lambda fitted, closed: format_number(fitted.mean - closed))),
        _Column("holds", compared(holds)),
        *_means(found, (("dot mean", "dot_mean", _DOTS), ("dot variance", "dot_variance", _DOTS))),
        *_means(found, (("stable rank", "stable_rank", _SPECTRUM),)),
        *_means(found, [(f"correlation of {across}", "correlation", across) for across in _ACROSS]),
    ]
    asked = {LINEAR, CLOSED, _DOTS, _SPECTRUM, *_ACROSS}
    return _quality_section(
        qualities, case, "quality of the gradient", ("Quality law", _LAW_NOTE), columns, asked
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
        return _number(100 * here.value / case.members) if here else None

    methods = sorted(qualities.methods(case, COSINE), key=_sigma)
    columns = [
        *_means(found, [(method, COSINE, method) for method in methods]),
        _Column(f"n_eff at {case.sigma:g}", curved(_worth)),
        _Column(_INTERVAL, curved(_ends)),
        _Column("n_eff / n (%)", curved(share)),
    ]
    title = "quality on a trained network" if methods else "effective members at sigma"
    cosines = [found(COSINE, method)(variant) for method in methods for variant in qualities.variants(case)]
    widths = [one.half for one in cosines if one and one.half is not None]
    sure = f" 95 % intervals of the cosines: ±{format_number(max(widths))} at most." if widths else ""
    block = ("Cosine to backpropagation", f"{_COSINE_NOTE}{sure}")
    return _quality_section(qualities, case, title, block, columns, {*methods, CURVED})


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
) -> list[_Column]:
    """Columns of means: (heading, metric, method)."""

    def column(heading: str, metric: str, method: str) -> _Column:
        value = found(metric, method)
        return _Column(heading, lambda variant: _mean(value(variant)))

    return [column(*one) for one in columns]


def _quality_section(  # noqa: PLR0913, PLR0917  # what a section shows, and where it comes from
    qualities: Qualities,
    case: Case,
    what: str,
    block: tuple[str, str],
    columns: Sequence[_Column],
    methods: Collection[str],
) -> Section:
    notes = Footnotes()
    variants = qualities.variants(case)

    def reason(variant: Variant) -> Skipped | None:
        found = qualities.effective(variant, case, CURVED) if CURVED in methods else None
        return qualities.reason(variant, case, methods) or (found if isinstance(found, Skipped) else None)

    frame = _frame(case, variants, columns, reason, notes)
    grid = Grid(qualities.run, case.operator, case.dtype, case.antithetic, QUALITY, KAPPA, LINEAR)
    return _section(grid, case, what, Block(*block, frame), notes)


def _section(grid: Grid, case: Case, what: str, block: Block, notes: Footnotes) -> Section:
    (heading,) = (name for one, name in _headings(grid.run, case.operator) if one == case)
    return Section(
        title=f"{case.operator} {heading}: {what}",
        origin=captions.origin(grid.run),
        conditions=captions.conditions(grid, [case]),
        blocks=(block,),
        footnotes=tuple(notes),
    )


def _headings(run: Run, operator: str) -> list[tuple[Case, str]]:
    cases = list(dict.fromkeys(row.case for row in run.rows if row.case.operator == operator))
    return list(zip(cases, headings(cases), strict=True))


def _frame(
    case: Case,
    variants: Sequence[Variant],
    columns: Sequence[_Column],
    reason: Callable[[Variant], Skipped | None],
    notes: Footnotes,
) -> pd.DataFrame:
    """Print the cells; the first that a variant has no number for holds the reason, if there is one."""
    cells = []
    for variant in variants:
        shown, why = [column.cell(variant) for column in columns], reason(variant)
        if why and None in shown:
            shown[shown.index(None)] = notes.reason(why)
        cells.append([one if one is not None else BLANK if why else notes.hole() for one in shown])
    labels = pd.Index([variant.label(case.operator) for variant in variants], name=case.operator)
    return pd.DataFrame(cells, index=labels, columns=[column.heading for column in columns])


def _number(value: float | None) -> str | None:
    return None if value is None else format_number(value)


def _cell(metric: str, value: float | None) -> str | None:
    return None if value is None else format_cell(metric, value)


def _multiple(value: float | None) -> str | None:
    return None if value is None else format_multiplier(value)


def _mean(found: Estimate | None) -> str | None:
    return format_number(found.mean) if found else None


def _worth(found: Worth | None) -> str | None:
    return format_number(found.value) if found else None


def _ends(found: Worth | None) -> str | None:
    """The interval of n_eff; a single replicate has none."""
    if found is None:
        return None
    if found.replicates == 1:
        return "one value"
    low, high = format_number(found.low), format_number(found.high)
    return f"{low} to {high}" if math.isfinite(found.high) else f"at least {low}"


def _half(found: Estimate | None) -> str | None:
    """Half the interval; a single replicate has none."""
    return (format_number(found.half) if found.half is not None else "one value") if found else None
