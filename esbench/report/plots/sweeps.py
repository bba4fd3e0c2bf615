"""Time as a multiple of the plain layer's, or the share of members kept, over the population or the width."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter

from esbench.report import captions
from esbench.report.analysis.pivot import Grid, quality_grids
from esbench.report.analysis.quality import EFFECTIVE, LINEAR, EffectiveSize, Qualities
from esbench.report.plots import style
from esbench.report.plots.style import PAGE, Figure, drawable
from esbench.schema import DENSE, QUALITY, Case, Measurement, Row, Run, Skipped, Variant
from esbench.stats import median
from esbench.text import pluralize
from esbench.units import format_multiplier, format_number

SHARE = "kept_percent"
"""The effective population as a percentage of all members."""
_FEWEST = 3
"""Points of a line: two show no trend, and are in the table."""
_LINES = 6
"""More lines cannot be told apart."""
_ALL = 99.95
"""A share of the members, in percent, that is drawn as all of them."""


class Sweep(NamedTuple):
    """A field of a case that varies: its name, its axis, its value, and the rest of the case."""

    name: str
    axis: str
    value: Callable[[Case], int]
    rest: Callable[[Case], Case | None]


def _without_width(case: Case) -> Case | None:
    square = case.out_channels == case.in_channels
    return msgspec.structs.replace(case, out_channels=1, in_channels=1) if square else None


POPULATION = Sweep(
    "population", "members", lambda case: case.members, lambda case: msgspec.structs.replace(case, members=1)
)
WIDTH = Sweep("width", "channels in and out", lambda case: case.out_channels, _without_width)


@dataclass(frozen=True)
class Line:
    """The points of a variant, and why a larger case has no number."""

    variant: Variant
    points: tuple[tuple[float, float], ...]
    reason: str = ""
    label: str = ""

    @property
    def last(self) -> float:
        """The value at the largest case."""
        return self.points[-1][1]


@style.styled()
def sweep(grid: Grid, kind: Sweep, width: float = PAGE) -> Figure | None:
    """Draw times or shares of variants over the population or the width, in one panel with labelled lines.

    Times are multiples of the plain layer's, of the cheapest variant of each family. Shares are those of up
    to six schemes; the schemes that keep all members are one line. ``None`` if fewer than three cases differ
    only in the population or width.
    """
    cases = longest_family(grid, kind)
    every = lines(grid, kind, cases)
    chosen = kept_lines(every) if grid.phase == QUALITY else cheapest_of_each_family(every)
    if not chosen:
        return None
    figure = Figure(width)
    (axes,) = figure.panels(1, 1, 2.8 if width == PAGE else 2.3)
    xs = [kind.value(case) for case in cases]
    style.log_axis(axes, "y", [y for line in chosen for _, y in line.points])
    _scale(axes, xs, figure.panel_width)
    for line in chosen:
        look = style.family_look(line.variant.scheme)
        axes.plot(
            *zip(*line.points, strict=True),
            color=look.color,
            linestyle=look.line,
            marker=look.marker,
            markersize=4,
        )
    labels = [style.Label(*line.points[-1], line.label or line.variant.name) for line in chosen]
    style.label_ends(axes, labels, 0.3 * width)
    is_share = grid.phase == QUALITY
    axes.set(xlabel=kind.axis, ylabel="members kept (%)" if is_share else "time(variant) / time(base)")
    ended = {line.variant.name: line.reason for line in chosen if line.reason}
    figure.finish(
        f"{captions.invalid(grid.run)}{_finding(grid, kind, cases, chosen)}",
        style.origin(grid, cases),
        style.by_reason(ended, "No number for a larger case"),
    )
    return figure


def longest_family(grid: Grid, kind: Sweep) -> list[Case]:
    """Return the largest set of cases that differ only in the population or width, sorted by it."""
    families: dict[Case, list[Case]] = {}
    for case in grid.cases:
        if (rest := kind.rest(case)) is not None:
            families.setdefault(rest, []).append(case)
    longest = max(families.values(), key=len, default=[])
    return sorted(longest, key=kind.value) if len(longest) >= _FEWEST else []


def lines(grid: Grid, kind: Sweep, cases: Sequence[Case]) -> list[Line]:
    """Return the lines of all variants but base and naive that have at least two points."""
    all_lines = []
    for variant in grid.variants:
        values = [(kind.value(case), _value(grid, variant, case)) for case in cases]
        points = tuple((x, y) for x, y in values if y and drawable(y))
        if variant.baseline or len(points) < _FEWEST - 1:
            continue
        later = [grid.at(variant, case) for case in cases if kind.value(case) > points[-1][0]]
        reasons = [style.reason_of(row, 40) for row in later if isinstance(row, Skipped)]
        all_lines.append(Line(variant, points, reasons[0] if reasons else ""))
    return all_lines


def cheapest_of_each_family(all_lines: Iterable[Line]) -> list[Line]:
    """Return each family's line that reaches furthest and ends lowest; for dense noise, Perturbed."""
    best: dict[str, Line] = {}
    for line in sorted(all_lines, key=lambda line: (-line.points[-1][0], line.last)):
        best.setdefault(style.family(line.variant.scheme), line)
        if line.variant.name == DENSE:
            best["dense noise"] = line
    return sorted(best.values(), key=lambda line: line.last)


