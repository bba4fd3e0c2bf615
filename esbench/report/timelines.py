"""The pictures of a history: a panel for each case, a line for each variant, a ring at each change point."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from esbench.report import captions
from esbench.report.drawing import LINES, MARKS, WIDTH, Look, head, plain_ticks, shades, styled
from esbench.report.history import MULTIPLIER, History, Key, Series, measured_in
from esbench.report.history_tables import moment, percentage, source
from esbench.report.labels import LABEL_INCHES, Named, name_points
from esbench.report.words import label
from esbench.units import quantity

_LINES = 6
"""More lines are no longer told apart."""
_INCHES = 1.9
_TICKS = 7
"""Dates and commits that have room side by side."""
_MARGIN = 0.02
_DECADE = math.log(3)
"""Above this logarithm of the largest figure over the smallest ticks stand at 1, 2 and 5."""
_LARGEST = 700.0
"""A logarithm that a float has room for."""


@dataclass(frozen=True)
class Panel:
    """The lines of one panel, and which of how many panels of its case it is."""

    key: Key
    series: tuple[Series, ...]
    number: int
    of: int

    @property
    def changes(self) -> int:
        """How many change points it shows."""
        return sum(len(one.steps) for one in self.series)


def panels(found: History) -> list[Panel]:
    """The panels of a history: variants of like figures share one, so that its axis is short.

    What only one run has is no line, and stands in the table.
    """
    lines = {key: [one for one in series if len(one.points) > 1] for key, series in found.panels.items()}
    return [panel for key, series in lines.items() for panel in _split(key, series)]


def most_telling(every: Sequence[Panel], most: int) -> list[Panel]:
    """So many panels at most, in their order: those with change points go first."""
    chosen = sorted(range(len(every)), key=lambda place: (not every[place].changes, place))[:most]
    return [every[place] for place in sorted(chosen)]


def timeline(found: History, shown: Sequence[Panel]) -> Figure:
    """The figures of variants over the runs, in at least one panel.

    Runs stand side by side, whatever time lies between them, and a line is broken where a run has no figure
    of its variant.
    """
    several = len({(panel.key.method, panel.key.against) for panel in shown}) > 1
    with styled():
        figure = Figure(figsize=(WIDTH, 1.0 + (_INCHES + 0.75) * len(shown)), layout="constrained")
        rows = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
        for axes, panel in zip(rows, shown, strict=True):
            _draw(axes, found, panel)
            axes.set_title(
                label(_heading(panel)) + (f" {_apart(panel)}" if several else ""), fontsize="medium"
            )
        if any(panel.changes for panel in shown):
            ring = "change point: the first run of a new level, and how far it is from the one before"
            figure.legend(handles=[_ring([], [], ring)], loc="outside lower center", ncols=1)
        head(figure, [_title(found, shown), source(found)])
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


def _heading(panel: Panel) -> str:
    part = f", part {panel.number} of {panel.of}" if panel.of > 1 else ""
    return f"{label(panel.key.case.label)}{part}"


def _apart(panel: Panel) -> str:
    return f"({', '.join(filter(None, [panel.key.method, panel.key.against]))})"


def _draw(axes: Axes, found: History, panel: Panel) -> None:
    runs = measured_in(list(found.panels[panel.key]))
    places = {run: place for place, run in enumerate(runs)}
    size = 1.0 if found.metric == MULTIPLIER else quantity(found.metric).column.size
    _scale(axes, [point.value / size for one in panel.series for point in one.points])
    named = []
    for one, look in zip(panel.series, _looks(len(panel.series)), strict=True):
        named.append(Named(label(one.name), _line(axes, one, look, places, size), look.color))
    _mark(axes, panel, places, size)
    name_points(axes, named, max(_INCHES, LABEL_INCHES * len(named)))
    every = math.ceil(len(runs) / _TICKS)
    ticked = range((len(runs) - 1) % every, len(runs), every)  # the newest run has its tick
    axes.set_xticks(list(ticked), [_under(moment(found.runs[runs[place]], "\n")) for place in ticked])
    axes.set_xlim(-0.3, max(len(runs) - 0.7, 0.7))
    axes.tick_params(axis="x", labelsize="x-small")
    axes.set_ylabel("multiplier" if found.metric == MULTIPLIER else quantity(found.metric).column.symbol)


def _under(words: str) -> str:
    """A date with its commit below it."""
    return "\n".join(map(label, words.split("\n")))


def _looks(count: int) -> list[Look]:
    return [Look(shade, MARKS[place], LINES[place % len(LINES)]) for place, shade in enumerate(shades(count))]


def _line(axes: Axes, one: Series, look: Look, places: dict[int, int], size: float) -> tuple[float, float]:
    """Draw a series with the intervals of its figures; return its last point."""
    figures = {places[point.run]: point.value / size for point in one.points}
    axes.plot(
        range(len(places)),
        [figures.get(place, math.nan) for place in range(len(places))],
        color=look.color,
        marker=look.mark,
        linestyle=look.line,
        markersize=4,
        linewidth=1.2,
    )
    for point in one.points:
        if point.low and point.high:
            axes.vlines(
                places[point.run], point.low / size, point.high / size, color=look.color, linewidth=0.8
            )
    return max(figures.items())


def _scale(axes: Axes, values: Sequence[float]) -> None:
    axes.set_yscale("log")
    low, high = math.log(min(values)), math.log(max(values))
    room = max(_MARGIN, 0.12 * (high - low))
    axes.set_ylim(math.exp(max(low - room, -_LARGEST)), math.exp(min(high + room, _LARGEST)))
    if high - low > _DECADE:
        plain_ticks(axes.yaxis)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()


def _mark(axes: Axes, panel: Panel, places: dict[int, int], size: float) -> None:
    for one in panel.series:
        for step in one.steps:
            point = one.points[step.place]
            at = places[point.run], point.value / size
            axes.add_line(_ring([at[0]], [at[1]]))
            axes.annotate(
                percentage(step.before, step.after),
                at,
                (0, 8),
                textcoords="offset points",
                fontsize="x-small",
                horizontalalignment="center",
            )


def _ring(xs: Sequence[float], ys: Sequence[float], words: str = "") -> Line2D:
    return Line2D(
        xs, ys, linestyle="none", marker="o", markersize=11, fillstyle="none", color="black", label=words
    )
