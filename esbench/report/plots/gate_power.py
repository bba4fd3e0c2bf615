"""The power of the gate: the share of suites that find a slowdown, over the size of the slowdown."""

from collections.abc import Mapping, Sequence

from matplotlib.ticker import NullLocator
from scipy.stats import binomtest

from esbench.report.plots import style
from esbench.report.plots.style import PAGE, Figure, Label


@style.use_style()
def gate_power(
    detections: Mapping[str, Sequence[tuple[float, int, int]]],
    goals: Mapping[float, float],
    title: str,
    origin: str,
) -> Figure:
    """Draw the power of the gate with its 95 % intervals (Clopper and Pearson, 1934).

    ``detections`` maps what is slower to (slowdown as a share of the time, suites that found it, all suites)
    for each slowdown, ``goals`` a slowdown to the share of suites that should find it.
    """
    figure = Figure(PAGE)
    (axes,) = figure.panels(1, 1, 2.7)
    slowdowns = {slowdown for rows in detections.values() for slowdown, _, _ in rows} | set(goals)
    ticks = sorted(100 * slowdown for slowdown in slowdowns)
    labels = []
    for (name, rows), look in zip(detections.items(), style.FAMILIES.values(), strict=False):
        xs = [100 * slowdown for slowdown, _, _ in rows]
        ys = [100 * hits / suites for _, hits, suites in rows]
        axes.plot(xs, ys, color=look.color, marker=look.marker, linestyle=look.line, markersize=4)
        for x, (_, hits, suites) in zip(xs, rows, strict=True):
            ends = binomtest(hits, suites).proportion_ci()
            axes.vlines(x, 100 * ends.low, 100 * ends.high, color=look.color, linewidth=0.8)
        labels.append(Label(xs[-1], ys[-1], name))
    axes.plot([100 * x for x in goals], [100 * y for y in goals.values()], "k+", markersize=7)
    labels += [Label(100 * x, 100 * y, "goal") for x, y in goals.items()]
    axes.set(xscale="log", xlabel="slower by (%)", ylabel="suites that find it (%)", ylim=(-3, 106))
    axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.6)
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    figure.finish(title, origin, ["Vertical lines: 95 % intervals"])
    style.label_points(axes, labels)
    return figure
