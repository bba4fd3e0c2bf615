"""Estimate a scheme's bias: the part of kappa that remains when the estimates of many steps are averaged.

Definition. As for :mod:`impls.quality.kappa`, let the fitness be linear with gradient G of d weights, let e
be a member's noise minus the mean of its step's members, and let the estimate of a step be g = sum_m c_m E_m
with utilities c_m = <G, e_m>. Over steps, the mean of g is a multiple of C G, with C = E[e e^T]. Averaged
over directions of G,

    1 / cos^2(C G, G) = 1 + bias,    bias = d tr(C^2) / tr(C)^2 - 1,

John's (1971, Biometrika 58) measure of sphericity: 0 if C is a multiple of the identity, d / r - 1 if C is a
projection on r dimensions, as of a scheme that never perturbs the others. After T steps of n members

    1 / cos^2 = 1 + bias + (kappa - bias) / T + d / (n T).

Estimator. Steps are independent, so that products of members of different steps estimate tr(C^2) without
error in the mean (Chen, Zhang and Zhong 2010, JASA 105). With M members in each step and A_ij = <e_i, e_j>, a
pair of steps gives sum_ij A_ij^2 / (M - 1)^2, and a step gives tr(C) = sum_i A_ii / (M - 1). If the update
sums other directions D_m than E_m, A_ij^2 becomes <e_i, e_j> <D_i - mean D, D_j - mean D>, and A_ii becomes
<e_i, D_i>.

Interval. The samples are jackknife pseudo-values, one for each step; Student's interval of their mean is that
of the bias (Arvesen 1969, Annals of Mathematical Statistics 40). Without a bias the products of steps are
uncorrelated, and the interval is wider than necessary by a factor of about sqrt(2).

Logits. Where weights are drawn with probabilities P given by logits, parameters are logits, and C has to be
a multiple of dP / dlogit, the variance of the noise. Noise and directions are divided by its standard
deviation.
"""

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from esbench.workload import WrongResultError
from impls.perturbation.population import Population, PopulationNoise, perturb
from impls.perturbation.scheme import AnyScheme
from impls.quality.kappa import MAX_SAMPLED_NUMBERS, ROUNDING, Subject
from impls.verify.reference import random_step

STEPS, MEMBERS = 10, 6
"""Number of sampled steps, and of members at each of them; fewer for a large weight."""

CHECKED_MEMBERS = 5
"""Number of members of :func:`check_steps`."""

RUNS, RUN_LENGTH, EARLY_STEPS = 8, 3, 1000
"""Runs of consecutive steps that :func:`check_steps` draws below EARLY_STEPS and anywhere; their length."""

REPEATED, REPEATED_SHARE = 4.0, 0.75
"""Noise is repeated if in this share of runs products of their steps are so many times those of other steps.

They are in at most one of 20 runs of any scheme here, and by Markov's inequality in at most a quarter.
"""

TOLERANCE, STANDARD_ERRORS = 0.1, 5.0
"""A bias is significant if it is above the tolerance by this many standard errors."""


