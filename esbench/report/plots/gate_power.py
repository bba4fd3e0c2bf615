"""The power of the gate: in which share of suites a slowdown is found, over its size."""

from collections.abc import Mapping, Sequence

from matplotlib.ticker import NullLocator
from scipy.stats import binomtest

from esbench.report.plots import style
from esbench.report.plots.style import PAGE, Figure, Label


@style.styled()
def gate_power(
    detections: Mapping[str, Sequence[tuple[float, int, int]]],
    goals: Mapping[float, float],
    title: str,
    origin: str,
    width: float = PAGE,
) -> Figure:
    """Draw the power of the gate with its 95 % intervals (Clopper and Pearson, 1934).

    Args:
        detections: kind of slowdown -> for each slowdown its share, the suites that found it, and all suites.
        goals: slowdown -> the share of suites that should find it.
        title: the finding.
        origin: the study and its device.
        width: of the figure, in inches.

    """
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, 2.4)
    sizes = sorted(
        {100 * slower for rows in detections.values() for slower, _, _ in rows} | {100 * x for x in goals}
    )
    labels = []
    for (name, rows), look in zip(detections.items(), style.looks(detections).values(), strict=True):
        xs, ys = [100 * slower for slower, _, _ in rows], [100 * hits / suites for _, hits, suites in rows]
        axes.plot(xs, ys, color=look.color, marker=look.marker, linestyle=look.line, markersize=4)
        for x, (_, hits, suites) in zip(xs, rows, strict=True):
            ends = binomtest(hits, suites).proportion_ci()
            axes.vlines(x, 100 * ends.low, 100 * ends.high, color=look.color, linewidth=0.8)
        labels.append(Label(xs[-1], ys[-1], name))
    axes.plot([100 * x for x in goals], [100 * y for y in goals.values()], "k+", markersize=7)
    labels += [Label(100 * x, 100 * y, "goal") for x, y in goals.items()]
    axes.set(xscale="log", xlabel="slower by (%)", ylabel="found in suites (%)", ylim=(-3, 106))
    axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.6)
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    figure.finish(title, origin, ["Vertical lines: 95 % intervals"])
    style.label_points(axes, labels)
    return figure
