"""The time of a generation against the population: esbench and other libraries."""

from collections.abc import Sequence

from esbench.report import captions
from esbench.report.analysis.peers import Generations, evaluations, library, name
from esbench.report.plots import style
from esbench.report.plots.style import PAGE, Figure
from esbench.report.plots.sweeps import scale_x
from esbench.schema import Variant
from esbench.units import format_multiplier, format_value

_MIN_CASES = 3
_LABEL_WIDTH = 0.33
"""The largest width of the name of a line, as a share of the figure's."""


@style.use_style()
def generation_times(generations: Generations) -> Figure | None:
    """Draw the time of a generation against the population, for one variant of each library.

    The variant is that which is fastest with the most evaluations.
    Return ``None`` if fewer than three cases differ only in the population, or no variant has two times.
    """
    cases, grid = generations.sweep, generations.grid
    if len(cases) < _MIN_CASES:
        return None
    chosen = generations.best_of_libraries(cases)
    points = {
        variant: [(evaluations(case), ns) for case in cases if (ns := generations.time_ns(variant, case))]
        for variant in chosen
    }
    points = {variant: line for variant, line in points.items() if len(line) > 1}
    if not points:
        return None
    figure = Figure(PAGE)
    (axes,) = figure.panels(1, 1, 3.1)
    style.log_axis(axes, "y", [ns / 1e6 for line in points.values() for _, ns in line])
    scale_x(axes, [evaluations(case) for case in cases], figure.panel_width)
    axes.set(xlabel="evaluations in a generation", ylabel="time of a generation (ms)")
    looks = style.looks(map(library, points))
    labels = []
    for variant, line in points.items():
        look = looks[library(variant)]
        xs, ys = [x for x, _ in line], [ns / 1e6 for _, ns in line]
        axes.plot(xs, ys, color=look.color, linestyle=look.line, marker=look.marker, markersize=4)
        labels.append(style.Label(xs[-1], ys[-1], name(variant)))
    style.label_ends(axes, labels, _LABEL_WIDTH * PAGE)
    title = _finding(generations, list(points))
    figure.finish(f"{captions.invalid_note(grid.run)}{title}", style.origin(grid, cases))
    return figure


def _finding(generations: Generations, chosen: Sequence[Variant]) -> str:
    """Return the title: the fastest at the most evaluations, and the multiples that others take."""
    case = generations.sweep[-1]
    first, *others = sorted(
        (variant for variant in chosen if generations.time_ns(variant, case)),
        key=lambda variant: generations.time_ns(variant, case) or 0.0,
    )
    time = format_value("latency_ns", generations.time_ns(first, case))
    text = f"A generation of {evaluations(case):,} evaluations takes {name(first)} {time}"
    ratios = [ratio.value for other in others if (ratio := generations.ratio(other, first, case))]
    if not ratios:
        return text
    return f"{text}, the others {format_multiplier(min(ratios))} to {format_multiplier(max(ratios))}"
