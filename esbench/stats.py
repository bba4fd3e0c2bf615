"""Statistics of samples: medians, quantiles and ratios. No sample is dropped or changed.

The median of a measurement is ``None`` if it has no samples, or if a sample is not finite.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from statistics import median as median_of  # twenty times as fast as numpy's for a few samples
from typing import Literal

import numpy as np

from esbench.schema import Conditions, Measurement, Run

MAX_CLOCK_DEVIATION = 0.02
"""A visit is off clock if its clock differs by more than this share from the median clock of the run."""
MIN_OUTLIER_SCORE = 3.5
"""A sample with a larger modified z-score is an outlier."""
BUSY = 0.25
"""Above this load average per thread, other programs disturb the times of a CPU."""
POWER_CAP = "power cap"
"""The throttling reason of a GPU that lowers its clock to stay within its power limit."""
LATENCY = "latency_ns"
PERMUTED = 7
"""The p value of a rank correlation is exact for at most this many pairs: 5040 permutations."""

_MIN_SHARED_ROUNDS = 2
"""With fewer shared rounds, a ratio is that of the medians."""
_MAX_THROTTLED_SHARE = 0.1
"""A run with a larger share of throttled visits is invalid."""
_LARGEST = 1e300
"""Larger values cannot be times or sizes, and their sums may overflow."""
_NORMAL_MAD = 0.6745
"""The median absolute deviation (MAD) of a standard normal distribution."""


@dataclass(frozen=True)
class Spread:
    """A median, with the 20 % and the 80 % quantile of the samples."""

    p20: float
    median: float
    p80: float


@dataclass(frozen=True)
class Interval:
    """A median with its confidence interval."""

    low: float
    median: float
    high: float

    @property
    def relative(self) -> float:
        """Half the width divided by the median: 0.01 is plus or minus 1 %."""
        half = (self.high - self.low) / 2
        if self.median == 0:
            return math.inf if half else 0.0
        return half / abs(self.median)


@dataclass(frozen=True)
class Ratio:
    """The ratio of a measurement ``a`` to ``b``.

    Attributes:
        value: the ratio.
        method: ``inside rounds``: the median over rounds of (median of a / median of b), in which drift
            between rounds cancels. ``of medians``: median of a / median of b, without shared rounds.
        rounds: number of shared rounds.
        low: lower end of the 95 % interval; None for too few rounds.
        high: upper end of the 95 % interval; None for too few rounds.
    """

    value: float
    method: Literal["inside rounds", "of medians"]
    rounds: int = 0
    low: float | None = None
    high: float | None = None

    @property
    def relative(self) -> float | None:
        """Half the width of the interval divided by the value."""
        if self.low is None or self.high is None:
            return None
        return Interval(self.low, self.value, self.high).relative


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Return the order-statistic interval of the median, which assumes no shape of the distribution.

    The true median lies between the k-th smallest and the k-th largest of n independent values with
    probability 1 - 2 P(Binomial(n, 1/2) < k); k is the largest one with at least the given confidence (David
    and Nagaraja, Order Statistics, 2003, 7.1). ``None`` for too few values, fewer than 6 for 95 %, or if a
    value is not finite.
    """
    rank = _rank(len(values), confidence)
    if rank == 0 or not _are_usable(values):
        return None
    ordered = sorted(values)
    return Interval(float(ordered[rank - 1]), float(median_of(ordered)), float(ordered[-rank]))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, float] | None:
    """Return Spearman's rank correlation and its two-sided p value; None if it is not defined.

    The p value is exact, from all permutations, for at most PERMUTED pairs, and an approximation above.
    """
    if len(set(x)) < 2 or len(set(y)) < 2:  # noqa: PLR2004  all are equal
        return None
    from scipy.stats import rankdata, spearmanr  # noqa: PLC0415  slow to import

    result = spearmanr(x, y)
    rho = float(result.statistic)
    if len(x) > PERMUTED:
        return rho, float(result.pvalue)
    first, second = (ranks - ranks.mean() for ranks in map(rankdata, (x, y)))
    orders = np.array(list(itertools.permutations(range(len(x)))))
    rhos = first[orders] @ second / np.sqrt((first @ first) * (second @ second))
    return rho, float(np.mean(np.abs(rhos) >= abs(rho) - 1e-9))


def median_of_values(values: Sequence[float]) -> float | None:
    """Return the median, ``None`` without values or if a value is not finite."""
    return float(median_of(values)) if _are_usable(values) else None


def middle_60_percent(values: Sequence[float]) -> Spread | None:
    """Return p20, median and p80, ``None`` without values or if a value is not finite."""
    if not _are_usable(values):
        return None
    p20, median, p80 = (float(value) for value in np.quantile(values, (0.2, 0.5, 0.8)))
    return Spread(p20, median, p80)


def spread(measurement: Measurement) -> Spread | None:
    """Return the :func:`median`, and p20 and p80 over the samples of all rounds."""
    all_samples, center = middle_60_percent(_samples(measurement)), median(measurement)
    return replace(all_samples, median=center) if all_samples and center is not None else None


def median(measurement: Measurement) -> float | None:
    """Return the median of the rounds' medians, the center of their :func:`interval`.

    All rounds have the same weight, because samples of one round are correlated. The median of all samples
    could lie outside the interval. ``None`` without samples, or if a sample is not finite.
    """
    return _median(measurement.samples)


_Rounds = tuple[tuple[float, ...], ...]


@lru_cache(2**14)  # a report needs each median tens of times
def _median(samples: _Rounds) -> float | None:
    if not _are_usable([sample for round_ in samples for sample in round_]):
        return None
    return median_of_values([value for value in _round_medians(samples) if value is not None])


