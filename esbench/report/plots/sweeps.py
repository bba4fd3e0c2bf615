"""Time as a multiple of the plain layer's, or the share of members kept, against population or width."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter

from esbench.report import captions
from esbench.report.analysis.families import family
from esbench.report.analysis.pivot import Grid
from esbench.report.analysis.quality import EffectiveSize, Qualities, percent_of_members
from esbench.report.plots import style
from esbench.report.plots.hero import format_n_eff
from esbench.report.plots.style import PAGE, Figure, is_drawable
from esbench.schema import DENSE, Case, Skipped, Variant
from esbench.text import pluralize
from esbench.units import format_multiplier

_MIN_CASES, _MIN_POINTS = 3, 2
"""Fewer cases show no trend, and are in the table; a line needs two points."""
_MAX_LINES = 6
"""More lines cannot be distinguished."""
_LABEL_WIDTH = 0.33
"""The largest width of the name of a line, as a share of the figure's."""
_ALL = 99.95
"""A share of the members, in percent, that counts as all of them."""
_ABOVE = 105.0
"""A larger share, in percent, is drawn as an arrow to the top."""


class Sweep(NamedTuple):
    """A property of cases that varies along the x axis.

    Attributes:
        label: of the x axis.
        value: the property of a case.
        key: equal for cases that differ only in the property; None for a case that is in no sweep.
    """

    label: str
    value: Callable[[Case], int]
    key: Callable[[Case], Case | None]


def _width_key(case: Case) -> Case | None:
    """Return the case with a width of 1; None if it has different numbers of inputs and outputs."""
    if case.in_channels != case.out_channels:
        return None
    return msgspec.structs.replace(case, out_channels=1, in_channels=1)


POPULATION = Sweep(
    "members", lambda case: case.members, lambda case: msgspec.structs.replace(case, members=1)
)
WIDTH = Sweep("channels in and out", lambda case: case.out_channels, _width_key)


@dataclass(frozen=True)
class Line:
    """The line of a variant.

    Attributes:
        points: positions on the x axis and values, sorted; a share is at most 100 %.
        reason: why a larger case has no value, or empty.
        label: its name in the plot, if it is not the variant's.
    """

    variant: Variant
    points: tuple[tuple[float, float], ...]
    reason: str = ""
    label: str = ""

    @property
    def last(self) -> tuple[float, float]:
        """The last point."""
        return self.points[-1]

    @property
    def keeps_all(self) -> bool:
        """Whether all shares, in percent, are at least 100 when rounded to one decimal."""
        return min(y for _, y in self.points) >= _ALL


@style.use_style()
def times(grid: Grid, sweep: Sweep, width: float = PAGE) -> Figure | None:
    """Draw time(variant) / time(base) against population or width, for the cheapest variant of each family.

    Return ``None`` if fewer than three cases differ only in the population or width.
    """

    def multiplier(variant: Variant, case: Case) -> float | None:
        ratio = grid.multiplier(variant, case, "base")
        return ratio.value if ratio else None

    cases = longest_sweep(grid, sweep)
    chosen = cheapest_of_each_family(lines(grid, sweep, cases, multiplier))
    if not chosen:
        return None
    figure, axes = _draw_lines(sweep, cases, chosen, width)
    axes.set_ylabel("time(variant) / time(base)")
    style.label_ends(axes, _labels(chosen, sweep.value(cases[-1])), _LABEL_WIDTH * width)
    title = time_finding(grid, sweep, cases[-1], chosen)
    notes = [*_families_without_line(grid, chosen), *_ends_early(chosen)]
    figure.finish(f"{captions.invalid_note(grid.run)}{title}", style.origin(grid, cases), notes)
    return figure


