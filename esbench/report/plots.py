"""The picture of multipliers: a row for each variant, a mark for each shape."""

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from esbench.records import Case, Variant
from esbench.report.drawing import LINES, MARKS, WIDTH, Look, entitle, plain_ticks, shades, styled
from esbench.report.grid import Grid, headings
from esbench.report.words import label


def multipliers(grid: Grid) -> Figure | None:
    """Times as multiples of the plain layer's: a row for each variant, a mark for each shape.

    A line through a mark is the 95 % interval of its ratio. Of a shape that was measured with several
    populations it shows the largest at which most variants have a number. ``None`` where the run holds no
    plain layer to compare with, or nothing else.
    """
    variants = [variant for variant in grid.variants if variant.mode != "base"]
    if not variants or grid.reference("base") is None:
        return None
    cases = _largest(grid, variants)
    with styled():
        height = 1.8 + len(variants) * (0.2 + 0.05 * len(cases))
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots()
        looks = [
            Look(shade, MARKS[place % len(MARKS)], LINES[0]) for place, shade in enumerate(shades(len(cases)))
        ]
        gap = 0.7 / max(1, len(looks))
        for place, (case, look) in enumerate(zip(cases, looks, strict=True)):
            shift = gap * (place - (len(looks) - 1) / 2)
            _draw_shape(axes, grid, variants, case, shift, look)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        left, right = axes.get_xlim()
        axes.set_xlim(min(left, 0.5), max(right, 2))
        plain_ticks(axes.xaxis)
        axes.set_xlabel("time(variant) / time(base), lower is better")
        axes.set_yticks(range(len(variants)), [label(v.label(grid.operator)) for v in variants])
        axes.set_ylim(len(variants) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        for edge in range(len(variants) - 1):
            axes.axhline(edge + 0.5, color="0.88", linewidth=0.8)
        handles = [
            Line2D([], [], color=look.color, marker=look.mark, linestyle="none", label=label(name))
            for name, look in zip(headings(cases), looks, strict=True)
        ]
        if any(grid.multiplier(v, c, "base") is None for v in variants for c in cases):
            cross = "no number: see the table"
            handles.append(Line2D([], [], color="black", marker="x", linestyle="none", label=cross))
        figure.legend(handles=handles, loc="outside lower center", ncols=3, handlelength=1)
        base = "the plain layer" if grid.phase == "forward" else "base"
        entitle(figure, grid, cases, f"{grid.operator}: {grid.phase} time against {base}")
    return figure


def _largest(grid: Grid, variants: list[Variant]) -> list[Case]:
    """Of the cases that differ in nothing but the number of members, the largest that most could do."""
    families: dict[Case, list[Case]] = {}
    for case in grid.cases:
        families.setdefault(msgspec.structs.replace(case, members=1), []).append(case)

    def worth(case: Case) -> tuple[int, int]:
        numbers = sum(grid.multiplier(variant, case, "base") is not None for variant in variants)
        return min(numbers, len(variants) // 2 + 1), case.members

    return [max(family, key=worth) for family in families.values()]


def _draw_shape(  # noqa: PLR0913, PLR0917  one series of a plot
    axes: Axes, grid: Grid, variants: list[Variant], case: Case, shift: float, look: Look
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
    for row, ratio in enumerate(ratios):
        if ratio and ratio.low and ratio.high:
            axes.hlines(row + shift, ratio.low, ratio.high, color="black", linewidth=1, zorder=1.5)
    missing = [row + shift for row, ratio in enumerate(ratios) if not ratio]
    edge = axes.get_yaxis_transform()
    axes.plot([0.99] * len(missing), missing, linestyle="none", marker="x", color="black", transform=edge)