@lru_cache(2**14)
def _round_medians(samples: _Rounds) -> tuple[float | None, ...]:
    """Return one median per round, ``None`` for a round without usable samples."""
    return tuple(map(median_of_values, samples))


def outlier_share(measurement: Measurement) -> float:
    """Return the share of outliers among the samples; no sample is dropped.

    An outlier has a modified z-score 0.6745 |x - median| / MAD above 3.5 (Iglewicz and Hoaglin, How to
    Detect and Handle Outliers, 1993). The share is 0 if the MAD is 0.
    """
    samples = _samples(measurement)
    if not _are_usable(samples):
        return 0.0
    distances = np.abs(np.array(samples) - np.median(samples))
    mad = float(np.median(distances))
    return float(np.mean(distances * _NORMAL_MAD > MIN_OUTLIER_SCORE * mad)) if mad > 0 else 0.0


def median_clock(run: Run) -> float | None:
    """Return the median clock in Hz over the visits of a run, ``None`` if none was reported."""
    clocks = [visit.clock_hz for visit in _timed_visits(run) if visit.clock_hz is not None]
    return float(np.median(clocks)) if clocks else None


def off_clock_share(measurement: Measurement, clock_hz: float | None) -> float:
    """Return the share of visits whose clock is more than 2 % off the given median clock of the run."""

    def is_off(visit: Conditions) -> bool:
        if visit.clock_hz is None or clock_hz is None:
            return False
        return abs(visit.clock_hz - clock_hz) > MAX_CLOCK_DEVIATION * clock_hz

    return _share(_visits(measurement), is_off)


def throttled_share(measurement: Measurement) -> float:
    """Return the share of visits in which the device reported a reason for throttling."""
    return _share(_visits(measurement), lambda visit: bool(visit.throttled))


def invalid_reasons(run: Run) -> tuple[str, ...]:
    """Return the reasons not to use the measurements of a run; empty for a valid run.

    A run is invalid if other processes were on the GPU at its start, or if the GPU was throttled in more
    than 10 % of the visits. A varying clock and the power cap do not count: a GPU without locked clocks
    regulates itself in this way, and all variants of a round are affected. Both are labels of the samples,
    see :func:`off_clock_share` and :func:`throttled_share`.
    """
    reasons = []
    if foreign := run.header.environment.foreign:
        reasons.append(f"other processes on the GPU at the start: {', '.join(foreign)}")
    causes = [set(visit.throttled) - {POWER_CAP} for visit in _timed_visits(run)]
    slowed = sum(map(bool, causes)) / len(causes) if causes else 0.0
    if slowed > _MAX_THROTTLED_SHARE:
        names = ", ".join(sorted(set().union(*causes)))
        reasons.append(f"the GPU was throttled in {100 * slowed:.0f} % of the visits ({names})")
    return tuple(reasons)


def round_medians(measurement: Measurement) -> list[float]:
    """Return one median per round, without rounds that have no usable samples."""
    return [value for value in _round_medians(measurement.samples) if value is not None]


def share_rounds(a: Measurement, b: Measurement) -> bool:
    """Return whether the rounds of two measurements were interleaved."""
    return (a.case, a.phase, a.group) == (b.case, b.phase, b.group)


def ratio(a: Measurement, b: Measurement) -> Ratio | None:
    """Return the ratio of ``a`` to ``b``, within rounds if they share at least two.

    Only rounds with samples of both are used, because a call may end earlier than the other. One shared round
    is not enough: a call that takes longer than its budget is measured once and alone.

    ``None`` if the metric or method differs, a sample is missing or not finite, or ``b`` is not positive.
    """
    if (a.metric, a.method) != (b.metric, b.method):
        return None
    if share_rounds(a, b):
        pairs = zip(_round_medians(a.samples), _round_medians(b.samples), strict=False)
        ratios = [x / y for x, y in pairs if x is not None and y is not None and y > 0]
        if len(ratios) >= _MIN_SHARED_ROUNDS:
            bounds = interval(ratios)
            low, high = (bounds.low, bounds.high) if bounds else (None, None)
            return Ratio(float(np.median(ratios)), "inside rounds", len(ratios), low, high)
    numerator, denominator = median(a), median(b)
    if numerator is None or denominator is None or denominator <= 0:
        return None
    return Ratio(numerator / denominator, "of medians")


def _samples(measurement: Measurement) -> list[float]:
    return [sample for visit in measurement.samples for sample in visit]


def _visits(*measurements: Measurement) -> list[Conditions]:
    return [visit for row in measurements for visits in row.conditions for visit in visits]


def _timed_visits(run: Run) -> list[Conditions]:
    """Return each visit of a run once; other metrics of a visit repeat its conditions."""
    return _visits(*(row for row in run.measurements if row.metric == LATENCY))


def _share(visits: Sequence[Conditions], holds: Callable[[Conditions], bool]) -> float:
    return sum(map(holds, visits)) / len(visits) if visits else 0.0


@cache
def _rank(count: int, confidence: float) -> int:
    """Return k such that the median lies between the k-th smallest and the k-th largest value.

    The k-th smallest of ``count`` values is above the median if fewer than k values are below it, and their
    number is Binomial(count, 1/2). Return 0 if there are too few values for the confidence.
    """
    below, logarithm = 0.0, -count * math.log(2)  # logarithm of P(Binomial(count, 1/2) = k)
    for k in range(count // 2):
        below += math.exp(logarithm)
        if 2 * below > 1 - confidence:
            return k
        logarithm += math.log((count - k) / (k + 1))
    return count // 2


def _are_usable(samples: Sequence[float]) -> bool:
    """Return whether there are samples, all finite with a finite sum."""
    return len(samples) > 0 and all(abs(sample) < _LARGEST for sample in samples)
