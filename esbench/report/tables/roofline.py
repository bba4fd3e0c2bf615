"""Tables of the roofline: calls as a percentage of their bound, achieved bandwidth and arithmetic."""

from collections.abc import Callable, Iterator

from esbench.report import captions
from esbench.report.analysis.pivot import LATENCY, TIMES, Grid, Trace, grids
from esbench.report.analysis.roofline import DISTURBED, beats_arithmetic, bound_ns, rate
from esbench.report.tables.measured import GridTable, median_number
from esbench.report.tables.table import Block, Cell, CellNumber, Section, number_cell
from esbench.schema import Case, Measurement, Run, Variant
from esbench.stats import median
from esbench.units import ABSENT, format_value, quantity

_S = 1e9
_WHOLE = 100.0


def sections(run: Run, operator: str) -> list[Section]:
    """The roofline of each phase and method of an operator in which a row has a bound."""
    timed = (grid for grid in grids(run, operator, TIMES) if grid.metric == LATENCY)
    return [_section(grid) for grid in timed if any(_percent(run, row) for _, _, row in grid.cells)]


def _section(grid: Grid) -> Section:
    filled = GridTable.of(grid)
    return Section(
        title=f"{grid.operator}, {grid.phase}: percent of the roofline bound",
        origin=captions.origin(grid.run),
        conditions=captions.conditions(grid, grid.cases),
        blocks=tuple(_block(filled, metric) for metric in _VIEWS),
        footnotes=(*filled.notes, *_peaks(grid)),
        run_id=grid.run.header.run_id,
        apart=captions.apart(grid),
    )


def _block(filled: GridTable, metric: str) -> Block:
    view, note = _VIEWS[metric]
    run = filled.grid.run

    def cell(_variant: Variant, _case: Case, row: Measurement) -> Cell:
        value, time = view(run, row), median_number(run, row)
        trace = Trace(run.header.run_id, f"{captions.metric(metric)}{note}", (row,))
        if not (value and time.value and time.low and time.high):
            return number_cell(CellNumber(metric, value, trace))
        # Each is an amount over the time: its lower end is that of the longest time.
        low, high = (value * time.value / end for end in (time.high, time.low))
        return number_cell(CellNumber(metric, value, trace, low=low, high=high))

    symbol = quantity(metric).column.symbol
    return Block(f"{captions.metric(metric)} ({symbol})", note, filled.table(cell))


def _peaks(grid: Grid) -> Iterator[str]:
    copy, product = rate(grid.run, "copy", grid.dtype), rate(grid.run, "matmul", grid.dtype)
    found = [
        f"{name} {format_value(metric, per_ns * _S)}"
        for name, metric, per_ns in (
            ("copy", "bytes_per_s", copy),
            (f"matrix product in {grid.dtype}", "flops_per_s", product),
        )
        if per_ns
    ]
    yield f"device peaks, by the p20 of their samples: {', '.join(found)}"
    yield from _above(grid)
    yield f"{ABSENT}: the variant declares no minimum work, or the peak was not measured"


def _above(grid: Grid) -> Iterator[str]:
    """Notes on rows above 100 %, by arithmetic and by traffic."""
    above = [row for _, _, row in grid.cells if (_percent(grid.run, row) or 0.0) > _WHOLE]
    arithmetic = [row for row in above if beats_arithmetic(grid.run, row)]
    for rows, what in (
        (arithmetic, f"arithmetic above the peak of the matrix product: {DISTURBED}"),
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
    bound, ns = bound_ns(run, row.case.dtype, row.work), median(row)
    return 100 * bound / ns if bound and ns else None


def _bandwidth(_: Run, row: Measurement) -> float | None:
    ns = median(row)
    return row.work.moved_bytes / ns * _S if row.work and ns else None


def _arithmetic(_: Run, row: Measurement) -> float | None:
    ns = median(row)
    return row.work.flops / ns * _S if row.work and ns else None


_VIEWS: dict[str, tuple[Callable[[Run, Measurement], float | None], str]] = {
    "floor_percent": (
        _percent,
        ": bound / median time, higher is better; what stays in a cache can beat it.",
    ),
    "achieved_bytes_per_s": (_bandwidth, ": minimum traffic of the variant / median time."),
    "achieved_flops_per_s": (_arithmetic, ": minimum arithmetic of the variant / median time."),
}
