"""What to train with: the ranking of a case as advice, with reasons."""

import glob
import json
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import msgspec

from esbench.errors import UserError
from esbench.report import captions
from esbench.report.analysis.pivot import LATENCY, operators
from esbench.report.analysis.quality import ALONE, KAPPA, Part, Worth, kept
from esbench.report.analysis.ranking import NOISE, RankedVariant, Rankings, choose, dense, holdings, rankings
from esbench.report.tables.ranking import headline
from esbench.report.text import escape, one_line
from esbench.schema import Case, Run, Scalar, Skipped, Variant
from esbench.units import format_multiplier, format_number, format_value

_WIDTH = 100


_README_WIDTH = 115


_CORES = "cores"


_LAYERS = ("Linear", "Conv2d")
"""Operators whose weights a case says the number of."""


@dataclass(frozen=True)
class Advice:
    """The ranking of one case: ``standings`` are those asked for, less what memory rules out.

    ``part`` is the case's in the network that it is a layer of.
    """

    ranking: Rankings
    case: Case
    standings: tuple[RankedVariant, ...]
    part: Part = ALONE

    @property
    def ranked(self) -> list[RankedVariant]:
        """The variants with a rate, the best first."""
        return [one for one in self.standings if one.rate is not None]

    @property
    def best(self) -> RankedVariant | None:
        """The variant to train with, ``None`` where none has a number."""
        return next(iter(self.ranked), None)

    def text(self) -> str:
        """The table, and what it comes to, for a terminal."""
        table = headline(self.ranking, self.case, self.standings).text()
        return "\n".join([table, *(textwrap.fill(one_line(line), _WIDTH) for line in self._reasons()), ""])

    def _reasons(self) -> Iterator[str]:
        best = self.best
        if best is None:
            yield "Nothing can be recommended here: no variant has a number, the table says why."
            return
        if self.part.own < self.part.whole:
            yield (
                f"In a network n_eff = n / (1 + kappa n / d) has the network's d, {self.part.whole}, of "
                f"which a layer like this has {self.part.own}: each layer's noise is the others' as well."
            )
        reference, fastest = dense(self.ranked), min(self.ranked, key=lambda one: one.step_ns or 0.0)
        against = ""
        if reference and reference != best and (times := best.times(reference)):
            against = f", {format_multiplier(times)} what {_name(reference)} gives"
        yield f"Best: {_name(best)} with {_rate(best)}{against}."
        if alike := best.alike(self.ranked):
            yield f"It is {alike}: their intervals reach its own."
        yield f"It {_kept(best)}; a step takes {_took(best)}."
        if fastest != best:
            yield f"{_name(fastest)} is faster, {_took(fastest)}, but {_kept(fastest)}."


def advise(
    runs: Iterable[Run],
    case: Case,
    *,
    variants: Collection[Variant] | None = None,
    limit_bytes: float | None = None,
    part: Part = ALONE,
) -> tuple[Advice | None, str]:
    """The ranking of a case in the run that says most of it, and a line on those that were passed over.

    ``None`` where no run ranks the case, or none says anything of the variants.

    Args:
        runs: of one device.
        case: what is to be trained.
        variants: those to choose from, by default all.
        limit_bytes: how much noise, and how large a peak, a step may have.
        part: what the case is of a network, by default all.

    """
    found = holdings(tuple(runs), case, variants, part)
    if not found:
        return None, ""
    chosen, passed_over = choose(found, variants)
    return Advice(chosen.ranking, case, tuple(within(chosen.standings, limit_bytes)), part), passed_over


def ranked_labels(runs: Iterable[Run]) -> list[str]:
    """The cases that some runs hold a ranking of."""
    operators = ((run, operator) for run in runs for operator in {row.case.operator for row in run.rows})
    cases = {case for run, operator in operators for one in rankings(run, operator) for case in one.cases}
    return sorted(case.label for case in cases)


def without_numbers(run: Run, case: Case) -> str:
    """Why the variants of a case have no number, a line for each reason, where no ranking can say it."""
    found = dict.fromkeys(
        f"  {row.variant.label(case.operator)}: {row.status}: {one_line(row.reason)}"
        for row in run.skipped
        if row.case == case and row.variant.mode == "batched"
    )
    return (
        "\n".join(["No variant has both a time and a quality:", *(found or ["  the run holds no reason"])])
        + "\n"
    )


