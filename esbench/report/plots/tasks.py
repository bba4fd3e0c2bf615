"""Times to a goal against n_eff per ms, and learning curves."""

from collections.abc import Mapping, Sequence

from matplotlib.lines import Line2D

from esbench.report.plots import style
from esbench.report.plots.style import PAGE, Figure, Label
from esbench.schema import Task


@style.use_style()
def times_to_goal(
    points: Mapping[str, Sequence[tuple[str, float, float]]], title: str, origin: str
) -> Figure:
    """Draw the time to the goal against n_eff per ms.

    Args:
        points: task -> (variant, n_eff per ms, seconds to the goal).
        title: the finding.
        origin: where the numbers come from.
    """
    figure = Figure(PAGE)
    (axes,) = figure.panels(1, 1, 4.2)
    drawn = {task: rows for task, rows in points.items() if rows}
    looks = style.looks(points)
    for task, rows in drawn.items():
        rates, seconds = [rate for _, rate, _ in rows], [time for *_, time in rows]
        axes.plot(rates, seconds, **looks[task].point, markersize=5)
        # Proportional to 1 / (n_eff per ms), through the middle of the points.
        product = sorted(rate * time for _, rate, time in rows)[len(rows) // 2]
        ends = [min(rates), max(rates)]
        axes.plot(
            ends, [product / rate for rate in ends], color=looks[task].color, linewidth=0.6, linestyle=":"
        )
    style.log_axis(axes, "x", [rate for rows in drawn.values() for _, rate, _ in rows], margin=1.6)
    style.log_axis(axes, "y", [time for rows in drawn.values() for *_, time in rows])
    axes.set(xlabel="n_eff per ms", ylabel="time to the goal (s)")
    handles = [style.legend_point(looks[task], task) for task in drawn]
    figure.finish(title, origin, ["Dotted: time proportional to 1 / (n_eff per ms)"], handles)
    style.label_points(
        axes, [Label(rate, time, name) for rows in drawn.values() for name, rate, time in rows]
    )
    return figure


@style.use_style()
def learning_curves(
    tasks: Sequence[tuple[Task, Mapping[str, Sequence[tuple[float, float, float, float]]]]],
    title: str,
    origin: str,
) -> Figure:
    """Draw the scores against evaluations, a panel for each task.

    Args:
        tasks: each task with variant -> (evaluations, median, lowest, highest score).
        title: what is shown.
        origin: where the numbers come from.
    """
    figure = Figure(PAGE)
    looks = style.looks([name for _, curves in tasks for name in curves])
    for axes, (task, curves) in zip(figure.panels(len(tasks), 2, 2.4), tasks, strict=True):
        for name, rows in curves.items():
            xs, middle, low, high = zip(*rows, strict=True) if rows else ((), (), (), ())
            look = looks[name]
            axes.plot(xs, middle, color=look.color, linestyle=look.line, linewidth=1.1)
            axes.fill_between(xs, low, high, color=look.color, alpha=0.12, linewidth=0)
        axes.axhline(task.goal, color=style.GREY, linewidth=0.8, linestyle=":")
        axes.set(title=task.name, xlabel="evaluations", ylabel=task.score)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.locator_params(axis="x", nbins=4)
    handles = [
        Line2D([], [], color=look.color, linestyle=look.line, label=name) for name, look in looks.items()
    ]
    notes = ["Dotted: the goal. A training run ends soon after it, and then counts with its last score"]
    figure.finish(title, origin, notes, handles)
    return figure
