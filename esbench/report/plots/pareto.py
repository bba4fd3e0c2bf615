"""Effective population per ms against peak memory, with the Pareto front."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from esbench.report import captions
from esbench.report.analysis.ranking import RankedVariant, Rankings, dense, tied_schemes
from esbench.report.plots import style
from esbench.report.plots.hero import drawable_schemes, label
from esbench.report.plots.style import BLACK, PAGE, Figure, is_drawable
from esbench.units import format_multiplier, quantity

_MB = quantity("peak_bytes").column.size


@dataclass(frozen=True)
class Point:
    """A variant with its peak memory ``x`` in MB and its n_eff per ms ``y``.

    ``y`` of an exact estimate, whose n_eff is infinite, is its members evaluated per ms.
    """

    ranked: RankedVariant
    x: float
    y: float

    @property
    def is_open(self) -> bool:
        """Whether n_eff is above ``y``: infinite, or known by a lower bound only."""
        return self.ranked.is_exact or bool(self.ranked.effective and self.ranked.effective.is_bound)

    def dominates(self, other: "Point") -> bool:
        """Return whether this point is at least as good in memory and rate, and better in one.

        The rate of an exact estimate is infinite; among exact ones more members evaluated per ms are better.
        """
        rate, other_rate = ((point.ranked.is_exact, point.y) for point in (self, other))
        is_better = self.x < other.x or rate > other_rate
        return self.x <= other.x and rate >= other_rate and is_better


@style.use_style()
def pareto(rankings: Rankings, width: float = PAGE) -> Figure | None:
    """Draw n_eff per ms against peak memory for ``rankings.main``, a point for each scheme's best variant.

    The Pareto front dominates the gray area. An arrow to the top: n_eff is infinite (an exact estimate), or
    only its lower bound is known. Return ``None`` if fewer than two schemes have both numbers.
    """
    case = rankings.main
    ranked = rankings.of(case) if case else []
    points = [point for scheme in drawable_schemes(ranked) if (point := _point(scheme))]
    finite = [point for point in points if not point.ranked.is_exact]
    if case is None or len(finite) < 2:  # noqa: PLR2004  # one point has nothing to be compared with
        return None
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, 3.6 if width == PAGE else 2.8)
    style.log_axis(axes, "x", [point.x for point in points], 1.8)
    style.log_axis(axes, "y", [point.y for point in points], 2.0)
    axes.set(xlabel="peak memory of a step (MB), lower is better", ylabel="n_eff per ms, higher is better")
    best = front(points)
    _draw_front(axes, best)
    for point in points:
        _draw(axes, point, is_best=point in best)
    missing = {
        entry.variant.name: style.missing_reason(entry.skipped)
        if entry.skipped
        else "no memory or time was measured"
        for entry in ranked
        if entry.variant.mode == "batched" and entry.rate is None
    }
    labels = [style.Label(point.x, point.y, _name(point)) for point in points]
    arrows = [name for name, point in zip(labels, points, strict=True) if point.is_open]
    figure.finish(
        f"{captions.invalid_note(rankings.grid.run)}{finding(points, ranked)}",
        style.origin(rankings.grid, [case]),
        [
            "Best variant of each scheme. Black edge: on the Pareto front, which dominates the gray area",
            *(["Arrow: n_eff is infinite (exact), or at least this"] if arrows else []),
            *style.notes_by_reason(missing),
        ],
        style.family_legend(point.ranked.variant.scheme for point in points),
    )
    style.label_points(axes, labels, arrows)
    return figure


def front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other one dominates, least memory first."""
    best = [point for point in points if not any(rival.dominates(point) for rival in points)]
    return sorted(best, key=lambda point: point.x)


def finding(points: Sequence[Point], ranked: Sequence[RankedVariant] = ()) -> str:
    """Return the title: the finite scheme with the most n_eff per ms, compared with dense noise.

    ``ranked`` are the variants that it may be tied with.
    """
    best = max((point for point in points if not point.ranked.is_exact), key=lambda point: point.y)
    name = "Dense noise" if dense([best.ranked]) else best.ranked.variant.name
    ties = f", {names}," if (names := tied_schemes(best.ranked, ranked)) else ""
    reference = next((point for point in points if dense([point.ranked]) and point != best), None)
    times = best.ranked.rate_over(reference.ranked) if reference else None
    if reference is None or times is None:
        return f"{name}{ties} gives the most n_eff per ms"
    memory = reference.x / best.x
    factor = f"{format_multiplier(memory)} less" if memory >= 1 else f"{format_multiplier(1 / memory)} the"
    gain = f"{'at least ' if best.is_open else ''}{format_multiplier(times)}"
    return f"{name}{ties} gives {gain} the n_eff per ms of dense noise with {factor} memory"


def _point(ranked: RankedVariant) -> Point | None:
    rate = ranked.evaluated_per_ms if ranked.is_exact else ranked.rate
    if not rate or not ranked.peak_bytes or not is_drawable(rate, ranked.peak_bytes):
        return None
    return Point(ranked, ranked.peak_bytes / _MB, rate)


def _name(point: Point) -> str:
    return f"{label(point.ranked)}: exact" if point.ranked.is_exact else label(point.ranked)


def _draw_front(axes: Axes, best: Sequence[Point]) -> None:
    """Shade what the front dominates; an exact estimate dominates all rates at its memory and above."""
    bottom, top = axes.get_ylim()
    xs = [point.x for point in best]
    ys = [top if point.ranked.is_exact else point.y for point in best]
    xs.append(axes.get_xlim()[1])  # the last step continues to the right edge
    ys.append(ys[-1])
    axes.fill_between(xs, bottom, ys, step="post", color="0.95", linewidth=0, zorder=0.5)


def _draw(axes: Axes, point: Point, *, is_best: bool) -> None:
    look, interval = style.family_look(point.ranked.variant.scheme), point.ranked.rate_interval
    edge = {"markeredgecolor": BLACK, "markeredgewidth": 1.0, "zorder": 3} if is_best else {}
    axes.plot(point.x, point.y, **look.point | edge, markersize=5.5)
    if point.is_open:
        style.arrow(axes, (point.x, point.y), (point.x, axes.get_ylim()[1]), look.color)
    elif interval and is_drawable(*interval):
        axes.vlines(point.x, *interval, color=look.color, linewidth=0.6, zorder=1.8)
