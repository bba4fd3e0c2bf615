"""Effective population per ms against peak memory, with the Pareto front."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from esbench.report import captions
from esbench.report.analysis.ranking import RankedVariant, Rankings
from esbench.report.plots import style
from esbench.report.plots.hero import best_of_each_scheme, label
from esbench.report.plots.style import BLACK, PAGE, Figure, drawable
from esbench.text import first_names
from esbench.units import format_multiplier, quantity

_MB = quantity("peak_bytes").column.size
_CLOSE = 0.1
"""The title names a scheme for its little memory only from this share of the best rate."""


@dataclass(frozen=True)
class Point:
    """A variant: its peak memory ``x`` in MB, its n_eff per ms ``y``, and the interval of ``y``."""

    ranked: RankedVariant
    x: float
    y: float
    interval: tuple[float, float]

    def dominates(self, other: "Point") -> bool:
        """Return whether it is at least as good in both, within their intervals, and better in one."""
        gives = self.interval[1] >= other.interval[0]
        return self.x <= other.x and gives and (self.x < other.x or self.y > other.y)


@style.styled()
def pareto(rankings: Rankings, width: float = PAGE) -> Figure | None:
    """Draw n_eff per ms against peak memory for the main case, best variant of each scheme.

    The Pareto front is a dashed line. Exact estimates, whose n_eff is infinite, are arrows at the top.
    ``None`` if fewer than two schemes have both numbers.
    """
    case = rankings.main
    schemes = best_of_each_scheme(rankings.of(case)) if case else []
    points = [point for scheme in schemes if (point := _point(scheme))]
    exact = [scheme for scheme in schemes if scheme.is_exact and scheme.peak_bytes]
    if case is None or len(points) < 2:  # noqa: PLR2004  # a single point has nothing to be compared with
        return None
    best = front(points)
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, 3.3 if width == PAGE else 2.5)
    style.log_axis(
        axes,
        "x",
        [one.x for one in points] + [scheme.peak_bytes / _MB for scheme in exact if scheme.peak_bytes],
    )
    style.log_axis(axes, "y", [one.y for one in points], 2.0)
    axes.set(xlabel="peak memory of a step (MB), lower is better", ylabel="n_eff per ms, higher is better")
    labels = [_draw(axes, point, is_best=point in best) for point in points]
    labels += [_draw_exact(axes, scheme) for scheme in exact]
    axes.plot(
        *([getattr(on_front, name) for on_front in best] for name in "xy"),
        color=BLACK,
        linewidth=0.8,
        linestyle="--",
        drawstyle="steps-post",
        zorder=1.5,
    )
    missing = {
        ranked.variant.name: style.reason_of(ranked.skipped)
        if ranked.skipped
        else "no memory or time was measured"
        for ranked in rankings.of(case)
        if ranked.variant.mode == "batched" and ranked.rate is None
    }
    bounds = [
        one.ranked.variant.name for one in points if one.ranked.effective and one.ranked.effective.is_bound
    ]
    figure.finish(
        f"{captions.invalid(rankings.grid.run)}{finding(best)}",
        f"{case.label}, {style.origin(rankings.grid, [case])}",
        [
            "Dashed: Pareto front. Best variant of each scheme",
            *([f"Only a lower bound is known: {first_names(bounds)}"] if bounds else []),
            *style.by_reason(missing),
        ],
        style.family_legend(scheme.variant.scheme for scheme in schemes),
    )
    style.label_points(axes, labels)
    return figure


def front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one dominates, least memory first."""
    best = [point for point in points if not any(other.dominates(point) for other in points)]
    return sorted(best, key=lambda point: (point.x, -point.y))


def finding(best: Sequence[Point]) -> str:
    """Return the result: the scheme with the best rate, and one with less memory and not much less rate."""
    first = max(best, key=lambda point: point.y)
    frugal = next(point for point in best if point.y >= _CLOSE * first.y)
    name = first.ranked.variant.name
    if frugal == first:
        return f"{name} gives the most n_eff per ms and needs little memory"
    times = format_multiplier(first.x / frugal.x)
    return (
        f"{name} gives the most n_eff per ms; {frugal.ranked.variant.name} needs {times} less memory "
        f"for {frugal.y / first.y:.0%} of its rate"
    )


def _point(ranked: RankedVariant) -> Point | None:
    if (
        ranked.reach is None
        or ranked.rate is None
        or not ranked.peak_bytes
        or not drawable(ranked.rate, ranked.peak_bytes)
    ):
        return None
    (low, _), (high, _) = ranked.reach
    return Point(ranked, ranked.peak_bytes / _MB, ranked.rate, (low, high))


def _draw(axes: Axes, point: Point, *, is_best: bool) -> style.Label:
    look = style.family_look(point.ranked.variant.scheme)
    edge = {"markeredgecolor": BLACK, "markeredgewidth": 1.0, "zorder": 3} if is_best else {}
    axes.plot(point.x, point.y, **look.point | edge, markersize=5.5)
    if drawable(*point.interval):
        axes.vlines(point.x, *point.interval, color=look.color, linewidth=0.6, zorder=1.8)
    return style.Label(point.x, point.y, label(point.ranked))


def _draw_exact(axes: Axes, ranked: RankedVariant) -> style.Label:
    look = style.family_look(ranked.variant.scheme)
    low, high = (math.log(end) for end in axes.get_ylim())
    x, y, top = (ranked.peak_bytes or 0.0) / _MB, math.exp(low + 0.88 * (high - low)), math.exp(high)
    axes.plot(x, y, **look.point, markersize=5.5, zorder=3)
    arrow = {"arrowstyle": "-|>", "color": look.color, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x, top), (x, y), arrowprops=arrow)
    return style.Label(x, y, f"{ranked.variant.name}: exact")
