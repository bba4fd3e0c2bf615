"""Estimate kappa, the loss of gradient quality by dependent members, from the noise alone.

Definition. Let the fitness be linear with gradient G of d weights. The utilities are c_m = <G, E_m>, centered
over the n members, and the estimate is g = sum_m c_m E_m. Averaged over directions of G,

    1 / cos^2(g, G) = d E|g|^2 / E<g, G>^2 = 1 + kappa + d / n,    1 + kappa = d P / t^2,

with t = E|e|^2 and P = E<e, e'>^2 over pairs of members, where e = E_m minus the component that all members
share. This follows from E<g, G> = n t and E|g|^2 = n (n - 1) P + n E|e|^4. It neglects (1 + kappa) / n and
the relative excess of E|e|^4 over t^2 (2 / d for Gaussian entries). So n members are worth n_eff = n / (1 +
kappa n / d) independent ones. Kappa does not depend on sigma or on the scale of E.

Estimator. Let A_ij = <E_i, E_j> for M members, r_i = sum_{j != i} A_ij and s = sum_i r_i. P is estimated
without bias by the U-statistic of centered entries (Szekely and Rizzo 2014, Annals of Statistics 42; Song
et al. 2012, JMLR 13):

    1 / (M (M - 3)) (sum_{i != j} A_ij^2 - 2 / (M - 2) sum_i r_i^2 + s^2 / ((M - 1) (M - 2))).

Subtracting the plain mean of the members instead would bias kappa by d / M^2, which is 256 for 2^20 weights
and 64 members. t is estimated by the mean of A_ii minus the mean of A_ij. The ratio has a bias of about 3
Var(t) / t^2: 6 / (d M) for independent Gaussian entries, 6 / d for one shared core.

Errors. A replicate is one step, which has new cores; its standard error is about 2 (1 + kappa) / M. The
reciprocal 1 / n_eff = 1 / n + kappa / d is linear in kappa, so replicates of n_eff are averaged as
reciprocals. A replicate is negative where the error of kappa makes 1 + kappa n / d negative.

Rare pairs. A pair of similar members adds d <e, e'>^2 / t^2 <= d to kappa, times the frequency of such
pairs. If their frequency is f, a sample of N pairs has none of them with probability exp(-f N): 1 / 40 for
f = 3.7 / N. So kappa may be 3.7 d / N above the estimate, which the interval of the replicates does not
cover.
"""

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esbench.workload import UnavailableError, WrongResultError
from impls.perturbation.layer import PerturbedLayer, perturbed_layers, trainable_modules
from impls.perturbation.noise import NoiseStream
from impls.perturbation.population import Population, perturb
from impls.perturbation.scheme import AnyScheme
from impls.verify.reference import random_step

MAX_SAMPLED_NUMBERS = 2**26
"""Most numbers of dense noise of sampled members: 256 MB."""

MIN_SAMPLED, USUAL_SAMPLED = 64, 128
"""Number of sampled members for a large and for a small weight, see :func:`sample_size`."""

CHEAP_NUMBERS = 2**22
"""Up to this many numbers of dense noise, more than :data:`MIN_SAMPLED` members are sampled."""

MAX_PIECE_NUMBERS = 2**24
"""Most numbers of dense noise computed in one call."""

CHEAP_NOISE_BYTES = 2**28
"""Up to this many bytes of noise, the whole population is drawn even if a smaller one has the same kappa."""

MAX_NOISE_BYTES = 2**31
"""Up to this many bytes of noise, the whole population can be drawn."""


