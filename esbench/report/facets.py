"""Many lines in small panels that share their axes: a few lines each, with all others pale behind them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from esbench.records import Variant
from esbench.report.drawing import BLACK, FLOOR, PALE, Look, looks
from esbench.report.sheets import Sheet

CROSS = "×"  # noqa: RUF001  no letter: it looks like the mark that such lines end in
MOST = 6
"""More lines are no longer told apart."""
_INCHES = 1.15
_ALONE_INCHES = 1.9
_ACROSS = {"column": 2, "page": 3}
_SIDES, _BETWEEN = 0.40, 0.2
"""Inches that the labels of the first panel take, and those between two."""
_ROW = 0.08


@dataclass(frozen=True)
class Line:
    """A line of a variant: its points in the unit of the axis, and in short why it breaks off or has none."""

    variant: Variant
    points: tuple[tuple[float, float], ...]
    reason: str = ""

    @property
    def name(self) -> str:
        """What a key says of it."""
        return f"{self.variant.name} {CROSS}" if self.reason and self.points else self.variant.name


class Facet(NamedTuple):
    """A panel: the lines that it is about, those behind them, and the thick pale one of a floor."""

    title: str
    own: tuple[Line, ...]
    behind: tuple[Line, ...]
    floor: tuple[tuple[float, float], ...] = ()


def facets(lines: Sequence[Line], title: str = "", floor: Iterable[tuple[float, float]] = ()) -> list[Facet]:
    """Spread lines over panels: variants of a scheme stand together, the plain layer in each of them.

    A line without points has no place.
    """
    base = [line for line in lines if line.points and line.variant.mode == "base"]
    rest = [line for line in lines if line.points and line.variant.mode != "base"]
    groups: list[list[Line]] = []
    for family in _families(rest):
        for part in _parts(family):
            if groups and len(groups[-1]) + len(part) <= MOST:
                groups[-1] += part
            else:
                groups.append(part)
    floor = tuple(floor)
    found = [
        Facet(title, (*base, *group), tuple(one for one in rest if one not in group), floor)
        for group in groups
    ]
    return found or [Facet(title, tuple(base), (), floor)]


def draw(
    sheet: Sheet,
    shown: Sequence[Facet],
    scale: Callable[[Axes, float, float], None],
    labels: tuple[str, str],
    *,
    marked: bool = True,
) -> float:
    """Draw panels; return how many inches they need.

    Args:
        sheet: where.
        shown: at least one panel.
        scale: sets up the axes of a panel of so many inches in width and height.
        labels: of both axes.
        marked: whether points have marks; a line of one point has one anyway.

    """
    count = len(shown)
    columns = -(-count // -(-count // _ACROSS[sheet.paper.name]))
    width = (sheet.room - _SIDES - _BETWEEN * (columns - 1)) / columns
    height = _INCHES if count > 1 else _ALONE_INCHES
    inches = 0.0
    for place, (axes, facet) in enumerate(zip(sheet.panels(count, columns), shown, strict=True)):
        last = place + columns >= count
        scale(axes, width, height)
        sheet.key_below(axes, _draw_one(axes, facet, marked=marked), width, labelled=last)
        axes.set_title(facet.title)
        if last:
            axes.set_xlabel(labels[0])
        if place % columns == 0:
            axes.set_ylabel(labels[1])
            row = shown[place : place + columns]
            lines = max(len(one.own) + bool(one.floor) for one in row)
            inches += height + sheet.key_inches(lines, labelled=place + 2 * columns > count) + _ROW
            inches += sheet.title_inches if any(one.title for one in row) else 0.0
        else:
            axes.tick_params(axis="y", labelleft=False)
    return inches


def _draw_one(axes: Axes, facet: Facet, *, marked: bool) -> list[Artist]:
    for line in facet.behind:
        axes.plot(*_across(line.points), color=PALE, linewidth=0.6, zorder=1.5)
    handles: list[Artist] = []
    if facet.floor:
        (band,) = axes.plot(
            *_across(facet.floor), color=FLOOR, linewidth=3.5, alpha=0.45, solid_capstyle="butt", zorder=1.6
        )
        band.set_label("floor")
        handles.append(band)
    for line, look in zip(facet.own, _looks(facet.own), strict=True):
        shape = look.mark if marked or len(line.points) == 1 else "none"
        (drawn,) = axes.plot(*_across(line.points), color=look.color, linestyle=look.line, marker=shape)
        drawn.set_label(line.name)
        handles.append(drawn)
        if line.reason:
            x, y = line.points[-1]
            axes.plot(x, y, marker="x", markersize=7, markeredgewidth=1, color=BLACK, zorder=4, clip_on=False)
    return handles


def _looks(own: Sequence[Line]) -> list[Look]:
    plain = [line for line in own if line.variant.mode == "base"]
    return [*(Look(BLACK, "none", "-") for _ in plain), *looks(len(own) - len(plain))]


def _families(lines: Iterable[Line]) -> list[list[Line]]:
    """Lines by scheme, all baselines together."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault("" if line.variant.baseline else line.variant.scheme, []).append(line)
    return list(found.values())


def _parts(family: Sequence[Line]) -> list[list[Line]]:
    """A family in equal parts that have room in a panel."""
    count = -(-len(family) // MOST)
    edges = [len(family) * place // count for place in range(count + 1)]
    return [list(family[start:end]) for start, end in pairwise(edges)]


def _across(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
