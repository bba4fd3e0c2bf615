"""The picture of what rules find: how often each flags a slowdown, against how large it is."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from esbench.report.drawing import LINES, MARKS, PAGE, Look, Paper, shades, styled
from esbench.report.gate_findings import Findings, Resampled
from esbench.report.goals import percent
from esbench.report.lettering import fit
from esbench.report.sheets import Sheet, device

OURS = "esbench gate"
_PANEL_INCHES = 2.2
_SIDES = 0.5
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


def power(every: Sequence[Findings], paper: Paper = PAGE) -> Sheet | None:
    """Draw a panel for each study that has a cell; ``None`` where none has."""
    panels = [(found, curves(found)) for found in every if found.records]
    if not panels:
        return None
    with styled(paper):
        sheet = Sheet(paper)
        room = sheet.room - _SIDES
        for axes, (found, drawn) in zip(sheet.panels(len(panels), 1), panels, strict=True):
            opening = found.study.opening
            title = f"{opening.environment.device_name}, study {opening.gate_id}"
            axes.set_title(fit(title, room, paper.small))
            sheet.key_below(axes, _draw(axes, drawn), room)
        rows = (_PANEL_INCHES + sheet.title_inches + sheet.key_inches(len(drawn)) for _, drawn in panels)
        sheet.finish(
            sum(rows),
            "How often a rule flags a cell that is slower, against by how much",
            ", ".join(dict.fromkeys(_taken(found) for found, _ in panels)),
            ["In brackets: how often a rule flags anything in a suite in which nothing changed"],
        )
    return sheet


def _taken(found: Findings) -> str:
    here, commits = found.study.opening.environment, found.study.opening.revisions.values()
    names = " and ".join(sorted({one.commit[:7] for one in commits})) or "unknown"
    return f"{device(here)}, commit {names}, study {found.study.opening.gate_id}"


def _ours(resampled: Resampled) -> Curve:
    alarms = resampled.alarms
    flagged = {0.0: alarms.failed / alarms.comparisons}
    flagged |= {one.slower: one.share for one in resampled.shifted}
    return Curve(OURS, flagged, alarms.rate)


def _draw(axes: Axes, drawn: Sequence[Curve]) -> list[Line2D]:
    others = iter(_looks(sum(curve.name != OURS for curve in drawn)))
    handles = []
    for curve in drawn:
        ours = curve.name == OURS
        look = Look((0.0, 0.0, 0.0, 1.0), MARKS[0], LINES[0]) if ours else next(others)
        (line,) = axes.plot(
            [100 * slower for slower in curve.flagged],
            [100 * share for share in curve.flagged.values()],
            color=look.color,
            marker=look.mark,
            linestyle=look.line,
            linewidth=1.8 if ours else 1.0,
            markersize=4.5 if ours else 3.2,
            zorder=3 if ours else 2,
            clip_on=False,
            label=f"{curve.name} ({percent(curve.alarmed)})",
        )
        handles.append(line)
    axes.set_xscale("symlog", linthresh=_LINEAR)
    slowdowns = sorted({100 * slower for curve in drawn for slower in curve.flagged})
    axes.set_xticks(slowdowns, [f"{slower:g}" for slower in slowdowns])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0, slowdowns[-1])
    axes.set_ylim(0, 100)
    axes.set_xlabel("slower by (%); 0: false alarms")
    axes.set_ylabel("flagged (% of comparisons)")
    return handles


def _looks(count: int) -> list[Look]:
    return [
        Look(shade, MARKS[1 + place % (len(MARKS) - 1)], LINES[1 + place % (len(LINES) - 1)])
        for place, shade in enumerate(shades(count))
    ]
