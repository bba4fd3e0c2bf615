"""The picture of the roofline: what calls do in a second, against how much of it they do on each byte.

Source: S. Williams, A. Waterman, D. Patterson, Roofline, CACM 52(4), 2009.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from matplotlib.axes import Axes

from esbench.records import Case, Measurement, Variant
from esbench.report import roofline
from esbench.report.drawing import (
    BLACK,
    FLOOR,
    PAGE,
    Look,
    Paper,
    drawable,
    plain_ticks,
    scheme_looks,
    styled,
)
from esbench.report.grid import Grid, headings
from esbench.report.lettering import fit
from esbench.report.sheets import Sheet, by_reason, mark, origin, short, titled
from esbench.statistics import median
from esbench.units import Unit, quantity

_PANELS = 6
_INCHES = {"column": 1.9, "page": 2.4}
_MARGIN = 1.6
_NS = 1e9
_BASE, _BASE_SIZE = Look(BLACK, "o", "-"), 5


class Call(NamedTuple):
    """A variant below the roof: flops on each byte, and flops in a ns."""

    variant: Variant
    intensity: float
    rate: float


def calls(grid: Grid, case: Case) -> list[Call]:
    """The calls of a case that declare arithmetic and traffic and have a time."""
    found = []
    for variant in grid.variants:
        row = grid.at(variant, case)
        if not isinstance(row, Measurement) or row.work is None:
            continue
        work, ns = row.work, median(row)
        if ns and drawable(ns, work.flops, work.moved_bytes):
            found.append(Call(variant, work.flops / work.moved_bytes, work.flops / ns))
    return found


def roofs(grid: Grid, paper: Paper = PAGE) -> Sheet | None:
    """The arithmetic that calls achieve, and the device's measured ceilings.

    A panel for each shape, with its largest population. The roof is the rate of a matrix product in the
    grid's number format, and left of the ridge that of a copy; both as measured at the start of the run:
    what stays in caches may lie above the slope. ``None`` where a ceiling or everybody's work is unknown.
    """
    copy = roofline.rate(grid.run, "copy", grid.dtype)
    product = roofline.rate(grid.run, "matmul", grid.dtype)
    cases = [case for case in _largest(grid) if calls(grid, case)]
    if not copy or not product or not cases:
        return None
    shown = cases[: _PANELS if paper is PAGE else _PANELS // 2]
    panels = [calls(grid, case) for case in shown]
    looks = scheme_looks(
        call.variant.scheme for panel in panels for call in panel if call.variant.mode != "base"
    )
    few = [f"{len(shown)} of {len(cases)} shapes: the table has all"] if len(shown) < len(cases) else []
    with styled(paper):
        sheet = Sheet(paper)
        columns = min(len(shown), 2 if paper is PAGE else 1)
        width, height = sheet.room / columns - 0.5, _INCHES[paper.name]
        every = sheet.panels(len(shown), columns)
        for axes, panel, name in zip(every, panels, headings(shown), strict=True):
            _scale(axes, [call for found in panels for call in found], (copy, product), width, height)
            _draw(axes, panel, (copy, product), looks)
            axes.set_title(fit(name, width, paper.small))
        rows = -(-len(shown) // columns)
        body = rows * (height + sheet.key_inches(0) + sheet.title_inches + 0.05)
        sheet.finish(
            body,
            titled(grid, f"{grid.operator}: roofline of the {grid.phase}"),
            origin(grid, shown),
            [*_notes(grid, shown, panels, copy), *few],
            [
                *(mark(look, scheme) for scheme, look in looks.items()),
                mark(_BASE, "Base", _BASE_SIZE),
            ],
        )
    return sheet


def _largest(grid: Grid) -> list[Case]:
    """Of the cases that differ in nothing but the number of members, the largest that anything could do."""
    families: dict[Case, list[Case]] = {}
    for case in grid.cases:
        if calls(grid, case):
            families.setdefault(msgspec.structs.replace(case, members=1), []).append(case)

    def worth(case: Case) -> tuple[int, int]:
        return len(calls(grid, case)), case.members

    return [max(family, key=worth) for family in families.values()]


def _scale(
    axes: Axes, found: Sequence[Call], ceilings: tuple[float, float], width: float, height: float
) -> None:
    copy, product = ceilings
    ridge, unit = product / copy, _unit(product)
    size = _NS / unit.size
    xs, ys = [call.intensity for call in found], [call.rate * size for call in found]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(ridge, *xs) / _MARGIN, max(ridge, *xs) * _MARGIN)
    axes.set_ylim(min(product * size, *ys) / _MARGIN, max(product * size, *ys) * _MARGIN)
    plain_ticks(axes.xaxis, width, 0.25)
    plain_ticks(axes.yaxis, height)
    axes.set_xlabel("arithmetic intensity: least flops / least bytes")
    axes.set_ylabel(unit.symbol)


def _unit(product: float) -> Unit:
    """The unit that the roof is said in."""
    ladder = quantity("flops_per_s").ladder
    return next((unit for unit in reversed(ladder) if unit.size <= product * _NS), ladder[0])


def _draw(axes: Axes, panel: Sequence[Call], ceilings: tuple[float, float], looks: dict[str, Look]) -> None:
    copy, product = ceilings
    size = _NS / _unit(product).size
    left, right = axes.get_xlim()
    roof = [left, product / copy, right]
    axes.plot(roof, [min(product, copy * x) * size for x in roof], color=FLOOR, linewidth=1.6, zorder=1.6)
    for call in panel:
        plain = call.variant.mode == "base"
        look = _BASE if plain else looks[call.variant.scheme]
        axes.plot(
            call.intensity,
            call.rate * size,
            linestyle="none",
            marker=look.mark,
            markersize=_BASE_SIZE if plain else 4,
            color=look.color,
            markerfacecolor=look.face,
            markeredgewidth=0.7,
            zorder=3 if plain else 2,
        )


def _notes(grid: Grid, shown: Sequence[Case], panels: Sequence[Sequence[Call]], copy: float) -> list[str]:
    notes = ["Grey: the roof, a copy's bytes in a second on the left, a matrix product's flops on the right"]
    above = [row for _, case, row in grid.cells if case in shown and roofline.beats_arithmetic(grid.run, row)]
    notes += [f"Above the roof: {roofline.DISTURBED}"] if above else []
    cached = any(call.rate > copy * call.intensity for panel in panels for call in panel)
    notes += (
        ["Above the slope: what stays in caches moves faster than the copy"] if cached and not above else []
    )
    placed = {call.variant for panel in panels for call in panel}
    reasons = {}
    for variant in grid.variants:
        if variant not in placed:
            rows = [grid.at(variant, case) for case in shown]
            measured = any(isinstance(row, Measurement) for row in rows)
            reasons[variant.name] = "no arithmetic declared" if measured else short(rows[0], 60)
    return [*notes, *by_reason(reasons)]