def within(standings: Sequence[RankedVariant], limit_bytes: float | None) -> list[RankedVariant]:
    """The standings in their order; what needs more memory comes behind them, with that as its reason."""
    bounded = [one if limit_bytes is None else _bounded(one, limit_bytes) for one in standings]
    return sorted(bounded, key=lambda one: one.rate is None)


def _bounded(one: RankedVariant, limit_bytes: float) -> RankedVariant:
    if one.rate is None:
        return one
    needs = {"noise": one.noise_bytes, "peak": one.peak_bytes}
    above = {what: size for what, size in needs.items() if size is not None and size > limit_bytes}
    unknown = [what for what, size in needs.items() if size is None]
    if above:
        said = " and ".join(f"{what} {format_value(NOISE, size)}" for what, size in above.items())
        reason = f"memory limit: {said} above {format_value(NOISE, limit_bytes)}"
    elif unknown:
        reason = f"memory unknown: the run holds no {' and no '.join(unknown)} to hold to the limit"
    else:
        return one
    skipped = Skipped(variant=one.variant, case=one.case, phase=None, status="unavailable", reason=reason)
    return replace(one, step_ns=None, skipped=skipped)


def _rate(one: RankedVariant) -> str:
    if one.is_exact:
        return "the exact gradient of a linear fitness in each step"
    return f"{one.rate_in_words} effective members per ms"


def _kept(one: RankedVariant) -> str:
    kappa = f"kappa {format_value(KAPPA, one.kappa.mean)}" if one.kappa else "kappa unknown"
    share = "is exact for a linear fitness" if one.is_exact else f"keeps {one.kept} of its members"
    return f"{share} ({kappa})"


def _took(one: RankedVariant) -> str:
    base = f", {format_multiplier(one.multiplier.value)} base" if one.multiplier else ""
    return f"{format_value(LATENCY, one.step_ns)}{base}"


def _name(one: RankedVariant) -> str:
    return one.variant.label(one.case.operator)


def origin(advice: Advice) -> str:
    """Which run the advice is from."""
    return captions.origin(advice.ranking.grid.run)


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
    law = textwrap.fill(_law(run, chosen), _README_WIDTH)
    points = [
        textwrap.fill(f"- {one}", _README_WIDTH, subsequent_indent="  ") for one in _points(ranking, chosen)
    ]
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
        f"By time, {_quoted(fallen)} takes place {by_time.index(fallen) + 1} {count}, with "
        f"{format_value(LATENCY, fallen.step_ns)} for a step. By n_eff per ms it takes place "
        f"{ranked.index(fallen) + 1}: {_kept_text(fallen)}."
    )
    if reference and reference != fallen:
        noise = f" and {format_value(NOISE, reference.noise_bytes)} of noise" if reference.noise_bytes else ""
        yield (
            f"{_quoted(reference)}, its own number for every weight of each member: "
            f"{_kept_text(reference)}, for "
            f"{format_value(LATENCY, reference.step_ns)} a step{noise}. That is {_rate_text(reference)}."
        )
    against = [
        f"{format_multiplier(times)} what {_quoted(other)} gives"
        for other in (fallen, reference)
        if other and other != best and (times := best.times(other))
    ]
    against += [one] if (one := escape(best.alike(ranked))) else []
    yield (
        f"First by n_eff per ms: {_quoted(best)} with "
        f"{_rate_text(best)}{''.join(f', {one}' for one in against)}."
    )
    cored = [
        one for one in ranked if any(_single(other.variant) == one.variant for other in _several(ranked))
    ]
    # Of those that the run has with one core and with several, the one that loses most by it.
    losing = max(cored, key=lambda one: one.kappa.mean if one.kappa else 0.0, default=None)
    if losing:
        yield _cores(ranked, losing)
    yield from _growing(ranking, losing or fallen)


def _cores(ranked: Sequence[RankedVariant], losing: RankedVariant) -> str:
    """What independent cores give back to one that shares a core."""
    several = [one for one in _several(ranked) if _single(one.variant) == losing.variant]
    most = max(several, key=lambda one: _cored(one.variant))
    return (
        f"{_quoted(losing)} shares one core among all members: {_kept_text(losing)}. "
        f"With {_cored(most.variant)} "
        f"independent cores at the same arithmetic, {_quoted(most)} has kappa {_kappa(most)} instead of "
        f"{_kappa(losing)}: {_kept_text(most)}, and {_rate_text(most)}."
    )


def _several(ranked: Iterable[RankedVariant]) -> list[RankedVariant]:
    return [one for one in ranked if _cored(one.variant)]


