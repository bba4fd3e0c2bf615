"""A metric against the population or the width: small panels with a few lines each."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter

from esbench.report import captions
from esbench.report.analysis import roofline
from esbench.report.analysis.pivot import TIMES, Grid, quality_grids
from esbench.report.analysis.quality import EFFECTIVE, LINEAR, EffectiveSize, Qualities
from esbench.report.plots import style
from esbench.report.plots.style import BLACK, PAGE, Figure, Look, drawable
from esbench.report.text import counted
from esbench.schema import QUALITY, Case, Measurement, Row, Run, Skipped, Variant
from esbench.stats import median
from esbench.units import quantity

CROSS = "×"  # noqa: RUF001  # it looks like the marker at the end of such a line
BOUND = "roofline bound"
SHARE = "kept_percent"
"""The effective population as a percentage of all members."""

_FEWEST = 3
"""Points of a line: two show no trend, and are in the table."""
_LINES = 6
"""More lines in a panel cannot be distinguished."""
_PANELS = 24


class Sweep(NamedTuple):
    """A field of a case that varies: its name, its value, the rest of the case, and words for that rest."""

    name: str
    axis: str
    value: Callable[[Case], int]
    rest: Callable[[Case], Case | None]
    heading: Callable[[Case], str]


def _without_width(case: Case) -> Case | None:
    square = case.out_channels == case.in_channels
    return msgspec.structs.replace(case, out_channels=1, in_channels=1) if square else None


def _beside_width(case: Case) -> str:
    space = f", kernel {case.kernel_size}, input {case.input_size}" if case.kernel_size else ""
    return f"{counted(case.members, 'member')}{space}"


POPULATION = Sweep(
    "population",
    "members",
    lambda case: case.members,
    lambda case: msgspec.structs.replace(case, members=1),
    lambda case: case.shape,
)
WIDTH = Sweep("width", "channels in and out", lambda case: case.out_channels, _without_width, _beside_width)


@dataclass(frozen=True)
class _Line:
    """The points of a variant, and why a larger case has no number."""

    variant: Variant
    points: tuple[tuple[float, float], ...]
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.variant.name} {CROSS}" if self.reason and self.points else self.variant.name


class _Panel(NamedTuple):
    """Its lines; those of other panels, shown for comparison; the roofline bound of the plain layer."""

    title: str
    own: Sequence[_Line]
    others: Sequence[_Line]
    bound: Sequence[tuple[float, float]]


@style.styled()
def sweep(grid: Grid, kind: Sweep, width: float = PAGE) -> Figure | None:
    """Draw a metric against what varies, a group of panels for each family of cases that differ only in that.

    A line that ends early, because a larger case has no number, ends in a cross, and a note gives the reason.
    ``None`` where no family has three cases.
    """
    families = _families(grid, kind)
    panels: list[_Panel] = []
    lines: list[_Line] = []
    for family in families:
        found = _lines(grid, kind, family)
        title = kind.heading(family[0]) if len(families) > 1 else ""
        panels += _panels(found, title, _bounds(grid, kind, family))
        lines += found
    values = [
        y for panel in panels for points in (panel.bound, *(line.points for line in lines)) for _, y in points
    ]
    if not any(line.points for line in lines):
        return None
    shown = panels[:_PANELS]
    figure = Figure(width)
    xs = sorted({kind.value(case) for family in families for case in family})
    every = figure.panels(len(shown), 3 if width == PAGE else 2, 1.15 if len(shown) > 1 else 1.9)
    for place, (axes, panel) in enumerate(zip(every, shown, strict=True)):
        handles = _draw(axes, panel)
        _scale(axes, xs, values, figure.panel_width)
        figure.panel_title(axes, panel.title)
        if place + figure.columns >= len(shown):
            axes.set_xlabel(kind.axis)
        if place % figure.columns:
            axes.tick_params(axis="y", labelleft=False)
        else:
            axes.set_ylabel(quantity(grid.metric).column.symbol)
        figure.panel_legend(axes, handles)
    is_bound = any(panel.bound for panel in panels)
    notes = [style.bound_note(grid, "the plain layer's minimum work")] if is_bound else []
    notes += [*_ends(lines), *style.part_of(shown, panels, "panels")]
    name = captions.short_metric(grid.metric)
    what = name if grid.phase == QUALITY else f"{name} of the {grid.phase}"
    alone = f", {kind.heading(families[0][0])}" if len(families) == 1 else ""
    cases = [case for family in families for case in family]
    figure.finish(
        style.titled(grid, f"{alone}: {what} against the {kind.name}"), style.origin(grid, cases), notes
    )
    return figure


def share_grids(run: Run, operator: str) -> list[Grid]:
    """The effective population as a percentage of all members, as the tables have it, for :func:`sweep`."""
    qualities = Qualities(run)
    rows = tuple(share for row in run.rows if (share := _share(row, qualities)))
    return quality_grids(msgspec.structs.replace(run, rows=rows), operator, SHARE, LINEAR)


def _share(row: Row, qualities: Qualities) -> Row | None:
    if isinstance(row, Skipped):
        return row if row.phase in {None, QUALITY} else None
    if (row.phase, row.metric, row.method) != (QUALITY, EFFECTIVE, LINEAR):
        return None
    found = qualities.law(row.variant, row.case).effective
    if not isinstance(found, EffectiveSize) or found.is_exact:
        return None
    return msgspec.structs.replace(row, metric=SHARE, samples=((100 * found.value / row.case.members,),))


def _families(grid: Grid, kind: Sweep) -> list[list[Case]]:
    families: dict[Case, list[Case]] = {}
    for case in grid.cases:
        if (rest := kind.rest(case)) is not None:
            families.setdefault(rest, []).append(case)
    return [sorted(family, key=kind.value) for family in families.values() if len(family) >= _FEWEST]


def _lines(grid: Grid, kind: Sweep, family: Sequence[Case]) -> list[_Line]:
    size = quantity(grid.metric).column.size
    found = []
    for variant in grid.variants:
        rows = [(kind.value(case), grid.at(variant, case)) for case in family]
        points = tuple(
            (x, value / size)
            for x, row in rows
            if isinstance(row, Measurement) and (value := median(row)) and drawable(value)
        )
        last, longest = (points[-1][0], 28) if points else (0, 60)
        reasons = [style.reason_of(row, longest) for x, row in rows if isinstance(row, Skipped) and x > last]
        # A plain layer has no noise, so that its missing quality needs no reason.
        if points or (reasons and (grid.phase != QUALITY or variant.mode == "batched")):
            found.append(_Line(variant, points, reasons[0] if reasons else ""))
    return found


def _bounds(grid: Grid, kind: Sweep, family: Sequence[Case]) -> list[tuple[float, float]]:
    """The least time of the plain layer's work at the measured peaks of the device."""
    if not grid.metric.endswith(TIMES):
        return []
    size = quantity(grid.metric).column.size
    found = [(case, roofline.bound_ns(grid.run, case.dtype, grid.base_work(case))) for case in family]
    return [(kind.value(case), least / size) for case, least in found if least and drawable(least)]


