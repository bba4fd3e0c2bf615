"""The ranking of a case as advice: text for a terminal, an explanation for the README, code to train with."""

import glob
import json
import math
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from esbench.errors import UserError
from esbench.report import captions
from esbench.report.analysis.pivot import LATENCY, operators
from esbench.report.analysis.quality import ALONE, KAPPA, EffectiveSize, Part, percent_of_members
from esbench.report.analysis.ranking import (
    NOISE,
    RankedVariant,
    Rankings,
    dense,
    rankings,
)
from esbench.report.analysis.run_selection import flaws
from esbench.report.tables.console import ranking_table
from esbench.report.tables.ranking import ranking_section, rate_cell
from esbench.report.tables.table import NOTHING
from esbench.report.text import counted, escape, listed, one_line
from esbench.schema import Case, Run, Scalar, Skipped, Variant
from esbench.units import format_multiplier, format_number, format_value

_TERMINAL_WIDTH = 100
_README_WIDTH = 115
_CORES = "cores"


@dataclass(frozen=True)
class Advice:
    """A recommendation for one case from one run.

    Attributes:
        ranking: the ranking of the run.
        case: the case.
        variants: those that were asked for; those above the memory limit have no rate.
        part: the share of the case in the network that it is a layer of.

    """

    ranking: Rankings
    case: Case
    variants: tuple[RankedVariant, ...]
    part: Part = ALONE

    @property
    def ranked(self) -> list[RankedVariant]:
        """The variants with a rate, best first."""
        return [one for one in self.variants if one.rate is not None]

    @property
    def best(self) -> RankedVariant | None:
        """The variant to train with, None if none has a rate."""
        return next(iter(self.ranked), None)

    @property
    def run(self) -> Run:
        """The run that it is from."""
        return self.ranking.grid.run

    @property
    def origin(self) -> str:
        """The caption of the run that the advice is from."""
        return captions.origin(self.run)

    def text(self, *, tables: bool = False) -> str:
        """Return the best variants and the advice for a terminal; with ``tables`` all variants."""
        table = ranking_table(self.case, self.variants)
        if tables:
            table = ranking_section(self.ranking, self.case, self.variants).text()
        elif without := len(self.variants) - len(self.ranked):
            table += f"\n{counted(without, 'candidate')} without a rate: --tables gives the reasons"
        lines = (textwrap.fill(one_line(line), _TERMINAL_WIDTH) for line in self._lines())
        return "\n".join([table, "", *lines, ""])

    def _lines(self) -> Iterator[str]:
        best = self.best
        if best is None:
            yield "No recommendation: no variant has a rate, the table says why."
            return
        if self.part.own < self.part.whole:
            yield (
                f"In a network n_eff = n / (1 + kappa n / d) has the network's d, {self.part.whole}, of "
                f"which a layer like this has {self.part.own}: each layer's noise is the others' as well."
            )
        reference, fastest = dense(self.ranked), min(self.ranked, key=lambda one: one.step_ns or 0.0)
        against = ""
        if reference and reference != best and (times := best.times(reference)):
            against = f", {format_multiplier(times)} the rate of {reference.label}"
        yield f"Best: {best.label} with {_rate(best)}{against}."
        if tied := best.tied_with(self.ranked):
            yield f"It is {tied}: their intervals overlap."
        members = _members(best)
        yield f"{members[0].upper()}{members[1:]} ({_kappa(best)}); a step takes {_step(best)}."
        if fastest != best:
            yield f"{fastest.label} is faster, {_step(fastest)}, but {_members(fastest)} ({_kappa(fastest)})."


