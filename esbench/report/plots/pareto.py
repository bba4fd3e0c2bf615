"""Effective population per ms against peak memory of variants, with the Pareto front."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from esbench.report.analysis.pivot import headings
from esbench.report.analysis.ranking import RankedVariant, Rankings
from esbench.report.plots import style
from esbench.report.plots.style import BLACK, PAGE, Figure, Look, drawable
from esbench.report.text import listed
from esbench.units import quantity

_PANELS = 6
_APART = 8.0
"""Points between two markers that have room for a number each."""
_MB = quantity("peak_bytes").column.size


@dataclass(frozen=True)
class Point:
    """A variant: its peak memory ``x``, its n_eff per ms ``y``, and the interval of ``y``."""

    ranked: RankedVariant
    x: float
    y: float
    interval: tuple[float, float]

    def dominates(self, other: "Point") -> bool:
        """Whether it costs no more, gives no less as far as intervals tell, and is better in one of them."""
        gives = self.interval[1] >= other.interval[0]
        return self.x <= other.x and gives and (self.x < other.x or self.y > other.y)

    def ties(self, other: "Point") -> bool:
        """Whether both need the same memory, and the intervals of their gains overlap."""
        low, high = other.interval
        return self.x == other.x and self.interval[0] <= high and low <= self.interval[1]


TITLE = "effective population per ms of a step, against its peak memory"


def points(variants: Sequence[RankedVariant]) -> list[Point]:
    """The variants that have both numbers; exact estimates, whose n_eff is infinite, have none."""
    return [point for one in variants if (point := _point(one))]


def _point(one: RankedVariant) -> Point | None:
    if one.reach is None or one.rate is None or not one.peak_bytes or not drawable(one.rate, one.peak_bytes):
        return None
    (low, _), (high, _) = one.reach
    return Point(one, one.peak_bytes / _MB, one.rate, (low, high))


def front(found: Sequence[Point]) -> list[Point]:
    """The points that no other dominates, the cheapest first."""
    best = [one for one in found if not any(other.dominates(one) for other in found)]
    return sorted(best, key=lambda one: (one.x, -one.y))


def tied(found: Sequence[Point]) -> list[Point]:
    """The dominated points whose intervals overlap those of every point of the front that dominates them."""
    best = front(found)
    rest = [one for one in found if one not in best]
    return [one for one in rest if all(one.ties(other) for other in best if other.dominates(one))]


@style.styled()
def pareto(rankings: Rankings, width: float = PAGE) -> Figure | None:
    """Draw n_eff per ms against peak memory: a panel per shape, at its largest population.

    Variants on the front are numbered, and named below the panel. ``None`` where none has both numbers.
    """
    cases = [case for case in rankings.largest if points(rankings.of(case))][:_PANELS]
    if not cases:
        return None
    panels = [points(rankings.of(case)) for case in cases]
    placed = [point.ranked for panel in panels for point in panel]
    looks = style.scheme_looks(one.variant.scheme for one in placed)
    figure = Figure(width)
    every = figure.panels(len(cases), *((2, 2.6) if width == PAGE else (1, 2.0)))
    for axes, panel, name in zip(every, panels, headings(cases), strict=True):
        _draw(axes, panel, looks)
        axes.set(xlabel="peak memory (MB), lower is better", ylabel="n_eff / ms, higher is better")
        figure.panel_title(axes, name)
        figure.panel_legend(
            axes,
            [
                style.legend_point(looks[one.scheme], f"{place} {one.name}", edge=BLACK)
                for place, one in enumerate((point.ranked.variant for point in front(panel)), start=1)
            ],
        )
    variants = [one for case in cases for one in rankings.of(case)]
    figure.finish(
        style.titled(rankings.grid, f": {TITLE}"),
        style.origin(rankings.grid, cases),
        _notes(variants, panels),
        [style.legend_point(look, scheme) for scheme, look in looks.items()],
    )
    for axes, panel in zip(every, panels, strict=True):
        _number_front(axes, front(panel))
    return figure


def _draw(axes: Axes, panel: Sequence[Point], looks: Mapping[str, Look]) -> None:
    best = front(panel)
    style.log_axis(axes, "x", [one.x for one in panel])
    style.log_axis(axes, "y", [one.y for one in panel])
    for point in panel:
        look = looks[point.ranked.variant.scheme]
        edge = {"markeredgecolor": BLACK, "markeredgewidth": 1.0, "zorder": 3} if point in best else {}
        axes.plot(point.x, point.y, **look.point | {"markersize": 4.5} | edge)
        if drawable(*point.interval):
            axes.vlines(point.x, *point.interval, color=look.color, linewidth=0.6, zorder=1.8)
    axes.plot(
        [one.x for one in best],
        [one.y for one in best],
        color=BLACK,
        linewidth=0.8,
        linestyle="--",
        drawstyle="steps-post",
        zorder=1.5,
    )


def _number_front(axes: Axes, best: Sequence[Point]) -> None:
    """Number the front above and to the left of its markers, where no other can be: it would dominate.

    Points that nearly coincide share a label.
    """
    places = axes.transData.transform([(one.x, one.y) for one in best]) / axes.figure.dpi * 72
    groups = [[0]]
    for number in range(1, len(best)):
        if math.dist(places[number], places[number - 1]) < _APART:
            groups[-1].append(number)
        else:
            groups.append([number])
    for group in groups:
        axes.annotate(
            ",".join(str(number + 1) for number in group),
            (best[group[0]].x, best[group[-1]].y),
            (-2.5, 2.5),
            textcoords="offset points",
            horizontalalignment="right",
            verticalalignment="bottom",
            fontsize=style.FINE,
        )


def _notes(variants: Sequence[RankedVariant], panels: Sequence[Sequence[Point]]) -> list[str]:
    placed = [point.ranked for panel in panels for point in panel]
    notes = ["Dashed: the Pareto front, its variants numbered and named below"]
    for text, found in (
        ("Tied with the front", [point.ranked for panel in panels for point in tied(panel)]),
        ("Exact, n_eff is infinite", [one for one in variants if one.is_exact]),
        ("Only a lower bound is known", [one for one in placed if one.effective and one.effective.is_bound]),
    ):
        names = list(dict.fromkeys(one.variant.name for one in found))
        notes += [f"{text}: {listed(names)}"] if names else []
    reasons = {
        one.variant.name: style.reason_of(one.skipped) if one.skipped else "no memory or time was measured"
        for one in variants
        if one.variant.mode == "batched" and not one.is_exact and _point(one) is None
    }
    return [*notes, *style.by_reason(reasons)]
