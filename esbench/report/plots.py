"""The pictures: multipliers by variant and shape, time and memory against the population.

One style, readable in greyscale (marks and lines differ, not only colours), on a dark page and
at the width of a README column. The same run gives the same bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import matplotlib as mpl
import msgspec
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from esbench.records import Case, Measurement, Run, Skipped, Variant
from esbench.report import captions
from esbench.report.grid import TIMES, Grid, grids, headings
from esbench.statistics import median
from esbench.units import quantity

Line = Literal["-", "--", "-.", ":"]

_WIDTH = 8.0
_MARKS = ("o", "s", "^", "D", "v", "P", "*", "<", ">", "h")
_LINES: tuple[Line, ...] = ("-", "--", "-.", ":")
_STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",
    "font.size": 9,
    "grid.color": "0.88",
    "legend.frameon": False,
    "savefig.dpi": 150,
    "savefig.facecolor": "white",
    "svg.hashsalt": "esbench",
}


class _Look(NamedTuple):
    """What tells a series from the others, in colour and without."""

    color: tuple[float, float, float, float]
    mark: str
    line: Line


def multipliers(run: Run, operator: str) -> Figure | None:
    """Forward times as multiples of the plain layer's: a row for each variant, a mark for each shape.

    Of a shape that was measured with several populations it shows the largest. ``None``
    where the run holds no plain layer to compare with.
    """
    grid = _forward(run, operator, TIMES)
    if grid is None or grid.reference("base") is None:
        return None
    variants = [variant for variant in grid.variants if variant.mode != "base"]
    cases = [max(family, key=lambda case: case.members) for family in _families(grid)]
    with _styled():
        height = 1.8 + len(variants) * (0.2 + 0.05 * len(cases))
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
        looks = _looks(len(cases))
        gap = 0.7 / max(1, len(looks))
        for place, (case, look) in enumerate(zip(cases, looks, strict=True)):
            shift = gap * (place - (len(looks) - 1) / 2)
            _draw_shape(axes, grid, variants, case, shift, look)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        left, right = axes.get_xlim()
        axes.set_xlim(min(left, 0.5), max(right, 2))
        _plain_ticks(axes.xaxis)
        axes.set_xlabel("time(variant) / time(base), lower is better")
        axes.set_yticks(range(len(variants)), [variant.label(operator) for variant in variants])
        axes.set_ylim(len(variants) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        for edge in range(len(variants) - 1):
            axes.axhline(edge + 0.5, color="0.88", linewidth=0.8)
        names = dict(zip(headings(cases), looks, strict=True))
        missing = any(grid.multiplier(v, c, "base") is None for v in variants for c in cases)
        _legend(figure, names, "no number: see the table" if missing else None, lines=False)
        _title(figure, grid, cases, f"{operator}: forward time against the plain layer")
    return figure


def against_population(run: Run, operator: str, suffix: str) -> Figure | None:
    """Time or peak memory of the forward against the number of members: a panel for each shape.

    A line that breaks off because a larger population has no number ends in a cross. ``None``
    where no shape was measured with several populations.
    """
    grid = _forward(run, operator, suffix)
    families = [family for family in _families(grid) if len(family) > 1] if grid else []
    if grid is None or not families:
        return None
    with _styled():
        columns = min(2, len(families))
        rows = -(-len(families) // columns)
        height = 1.6 + 2.8 * rows + 0.11 * len(grid.variants)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
        looks = dict(zip(grid.variants, _looks(len(grid.variants)), strict=True))
        cut = False
        for axes, family in zip(panels, families, strict=False):
            for variant, look in looks.items():
                cut |= _draw_line(axes, grid, variant, family, look)
            _label_population(axes, grid, family)
        for axes in list(panels)[len(families) :]:
            axes.remove()
        names = {variant.label(operator): look for variant, look in looks.items()}
        _legend(figure, names, "a larger population has no number" if cut else None, lines=True)
        name = captions.metric(grid.metric).partition(" above")[0].lower()
        shown = [case for family in families for case in family]
        _title(figure, grid, shown, f"{operator}: {name} of the forward against the population")
    return figure


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as SVG and PNG; the same figure gives the same bytes."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png")]
    with _styled():
        figure.savefig(paths[0], metadata={"Date": None, "Creator": None})
        figure.savefig(paths[1], metadata={"Software": None})
    return paths


@contextmanager
def _styled() -> Iterator[None]:
    """One look everywhere, whatever a person's own configuration says."""
    with style.context(["default", _STYLE]):
        yield


