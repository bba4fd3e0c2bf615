"""A recommendation as text for a terminal, and as code to train with."""

import glob
import json
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from esbench.report.analysis.pivot import LATENCY
from esbench.report.analysis.quality import KAPPA, percent_of_members
from esbench.report.analysis.ranking import RankedVariant, Recommendation, dense
from esbench.report.tables.console import BEST, ranking_table
from esbench.report.tables.ranking import ranking_section, rate_cell
from esbench.schema import Case, Run, Scalar, Variant
from esbench.text import one_line, pluralize
from esbench.units import format_multiplier, format_value

_TERMINAL_WIDTH = 100


def text(recommendation: Recommendation, *, tables: bool = False) -> str:
    """Return the best variants and the recommendation for a terminal; with ``tables`` all variants."""
    count = sum(not ranked.variant.baseline for ranked in recommendation.ranked)
    table = f"Best {min(BEST, count)} of {pluralize(count, 'variant')} by n_eff per ms of a step:\n"
    table += ranking_table(recommendation.case, recommendation.variants)
    if tables:
        table = ranking_section(recommendation.ranking, recommendation.case, recommendation.variants).text()
    elif without := len(recommendation.variants) - len(recommendation.ranked):
        table += f"\n{pluralize(without, 'candidate')} without a rate: see --tables for the reasons"
    lines = (textwrap.fill(one_line(line), _TERMINAL_WIDTH) for line in _lines(recommendation))
    return "\n".join([table, "", *lines, ""])


def _lines(recommendation: Recommendation) -> Iterator[str]:
    part = recommendation.part
    if not recommendation.recommended:
        yield "No recommendation: no variant has a rate; see the table for the reasons."
        return
    if part.own < part.whole:
        yield (
            f"In a network n_eff = n / (1 + kappa n / d) has the network's d, {part.whole}, of which a layer "
            f"like this has {part.own}: the noise of each layer disturbs the gradients of all."
        )
    reference = dense(recommendation.ranked)
    for title, ranked in zip(
        ("Best", "Best of those that are not exact"), recommendation.recommended, strict=False
    ):
        times = ranked.times(reference) if ranked != reference else None
        against = f", {format_multiplier(times)} the rate of {reference.label}" if reference and times else ""
        yield f"{title}: {ranked.label} with {_rate(ranked)}{against}."
        if tied := ranked.tied_with(
            other for other in recommendation.ranked if other.is_exact == ranked.is_exact
        ):
            yield f"It is {tied}: their intervals overlap."
        members = _members(ranked)
        yield f"{members[0].upper()}{members[1:]} ({_kappa(ranked)}); a step takes {_step(ranked)}."
    fastest = min(recommendation.ranked, key=lambda ranked: ranked.step_ns or 0.0)
    if fastest not in recommendation.recommended:
        yield f"{fastest.label} is faster, {_step(fastest)}, but {_members(fastest)} ({_kappa(fastest)})."


def without_numbers(run: Run, case: Case) -> str:
    """Return why the variants of a case have no rate, one line per reason."""
    reasons = dict.fromkeys(
        f"  {row.variant.label(case.operator)}: {row.status}: {one_line(row.reason)}"
        for row in run.skipped
        if row.case == case and row.variant.mode == "batched"
    )
    lines = ["No variant has both a time and a quality:", *(reasons or ["  the run holds no reason"])]
    return "\n".join(lines) + "\n"


def _rate(ranked: RankedVariant) -> str:
    rate = rate_cell(ranked)
    if ranked.is_exact or rate is None:
        return "the exact gradient of a linear fitness in each step"
    return f"an n_eff per ms of {rate.text()}"


def _members(ranked: RankedVariant) -> str:
    """Return a clause on n_eff: ``its n_eff is 80 % of the population``."""
    if ranked.effective is None:
        return "its n_eff is unknown"
    if ranked.is_exact:
        return "it is exact for a linear fitness"
    percent = percent_of_members(ranked.effective, ranked.case.members)
    return "all members count" if percent == "100 %" else f"its n_eff is {percent} of the population"


def _kappa(ranked: RankedVariant) -> str:
    return f"kappa {format_value(KAPPA, ranked.kappa.mean)}" if ranked.kappa else "kappa unknown"


def _step(ranked: RankedVariant) -> str:
    base = f", {format_multiplier(ranked.multiplier.value)} base" if ranked.multiplier else ""
    return f"{format_value(LATENCY, ranked.step_ns)}{base}"


def training_code(
    winners: Mapping[str, RankedVariant],
    modules: Mapping[Variant, str],
    *,
    exclude: Sequence[str] = (),
    from_rows: Collection[Variant] = (),
) -> str:
    """Return code that trains with the recommended variants.

    Args:
        winners: by name of layer; a single one, under any name, is for the whole model.
        modules: the module to import the scheme of a variant from; a missing one gets a comment.
        exclude: names of layers to leave unperturbed.
        from_rows: variants whose update needs the inputs of their layers.

    """
    variants = [winner.variant for winner in winners.values()]
    case = next(iter(winners.values())).case
    imports: dict[str, set[str]] = {"impls": {"perturb"}}
    unknown: dict[str, None] = {}
    for variant in variants:
        if variant in modules:
            imports.setdefault(modules[variant], set()).add(variant.scheme)
        else:
            unknown[f"# {variant.scheme} is not registered: name its plug-in with --plugin"] = None
    lines = [f"from {name} import {', '.join(sorted(names))}" for name, names in sorted(imports.items())]
    lines += [*unknown, ""]
    # The most frequent scheme comes last, for all other layers.
    codes = {name: expression(winner.variant) for name, winner in winners.items()}
    usual, _ = Counter(codes.values()).most_common(1)[0]
    schemes = {glob.escape(name): code for name, code in codes.items() if code != usual} | {"*": usual}
    arguments = [f"members={case.members}", f"sigma={case.sigma:g}"]
    if exclude:
        arguments.append(f"exclude={json.dumps([glob.escape(name) for name in exclude])}")
    if len(schemes) == 1:
        lines += [f"population = perturb(model, {usual}, {', '.join(arguments)})"]
    else:
        lines += ["schemes = {", *(f"    {json.dumps(name)}: {code}," for name, code in schemes.items())]
        lines += ["}", f"population = perturb(model, schemes, {', '.join(arguments)})"]
    if any(variant in from_rows for variant in variants):
        lines += [
            "# its update needs the layers' inputs:",
            "# y, record = population.call_with_activations(x, noise)",
            "# population.update(noise, utilities, record)",
        ]
    return "\n".join(lines)


def expression(variant: Variant) -> str:
    """Return the call that constructs the scheme of a variant: ``SparsePerturbed(k=2)``."""
    return f"{variant.scheme}({', '.join(f'{key}={_literal(value)}' for key, value in variant.options)})"


def _literal(value: Scalar) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
