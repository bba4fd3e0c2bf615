"""The picture of multipliers: a row for each variant, a bar for each shape."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from esbench.records import Case, Measurement, Variant
from esbench.report import roofline
from esbench.report.drawing import (
    BLACK,
    HATCHES,
    PAGE,
    Color,
    Look,
    Paper,
    drawable,
    fills,
    plain_ticks,
    styled,
)
from esbench.report.grid import Grid, headings
from esbench.report.lettering import fit, fit_all
from esbench.report.sheets import Sheet, mark, origin, short, titled
from esbench.statistics import median

_MOST = 6
"""More shapes are no longer told apart by their hatches."""
_SLOT = 0.013
"""Inches of a bar for each point of the letters beside it, and between two rows."""
_BETWEEN = 0.05
_THICK = 0.84
_NAMES = 0.45
"""The part of the paper that names may take."""
_FOOT = 0.36
_MARGIN = 1.25
_HALO = 2.2
_REASON = 0.45
INTERVALS, FLOORS = "95 % interval", "floor"


@dataclass(frozen=True)
class Bar:
    """A cell as a multiple of base: its interval and its floor, or in short why there is no number."""

    value: float = math.nan
    low: float | None = None
    high: float | None = None
    floor: float | None = None
    reason: str = ""


def multipliers(grid: Grid, paper: Paper = PAGE) -> Sheet | None:
    """Times as multiples of the plain layer's: a row for each variant, a bar for each shape.

    A line through the end of a bar is the 95 % interval of its ratio, a tick the least that the variant could
    take: its declared work at the ceilings of the run, over the plain layer's time. What has no number has
    its reason. Of a shape that was measured with several populations it shows the largest at which most
    variants have a number. ``None`` where the run holds no plain layer to compare with, or nothing else.
    """
    variants = [variant for variant in grid.variants if variant.mode != "base"]
    if not variants or grid.reference("base") is None:
        return None
    every = _largest(grid, variants)
    cases = _spread(every)
    bars = {case: [bar(grid, variant, case) for variant in variants] for case in cases}
    if not any(one.value > 0 for row in bars.values() for one in row):
        return None
    with styled(paper):
        sheet = Sheet(paper)
        slot = _SLOT * paper.fine
        body = len(variants) * (len(cases) * slot + _BETWEEN) + _FOOT
        (axes,) = sheet.panels(1, 1)
        _scale(axes, [one for row in bars.values() for one in row], 0.6 * paper.inches)
        unit = 1 / (len(cases) + _BETWEEN / slot)
        for place, (case, color) in enumerate(zip(cases, fills(len(cases)), strict=True)):
            shift = unit * (place - (len(cases) - 1) / 2)
            _draw(axes, bars[case], shift, unit, (color, HATCHES[place]), paper)
        names = fit_all([variant.name for variant in variants], _NAMES * paper.inches, paper.fine)
        axes.set_yticks(range(len(variants)), names)
        axes.set_ylim(len(variants) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0, labelsize=paper.fine)
        axes.grid(visible=False, axis="y")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlabel("time(variant) / time(base), lower is better")
        shown = [one for row in bars.values() for one in row if one.value > 0]
        plain = "the plain layer" if grid.phase == "forward" else "base"
        few = [f"{len(cases)} of {len(every)} shapes: the table has all"] if len(cases) < len(every) else []
        sheet.finish(
            body,
            titled(grid, f"{grid.operator}: {grid.phase} time against {plain}"),
            origin(grid, cases),
            [*_notes(grid, shown), *few],
            _key(cases, shown),
        )
    return sheet


def bar(grid: Grid, variant: Variant, case: Case) -> Bar:
    """What stands for a cell."""
    row, ratio, reference = (
        grid.at(variant, case),
        grid.multiplier(variant, case, "base"),
        grid.reference("base"),
    )
    if ratio is None or reference is None or not drawable(ratio.value):
        return Bar(reason=short(row))
    floor = None
    if isinstance(row, Measurement):
        base = grid.measured(reference.variant, case, reference.phase, row.company)
        least, plain = roofline.floor_ns(grid.run, case.dtype, row.work), median(base) if base else None
        floor = least / plain if least and plain and drawable(least / plain) else None
    sure = ratio.low and ratio.high and drawable(ratio.low, ratio.high)
    return Bar(ratio.value, ratio.low if sure else None, ratio.high if sure else None, floor)


def _largest(grid: Grid, variants: Sequence[Variant]) -> list[Case]:
    """Of the cases that differ in nothing but the number of members, the largest that most could do."""
    families: dict[Case, list[Case]] = {}
    for case in grid.cases:
        families.setdefault(msgspec.structs.replace(case, members=1), []).append(case)

    def worth(case: Case) -> tuple[int, int]:
        numbers = sum(grid.multiplier(variant, case, "base") is not None for variant in variants)
        return min(numbers, len(variants) // 2 + 1), case.members

    return [max(family, key=worth) for family in families.values()]


def _spread(cases: Sequence[Case]) -> list[Case]:
    """As many cases as have room, from the first to the last."""
    if len(cases) <= _MOST:
        return list(cases)
    return [cases[round(place * (len(cases) - 1) / (_MOST - 1))] for place in range(_MOST)]


def _scale(axes: Axes, bars: Sequence[Bar], inches: float) -> None:
    ends = [end for one in bars if one.value > 0 for end in (one.value, one.low, one.high, one.floor) if end]
    axes.set_xscale("log")
    axes.set_xlim(min(1.0, *ends) / _MARGIN, max(2.0, *ends) * _MARGIN)
    plain_ticks(axes.xaxis, inches, 0.25)


def _draw(  # noqa: PLR0913, PLR0917  one series of a plot
    axes: Axes,
    bars: Sequence[Bar],
    shift: float,
    unit: float,
    look: tuple[Color, str],
    paper: Paper,
) -> None:
    color, hatch = look
    thick = _THICK * unit
    drawn = [(row + shift, one) for row, one in enumerate(bars) if one.value > 0]
    axes.barh(
        [place for place, _ in drawn],
        [one.value - 1 for _, one in drawn],
        thick,
        left=1,
        color=color,
        hatch=hatch,
        edgecolor=BLACK,
        linewidth=0.4,
        zorder=2,
    )
    sure = [(place, one.low, one.high) for place, one in drawn if one.low and one.high]
    if sure:
        axes.hlines(*zip(*sure, strict=True), color=BLACK, linewidth=1.0, zorder=3, label=INTERVALS)
    least = [(one.floor, place - thick / 2, place + thick / 2) for place, one in drawn if one.floor]
    if least:
        axes.vlines(*zip(*least, strict=True), color="white", linewidth=_HALO, zorder=4)
        axes.vlines(*zip(*least, strict=True), color=BLACK, linewidth=0.9, zorder=5, label=FLOORS)
    for row, one in enumerate(bars):
        if not one.value > 0:
            axes.annotate(
                fit(one.reason, _REASON * paper.inches, paper.fine),
                (1, row + shift),
                (3, 0),
                textcoords="offset points",
                verticalalignment="center_baseline",
                fontsize=paper.fine,
                fontstyle="italic",
                color="0.3",
            )


def _notes(grid: Grid, shown: Sequence[Bar]) -> list[str]:
    """What the marks mean, and why there are none where there are none."""
    said = []
    sure = sum(one.low is not None for one in shown)
    if sure < len(shown):
        said.append(f"{INTERVALS}s: {sure} of {len(shown)}; else fewer than 6 rounds were shared with base")
    if not any(one.floor for one in shown):
        said.append(f"No {FLOORS}: {_no_floor(grid)}")
    else:
        faster = any(roofline.beats_arithmetic(grid.run, row) for _, _, row in grid.cells)
        words = "Floor: least work that a variant declares, at the device's ceilings, over base's time"
        said.append(f"{words}; too high where arithmetic beats it: {roofline.DISTURBED}" if faster else words)
    return said


def _no_floor(grid: Grid) -> str:
    if not grid.run.ceilings:
        return "the run did not measure the device's ceilings"
    dtypes = {case.dtype for case in grid.cases}
    if not any(roofline.rate(grid.run, "matmul", dtype) for dtype in dtypes):
        return f"the run measured no ceiling for {' and '.join(sorted(dtypes))}"
    return "no variant declares its least work in this phase"


def _key(cases: Sequence[Case], shown: Sequence[Bar]) -> list[Patch | Line2D]:
    handles: list[Patch | Line2D] = [
        Patch(facecolor=color, hatch=hatch, edgecolor=BLACK, linewidth=0.4, label=name)
        for name, color, hatch in zip(headings(cases), fills(len(cases)), HATCHES, strict=False)
    ]
    if any(one.low for one in shown):
        handles.append(Line2D([], [], color=BLACK, linewidth=1.0, label=INTERVALS))
    if any(one.floor for one in shown):
        handles.append(mark(Look(BLACK, "|", "-"), FLOORS, 6))
    return handles