def advise(
    runs: Iterable[Run],
    case: Case,
    *,
    variants: Collection[Variant] | None = None,
    limit_bytes: float | None = None,
    part: Part = ALONE,
) -> tuple[Advice | None, str]:
    """Recommend a variant from the run that ranks most; also return a line on runs that were passed over.

    The advice is None if no run ranks any of the variants on the case.

    Args:
        runs: of one device.
        case: the layer to train.
        variants: those to choose from, by default all.
        limit_bytes: the most that the noise and the peak of a step may take.
        part: the share of the case in its network, by default all.

    """
    found = []
    for run in sorted(runs, key=lambda run: run.header.run_id, reverse=True):
        ranking = next((one for one in rankings(run, case.operator) if case in one.cases), None)
        every = ranking.of(case, part) if ranking else []
        wanted = tuple(one for one in every if variants is None or one.variant in variants)
        if ranking and wanted:
            found.append(Advice(ranking, case, wanted, part))
    if not found:
        return None, ""
    chosen, passed_over = _choose(found, variants)
    ranked = [one if limit_bytes is None else _limited(one, limit_bytes) for one in chosen.variants]
    ranked.sort(key=lambda one: one.rate is None)
    return replace(chosen, variants=tuple(ranked)), passed_over


def _choose(found: Sequence[Advice], variants: Collection[Variant] | None) -> tuple[Advice, str]:
    """Choose among the runs that rank a case, newest first; also return a line on newer ones.

    Chosen is the newest valid run that answers for all variants (of the suite, for None); otherwise the one
    that ranks most of them. A run that ranks any goes before those that rank none, valid before invalid ones.
    """

    def key(one: Advice) -> tuple[bool, bool, bool, int]:
        is_valid = not (one.run.end and one.run.end.invalid)
        if variants is None:
            is_whole = not any(flaws(one.run))
        else:  # a reason why a variant has no rate is an answer too
            known = {each.variant for each in one.variants if each.rate is not None or each.skipped}
            is_whole = is_valid and known >= set(variants)
        return is_valid, bool(one.ranked), is_whole, 0 if is_whole else len(one.ranked)

    def ranked(one: Advice) -> str:
        return names(each.variant for each in one.ranked) or "nothing"

    chosen = max(found, key=key)  # the first of equals is the newest
    newer = []
    for one in found[: found.index(chosen)]:
        reasons = " and ".join(flaws(one.run))
        it = f", it {reasons}" if reasons else ""
        newer.append(f"newer {one.run.header.run_id} ranks {ranked(one)}{it}")
    shown = f"shows run {chosen.run.header.run_id}, which ranks {ranked(chosen)}"
    return chosen, f"{shown}; passed over: {'; '.join(newer)}" if newer else ""


def names(variants: Iterable[Variant]) -> str:
    """Return the names of the first few variants, and how many more there are."""
    return listed([variant.name for variant in variants])


def nearest(runs: Iterable[Run], case: Case, count: int = 3) -> list[str]:
    """Return the labels of the ranked cases nearest in size to a case, those of its operator first."""

    def distance(other: Case) -> tuple[bool, float]:
        sizes = [(one.out_channels, one.in_channels, one.members) for one in (case, other)]
        return other.operator != case.operator, sum(abs(math.log(a / b)) for a, b in zip(*sizes, strict=True))

    found = (ranking for run in runs for operator in operators(run) for ranking in rankings(run, operator))
    known = {one.label: one for ranking in found for one in ranking.cases}
    return sorted(known, key=lambda label: (distance(known[label]), label))[:count]


def without_numbers(run: Run, case: Case) -> str:
    """Return why the variants of a case have no rate, one line per reason."""
    found = dict.fromkeys(
        f"  {row.variant.label(case.operator)}: {row.status}: {one_line(row.reason)}"
        for row in run.skipped
        if row.case == case and row.variant.mode == "batched"
    )
    lines = ["No variant has both a time and a quality:", *(found or ["  the run holds no reason"])]
    return "\n".join(lines) + "\n"


def _limited(one: RankedVariant, limit_bytes: float) -> RankedVariant:
    """Return the variant; without its rate if it exceeds the memory limit or its memory is unknown."""
    needs = {"noise": one.noise_bytes, "peak": one.peak_bytes}
    above = [
        f"{what} {format_value(NOISE, size)}" for what, size in needs.items() if (size or 0.0) > limit_bytes
    ]
    unknown = [what for what, size in needs.items() if size is None]
    if one.rate is None or not (above or unknown):
        return one
    reason = (
        f"memory limit: {' and '.join(above)} above {format_value(NOISE, limit_bytes)}"
        if above
        else f"memory unknown: the run holds no {' and no '.join(unknown)} to compare with the limit"
    )
    skipped = Skipped(variant=one.variant, case=one.case, phase=None, status="unavailable", reason=reason)
    return replace(one, skipped=skipped)


