"""The pictures of a history: a panel for each case, a line for each variant, a ring at each change point."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from esbench.report import captions
from esbench.report.drawing import PAGE, Look, Paper, looks, plain_ticks, styled
from esbench.report.history import MULTIPLIER, History, Key, Series, measured_in
from esbench.report.history_tables import moment, percentage, source
from esbench.report.lettering import fit, printable
from esbench.report.sheets import Sheet
from esbench.units import quantity

_LINES = 6
"""More lines are no longer told apart."""
_INCHES = 1.4
_SIDES = 0.4
_LONGEST = 10
"""Characters of a commit that is none."""
_TICK_INCHES = 0.5
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


def timeline(found: History, shown: Sequence[Panel], paper: Paper = PAGE, notes: Sequence[str] = ()) -> Sheet:
    """The figures of variants over the runs, in at least one panel.

    Runs stand side by side, whatever time lies between them, and a line is broken where a run has no figure
    of its variant.
    """
    several = len({(panel.key.method, panel.key.against) for panel in shown}) > 1
    with styled(paper):
        sheet = Sheet(paper)
        columns = min(len(shown), 2 if paper is PAGE else 1)
        width = sheet.room / columns - _SIDES
        body = 0.0
        every = sheet.panels(len(shown), columns)
        for place, (axes, panel) in enumerate(zip(every, shown, strict=True)):
            handles = _draw(axes, found, panel, width)
            title = _heading(panel) + (f" {_apart(panel)}" if several else "")
            axes.set_title(fit(title, width, paper.small))
            sheet.key_below(axes, handles, width)
            if place % columns == 0:
                lines = max(len(one.series) for one in shown[place : place + columns])
                body += _INCHES + sheet.key_inches(lines) + sheet.title_inches + 0.1
        ring = "a change point, the first run of a new level, and how far it is from the one before"
        sheet.finish(
            body,
            _title(found, shown),
            _origin(found, shown),
            notes,
            handles=[_ring([], [], ring)] if any(panel.changes for panel in shown) else [],
        )
    return sheet


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
    return f"{panel.key.case.label}{part}"


def _apart(panel: Panel) -> str:
    return f"({', '.join(filter(None, [panel.key.method, panel.key.against]))})"


def _origin(found: History, shown: Sequence[Panel]) -> str:
    dtypes = " and ".join(dict.fromkeys(panel.key.case.dtype for panel in shown))
    methods = " and ".join(dict.fromkeys(panel.key.method for panel in shown))
    drawn = measured_in([one for panel in shown for one in found.panels[panel.key]])
    return f"{source(found, drawn)}, {dtypes}, method {methods}"


def _draw(axes: Axes, found: History, panel: Panel, width: float) -> list[Line2D]:
    runs = measured_in(list(found.panels[panel.key]))
    places = {run: place for place, run in enumerate(runs)}
    size = 1.0 if found.metric == MULTIPLIER else quantity(found.metric).column.size
    _scale(axes, [point.value / size for one in panel.series for point in one.points])
    pairs = zip(panel.series, looks(len(panel.series)), strict=True)
    handles = [_line(axes, one, look, places, size) for one, look in pairs]
    _mark(axes, panel, places, size)
    every = math.ceil(len(runs) / min(_TICKS, max(2, int(width / _TICK_INCHES))))
    ticked = range((len(runs) - 1) % every, len(runs), every)  # the newest run has its tick
    axes.set_xticks(list(ticked), [_under(moment(found.runs[runs[place]], "\n")) for place in ticked])
    axes.set_xlim(-0.3, max(len(runs) - 0.7, 0.7))
    axes.tick_params(axis="x", labelsize="x-small", length=0)
    axes.set_ylabel("multiplier" if found.metric == MULTIPLIER else quantity(found.metric).column.symbol)
    return handles


def _under(words: str) -> str:
    """A date with its commit below it."""
    return "\n".join(printable(line)[:_LONGEST] for line in words.split("\n"))


def _line(axes: Axes, one: Series, look: Look, places: dict[int, int], size: float) -> Line2D:
    """Draw a series with the intervals of its figures; return what names it in a key."""
    figures = {places[point.run]: point.value / size for point in one.points}
    (drawn,) = axes.plot(
        range(len(places)),
        [figures.get(place, math.nan) for place in range(len(places))],
        color=look.color,
        marker=look.mark,
        linestyle=look.line,
        label=one.variant.name,
    )
    for point in one.points:
        if point.low and point.high:
            axes.vlines(
                places[point.run], point.low / size, point.high / size, color=look.color, linewidth=0.8
            )
    return drawn


def _scale(axes: Axes, values: Sequence[float]) -> None:
    axes.set_yscale("log")
    low, high = math.log(min(values)), math.log(max(values))
    room = max(_MARGIN, 0.12 * (high - low))
    axes.set_ylim(math.exp(max(low - room, -_LARGEST)), math.exp(min(high + room, _LARGEST)))
    if high - low > _DECADE:
        plain_ticks(axes.yaxis, _INCHES)
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
                (0, 5),
                textcoords="offset points",
                fontsize="small",
                horizontalalignment="center",
            )


def _ring(xs: Sequence[float], ys: Sequence[float], words: str = "") -> Line2D:
    return Line2D(
        xs, ys, linestyle="none", marker="o", markersize=8, fillstyle="none", color="black", label=words
    )
