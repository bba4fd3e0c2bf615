"""Times as multiples of the plain layer's: a row per family of schemes, a dot per variant."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from esbench.report import captions
from esbench.report.analysis import roofline
from esbench.report.analysis.pivot import Grid
from esbench.report.plots import style
from esbench.report.plots.style import BLACK, FINE, PAGE, Figure, drawable
from esbench.schema import DENSE, Case, Measurement, Variant
from esbench.stats import Ratio, median
from esbench.units import format_multiplier


@dataclass(frozen=True)
class Dot:
    """A variant with its time multiplier and the roofline bound of it, None if unknown."""

    variant: Variant
    ratio: Ratio
    bound: float | None = None


@style.styled()
def multipliers(grid: Grid, width: float = PAGE) -> Figure | None:
    """Draw the times of the case with the most numbers as multiples of the plain layer's time.

    A row per family, the cheapest first; a dot per variant with its 95 % interval, and the name of the
    cheapest. A vertical tick is the roofline bound of the cheapest: its minimum work at the measured peaks of
    the device. ``None`` if there is nothing to compare.
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
        rows.setdefault(_row_name(dot.variant), []).append(dot)
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, 0.4 + 0.3 * len(rows))
    ends = [x for dot in dots for x in (dot.ratio.value, dot.bound, dot.ratio.low, dot.ratio.high) if x]
    style.log_axis(axes, "x", [1.0, 2.0, *(x for x in ends if drawable(x))])
    for place, (name, row) in enumerate(rows.items()):
        _draw(axes, place, row, style.FAMILIES.get(name, style.FAMILIES["other"]))
    axes.set_yticks(range(len(rows)), [style.fit(name, 1.5) for name in rows])
    axes.set_ylim(len(rows) - 0.5, -0.65)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time(variant) / time(base), lower is better", loc="right")
    missing = {
        variant.name: style.reason_of(grid.at(variant, case), 40)
        for variant in variants
        if not any(dot.variant == variant for dot in dots)
    }
    figure.finish(
        f"{captions.invalid(grid.run)}{finding(grid, rows)}",
        f"{case.label}, {style.origin(grid, [case])}",
        [*_notes(grid, dots), *style.by_reason(missing)],
    )
    return figure


def largest_case(grid: Grid, variants: Sequence[Variant]) -> Case:
    """Return the case with the most numbers; of equals the last, which is the largest."""

    def numbers(case: Case) -> int:
        return sum(grid.multiplier(variant, case, "base") is not None for variant in variants)

    return max(reversed(grid.cases), key=numbers)


def finding(grid: Grid, rows: dict[str, list[Dot]]) -> str:
    """Return the result: the cheapest variant, compared with dense noise or else the dearest."""
    every = [dot for row in rows.values() for dot in row]
    first = min(every, key=lambda dot: dot.ratio.value)
    dense = next((dot for dot in every if dot.variant.name == DENSE), every[-1])
    text = f"{grid.operator}, {grid.phase}: {first.variant.name} takes {_times(first)} the plain layer's time"
    return text if dense == first else f"{text}, {dense.variant.name} {_times(dense)}"


def _times(dot: Dot) -> str:
    ratio = dot.ratio
    half = (ratio.high - ratio.low) / 2 if ratio.low is not None and ratio.high is not None else None
    return format_multiplier(ratio.value, half)


def _row_name(variant: Variant) -> str:
    return variant.name if variant.baseline else style.family(variant.scheme)


def _dot(grid: Grid, variant: Variant, case: Case) -> Dot | None:
    row, ratio = grid.at(variant, case), grid.multiplier(variant, case, "base")
    reference = grid.reference("base")
    if ratio is None or reference is None or not isinstance(row, Measurement) or not drawable(ratio.value):
        return None
    base = grid.measured(reference.variant, case, reference.phase, row.group)
    least, plain = roofline.bound_ns(grid.run, case.dtype, row.work), median(base) if base else None
    bound = least / plain if least and plain else 0.0
    return Dot(variant, ratio, bound if drawable(bound) else None)


def _draw(axes: Axes, place: int, row: Sequence[Dot], look: style.Look) -> None:
    first = row[0]
    for dot in row:
        axes.plot(dot.ratio.value, place, **look.point, markersize=5.0, alpha=0.85, zorder=3)
        if dot.ratio.low and dot.ratio.high and drawable(dot.ratio.low, dot.ratio.high):
            axes.hlines(place, dot.ratio.low, dot.ratio.high, color=look.color, linewidth=1.0, zorder=2)
    if first.bound:
        axes.vlines(first.bound, place - 0.25, place + 0.25, color=BLACK, linewidth=1.0, zorder=4)
    low, high = axes.get_xlim()
    is_left = first.ratio.value**2 < low * high
    axes.annotate(
        style.fit(f"{first.variant.name} {_times(first)}", 1.7),
        (first.ratio.value, place),
        (-2 if is_left else 2, 5),
        textcoords="offset points",
        horizontalalignment="left" if is_left else "right",
        verticalalignment="bottom",
        fontsize=FINE,
    )


def _notes(grid: Grid, dots: Sequence[Dot]) -> list[str]:
    known = sum(dot.ratio.low is not None for dot in dots)
    some = f", of {known} of {len(dots)} variants" if known < len(dots) else ""
    notes = [f"Lines: 95 % intervals{some}"] if known else []
    if any(dot.bound for dot in dots):
        bound = (
            "Roofline bound: tick, minimum work of the cheapest variant at the measured peaks of the device"
        )
        beaten = any(roofline.beats_arithmetic(grid.run, row) for _, _, row in grid.cells)
        notes.append(f"{bound}; some calls are faster: {roofline.DISTURBED}" if beaten else bound)
    return notes