def _rate(one: RankedVariant) -> str:
    if one.is_exact:
        return "the exact gradient of a linear fitness in each step"
    rate = rate_cell(one)
    return f"an n_eff per ms of {rate.text() if rate else NOTHING}"


def _members(one: RankedVariant) -> str:
    """Return a clause on n_eff: ``its n_eff is 80 % of its members``."""
    if one.effective is None:
        return "its n_eff is unknown"
    if one.is_exact:
        return "it is exact for a linear fitness"
    percent = percent_of_members(one.effective, one.case.members)
    return "all members count" if percent == "100 %" else f"its n_eff is {percent} of its members"


def _kappa(one: RankedVariant) -> str:
    return f"kappa {format_value(KAPPA, one.kappa.mean)}" if one.kappa else "kappa unknown"


def _step(one: RankedVariant) -> str:
    base = f", {format_multiplier(one.multiplier.value)} base" if one.multiplier else ""
    return f"{format_value(LATENCY, one.step_ns)}{base}"


def why_time_misleads(run: Run, case: str) -> str:
    """Explain the quality law, and how it changes the order of a run's variants, as Markdown.

    Args:
        run: one with steps and qualities.
        case: the label of a Linear or Conv2d layer, whose number of weights follows from its case.

    Raises:
        UserError: the run has no ranking of the case.

    """
    every = [ranking for operator in ("Linear", "Conv2d") for ranking in rankings(run, operator)]
    found = next(((ranking, one) for ranking in every for one in ranking.cases if one.label == case), None)
    if found is None:
        message = f"run {run.header.run_id} holds no ranking of a case {case!r}: nothing to explain"
        raise UserError(message)
    ranking, chosen = found
    size = chosen.out_channels * chosen.in_channels // chosen.groups * math.prod(chosen.kernel_size)
    law = (
        "To first order, the gradient of n members is as good as that of n_eff = n / (1 + kappa n / d) "
        "members with independent noise: d counts the weights, and kappa belongs to the scheme. A scheme can "
        "be fast because its members repeat each other, and no table of times shows it. Measured on "
        f"{escape(captions.source(run))}, {escape(chosen.label)}, d = {size}:"
    )
    points = [
        textwrap.fill(f"- {point}", _README_WIDTH, subsequent_indent="  ")
        for point in _points(ranking, chosen)
    ]
    return "\n".join([textwrap.fill(law, _README_WIDTH), "", *points]) + "\n"


