"""The code that trains with the variants that a ranking put first."""

import glob
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from esbench.report.ranking import RankedVariant
from esbench.schema import Scalar, Variant


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
