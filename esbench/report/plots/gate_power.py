"""The power of the gate: how often each decision rule flags a slowdown, against its size."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from esbench.report.gate_findings import Findings
from esbench.report.goals import percent
from esbench.report.plots import style
from esbench.report.plots.style import BLACK, PAGE, Figure

OURS = "esbench gate"


class Curve(NamedTuple):
    """The share of comparisons that a rule flags at each slowdown, and of unchanged suites."""

    name: str
    flagged: dict[float, float]
    false_alarms: float


def curves(found: Findings) -> list[Curve]:
    """The gate's own rule, then the others."""
    every = [Curve(one.rule, dict(one.flagged), one.alarmed / one.suites) for one in found.records]
    if not found.resampled:
        return every
    alarms = found.resampled.alarms
    flagged = {0.0: alarms.failed / alarms.comparisons}
    flagged |= {one.slower: one.share for one in found.resampled.shifted}
    return [Curve(OURS, flagged, alarms.rate), *every]


@style.styled()
def gate_power(every: Sequence[Findings], width: float = PAGE) -> Figure | None:
    """Draw a panel per study that has a cell; ``None`` where none has."""
    shown = [found for found in every if found.records]
    if not shown:
        return None
    figure = Figure(width)
    for axes, found in zip(figure.panels(len(shown), 1, 2.2), shown, strict=True):
        opening = found.study.opening
        figure.panel_title(axes, f"{opening.environment.device_name}, study {opening.gate_id}")
        figure.panel_legend(axes, _draw(axes, curves(found)))
    figure.finish(
        "How often a rule flags a slowdown, against its size",
        ", ".join(dict.fromkeys(map(_origin, shown))),
        ["In brackets: the share of unchanged suites in which a rule flags anything"],
    )
    return figure


def _origin(found: Findings) -> str:
    opening = found.study.opening
    commits = " and ".join(sorted({one.commit[:7] for one in opening.revisions.values()})) or "unknown"
    return f"{style.device(opening.environment)}, commit {commits}, study {opening.gate_id}"


def _draw(axes: Axes, found: Sequence[Curve]) -> list[Line2D]:
    handles = []
    for curve, look in zip(found, style.looks(len(found)), strict=True):
        ours = curve.name == OURS
        handles += axes.plot(
            [100 * slower for slower in curve.flagged],
            [100 * share for share in curve.flagged.values()],
            color=BLACK if ours else look.color,
            marker=look.marker,
            linestyle=look.line,
            linewidth=1.8 if ours else 1.0,
            markersize=4.5 if ours else 3.2,
            zorder=3 if ours else 2,
            clip_on=False,
            label=f"{curve.name} ({percent(curve.false_alarms)})",
        )
    axes.set_xscale("symlog", linthresh=1.0)  # small slowdowns are hard to find, and have room
    slowdowns = sorted({100 * slower for curve in found for slower in curve.flagged})
    axes.set_xticks(slowdowns, [f"{slower:g}" for slower in slowdowns])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlim=(0, slowdowns[-1]), ylim=(0, 100))
    axes.set(xlabel="slowdown (%); at 0: false alarms", ylabel="flagged (% of comparisons)")
    return handles
