"""Names at the right edge of a panel, each pointing at its line or mark, none over another."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

LABEL_INCHES = 0.165
"""The height that a name needs."""
_DARKER = 0.8
_EDGE = 1.06


class Named(NamedTuple):
    """A point on two logarithmic axes, the name that points at it, and the colour of that name."""

    name: str
    point: tuple[float, float]
    color: tuple[float, float, float, float]


def name_points(axes: Axes, named: Sequence[Named], inches: float) -> None:
    """Write each name at the right edge of a panel so high, as near to its point as the others leave room."""
    low, high = map(math.log, axes.get_ylim())
    named = sorted(named, key=lambda one: one.point[1])
    wanted = [(math.log(one.point[1]) - low) / (high - low) for one in named]
    for one, place in zip(named, spaced(wanted, LABEL_INCHES / inches), strict=True):
        axes.annotate(
            one.name,
            one.point,
            (_EDGE, place),
            textcoords="axes fraction",
            color=[_DARKER * part for part in one.color[:3]],
            fontsize="small",
            verticalalignment="center",
            arrowprops={
                "arrowstyle": "-",
                "color": "0.7",
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 4,
            },
        )


def spaced(wanted: Sequence[float], gap: float) -> list[float]:
    """Places in [0, 1] at least a gap apart, as near as can be to the wanted ones, which ascend.

    Less the gaps below it, each place must not be under the one before: the nearest such places by least
    squares are means of neighbours (pool adjacent violators).
    """
    pools: list[tuple[float, int]] = []
    for number, place in enumerate(wanted):
        mean, count = place - number * gap, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (mean * count + before * size) / (count + size), count + size
        pools.append((mean, count))
    highest = max(0.0, 1 - (len(wanted) - 1) * gap)
    flat = [min(max(mean, 0.0), highest) for mean, count in pools for _ in range(count)]
    return [place + number * gap for number, place in enumerate(flat)]
