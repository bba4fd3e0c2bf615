"""The quality law, fitted: what a scheme's members share, and how many independent ones they are worth.

For a locally linear fitness the utilities are c_m = <G, E_m>, centred over the members, and the estimate is
g = sum_m c_m E_m. With e_m = E_m less what all members have in common, t = E|e|^2 and
P = E <e, e'>^2 over two members, an isotropic gradient of d weights has

    E <g, G> = n t,    E |g|^2 = n (n - 1) P + n E|e|^4,    E |G|^2 = d,

since E_G <G, a>^2 <..> needs only the inner products a' b of what it meets. So

    1 / cos^2 = d E|g|^2 / E<g, G>^2 = 1 + kappa + d / n    with    1 + kappa = d P / t^2,

up to (1 + kappa) / n and to the share by which E|e|^4 is above t^2 (2 / d for Gaussian entries). Nothing in
kappa depends on sigma or on the scale of E: schemes whose noise scales with the weight have one for
the weight at hand.

The gradient is integrated out: with the Gram matrix A_ij = <E_i, E_j> of M members, P is estimated without
bias by the U-statistic of centred off-diagonal entries,

    1 / (M (M - 3)) sum_{i != j} (A_ij - (r_i + r_j) / (M - 2) + s / ((M - 1) (M - 2)))^2
    = 1 / (M (M - 3)) (sum_{i != j} A_ij^2 - 2 / (M - 2) sum_i r_i^2 + s^2 / ((M - 1) (M - 2))),

with r the sums of rows without the diagonal and s their sum (Szekely and Rizzo 2014, Annals of Statistics
42; Song et al. 2012, JMLR 13). Subtracting the plain mean instead would leave -d / M in every entry, and a
bias of kappa by d / M^2, which is 256 for a layer of 2^20 weights and 64 members. t is the mean of the
diagonal less that of the rest, without bias too. What is left is the ratio's bias, about 3 Var(t) / t^2. That
is 6 / (d M) for independent Gaussian entries; where members share one core t is the core's, and it stays
about 6 / d however many of them are looked at. A closed form has none.

The standard error of one replicate is about 2 (1 + kappa) / M. Replicates are steps: other cores too.

Of n_eff = n / (1 + kappa n / d) the reciprocal is linear in kappa: 1 / n_eff = 1 / n + kappa / d. A replicate
of n_eff is kept as the law gives it, below 0 where the error of kappa, which n / d multiplies, leaves less
than nothing of 1 + kappa n / d. Whoever reads them averages the reciprocals, which is the law at the mean
kappa; the mean of n_eff itself would be above that. Whether the cosine is 1 within its error is no matter of
one replicate, and is decided there.

Pairs that share much may be rare, as those that meet in one column of a thousand. What they add to kappa is
d <e, e'>^2 / t^2 <= d for each pair, times how often they are met. Of N pairs none is met with a
probability of 1 / 40 where they are 3.7 in N, so that they may hide 3.7 d / N: kappa may be as much above
what was fitted, and no interval of the replicates knows.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esbench.registry import UnavailableError
from impls.perturbation.layer import PerturbedLayer, perturbed_layers, trainable_modules
from impls.perturbation.noise import NoiseStream
from impls.perturbation.population import Population, perturb
from impls.perturbation.scheme import AnyScheme

NUMBERS = 2**26
"""Most numbers that are written out at once: 256 MB."""

FEWEST, ENOUGH = 64, 128
"""Members that are looked at, see :func:`looked_at`."""

CHEAP = 2**22
"""Numbers that take a few hundredths of a second: more than the fewest members are looked at for so many."""

PIECE = 2**24
"""Numbers that a scheme is asked to write out in one call."""

NOISE_BYTES = 2**28
"""A population whose noise takes more is not drawn to look at some of its members, if any others will do."""

MOST_BYTES = 2**31
"""Nor is one whose noise takes more than this, if no others will do."""


@dataclass(frozen=True)
class Subject:
    """A scheme on a plain model, at a population's size.

    Attributes:
        model: a plain model; all its weights count, layer after layer.
        scheme: how they are perturbed.
        members: of the population whose quality is asked for; pairs, with antithetic sampling.
        sigma: the scale of the noise.
        seed: of all noise.

    """

    model: nn.Module
    scheme: AnyScheme
    members: int
    sigma: float = 0.02
    seed: int = 0

    @property
    def layers(self) -> list[PerturbedLayer]:
        """The layers of the model, with the scheme that each has."""
        return perturbed_layers(trainable_modules(self.model, ()), {"*": self.scheme})

    @property
    def size(self) -> int:
        """How many perturbed numbers there are: d."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def population(self, members: int | None = None, *, antithetic: bool = False) -> Population:
        """Make a population, of as many members as asked for."""
        return perturb(
            self.model,
            self.scheme,
            members=self.members if members is None else members,
            sigma=self.sigma,
            antithetic=antithetic,
            seed=self.seed,
        )

    def sample(self, step: int, count: int, *, update_directions: bool = False) -> Tensor:
        """Write members of one step out, drawn at random from all of them: [count, d], in float32.

        With ``directions`` what the update sums of the same members, times utilities.

        Each pair of members is met equally often, so that what some pairs share, one of several cores for
        instance, counts as often as it does in the whole population. Where it would cost too much to draw
        everybody's noise, they are all members of a smaller population whose pairs share as much.

        Raises:
            UnavailableError: only the whole population will do, and its noise takes too much memory.

        """
        everybody = self._draws_everybody(count)
        population = self.population(None if everybody else count)
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

    def _draws_everybody(self, count: int) -> bool:
        """Whether the whole population is drawn, so that some of its members can be picked."""
        if count == self.members or self.scheme.update_directions_differ:
            return True
        layers = self.layers
        noise = [layer.sample(0, 0, range(self.members), device="meta") for layer in layers]
        nbytes = sum(one.nbytes for one in noise)
        shapes = [layer.grouped(layer.weight.detach()).shape for layer in layers]
        if any(self.scheme.kappa(one, self.members) != self.scheme.kappa(one, count) for one in shapes):
            if nbytes > MOST_BYTES:
                message = (
                    f"what two members share depends on how many there are, and the noise of {self.members} "
                    f"takes {nbytes / 1e9:.1f} GB: more than is drawn to look at some of them"
                )
                raise UnavailableError(message)
            return True
        held = [getattr(one.weight, name) for one in noise for name in vars(one.weight)]
        # Noise that is drawn again is drawn with all the members of its block.
        if any(isinstance(value, NoiseStream) for value in held):
            return False
        # Of dense noise no less is drawn than is written out.
        return nbytes <= NOISE_BYTES and nbytes < self.members * self.size * torch.float32.itemsize