@style.use_style()
def kept_members(grid: Grid, width: float = PAGE) -> Figure | None:
    """Draw n_eff / n in percent against the population n, at most 100 %, in up to six lines.

    Schemes that keep all members share a line. If the largest share is above 100 %, as that of an exact
    estimate, an arrow to the top is labelled with its scheme. Return ``None`` if fewer than three cases
    differ only in the population.
    """
    qualities = Qualities(grid.run)

    def share(variant: Variant, case: Case) -> float | None:
        n_eff = qualities.law(variant, case).effective
        return 100 * n_eff.value / case.members if isinstance(n_eff, EffectiveSize) else None

    cases = longest_sweep(grid, POPULATION)
    all_lines = lines(grid, POPULATION, cases, share, highest=100.0)
    chosen = choose_shares(all_lines)
    if not chosen:
        return None
    largest = cases[-1]
    figure, axes = _draw_lines(POPULATION, cases, chosen, width)
    axes.set_ylabel("members kept (%)")
    labels = _labels(chosen, largest.members)
    best = max((line.variant for line in all_lines), key=lambda variant: share(variant, largest) or 0.0)
    n_eff = qualities.law(best, largest).effective
    if isinstance(n_eff, EffectiveSize) and 100 * n_eff.value / largest.members > _ABOVE:
        top = largest.members, axes.get_ylim()[1]
        style.arrow(axes, (largest.members, 100), top, style.family_look(best.scheme).color)
        labels.append(style.Label(*top, f"{best.name}: {percent_of_members(n_eff, largest.members)}"))
    style.label_ends(axes, labels, _LABEL_WIDTH * width)
    title = share_finding(largest, all_lines, chosen)
    notes = [*_schemes_without_line(all_lines, chosen), *_ends_early(chosen)]
    figure.finish(f"{captions.invalid_note(grid.run)}{title}", style.origin(grid, cases), notes)
    return figure


def longest_sweep(grid: Grid, sweep: Sweep) -> list[Case]:
    """Return the largest set of cases that differ only in the population or width, sorted by it."""
    sweeps: dict[Case, list[Case]] = {}
    for case in grid.cases:
        if (key := sweep.key(case)) is not None:
            sweeps.setdefault(key, []).append(case)
    longest = max(sweeps.values(), key=len, default=[])
    return sorted(longest, key=sweep.value) if len(longest) >= _MIN_CASES else []


def lines(
    grid: Grid,
    sweep: Sweep,
    cases: Sequence[Case],
    value: Callable[[Variant, Case], float | None],
    highest: float = math.inf,
) -> list[Line]:
    """Return the lines of all variants but base and naive that have at least two points.

    ``cases`` are sorted along the x axis; a value above ``highest`` is drawn at that height.
    """
    all_lines = []
    for variant in grid.variants:
        heights = ((case, min(value(variant, case) or 0.0, highest)) for case in cases)
        points = tuple((sweep.value(case), y) for case, y in heights if is_drawable(y))
        if variant.baseline or len(points) < _MIN_POINTS:
            continue
        larger = [grid.at(variant, case) for case in cases if sweep.value(case) > points[-1][0]]
        reasons = [style.missing_reason(row, 40) for row in larger if isinstance(row, Skipped)]
        all_lines.append(Line(variant, points, reasons[0] if reasons else ""))
    return all_lines


def cheapest_of_each_family(all_lines: Iterable[Line]) -> list[Line]:
    """Return the line of each family that reaches furthest and ends lowest; Perturbed for dense noise.

    The lines are sorted in the same way.
    """
    best: dict[str, Line] = {}
    for line in sorted(all_lines, key=_furthest_and_lowest):
        name = family(line.variant.scheme)
        if name not in best or line.variant.name == DENSE:
            best[name] = line
    return sorted(best.values(), key=_furthest_and_lowest)


def _furthest_and_lowest(line: Line) -> tuple[float, float]:
    return -line.last[0], line.last[1]


def choose_shares(all_lines: Iterable[Line]) -> list[Line]:
    """Return the first variants of up to six schemes, most kept first; one line for all that keep all."""
    first_lines = _first_of_each_scheme(all_lines)
    keeping = [line for line in first_lines if line.keeps_all]
    losing = sorted((line for line in first_lines if not line.keeps_all), key=lambda line: -line.last[1])
    count = min(len(losing), _MAX_LINES - bool(keeping))
    # Evenly spaced from the best to the worst.
    picked = [losing[round(index * (len(losing) - 1) / max(1, count - 1))] for index in range(count)]
    if not keeping:
        return picked
    first = next((line for line in keeping if line.variant.name == DENSE), keeping[0])
    label = first.variant.name
    if len(keeping) > 1:
        label += f" and {pluralize(len(keeping) - 1, 'other scheme')}"
    return [replace(first, label=label), *picked]


def _first_of_each_scheme(all_lines: Iterable[Line]) -> list[Line]:
    schemes: dict[str, Line] = {}
    for line in all_lines:
        schemes.setdefault(line.variant.scheme, line)
    return list(schemes.values())


