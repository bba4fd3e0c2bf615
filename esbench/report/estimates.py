"""What replicates say of a quantity: their mean, and between which values the true one lies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

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
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(mean, students_t(count - 1) * error, count)


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