def looked_at(members: int, size: int) -> int:
    """Return how many of a population's members are looked at, for weights of that size.

    The standard error of kappa is about 2 (1 + kappa) / (members looked at) for one replicate. That leaves an
    interval of 0.02 (1 + kappa) for up to 2^15 weights and of 0.04 (1 + kappa) for up to 2^20, in 0.1 to 2 s
    on two cores. Where few pairs of members share much, as those that meet in one column of a thousand, it is
    wider, and what was not met is not in it: of wide layers the closed form knows more. n_eff takes kappa as
    kappa n / d: where there are more members than weights, more of them are looked at.
    """
    wanted = max(FEWEST, min(ENOUGH, CHEAP // size), math.ceil(64 * members / size))
    return min(members, wanted, max(8, NUMBERS // size))


def _runs(chosen: list[int], longest: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of runs of neighbours in a sorted list, each no longer than that."""
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
    """Add the inner products of members written out as rows [M, d] up, in float64."""
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
"""Steps that a figure is estimated at: of so many numbers in all, the ones with the shortest interval."""

NEEDED = 4
"""Members without which the centred mean over pairs does not exist."""

ROUNDING = 2.0**-20
"""Of the square of a member's length: what is left of equal members in float32 is less."""

ZERO = "its noise is zero on these weights: it moves nothing"

SMALLEST_SHARE = 2.0**-40
"""The least that is left of 1 + kappa n / d: a replicate of n_eff is a number, of either sign."""


def kappa(found: Moments, size: int) -> float:
    """Estimate kappa from the inner products of members of ``size`` numbers each.

    Raises:
        ValueError: there are fewer than four members, or nothing in which they differ.

    """
    count = found.members
    if count < NEEDED:
        message = f"kappa is a mean over pairs about their mean: it needs {NEEDED} members, there are {count}"
        raise ValueError(message)
    centred = found.squares - 2 * found.margins / (count - 2) + found.total**2 / ((count - 1) * (count - 2))
    shared = centred / (count * (count - 3))
    trace = found.trace / count - found.total / (count * (count - 1))
    if trace <= ROUNDING * found.trace / count:
        message = "its members are one and the same: centring leaves no direction to learn from"
        raise ValueError(message if found.trace else ZERO)
    return size * shared / trace**2 - 1


def fitted(subject: Subject, looks: Sequence[Moments]) -> tuple[float, ...]:
    """Estimate kappa at each step that was looked at.

    Raises:
        ValueError: there are too few members, or nothing in which they differ.

    """
    if not subject.scheme.update_directions_differ:
        return tuple(kappa(one, subject.size) for one in looks)
    count = looked_at(subject.members, subject.size)
    both = (
        (subject.sample(step, count), subject.sample(step, count, update_directions=True))
        for step in range(len(looks))
    )
    return tuple(contrast(*one, subject.members) for one in both)


def contrast(rows: Tensor, directions: Tensor, members: int) -> float:
    """Estimate kappa of an estimate g = sum_m c_m D_m whose directions D_m are others than the noise E_m.

    With A_ij = <E_i, E_j> about the members' mean and B_ij = <D_i, D_j> an isotropic gradient has

        1 / cos^2 = d sum_ij A_ij B_ij / (sum_i <E_i, D_i>)^2,

    and what that is above 1 + d / n counts as kappa at this n. Where all members of a population are looked
    at this is exact. Otherwise the sum over pairs is estimated by the U-statistic of both, centred.

    Args:
        rows: E of the members looked at, [M, d].
        directions: D of the same members.
        members: n, of the whole population.

    Raises:
        ValueError: there are fewer than four members, or noise and directions have nothing in common.

    """
    count, size = rows.shape
    if count < NEEDED:
        message = f"kappa is a mean over pairs about their mean: it needs {NEEDED} members, there are {count}"
        raise ValueError(message)
    e, d = rows.double(), directions.double()
    about = e - e.mean(0)
    common = float((about * d).sum()) / count
    if common <= 0:
        raise ValueError(ZERO)
    if count == members:
        shared = float(((about @ about.mT) * (d @ d.mT)).sum())
        return size * shared / (count * common) ** 2 - 1 - size / members
    pairs = float((_centred(e @ e.mT) * _centred(d @ d.mT)).sum()) / (count * (count - 3))
    own = float((about.square().sum(1) * d.square().sum(1)).mean())
    common *= count / (count - 1)
    return size * (pairs + own / members) / common**2 - 1 - size / members


def _centred(products: Tensor) -> Tensor:
    """Return products about the means of their rows and columns, without the diagonal and without bias."""
    count = len(products)
    apart = products - products.diagonal().diag()
    sums = apart.sum(1)
    centred = apart - (sums[:, None] + sums) / (count - 2) + sums.sum() / ((count - 1) * (count - 2))
    return centred - centred.diagonal().diag()


def unseen(looks: Sequence[Moments], size: int) -> float:
    """Return what pairs of members that were not met may add to kappa: d ln 40 / N, of the N that were."""
    pairs = sum(one.members * (one.members - 1) / 2 for one in looks)
    return size * math.log(40) / pairs


def effective_members(members: int, size: int, value: float) -> float:
    """Return n_eff = n / (1 + kappa n / d), the independent members that so many are worth.

    Below 0 where kappa is below -d / n by its error; at most n / :data:`SMALLEST_SHARE` either way.
    """
    share = 1 + value * members / size
    return members / math.copysign(max(abs(share), SMALLEST_SHARE), share)


def look(subject: Subject, step: int) -> Moments:
    """Return the inner products of the members looked at of one step, added up."""
    return moments(subject.sample(step, looked_at(subject.members, subject.size)))


def closed_form(subject: Subject) -> float | None:
    """Return the scheme's own kappa for the model's weights; None where it has none, or none for a network.

    Of a network it is the mean over layers, weighted by their sizes: an isotropic gradient's
    |G_l|^2. Noise of biases is dense, of kappa 0. Noise that scales with the weight is as strong in each
    layer as its weights are, and may drop the same in all of them: its form is for one weight alone.
    """
    total = 0.0
    for layer in subject.layers:
        weight = layer.grouped(layer.weight.detach())
        value = layer.scheme.kappa_of(weight, subject.members)
        scales = isinstance(layer.scheme.noise_std(weight, subject.sigma), Tensor)
        if value is None or (scales and weight.numel() < subject.size):
            return None
        total += value * weight.numel()
    return total / subject.size


def learns_from_rows(subject: Subject) -> bool:
    """Whether the update is no sum of utilities times noise, so that the law says nothing of it."""
    return subject.scheme.learns_from_rows
