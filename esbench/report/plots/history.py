"""The runs of a device over time: a panel per case, a line per variant, a ring at each change point."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from esbench.report import captions
from esbench.report.analysis.history import (
    MULTIPLIER,
    History,
    Key,
    Series,
    measured_in,
    moment,
    percentage,
    source,
)
from esbench.report.plots import style
from esbench.report.plots.style import BLACK, PAGE, Figure, Look
from esbench.units import quantity

_LINES = 6
"""More lines in a panel cannot be distinguished."""
_PANELS = 24
_RING = Look(BLACK, "o", "-", filled=False)


@dataclass(frozen=True)
class Panel:
    """The lines of one panel, and which of the panels of its case it is."""

    key: Key
    series: tuple[Series, ...]
    number: int
    of: int

    @property
    def changes(self) -> int:
        """How many change points it shows."""
        return sum(len(one.change_points) for one in self.series)


def panels(found: History, fewest: int = 2) -> list[Panel]:
    """Return panels of cases that at least ``fewest`` runs hold; similar variants share a panel.

    A series of a single run is no line.
    """
    return [
        panel
        for key, every in found.panels.items()
        if len(measured_in(every)) >= fewest
        for panel in _split(key, [one for one in every if len(one.points) > 1])
    ]


@style.styled()
def history(found: History, every: Sequence[Panel], width: float = PAGE) -> Figure:
    """Draw the figures of variants over the runs, which are evenly spaced.

    A line is broken where a run has no figure of its variant. Of too many panels, those with change points
    are preferred.
    """
    telling = sorted(every, key=lambda panel: not panel.changes)[:_PANELS]
    shown = [panel for panel in every if panel in telling]
    several = len({(panel.key.method, panel.key.against) for panel in shown}) > 1
    figure = Figure(width)
    for axes, panel in zip(figure.panels(len(shown), 2 if width == PAGE else 1, 1.4), shown, strict=True):
        handles = _draw(axes, found, panel, figure.panel_width)
        part = f", part {panel.number} of {panel.of}" if panel.of > 1 else ""
        apart = f" ({', '.join(filter(None, panel.key[1:]))})" if several else ""
        figure.panel_title(axes, f"{panel.key.case.label}{part}{apart}")
        figure.panel_legend(axes, handles)
    ring = "change point: the first run of a new level, and its change from the level before"
    figure.finish(
        _title(found, shown),
        _origin(found, shown),
        style.part_of(shown, every, "panels, those with change points first"),
        [style.legend_point(_RING, ring, 8)] if any(panel.changes for panel in shown) else [],
    )
    return figure


def _split(key: Key, series: Sequence[Series]) -> Iterator[Panel]:
    ordered = sorted(series, key=lambda one: -one.points[-1].value)
    count = math.ceil(len(ordered) / _LINES)
    for number in range(count):
        begin, end = (len(ordered) * place // count for place in (number, number + 1))
        yield Panel(key, tuple(ordered[begin:end]), number + 1, count)


def _title(found: History, shown: Sequence[Panel]) -> str:
    operators = " and ".join(dict.fromkeys(panel.key.case.operator for panel in shown))
    if found.metric == MULTIPLIER:
        against = " or ".join(dict.fromkeys(panel.key.against for panel in shown))
        return f"{operators}, {found.phase}: time(variant) / time({against}) over the runs, lower is better"
    return f"{operators}, {found.phase}: {captions.short_metric(found.metric)} over the runs"


def _origin(found: History, shown: Sequence[Panel]) -> str:
    dtypes = " and ".join(dict.fromkeys(panel.key.case.dtype for panel in shown))
    methods = " and ".join(dict.fromkeys(panel.key.method for panel in shown))
    timed = "" if methods == "host" else f", method {methods}"
    runs = measured_in([one for panel in shown for one in found.panels[panel.key]])
    return f"{source(found, runs)}, {dtypes}{timed}"


def _draw(axes: Axes, found: History, panel: Panel, inches: float) -> list[Line2D]:
    runs = measured_in(found.panels[panel.key])
    places = {run: place for place, run in enumerate(runs)}
    column = quantity(found.metric).column
    size, symbol = (1.0, "multiplier") if found.metric == MULTIPLIER else (column.size, column.symbol)
    values = [
        value for one in panel.series for point in one.points if style.drawable(value := point.value / size)
    ]
    if values:
        style.log_axis(axes, "y", values, 1.02)
    handles = [
        _draw_line(axes, one, look, places, size)
        for one, look in zip(panel.series, style.looks(len(panel.series)), strict=True)
    ]
    every = math.ceil(len(runs) / min(7, max(2, int(inches / 0.5))))
    ticked = range((len(runs) - 1) % every, len(runs), every)  # the newest run among them
    dates = [moment(found.runs[runs[place]], "\n").split("\n") for place in ticked]
    axes.set_xticks(
        list(ticked), ["\n".join(style.printable(line)[:10] for line in lines) for lines in dates]
    )
    axes.set_xlim(-0.3, len(runs) - 0.7)
    axes.tick_params(axis="x", labelsize="x-small", length=0)
    axes.set_ylabel(symbol)
    return handles


def _draw_line(axes: Axes, one: Series, look: Look, places: Mapping[int, int], size: float) -> Line2D:
    """Draw a series with its intervals and change points; return its legend entry."""
    points = {places[point.run]: point for point in one.points}
    (line,) = axes.plot(
        range(len(places)),
        [points[place].value / size if place in points else math.nan for place in range(len(places))],
        color=look.color,
        marker=look.marker,
        linestyle=look.line,
        label=one.variant.name,
    )
    for place, point in points.items():
        if point.low and point.high:
            axes.vlines(place, point.low / size, point.high / size, color=look.color, linewidth=0.8)
    for step in one.change_points:
        point = one.points[step.place]
        at = places[point.run], point.value / size
        axes.plot(*at, **_RING.point | {"markersize": 8, "fillstyle": "none"})
        axes.annotate(
            percentage(step.before, step.after),
            at,
            (0, 5),
            textcoords="offset points",
            fontsize="small",
            horizontalalignment="center",
        )
    return line
