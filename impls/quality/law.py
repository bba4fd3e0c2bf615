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
diagonal less that of the rest, without bias too. What is left is the ratio's bias, about 3 Var(t) / t^2,
which is 6 / (d M) for Gaussian entries.

The standard error of one replicate is about 2 (1 + kappa) / M. Replicates are steps: other cores too.
"""

from impls.quality.moments import Moments, moments
from impls.quality.subject import Subject, looked_at

REPLICATES = 5
"""Steps that a figure is estimated at: of so many numbers in all, the ones with the shortest interval."""

NEEDED = 4
"""Members without which the centred mean over pairs does not exist."""

LARGEST_GAIN = 100.0
"""Where members are worth more than so many times their number, the cosine is 1 within its error."""


def kappa(found: Moments, size: int) -> float:
    """Estimate kappa from the inner products of members of ``size`` numbers each.

    Raises:
        ValueError: there are fewer than four members.

    """
    count = found.members
    if count < NEEDED:
        message = f"kappa is a mean over pairs about their mean: it needs {NEEDED} members, there are {count}"
        raise ValueError(message)
    centred = found.squares - 2 * found.margins / (count - 2) + found.total**2 / ((count - 1) * (count - 2))
    shared = centred / (count * (count - 3))
    trace = found.trace / count - found.total / (count * (count - 1))
    return size * shared / trace**2 - 1


def effective_members(members: int, size: int, value: float) -> float:
    """Return n_eff = n / (1 + kappa n / d), the independent members that so many are worth.

    Raises:
        ValueError: the cosine is 1 within the error of kappa, and any number would be as good.

    """
    share = 1 + value * members / size
    if share * LARGEST_GAIN < 1:
        message = (
            f"the cosine is 1 within the error of kappa, which is {value:.3g} here and counts n / d = "
            f"{members / size:.3g} times: no finite number of independent members is worth as much"
        )
        raise ValueError(message)
    return members / share


def look(subject: Subject, step: int) -> Moments:
    """Return the inner products of the members looked at of one step, added up."""
    return moments(subject.sample(step, looked_at(subject.members, subject.size)))


def closed_form(subject: Subject) -> float | None:
    """Return the scheme's own kappa for the model; None where one of its layers has none.

    Of a network it is the mean over layers, weighted by their sizes: an isotropic gradient's
    |G_l|^2. Noise of biases is dense, of kappa 0.
    """
    total = 0.0
    for layer in subject.layers:
        weight = layer.grouped(layer.weight.detach())
        value = layer.scheme.kappa(weight.shape, subject.members)
        if value is None:
            return None
        total += value * weight.numel()
    return total / subject.size


def learns_from_rows(subject: Subject) -> bool:
    """Whether the update is no sum of utilities times noise, so that the law says nothing of it."""
    return subject.scheme.learns_from_rows
