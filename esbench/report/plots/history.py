"""The runs of a device over time: a panel per case, a line per variant, a ring at each change point."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from esbench.report.analysis.history import (
    History,
    Key,
    Series,
    measured_in,
    moment,
    percentage,
    source,
)
from esbench.report.plots import style
from esbench.report.plots.style import PAGE, Figure, Look
from esbench.schema import Run

_MAX_LINES, _MAX_PANELS = 6, 24
"""More lines in a panel cannot be distinguished; more panels are left out."""


class Panel(NamedTuple):
    """The lines of a panel: variants with similar values on the same case, by the same method."""

    key: Key
    series: Sequence[Series]

    @property
    def has_changes(self) -> bool:
        """Whether a line has a change point."""
        return any(series.change_points for series in self.series)


def panels(history: History, fewest: int = 2) -> list[Panel]:
    """Return the panels of all cases that at least ``fewest`` runs measured.

    A series of a single run is left out. A case with many series has several panels, sorted by newest value.
    """
    all_panels = []
    for key, all_series in history.panels.items():
        if len(measured_in(all_series)) < fewest:
            continue
        lines = [series for series in all_series if len(series.points) > 1]
        lines.sort(key=lambda series: -series.points[-1].value)
        count = math.ceil(len(lines) / _MAX_LINES)
        # Split the lines into ``count`` parts of about the same size.
        bounds = [len(lines) * index // max(1, count) for index in range(count + 1)]
        all_panels += [Panel(key, lines[start:end]) for start, end in pairwise(bounds)]
    return all_panels


@style.use_style()
def history(past: History, all_panels: Sequence[Panel], width: float = PAGE) -> Figure:
    """Draw the values of variants over the runs, which are evenly spaced.

    A line is broken where a run lacks the variant. If there are too many panels, those with change points are
    drawn.
    """
    preferred = sorted(all_panels, key=lambda panel: not panel.has_changes)[:_MAX_PANELS]
    shown = [panel for panel in all_panels if panel in preferred]  # in their first order
    needs_key = len({(panel.key.method, panel.key.against) for panel in shown}) > 1
    figure = Figure(width)
    for axes, panel in zip(figure.panels(len(shown), 2 if width == PAGE else 1, 1.9), shown, strict=True):
        _draw(axes, past, panel, figure.panel_width)
        key = f" ({', '.join(filter(None, panel.key[1:]))})" if needs_key else ""
        axes.set_title(style.fit(f"{panel.key.case.label}{key}", figure.panel_width, style.LABEL))
    ring = "change point: the first run of a new level, and its change from the level before"
    figure.finish(
        _title(past, shown),
        _origin(past, shown),
        style.note_if_incomplete(shown, all_panels, "panels, those with change points first"),
        [Line2D([], [], **style.RING, label=ring)] if any(panel.has_changes for panel in shown) else [],
    )
    return figure


def _title(past: History, shown: Sequence[Panel]) -> str:
    operators = " and ".join(dict.fromkeys(panel.key.case.operator for panel in shown))
    against = " or ".join(dict.fromkeys(panel.key.against for panel in shown))
    return f"{operators}, {past.phase}: time(variant) / time({against}) over the runs, lower is better"


def _origin(past: History, shown: Sequence[Panel]) -> str:
    dtypes = " and ".join(dict.fromkeys(panel.key.case.dtype for panel in shown))
    methods = " and ".join(dict.fromkeys(panel.key.method for panel in shown))
    timed = "" if methods == "host" else f", method {methods}"
    runs = measured_in([series for panel in shown for series in past.panels[panel.key]])
    return f"{source(past, runs)}, {dtypes}{timed}"


def _draw(axes: Axes, past: History, panel: Panel, inches: float) -> None:
    runs = measured_in(past.panels[panel.key])
    indices = {run: index for index, run in enumerate(runs)}
    values = [point.value for series in panel.series for point in series.points]
    style.log_axis(axes, "y", filter(style.is_drawable, values), 1.02)
    looks = style.looks(series.variant.name for series in panel.series)
    for series in panel.series:
        _draw_line(axes, series, looks[series.variant.name], indices)
    names = [(series.points[-1].value, series.variant.name) for series in panel.series]
    style.label_ends(axes, [style.Label(len(runs) - 1, y, name) for y, name in names], 0.4 * inches)
    most_dates = max(2, int(inches / 0.8))
    step = math.ceil(len(runs) / most_dates)
    first = (len(runs) - 1) % step  # so that the newest run has a tick
    ticked = range(first, len(runs), step)
    axes.set_xticks(ticked, [_date(past.runs[runs[index]]) for index in ticked])
    axes.set_xlim(-0.3, len(runs) - 0.7)
    axes.tick_params(axis="x", labelsize="x-small", length=0)
    axes.set_ylabel("multiplier")


def _date(run: Run) -> str:
    """Return the date and commit of a run on two lines of at most ten characters."""
    return "\n".join(style.printable(line)[:10] for line in moment(run, "\n").split("\n"))


def _draw_line(axes: Axes, series: Series, look: Look, indices: Mapping[int, int]) -> None:
    """Draw a series with its intervals and change points; ``indices`` maps runs to positions."""
    points = {indices[point.run]: point for point in series.points}
    axes.plot(
        range(len(indices)),
        [points[index].value if index in points else math.nan for index in range(len(indices))],
        color=look.color,
        marker=look.marker,
        linestyle=look.line,
        label=series.variant.name,
    )
    for index, point in points.items():
        if point.low and point.high:
            axes.vlines(index, point.low, point.high, color=look.color, linewidth=0.8)
    for change in series.change_points:
        point = series.points[change.position]
        at = indices[point.run], point.value
        axes.plot(*at, **style.RING)
        axes.annotate(
            percentage(change.before, change.after),
            at,
            (0, 5),
            textcoords="offset points",
            fontsize="small",
            horizontalalignment="center",
        )
