"""Views on samples: medians, quantiles and ratios. Nothing here drops or changes a sample.

A measurement that holds no sample, or one that is not a finite number, has no median: ``None``,
never a guess from what is left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from esbench.records import Measurement

_FEWEST_ROUNDS = 2


@dataclass(frozen=True)
class Spread:
    """The middle of all samples, and the range that holds their middle 60 %."""

    p20: float
    median: float
    p80: float


@dataclass(frozen=True)
class Interval:
    """The middle of some values, and between which of them the true median lies."""

    low: float
    median: float
    high: float

    @property
    def relative(self) -> float:
        """Half the width in units of the median: 0.01 is plus or minus 1 %."""
        half = (self.high - self.low) / 2
        if self.median == 0:
            return math.inf if half else 0.0
        return half / abs(self.median)


@dataclass(frozen=True)
class Ratio:
    """How many times ``b`` goes into ``a``, and how that was found.

    ``inside rounds``: the median over ``rounds`` rounds of (median of a / median of b), so that
    drift between rounds cancels; ``low`` and ``high`` are the 95 % interval of that median, ``None`` where
    the rounds are too few for one. ``of medians``: the two did not share rounds.
    """

    value: float
    method: Literal["inside rounds", "of medians"]
    rounds: int = 0
    low: float | None = None
    high: float | None = None


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """The order-statistic interval of the median: no shape of the distribution is assumed.

    Between the k-th smallest and the k-th largest of n independent values lies the true median with
    probability 1 - 2 P(Binomial(n, 1/2) < k), so k is the largest that keeps the confidence (David and
    Nagaraja, Order Statistics, 7.1). ``None`` where not even the extremes reach it, for 95 % below 6
    values, and where a value is not finite.
    """
    rank = _rank(len(values), confidence)
    if rank == 0 or not _usable(values):
        return None
    ordered = sorted(values)
    return Interval(float(ordered[rank - 1]), float(np.median(ordered)), float(ordered[-rank]))


def spread(measurement: Measurement) -> Spread | None:
    """p20, median and p80 over the samples of all rounds."""
    samples = [sample for visit in measurement.samples for sample in visit]
    if not _usable(samples):
        return None
    p20, median, p80 = (float(value) for value in np.quantile(samples, (0.2, 0.5, 0.8)))
    return Spread(p20, median, p80)


def median(measurement: Measurement) -> float | None:
    """The median over the samples of all rounds."""
    found = spread(measurement)
    return found.median if found else None


def round_medians(measurement: Measurement) -> tuple[float | None, ...]:
    """One median for each round, ``None`` for a round without usable samples."""
    return tuple(float(np.median(visit)) if _usable(visit) else None for visit in measurement.samples)


def share_rounds(a: Measurement, b: Measurement) -> bool:
    """Whether round k of one was measured beside round k of the other, as far as both go."""
    return (a.case, a.phase, a.company) == (b.case, b.phase, b.company)


def ratio(a: Measurement, b: Measurement) -> Ratio | None:
    """How many times ``b`` goes into ``a``, taken inside rounds where the two shared at least two.

    A quick call and a slow one leave the rounds at different times: those that both took part in
    count. A single round is no company: a call beyond its budget has one sample, taken alone.

    ``None`` where there is no such number: no usable samples, a zero or negative divisor, or two
    measurements that no ratio may mix (another metric, another method).
    """
    if (a.metric, a.method) != (b.metric, b.method):
        return None
    if share_rounds(a, b):
        pairs = zip(round_medians(a), round_medians(b), strict=False)
        ratios = [x / y for x, y in pairs if x is not None and y is not None and y > 0]
        if len(ratios) >= _FEWEST_ROUNDS:
            found = interval(ratios)
            low, high = (found.low, found.high) if found else (None, None)
            return Ratio(float(np.median(ratios)), "inside rounds", len(ratios), low, high)
    above, below = median(a), median(b)
    if above is None or below is None or below <= 0:
        return None
    return Ratio(above / below, "of medians")


@cache
def _rank(count: int, confidence: float) -> int:
    """The k of the order-statistic interval, 0 where there is none."""
    below, logarithm = 0.0, -count * math.log(2)  # of P(Binomial(count, 1/2) = k)
    for k in range(count // 2):
        below += math.exp(logarithm)
        if 2 * below > 1 - confidence:
            return k
        logarithm += math.log((count - k) / (k + 1))
    return count // 2


def _usable(samples: Sequence[float]) -> bool:
    return len(samples) > 0 and bool(np.isfinite(samples).all())
