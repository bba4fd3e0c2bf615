"""Times as multiples of the plain layer's: a row per family of schemes, a dot per variant."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from esbench.report import captions
from esbench.report.analysis import roofline
from esbench.report.analysis.families import family
from esbench.report.analysis.pivot import Grid
from esbench.report.analysis.quality import EffectiveSize, Qualities
from esbench.report.plots import style
from esbench.report.plots.hero import SMALL_SHARE, format_n_eff
from esbench.report.plots.style import BLACK, FINE, PAGE, Figure, is_drawable
from esbench.schema import DENSE, Case, Measurement, Variant
from esbench.stats import Ratio, median
from esbench.units import format_multiplier


@dataclass(frozen=True)
class Dot:
    """A variant with its time multiplier and the roofline bound of the multiplier, None if unknown."""

    variant: Variant
    ratio: Ratio
    bound: float | None = None


@style.use_style()
def multipliers(grid: Grid, width: float = PAGE) -> Figure | None:
    """Draw the times of the case with the most numbers as multiples of the plain layer's time.

    A row per family, the cheapest first; a dot per variant with its 95 % interval. The text names the
    cheapest variant and Perturbed. A vertical tick is the roofline bound of the cheapest: the time of its
    minimum work at the measured peaks of the device. Return ``None`` if there is nothing to compare.
    """
    variants = [variant for variant in grid.variants if variant.mode != "base"]
    if not variants or grid.reference("base") is None:
        return None
    case = largest_case(grid, variants)
    dots = [dot for variant in variants if (dot := _dot(grid, variant, case))]
    if not dots:
        return None
    rows: dict[str, list[Dot]] = {}
    for dot in sorted(dots, key=lambda dot: dot.ratio.value):
        name = dot.variant.name if dot.variant.baseline else family(dot.variant.scheme)
        rows.setdefault(name, []).append(dot)
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, 0.45 + 0.34 * len(rows))
    ends = [x for dot in dots for x in (dot.ratio.value, dot.bound, dot.ratio.low, dot.ratio.high) if x]
    style.log_axis(axes, "x", [1.0, 2.0, *(x for x in ends if is_drawable(x))])
    for index, (name, row) in enumerate(rows.items()):
        _draw_row(axes, index, row, style.FAMILIES.get(name, style.FAMILIES["other"]))
    style.name_rows(axes, [style.fit(name, 1.5) for name in rows], -0.65)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time(variant) / time(base), lower is better", loc="right")
    drawn = {dot.variant for dot in dots}
    lacking = [variant for variant in variants if variant not in drawn]
    missing = {variant.name: style.missing_reason(grid.at(variant, case), 40) for variant in lacking}
    figure.finish(
        f"{captions.invalid_note(grid.run)}{finding(grid, case, rows)}",
        style.origin(grid, [case]),
        [*_notes(grid, dots), *style.notes_by_reason(missing)],
    )
    return figure


def largest_case(grid: Grid, variants: Sequence[Variant]) -> Case:
    """Return the case with the most numbers; of several the last, which is the largest."""

    def numbers(case: Case) -> int:
        return sum(grid.multiplier(variant, case, "base") is not None for variant in variants)

    return max(reversed(grid.cases), key=numbers)


def finding(grid: Grid, case: Case, rows: dict[str, list[Dot]]) -> str:
    """Return the title: the cheapest variant, compared with dense noise or else with the slowest.

    It warns of a variant that keeps less than half of its members, if the run has its n_eff.
    """
    dots = [dot for row in rows.values() for dot in row]
    cheapest = min(dots, key=lambda dot: dot.ratio.value)
    slowest = max(dots, key=lambda dot: dot.ratio.value)
    reference = next((dot for dot in dots if dot.variant.name == DENSE), slowest)
    name = "dense noise" if reference.variant.name == DENSE else reference.variant.name
    than = f", {name} {_times(reference)}" if reference != cheapest else ""
    times = f"{cheapest.variant.name} takes {_times(cheapest)} the plain layer's time"
    n_eff = Qualities(grid.run).law(cheapest.variant, case).effective
    if isinstance(n_eff, EffectiveSize) and n_eff.value < SMALL_SHARE * case.members:
        times += f" but keeps {format_n_eff(n_eff.value)} of its {case.members:,} members"
    return f"{grid.operator}, {grid.phase}: {times}{than}"


def _times(dot: Dot) -> str:
    ratio = dot.ratio
    half = (ratio.high - ratio.low) / 2 if ratio.low is not None and ratio.high is not None else None
    return format_multiplier(ratio.value, half)


def _dot(grid: Grid, variant: Variant, case: Case) -> Dot | None:
    row, ratio = grid.at(variant, case), grid.multiplier(variant, case, "base")
    reference = grid.reference("base")
    if ratio is None or reference is None or not isinstance(row, Measurement) or not is_drawable(ratio.value):
        return None
    # Base is timed once in each co-resident group: take its time from the variant's group.
    base = grid.measured(reference.variant, case, reference.phase, row.group)
    bound_ns, base_ns = roofline.bound_ns(grid.run, case.dtype, row.work), median(base) if base else None
    bound = bound_ns / base_ns if bound_ns and base_ns else 0.0
    return Dot(variant, ratio, bound if is_drawable(bound) else None)


def _draw_row(axes: Axes, index: int, row: Sequence[Dot], look: style.Look) -> None:
    cheapest = row[0]
    if any(dot.variant.name == DENSE for dot in row):
        axes.axhspan(index - 0.5, index + 0.5, color="0.92", linewidth=0, zorder=0.5)
    for dot in row:
        axes.plot(dot.ratio.value, index, **look.point, markersize=5.0, alpha=0.85, zorder=3)
        if dot.ratio.low and dot.ratio.high and is_drawable(dot.ratio.low, dot.ratio.high):
            axes.hlines(index, dot.ratio.low, dot.ratio.high, color=look.color, linewidth=1.0, zorder=2)
    if cheapest.bound:
        axes.vlines(cheapest.bound, index - 0.16, index + 0.16, color=BLACK, linewidth=1.0, zorder=4)
    low, high = axes.get_xlim()
    is_left = cheapest.ratio.value < math.sqrt(low * high)  # the middle of a logarithmic axis
    inches = 0.42 * axes.get_window_extent().width / axes.figure.dpi  # of each of the two names
    names = [
        f"{dot.variant.name} {_times(dot)}" for dot in row if dot == cheapest or dot.variant.name == DENSE
    ]
    axes.annotate(
        "; ".join(style.fit(name, inches) for name in names),
        (cheapest.ratio.value, index),
        (-2 if is_left else 2, 4),
        textcoords="offset points",
        horizontalalignment="left" if is_left else "right",
        verticalalignment="bottom",
        fontsize=FINE,
    )


def _notes(grid: Grid, dots: Sequence[Dot]) -> list[str]:
    intervals = sum(dot.ratio.low is not None for dot in dots)
    incomplete = f", of {intervals} of {len(dots)} variants" if intervals < len(dots) else ""
    notes = [f"Lines: 95 % intervals{incomplete}"] if intervals else []
    if any(dot.bound for dot in dots):
        bound = (
            "Roofline bound: tick, minimum work of the cheapest variant at the measured peaks of the device"
        )
        beaten = any(roofline.exceeds_matmul_peak(grid.run, row) for _, _, row in grid.cells)
        notes.append(f"{bound}; some calls are faster: {roofline.DISTURBED}" if beaten else bound)
    return notes
