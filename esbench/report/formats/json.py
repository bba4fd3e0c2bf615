"""Answers as JSON documents, for programs that read what a command found."""

import json
import math
from collections.abc import Mapping

import msgspec

from esbench.report.analysis.ranking import RankedVariant, Recommendation, tied
from esbench.schema import Case, Run, Variant
from esbench.stats import median
from esbench.text import one_line


def recommendation_document(
    layers: Mapping[str, Case],
    recommendations: Mapping[Case, Recommendation],
    code: str,
    forwards: int,
    run: Run | None,
) -> str:
    """Return the recommended variants of each case, and the figures of all its variants.

    ``layers`` are the cases of the layers by name, ``code`` trains with the recommended variants, a step has
    this many ``forwards``, and ``run`` has the reasons of cases without a ranking.
    """
    answers = []
    for case in dict.fromkeys(layers.values()):
        answer: dict[str, object] = {
            "layers": [name for name, layer_case in layers.items() if layer_case == case and name],
            "case": msgspec.to_builtins(case),
        }
        if recommendation := recommendations.get(case):
            header, best = recommendation.run.header, recommendation.recommended
            answer |= {
                "run": header.run_id,
                "device": header.environment.device_name,
                "recommended": [ranked.variant.name for ranked in best],
                "tied": [ranked.variant.name for ranked in tied(best[0], recommendation.ranked)]
                if best
                else [],
                "variants": [_figures(ranked) for ranked in recommendation.variants],
            }
        elif run:
            reasons = [
                {**_names(row.variant), "reason": one_line(row.reason)}
                for row in run.skipped
                if row.case == case and row.variant.mode == "batched"
            ]
            answer |= {"run": run.header.run_id, "device": run.header.environment.device_name}
            answer |= {"recommended": [], "tied": [], "variants": reasons}
        answers.append(answer)
    document = {"forwards_per_step": forwards, "code": code, "recommendations": answers}
    return json.dumps(document, indent=2, allow_nan=False)


def _names(variant: Variant) -> dict[str, object]:
    return {"variant": variant.name, "scheme": variant.scheme, "options": dict(variant.options)}


def _figures(ranked: RankedVariant) -> dict[str, object]:
    """Return the figures of a variant; None for those that are missing, or infinite."""
    low, high = ranked.rate_interval or (None, None)
    return {
        **_names(ranked.variant),
        "exact": ranked.is_exact,
        "n_eff_per_ms": _finite(ranked.rate),
        "n_eff_per_ms_low": _finite(low),
        "n_eff_per_ms_high": _finite(high),
        "n_eff": _finite(ranked.effective.value) if ranked.effective else None,
        "kappa": _finite(ranked.kappa.mean) if ranked.kappa else None,
        "step_ns": ranked.step_ns,
        "times_base": _finite(ranked.multiplier.value) if ranked.multiplier else None,
        "noise_bytes": median(ranked.noise) if ranked.noise else None,
        "peak_bytes": ranked.peak_bytes,
        "reason": one_line(ranked.skipped.reason) if ranked.skipped else "",
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
