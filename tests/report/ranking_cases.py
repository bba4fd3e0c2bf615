"""Runs with invented quality figures, for tests of rankings."""

from collections.abc import Iterable, Mapping

import msgspec

from esbench.report.analysis.ranking import Rankings, rankings
from esbench.schema import Case, Measurement, Row, Run, Variant
from tests import synthetic
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row, variant

FLIPPED = variant("Flipped")
CORES = variant("Flipped", cores=8)
HADAMARD = variant("Hadamard")
LOW_RANK = variant("LowRank", rank=1)
SPARSE = variant("SparsePerturbed", k=1)
ORTHOGONAL = variant("Orthogonal")
SQUARE = linear(64, members=1024)

STEPS = {DENSE: 200.0, LOW_RANK: 6.0, HADAMARD: 5.0, CORES: 4.5, FLIPPED: 4.0, BASE: 1.0}
"""The time of a step in ms; for base, that of its forward."""
KAPPAS = {DENSE: 0.0, LOW_RANK: 0.0, HADAMARD: 0.0, CORES: 65 / 8, FLIPPED: 65.0}
NOISES = {DENSE: 4 * 10**9, LOW_RANK: 10**6, HADAMARD: 0, CORES: 3 * 10**5, FLIPPED: 10**5}

SINGULAR = {
    DENSE: tuple(2 - replicate / 32 for replicate in range(64)),
    LOW_RANK: (8.0, *[0.0] * 63),
    FLIPPED: tuple(2 - replicate / 33 for replicate in range(64)),
}


def quality_row(variant: Variant, case: Case, metric: str, method: str, *values: float) -> Measurement:
    """Return a quality row with a value for each replicate."""
    return Measurement(
        variant=variant, case=case, phase="quality", metric=metric, method=method, samples=(values,)
    )


def effective(case: Case, kappa: float) -> float:
    """Return the effective population of a case by the quality law."""
    entries = case.out_channels * case.in_channels
    return case.members / (1 + kappa * case.members / entries)


def qualities(variant: Variant, case: Case, kappa: float, spread: float = 0.0) -> list[Row]:
    """Return a variant's quality-law rows: four replicates of kappa, whose mean is its closed form."""
    estimates = [kappa + spread * off for off in (-1, 1, -1, 1)]
    return [
        quality_row(variant, case, "kappa", "linear fitness", *estimates),
        quality_row(variant, case, "kappa", "closed form", kappa),
        quality_row(
            variant,
            case,
            "effective_members",
            "linear fitness",
            *[effective(case, estimate) for estimate in estimates],
        ),
        quality_row(variant, case, "dot_mean", "pairs", 0.001),
        quality_row(variant, case, "dot_variance", "pairs", 1 + kappa),
        quality_row(variant, case, "stable_rank", "one perturbation", 17.5),
        *(
            quality_row(variant, case, "correlation", across, 0.01, -0.01)
            for across in ("layers", "members", "steps")
        ),
    ]


def rows(
    case: Case = SQUARE, kappas: Mapping[Variant, float] = KAPPAS, steps: Mapping[Variant, float] = STEPS
) -> list[Row]:
    """Return times, memory and quality of five schemes; sparse noise runs out of memory, base has no step."""
    result: list[Row] = [skipped(SPARSE, case, "out of memory: tried to allocate 9 GB")]
    for scheme, kappa in kappas.items():
        result.append(time_row(scheme, case, *[steps[scheme]] * 6, phase="step"))
        result.append(bytes_row(scheme, case, "noise_bytes", NOISES[scheme], phase="sample"))
        result.append(bytes_row(scheme, case, "peak_bytes", NOISES[scheme] + 10**6, phase="step"))
        result += qualities(scheme, case, kappa, spread=0.01)
    result += [quality_row(v, case, "singular_values", "one perturbation", *s) for v, s in SINGULAR.items()]
    for scheme in (BASE, NAIVE):
        result.append(time_row(scheme, case, *[STEPS[BASE]] * 6))
        result += [
            skipped(scheme, case, "a plain layer draws no noise", phase) for phase in ("step", "quality")
        ]
    return result


def digits(case: Case) -> list[Row]:
    """Return two schemes on a trained network: the cosine at two sigmas, the larger first, n_eff at one."""
    network = msgspec.structs.replace(case, operator="DigitsMLP")
    result: list[Row] = [skipped(BASE, network, "a plain layer draws no noise", "quality")]
    for scheme, factor in ((DENSE, 1.0), (FLIPPED, 0.25)):
        for sigma, cosine in (("0.1", 0.5), ("0.02", 0.9)):
            result.append(quality_row(scheme, network, "cosine", f"sigma={sigma}", *[factor * cosine] * 2))
        result.append(quality_row(scheme, network, "effective_members", "at sigma", *[512 * factor] * 2))
    return result


def without_forms(measured_rows: Iterable[Row]) -> list[Row]:
    """Return the rows of a run whose schemes declare no closed form of kappa, so only fits are used."""
    return [row for row in measured_rows if getattr(row, "method", None) != "closed form"]


def orthogonal(case: Case) -> list[Row]:
    """Return a slow variant that is exact for a linear fitness: 1 + kappa n / d is 0 but for fit error."""
    kappa = -case.out_channels * case.in_channels / case.members
    return [time_row(ORTHOGONAL, case, *[50.0] * 6, phase="step"), *qualities(ORTHOGONAL, case, kappa, 0.01)]


def sweep(*populations: int) -> list[Row]:
    """Return populations of one-sided flips with one core and with several, and of dense noise."""
    kappas = ((DENSE, 0.0), (FLIPPED, 65.0), (CORES, 65 / 8))
    cases = [linear(64, members=members) for members in populations]
    return [row for case in cases for variant, kappa in kappas for row in qualities(variant, case, kappa)]


def run(measured_rows: Iterable[Row] | None = None, run_id: str = "20260101T000000Z-quality-0001") -> Run:
    """Return a run of the suite ``quality``."""
    return synthetic.run(rows() if measured_rows is None else measured_rows, suite="quality", run_id=run_id)


def one_ranking(run: Run) -> Rankings:
    """Return the only ranking of Linear."""
    (ranking,) = rankings(run, "Linear")
    return ranking


def with_effective(*values: float) -> Run:
    """Return the usual run with these replicates of Hadamard's effective population."""
    replaced = {"kappa", "effective_members"}
    others = [row for row in rows() if row.variant != HADAMARD or getattr(row, "metric", "") not in replaced]
    return run([*others, quality_row(HADAMARD, SQUARE, "effective_members", "linear fitness", *values)])