def _draw_lines(
    sweep: Sweep, cases: Sequence[Case], chosen: Sequence[Line], width: float
) -> tuple[Figure, Axes]:
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, 3.1 if width == PAGE else 2.6)
    style.log_axis(axes, "y", [y for line in chosen for _, y in line.points])
    scale_x(axes, [sweep.value(case) for case in cases], figure.panel_width)
    axes.set_xlabel(sweep.label)
    for line in chosen:
        look = style.family_look(line.variant.scheme)
        xs, ys = zip(*line.points, strict=True)
        axes.plot(xs, ys, color=look.color, linestyle=look.line, marker=look.marker, markersize=4)
    return figure, axes


def scale_x(axes: Axes, positions: Sequence[int], inches: float) -> None:
    """Make the x axis logarithmic, with a small tick at each position and numbers where there is room."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(positions[0] / 1.3, positions[-1] * 1.3)
    most_numbers = max(2, int(inches / 0.55))
    step = math.ceil(len(positions) / most_numbers)
    first = (len(positions) - 1) % step  # so that the largest position has a number
    numbered = positions[first::step]
    axes.set_xticks(numbered, [f"{x:,}" for x in numbered])
    axes.xaxis.set_minor_locator(FixedLocator(positions))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _labels(chosen: Sequence[Line], largest_x: float) -> list[style.Label]:
    """Return the names of the lines; a line that ends before ``largest_x`` tells where."""
    labels = []
    for line in chosen:
        x, y = line.last
        until = f" (to {x:,.0f})" if x < largest_x else ""
        labels.append(style.Label(x, y, line.label or f"{line.variant.name}{until}"))
    return labels


def _ends_early(chosen: Sequence[Line]) -> list[str]:
    """Return notes with the reasons why lines end before the largest case."""
    reasons = {line.variant.name: line.reason for line in chosen if line.reason}
    return style.notes_by_reason(reasons, "No number for a larger case")


def time_finding(grid: Grid, sweep: Sweep, case: Case, chosen: Sequence[Line]) -> str:
    """Return the title: the time of the cheapest line at ``case``, the largest, and of dense noise."""
    best = chosen[0]
    unit = "members" if sweep is POPULATION else "channels"
    layer = captions.layer(case) if sweep is POPULATION else grid.operator
    text = (
        f"{layer}, {grid.phase}: at {best.last[0]:,.0f} {unit} {best.variant.name} takes "
        f"{format_multiplier(best.last[1])} the time of the plain layer"
    )
    dense = next((line for line in chosen if line.variant.name == DENSE), best)
    if dense == best:
        return text
    at = "" if dense.last[0] == best.last[0] else f" (at {dense.last[0]:,.0f})"
    return f"{text}, dense noise {format_multiplier(dense.last[1])}{at}"


def share_finding(case: Case, all_lines: Iterable[Line], chosen: Sequence[Line]) -> str:
    """Return the title: how many schemes keep all members, and how many members the worst keeps."""
    worst = min(chosen, key=lambda line: line.last[1])
    x, y = worst.last
    text = f"{worst.variant.name} keeps {format_n_eff(x * y / 100)} of {x:,.0f} members"
    keeping = sum(line.keeps_all for line in _first_of_each_scheme(all_lines))
    if keeping and not worst.keeps_all:
        text = f"{pluralize(keeping, 'scheme')} keep{'s' * (keeping == 1)} all members, {text}"
    return f"{captions.layer(case)}: {text}"


def _schemes_without_line(all_lines: Iterable[Line], chosen: Sequence[Line]) -> Iterator[str]:
    """Yield the names of the schemes that keep all members, and of those that are not drawn."""
    drawn = {line.variant for line in chosen}
    others = [line for line in _first_of_each_scheme(all_lines) if line.variant not in drawn]
    if keeping := [line.variant.name for line in others if line.keeps_all]:
        yield f"Also keep all members: {', '.join(keeping)}"
    if losing := [f"{line.variant.name} {line.last[1]:.3g} %" for line in others if not line.keeps_all]:
        yield f"Not drawn, at most {_MAX_LINES} lines: {', '.join(losing)}"


def _families_without_line(grid: Grid, chosen: Iterable[Line]) -> Iterator[str]:
    """Yield the families that have no line, and why; nothing for workloads without families."""
    drawn = {family(line.variant.scheme) for line in chosen}
    measured = {family(variant.scheme) for variant in grid.variants if not variant.baseline}
    without = [name for name in style.FAMILIES if name not in drawn | {"other"}]
    if drawn == {"other"}:
        return
    if absent := [name for name in without if name not in measured]:
        yield f"No line, not among the measured variants: {', '.join(absent)}"
    if few := [name for name in without if name in measured]:
        yield f"No line, a number for fewer than two cases: {', '.join(few)}"
