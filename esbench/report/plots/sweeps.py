"""Time as a multiple of the plain layer's, or the share of members kept, over the population or the width."""

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
from esbench.schema import DENSE, QUALITY, Case, Skipped, Variant
from esbench.text import pluralize
from esbench.units import format_multiplier

_MIN_CASES = 3
"""Two show no trend, and are in the table."""
_MAX_LINES = 6
"""More lines cannot be distinguished."""
_ALL = 99.95
"""A share of the members, in percent, that counts as all of them."""
_ABOVE = 105.0
"""A larger share, in percent, is an arrow to the top: the estimate is better than of independent members."""


class Sweep(NamedTuple):
    """A field of a case that varies: the label of its axis, its value, and the case without it."""

    axis: str
    value: Callable[[Case], int]
    remove: Callable[[Case], Case | None]


def _remove_width(case: Case) -> Case | None:
    is_square = case.out_channels == case.in_channels
    return msgspec.structs.replace(case, out_channels=1, in_channels=1) if is_square else None


POPULATION = Sweep(
    "members", lambda case: case.members, lambda case: msgspec.structs.replace(case, members=1)
)
WIDTH = Sweep("channels in and out", lambda case: case.out_channels, _remove_width)


@dataclass(frozen=True)
class Line:
    """The line of a variant.

    Attributes:
        variant: the variant.
        points: positions on the x axis and values, sorted; a share is at most 100 %.
        reason: why a larger case has no value, or empty.
        label: its name in the plot, if it is not the variant's.
        end: the value at the largest case, infinite for an exact estimate, 0 if it is unknown.
    """

    variant: Variant
    points: tuple[tuple[float, float], ...]
    reason: str = ""
    label: str = ""
    end: float = 0.0

    @property
    def last(self) -> tuple[float, float]:
        """The last point."""
        return self.points[-1]

    @property
    def keeps_all(self) -> bool:
        """Whether all shares, in percent, are at least 100 when rounded to one decimal."""
        return min(y for _, y in self.points) >= _ALL


@style.use_style()
def sweep(grid: Grid, kind: Sweep, width: float = PAGE) -> Figure | None:
    """Draw times or shares of variants over the population or the width, in one panel with labeled lines.

    Times are multiples of the plain layer's, of the cheapest variant of each family. Of shares up to six
    lines are drawn, of which one stands for all schemes that keep all members; an arrow to the top stands for
    a scheme with more than 100 %, such as an exact estimate. Return ``None`` if fewer than three cases differ
    only in the population or width.
    """
    cases = longest_family(grid, kind)
    is_share = grid.phase == QUALITY
    all_lines = lines(grid, kind, cases)
    chosen = choose_shares(all_lines) if is_share else cheapest_of_each_family(all_lines)
    if not chosen:
        return None
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, 3.1 if width == PAGE else 2.6)
    positions = [kind.value(case) for case in cases]
    style.log_axis(axes, "y", [y for line in chosen for _, y in line.points])
    _scale_x(axes, positions, figure.panel_width)
    for line in chosen:
        look = style.family_look(line.variant.scheme)
        axes.plot(
            *zip(*line.points, strict=True),
            color=look.color,
            linestyle=look.line,
            marker=look.marker,
            markersize=4,
        )
    labels = [style.Label(*line.last, _label(line, positions[-1])) for line in chosen]
    if is_share and (above := max(all_lines, key=lambda line: line.end)).end > _ABOVE:
        top = axes.get_ylim()[1]
        style.arrow(
            axes, (positions[-1], 100), (positions[-1], top), style.family_look(above.variant.scheme).color
        )
        n_eff = Qualities(grid.run).law(above.variant, cases[-1]).effective
        share = percent_of_members(n_eff, cases[-1].members) if isinstance(n_eff, EffectiveSize) else ""
        labels.append(style.Label(positions[-1], top, f"{above.variant.name}: {share}"))
    style.label_ends(axes, labels, 0.33 * width)
    axes.set(xlabel=kind.axis, ylabel="members kept (%)" if is_share else "time(variant) / time(base)")
    ended = {line.variant.name: line.reason for line in chosen if line.reason}
    title = (
        share_finding(cases[-1], all_lines, chosen)
        if is_share
        else time_finding(cases[-1], grid, kind, chosen)
    )
    notes = list(
        _schemes_without_line(all_lines, chosen) if is_share else _families_without_line(grid, chosen)
    )
    figure.finish(
        f"{captions.invalid_note(grid.run)}{title}",
        style.origin(grid, cases),
        [*notes, *style.notes_by_reason(ended, "No number for a larger case")],
    )
    return figure


