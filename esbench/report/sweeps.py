"""The pictures of sweeps: time and memory against the population and against the width."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter

from esbench.records import QUALITY, Case, Measurement, Skipped
from esbench.report import captions, roofline
from esbench.report.drawing import PAGE, Paper, drawable, plain_ticks, styled
from esbench.report.facets import CROSS, Line, draw, facets
from esbench.report.grid import PEAK, Grid
from esbench.report.sheets import Sheet, by_reason, origin, short, titled
from esbench.statistics import median
from esbench.units import quantity

_FEWEST = 3
"""Two points tell no shape: they stand in the table."""
_MARGIN = 1.3
_PANELS = 24
"""More are no picture."""
_SHORT, _LONG = 28, 60
"""Characters of a reason: of one that others share, and of one beside whose names there is room."""
_TICK_INCHES = 0.4
"""The width of a number below an axis."""


class Sweep(NamedTuple):
    """A field that grows while the rest of a case stays: its name, its value, and what stays."""

    name: str
    axis: str
    value: Callable[[Case], int]
    rest: Callable[[Case], Case | None]
    heading: Callable[[Case], str]


def _without_width(case: Case) -> Case | None:
    if case.out_channels != case.in_channels:
        return None
    return msgspec.structs.replace(case, out_channels=1, in_channels=1)


def _beside_width(case: Case) -> str:
    space = [f"kernel {case.kernel_size}, input {case.input_size}"] if case.kernel_size else []
    return ", ".join([f"{case.members} members", *space])


POPULATION = Sweep(
    "population",
    "members",
    lambda case: case.members,
    lambda case: msgspec.structs.replace(case, members=1),
    lambda case: case.shape,
)
WIDTH_OF_LAYER = Sweep(
    "width", "channels in and out", lambda case: case.out_channels, _without_width, _beside_width
)
SWEEPS = (POPULATION, WIDTH_OF_LAYER)


def against(grid: Grid, sweep: Sweep, paper: Paper = PAGE) -> Sheet | None:
    """Time or peak memory against what a sweep lets grow, for each family of cases.

    A line that breaks off because a larger case has no number ends in a cross, and the key says why; so does
    it of variants without any number. The floor of the plain layer is the least time of its work at the
    ceilings of the run, or the bytes of what it returns. ``None`` where nothing grows.
    """
    families = _families(grid, sweep)
    lines = [_lines(grid, sweep, family) for family in families]
    floors = [_floor(grid, sweep, family) for family in families]
    values = [y for family in lines for line in family for _, y in line.points]
    if not values:
        return None
    values += [y for floor in floors for _, y in floor]
    name = captions.short_metric(grid.metric)
    what = name if grid.phase == QUALITY else f"{name} of the {grid.phase}"
    with styled(paper):
        sheet = Sheet(paper)
        several = len(families) > 1
        every = [
            facet
            for family, found, floor in zip(families, lines, floors, strict=True)
            for facet in facets(found, sweep.heading(family[0]) if several else "", floor)
        ]
        shown = every[:_PANELS]
        ends = min(values) / _MARGIN, max(values) * _MARGIN
        xs = sorted({sweep.value(case) for family in families for case in family})

        def scale(axes: Axes, width: float, height: float) -> None:
            _scale(axes, xs, ends, width, height)

        unit = quantity(grid.metric).column.symbol
        body = draw(sheet, shown, scale, (sweep.axis, unit))
        alone = "" if several else f", {sweep.heading(families[0][0])}"
        cases = [case for family in families for case in family]
        notes = [_floor_words(grid)] if any(floors) else []
        notes += _ends([line for family in lines for line in family])
        if len(shown) < len(every):
            notes.append(f"{len(shown)} of {len(every)} panels: the table has all")
        title = titled(grid, f"{grid.operator}{alone}: {what} against the {sweep.name}")
        sheet.finish(body, title, origin(grid, cases), notes)
    return sheet


def _families(grid: Grid, sweep: Sweep) -> list[list[Case]]:
    """Cases that differ in nothing but what grows, the smallest first, where there are three of them."""
    families: dict[Case, list[Case]] = {}
    for case in grid.cases:
        if (rest := sweep.rest(case)) is not None:
            families.setdefault(rest, []).append(case)
    return [sorted(family, key=sweep.value) for family in families.values() if len(family) >= _FEWEST]


def _lines(grid: Grid, sweep: Sweep, family: list[Case]) -> list[Line]:
    size = quantity(grid.metric).column.size
    found = []
    for variant in grid.variants:
        rows = [(sweep.value(case), grid.at(variant, case)) for case in family]
        points = tuple(
            (x, value / size)
            for x, row in rows
            if isinstance(row, Measurement) and (value := median(row)) and drawable(value)
        )
        last, room = (points[-1][0], _SHORT) if points else (0, _LONG)
        reasons = [short(row, room) for x, row in rows if isinstance(row, Skipped) and x > last]
        # Of quality the plain layer has none by its nature: there is nothing to say.
        said = points or (reasons and (grid.phase != QUALITY or variant.mode == "batched"))
        if said:
            found.append(Line(variant, points, reasons[0] if reasons else ""))
    return found


def _floor(grid: Grid, sweep: Sweep, family: list[Case]) -> list[tuple[float, float]]:
    """The least that the plain layer takes: time of its work, or bytes of what it returns."""
    size = quantity(grid.metric).column.size
    points: list[tuple[float, float]] = []
    for case in family:
        work = grid.base_work(case)
        if grid.metric == PEAK:
            least = work.output_bytes if work else None
        else:
            least = roofline.floor_ns(grid.run, case.dtype, work)
        points += [(sweep.value(case), least / size)] if least and drawable(least) else []
    return points


def _scale(axes: Axes, xs: Sequence[int], ends: tuple[float, float], width: float, height: float) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(xs[0] / _MARGIN, xs[-1] * _MARGIN)
    axes.set_ylim(*ends)
    every = math.ceil(len(xs) / max(2, int(width / _TICK_INCHES)))
    ticks = xs[(len(xs) - 1) % every :: every]  # the largest has its tick
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.xaxis.set_minor_locator(FixedLocator(xs))
    axes.xaxis.set_minor_formatter(NullFormatter())
    plain_ticks(axes.yaxis, height)


def _ends(lines: Sequence[Line]) -> list[str]:
    """Why lines break off: the reason alone where all that do share it; and who has no number at all."""
    ended = {line.variant.name: line.reason for line in lines if line.points and line.reason}
    words = f"{CROSS}: a larger one has no number"
    shared = len(set(ended.values())) == 1
    notes = [f"{words}, {next(iter(ended.values()))}"] if shared else by_reason(ended, words)
    return notes + by_reason({line.variant.name: line.reason for line in lines if not line.points})


def _floor_words(grid: Grid) -> str:
    """What the floor is, and where lines that beat its arithmetic show that it is too high."""
    if grid.metric == PEAK:
        return "Floor: bytes of what the plain layer returns"
    faster = any(roofline.beats_arithmetic(grid.run, row) for _, _, row in grid.cells)
    too_high = f"; too high, arithmetic beats it: {roofline.DISTURBED}" if faster else ""
    return f"Floor: the plain layer's least work at the device's ceilings{too_high}"