@dataclass(frozen=True)
class Subject:
    """A scheme, a plain model and the size of the population.

    Attributes:
        model: a plain model.
        scheme: the scheme of all its layers.
        members: members of the population; pairs with antithetic sampling.
        sigma: scale of the noise.
        seed: seed of all noise.

    """

    model: nn.Module
    scheme: AnyScheme
    members: int
    sigma: float = 0.02
    seed: int = 0

    @cached_property
    def layers(self) -> list[PerturbedLayer]:
        """The perturbed layers of the model."""
        return perturbed_layers(trainable_modules(self.model, ()), {"*": self.scheme})

    @property
    def size(self) -> int:
        """d, the number of perturbed parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def population(self, members: int | None = None, *, antithetic: bool = False) -> Population:
        """Return a population of ``members`` members, by default the subject's."""
        return perturb(
            self.model,
            self.scheme,
            members=self.members if members is None else members,
            sigma=self.sigma,
            antithetic=antithetic,
            seed=self.seed,
            warn=False,
        )

    @cached_property
    def _populations(self) -> dict[int, Population]:
        """The populations to sample from, by the number of members to sample."""
        return {}

    def sample(self, step: int, count: int, *, update_directions: bool = False) -> Tensor:
        """Return the dense noise of randomly chosen members of one step, [count, d] in float32.

        All pairs of members are equally likely. If a population of ``count`` members has the same kappa and
        less work, all of its members are returned instead.

        Args:
            step: the step.
            count: number of members.
            update_directions: return the tensors that the update multiplies by utilities instead.

        Raises:
            UnavailableError: the noise of the whole population is needed, and takes too much memory.

        """
        if count not in self._populations:
            is_whole = self._samples_whole_population(count)
            self._populations[count] = self.population(self.members if is_whole else count)
        population = self._populations[count]
        noise = population.sample(step)
        rng = random.Random(f"{self.seed} {self.scheme} {step}")  # noqa: S311  not for cryptography
        members = sorted(rng.sample(range(population.members), count))
        rows = torch.empty(count, self.size, device=next(self.model.parameters()).device)
        row = 0
        for start, stop in _split_into_runs(members, max(1, MAX_PIECE_NUMBERS // self.size)):
            dense = population.dense_noise(noise, start, stop, update_directions=update_directions)
            pieces = rows[row : row + stop - start].split([value[0].numel() for value in dense.values()], 1)
            for piece, value in zip(pieces, dense.values(), strict=True):
                piece.unflatten(1, value.shape[1:]).copy_(value)
            row += stop - start
        return rows

    def _samples_whole_population(self, count: int) -> bool:
        """Return whether to draw the whole population and select ``count`` of its members."""
        if count == self.members or self.scheme.update_directions_differ:
            return True
        layers = self.layers
        weights = [layer.split_groups(layer.weight.detach()) for layer in layers]
        depends_on_members = any(
            self.scheme.kappa(weight, self.members) != self.scheme.kappa(weight, count) for weight in weights
        )
        noise = [layer.sample(0, 0, range(self.members), device="meta") for layer in layers]
        nbytes = sum(layer_noise.nbytes for layer_noise in noise)
        if depends_on_members and nbytes > MAX_NOISE_BYTES:
            raise UnavailableError(
                f"kappa depends on the number of members, and the noise of all {self.members} takes "
                f"{nbytes / 1e9:.1f} GB, more than {MAX_NOISE_BYTES / 1e9:.1f} GB: measure fewer members"
            )
        values = [value for layer_noise in noise for value in vars(layer_noise.weight).values()]
        # Selecting members of regenerated noise draws whole blocks of members again.
        is_regenerated = any(isinstance(value, NoiseStream) for value in values)
        dense_bytes = self.members * self.size * torch.float32.itemsize
        is_cheap = nbytes <= CHEAP_NOISE_BYTES and nbytes < dense_bytes and not is_regenerated
        return depends_on_members or is_cheap


def sample_size(members: int, size: int) -> int:
    """Return how many of a population's members to sample for weights of ``size`` numbers.

    Five replicates of 128 members (up to 2^15 weights) or 64 (up to 2^20) have an interval of 0.02 (1 +
    kappa) or 0.04 (1 + kappa). n_eff depends on kappa n / d, so more are sampled if n / d is above 1. Their
    noise has at most :data:`MAX_SAMPLED_NUMBERS` numbers, or is that of eight members.
    """
    count = max(MIN_SAMPLED, min(USUAL_SAMPLED, CHEAP_NUMBERS // size), math.ceil(64 * members / size))
    return min(members, count, max(8, MAX_SAMPLED_NUMBERS // size))


def _split_into_runs(members: list[int], max_length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of runs of consecutive numbers in a sorted list, at most ``max_length`` long."""
    start = previous = members[0]
    for member in members[1:]:
        if member != previous + 1 or member - start == max_length:
            yield start, previous + 1
            start = member
        previous = member
    yield start, previous + 1


class Moments(NamedTuple):
    """Sums over the inner products A_ij = <E_i, E_j> of M members.

    Attributes:
        members: M.
        trace: sum of A_ii.
        total: sum of A_ij over i != j.
        squares: sum of A_ij^2 over i != j.
        squared_row_sums: sum of r_i^2, with r_i = sum of A_ij over j != i.
        largest: the largest absolute value of an entry of any E_i.

    """

    members: int
    trace: float
    total: float
    squares: float
    squared_row_sums: float
    largest: float


def moments(rows: Tensor) -> Moments:
    """Return the moments of members E, [M, d].

    The smaller of A = E E^T and E^T E is computed: both have the same sum of squares.
    """
    count, size = rows.shape
    if count <= size:
        products = (rows @ rows.mT).double()
        diagonal = products.diagonal()
        row_sums = products.sum(1) - diagonal
    else:
        products = (rows.mT @ rows).double()
        diagonal = rows.double().square().sum(1)
        row_sums = (rows @ rows.sum(0)).double() - diagonal
    squares = products.square().sum() - diagonal.square().sum()
    least, most = rows.aminmax()
    largest = torch.maximum(-least, most).double()
    sums = [diagonal.sum(), row_sums.sum(), squares, row_sums.square().sum(), largest]
    return Moments(count, *torch.stack(sums).tolist())


REPLICATES = 5
"""Number of replicates (steps); for a given total of sampled noise, five give the shortest interval."""

MIN_MEMBERS = 4
"""The estimator divides by M - 3."""

ROUNDING = 2.0**-20
"""Members that differ by a smaller relative squared distance are equal up to rounding in float32."""

ZERO_NOISE = "its noise is 0 on these weights"

CHECKED_STEPS, CHECKED_NUMBERS, CHECKED_MEMBERS = 16, 2**16, (8, 64)
"""Number of random steps of :func:`check_kappa`; of a step's noise; its least and most members."""
CONFIRMED_STEPS = 128
"""Number of steps of a second estimate, if the first disagrees: where few pairs of members overlap, as in
sparse noise, one of 400 estimates from 16 steps is far too low."""

TOLERANCE, STANDARD_ERRORS = 0.5, 8.0
"""A declared kappa is wrong if 1 + kappa is off by more than this share and this many standard errors."""

SMALLEST_SHARE = 2.0**-40
"""Smaller values of |1 + kappa n / d| count as this one, to keep n_eff finite."""


def estimate_kappa(sums: Moments, size: int) -> float:
    """Estimate kappa from the moments of members of ``size`` weights; the module has the formula.

    Raises:
        ValueError: there are fewer than four members, or all of them are equal.

    """
    count = sums.members
    _check_count(count)
    centered = (
        sums.squares - 2 * sums.squared_row_sums / (count - 2) + sums.total**2 / ((count - 1) * (count - 2))
    )
    squared_product = centered / (count * (count - 3))  # P
    squared_norm = sums.trace / count - sums.total / (count * (count - 1))  # t
    if squared_norm <= ROUNDING * sums.trace / count:
        message = "all members have the same noise: less its mean over members it is 0"
        raise ValueError(message if sums.trace else ZERO_NOISE)
    return size * squared_product / squared_norm**2 - 1


def _check_count(members: int) -> None:
    if members < MIN_MEMBERS:
        raise ValueError(f"kappa needs at least {MIN_MEMBERS} members, got {members}")


def fit_kappa(subject: Subject, sampled: Sequence[Moments]) -> tuple[float, ...]:
    """Return an estimate of kappa for each sampled step.

    Raises:
        ValueError: there are fewer than four members, or all of them are equal.

    """
    if not subject.scheme.update_directions_differ:
        return tuple(estimate_kappa(moments, subject.size) for moments in sampled)
    return tuple(_sample_kappa_of_update(subject, step) for step in range(len(sampled)))


def _sample_kappa_of_update(subject: Subject, step: int) -> float:
    """Sample members of one step; return the estimate of kappa from their noise and update directions."""
    count = sample_size(subject.members, subject.size)
    noise, directions = (subject.sample(step, count, update_directions=differ) for differ in (False, True))
    return estimate_kappa_of_update(noise, directions, subject.members)


def estimate_kappa_of_update(noise: Tensor, directions: Tensor, members: int) -> float:
    """Estimate kappa of an update g = sum_m c_m D_m whose directions D_m are not the noise E_m.

    With A_ij = <E_i - mean E, E_j - mean E> and B_ij = <D_i, D_j>, averaged over directions of the gradient,

        1 / cos^2 = d sum_ij A_ij B_ij / (sum_i <E_i - mean E, D_i>)^2,    kappa = 1 / cos^2 - 1 - d / n.

    This is exact for all members of a population. For a sample, the sum over i != j is estimated by the
    U-statistic of centered A and B, as for P in this module.

    Args:
        noise: E of the sampled members, [M, d].
        directions: D of the same members, [M, d].
        members: n, the size of the whole population.

    Raises:
        ValueError: there are fewer than four members, or the noise is 0.

    """
    count, size = noise.shape
    _check_count(count)
    e, d = noise.double(), directions.double()
    centered = e - e.mean(0)
    overlap = float((centered * d).sum()) / count
    if overlap <= 0:
        raise ValueError(ZERO_NOISE)
    if count == members:
        total = float(((centered @ centered.mT) * (d @ d.mT)).sum())
        return size * total / (count * overlap) ** 2 - 1 - size / members
    pairs = float((_center_pairs(e @ e.mT) * _center_pairs(d @ d.mT)).sum()) / (count * (count - 3))
    same_member = float((centered.square().sum(1) * d.square().sum(1)).mean())
    overlap *= count / (count - 1)
    return size * (pairs + same_member / members) / overlap**2 - 1 - size / members


def _center_pairs(products: Tensor) -> Tensor:
    """Return products [M, M] less their row and column means, without bias and without the diagonal."""
    count = len(products)
    off_diagonal = products - products.diagonal().diag()
    sums = off_diagonal.sum(1)
    centered = off_diagonal - (sums[:, None] + sums) / (count - 2) + sums.sum() / ((count - 1) * (count - 2))
    return centered - centered.diagonal().diag()


def bound_of_rare_pairs(sampled: Sequence[Moments], size: int) -> float:
    """Return d ln 40 / N for N sampled pairs: unsampled pairs add less to kappa, with 97.5 % confidence."""
    pairs = sum(moments.members * (moments.members - 1) / 2 for moments in sampled)
    return size * math.log(40) / pairs


def effective_members(members: int, size: int, value: float) -> float:
    """Return n_eff = n / (1 + kappa n / d) for kappa = ``value``; negative if kappa is below -d / n."""
    share = 1 + value * members / size
    return members / math.copysign(max(abs(share), SMALLEST_SHARE), share)


def sample_moments(subject: Subject, step: int) -> Moments:
    """Sample members of one step and return their moments."""
    return moments(subject.sample(step, sample_size(subject.members, subject.size)))


def declared_kappa(subject: Subject) -> float | None:
    """Return the closed form of kappa for the model's weights, or None.

    For a network it is the mean over parameters of their layers' kappa; biases have kappa = 0. Noise that
    scales with the weight has a closed form for a single weight only.
    """
    total = 0.0
    for layer in subject.layers:
        weight = layer.split_groups(layer.weight.detach())
        value = layer.scheme.kappa(weight, subject.members)
        scales = isinstance(layer.scheme.noise_std(weight, subject.sigma), Tensor)
        if value is None or (scales and weight.numel() < subject.size):
            return None
        total += value * weight.numel()
    return total / subject.size


def check_kappa(scheme: AnyScheme, model: nn.Module) -> None:
    """Compare the closed form of kappa, if a scheme has one, with an estimate from random steps.

    Raises:
        WrongResultError: they differ by more than the estimate's error.

    """
    least, most = CHECKED_MEMBERS
    subject = Subject(model, scheme, most)
    subject = replace(subject, members=min(most, max(least, CHECKED_NUMBERS // subject.size)))
    declared = None if scheme.learns_from_rows else declared_kappa(subject)
    if declared is None:
        return

    def estimate(step: int) -> float:
        if scheme.update_directions_differ:
            return _sample_kappa_of_update(subject, step)
        return estimate_kappa(sample_moments(subject, step), subject.size)

    for steps in (CHECKED_STEPS, CONFIRMED_STEPS):
        estimates = [estimate(random_step()) for _ in range(steps)]
        mean, error = statistics.fmean(estimates), statistics.stdev(estimates) / math.sqrt(steps)
        if abs(declared - mean) <= max(STANDARD_ERRORS * error, TOLERANCE * max(1.0, 1 + mean)):
            return
    raise WrongResultError(
        f"kappa() returns {declared:.3g} for {subject.members} members, but their noise has a kappa of "
        f"{mean:.3g} ± {2 * error:.2g}: correct kappa() or sample()"
    )
