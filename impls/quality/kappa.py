"""Kappa of the quality law, the loss of a scheme due to dependent members, estimated from their noise.

For a locally linear fitness the utilities are c_m = <G, E_m>, centered over the members, and the estimate is
g = sum_m c_m E_m. With e_m = E_m minus the component that all members share, t = E|e|^2 and
P = E <e, e'>^2 over two members, an isotropic gradient of d weights has

    E <g, G> = n t,    E |g|^2 = n (n - 1) P + n E|e|^4,    E |G|^2 = d,

since expectations over G involve inner products of the members only. So

    1 / cos^2 = d E|g|^2 / E<g, G>^2 = 1 + kappa + d / n    with    1 + kappa = d P / t^2,

up to (1 + kappa) / n and to the relative excess of E|e|^4 over t^2 (2 / d for Gaussian entries). kappa does
not depend on sigma or on the scale of E; for noise that scales with the weight it depends on the weight.

The gradient is integrated out: with the Gram matrix A_ij = <E_i, E_j> of M members, P is estimated without
bias by the U-statistic of centered off-diagonal entries,

    1 / (M (M - 3)) sum_{i != j} (A_ij - (r_i + r_j) / (M - 2) + s / ((M - 1) (M - 2)))^2
    = 1 / (M (M - 3)) (sum_{i != j} A_ij^2 - 2 / (M - 2) sum_i r_i^2 + s^2 / ((M - 1) (M - 2))),

with r the sums of rows without the diagonal and s their sum (Szekely and Rizzo 2014, Annals of Statistics 42;
Song et al. 2012, JMLR 13). Subtracting the plain mean instead would leave -d / M in every entry, and bias
kappa by d / M^2, which is 256 for a layer of 2^20 weights and 64 members. t is estimated without bias by the
mean of the diagonal minus that of the rest. The bias of the ratio remains, about 3 Var(t) / t^2: 6 / (d M)
for independent Gaussian entries; with one shared core, about 6 / d for any M.

The standard error of one replicate is about 2 (1 + kappa) / M. Replicates are steps, with new cores.

The reciprocal of n_eff = n / (1 + kappa n / d) is linear in kappa: 1 / n_eff = 1 / n + kappa / d. A replicate
of n_eff is stored as this formula gives it; it is negative where the error of kappa makes 1 + kappa n / d
negative. Readers average the reciprocals, which gives n_eff at the mean kappa; the mean of n_eff would be
larger.

Pairs that share much may be rare, such as members with the same one column of a thousand. A pair adds d <e,
e'>^2 / t^2 <= d to kappa, times its frequency. If such pairs have a frequency of 3.7 / N, none is among N
pairs with probability 1 / 40. So kappa may be up to 3.7 d / N above the fitted value; the replicates'
interval does not cover this.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esbench.workload import UnavailableError
from impls.perturbation.layer import PerturbedLayer, perturbed_layers, trainable_modules
from impls.perturbation.noise import NoiseStream
from impls.perturbation.population import Population, perturb
from impls.perturbation.scheme import AnyScheme

NUMBERS = 2**26
"""Most numbers of dense noise in memory at once: 256 MB."""

FEWEST, ENOUGH = 64, 128
"""Limits of the number of members sampled, see :func:`sample_size`."""

CHEAP = 2**22
"""Numbers that take a few hundredths of a second; up to this count, more than FEWEST members are sampled."""

PIECE = 2**24
"""Numbers of dense noise computed in one call."""

NOISE_BYTES = 2**28
"""Noise of a whole population that takes more bytes is not drawn if a smaller population will do."""

MAX_BYTES = 2**31
"""Noise of a whole population that takes more bytes is never drawn."""


@dataclass(frozen=True)
class Subject:
    """A scheme on a plain model, at a population's size.

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

    @property
    def layers(self) -> list[PerturbedLayer]:
        """The perturbed layers of the model."""
        return perturbed_layers(trainable_modules(self.model, ()), {"*": self.scheme})

    @property
    def size(self) -> int:
        """d, the number of perturbed parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def population(self, members: int | None = None, *, antithetic: bool = False) -> Population:
        """Make a population of ``members`` members, by default the subject's."""
        return perturb(
            self.model,
            self.scheme,
            members=self.members if members is None else members,
            sigma=self.sigma,
            antithetic=antithetic,
            seed=self.seed,
        )

    def sample(self, step: int, count: int, *, update_directions: bool = False) -> Tensor:
        """Return the dense noise of randomly chosen members of one step, [count, d] in float32.

        All pairs of members are equally likely, so that pairs that share a core occur as
        often as in the whole population. Where drawing the whole population's noise would cost too much, all
        members of a smaller population are returned, if its pairs have the same kappa.

        Args:
            step: the step.
            count: number of members.
            update_directions: return the tensors that the update multiplies by utilities instead.

        Raises:
            UnavailableError: the whole population is needed, and its noise takes too much memory.

        """
        is_whole = self._draws_whole(count)
        population = self.population(None if is_whole else count)
        noise = population.sample(step)
        rng = random.Random(f"{self.seed} {self.scheme} {step}")  # noqa: S311  a choice, not a secret
        chosen = sorted(rng.sample(range(population.members), count))
        rows = torch.empty(count, self.size, device=next(self.model.parameters()).device)
        filled = 0
        for start, stop in _runs(chosen, max(1, PIECE // self.size)):
            place = 0
            written = population.dense_noise(noise, start, stop, update_directions=update_directions)
            for value in written.values():
                width = value[0].numel()
                rows[filled : filled + stop - start, place : place + width] = value.flatten(1)
                place += width
            filled += stop - start
        return rows

    def _draws_whole(self, count: int) -> bool:
        """Return whether the whole population is drawn, and ``count`` of its members are chosen."""
        if count == self.members or self.scheme.update_directions_differ:
            return True
        layers = self.layers
        noise = [layer.sample(0, 0, range(self.members), device="meta") for layer in layers]
        nbytes = sum(layer_noise.nbytes for layer_noise in noise)
        weights = [layer.split_groups(layer.weight.detach()) for layer in layers]
        if any(
            self.scheme.kappa(weight, self.members) != self.scheme.kappa(weight, count) for weight in weights
        ):
            if nbytes > MAX_BYTES:
                message = (
                    f"kappa of this scheme depends on the number of members, and the noise of {self.members} "
                    f"takes {nbytes / 1e9:.1f} GB: too much to sample members from"
                )
                raise UnavailableError(message)
            return True
        values = [
            getattr(layer_noise.weight, name) for layer_noise in noise for name in vars(layer_noise.weight)
        ]
        # Regenerated noise is drawn for whole blocks of members.
        if any(isinstance(value, NoiseStream) for value in values):
            return False
        # Dense noise takes as much memory as its dense form.
        return nbytes <= NOISE_BYTES and nbytes < self.members * self.size * torch.float32.itemsize


def sample_size(members: int, size: int) -> int:
    """Return how many of a population's members to sample for weights of ``size`` numbers.

    The standard error of kappa is about 2 (1 + kappa) / (members sampled) for one replicate. The interval of
    all replicates is 0.02 (1 + kappa) for up to 2^15 weights and 0.04 (1 + kappa) for up to 2^20, in 0.1 to 2
    s on two cores. It is wider where few pairs of members share much. n_eff depends on kappa n / d: if there
    are more members than weights, more of them are sampled.
    """
    count = max(FEWEST, min(ENOUGH, CHEAP // size), math.ceil(64 * members / size))
    return min(members, count, max(8, NUMBERS // size))


def _runs(chosen: list[int], longest: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of runs of consecutive numbers in a sorted list, at most ``longest`` long."""
    start = previous = chosen[0]
    for place in chosen[1:]:
        if place != previous + 1 or place - start == longest:
            yield start, previous + 1
            start = place
        previous = place
    yield start, previous + 1


class Moments(NamedTuple):
    """Sums over the inner products of members.

    Attributes:
        members: M.
        trace: sum of A_ii.
        total: sum of A_ij, i != j.
        squares: sum of A_ij^2, i != j.
        margins: sum of r_i^2.

    """

    members: int
    trace: float
    total: float
    squares: float
    margins: float


def moments(rows: Tensor) -> Moments:
    """Return the moments of members given as rows [M, d], in float64."""
    count, size = rows.shape
    if count <= size:
        products = (rows @ rows.mT).double()
        lengths = products.diagonal()
        sums = products.sum(1) - lengths
    else:
        products = (rows.mT @ rows).double()
        lengths = rows.double().square().sum(1)
        sums = (rows @ rows.sum(0)).double() - lengths
    squares = products.square().sum() - lengths.square().sum()
    total, margins = sums.sum(), sums.square().sum()
    return Moments(count, *torch.stack([lengths.sum(), total, squares, margins]).tolist())


REPLICATES = 5
"""Number of steps (replicates) of each figure; for a fixed amount of noise it gives the shortest interval."""

NEEDED = 4
"""The least number of members for the centered mean over pairs."""

ROUNDING = 2.0**-20
"""Relative to the square of a member's length: equal members differ by less in float32."""

ZERO = "its noise is zero on these weights"

SMALLEST_SHARE = 2.0**-40
"""The least size of 1 + kappa n / d, so that a replicate of n_eff is finite."""


def kappa(sums: Moments, size: int) -> float:
    """Estimate kappa from the inner products of members of ``size`` numbers each.

    Raises:
        ValueError: there are fewer than four members, or nothing in which they differ.

    """
    count = sums.members
    if count < NEEDED:
        message = f"kappa needs at least {NEEDED} members to estimate, there are {count}"
        raise ValueError(message)
    centered = sums.squares - 2 * sums.margins / (count - 2) + sums.total**2 / ((count - 1) * (count - 2))
    shared = centered / (count * (count - 3))
    trace = sums.trace / count - sums.total / (count * (count - 1))
    if trace <= ROUNDING * sums.trace / count:
        message = "all members have the same noise: nothing remains after centring"
        raise ValueError(message if sums.trace else ZERO)
    return size * shared / trace**2 - 1


def fitted(subject: Subject, sampled: Sequence[Moments]) -> tuple[float, ...]:
    """Estimate kappa at each sampled step.

    Raises:
        ValueError: there are too few members, or nothing in which they differ.

    """
    if not subject.scheme.update_directions_differ:
        return tuple(kappa(moments, subject.size) for moments in sampled)
    count = sample_size(subject.members, subject.size)
    both = (
        (subject.sample(step, count), subject.sample(step, count, update_directions=True))
        for step in range(len(sampled))
    )
    return tuple(contrast(*pair, subject.members) for pair in both)


def contrast(rows: Tensor, directions: Tensor, members: int) -> float:
    """Estimate kappa of an estimate g = sum_m c_m D_m whose directions D_m differ from the noise E_m.

    With A_ij = <E_i, E_j> about the members' mean and B_ij = <D_i, D_j>, an isotropic gradient has

        1 / cos^2 = d sum_ij A_ij B_ij / (sum_i <E_i, D_i>)^2,

    and kappa at this n is 1 / cos^2 - 1 - d / n. If all members of the population are given this is exact;
    otherwise the sum over pairs is estimated by the centered U-statistic of both.

    Args:
        rows: E of the sampled members, [M, d].
        directions: D of the same members.
        members: n, members of the whole population.

    Raises:
        ValueError: there are fewer than four members, or noise and directions have nothing in common.

    """
    count, size = rows.shape
    if count < NEEDED:
        message = f"kappa needs at least {NEEDED} members to estimate, there are {count}"
        raise ValueError(message)
    e, d = rows.double(), directions.double()
    about = e - e.mean(0)
    common = float((about * d).sum()) / count
    if common <= 0:
        raise ValueError(ZERO)
    if count == members:
        shared = float(((about @ about.mT) * (d @ d.mT)).sum())
        return size * shared / (count * common) ** 2 - 1 - size / members
    pairs = float((_centered(e @ e.mT) * _centered(d @ d.mT)).sum()) / (count * (count - 3))
    same_member = float((about.square().sum(1) * d.square().sum(1)).mean())
    common *= count / (count - 1)
    return size * (pairs + same_member / members) / common**2 - 1 - size / members


def _centered(products: Tensor) -> Tensor:
    """Return off-diagonal products centered by rows and columns, without bias."""
    count = len(products)
    apart = products - products.diagonal().diag()
    sums = apart.sum(1)
    centered = apart - (sums[:, None] + sums) / (count - 2) + sums.sum() / ((count - 1) * (count - 2))
    return centered - centered.diagonal().diag()


def unseen(sampled: Sequence[Moments], size: int) -> float:
    """Return a bound on the share of unsampled pairs in kappa: d ln 40 / N for N sampled pairs."""
    pairs = sum(moments.members * (moments.members - 1) / 2 for moments in sampled)
    return size * math.log(40) / pairs


def effective_members(members: int, size: int, value: float) -> float:
    """Return n_eff = n / (1 + kappa n / d), the effective population.

    It is negative where the estimate of kappa is below -d / n, and at most n / :data:`SMALLEST_SHARE` in
    size.
    """
    share = 1 + value * members / size
    return members / math.copysign(max(abs(share), SMALLEST_SHARE), share)


def sample_moments(subject: Subject, step: int) -> Moments:
    """Return the moments of the sampled members of one step."""
    return moments(subject.sample(step, sample_size(subject.members, subject.size)))


def declared_kappa(subject: Subject) -> float | None:
    """Return the closed form of kappa for the model's weights, or None.

    For a network it is the mean over layers, weighted by their sizes, as for an isotropic gradient. Biases
    have dense noise, with kappa = 0. A form for noise that scales with the weight holds for a single weight
    only.
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
