"""The pictures of sweeps: time and memory against the population and against the width."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from esbench.records import QUALITY, Case, Measurement, Skipped, Variant
from esbench.report import captions, roofline
from esbench.report.drawing import LINES, MARKS, WIDTH, Look, entitle, plain_ticks, shades, styled
from esbench.report.grid import PEAK, Grid
from esbench.report.labels import LABEL_INCHES, Named, name_points
from esbench.report.words import label
from esbench.statistics import median
from esbench.units import quantity

_FEWEST = 3
"""Two points tell no shape: they stand in the table."""
_MARGIN = 1.3


class Sweep(NamedTuple):
    """A field that grows while the rest of a case stays: its name, its value, and what stays."""

    name: str
    axis: str
    value: Callable[[Case], int]
    rest: Callable[[Case], Case | None]
    heading: Callable[[Case], str]


def _without_width(case: Case) -> Case | None:
    if case.out_channels != case.in_channels:
        return None
    return msgspec.structs.replace(case, out_channels=1, in_channels=1)


def _beside_width(case: Case) -> str:
    space = [f"kernel {case.kernel_size}, input {case.input_size}"] if case.kernel_size else []
    return ", ".join([f"{case.members} members", *space])


POPULATION = Sweep(
    "population",
    "members",
    lambda case: case.members,
    lambda case: msgspec.structs.replace(case, members=1),
    lambda case: case.shape,
)
WIDTH_OF_LAYER = Sweep(
    "width", "channels in and out", lambda case: case.out_channels, _without_width, _beside_width
)
SWEEPS = (POPULATION, WIDTH_OF_LAYER)


@dataclass(frozen=True)
class _Series:
    """A line of a panel: its points, in the unit of the axis, and the reason why it breaks off."""

    name: str
    look: Look
    points: tuple[tuple[int, float], ...]
    reason: str = ""


def against(grid: Grid, sweep: Sweep) -> Figure | None:
    """Time or peak memory against what a sweep lets grow: a panel for each family of cases.

    Every line carries its name. One that breaks off because a larger case has no number ends in a cross, and
    the legend says why. The floor of the plain layer is the least time of its work at the ceilings of the
    run, or the bytes of what it returns. ``None`` where nothing grows.
    """
    families = _families(grid, sweep)
    if not families:
        return None
    known = looks(grid.variants)
    panels = [_panel(grid, sweep, family, known) for family in families]
    floors = [_floor(grid, sweep, family) for family in families]
    values = [y for panel in panels for series in panel for _, y in series.points]
    if not values:
        return None
    values += [y for floor in floors for _, y in floor]
    inches = max(3.0, LABEL_INCHES * max(map(len, panels)) + 0.4)
    with styled():
        figure = Figure(figsize=(WIDTH, 1.3 + (inches + 0.6) * len(panels)), layout="constrained")
        rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, family, panel, floor in zip(rows, families, panels, floors, strict=True):
            _scale(axes, [sweep.value(case) for case in family], values)
            axes.plot(*_across(floor), color="0.45", linewidth=5, alpha=0.45, solid_capstyle="round")
            for series in panel:
                _draw(axes, series)
            name_points(axes, list(map(_named, panel)), inches)
            axes.set_xlabel(sweep.axis)
            axes.set_ylabel(quantity(grid.metric).column.symbol)
            axes.set_title(label(sweep.heading(family[0])), fontsize="medium")
        reasons = dict.fromkeys(series.reason for panel in panels for series in panel if series.reason)
        _legend(figure, floor=_floor_words(grid) if any(floors) else "", reasons=list(reasons))
        name = captions.short_metric(grid.metric)
        shown = [case for family in families for case in family]
        what = name if grid.phase == QUALITY else f"{name} of the {grid.phase}"
        entitle(figure, grid, shown, f"{grid.operator}: {what} against the {sweep.name}")
    return figure


def _families(grid: Grid, sweep: Sweep) -> list[list[Case]]:
    """Cases that differ in nothing but what grows, the smallest first, where there are three of them."""
    families: dict[Case, list[Case]] = {}
    for case in grid.cases:
        if (rest := sweep.rest(case)) is not None:
            families.setdefault(rest, []).append(case)
    return [sorted(family, key=sweep.value) for family in families.values() if len(family) >= _FEWEST]


def looks(variants: Sequence[Variant]) -> dict[Variant, Look]:
    """A colour for each scheme, a mark and a line for each of its variants; baselines are black and grey."""
    schemes = list(dict.fromkeys(variant.scheme for variant in variants if not variant.baseline))
    colors = dict(zip(schemes, shades(len(schemes)), strict=True))
    marks, seen = itertools.cycle(MARKS), dict.fromkeys([*schemes, ""], 0)
    found = {}
    for variant in variants:
        key = "" if variant.baseline else variant.scheme
        color = colors.get(key, (0.0, 0.0, 0.0, 1.0) if variant.mode == "base" else (0.45, 0.45, 0.45, 1.0))
        found[variant] = Look(color, next(marks), LINES[seen[key] % len(LINES)])
        seen[key] += 1
    return found


def _panel(grid: Grid, sweep: Sweep, family: list[Case], known: dict[Variant, Look]) -> list[_Series]:
    size = quantity(grid.metric).column.size
    found = []
    for variant, look in known.items():
        rows = [(sweep.value(case), grid.at(variant, case)) for case in family]
        points = tuple(
            (x, value / size) for x, row in rows if isinstance(row, Measurement) and (value := median(row))
        )
        beyond = [row.reason for x, row in rows if isinstance(row, Skipped) and points and x > points[-1][0]]
        reason = label(captions.shorten(beyond[0])) if beyond else ""
        if points:
            found.append(_Series(label(variant.label(grid.operator)), look, points, reason))
    return found


def _floor(grid: Grid, sweep: Sweep, family: list[Case]) -> list[tuple[int, float]]:
    """The least that the plain layer takes: time of its work, or bytes of what it returns."""
    size = quantity(grid.metric).column.size
    points = []
    for case in family:
        work = grid.base_work(case)
        if grid.metric == PEAK:
            least = work.output_bytes if work else None
        else:
            least = roofline.floor_ns(grid.run, case.dtype, work)
        points += [(sweep.value(case), least / size)] if least else []
    return points


def _scale(axes: Axes, xs: list[int], values: Iterable[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(xs, [str(x) for x in xs])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    values = list(values)
    axes.set_ylim(min(values) / _MARGIN, max(values) * _MARGIN)
    plain_ticks(axes.yaxis)


def _across(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _draw(axes: Axes, series: _Series) -> None:
    xs, ys = _across(series.points)
    look = series.look
    axes.plot(xs, ys, linestyle=look.line, marker=look.mark, markersize=5, color=look.color, linewidth=1.3)
    if series.reason:
        axes.plot(xs[-1], ys[-1], marker="x", markersize=11, markeredgewidth=1.5, color="black")


def _named(series: _Series) -> Named:
    return Named(series.name, series.points[-1], series.look.color)


def _floor_words(grid: Grid) -> str:
    """What the floor is, and where lines that beat its arithmetic show that it is too high."""
    if grid.metric == PEAK:
        return "bytes of what it returns"
    faster = any(roofline.beats_arithmetic(grid.run, row) for _, _, row in grid.cells)
    too_high = f"\ntoo high: arithmetic beats it, {roofline.DISTURBED}" if faster else ""
    return f"its least work at the device's ceilings{too_high}"


def _legend(figure: Figure, *, floor: str, reasons: list[str]) -> None:
    handles = []
    if floor:
        name = f"floor of the plain layer: {floor}"
        handles.append(Line2D([], [], color="0.45", linewidth=5, alpha=0.45, label=name))
    if reasons:
        name = f"a larger one has no number: {'; '.join(reasons)}"
        handles.append(Line2D([], [], color="black", marker="x", markersize=9, linestyle="none", label=name))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=1)
