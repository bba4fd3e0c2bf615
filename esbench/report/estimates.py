"""What replicates say of a quantity: their mean, and between which values the true one lies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from esbench.units import format_number

LARGEST_GAIN = 100.0
"""Members that are worth more than so many times their number give a cosine of 1 within its error."""

ROUNDING = 1e-9
"""Of d: what is left of a closed form that is 0."""

EXACT = "exact"
"""What is shown for the members that an estimate without any error equals."""

_HALVINGS = 60


@dataclass(frozen=True)
class Estimate:
    """The mean of independent replicates; ``half`` is half its 95 % interval, None for a single one."""

    mean: float
    half: float | None
    replicates: int

    @property
    def reach(self) -> float:
        """How far from the mean the true value may be: not at all where nothing is known about it."""
        return self.half or 0.0


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of replicates, its interval by Student's t; ``None`` of none and where one is not finite."""
    if not values or not np.isfinite(values).all():
        return None
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return Estimate(mean, None, count)
    if min(values) == max(values):
        return Estimate(values[0], 0.0, count)  # where a mean and a deviation would only have roundings
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(mean, students_t(count - 1) * error, count)


@dataclass(frozen=True)
class Worth:
    """The independent members that a population is worth, n_eff, and its 95 % interval.

    The interval is not symmetric, and ``high`` is infinite where the replicates set no upper end; of a
    single replicate nothing is known, and both ends are the value. A closed form has no ``replicates``, and
    both ends are the value as well. Where the cosine is 1 within its error the value is the lower end.
    """

    value: float
    low: float
    high: float
    replicates: int

    @property
    def is_exact(self) -> bool:
        """Whether the estimate is the gradient itself, for a linear fitness: no number equals it."""
        return math.isinf(self.value)

    @property
    def is_bound(self) -> bool:
        """Whether all that is known of it is what it is at least."""
        return math.isfinite(self.value) and self.value == self.low and math.isinf(self.high)


def by_law(kappa: float, members: int, size: float) -> Worth | None:
    """n_eff = n / (1 + kappa n / d), by a closed form; ``None`` where less than nothing is left of d.

    The law's 1 / cos^2 holds up to (1 + kappa) / n: so d + kappa n is 0 where it is no more than 1 + kappa.
    """
    left, error = size + kappa * members, max(1 + kappa, 0.0) + ROUNDING * size
    if left < -error:
        return None
    value = members * size / left if left > error else math.inf
    return Worth(value, value, value, 0)


def size_of(kappas: Sequence[float], worths: Sequence[float], members: int) -> float | None:
    """d, of replicates of kappa and n_eff: 1 / n_eff = 1 / n + kappa / d; ``None`` where they do not tell."""
    squares = sum(kappa**2 for kappa in kappas)
    if len(kappas) != len(worths) or not squares or 0.0 in worths:
        return None
    products = sum(kappa * (1 / value - 1 / members) for kappa, value in zip(kappas, worths, strict=True))
    return squares / products if products > 0 else None


def worth(values: Sequence[float], members: int, share: float = 1.0) -> Worth:
    """What replicates of n_eff say together: their mean and its interval, of the reciprocals.

    By the quality law 1 / n_eff = 1 / n + kappa / d: the reciprocal is linear in kappa, whose replicates have
    no bias. Its mean is the law at the mean kappa, where n_eff itself, averaged, would be too large: it is
    convex. So a replicate may be below 0, where the error of kappa leaves less than nothing of
    1 + kappa n / d, and only all of them together decide.

    Where the mean reciprocal is below that of :data:`LARGEST_GAIN` times the members the cosine is 1 within
    its error, and the lower end is all that is known.

    Args:
        values: the replicates, with their signs.
        members: of the population, n.
        share: of a network's d, that of the layer whose replicates they are.

    Raises:
        ValueError: there is no such number, and why: no replicate, one that is none, or a mean below 0 by
            more than its error.

    """
    if not values or not np.isfinite(values).all() or 0.0 in values:
        message = "n_eff has a replicate that is no number, which cannot be" if values else "no replicate"
        raise ValueError(message)
    found = estimate([1 / members + share * (1 / value - 1 / members) for value in values])
    least = 1 / (LARGEST_GAIN * members)
    if found is None or found.mean + found.reach < -least:
        message = "n_eff is below 0 by more than its error, which cannot be"
        raise ValueError(message)
    most = found.mean + found.reach
    if found.mean < least:
        low = 1 / max(most, least)
        return Worth(low, low, math.inf, found.replicates)
    below = found.mean - found.reach
    return Worth(1 / found.mean, 1 / most, 1 / below if below > 0 else math.inf, found.replicates)


def kept(found: Worth, members: int) -> str:
    """The percentage of its members that a population is worth: no more than the interval allows to say.

    Only members that share less than independent ones are worth more than their number: where the interval
    holds 100 %, more is not claimed. No percentage is that of an exact estimate.
    """
    if found.is_exact:
        return EXACT
    if found.low <= members < found.value:
        return "about 100 %"
    least = "" if math.isfinite(found.high) else "at least "
    return f"{least}{format_number(100 * (found.low if least else found.value) / members)} %"


@cache
def students_t(freedom: int, confidence: float = 0.95) -> float:
    """The t within which a Student variable lies with this probability, found by halving.

    For whole degrees of freedom the probability has a closed form in theta = arctan(t / sqrt(freedom))
    (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        theta = (low + high) / 2
        low, high = (theta, high) if _within(theta, freedom) < confidence else (low, theta)
    return math.tan(low) * math.sqrt(freedom)


def _within(theta: float, freedom: int) -> float:
    """P(|T| < sqrt(freedom) tan(theta))."""
    odd = freedom % 2
    term, total = (math.cos(theta) if odd else 1.0), 0.0
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(theta) ** 2 * (power - 1) / power
    total *= math.sin(theta)
    return (theta + total) * 2 / math.pi if odd else total
