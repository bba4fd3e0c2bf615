"""Views on samples: medians, quantiles and ratios. Nothing here drops or changes a sample.

A measurement that holds no sample, or one that is not a finite number, has no median: ``None``,
never a guess from what is left.
"""

from dataclasses import dataclass
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
class Ratio:
    """How many times ``b`` goes into ``a``, and how that was found.

    ``inside rounds``: the median over ``rounds`` rounds of (median of a / median of b), so that
    drift between rounds cancels. ``of medians``: the two did not share rounds.
    """

    value: float
    method: Literal["inside rounds", "of medians"]
    rounds: int = 0


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
            return Ratio(float(np.median(ratios)), "inside rounds", len(ratios))
    above, below = median(a), median(b)
    if above is None or below is None or below <= 0:
        return None
    return Ratio(above / below, "of medians")


def _usable(samples: tuple[float, ...] | list[float]) -> bool:
    return bool(samples) and bool(np.isfinite(samples).all())