def sample_bias(subject: Subject) -> tuple[float, ...]:
    """Return pseudo-values of the bias, one for each step.

    A step draws a small population: the covariance of its members is about that of more members.

    Raises:
        ValueError: all members of a step are equal.

    """
    draws = max(8, min(MAX_SAMPLED_NUMBERS // subject.size, STEPS * MEMBERS))
    steps = min(STEPS, draws // 2)
    return estimate_bias(*draw_steps(subject.population(draws // steps), range(steps)))


def check_steps(scheme: AnyScheme, model: nn.Module, seed: int = 0) -> None:
    """Check that consecutive steps have independent noise, and that their mean estimate has no bias.

    Steps are drawn at random, first below EARLY_STEPS, then anywhere. A scheme may declare that it is biased.

    Raises:
        WrongResultError: noise is repeated from step to step, or the scheme has a significant bias.

    """
    population = perturb(model, scheme, members=CHECKED_MEMBERS, sigma=0.1, seed=seed, warn=False)
    early = secrets.SystemRandom().sample(range(secrets.randbelow(RUN_LENGTH), EARLY_STEPS, RUN_LENGTH), RUNS)
    for starts in (early, [random_step() for _ in range(RUNS)]):  # a scheme may be right at early steps only
        products = _Products.of(*draw_steps(population, [n + i for n in starts for i in range(RUN_LENGTH)]))
        repeated = products.of_runs(RUN_LENGTH) > REPEATED * products.between_runs(RUN_LENGTH)
        if repeated.double().mean() >= REPEATED_SHARE:
            raise WrongResultError(
                "consecutive steps have equal or similar noise: draw new noise from the stream at each step"
            )
        may_be_biased = scheme.is_biased or scheme.learns_from_rows
        if not may_be_biased and (reason := explain_bias(scheme, products.bias())):
            message = f"{reason}: correct sample(), or set is_biased = True if this is intended"
            raise WrongResultError(message)


def explain_bias(scheme: AnyScheme, samples: tuple[float, ...]) -> str:
    """Return why a scheme has no n_eff, or ``""`` if it neither declares a bias nor has a significant one.

    Args:
        scheme: the scheme.
        samples: pseudo-values of its bias; empty if it learns from rows.

    """
    values = torch.tensor(samples or (0.0, 0.0), dtype=torch.float64)
    mean, error = float(values.mean()), float(values.std()) / math.sqrt(len(values))
    if not (scheme.is_biased or mean - STANDARD_ERRORS * error > TOLERANCE):
        return ""
    declared = " (declared)" if scheme.is_biased else ""
    relation = f"has a cosine of {1 / math.sqrt(1 + mean):.2g} with" if samples else "differs from"
    return f"biased{declared}: the mean of its estimates over many steps {relation} the gradient"


def draw_steps(population: Population, steps: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Return the noise and the update's directions of all members of these steps, [steps, members, d].

    Both are in float32. They are the same tensor if the update sums the noise.
    """
    differ = any(layer.scheme.update_directions_differ for layer in population.layers)
    # D is sigma^2 E for bits. Both are divided by sigma std(E): entries of E D have mean 1, as for biases.
    deviations = _deviations_of_bits(population, 1.0 if differ else population.sigma)

    def standardized(noise: PopulationNoise, *, update_directions: bool) -> Tensor:
        dense = population.dense_noise(noise, update_directions=update_directions)
        parts = [_standardize(value, deviations.get(name)) for name, value in dense.items()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    noises, directions = [], []
    for step in steps:
        noise = population.sample(step)
        noises.append(standardized(noise, update_directions=False))
        if differ:
            directions.append(standardized(noise, update_directions=True))
    stacked = torch.stack(noises)
    return stacked, torch.stack(directions) if differ else stacked


def _deviations_of_bits(population: Population, sigma: float) -> dict[str, Tensor]:
    """Return the standard deviations of the noise of weights that are drawn as bits, by parameter name."""
    deviations = {}
    for layer in population.layers:
        if layer.scheme.draws_binary_weights:
            name, weight = layer.weight_path, layer.split_groups(layer.weight.detach())
            deviations[name] = torch.as_tensor(layer.scheme.noise_std(weight, sigma)).flatten()
    return deviations


def _standardize(noise: Tensor, deviation: Tensor | None) -> Tensor:
    """Return members' noise [m, *shape] as rows, divided by its deviation [d] where that is not 0."""
    rows = noise.flatten(1).float()
    if deviation is None:
        return rows
    varying = deviation > 0
    return rows[:, varying] / deviation[varying]


def estimate_bias(noise: Tensor, directions: Tensor) -> tuple[float, ...]:
    """Return pseudo-values of the bias, one for each step; the module has the formula.

    Args:
        noise: E of each step's members, at least two, [steps, members, d].
        directions: D of the same members.

    Raises:
        ValueError: all members of a step are equal.

    """
    return _Products.of(noise, directions).bias()


@dataclass(frozen=True)
class _Products:
    """Products of the noise of steps, from which the bias is estimated.

    Attributes:
        size: d.
        traces: an estimate of tr(C) from each step, [steps].
        pairs: an estimate of tr(C^2) from each pair of steps, [steps, steps]; 0 on the diagonal.
    """

    size: int
    traces: Tensor
    pairs: Tensor

    @classmethod
    def of(cls, noise: Tensor, directions: Tensor) -> Self:
        """Multiply the noise of steps; the arguments are those of :func:`estimate_bias`."""
        steps, members, size = noise.shape
        e, d = noise.flatten(0, 1), directions.flatten(0, 1)
        cross = (e @ d.mT).double()
        smallest_trace = ROUNDING * float(cross.diagonal().mean())
        cross = _center_within_steps(cross, steps)
        if directions is noise:
            e_products = d_products = cross
        else:
            e_products = _center_within_steps((e @ e.mT).double(), steps)
            d_products = _center_within_steps((d @ d.mT).double(), steps)
        traces = cross.flatten(2).flatten(0, 1).diagonal().view(steps, members).sum(1) / (members - 1)
        pairs = (e_products * d_products).sum((1, 3)).fill_diagonal_(0.0) / (members - 1) ** 2
        if traces.mean() <= smallest_trace:
            message = "all members have the same noise: less its mean over members it is 0"
            raise ValueError(message)
        return cls(size, traces, pairs)

    def bias(self) -> tuple[float, ...]:
        """Return the pseudo-values of :func:`estimate_bias`."""
        size, traces, pairs, steps = self.size, self.traces, self.pairs, len(self.traces)
        bias = size * pairs.sum() / (steps * (steps - 1)) / traces.mean().square() - 1
        # Jackknife: the bias without each of the steps.
        pair_means = (pairs.sum() - 2 * pairs.sum(1)) / ((steps - 1) * (steps - 2))
        trace_means = (traces.sum() - traces) / (steps - 1)
        bias_without_step = size * pair_means / trace_means.square() - 1
        return tuple((steps * bias - (steps - 1) * bias_without_step).tolist())

    def of_runs(self, length: int) -> Tensor:
        """Return the mean of the pairs within each run of ``length`` steps, [runs]."""
        return self._blocks(length).diagonal() / (length * (length - 1))

    def between_runs(self, length: int) -> float:
        """Return the mean of the pairs of steps of different runs."""
        blocks = self._blocks(length)
        runs = len(blocks)
        return float(blocks.sum() - blocks.trace()) / (runs * (runs - 1) * length**2)

    def _blocks(self, length: int) -> Tensor:
        return self.pairs.unflatten(1, (-1, length)).sum(2).unflatten(0, (-1, length)).sum(1)


def _center_within_steps(products: Tensor, steps: int) -> Tensor:
    """Center products [steps * members]^2 within each step; return [steps, members, steps, members]."""
    blocks = products.unflatten(1, (steps, -1)).unflatten(0, (steps, -1))
    blocks = blocks - blocks.mean(1, keepdim=True)
    return blocks - blocks.mean(3, keepdim=True)
