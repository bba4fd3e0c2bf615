"""The picture of what rules find: how often each flags a slowdown, against how large it is."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from esbench.report.drawing import LINES, MARKS, WIDTH, Look, shades, styled
from esbench.report.gate_findings import Findings, Resampled
from esbench.report.goals import percent
from esbench.report.words import label

OURS = "esbench gate"
_PANEL_INCHES = 3.6
_LINEAR = 1.0
"""Up to so many percent the axis is linear, behind it logarithmic: what is hard to find has room."""


class Curve(NamedTuple):
    """A rule: the share of comparisons that it flags at each slowdown, and of unchanged suites."""

    name: str
    flagged: dict[float, float]
    alarmed: float


def curves(found: Findings) -> list[Curve]:
    """Return our rule first, then the others."""
    others = [Curve(one.rule, dict(one.flagged), one.alarmed / one.suites) for one in found.records]
    return [*([_ours(found.resampled)] if found.resampled else []), *others]


def power(every: Sequence[Findings]) -> Figure | None:
    """Draw a panel for each study that has a cell; ``None`` where none has."""
    panels = [(found, curves(found)) for found in every if found.records]
    if not panels:
        return None
    with styled():
        figure = Figure(figsize=(WIDTH, 0.5 + _PANEL_INCHES * len(panels)), layout="constrained")
        rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (found, drawn) in zip(rows, panels, strict=True):
            opening = found.study.opening
            title = f"{opening.environment.device_name}, study {opening.gate_id}"
            axes.set_title(label(title), fontsize="medium")
            _draw(axes, drawn)
        figure.suptitle(
            "How often a rule flags a cell that is slower, against by how much", fontsize="medium"
        )
    return figure


def _ours(resampled: Resampled) -> Curve:
    alarms = resampled.alarms
    flagged = {0.0: alarms.failed / alarms.comparisons}
    flagged |= {one.slower: one.share for one in resampled.shifted}
    return Curve(OURS, flagged, alarms.rate)


def _draw(axes: Axes, drawn: Sequence[Curve]) -> None:
    others = iter(_looks(sum(curve.name != OURS for curve in drawn)))
    for curve in drawn:
        ours = curve.name == OURS
        look = Look((0.0, 0.0, 0.0, 1.0), MARKS[0], LINES[0]) if ours else next(others)
        axes.plot(
            [100 * slower for slower in curve.flagged],
            [100 * share for share in curve.flagged.values()],
            color=look.color,
            marker=look.mark,
            linestyle=look.line,
            linewidth=2.5 if ours else 1.2,
            markersize=7 if ours else 5,
            zorder=3 if ours else 2,
            clip_on=False,
            label=f"{curve.name}\n({percent(curve.alarmed)} of unchanged suites)",
        )
    axes.set_xscale("symlog", linthresh=_LINEAR)
    slowdowns = sorted({100 * slower for curve in drawn for slower in curve.flagged})
    axes.set_xticks(slowdowns, [f"{slower:g}" for slower in slowdowns])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0, slowdowns[-1])
    axes.set_ylim(0, 100)
    axes.set_xlabel("slower by (%); 0: false alarms")
    axes.set_ylabel("flagged (% of comparisons)")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small", handlelength=3)


def _looks(count: int) -> list[Look]:
    return [
        Look(shade, MARKS[1 + place % (len(MARKS) - 1)], LINES[1 + place % (len(LINES) - 1)])
        for place, shade in enumerate(shades(count))
    ]