def _points(ranking: Rankings, case: Case) -> Iterator[str]:
    """Yield the points of the explanation: how n_eff per ms changes the order of variants, and why."""
    ranked = [one for one in ranking.of(case) if one.rate is not None]
    by_time = sorted(ranked, key=lambda one: one.step_ns or 0.0)
    # The one that loses most places; the fastest of several.
    fallen = max(by_time, key=lambda one: ranked.index(one) - by_time.index(one))
    best, reference = ranked[0], dense(ranked)
    yield (
        f"By time, {_quoted(fallen)} takes place {by_time.index(fallen) + 1} of {len(ranked)}, with "
        f"{format_value(LATENCY, fallen.step_ns)} for a step. By n_eff per ms it takes place "
        f"{ranked.index(fallen) + 1}: {_n_eff(fallen)}."
    )
    if reference and reference != fallen:
        noise = f" and {format_value(NOISE, reference.noise_bytes)} of noise" if reference.noise else ""
        yield (
            f"{_quoted(reference)}, its own number for every weight of each member: {_n_eff(reference)}, for "
            f"{format_value(LATENCY, reference.step_ns)} a step{noise}. That is {_quoted_rate(reference)}."
        )
    tied = escape(best.tied_with(ranked))
    yield f"First by n_eff per ms: {_quoted(best)} with {_quoted_rate(best)}{tied and f', {tied}'}."
    # Of the schemes that the run has with one core and with several, the one with the largest kappa.
    with_cores = {_with_one_core(one.variant): one for one in sorted(ranked, key=_cores) if _cores(one)}
    shared = max(
        (one for one in ranked if one.variant in with_cores),
        key=lambda one: one.kappa.mean if one.kappa else 0.0,
        default=None,
    )
    if shared:
        most = with_cores[shared.variant]
        yield (
            f"{_quoted(shared)} shares one core among all members: {_n_eff(shared)}. "
            f"With {_cores(most)} independent cores at the same arithmetic, {_quoted(most)} has "
            f"{_kappa(most)} instead of {_kappa(shared).removeprefix('kappa ')}: {_n_eff(most)}, with "
            f"{_quoted_rate(most)}."
        )
    loser = shared or fallen
    shape = msgspec.structs.replace(case, members=1)
    populations = sorted(
        (one for one in ranking.qualities.cases if msgspec.structs.replace(one, members=1) == shape),
        key=lambda one: one.members,
    )
    shares = [
        f"{percent_of_members(effective, one.members)} of {one.members}"
        for one in populations
        if isinstance(effective := ranking.qualities.law(loser.variant, one).effective, EffectiveSize)
    ]
    if len(shares) > 1:
        yield (
            f"A larger population loses more: the n_eff of {_quoted(loser)} is {', '.join(shares)} members."
        )


def _n_eff(one: RankedVariant) -> str:
    """Return a clause on n_eff with its number: ``n_eff is 80 of 100 members (80 %)``."""
    if one.effective is None or one.is_exact:
        return _members(one)
    percent = percent_of_members(one.effective, one.case.members)
    return f"n_eff is {format_number(one.effective.value)} of {one.case.members} members ({percent})"


def _quoted_rate(one: RankedVariant) -> str:
    return f"{_rate(one)}{', by a single round' if one.is_single and not one.is_exact else ''}"


def _quoted(one: RankedVariant) -> str:
    return f"`{one.label}`"


def _cores(one: RankedVariant) -> int:
    """Return the number of cores of a variant, 0 for the default of its scheme."""
    return int(dict(one.variant.options).get(_CORES, 0))


def _with_one_core(variant: Variant) -> Variant:
    options = tuple(option for option in variant.options if option[0] != _CORES)
    return msgspec.structs.replace(variant, options=options)


def applied(
    winners: Mapping[str, RankedVariant],
    modules: Mapping[Variant, str],
    *,
    exclude: Sequence[str] = (),
    from_rows: Collection[Variant] = (),
) -> str:
    """Code that trains with the recommended variants.

    Args:
        winners: by name of layer; a single one, under any name, is for the whole model.
        modules: the module to import the scheme of a variant from; a missing one gets a comment.
        exclude: names of layers to leave unperturbed.
        from_rows: variants whose update needs the inputs of their layers.

    """
    first, variants = next(iter(winners.values())), [one.variant for one in winners.values()]
    imports: dict[str, set[str]] = {"impls": {"perturb"}}
    for variant in variants:
        if variant in modules:
            imports.setdefault(modules[variant], set()).add(variant.scheme)
    lines = [f"from {name} import {', '.join(sorted(found))}" for name, found in sorted(imports.items())]
    lines += [
        f"# {scheme} is not registered: name its plug-in with --plugin"
        for scheme in sorted({variant.scheme for variant in variants if variant not in modules})
    ]
    lines += [""]
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
    """Patterns of layer names to code: the most frequent scheme comes last, for all other layers."""
    usual, _ = Counter(codes.values()).most_common(1)[0]
    return {glob.escape(name): code for name, code in codes.items() if code != usual} | {"*": usual}


def expression(variant: Variant) -> str:
    """Return the call that constructs the scheme of a variant: ``SparsePerturbed(k=2)``."""
    return f"{variant.scheme}({', '.join(f'{key}={_literal(value)}' for key, value in variant.options)})"


def _literal(value: Scalar) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
