"""The pictures of what variants give for what they cost, with the front that nothing beats."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from esbench.report.drawing import BLACK, PAGE, Look, Paper, drawable, plain_ticks, scheme_looks, styled
from esbench.report.grid import headings
from esbench.report.lettering import fit
from esbench.report.numbering import Mark, number
from esbench.report.ranking import NOISE, Rankings, Standing
from esbench.report.sheets import Sheet, by_reason, mark, origin, short, titled
from esbench.report.words import listed
from esbench.units import format_value, quantity

_SMALLEST, _LARGEST = 3.0, 9.0
"""Diameters of marks in points, for the least and the most noise."""
_PLAIN = 4.5
_MARGIN, _ROOM = 1.35, 0.08
_INCHES = {"column": 2.0, "page": 2.5}
_PANELS = 6
_MB = quantity(NOISE).column.size


@dataclass(frozen=True)
class Point:
    """A variant in a plane: what it costs, lower is better, and what it gives, higher is better.

    Each with the ends between which it lies.
    """

    standing: Standing
    x: float
    y: float
    xs: tuple[float, float]
    ys: tuple[float, float]

    def beats(self, other: "Point") -> bool:
        """Whether it costs no more and gives no less, as far as intervals can tell, and is better in one.

        What the intervals of two ``y`` leave open is no reason to stand on the front.
        """
        gives = self.ys[1] >= other.ys[0]
        return self.x <= other.x and gives and (self.x < other.x or self.y > other.y)

    def alike(self, other: "Point") -> bool:
        """Whether the two are not told apart, neither by what they cost nor by what they give."""
        return _overlap(self.xs, other.xs) and _overlap(self.ys, other.ys)


@dataclass(frozen=True)
class Plane:
    """What stands on the axes of a picture: the place of a variant, if it has both numbers."""

    title: str
    x: str
    y: str
    place: Callable[[Standing], Point | None]
    sized: bool = False
    """Whether the size of a mark is the noise that a step holds."""


def rate_and_memory(one: Standing) -> Point | None:
    """Effective members per ms of a step, and the most memory that any of its phases takes, in MB."""
    if one.reach is None or one.rate is None or not one.peak_bytes or not drawable(one.rate, one.peak_bytes):
        return None
    (low, _), (high, _) = one.reach
    size = one.peak_bytes / _MB
    return Point(one, size, one.rate, (size, size), (low, high))


def share_and_time(one: Standing) -> Point | None:
    """The share of members that is kept, and the time of a step over base's."""
    time, found, members = one.multiplier, one.effective, one.case.members
    if time is None or found is None or one.share is None or not drawable(time.value, one.share):
        return None
    times = (time.low, time.high) if time.low and time.high else (time.value, time.value)
    return Point(one, time.value, one.share, times, (found.low / members, found.high / members))


MEMORY = Plane(
    "effective members per millisecond of a step, against its peak memory",
    "peak memory (MB), lower is better",
    "n_eff / ms, higher is better",
    rate_and_memory,
)
TIME = Plane(
    "what is kept of the members, against what a step costs",
    "time of a step / time(base), lower is better",
    "n_eff / n, higher is better",
    share_and_time,
    sized=True,
)


def points(standings: Sequence[Standing], plane: Plane) -> list[Point]:
    """The variants that have a place; an exact estimate equals no number of members, and has none."""
    return [point for one in standings if (point := plane.place(one))]


def front(found: Sequence[Point]) -> list[Point]:
    """The variants that no other one beats, from the cheapest on."""
    best = [one for one in found if not any(other.beats(one) for other in found)]
    return sorted(best, key=lambda one: (one.x, -one.y))


def alike(found: Sequence[Point]) -> list[Point]:
    """The variants behind the front that are not told apart from it, in cost or in what they give.

    One that is told apart from any variant of the front that beats it stands behind it for sure.
    """
    best = front(found)
    behind = [one for one in found if one not in best]
    return [one for one in behind if all(one.alike(other) for other in best if other.beats(one))]


