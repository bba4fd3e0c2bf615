"""Parallel efficiency over ranks, and the time of communication on GPUs by the model."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from esbench.report.plots import style
from esbench.report.plots.style import PAGE, Figure


@style.use_style()
def scaling(
    efficiencies: Mapping[str, Sequence[tuple[int, float, float | None]]],
    model: Mapping[str, Sequence[tuple[int, float]]],
    processors: tuple[int, str],
    title: str,
    origin: str,
) -> Figure:
    """Draw the efficiency of strong and weak scaling, and beside it the model.

    Args:
        efficiencies: kind -> (ranks, efficiency in %, half of its 95 % interval if known).
        model: network -> (GPUs, milliseconds of communication a step).
        processors: the number of CPUs or GPUs, and "CPUs" or "GPUs"; more ranks share them.
        title: the finding.
        origin: where the numbers come from.
    """
    figure = Figure(PAGE)
    measured, modelled = figure.panels(2, 2, 2.6)
    count, name = processors
    looks = style.looks([*efficiencies, *model])
    counts = sorted({ranks for rows in efficiencies.values() for ranks, _, _ in rows})
    for kind, rows in efficiencies.items():
        look = looks[kind]
        xs, ys = [ranks for ranks, _, _ in rows], [efficiency for _, efficiency, _ in rows]
        measured.plot(xs, ys, color=look.color, marker=look.marker, linestyle=look.line, markersize=4)
        for ranks, efficiency, half in rows:
            if half is not None:
                measured.vlines(ranks, efficiency - half, efficiency + half, color=look.color, linewidth=0.8)
    highest = max((efficiency for rows in efficiencies.values() for _, efficiency, _ in rows), default=100.0)
    measured.set(ylim=(0, 1.19 * max(highest, 100)), ylabel="parallel efficiency (%)")
    _count_axis(measured, counts, "ranks, one thread each")
    if counts and counts[-1] > count:
        measured.axvspan(count * 1.19, counts[-1] * 1.19, color="0.9", linewidth=0, zorder=0.5)
    for label, steps in model.items():
        look = looks[label]
        xs, ys = [gpus for gpus, _ in steps], [milliseconds for _, milliseconds in steps]
        modelled.plot(xs, ys, color=look.color, marker=look.marker, linestyle=look.line, markersize=4)
    style.log_axis(modelled, "y", [time for steps in model.values() for _, time in steps])
    modelled.set(ylabel="communication a step (ms)")
    _count_axis(
        modelled, sorted({gpus for steps in model.values() for gpus, _ in steps}), "GPUs, by the model"
    )
    handles = [
        Line2D([], [], color=look.color, marker=look.marker, linestyle=look.line, markersize=4, label=label)
        for label, look in looks.items()
    ]
    notes = ["Vertical lines: 95 % intervals"]
    if counts and counts[-1] > count:
        notes.append(f"Grey: more ranks than the {count} {name}, which they share")
    figure.finish(title, origin, notes, handles)
    return figure


def _count_axis(axes: Axes, counts: Sequence[int], label: str) -> None:
    """Give an axis of counts ticks at these powers of two."""
    axes.set_xscale("log", base=2)
    axes.set(xlim=(counts[0] / 1.19, counts[-1] * 1.19), xlabel=label)
    axes.xaxis.set_major_locator(FixedLocator(list(counts)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