def kept_lines(all_lines: Sequence[Line]) -> list[Line]:
    """Return one line for the schemes that keep all members, and up to five others, most kept first."""
    schemes: dict[str, Line] = {}
    for line in sorted(all_lines, key=lambda line: -line.last):
        schemes.setdefault(line.variant.scheme, line)
    all_kept = [line for line in schemes.values() if min(y for _, y in line.points) >= _ALL]
    rest = [line for line in schemes.values() if line not in all_kept]
    count = min(len(rest), _LINES - bool(all_kept))
    picked = [rest[round(place * (len(rest) - 1) / max(1, count - 1))] for place in range(count)]
    if not all_kept:
        return picked
    first = next((line for line in all_kept if line.variant.name == DENSE), all_kept[0])
    also_kept = f" and {pluralize(len(all_kept) - 1, 'other scheme')}" if len(all_kept) > 1 else ""
    return [replace(first, label=f"{first.variant.name}{also_kept}"), *picked]


def share_grids(run: Run, operator: str) -> list[Grid]:
    """Return grids of the effective population as a percentage of all members, for :func:`sweep`."""
    qualities = Qualities(run)
    rows = tuple(share for row in run.rows if (share := _share(row, qualities)))
    return quality_grids(msgspec.structs.replace(run, rows=rows), operator, SHARE, LINEAR)


def _share(row: Row, qualities: Qualities) -> Row | None:
    if isinstance(row, Skipped):
        return row if row.phase in {None, QUALITY} else None
    if (row.phase, row.metric, row.method) != (QUALITY, EFFECTIVE, LINEAR):
        return None
    n_eff = qualities.law(row.variant, row.case).effective
    if not isinstance(n_eff, EffectiveSize) or n_eff.is_exact:
        return None
    return msgspec.structs.replace(row, metric=SHARE, samples=((100 * n_eff.value / row.case.members,),))


def _value(grid: Grid, variant: Variant, case: Case) -> float | None:
    if grid.phase != QUALITY:
        ratio = grid.multiplier(variant, case, "base")
        return ratio.value if ratio else None
    row = grid.at(variant, case)
    return median(row) if isinstance(row, Measurement) else None


def _finding(grid: Grid, kind: Sweep, cases: Sequence[Case], chosen: Sequence[Line]) -> str:
    first, last = (f"{kind.value(case):,}" for case in (cases[0], cases[-1]))
    unit = "members" if kind is POPULATION else "channels"
    if grid.phase == QUALITY:
        worst = min(chosen, key=lambda line: line.last)
        start, end = (format_number(y) for _, y in (worst.points[0], worst.points[-1]))
        return (
            f"{grid.operator}: {worst.variant.name} keeps {start} % of {first} {unit}, and {end} % of {last}"
        )
    best = chosen[0]
    dense = next((line for line in chosen if line.variant.name == DENSE), None)
    times, name = format_multiplier(best.last), best.variant.name
    text = f"{grid.operator}, {grid.phase}: at {last} {unit} {name} takes {times} the time of the plain layer"
    if dense is None or dense == best:
        return text
    at = "" if dense.points[-1][0] == best.points[-1][0] else f" (at {dense.points[-1][0]:,.0f})"
    return f"{text}, dense noise {format_multiplier(dense.last)}{at}"


def _scale(axes: Axes, xs: Sequence[int], inches: float) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(xs[0] / 1.3, xs[-1] * 1.3)
    every = -(-len(xs) // max(2, int(inches / 0.5)))
    ticks = xs[(len(xs) - 1) % every :: every]  # the largest among them
    axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
    axes.xaxis.set_minor_locator(FixedLocator(xs))
    axes.xaxis.set_minor_formatter(NullFormatter())
