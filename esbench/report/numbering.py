"""Numbers beside marks: each where its own mark is the nearest, or at the end of a line that leads to it."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.transforms import BboxBase

_POINTS = 72.0
"""In an inch."""
_BESIDE, _AWAY = 4.6, (9.0, 13.0, 18.0, 24.0, 31.0)
"""Points from the edge of a mark to the middle of its number, without a line and with one."""
_APART, _LETTER, _FARTHER = 9.0, 3.2, 1.5
"""Points between two numbers; half of a number; and by how much every other mark is farther than its own."""
_TURNS = (150, 120, 180, 210, 60, 90, 30, 240, 270, 300, 330, 0)
"""Degrees around a mark, what is over a front that rises first."""
_LEADER = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0.5, "shrinkB": 1.0}

Place = tuple[float, float]


class Mark(NamedTuple):
    """A mark of a panel: its place in the panel's data, and its diameter in points."""

    x: float
    y: float
    diameter: float


class _Spot(NamedTuple):
    """A mark on the paper: its middle and how far it reaches, in points."""

    place: Place
    radius: float


def number(axes: Axes, marks: Sequence[Mark], numbered: Sequence[Mark]) -> None:
    """Number some marks of a panel from 1 on, in their order.

    Args:
        axes: the panel, which has its place on the sheet and its limits by now.
        marks: all that the panel shows.
        numbered: those of them that get a number.

    """
    every = [_spot(axes, mark) for mark in marks]
    frame = axes.get_window_extent()
    scale = _POINTS / axes.figure.get_dpi()
    taken: list[Place] = []
    for count, mark in enumerate(numbered, start=1):
        own = _spot(axes, mark)
        others = list(every)
        others.remove(own)
        free = [place for place in _around(own, _BESIDE) if _is_free(place, taken, frame, scale)]
        beside = next((place for place in free if _is_told(place, own, others)), None)
        place = beside or _away(own, others, taken, frame, scale)
        taken.append(place)
        axes.annotate(
            str(count),
            (mark.x, mark.y),
            (place[0] - own.place[0], place[1] - own.place[1]),
            textcoords="offset points",
            horizontalalignment="center",
            verticalalignment="center_baseline",
            fontsize="small",
            arrowprops=None if beside else _LEADER,
        )


def _spot(axes: Axes, mark: Mark) -> _Spot:
    x, y = axes.transData.transform((mark.x, mark.y)) * (_POINTS / axes.figure.get_dpi())
    return _Spot((float(x), float(y)), mark.diameter / 2)


def _around(own: _Spot, away: float) -> Iterator[Place]:
    """Yield places so far from the edge of a mark."""
    for angle in map(math.radians, _TURNS):
        far = own.radius + away
        yield own.place[0] + far * math.cos(angle), own.place[1] + far * math.sin(angle)


def _away(
    own: _Spot, others: Sequence[_Spot], taken: Sequence[Place], frame: BboxBase, scale: float
) -> Place:
    """The nearest place that hides nothing; where there is none, the one that is farthest from all marks."""
    every = [place for step in _AWAY for place in _around(own, step)]
    free = [place for place in every if _is_free(place, taken, frame, scale)]
    clear = (place for place in free if _room(place, [own, *others]) > _LETTER)
    return next(clear, None) or max(free or every, key=lambda place: _room(place, others))


def _is_told(place: Place, own: _Spot, others: Sequence[_Spot]) -> bool:
    """Whether a reader sees which mark a number at a place is of."""
    least = math.dist(place, own.place) + _FARTHER
    near = all(math.dist(place, other.place) > least for other in others)
    return near and _room(place, others) > _LETTER


def _room(place: Place, spots: Sequence[_Spot]) -> float:
    """Points from a place to the edge of the nearest mark."""
    return min((math.dist(place, one.place) - one.radius for one in spots), default=math.inf)


def _is_free(place: Place, taken: Sequence[Place], frame: BboxBase, scale: float) -> bool:
    """Whether a place is inside of a panel, and no other number is there."""
    inside = frame.contains(place[0] / scale, place[1] / scale)
    return bool(inside) and all(math.dist(place, other) > _APART for other in taken)
