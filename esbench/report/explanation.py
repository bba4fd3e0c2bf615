"""Why time alone misleads: the explanation in the README, with the figures of a run."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import msgspec

from esbench.errors import UserError
from esbench.report import captions
from esbench.report.estimates import Worth, kept
from esbench.report.grid import LATENCY, operators
from esbench.report.qualities import KAPPA
from esbench.report.ranking import NOISE, RankedVariant, Rankings, dense, rankings
from esbench.report.words import escape
from esbench.schema import Case, Run, Variant
from esbench.units import format_multiplier, format_number, format_value

_WIDTH = 115
_CORES = "cores"
_LAYERS = ("Linear", "Conv2d")
"""Operators whose weights a case says the number of."""


def why_time_misleads(run: Run, case: str = "*") -> str:
    """The quality law, and what it does to the order of a run's variants, as markdown.

    Args:
        run: one with steps and qualities.
        case: glob over labels of layers; of those that match, the largest population that most variants could
            do is explained.

    Raises:
        UserError: no case of the run that matches has a ranking in which two variants can be compared.

    """
    found = [
        (one, label)
        for operator in operators(run)
        if operator in _LAYERS
        for one in rankings(run, operator)
        for label in one.cases
        if fnmatchcase(label.label, case) and len(_ranked(one, label)) > 1
    ]
    if not found:
        message = f"run {run.header.run_id} holds no ranking of a case {case!r}: nothing to explain"
        raise UserError(message)
    ranking, chosen = max(found, key=lambda pair: (pair[1] in pair[0].largest, pair[1].members))
    law = textwrap.fill(_law(run, chosen), _WIDTH)
    points = [textwrap.fill(f"- {one}", _WIDTH, subsequent_indent="  ") for one in _points(ranking, chosen)]
    return "\n".join([law, "", *points]) + "\n"


def _law(run: Run, case: Case) -> str:
    return (
        "To first order, the gradient of n members is as good as that of n_eff = n / (1 + kappa n / d) "
        "members with independent noise: d counts the weights, and kappa belongs to the scheme. A scheme can "
        "be fast because its members repeat each other, and no table of times shows it. Measured on "
        f"{escape(captions.source(run))}, {escape(case.label)}, d = {_entries(case)}:"
    )


def _points(ranking: Rankings, case: Case) -> Iterator[str]:
    ranked = _ranked(ranking, case)
    by_time = sorted(ranked, key=lambda one: one.step_ns or 0.0)
    # Of those that fall as far, the fastest one.
    fallen = max(by_time, key=lambda one: ranked.index(one) - by_time.index(one))
    best, reference = ranked[0], dense(ranked)
    count = f"of {len(ranked)}"
    yield (
        f"By time, {_name(fallen)} takes place {by_time.index(fallen) + 1} {count}, with "
        f"{format_value(LATENCY, fallen.step_ns)} for a step. By n_eff per ms it takes place "
        f"{ranked.index(fallen) + 1}: {_kept(fallen)}."
    )
    if reference and reference != fallen:
        noise = f" and {format_value(NOISE, reference.noise_bytes)} of noise" if reference.noise_bytes else ""
        yield (
            f"{_name(reference)}, an own number for every weight of every member: {_kept(reference)}, for "
            f"{format_value(LATENCY, reference.step_ns)} a step{noise}. That is {_rate(reference)}."
        )
    against = [
        f"{format_multiplier(times)} what {_name(other)} gives"
        for other in (fallen, reference)
        if other and other != best and (times := best.times(other))
    ]
    against += [one] if (one := escape(best.alike(ranked))) else []
    yield f"First by n_eff per ms: {_name(best)} with {_rate(best)}{''.join(f', {one}' for one in against)}."
    cored = [
        one for one in ranked if any(_single(other.variant) == one.variant for other in _several(ranked))
    ]
    # Of those that the run has with one core and with several, the one that loses most by it.
    losing = max(cored, key=lambda one: one.kappa.mean if one.kappa else 0.0, default=None)
    if losing:
        yield _cores(ranked, losing)
    yield from _growing(ranking, (losing or fallen).variant, case)


def _cores(ranked: Sequence[RankedVariant], losing: RankedVariant) -> str:
    """What independent cores give back to one that shares a core."""
    several = [one for one in _several(ranked) if _single(one.variant) == losing.variant]
    most = max(several, key=lambda one: _cored(one.variant))
    return (
        f"{_name(losing)} has one core that all members share: {_kept(losing)}. With {_cored(most.variant)} "
        f"independent cores at the same arithmetic, {_name(most)} has kappa {_kappa(most)} instead of "
        f"{_kappa(losing)}: {_kept(most)}, and {_rate(most)}."
    )


def _several(ranked: Iterable[RankedVariant]) -> list[RankedVariant]:
    return [one for one in ranked if _cored(one.variant)]


def _growing(ranking: Rankings, variant: Variant, case: Case) -> Iterator[str]:
    """What it keeps as its population grows."""
    rest = msgspec.structs.replace(case, members=1)
    shares = {
        other.members: found
        for other in ranking.qualities.cases
        if msgspec.structs.replace(other, members=1) == rest
        and isinstance(found := ranking.qualities.law(variant, other).effective, Worth)
        and not found.is_exact
    }
    least, most = min(shares, default=0), max(shares, default=0)
    if shares and shares[least].value / least > shares[most].value / most:
        said = ", ".join(f"{kept(shares[n], n)} of {n}" for n in sorted(shares))
        yield f"A larger population loses more: {_quoted(variant, case)} keeps {said} members."


def _ranked(ranking: Rankings, case: Case) -> list[RankedVariant]:
    return [one for one in ranking.of(case) if one.rate is not None]


def _kept(one: RankedVariant) -> str:
    if one.effective is None or one.share is None:
        return "it keeps an unknown number of its members"
    if one.is_exact:
        return "its gradient of a linear fitness is exact"
    return f"it keeps {format_number(one.effective.value)} of its {one.case.members} members ({one.kept})"


def _rate(one: RankedVariant) -> str:
    if one.is_exact:
        return "the exact gradient of a linear fitness in each step"
    alone = ", by a single round" if one.is_single else ""
    return f"{one.rate_in_words} effective members per ms{alone}"


def _kappa(one: RankedVariant) -> str:
    return format_value(KAPPA, one.kappa.mean if one.kappa else None)


def _name(one: RankedVariant) -> str:
    return _quoted(one.variant, one.case)


def _quoted(variant: Variant, case: Case) -> str:
    return f"`{variant.label(case.operator).replace('`', ' ')}`"


def _cored(variant: Variant) -> int:
    """How many cores a variant has, 0 where that is its scheme's default."""
    return int(dict(variant.options).get(_CORES, 0))


def _single(variant: Variant) -> Variant:
    options = tuple(option for option in variant.options if option[0] != _CORES)
    return msgspec.structs.replace(variant, options=options)


def _entries(case: Case) -> int:
    entries = case.out_channels * case.in_channels // case.groups
    for width in case.kernel_size:
        entries *= width
    return entries
