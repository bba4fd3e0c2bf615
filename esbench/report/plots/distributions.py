"""The empirical distribution of the samples of some variants."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from esbench.report import captions
from esbench.report.analysis.pivot import TIMES, Grid, headings
from esbench.report.plots import style
from esbench.report.plots.style import PAGE, Figure, Look
from esbench.schema import Case, Measurement, Variant
from esbench.stats import quantiles
from esbench.units import quantity

_VARIANTS, _CASES = 6, 4
_DECADE = 3.0
"""Samples that span more than this factor are on a logarithmic axis."""
_MIDDLE = (0.01, 0.99)
"""Quantiles that the panel of spreads has room for."""
_LARGEST = 1e12


class _Samples(NamedTuple):
    """The samples of a variant on a case, ascending, in the unit of the axis."""

    variant: Variant
    values: tuple[float, ...]
    median: float


@style.styled()
def samples(grid: Grid, width: float = PAGE) -> Figure | None:
    """Draw the share of samples at or below each value, for up to six variants, in a row per case.

    On the left are the samples, on the right each as a difference from the variant's own median, to compare
    spreads; a note counts the samples beyond its edges. ``None`` where no variant has samples.
    """
    cases = [case for case in grid.cases if _samples(grid, case)[0]]
    if not cases:
        return None
    shown = cases[:_CASES]
    found = {case: _samples(grid, case) for case in shown}
    variants = list(dict.fromkeys(one.variant for held, _ in found.values() for one in held))
    styles = dict(zip(variants, style.looks(min(len(variants), _VARIANTS)), strict=False))
    figure = Figure(width)
    every = figure.panels(2 * len(shown), 2, 1.5)
    notes = ["Lines: the share of samples at or below a value; dotted: the median"]
    for place, (case, name) in enumerate(zip(shown, headings(shown), strict=True)):
        held, reasons = found[case]
        held = [one for one in held if one.variant in styles]
        left, right = every[2 * place : 2 * place + 2]
        _draw_values(left, held, styles)
        outside = _draw_spreads(right, held, styles)
        figure.panel_title(left, name)
        unit = quantity(grid.metric).column.symbol
        left.set_xlabel(f"{captions.short_metric(grid.metric)} ({unit})" if unit else grid.metric)
        notes += style.by_reason(reasons, f"{name}: no samples")
        notes += [f"{name}: beyond the edges of the right panel {outside}"] if outside else []
    notes += style.part_of(list(styles), variants, "variants", "choose with --variants")
    notes += style.part_of(shown, cases, "cases", "choose with --cases")
    timed = grid.metric.endswith(TIMES)
    what = grid.phase if timed else f"{captions.short_metric(grid.metric)}, {grid.phase}"
    figure.finish(
        style.titled(grid, f": distribution of the samples of the {what}"),
        style.origin(grid, shown),
        notes,
        [
            Line2D([], [], color=look.color, linestyle=look.line, marker=look.marker, label=variant.name)
            for variant, look in styles.items()
        ],
    )
    return figure


def _samples(grid: Grid, case: Case) -> tuple[list[_Samples], dict[str, str]]:
    """The samples of each variant of a case, and why others have none."""
    size = quantity(grid.metric).column.size
    found, reasons = [], {}
    for variant in grid.variants:
        row = grid.at(variant, case)
        values = [sample for visit in row.samples for sample in visit] if isinstance(row, Measurement) else []
        spread = quantiles(values)
        if spread is None:
            reasons[variant.name] = style.reason_of(row, 28)
        else:
            found.append(_Samples(variant, tuple(sorted(v / size for v in values)), spread.median / size))
    return found, reasons


def _draw_values(axes: Axes, found: Sequence[_Samples], styles: Mapping[Variant, Look]) -> None:
    low, high = min(one.values[0] for one in found), max(one.values[-1] for one in found)
    if low > 0 and high / low > _DECADE:
        style.log_axis(axes, "x", (low, high), 1.05)
    for one in found:
        _draw_line(axes, one.values, one.median, styles[one.variant])
    axes.set_ylabel("share of samples")


def _draw_spreads(axes: Axes, found: Sequence[_Samples], styles: Mapping[Variant, Look]) -> str:
    """Draw each variant over its own median; return which samples are beyond the edges."""
    off = {
        one.variant: [100 * (value / one.median - 1) for value in one.values]
        for one in found
        if one.median > 0 and one.values[-1] / one.median < _LARGEST
    }
    if not off:
        axes.set_axis_off()
        return ""
    ends = np.array([np.quantile(values, _MIDDLE) for values in off.values()])
    low, high = float(ends.min()), float(ends.max())
    room = max(0.15 * (high - low), 0.1)
    for variant, values in off.items():
        _draw_line(axes, values, 0.0, styles[variant])
    axes.set_xlim(low - room, high + room)
    axes.set_xlabel("from its median (%)")
    axes.tick_params(axis="y", labelleft=False)
    beyond = {
        variant.name: (sum(not low - room <= value <= high + room for value in values), len(values))
        for variant, values in off.items()
    }
    return ", ".join(f"{name} {count} of {total}" for name, (count, total) in beyond.items() if count)


def _draw_line(axes: Axes, values: Sequence[float], median: float, look: Look) -> None:
    every = max(1, len(values) // 6)
    axes.ecdf(values, color=look.color, linestyle=look.line, marker=look.marker, markevery=every)
    axes.axvline(median, color=look.color, linewidth=0.6, linestyle=":", zorder=1.5)
    axes.set_ylim(0, 1.02)
