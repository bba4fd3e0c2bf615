"""The roofline: the arithmetic that calls achieve, against their arithmetic intensity.

Source: S. Williams, A. Waterman, D. Patterson, Roofline, CACM 52(4), 2009.
"""

from collections.abc import Sequence
from typing import NamedTuple

from esbench.report import captions
from esbench.report.analysis import roofline as analysis
from esbench.report.analysis.pivot import Grid, headings, largest_populations
from esbench.report.plots import style
from esbench.report.plots.style import BLACK, PAGE, Figure, Look, is_drawable, log_axis
from esbench.schema import Case, Measurement, Variant
from esbench.stats import median
from esbench.units import quantity

_NS = 1e9
"""Nanoseconds per second."""
_BASE = Look(BLACK, "o", "-")


class Call(NamedTuple):
    """A call of a variant: its arithmetic intensity in flops per byte, and its rate in flops per ns."""

    variant: Variant
    intensity: float
    rate: float


def calls(grid: Grid, case: Case) -> list[Call]:
    """Return the calls of a case with a time and a declared minimum of arithmetic and traffic."""
    all_calls = []
    for variant in grid.variants:
        row = grid.at(variant, case)
        if not isinstance(row, Measurement) or row.work is None:
            continue
        work, ns = row.work, median(row)
        if ns and is_drawable(ns, work.flops, work.moved_bytes):
            all_calls.append(Call(variant, work.flops / work.moved_bytes, work.flops / ns))
    return all_calls


@style.use_style()
def roofline(grid: Grid, width: float = PAGE) -> Figure | None:
    """Draw the arithmetic that calls achieve, below the roof of the device's measured peaks.

    The roof is min(rate of a matrix product, bandwidth of a copy * intensity) (Williams et al., 2009). Calls
    whose data is in caches may lie above the slope. Each shape has a panel, at its largest population. Return
    ``None`` if a peak is unknown, or no shape has two calls with known work.
    """
    copy, product = (analysis.rate(grid.run, kind, grid.dtype) for kind in ("copy", "matmul"))
    shown_cases = [case for case in grid.cases if len(calls(grid, case)) > 1]
    if not copy or not product or not shown_cases:
        return None
    majority = len(grid.variants) // 2 + 1
    cases = largest_populations(shown_cases, lambda case: min(len(calls(grid, case)), majority))
    shown = cases[: 6 if width == PAGE else 3]
    panels = [calls(grid, case) for case in shown]
    all_calls = [call for panel in panels for call in panel]
    looks = style.looks(sorted(call.variant.scheme for call in all_calls if call.variant.mode != "base"))
    unit = next(unit for unit in reversed(_LADDER) if unit.size <= product * _NS or unit is _LADDER[0])
    scale = _NS / unit.size  # from flops per ns
    figure = Figure(width)
    all_axes = figure.panels(len(shown), *((2, 2.9) if width == PAGE else (1, 2.4)))
    for axes, panel, name in zip(all_axes, panels, headings(shown), strict=True):
        log_axis(axes, "x", [product / copy, *(call.intensity for call in all_calls)], 1.6)
        log_axis(axes, "y", [scale * product, *(scale * call.rate for call in all_calls)], 1.6)
        left, right = axes.get_xlim()
        xs = [left, product / copy, right]
        roof = [scale * min(product, copy * x) for x in xs]
        axes.plot(xs, roof, color=style.GREY, linewidth=1.6, zorder=1.6)
        for call in panel:
            is_base = call.variant.mode == "base"
            look = _BASE if is_base else looks[call.variant.scheme]
            axes.plot(call.intensity, scale * call.rate, **look.point, markersize=5.0 if is_base else 4.0)
        axes.set(xlabel="arithmetic intensity (flop/byte), minimum", ylabel=unit.symbol)
        axes.set_title(style.fit(name, figure.panel_width, style.LABEL))
    figure.finish(
        f"{captions.invalid_note(grid.run)}{grid.operator}: roofline of the {grid.phase}",
        style.origin(grid, shown),
        [*_notes(grid, shown, all_calls, copy), *style.note_if_incomplete(shown, cases, "shapes")],
        [
            *(style.legend_point(look, scheme) for scheme, look in looks.items()),
            style.legend_point(_BASE, "Base", 5.0),
        ],
    )
    return figure


_LADDER = quantity("flops_per_s").ladder


def _notes(grid: Grid, shown: Sequence[Case], all_calls: Sequence[Call], copy: float) -> list[str]:
    notes = ["Grey: the bandwidth of a copy on the left, the arithmetic of a matrix product on the right"]
    if any(case in shown and analysis.exceeds_matmul_peak(grid.run, row) for _, case, row in grid.cells):
        notes.append(f"Above the roof: {analysis.DISTURBED}")
    elif any(call.rate > copy * call.intensity for call in all_calls):
        notes.append("Above the slope: data in caches moves faster than the copy")
    drawn = {call.variant for call in all_calls}
    reasons = {}
    for variant in grid.variants:
        if variant not in drawn:
            rows = [grid.at(variant, case) for case in shown]
            measured = any(isinstance(row, Measurement) for row in rows)
            reasons[variant.name] = "no arithmetic declared" if measured else style.missing_reason(rows[0])
    return [*notes, *style.notes_by_reason(reasons)]
