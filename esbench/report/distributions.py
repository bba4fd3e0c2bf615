"""The picture of samples: which part of them is below a value, for variants side by side."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from esbench.records import Case, Measurement, Variant
from esbench.report import captions
from esbench.report.drawing import LINES, MARKS, PAGE, Look, Paper, plain_ticks, shades, styled
from esbench.report.grid import TIMES, Grid, headings
from esbench.report.lettering import fit
from esbench.report.sheets import Sheet, by_reason, origin, short, titled
from esbench.statistics import quantiles
from esbench.units import quantity

MOST = 6
"""More variants are no longer told apart."""
_CASES = 4
_INCHES = 1.5
_SIDES = 0.3
_TICK_INCHES = 0.35
_STEPS = 300
"""Of more samples a line has the quantiles at as many places."""
_MARKS = 6
_DECADE = 3.0
"""Values that are further apart than this stand on a logarithmic axis."""
_MARGIN = 1.05
_MIDDLE = (0.01, 0.99)
"""The quantiles that the panel of spreads has room for, whatever lies beyond."""
_ROOM, _LEAST = 0.15, 0.1
_LARGEST = 1e12


class Samples(NamedTuple):
    """The samples of a variant on a case, ascending, in the unit of the axis."""

    variant: Variant
    values: tuple[float, ...]
    middle: float


def samples(grid: Grid, case: Case) -> tuple[list[Samples], dict[str, str]]:
    """The samples of each variant of a case, and in short why others have none."""
    size = quantity(grid.metric).column.size
    found, reasons = [], {}
    for variant in grid.variants:
        row = grid.at(variant, case)
        values = [sample for visit in row.samples for sample in visit] if isinstance(row, Measurement) else []
        spread = quantiles(values)
        if spread is None:
            reasons[variant.name] = short(row)
        else:
            found.append(Samples(variant, tuple(sorted(v / size for v in values)), spread.median / size))
    return found, reasons


def distributions(grid: Grid, paper: Paper = PAGE) -> Sheet | None:
    """All samples of up to six variants: which part of them is at most so much, a row for each case.

    On the left as they were read, on the right each over its own median, so that the spreads can be compared.
    No sample is dropped: those beyond the right panel's edges are counted in a note. ``None`` where no
    variant has samples.
    """
    cases = [case for case in grid.cases if samples(grid, case)[0]]
    if not cases:
        return None
    shown = cases[:_CASES]
    held = {case: samples(grid, case) for case in shown}
    variants = list(dict.fromkeys(one.variant for found, _ in held.values() for one in found))
    looks = dict(zip(variants[:MOST], _looks(len(variants[:MOST])), strict=True))
    with styled(paper):
        sheet = Sheet(paper)
        every = sheet.panels(2 * len(shown), 2)
        width = sheet.room / 2 - _SIDES
        notes: list[str] = []
        for place, (case, name) in enumerate(zip(shown, headings(shown), strict=True)):
            found, reasons = held[case]
            found = [one for one in found if one.variant in looks]
            left, right = every[2 * place : 2 * place + 2]
            _draw_values(left, found, looks, width)
            outside = _draw_spreads(right, found, looks, width)
            left.set_title(fit(name, width, paper.small))
            unit = quantity(grid.metric).column.symbol
            left.set_xlabel(f"{captions.short_metric(grid.metric)} ({unit})" if unit else grid.metric)
            notes += by_reason(reasons, f"{name}: no samples")
            notes += [f"{name}: beyond the edges of the right panel {outside}"] if outside else []
        for kind, here, there in (("variants", looks, variants), ("shapes", shown, cases)):
            few = f"{len(here)} of {len(there)} {kind}: choose with --{'cases' if here is shown else kind}"
            notes += [few] if len(here) < len(there) else []
        timed = grid.metric.endswith(TIMES)
        what = grid.phase if timed else f"{captions.short_metric(grid.metric)}, {grid.phase}"
        sheet.finish(
            len(shown) * (_INCHES + sheet.key_inches(0) + sheet.title_inches + 0.05),
            titled(grid, f"{grid.operator}: how samples of the {what} are distributed"),
            origin(grid, shown),
            ["Lines: the share of the samples that is at most so much; dotted: the median", *notes],
            [
                Line2D([], [], color=look.color, linestyle=look.line, marker=look.mark, label=variant.name)
                for variant, look in looks.items()
            ],
        )
    return sheet


def _looks(count: int) -> list[Look]:
    return [Look(shade, MARKS[place], LINES[place % len(LINES)]) for place, shade in enumerate(shades(count))]


def _draw_values(axes: Axes, found: Sequence[Samples], looks: Mapping[Variant, Look], width: float) -> None:
    low, high = min(one.values[0] for one in found), max(one.values[-1] for one in found)
    for one in found:
        _draw_one(axes, one.values, one.middle, looks[one.variant])
    if low > 0 and high / low > _DECADE:
        axes.set_xscale("log")
        axes.set_xlim(low / _MARGIN, high * _MARGIN)
        plain_ticks(axes.xaxis, width, 0.3)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(max(2, int(width / _TICK_INCHES))))
    axes.set_ylabel("share of the samples")


def _draw_spreads(axes: Axes, found: Sequence[Samples], looks: Mapping[Variant, Look], width: float) -> str:
    """Each over its own median; say which samples are beyond the edges."""
    off = {
        one.variant: tuple(100 * (value / one.middle - 1) for value in one.values)
        for one in found
        if one.middle > 0 and one.values[-1] / one.middle < _LARGEST
    }
    if not off:
        axes.set_axis_off()
        return ""
    ends = [np.quantile(values, _MIDDLE) for values in off.values()]
    low, high = min(float(end[0]) for end in ends), max(float(end[1]) for end in ends)
    room = max(_ROOM * (high - low), _LEAST)
    low, high = low - room, high + room
    for variant, values in off.items():
        _draw_one(axes, values, 0.0, looks[variant])
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(max(2, int(width / _TICK_INCHES))))
    axes.set_xlabel("off the own median (%)")
    axes.tick_params(axis="y", labelleft=False)
    counts = {v.name: sum(not low <= x <= high for x in values) for v, values in off.items()}
    totals = {v.name: len(values) for v, values in off.items()}
    return ", ".join(f"{name} {count} of {totals[name]}" for name, count in counts.items() if count)


def _draw_one(axes: Axes, values: Sequence[float], middle: float, look: Look) -> None:
    count = len(values)
    places = sorted({round(k * (count - 1) / (_STEPS - 1)) for k in range(_STEPS)}) if count > 1 else [0]
    xs = [values[0], *(values[place] for place in places)]
    ys = [0.0, *((place + 1) / count for place in places)]
    axes.plot(
        xs,
        ys,
        drawstyle="steps-post",
        color=look.color,
        linestyle=look.line,
        marker=look.mark,
        markevery=max(1, len(xs) // _MARKS),
    )
    axes.axvline(middle, color=look.color, linewidth=0.6, linestyle=":", zorder=1.5)
    axes.set_ylim(0, 1.02)