def _panels(lines: Sequence[_Line], title: str, bound: Sequence[tuple[float, float]]) -> list[_Panel]:
    """Spread lines over panels: variants of a scheme stay together, the plain layer is in every panel."""
    base = [line for line in lines if line.points and line.variant.mode == "base"]
    rest = [line for line in lines if line.points and line.variant.mode != "base"]
    schemes: dict[str, list[_Line]] = {}
    for line in rest:
        schemes.setdefault("" if line.variant.baseline else line.variant.scheme, []).append(line)
    groups: list[list[_Line]] = [[]]
    for scheme in schemes.values():
        count = math.ceil(len(scheme) / _LINES)
        edges = [len(scheme) * place // count for place in range(count + 1)]
        for start, end in pairwise(edges):
            if len(groups[-1]) + end - start > _LINES:
                groups.append([])
            groups[-1] += scheme[start:end]
    return [
        _Panel(title, [*base, *group], [line for line in rest if line not in group], bound)
        for group in groups
    ]


def _draw(axes: Axes, panel: _Panel) -> list[Artist]:
    """Draw the lines of a panel; return what its legend names."""
    for line in panel.others:
        axes.plot(*_coordinates(line.points), color=style.BACKGROUND, linewidth=0.6, zorder=1.5)
    handles: list[Artist] = []
    if panel.bound:
        handles += axes.plot(
            *_coordinates(panel.bound), color=style.GREY, linewidth=3.5, alpha=0.45, zorder=1.6, label=BOUND
        )
    plain = [line for line in panel.own if line.variant.mode == "base"]
    styles = [*(Look(BLACK, "", "-") for _ in plain), *style.looks(len(panel.own) - len(plain))]
    for line, look in zip(panel.own, styles, strict=True):
        handles += axes.plot(
            *_coordinates(line.points),
            color=look.color,
            linestyle=look.line,
            marker=look.marker or ("" if len(line.points) > 1 else "."),
            label=line.name,
        )
        if line.reason:
            axes.plot(
                *line.points[-1],
                marker="x",
                markersize=7,
                markeredgewidth=1,
                color=BLACK,
                zorder=4,
                clip_on=False,
            )
    return handles


def _scale(axes: Axes, xs: Sequence[int], ys: Sequence[float], inches: float) -> None:
    style.log_axis(axes, "y", ys)
    axes.set_xscale("log", base=2)
    axes.set_xlim(xs[0] / 1.3, xs[-1] * 1.3)
    every = math.ceil(len(xs) / max(2, int(inches / 0.4)))
    ticks = xs[(len(xs) - 1) % every :: every]  # the largest among them
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.xaxis.set_minor_locator(FixedLocator(xs))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _coordinates(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _ends(lines: Sequence[_Line]) -> list[str]:
    """Why lines end early: the reason alone where all share it; and which variants have no number at all."""
    ended = {line.variant.name: line.reason for line in lines if line.points and line.reason}
    text = f"{CROSS}: no number for a larger case"
    if len(set(ended.values())) == 1:
        notes = [f"{text}, {next(iter(ended.values()))}"]
    else:
        notes = style.by_reason(ended, text)
    return notes + style.by_reason({line.variant.name: line.reason for line in lines if not line.points})
