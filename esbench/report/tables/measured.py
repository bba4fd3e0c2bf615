"""Tables of measured times and memory, and of their multiples of base and naive."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from esbench.report import captions
from esbench.report.analysis import pivot
from esbench.report.analysis.pivot import HOST, LARGEST, LATENCY, MEMORY, PEAK, TIMES, Grid, grids, headings
from esbench.report.captions import sample_warnings
from esbench.report.tables.table import (
    EMPTY,
    EMPTY_NOTE,
    MEMORY_MULTIPLIER,
    SPEED_MULTIPLIER,
    TIME_MULTIPLIER,
    Block,
    Cell,
    CellNumber,
    Footnotes,
    Section,
    Table,
    number_cell,
)
from esbench.schema import Case, Measurement, Mode, Phase, Run, Variant
from esbench.stats import Ratio, interval, median, round_medians
from esbench.units import format_value, quantity


@dataclass(frozen=True)
class Multiplier:
    """A ratio to a baseline: the mode of the baseline, the metric's name, a title, and its formula."""

    mode: Mode
    name: str
    title: str
    formula: str


SPEED = Multiplier(
    "naive", SPEED_MULTIPLIER, "Speed multiplier vs. naive", "time(naive) / time(variant), higher is better"
)
TIME = Multiplier(
    "base", TIME_MULTIPLIER, "Time multiplier vs. base", "time(variant) / time(base), lower is better"
)
BYTES = Multiplier(
    "base", MEMORY_MULTIPLIER, "Memory multiplier vs. base", "bytes(variant) / bytes(base), lower is better"
)


@dataclass
class GridTable:
    """Fills tables of a grid, with footnotes for cells without a number."""

    grid: Grid
    variants: tuple[Variant, ...]
    cases: tuple[Case, ...]
    notes: Footnotes = field(default_factory=Footnotes)

    def table(self, cell: Callable[[Variant, Case, Measurement], Cell]) -> Table:
        """Return the table with ``cell`` of each measured row, and reasons in the other cells."""
        return Table(
            corner=self.grid.operator,
            headings=tuple(headings(self.cases)),
            labels=tuple(variant.label(self.grid.operator) for variant in self.variants),
            cells=tuple(
                tuple(self._cell(variant, case, cell) for case in self.cases) for variant in self.variants
            ),
        )

    def _cell(self, variant: Variant, case: Case, cell: Callable[[Variant, Case, Measurement], Cell]) -> Cell:
        row = self.grid.at(variant, case)
        if row is None:
            return self.notes.missing_cell()
        if isinstance(row, Measurement):
            if not any(row.samples):
                return Cell(self.notes.mark(EMPTY, EMPTY_NOTE))
            return cell(variant, case, row)
        largest = self.grid.largest.get((variant, case))
        if largest is None:
            return self.notes.skipped_cell(row)
        # A search that ran out of its budget has not tried larger populations.
        bound = "at least " if largest.stop == "budget" else ""
        return self.notes.skipped_cell(row, f", {bound}{format_value(LARGEST, median(largest))} fit")


def median_number(row: Measurement) -> CellNumber:
    """Return the median of a row with the interval of its rounds."""
    ends = interval(round_medians(row))
    low, high = (ends.low, ends.high) if ends else (None, None)
    return CellNumber(row.metric, median(row), (row,), low, high)


def multiple(grid: Grid, variant: Variant, case: Case, multiplier: Multiplier) -> CellNumber | None:
    """Return a row as a multiple of its baseline, None if one of the two has no number."""
    mode = multiplier.mode
    ratio, pair = grid.multiplier(variant, case, mode), grid.compared_rows(variant, case, mode)
    if ratio is None or pair is None:
        return None
    return CellNumber(multiplier.name, ratio.value, pair, ratio.low, ratio.high, kind="multiple")


def section(grid: Grid) -> Section:
    """Return the tables of a grid: the values, and their multipliers."""
    filler = GridTable(grid, grid.variants, grid.cases)
    title = captions.with_unit(captions.metric(grid.metric), grid.metric)
    values = filler.table(lambda _v, _c, row: number_cell(median_number(row)))
    multipliers = [SPEED, TIME] if grid.metric.endswith(TIMES) else [BYTES] if grid.metric == PEAK else []
    blocks = [
        Block(title, "", values),
        *(_multipliers(grid, filler, multiplier) for multiplier in multipliers),
        _host_and_device(grid, filler),
    ]
    topic = captions.short_metric(grid.metric)
    return grid_section(grid, topic, filter(None, blocks), [*filler.notes, *sample_warnings(grid)])


def grid_section(grid: Grid, topic: str, blocks: Iterable[Block], footnotes: Iterable[str]) -> Section:
    """Return a section of tables of a grid; ``topic`` is the last part of the title."""
    return Section(
        title=f"{grid.operator}, {grid.phase}: {topic}",
        origin=captions.origin(grid.run),
        conditions=captions.conditions(grid, grid.cases),
        blocks=tuple(blocks),
        footnotes=tuple(footnotes),
        run_id=grid.run.header.run_id,
        heading_suffix=captions.heading_suffix(grid),
    )


def time_sections(run: Run, operator: str, *phases: Phase) -> list[Section]:
    """Return the tables of the times of an operator, of these phases or of all."""
    timed = pivot.latency_grids(run, operator)
    return [section(grid) for grid in timed if not phases or grid.phase in phases]


def other_sections(run: Run, operator: str) -> list[Section]:
    """Return the tables of host times, times with warm caches, memory and other metrics, in this order."""
    times = [grid for grid in grids(run, operator, TIMES) if grid.metric != LATENCY]
    others = [grid for grid in grids(run, operator, "") if not grid.metric.endswith(TIMES)]
    others.sort(key=lambda grid: not grid.metric.endswith(MEMORY))
    return [section(grid) for grid in (*times, *others)]


def without_multipliers(section: Section) -> Section:
    """Return the section without multipliers."""
    return replace(section, blocks=section.blocks[:1])


def _multipliers(grid: Grid, filler: GridTable, multiplier: Multiplier) -> Block | None:
    reference = grid.reference(multiplier.mode)
    if reference is None:
        return None
    ratios: list[Ratio] = []

    def cell(variant: Variant, case: Case, _: Measurement) -> Cell:
        ratio = grid.multiplier(variant, case, multiplier.mode)
        shown = multiple(grid, variant, case, multiplier)
        if ratio is None or shown is None:
            return Cell(f"no {multiplier.mode}")
        if variant != reference.variant:
            ratios.append(ratio)
        return number_cell(shown)

    table = filler.table(cell)
    # A peak is read once, not in rounds.
    methods = captions.ratio_methods(ratios) if multiplier != BYTES else ""
    note = f": {multiplier.formula}{methods}.{captions.stand_in_note(grid, reference)}"
    return Block(multiplier.title, note, table)


def _host_and_device(grid: Grid, filler: GridTable) -> Block | None:
    host = replace(grid, metric=HOST)
    if grid.metric != LATENCY or not host.cells:
        return None

    def cell(variant: Variant, case: Case, row: Measurement) -> Cell:
        issued = host.measured(variant, case, grid.phase, row.group)
        shown = median_number(issued) if issued else CellNumber(HOST, None)
        return Cell("{} / {}", (shown, median_number(row)))

    title = f"Host time / device time ({quantity(HOST).column.symbol})"
    note = ": the time of the host to issue a call, and of the device to run it."
    return Block(title, note, filler.table(cell))
