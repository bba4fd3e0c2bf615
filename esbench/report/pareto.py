"""The picture of quality against time: what a variant keeps of its members, and what a step of it costs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from esbench.report.drawing import LINES, MARKS, WIDTH, Look, entitle, plain_ticks, shades, styled
from esbench.report.grid import headings
from esbench.report.labels import LABEL_INCHES, Named, name_points
from esbench.report.ranking import NOISE, Rankings, Standing
from esbench.report.words import label, listed
from esbench.units import format_value

_SMALLEST, _LARGEST = 5.0, 17.0
"""Diameters of marks in points, for the least and the most noise."""
_PANEL_INCHES = 3.4
_MARGIN = 1.3


class Point(NamedTuple):
    """A variant in the plane: time as a multiple of base's, the share of its members that it keeps."""

    standing: Standing
    x: float
    y: float

    def beats(self, other: "Point") -> bool:
        """Whether it is no slower and keeps no less, as far as the replicates can tell, and better in one.

        What the intervals of two shares leave open is no reason to stand on the front.
        """
        keeps = _ends(self)[1] >= _ends(other)[0]
        return self.x <= other.x and keeps and (self.x < other.x or self.y > other.y)


def points(standings: Sequence[Standing]) -> list[Point]:
    """The variants that have both numbers; an exact estimate equals no number of members."""
    return [
        Point(one, one.multiplier.value, one.share)
        for one in standings
        if one.multiplier and one.multiplier.value > 0 and one.share is not None and 0 < one.share < math.inf
    ]


def front(found: Sequence[Point]) -> list[Point]:
    """The variants that no other one beats, from the fastest on."""
    best = [one for one in found if not any(other.beats(one) for other in found)]
    return sorted(best, key=lambda one: (one.x, -one.y))


def alike(found: Sequence[Point]) -> list[Point]:
    """The variants behind the front that are not told apart from it, in time or in what is kept.

    One that is told apart from any variant of the front that beats it stands behind it for sure.
    """
    best = front(found)
    behind = [one for one in found if one not in best]
    return [one for one in behind if all(_overlap(one, other) for other in best if other.beats(one))]


def _overlap(one: Point, other: Point) -> bool:
    """Whether two variants are not told apart, neither by their time nor by what they keep."""
    (slow, fast), (low, high) = _times(one), _ends(one)
    (slow_, fast_), (low_, high_) = _times(other), _ends(other)
    return slow <= fast_ and slow_ <= fast and low <= high_ and low_ <= high


def _times(point: Point) -> tuple[float, float]:
    """Between what the time of a point lies."""
    found = point.standing.multiplier
    if found is None or found.low is None or found.high is None:
        return point.x, point.x
    return found.low, found.high


def pareto(rankings: Rankings) -> Figure | None:
    """Effective members as a share of all, against the time of a step as a multiple of base's.

    A panel for each shape, with the largest population at which most variants have both numbers; the size of
    a mark is the noise that a step holds. The front, which nothing else beats in both, is drawn and named.
    ``None`` where nothing has both numbers.
    """
    cases = [case for case in rankings.largest if points(rankings.of(case))]
    panels = [points(rankings.of(case)) for case in cases]
    if not panels:
        return None
    everything = [point for panel in panels for point in panel]
    looks = _looks(everything)
    most = max((point.standing.noise_bytes or 0.0 for point in everything), default=0.0)
    with styled():
        fronts = [front(panel) for panel in panels]
        inches = [max(_PANEL_INCHES, LABEL_INCHES * len(best) + 0.4) for best in fronts]
        figure = Figure(figsize=(WIDTH, 2.0 + sum(inches) + 0.5 * len(panels)), layout="constrained")
        rows = figure.subplots(len(panels), 1, squeeze=False, height_ratios=inches)[:, 0]
        names = headings(cases)
        for axes, panel, best, name, height in zip(rows, panels, fronts, names, inches, strict=True):
            _draw(axes, panel, best, looks, most)
            name_points(axes, [_named(point, looks) for point in best], height)
            axes.set_title(label(name), fontsize="medium")
        figure.legend(
            handles=[
                *_schemes(looks),
                *_sizes(everything, most),
                *_said(
                    "not told apart from the front",
                    [point.standing for one in panels for point in alike(one)],
                ),
                *_said(
                    "exact, above any share",
                    [one for case in cases for one in rankings.of(case) if one.is_exact],
                ),
            ],
            loc="outside lower center",
            ncols=4,
            handlelength=1,
            labelspacing=0.8,
        )
        grid = rankings.grid
        entitle(
            figure, grid, cases, f"{grid.operator}: what is kept of the members, against what a step costs"
        )
    return figure