def longest_family(grid: Grid, kind: Sweep) -> list[Case]:
    """Return the largest set of cases that differ only in the population or width, sorted by it."""
    families: dict[Case, list[Case]] = {}
    for case in grid.cases:
        if (family := kind.remove(case)) is not None:
            families.setdefault(family, []).append(case)
    longest = max(families.values(), key=len, default=[])
    return sorted(longest, key=kind.value) if len(longest) >= _MIN_CASES else []


def lines(grid: Grid, kind: Sweep, cases: Sequence[Case]) -> list[Line]:
    """Return the lines of all variants but base and naive that have at least two points."""
    is_share = grid.phase == QUALITY
    value, most = (_share_reader(grid), 100.0) if is_share else (_multiplier_reader(grid), math.inf)
    all_lines = []
    for variant in grid.variants:
        values = [(kind.value(case), value(variant, case)) for case in cases]
        points = tuple((x, min(y, most)) for x, y in values if y and is_drawable(min(y, most)))
        if variant.baseline or len(points) < _MIN_CASES - 1:
            continue
        larger = [grid.at(variant, case) for case in cases if kind.value(case) > points[-1][0]]
        reasons = [style.missing_reason(row, 40) for row in larger if isinstance(row, Skipped)]
        all_lines.append(Line(variant, points, reasons[0] if reasons else "", end=values[-1][1] or 0.0))
    return all_lines


def _multiplier_reader(grid: Grid) -> Callable[[Variant, Case], float | None]:
    """Return a function that returns time(variant) / time(base)."""

    def read(variant: Variant, case: Case) -> float | None:
        ratio = grid.multiplier(variant, case, "base")
        return ratio.value if ratio else None

    return read


def _share_reader(grid: Grid) -> Callable[[Variant, Case], float | None]:
    """Return a function that returns n_eff / n in percent; a lower bound where only that is known."""
    qualities = Qualities(grid.run)

    def read(variant: Variant, case: Case) -> float | None:
        n_eff = qualities.law(variant, case).effective
        return 100 * n_eff.value / case.members if isinstance(n_eff, EffectiveSize) else None

    return read


def cheapest_of_each_family(all_lines: Iterable[Line]) -> list[Line]:
    """Return the line of each family that reaches furthest and ends lowest; Perturbed for dense noise.

    The lines are sorted in the same way.
    """
    best: dict[str, Line] = {}
    for line in sorted(all_lines, key=_furthest_and_lowest):
        best.setdefault(family(line.variant.scheme), line)
        if line.variant.name == DENSE:
            best["dense noise"] = line
    return sorted(best.values(), key=_furthest_and_lowest)


def _furthest_and_lowest(line: Line) -> tuple[float, float]:
    return -line.last[0], line.last[1]


def choose_shares(all_lines: Iterable[Line]) -> list[Line]:
    """Return the first variants of up to six schemes, most kept first; one line for all that keep all."""
    first_lines = _first_of_each_scheme(all_lines)
    keeping = [line for line in first_lines if line.keeps_all]
    losing = sorted((line for line in first_lines if not line.keeps_all), key=lambda line: -line.last[1])
    count = min(len(losing), _MAX_LINES - bool(keeping))
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


def _label(line: Line, largest: float) -> str:
    end = f" (to {line.last[0]:,.0f})" if line.last[0] < largest and not line.label else ""
    return f"{line.label or line.variant.name}{end}"


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


def time_finding(case: Case, grid: Grid, kind: Sweep, chosen: Sequence[Line]) -> str:
    """Return the title: the cheapest line at the largest case, and the last point of dense noise."""
    best = chosen[0]
    unit = "members" if kind is POPULATION else "channels"
    layer = captions.layer(case) if kind is POPULATION else grid.operator
    text = (
        f"{layer}, {grid.phase}: at {best.last[0]:,.0f} {unit} {best.variant.name} takes "
        f"{format_multiplier(best.last[1])} the time of the plain layer"
    )
    dense = next((line for line in chosen if line.variant.name == DENSE), best)
    if dense == best:
        return text
    at = "" if dense.last[0] == best.last[0] else f" (at {dense.last[0]:,.0f})"
    return f"{text}, dense noise {format_multiplier(dense.last[1])}{at}"


def _scale_x(axes: Axes, positions: Sequence[int], inches: float) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(positions[0] / 1.3, positions[-1] * 1.3)
    step = -(-len(positions) // max(2, int(inches / 0.55)))
    ticks = positions[(len(positions) - 1) % step :: step]  # the largest among them
    axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
    axes.xaxis.set_minor_locator(FixedLocator(positions))
    axes.xaxis.set_minor_formatter(NullFormatter())
