"""What the spread of many cells says of the spread of one: the moderated t-statistic of a screen.

Three replicates tell little of a cell's variance, but there are many cells. By Smyth's hierarchical model the
variances of the cells scatter around a common one as if that had been seen with so many degrees of freedom;
both follow from the scatter, and each cell's variance is drawn to the common one accordingly.

Smyth, Linear models and empirical Bayes methods for assessing differential expression in microarray
experiments, 2004, sections 6.2 and 10.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

_FEWEST = 3
"""Of fewer cells no scatter is known."""
_NARROW, _WIDE = 1e-6, 1e6
"""Beyond these a scatter of log variances is none, or of everything."""


@dataclass(frozen=True)
class Prior:
    """What is known of a cell's variance before it is looked at.

    ``freedom`` is as how many degrees of freedom that counts, ``pooled`` those of all cells together: no
    variance is known better than that.
    """

    variance: float
    freedom: float
    pooled: float

    def moderate(self, variance: float, freedom: float) -> tuple[float, float]:
        """Return a cell's variance in the light of the others, and its degrees of freedom."""
        share = freedom / (self.freedom + freedom)  # 0 where the others say everything
        return (1 - share) * self.variance + share * variance, min(self.freedom + freedom, self.pooled)


def prior(variances: Sequence[float], freedom: int) -> Prior | None:
    """Return what the cells' variances, each of so many degrees of freedom, say of any; None where too few.

    A cell whose replicates agree to the last digit says nothing: no clock is that good.
    """
    positive = np.array([one for one in variances if one > 0])
    if len(positive) < _FEWEST:
        return None
    logs = np.log(positive) - special.digamma(freedom / 2) + np.log(freedom / 2)
    scatter = float(np.var(logs, ddof=1) - special.polygamma(1, freedom / 2))
    half = _inverse_trigamma(scatter)
    centre = float(logs.mean())
    if np.isfinite(half):
        centre += float(special.digamma(half) - np.log(half))
    return Prior(float(np.exp(centre)), 2 * half, float(len(positive) * freedom))


def _inverse_trigamma(value: float) -> float:
    """Return where the trigamma function has a value: infinity where there is no more scatter than chance."""
    if value <= _NARROW:
        return float("inf")
    return float(
        np.exp(
            optimize.brentq(lambda log: special.polygamma(1, np.exp(log)) - min(value, _WIDE), -14.0, 14.0)
        )
    )
