"""What replicates say of a cell: an effect, its bounds by Student's t, and what could have been seen.

The unit of replication is the fresh process: launches of one process resemble each other, and a test that
takes them for independent finds differences where there are none. A replicate gives one number, so however
long it ran it counts once.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean, median

from scipy import special, stats

from esbench.gate.moderation import Prior, prior
from esbench.gate.records import Bounds, Settings, Timed, Visits


def estimate(timed: Timed, trim: float) -> float:
    """Return the log of by how many times head takes longer than base, as one replicate has it.

    Of the rounds counts the mean without the share ``trim`` at either end.
    """
    return float(stats.trim_mean(rounds(timed), trim))


def rounds(timed: Timed) -> list[float]:
    """Return the log of by how many times head takes longer than base in each round of a replicate.

    A round is ABBA or BAAB: its two visits of each arm lie around the same moment, so what drifts evenly
    cancels. Of a visit counts the median.
    """
    base, head = (_visits(visits) for visits in (timed.base, timed.head))
    return [(h1 + h2 - b1 - b2) / 2 for (b1, b2), (h1, h2) in zip(base, head, strict=True)]


def bounds(
    estimates: Sequence[float], *, null: float, alpha: float, power: float, others: Prior | None = None
) -> Bounds:
    """Return effect and one-sided bounds at ``alpha``, of at least two replicates' logs of ratios.

    ``p`` is the probability of so much or more, were the ratio no more than 1 + ``null``. The least effect
    that would have been seen follows from the spread at hand: null + (t_alpha + t_power) standard errors.
    Where ``others`` is given, what the other cells say of the spread counts too.
    """
    count, mean = len(estimates), fmean(estimates)
    spread, freedom = variance(estimates), float(count - 1)
    if others is not None:
        spread, freedom = others.moderate(spread, freedom)
    error = math.sqrt(spread / count)
    reach = _quantile(1 - alpha, freedom) * error
    seen = reach + _quantile(power, freedom) * error
    distance = mean - math.log1p(null)
    p = float(special.stdtr(freedom, -distance / error)) if error > 0 else float(distance <= 0)
    return Bounds(
        effect=_share(mean),
        low=_share(mean - reach),
        high=_share(mean + reach),
        mde=_share(math.log1p(null) + seen),
        p=p,
        replicates=count,
    )


def screened(cells: Mapping[str, Sequence[float]], settings: Settings) -> dict[str, Bounds]:
    """Return what the screen sees of each cell: against no slowdown at all, in the light of the others.

    It decides only who is confirmed; that is by Student's t over new replicates of the cell alone.
    """
    freedom = min(map(len, cells.values())) - 1
    others = prior([variance(estimates) for estimates in cells.values()], freedom)
    return {name: screened_alone(estimates, settings, others) for name, estimates in cells.items()}


def screened_alone(estimates: Sequence[float], settings: Settings, others: Prior | None = None) -> Bounds:
    """Return what the screen sees of a cell, or of the mean over cells, which resembles none."""
    return bounds(estimates, null=0.0, alpha=settings.screen_alpha, power=settings.power, others=others)


def holm(p_values: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Return for each member of a family the level that it is held to, by Holm's step-down.

    Who is rejected is held to alpha / (members left), in the order of the p-values; behind the first who is
    not, all are held to the level at which that one failed. So p <= level exactly for the rejected
    (Holm, A Simple Sequentially Rejective Multiple Test Procedure, 1979).
    """
    levels: dict[str, float] = {}
    level, stopped = 0.0, False
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if not stopped:
            level = alpha / (len(p_values) - place)
            stopped = p > level
        levels[name] = level
    return levels


def geometric_mean(by_cell: Mapping[str, Sequence[float]]) -> list[float]:
    """Return for each replicate the mean over cells of their logs."""
    return [fmean(one) for one in zip(*by_cell.values(), strict=True)]


def variance(estimates: Sequence[float]) -> float:
    """Return the variance, exactly 0 where all are the same: statistics.variance takes ten times as long."""
    if min(estimates) == max(estimates):
        return 0.0
    mean = fmean(estimates)
    return math.fsum((one - mean) ** 2 for one in estimates) / (len(estimates) - 1)


@lru_cache(maxsize=4096)
def _quantile(level: float, freedom: float) -> float:
    """What Student's t does not pass with the probability ``level``; a study of the gate asks often."""
    return float(special.stdtrit(freedom, level))


def _visits(visits: Visits) -> list[tuple[float, float]]:
    """Return for each round the logs of its two visits' medians."""
    logs = [math.log(median(visit)) for visit in visits]
    return list(zip(logs[::2], logs[1::2], strict=True))


def _share(log: float) -> float:
    """The share by which a ratio of this logarithm is above 1; what is beyond all measure stays a number."""
    return math.expm1(min(log, _BEYOND))


_BEYOND = 100.0
