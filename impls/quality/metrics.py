"""Quality metrics of a scheme: kappa, bias and n_eff, structure of its noise, and cosines on a network."""

import copy
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from esbench.workload import QualityMetric
from impls.perturbation.population import perturb
from impls.quality import bias, gradient_cosine, kappa
from impls.quality.gradient_cosine import DigitsFitness
from impls.quality.kappa import Moments, Subject

FITTED, DECLARED, UNSEEN = "linear fitness", "closed form", "unseen"
AT_SIGMA = "at sigma"
ONE_MEMBER, ONE_WEIGHT = "one perturbation", "one weight"
SWEEP_REPLICATES = 3
"""Number of steps for each sigma of the sweep."""
ROW_REASON = "its update is computed from rows, not as a sum of utilities times noise: it has no kappa"
NO_DIRECTION = "its cosine is not above 0 at every step: the estimate does not point along the gradient"

MAX_SINGULAR_VALUES = 64
"""The most singular values of a spectrum that are stored."""

CORRELATED_MEMBERS = 4
"""Number of members whose noise is compared between layers and between steps."""


def quality_metrics(subject: Subject) -> Iterator[QualityMetric]:
    """Yield kappa, n_eff and metrics of the noise's structure; each sample is the value of one step."""
    sampled = [kappa.sample_moments(subject, step) for step in range(kappa.REPLICATES)]
    yield from _kappa_metrics(subject, sampled)
    yield from _pair_metrics(subject, sampled)
    yield QualityMetric("largest_change", ONE_WEIGHT, tuple(moments.largest for moments in sampled))
    yield from _spectrum_metrics(subject)
    layers, steps = zip(*correlations(subject), strict=True)
    yield QualityMetric("correlation", "layers", layers)
    yield QualityMetric("correlation", "steps", steps)


def _pair_metrics(subject: Subject, sampled: list[Moments]) -> Iterator[QualityMetric]:
    """Yield moments of inner products of two members, and their correlation."""
    reason = "pairs need at least two members" if subject.members == 1 else ""
    if any(moments.trace == 0 for moments in sampled):
        reason = kappa.ZERO_NOISE
    if reason:
        yield QualityMetric("dot_mean", "pairs", reason=reason)
        yield QualityMetric("correlation", "members", reason=reason)
        return
    mean, variance = zip(*(inner_product_moments(moments, subject.size) for moments in sampled), strict=True)
    yield QualityMetric("dot_mean", "pairs", mean)
    yield QualityMetric("dot_variance", "pairs", variance)
    yield QualityMetric("correlation", "members", tuple(map(member_correlation, sampled)))


def _spectrum_metrics(subject: Subject) -> Iterator[QualityMetric]:
    """Yield the spectrum and stable rank of one member's noise on the largest weight."""
    try:
        values, rank = spectrum(subject)
    except ValueError as error:
        yield from (
            QualityMetric(metric, ONE_MEMBER, reason=str(error))
            for metric in ("singular_values", "stable_rank")
        )
    else:
        yield QualityMetric("singular_values", ONE_MEMBER, values)
        yield QualityMetric("stable_rank", ONE_MEMBER, (rank,))


def digits_metrics(subject: Subject) -> Iterator[QualityMetric]:
    """Yield cosines with backpropagation's gradient on a network, over sigma and at the subject's sigma."""
    fitness = DigitsFitness.of(subject)
    for sigma in gradient_cosine.SIGMAS:
        cosines = tuple(fitness.cosine(sigma, step) for step in range(SWEEP_REPLICATES))
        yield QualityMetric("cosine", f"sigma={sigma:g}", cosines)
    cosines = tuple(fitness.cosine(subject.sigma, step) for step in range(kappa.REPLICATES))
    biases = () if subject.scheme.learns_from_rows else bias.sample_bias(subject)
    if reason := bias.explain_bias(subject.scheme, biases) or (NO_DIRECTION if min(cosines) <= 0 else ""):
        yield QualityMetric("effective_members", AT_SIGMA, reason=reason)
    else:
        n_effs = tuple(
            gradient_cosine.effective_members_of_cosine(cosine, subject.size) for cosine in cosines
        )
        yield QualityMetric("effective_members", AT_SIGMA, n_effs)


