"""How near a call comes to what its device can do at most: the roofline view.

A row's floor is the time that the least work of its variant takes at the ceilings of the run: the longer of
its arithmetic at the rate of a matrix product in the case's type, and its traffic at the rate of a copy.
Source: S. Williams, A. Waterman, D. Patterson, Roofline, CACM 52(4), 2009.
"""

from collections.abc import Callable, Iterator
from typing import Literal

from esbench.report import captions
from esbench.report.cells import Cell, Reading, Trace, one
from esbench.report.grid import LATENCY, TIMES, Grid, grids
from esbench.report.tables import Block, Cells, Section, reading
from esbench.schema import Case, Measurement, Run, Variant, Work
from esbench.stats import median, quantiles
from esbench.units import ABSENT, format_value, quantity

DISTURBED = "that ceiling was measured while something disturbed it, and floors by it are too high"

_S = 1e9
_WHOLE = 100.0


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
    return max(_least_ns(run, dtype, work).values(), default=None)


def beats_arithmetic(run: Run, row: Measurement) -> bool:
    """Whether a call did arithmetic faster than its ceiling, the matrix product: no cache explains that."""
    least, ns = _least_ns(run, row.case.dtype, row.work).get("matmul"), median(row)
    return bool(least and ns and least > ns)


def _least_ns(run: Run, dtype: str, work: Work | None) -> dict[str, float]:
    """The least times of arithmetic and of traffic, nothing where a ceiling that one needs is missing."""
    amounts = {"matmul": work.flops, "copy": work.moved_bytes} if work else {}
    rates = {"matmul": rate(run, "matmul", dtype), "copy": rate(run, "copy", dtype)}
    times = {kind: (amount, rates[kind]) for kind, amount in amounts.items() if amount}
    known = {kind: amount / per_ns for kind, (amount, per_ns) in times.items() if per_ns}
    return known if len(known) == len(times) else {}


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
        footnotes=(*cells.notes, *_ceilings(grid)),
        run_id=grid.run.header.run_id,
        apart=captions.apart(grid),
    )


def _block(cells: Cells, metric: str) -> Block:
    view, note = _VIEWS[metric]
    run = cells.grid.run

    def number(_variant: Variant, _case: Case, row: Measurement) -> Cell:
        value, time = view(run, row), reading(run, row)
        trace = Trace(run.header.run_id, f"{captions.metric(metric)}{note}", (row,))
        if not (value and time.value and time.low and time.high):
            return one(Reading(metric, value, trace))
        # Each is an amount over the time: its ends are those of the time, turned round.
        low, high = (value * time.value / end for end in (time.high, time.low))
        return one(Reading(metric, value, trace, low=low, high=high))

    symbol = quantity(metric).column.symbol
    return Block(f"{captions.metric(metric)} ({symbol})", note, cells.table(number))


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
    yield from _above(grid)
    yield f"{ABSENT}: the variant declares no least work, or its ceiling was not measured"


def _above(grid: Grid) -> Iterator[str]:
    """What it means that some rows are above 100 %: for arithmetic something else than for traffic."""
    above = [row for _, _, row in grid.cells if (_percent(grid.run, row) or 0.0) > _WHOLE]
    arithmetic = [row for row in above if beats_arithmetic(grid.run, row)]
    for rows, what in (
        (arithmetic, f"arithmetic above the ceiling of the matrix product: {DISTURBED}"),
        (
            [row for row in above if row not in arithmetic],
            "traffic above that of a copy: a cache held some of it",
        ),
    ):
        if rows:
            worst = max(_percent(grid.run, row) or 0.0 for row in rows)
            shown = format_value("floor_percent", worst)
            yield f"above 100 % in {len(rows)} of {len(grid.cells)} cells, at most {shown}, by {what}"


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
