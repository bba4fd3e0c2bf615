"""A recommendation as text for a terminal, and as code to train with."""

import glob
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from esbench.report.analysis.ranking import RankedVariant, Recommendation, tied
from esbench.report.captions import layer_and_members, short_origin
from esbench.report.tables.console import LEGEND, figures_table
from esbench.report.tables.ranking import RATE, STEP, ranking_section, ranking_texts
from esbench.schema import OUT_OF_TIME, Case, Run, Scalar, Variant
from esbench.text import first_names, one_line, pluralize
from esbench.units import format_number

_TERMINAL_WIDTH = 80


def answer(recommendation: Recommendation, layers: Sequence[str] = ()) -> str:
    """Return the sentence that names the recommended variant of a case, or says that there is none.

    ``layers`` are the names of the layers of a model that have this shape.
    """
    subject = layer_and_members(recommendation.case) + (f" ({', '.join(layers)})" if layers else "")
    if not recommendation.recommended:
        load = recommendation.ranking.unreliable.get(recommendation.case)
        return wrap(f"{subject}: no recommendation, {load or 'no variant has a rate'}.")
    best, *others = (ranked.variant.name for ranked in recommendation.recommended)
    exact = ", exact for a linear fitness" if recommendation.recommended[0].is_exact else ""
    second = f"; the best of the others is {others[0]}" if others else ""
    skipped = [ranked.skipped for ranked in recommendation.variants if ranked.skipped]
    left_out = sum(row.reason == OUT_OF_TIME for row in skipped)
    measured = pluralize(len(recommendation.ranked), "measured variant")
    limit = f" Best of {measured}; the time budget left out {left_out}." if left_out else ""
    return wrap(f"{subject}: use {best}{exact}{second}.{limit}")


def figures(recommendations: Iterable[Recommendation], trained_with: Callable[[Variant], str]) -> str:
    """Return a table for each case with the recommended variants and dense noise, then the runs.

    ``trained_with`` returns the accuracies of networks trained with a variant, in % of dense noise's.
    """
    answers = list(recommendations)
    tables = [_figures(advice, trained_with) for advice in answers if advice.recommended]
    legend = f"{LEGEND}. All variants and why: --tables" if tables else "Why: --tables"
    runs = dict.fromkeys(wrap(short_origin(recommendation.run)) for recommendation in answers)
    return "\n".join([*filter(None, ["\n\n".join(tables)]), legend, *runs])


def details(recommendation: Recommendation) -> str:
    """Return all variants of a case with all columns and the reasons of those without a rate, and remarks."""
    section = ranking_section(recommendation.ranking, recommendation.case, recommendation.variants)
    return f"{section.text()}\n{remarks(recommendation)}".rstrip()


def remarks(recommendation: Recommendation) -> str:
    """Return sentences on a layer of a network, and on a variant with a faster step but a lower rate."""
    part, ranked = recommendation.part, recommendation.ranked
    sentences = []
    if part.own < part.whole:
        sentences.append(
            f"In a network n_eff = n / (1 + kappa n / d) has the network's d, {part.whole}, of which a layer "
            f"like this has {part.own}: the noise of each layer disturbs the gradients of all."
        )
    fastest = min(ranked, key=lambda entry: entry.step_ns or 0.0, default=None)
    if fastest and fastest not in recommendation.recommended:
        texts = ranking_texts(recommendation.ranking.grid, fastest, recommendation.reference)
        sentences.append(
            f"{fastest.variant.name} has the fastest step, {texts[STEP]} ms, but an n_eff per ms of only "
            f"{texts[RATE]}."
        )
    return "\n".join(map(wrap, sentences))


def _figures(recommendation: Recommendation, trained_with: Callable[[Variant], str]) -> str:
    """Return the table of a case, and which variants are tied with the recommended ones."""
    best, reference = recommendation.recommended, recommendation.reference
    rows = best if reference is None or reference in best else [*best, reference]
    ties = [
        wrap(f"Tied with {ranked.variant.name}: {first_names([entry.variant.name for entry in equals])}")
        for ranked in best
        if (equals := tied(ranked, recommendation.ranked))
    ]
    far = map(wrap, filter(None, (_far_changes(recommendation, ranked) for ranked in best)))
    table = figures_table(recommendation.ranking, recommendation.case, rows, reference)
    accuracies = "; ".join(f"{ranked.variant.name} {trained_with(ranked.variant)}" for ranked in best)
    trained = wrap(f"Accuracy on handwritten digits, % of dense noise's: {accuracies}")
    return "\n".join([table, *ties, *far, trained])


def _far_changes(recommendation: Recommendation, ranked: RankedVariant) -> str:
    """Return a sentence on a variant that moves single weights far more than dense noise does, or ``""``."""
    far = recommendation.ranking.qualities.far_changes(ranked.variant, recommendation.case)
    if not far:
        return ""
    own, of_dense = (format_number(change.mean) for change in far)
    return (
        f"{ranked.variant.name} moves single weights by up to {own} sigma, dense noise by {of_dense}: where "
        "the fitness is curved over such changes, its n_eff is smaller."
    )


def wrap(text: str) -> str:
    """Return a paragraph in lines of 80 columns."""
    return textwrap.fill(one_line(text), _TERMINAL_WIDTH)


def reasons_without_rate(run: Run, case: Case) -> str:
    """Return why the variants of a case have no rate, one line per reason."""
    reasons = dict.fromkeys(
        f"  {row.variant.label(case.operator)}: {row.status}: {one_line(row.reason)}"
        for row in run.skipped
        if row.case == case and row.variant.mode == "batched"
    )
    lines = ["no variant has both a time and a quality:", *(reasons or ["  the run holds no reason"])]
    return "\n".join(lines) + "\n"


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
    comments: dict[str, None] = {}
    for variant in variants:
        if variant in modules:
            imports.setdefault(modules[variant], set()).add(variant.scheme)
        else:
            comments[f"# {variant.scheme} is not registered: name its plug-in with --plugin"] = None
    lines = [f"from {name} import {', '.join(sorted(names))}" for name, names in sorted(imports.items())]
    lines += comments
    # The most frequent scheme comes last, for all other layers.
    codes = {name: expression(winner.variant) for name, winner in winners.items()}
    default, _ = Counter(codes.values()).most_common(1)[0]
    schemes = {glob.escape(name): code for name, code in codes.items() if code != default}
    schemes["*"] = default
    arguments = [f"members={case.members}", f"sigma={case.sigma:g}"]
    if case.antithetic:
        arguments.append("antithetic=True")
    if exclude:
        arguments.append(f"exclude={json.dumps([glob.escape(name) for name in exclude])}")
    if len(schemes) == 1:
        lines += [f"population = perturb(model, {default}, {', '.join(arguments)})"]
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