def _kappa_metrics(subject: Subject, sampled: list[Moments]) -> Iterator[QualityMetric]:
    """Yield kappa, fitted and in closed form, the bias, and the effective population."""
    if subject.scheme.learns_from_rows:
        yield QualityMetric("kappa", FITTED, reason=ROW_REASON)
        return
    members, size = subject.members, subject.size
    try:
        fitted = kappa.fit_kappa(subject, sampled)
        biases = bias.sample_bias(subject)
    except ValueError as error:
        yield QualityMetric("kappa", FITTED, reason=str(error))
        return
    yield QualityMetric("kappa", FITTED, fitted)
    declared = kappa.declared_kappa(subject)
    if declared is not None:
        yield QualityMetric("kappa", DECLARED, (declared,))
    yield QualityMetric("kappa", UNSEEN, (kappa.bound_of_rare_pairs(sampled, size),))
    yield QualityMetric("bias", FITTED, biases)
    if reason := bias.explain_bias(subject.scheme, biases):
        yield QualityMetric("effective_members", FITTED, reason=reason)
        return
    n_effs = tuple(kappa.effective_members(members, size, value) for value in fitted)
    yield QualityMetric("effective_members", FITTED, n_effs)


def inner_product_moments(sums: Moments, size: int) -> tuple[float, float]:
    """Return mean and variance over i != j of <E_i, E_j> / sqrt(d), for E scaled to entries of mean square 1.

    They are 0 and 1 for independent Gaussian members. ``size`` is d, the number of weights.
    """
    pairs = sums.members * (sums.members - 1)
    scale = size**0.5 * sums.members / sums.trace
    mean = sums.total / pairs * scale
    mean_square = sums.squares / pairs * scale**2
    return mean, mean_square - mean**2


def member_correlation(sums: Moments) -> float:
    """Return the mean of <E_i, E_j> over i != j, divided by the mean of <E_i, E_i>."""
    return sums.total / (sums.members - 1) / sums.trace


def spectrum(subject: Subject) -> tuple[tuple[float, ...], float]:
    """Return singular values and stable rank |E|_F^2 / |E|_2^2 of one member's noise E on the largest weight.

    E is taken as the matrix [o, i * taps] of the first group. Singular values are sorted, largest first, and
    divided by their root mean square; at most :data:`MAX_SINGULAR_VALUES` are returned, evenly spaced.

    Raises:
        ValueError: the noise is zero.

    """
    layer = max(subject.layers, key=lambda layer: layer.weight.numel())
    population = subject.population(1)
    name = layer.weight_path
    noise = population.perturbation(population.sample(0), 0)[name]
    values = torch.linalg.svdvals(layer.split_groups(noise)[0].flatten(1).double())
    squares = values.square()
    if not values.any():
        message = "its noise on the largest weight is 0"
        raise ValueError(message)
    scaled = (values / squares.mean().sqrt()).tolist()
    indices = {
        round(index * (len(scaled) - 1) / (MAX_SINGULAR_VALUES - 1)) for index in range(MAX_SINGULAR_VALUES)
    }
    return tuple(scaled[index] for index in sorted(indices)), float(squares.sum() / squares.max())


def correlations(subject: Subject) -> Iterator[tuple[float, float]]:
    """Yield the mean correlation coefficient of entries of successive layers, and of successive steps.

    There is one value of each for every pair of steps (0, 1), (2, 3), ... A model of one layer is paired with
    its copy. Layers of different shapes that draw from the same stream have the same first entries of the
    first member; so only these are compared.
    """
    has_one_layer = len(subject.layers) == 1
    model = nn.ModuleList([subject.model, copy.deepcopy(subject.model)]) if has_one_layer else subject.model
    population = perturb(
        model, subject.scheme, members=CORRELATED_MEMBERS, sigma=subject.sigma, seed=subject.seed, warn=False
    )

    def weight_noise(step: int) -> list[Tensor]:
        """Return the noise of each weight, [members, d]."""
        dense = population.dense_noise(population.sample(step))
        return [value.flatten(1).float() for name, value in dense.items() if name.endswith("weight")]

    for step in range(0, 2 * kappa.REPLICATES, 2):
        noise, next_noise = weight_noise(step), weight_noise(step + 1)
        layers = [_correlation_coefficient(a, b) for a, b in itertools.pairwise(noise)]
        steps = [_correlation_coefficient(a, b) for a, b in zip(noise, next_noise, strict=True)]
        yield sum(layers) / len(layers), sum(steps) / len(steps)


def _correlation_coefficient(a: Tensor, b: Tensor) -> float:
    """Return sum ab / sqrt(sum a^2 sum b^2) for two tensors [members, d].

    If their d differ, the first entries of the first member are compared.
    """
    width = min(a.shape[1], b.shape[1])
    members = len(a) if a.shape == b.shape else 1
    x, y = a[:members, :width].flatten(), b[:members, :width].flatten()
    return float(x @ y / (x.norm() * y.norm()).clamp_min(torch.finfo(x.dtype).tiny))