def _growing(ranking: Rankings, one: RankedVariant) -> Iterator[str]:
    """What it keeps as its population grows."""
    rest = msgspec.structs.replace(one.case, members=1)
    shares = {
        other.members: found
        for other in ranking.qualities.cases
        if msgspec.structs.replace(other, members=1) == rest
        and isinstance(found := ranking.qualities.law(one.variant, other).effective, Worth)
        and not found.is_exact
    }
    least, most = min(shares, default=0), max(shares, default=0)
    if shares and shares[least].value / least > shares[most].value / most:
        said = ", ".join(f"{kept(shares[n], n)} of {n}" for n in sorted(shares))
        yield f"A larger population loses more: {_quoted(one)} keeps {said} members."


def _ranked(ranking: Rankings, case: Case) -> list[RankedVariant]:
    return [one for one in ranking.of(case) if one.rate is not None]


def _kept_text(one: RankedVariant) -> str:
    if one.effective is None or one.share is None:
        return "it keeps an unknown number of its members"
    if one.is_exact:
        return "its gradient of a linear fitness is exact"
    return f"it keeps {format_number(one.effective.value)} of its {one.case.members} members ({one.kept})"


def _rate_text(one: RankedVariant) -> str:
    if one.is_exact:
        return "the exact gradient of a linear fitness in each step"
    alone = ", by a single round" if one.is_single else ""
    return f"{one.rate_in_words} effective members per ms{alone}"


def _kappa(one: RankedVariant) -> str:
    return format_value(KAPPA, one.kappa.mean if one.kappa else None)


def _quoted(one: RankedVariant) -> str:
    return f"`{_name(one).replace('`', ' ')}`"


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


def applied(
    winners: Mapping[str, RankedVariant],
    modules: Mapping[Variant, str],
    *,
    exclude: Sequence[str] = (),
    first_run: str = "",
    from_rows: Collection[Variant] = (),
) -> str:
    """The code that trains with the winners.

    Args:
        winners: by the names of layers; a single one under any name is meant for the whole model.
        modules: where the scheme of a variant is imported from; of one that is missing the code says so.
        exclude: names of layers to leave unperturbed.
        first_run: an expression for rows that the model has to be run on before it can be perturbed.
        from_rows: variants whose update needs what their layers saw.

    """
    first, variants = next(iter(winners.values())), [one.variant for one in winners.values()]
    imports: dict[str, set[str]] = {"impls": {"perturb"}}
    for variant in variants:
        if variant in modules:
            imports.setdefault(modules[variant], set()).add(variant.scheme)
    lines = ["import torch", ""] if first_run else []
    lines += [f"from {name} import {', '.join(sorted(found))}" for name, found in sorted(imports.items())]
    lines += [
        f"# {scheme} is registered by nothing that was loaded: give the plugin it comes from with --plugin"
        for scheme in sorted({variant.scheme for variant in variants if variant not in modules})
    ]
    lines += [""]
    if first_run:
        lines += [f"model.eval()({first_run})  # lazy layers take their shapes from rows"]
    schemes = _patterns({name: expression(one.variant) for name, one in winners.items()})
    rest = [
        f"members={first.case.members}",
        f"sigma={first.case.sigma:g}",
        *([f"exclude={json.dumps([glob.escape(name) for name in exclude])}"] if exclude else []),
    ]
    if len(schemes) == 1:
        lines += [f"population = perturb(model, {schemes['*']}, {', '.join(rest)})"]
    else:
        lines += ["schemes = {", *(f"    {json.dumps(name)}: {code}," for name, code in schemes.items())]
        lines += ["}", f"population = perturb(model, schemes, {', '.join(rest)})"]
    if any(variant in from_rows for variant in variants):
        lines += [
            "# its update needs the layers' inputs:",
            "# y, record = population.call_with_activations(x, noise)",
            "# population.update(noise, utilities, record)",
        ]
    return "\n".join(lines)


def _patterns(codes: Mapping[str, str]) -> dict[str, str]:
    """Patterns of names: the most frequent scheme stands last, for all the rest."""
    usual, _ = Counter(codes.values()).most_common(1)[0]
    return {glob.escape(name): code for name, code in codes.items() if code != usual} | {"*": usual}


def expression(variant: Variant) -> str:
    """What makes a variant's scheme: ``SparsePerturbed(k=2)``."""
    return f"{variant.scheme}({', '.join(f'{key}={_literal(value)}' for key, value in variant.options)})"


def _literal(value: Scalar) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