def _forward(run: Run, operator: str, suffix: str) -> Grid | None:
    metrics = {"latency_ns", "peak_bytes"}
    found = (
        grid for grid in grids(run, operator, suffix) if grid.metric in metrics and grid.method != "none"
    )
    return next((grid for grid in found if grid.phase == "forward"), None)


def _families(grid: Grid) -> list[list[Case]]:
    """Cases that differ in nothing but the number of members, the smallest first."""
    families: dict[Case, list[Case]] = {}
    for case in grid.cases:
        families.setdefault(msgspec.structs.replace(case, members=1), []).append(case)
    return [sorted(family, key=lambda case: case.members) for family in families.values()]


def _looks(count: int) -> list[_Look]:
    """Colours that run from dark to light, so that they differ in greyscale, and marks and lines."""
    shades = mpl.colormaps["viridis"].resampled(256)
    return [
        _Look(
            shades(0.85 * place / max(1, count - 1)), _MARKS[place % len(_MARKS)], _LINES[place % len(_LINES)]
        )
        for place in range(count)
    ]


def _draw_shape(  # noqa: PLR0913, PLR0917  one series of a plot
    axes: Axes, grid: Grid, variants: list[Variant], case: Case, shift: float, look: _Look
) -> None:
    ratios = [grid.multiplier(variant, case, "base") for variant in variants]
    points = [(ratio.value, row + shift) for row, ratio in enumerate(ratios) if ratio]
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        linestyle="none",
        marker=look.mark,
        color=look.color,
        markeredgecolor="black",
        markeredgewidth=0.5,
    )
    missing = [row + shift for row, ratio in enumerate(ratios) if not ratio]
    edge = axes.get_yaxis_transform()
    axes.plot([0.99] * len(missing), missing, linestyle="none", marker="x", color="black", transform=edge)


def _draw_line(axes: Axes, grid: Grid, variant: Variant, family: list[Case], look: _Look) -> bool:
    """Draw a variant, and say whether its line breaks off."""
    size = quantity(grid.metric).column.size
    rows = [grid.at(variant, case) for case in family]
    points = [
        (case.members, value / size)
        for case, row in zip(family, rows, strict=True)
        if isinstance(row, Measurement) and (value := median(row))
    ]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    axes.plot(xs, ys, linestyle=look.line, marker=look.mark, markersize=5, color=look.color)
    cut = bool(points) and any(
        isinstance(row, Skipped) and case.members > xs[-1] for case, row in zip(family, rows, strict=True)
    )
    if cut:
        axes.plot(xs[-1], ys[-1], marker="x", markersize=11, markeredgewidth=1.5, color="black")
    return cut


def _label_population(axes: Axes, grid: Grid, family: list[Case]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([case.members for case in family], [str(case.members) for case in family])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    _plain_ticks(axes.yaxis)
    axes.set_xlabel("members")
    axes.set_ylabel(quantity(grid.metric).column.symbol)
    axes.set_title(family[0].shape, fontsize="medium")


def _plain_ticks(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, looks: dict[str, _Look], cross: str | None, *, lines: bool) -> None:
    handles = [
        Line2D(
            [], [], color=look.color, marker=look.mark, linestyle=look.line if lines else "none", label=name
        )
        for name, look in looks.items()
    ]
    if cross:
        handles.append(Line2D([], [], color="black", marker="x", linestyle="none", label=cross))
    length = 4 if lines else 1
    figure.legend(handles=handles, loc="outside lower center", ncols=2, handlelength=length)


def _title(figure: Figure, grid: Grid, cases: list[Case], text: str) -> None:
    where = f"{captions.source(grid.run)}, {captions.conditions(grid, cases).rstrip('.')}"
    figure.suptitle(f"{text}\n{where}", fontsize="medium")