def _ends(point: Point) -> tuple[float, float]:
    """Between what the share of a point lies."""
    found, members = point.standing.effective, point.standing.case.members
    return (found.low / members, found.high / members) if found else (point.y, point.y)


def _looks(found: Sequence[Point]) -> dict[str, Look]:
    """A colour and a mark for each scheme."""
    schemes = sorted({point.standing.variant.scheme for point in found})
    colors = shades(len(schemes))
    return {
        scheme: Look(color, MARKS[place % len(MARKS)], LINES[0])
        for place, (scheme, color) in enumerate(zip(schemes, colors, strict=True))
    }


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
            markeredgecolor="black" if point in best else "0.6",
            markeredgewidth=1.2 if point in best else 0.5,
            alpha=0.9,
        )
    axes.plot(
        [point.x for point in best],
        [point.y for point in best],
        color="black",
        linewidth=1,
        linestyle="--",
        drawstyle="steps-post",
        zorder=1.5,
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    lowest = min((point.y for point in panel), default=1.0)
    highest = max((point.y for point in panel), default=1.0)
    axes.set_ylim(lowest / _MARGIN, max(1.0, highest) * _MARGIN)
    left, right = axes.get_xlim()
    axes.set_xlim(left / _MARGIN, right * _MARGIN)
    for axis in (axes.xaxis, axes.yaxis):
        plain_ticks(axis)
    axes.set_xlabel("time of a step / time(base), lower is better")
    axes.set_ylabel("n_eff / n, higher is better")


def _diameter(point: Point, most: float) -> float:
    """The logarithm of the noise, between the smallest mark for none and the largest for the most."""
    return _size(point.standing.noise_bytes or 0.0, most)


def _size(noise_bytes: float, most: float) -> float:
    share = math.log1p(noise_bytes) / math.log1p(most) if most else 0.0
    return _SMALLEST + (_LARGEST - _SMALLEST) * share


def _named(point: Point, looks: dict[str, Look]) -> Named:
    variant = point.standing.variant
    name = label(variant.label(point.standing.case.operator))
    return Named(name, (point.x, point.y), looks[variant.scheme].color)


def _schemes(looks: dict[str, Look]) -> list[Line2D]:
    return [
        Line2D([], [], color=look.color, marker=look.mark, linestyle="none", label=label(scheme))
        for scheme, look in looks.items()
    ]


def _said(what: str, met: Sequence[Standing]) -> list[Line2D]:
    """What is true of some variants, in words; nothing where there are none."""
    names = dict.fromkeys(label(one.variant.label(one.case.operator)) for one in met)
    return [Line2D([], [], linestyle="none", label=f"{what}: {listed(list(names))}")] if met else []


def _sizes(found: Sequence[Point], most: float) -> list[Line2D]:
    """What marks of some sizes stand for."""
    held = sorted({point.standing.noise_bytes for point in found if point.standing.noise_bytes is not None})
    shown = dict.fromkeys([held[0], held[len(held) // 2], held[-1]]) if held else {}
    handles = [
        Line2D(
            [],
            [],
            color="white",
            markeredgecolor="black",
            marker="o",
            markersize=_size(noise_bytes, most),
            linestyle="none",
            label=f"noise of {format_value(NOISE, noise_bytes)}",
        )
        for noise_bytes in shown
    ]
    edge = Line2D([], [], color="black", linestyle="--", linewidth=1, label="the front: named at the right")
    return [*handles, edge]
