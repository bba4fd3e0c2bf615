"""Tables of the roofline: calls as a percentage of their bound, achieved bandwidth and arithmetic."""

from collections.abc import Callable, Iterator

from esbench.report import captions
from esbench.report.analysis.pivot import Grid, latency_grids
from esbench.report.analysis.roofline import DISTURBED, exceeds_matmul_peak, percent_of_bound, rate
from esbench.report.tables.measured import GridTable, grid_section, median_number
from esbench.report.tables.table import Block, Cell, CellNumber, Section, number_cell
from esbench.schema import Case, Measurement, Run, Variant, Work
from esbench.stats import median
from esbench.units import ABSENT, format_value

_NS_PER_S = 1e9
_WHOLE = 100.0
_BY_ARITHMETIC = f"arithmetic above the peak of the matrix product: {DISTURBED}"
_BY_TRAFFIC = "traffic above the rate of a copy: some data came from a cache"


def sections(run: Run, operator: str) -> list[Section]:
    """Return the roofline of each phase and method of an operator in which a row has a bound."""
    timed = latency_grids(run, operator)
    return [_section(grid) for grid in timed if any(percent_of_bound(run, row) for _, _, row in grid.cells)]


def _section(grid: Grid) -> Section:
    filler = GridTable(grid, grid.variants, grid.cases)
    blocks = [_block(filler, metric) for metric in _VIEWS]
    return grid_section(grid, "percent of the roofline bound", blocks, [*filler.notes, *_notes(grid)])


def _block(filler: GridTable, metric: str) -> Block:
    view, note = _VIEWS[metric]
    run = filler.grid.run

    def cell(_variant: Variant, _case: Case, row: Measurement) -> Cell:
        value, time = view(run, row), median_number(row)
        if not (value and time.value and time.low and time.high):
            return number_cell(CellNumber(metric, value, (row,)))
        # The value is an amount divided by the time, so the longest time gives its lower end.
        low, high = (value * time.value / end for end in (time.high, time.low))
        return number_cell(CellNumber(metric, value, (row,), low, high))

    return Block(captions.with_unit(captions.metric(metric), metric), note, filler.table(cell))


def _notes(grid: Grid) -> Iterator[str]:
    """Yield the device's peaks, how many cells exceed 100 %, and what an absent value means."""
    copy_per_ns, product_per_ns = rate(grid.run, "copy", grid.dtype), rate(grid.run, "matmul", grid.dtype)
    peaks = [f"copy {format_value('bytes_per_s', copy_per_ns * _NS_PER_S)}"] if copy_per_ns else []
    if product_per_ns:
        peaks += [f"matrix product in {grid.dtype} {format_value('flops_per_s', product_per_ns * _NS_PER_S)}"]
    yield f"device peaks, by the p20 of their samples: {', '.join(peaks)}"
    yield from _above(grid)
    yield f"{ABSENT}: the variant declares no minimum work, or the peak was not measured"


def _above(grid: Grid) -> Iterator[str]:
    """Yield a note on the rows above 100 % by arithmetic, and one on those by traffic."""
    rows = [(row, percent_of_bound(grid.run, row) or 0.0) for _, _, row in grid.cells]
    above = [(percent, exceeds_matmul_peak(grid.run, row)) for row, percent in rows if percent > _WHOLE]
    for cause, is_arithmetic in ((_BY_ARITHMETIC, True), (_BY_TRAFFIC, False)):
        if percents := [percent for percent, by_arithmetic in above if by_arithmetic == is_arithmetic]:
            worst = format_value("floor_percent", max(percents))
            yield f"above 100 % in {len(percents)} of {len(grid.cells)} cells, at most {worst}, by {cause}"


def _per_second(amount: Callable[[Work], float]) -> Callable[[Run, Measurement], float | None]:
    def value(_: Run, row: Measurement) -> float | None:
        ns = median(row)
        return amount(row.work) / ns * _NS_PER_S if row.work and ns else None

    return value


_VIEWS: dict[str, tuple[Callable[[Run, Measurement], float | None], str]] = {
    "floor_percent": (
        percent_of_bound,
        ": bound / median time, higher is better; data that stays in a cache can beat it.",
    ),
    "achieved_bytes_per_s": (
        _per_second(lambda work: work.moved_bytes),
        ": minimum traffic of the variant / median time.",
    ),
    "achieved_flops_per_s": (
        _per_second(lambda work: work.flops),
        ": minimum arithmetic of the variant / median time.",
    ),
}
