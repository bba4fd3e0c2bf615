"""Time multipliers: a row per variant, a bar per shape."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from esbench.report.analysis import roofline
from esbench.report.analysis.pivot import Grid, headings
from esbench.report.plots import style
from esbench.report.plots.style import BLACK, FINE, HATCHES, PAGE, Color, Figure, drawable
from esbench.schema import Case, Measurement, Variant
from esbench.stats import median

INTERVALS, BOUNDS = "95 % interval", "roofline bound"

_BAR, _GAP = 0.078, 0.05
"""Inches of a bar, and between two rows."""
_THICKNESS = 0.84


@dataclass(frozen=True)
class Bar:
    """A time multiplier, with its interval and its roofline bound; or the reason why it is missing."""

    value: float = math.nan
    interval: tuple[float, float] | None = None
    bound: float | None = None
    reason: str = ""


@style.styled()
def multipliers(grid: Grid, width: float = PAGE) -> Figure | None:
    """Draw times as multiples of the plain layer's: a row per variant, a bar per shape.

    A horizontal line is the 95 % interval of a ratio, a vertical tick its roofline bound: the minimum work of
    the variant at the measured peaks of the device, over the time of the plain layer. A reason replaces a
    missing number. Each shape is shown at its largest population. ``None`` where there is nothing to compare.
    """
    variants = [variant for variant in grid.variants if variant.mode != "base"]
    if not variants or grid.reference("base") is None:
        return None
    every = largest_populations(
        grid.cases,
        lambda case: sum(grid.multiplier(variant, case, "base") is not None for variant in variants),
        len(variants) // 2 + 1,
    )
    cases = _spread(every, len(HATCHES))
    bars = {case: [_bar(grid, variant, case) for variant in variants] for case in cases}
    shown = [bar for row in bars.values() for bar in row if bar.value > 0]
    if not shown:
        return None
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, len(variants) * (len(cases) * _BAR + _GAP))
    ends = [x for bar in shown for x in (bar.value, bar.bound, *(bar.interval or ())) if x]
    style.log_axis(axes, "x", [1.0, 2.0, *ends])
    step = 1 / (len(cases) + _GAP / _BAR)
    colors = style.shades(len(cases), 0.45, 0.95)  # light enough for black lines on them
    for place, (case, color, hatch) in enumerate(zip(cases, colors, HATCHES, strict=False)):
        _draw(axes, bars[case], step * (place - (len(cases) - 1) / 2), step * _THICKNESS, color, hatch)
    axes.set_yticks(range(len(variants)), [style.fit(variant.name, 0.45 * width) for variant in variants])
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, labelsize=FINE)
    axes.grid(visible=False, axis="y")
    axes.axvline(1, color="black", linewidth=0.8)
    where: Literal["center", "right"] = "center" if width == PAGE else "right"  # longer than narrow axes
    axes.set_xlabel("time(variant) / time(base), lower is better", loc=where)
    baseline = "the plain layer" if grid.phase == "forward" else "base"
    figure.finish(
        style.titled(grid, f": {grid.phase} time against {baseline}"),
        style.origin(grid, cases),
        [*_notes(grid, shown), *style.part_of(cases, every, "shapes")],
        _legend(cases, colors, shown),
    )
    return figure


def largest_populations(cases: Sequence[Case], numbers: Callable[[Case], int], enough: int) -> list[Case]:
    """Of the cases that differ only in their members, the largest with enough numbers or with the most."""
    families: dict[Case, list[Case]] = {}
    for case in cases:
        families.setdefault(msgspec.structs.replace(case, members=1), []).append(case)
    return [
        max(family, key=lambda case: (min(numbers(case), enough), case.members))
        for family in families.values()
    ]


def _spread(cases: Sequence[Case], most: int) -> list[Case]:
    """At most a given number of cases, evenly spaced from the first to the last."""
    if len(cases) <= most:
        return list(cases)
    return [cases[round(place * (len(cases) - 1) / (most - 1))] for place in range(most)]


def _bar(grid: Grid, variant: Variant, case: Case) -> Bar:
    row, ratio, reference = (
        grid.at(variant, case),
        grid.multiplier(variant, case, "base"),
        grid.reference("base"),
    )
    if ratio is None or reference is None or not isinstance(row, Measurement) or not drawable(ratio.value):
        return Bar(reason=style.reason_of(row, 28))
    base = grid.measured(reference.variant, case, reference.phase, row.group)
    least, plain = roofline.bound_ns(grid.run, case.dtype, row.work), median(base) if base else None
    bound = least / plain if least and plain else 0.0
    ends = (ratio.low or 0.0, ratio.high or 0.0)
    return Bar(ratio.value, ends if drawable(*ends) else None, bound if drawable(bound) else None)


def _draw(  # noqa: PLR0913, PLR0917  # one series of bars
    axes: Axes, bars: Sequence[Bar], shift: float, thickness: float, color: Color, hatch: str
) -> None:
    drawn = [(row + shift, bar) for row, bar in enumerate(bars) if bar.value > 0]
    axes.barh(
        [y for y, _ in drawn],
        [bar.value - 1 for _, bar in drawn],
        thickness,
        left=1,
        color=color,
        hatch=hatch,
        edgecolor=BLACK,
        linewidth=0.4,
        zorder=2,
    )
    intervals = [(y, *bar.interval) for y, bar in drawn if bar.interval]
    if intervals:
        axes.hlines(*zip(*intervals, strict=True), color=BLACK, linewidth=1.0, zorder=3, label=INTERVALS)
    bounds = [(bar.bound, y - thickness / 2, y + thickness / 2) for y, bar in drawn if bar.bound]
    if bounds:
        axes.vlines(*zip(*bounds, strict=True), color="white", linewidth=2.2, zorder=4)
        axes.vlines(*zip(*bounds, strict=True), color=BLACK, linewidth=0.9, zorder=5, label=BOUNDS)
    for row, bar in enumerate(bars):
        if bar.reason:
            axes.annotate(
                style.fit(bar.reason, 3.0),
                (1, row + shift),
                (3, 0),
                textcoords="offset points",
                verticalalignment="center_baseline",
                fontsize=FINE,
                fontstyle="italic",
                color="0.3",
            )


def _notes(grid: Grid, shown: Sequence[Bar]) -> list[str]:
    known = sum(bar.interval is not None for bar in shown)
    notes = [f"{INTERVALS}: {known} of {len(shown)}, the others share fewer than 6 rounds with base"]
    if known == len(shown):
        notes = []
    if any(bar.bound for bar in shown):
        return [*notes, style.bound_note(grid, "time of the variant's minimum work / time(base),")]
    if not roofline.rate(grid.run, "matmul", grid.dtype):
        return [*notes, f"No {BOUNDS}: the run did not measure the peaks of the device in {grid.dtype}"]
    return [*notes, f"No {BOUNDS}: no variant declares its minimum work in this phase"]


def _legend(cases: Sequence[Case], colors: Sequence[Color], shown: Sequence[Bar]) -> list[Artist]:
    handles: list[Artist] = [
        Patch(facecolor=color, hatch=hatch, edgecolor=BLACK, linewidth=0.4, label=name)
        for name, color, hatch in zip(headings(cases), colors, HATCHES, strict=False)
    ]
    if any(bar.interval for bar in shown):
        handles.append(Line2D([], [], color=BLACK, linewidth=1.0, label=INTERVALS))
    if any(bar.bound for bar in shown):
        handles.append(style.legend_point(style.Look(BLACK, "|", "-"), BOUNDS, 6))
    return handles
