"""How near a call comes to what its device can do at most: the roofline view.

A row's floor is the time that the least work of its variant takes at the ceilings of the run: the longer of
its arithmetic at the rate of a matrix product in the case's type, and its traffic at the rate of a copy.
Source: S. Williams, A. Waterman, D. Patterson, Roofline, CACM 52(4), 2009.
"""

from collections.abc import Callable, Iterator
from typing import Literal

from esbench.records import Measurement, Run, Work
from esbench.report import captions
from esbench.report.grid import LATENCY, TIMES, Grid, grids
from esbench.report.tables import Block, Cells, Section
from esbench.statistics import median, quantiles
from esbench.units import ABSENT, format_cell, format_value, quantity

_S = 1e9


def rate(run: Run, kind: Literal["copy", "matmul"], dtype: str) -> float | None:
    """A ceiling in bytes or flops per ns: its amount over the p20 of its samples, the best of several.

    What disturbs a ceiling only makes it slower, so the faster samples count; the fastest alone may be a slip
    of the timer. A matrix product counts for its own type only, TF32 (``tfloat32``) apart from float32; a
    copy for all. ``None`` where the run holds no such ceiling.
    """
    found = (
        ceiling.amount / spread.p20
        for ceiling in run.ceilings
        if ceiling.kind == kind and (kind == "copy" or ceiling.dtype == dtype)
        if (spread := quantiles(ceiling.samples)) and spread.p20 > 0
    )
    return max(found, default=None)


def floor_ns(run: Run, dtype: str, work: Work | None) -> float | None:
    """The least time of some work in ns, ``None`` without work or without the ceiling it needs."""
    if work is None:
        return None
    parts = [
        (work.flops, rate(run, "matmul", dtype)),
        (work.moved_bytes, rate(run, "copy", dtype)),
    ]
    times = [amount / per_ns if per_ns else None for amount, per_ns in parts if amount]
    known = [time for time in times if time is not None]
    return max(known) if known and len(known) == len(times) else None


def sections(run: Run, operator: str) -> list[Section]:
    """The roofline of each phase and method of an operator in which a row has a floor."""
    timed = (grid for grid in grids(run, operator, TIMES) if grid.metric == LATENCY)
    return [_section(grid) for grid in timed if any(_percent(run, row) for _, _, row in grid.cells)]


def _section(grid: Grid) -> Section:
    cells = Cells.of(grid)
    return Section(
        title=f"{grid.operator}, {grid.phase}: percent of the floor",
        origin=captions.origin(grid.run),
        conditions=captions.conditions(grid, grid.cases),
        blocks=tuple(_block(cells, metric) for metric in _VIEWS),
        footnotes=(*cells.notes(), *_ceilings(grid)),
    )


def _block(cells: Cells, metric: str) -> Block:
    view, note = _VIEWS[metric]
    frame = cells.frame(lambda _v, _c, row: format_cell(metric, view(cells.grid.run, row)))
    return Block(f"{captions.metric(metric)} ({quantity(metric).column.symbol})", note, frame)


def _ceilings(grid: Grid) -> Iterator[str]:
    copy, product = rate(grid.run, "copy", grid.dtype), rate(grid.run, "matmul", grid.dtype)
    found = [
        f"{name} {format_value(metric, per_ns * _S)}"
        for name, metric, per_ns in (
            ("copy", "bytes_per_s", copy),
            (f"matrix product in {grid.dtype}", "flops_per_s", product),
        )
        if per_ns
    ]
    yield f"ceilings of this device, by the p20 of their samples: {', '.join(found)}"
    yield f"{ABSENT}: the variant declares no least work, or its ceiling was not measured"


def _percent(run: Run, row: Measurement) -> float | None:
    floor, ns = floor_ns(run, row.case.dtype, row.work), median(row)
    return 100 * floor / ns if floor and ns else None


def _bandwidth(_: Run, row: Measurement) -> float | None:
    ns = median(row)
    return row.work.moved_bytes / ns * _S if row.work and ns else None


def _arithmetic(_: Run, row: Measurement) -> float | None:
    ns = median(row)
    return row.work.flops / ns * _S if row.work and ns else None


_VIEWS: dict[str, tuple[Callable[[Run, Measurement], float | None], str]] = {
    "floor_percent": (
        _percent,
        ": floor / median time, higher is better; what stays in a cache can beat it.",
    ),
    "achieved_bytes_per_s": (_bandwidth, ": least traffic of the variant / median time."),
    "achieved_flops_per_s": (_arithmetic, ": least arithmetic of the variant / median time."),
}
