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
from collections.abc import Sequence

from torch import Tensor

from impls.quality.moments import Moments, moments
from impls.quality.subject import Subject, looked_at

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
    if not subject.scheme.contrasts:
        return tuple(kappa(one, subject.size) for one in looks)
    count = looked_at(subject.members, subject.size)
    both = (
        (subject.sample(step, count), subject.sample(step, count, directions=True))
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
        scales = isinstance(layer.scheme.deviation(weight, subject.sigma), Tensor)
        if value is None or (scales and weight.numel() < subject.size):
            return None
        total += value * weight.numel()
    return total / subject.size


def learns_from_rows(subject: Subject) -> bool:
    """Whether the update is no sum of utilities times noise, so that the law says nothing of it."""
    return subject.scheme.learns_from_rows