def pareto(rankings: Rankings, plane: Plane = MEMORY, paper: Paper = PAGE) -> Sheet | None:
    """What variants give against what they cost, with the front that nothing else beats in both.

    A panel for each shape, with the largest population at which most variants have both numbers. The front is
    numbered and named below its panel; who has no place is named with the reason. ``None`` where nothing has
    both numbers.
    """
    cases = [case for case in rankings.largest if points(rankings.of(case), plane)]
    if not cases:
        return None
    shown = cases[:_PANELS]
    standings = {case: rankings.of(case) for case in shown}
    panels = {case: points(standings[case], plane) for case in shown}
    everything = [point for panel in panels.values() for point in panel]
    looks = scheme_looks(point.standing.variant.scheme for point in everything)
    most = max((point.standing.noise_bytes or 0.0 for point in everything), default=0.0)
    with styled(paper):
        sheet = Sheet(paper)
        columns = min(len(shown), 2 if paper is PAGE else 1)
        every = sheet.panels(len(shown), columns)
        width, height = sheet.room / columns - 0.5, _INCHES[paper.name]
        longest = 1
        for axes, case, name in zip(every, shown, headings(shown), strict=True):
            best = front(panels[case])
            longest = max(longest, len(best))
            _draw(axes, panels[case], best, looks, most if plane.sized else 0.0)
            _scale(axes, panels[case], width, height)
            axes.set_xlabel(plane.x)
            axes.set_ylabel(plane.y)
            axes.set_title(fit(name, width, paper.small))
            sheet.key_below(axes, _front_key(best, looks), width)
        rows = -(-len(shown) // columns)
        body = rows * (height + sheet.key_inches(longest) + sheet.title_inches + 0.1)
        grid = rankings.grid
        sheet.finish(
            body,
            titled(grid, f"{grid.operator}: {plane.title}"),
            origin(grid, shown),
            _notes([one for case in shown for one in standings[case]], list(panels.values()), plane),
            [
                *(mark(look, scheme) for scheme, look in looks.items()),
                *(_sizes(everything, most) if plane.sized else []),
            ],
        )
        for axes, case in zip(every, shown, strict=True):
            marks = {point: _mark(point, most if plane.sized else 0.0) for point in panels[case]}
            number(axes, list(marks.values()), [marks[point] for point in front(panels[case])])
    return sheet


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _draw(
    axes: Axes, panel: Sequence[Point], best: Sequence[Point], looks: dict[str, Look], most: float
) -> None:
    for point in sorted(panel, key=lambda one: -_diameter(one, most)):  # the small ones in front
        look = looks[point.standing.variant.scheme]
        axes.plot(
            point.x,
            point.y,
            linestyle="none",
            marker=look.mark,
            markersize=_diameter(point, most),
            color=look.color,
            markerfacecolor=look.face,
            markeredgecolor=BLACK if point in best else look.color,
            markeredgewidth=1.0 if point in best else 0.7,
            zorder=3 if point in best else 2,
        )
        if drawable(*point.ys) and point.ys[0] < point.ys[1]:
            axes.vlines(point.x, *point.ys, color=look.color, linewidth=0.6, zorder=1.8)
    axes.plot(
        [point.x for point in best],
        [point.y for point in best],
        color=BLACK,
        linewidth=0.8,
        linestyle="--",
        drawstyle="steps-post",
        zorder=1.5,
    )


def _mark(point: Point, most: float) -> Mark:
    return Mark(point.x, point.y, _diameter(point, most))


def _scale(axes: Axes, panel: Sequence[Point], width: float, height: float) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    xs, ys = [point.x for point in panel], [point.y for point in panel]
    for values, limits in ((xs, axes.set_xlim), (ys, axes.set_ylim)):
        room = max(_MARGIN, (max(values) / min(values)) ** _ROOM)
        limits(min(values) / room, max(values) * room)
    plain_ticks(axes.xaxis, width, 0.25)
    plain_ticks(axes.yaxis, height)


def _front_key(best: Sequence[Point], looks: dict[str, Look]) -> list[Line2D]:
    """The front by its numbers."""
    variants = [point.standing.variant for point in best]
    return [
        mark(looks[one.scheme], f"{number} {one.name}", edge=BLACK)
        for number, one in enumerate(variants, start=1)
    ]


def _diameter(point: Point, most: float) -> float:
    """The logarithm of the noise, between the smallest mark for none and the largest for the most."""
    return _size(point.standing.noise_bytes or 0.0, most) if most else _PLAIN


def _size(noise_bytes: float, most: float) -> float:
    return _SMALLEST + (_LARGEST - _SMALLEST) * math.log1p(noise_bytes) / math.log1p(most)


def _sizes(found: Sequence[Point], most: float) -> list[Line2D]:
    """What marks of some sizes stand for."""
    held = sorted({point.standing.noise_bytes for point in found if point.standing.noise_bytes is not None})
    shown = dict.fromkeys([held[0], held[len(held) // 2], held[-1]]) if held and most else {}
    return [
        mark(
            Look(BLACK, "o", "-", filled=False),
            f"noise of {format_value(NOISE, noise_bytes)}",
            _size(noise_bytes, most),
        )
        for noise_bytes in shown
    ]


def _notes(standings: Sequence[Standing], panels: Iterable[Sequence[Point]], plane: Plane) -> list[str]:
    notes = ["Dashed: the front, which nothing beats in both; numbered, and named below its panel"]
    near = dict.fromkeys(point.standing.variant.name for panel in panels for point in alike(panel))
    notes += [f"Not told apart from the front: {listed(list(near))}"] if near else []
    exact = dict.fromkeys(one.variant.name for one in standings if one.is_exact)
    notes += [f"Exact, above any rate: {', '.join(exact)}"] if exact else []
    placed = [point.standing for panel in panels for point in panel]
    bounds = dict.fromkeys(one.variant.name for one in placed if one.effective and one.effective.is_bound)
    notes += [f"Known from below only, or higher: {listed(list(bounds))}"] if bounds else []
    reasons = {
        one.variant.name: short(one.skipped, 60) if one.skipped else "no memory or time to place it by"
        for one in standings
        if one.variant.mode == "batched" and not one.is_exact and plane.place(one) is None
    }
    return [*notes, *by_reason(reasons)]
