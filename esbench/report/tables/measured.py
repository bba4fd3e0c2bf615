"""The tables: three blocks of time, two of memory, as markdown and as text."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from esbench.report import captions
from esbench.report.analysis.pivot import (
    HOST,
    LARGEST,
    LATENCY,
    MEMORY,
    PEAK,
    TIMES,
    Grid,
    Trace,
    grids,
    headings,
)
from esbench.report.captions import remarks
from esbench.report.tables.table import (
    MEMORY_MULTIPLIER,
    SPEED_MULTIPLIER,
    TIME_MULTIPLIER,
    Block,
    Cell,
    Footnotes,
    Reading,
    Section,
    Table,
    one,
    said,
)
from esbench.schema import Case, Measurement, Mode, Phase, Run, Skipped, Variant
from esbench.stats import Ratio, interval, median, round_medians
from esbench.units import format_value, quantity

MEDIAN = "median of the medians of rounds, and its interval"
"""How a figure follows from one row."""


Number = Callable[[Variant, Case, Measurement], Cell]
"""What is shown of a row that was measured."""


@dataclass(frozen=True)
class Multiplier:
    """A multiplier: against which baseline, under which name, how it is taken, which way is better."""

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
class Cells:
    """Prints cells, and keeps the reasons that they only have room to hint at."""

    grid: Grid
    variants: tuple[Variant, ...]
    cases: tuple[Case, ...]
    notes: Footnotes = field(default_factory=Footnotes)

    @classmethod
    def of(cls, grid: Grid) -> Self:
        """All cells of a grid."""
        return cls(grid, grid.variants, grid.cases)

    def table(self, number: Number) -> Table:
        """The cells: what was measured as ``number`` says, and reasons where nothing was."""
        return Table(
            corner=self.grid.operator,
            headings=tuple(headings(self.cases)),
            labels=tuple(variant.label(self.grid.operator) for variant in self.variants),
            cells=tuple(tuple(self._cell(v, c, number) for c in self.cases) for v in self.variants),
        )

    def _cell(self, variant: Variant, case: Case, number: Number) -> Cell:
        found = self.grid.at(variant, case)
        if isinstance(found, Measurement):
            return number(variant, case, found) if any(found.samples) else said(self.notes.empty())
        if found is None:
            return said(self.notes.hole())
        return Cell(self._reason(found, self.grid.largest(variant, case)), skipped=found)

    def _reason(self, skipped: Skipped, largest: Measurement | None) -> str:
        fits = ""
        if largest is not None:
            # A search that its budget ended has not tried what lies above.
            bound = "at least " if largest.stop == "budget" else ""
            fits = f", {bound}{format_value(LARGEST, median(largest))} fit"
        return self.notes.reason(skipped, fits)


def reading(run: Run, row: Measurement) -> Reading:
    """The median of a row, and the interval that its rounds give it."""
    sure = interval([value for value in round_medians(row) if value is not None])
    return Reading(
        row.metric,
        median(row),
        Trace(run.header.run_id, MEDIAN, (row,)),
        low=sure.low if sure else None,
        high=sure.high if sure else None,
    )


def multiple(grid: Grid, variant: Variant, case: Case, multiplier: Multiplier) -> Reading | None:
    """A row as a multiple of the baseline beside it, ``None`` where one of the two has no number."""
    mode = multiplier.mode
    ratio, pair = grid.multiplier(variant, case, mode), grid.compared(variant, case, mode)
    if ratio is None or pair is None:
        return None
    what = "this row by the other" if mode == "base" else "the other by this row"
    rule = f"{what}, {'of medians' if ratio.method == 'of medians' else 'the median of ratios inside rounds'}"
    trace = Trace(grid.run.header.run_id, rule, pair)
    return Reading(multiplier.name, ratio.value, trace, low=ratio.low, high=ratio.high, kind="multiple")


def section(grid: Grid) -> Section:
    """The blocks of a grid: the figures themselves, and their multipliers."""
    found = Cells.of(grid)
    times = (SPEED, TIME) if grid.metric.endswith(TIMES) else ()
    blocks = [
        _figures(grid, found),
        *(_multipliers(grid, found, each) for each in (*times, *((BYTES,) if grid.metric == PEAK else ()))),
        _host_beside_device(grid, found),
    ]
    return Section(
        title=f"{grid.operator}, {grid.phase}: {captions.short_metric(grid.metric)}",
        origin=captions.origin(grid.run),
        conditions=captions.conditions(grid, grid.cases),
        blocks=tuple(block for block in blocks if block),
        footnotes=(*found.notes, *remarks(grid)),
        run_id=grid.run.header.run_id,
        apart=captions.apart(grid),
    )


def time_sections(run: Run, operator: str, *phases: Phase) -> list[Section]:
    """The tables of an operator's time: of these phases, or of all."""
    found = (grid for grid in grids(run, operator, TIMES) if grid.metric == LATENCY)
    return [section(grid) for grid in found if not phases or grid.phase in phases]


def other_time_sections(run: Run, operator: str) -> list[Section]:
    """The tables of the host's time and of the time with warm caches."""
    return [section(grid) for grid in grids(run, operator, TIMES) if grid.metric != LATENCY]


def memory_sections(run: Run, operator: str) -> list[Section]:
    """The memory tables of an operator."""
    return [section(grid) for grid in grids(run, operator, MEMORY)]


def other_sections(run: Run, operator: str) -> list[Section]:
    """What else was measured, such as utilisation."""
    every = grids(run, operator, "")
    return [section(grid) for grid in every if not grid.metric.endswith((TIMES, MEMORY))]


def figures_only(section: Section) -> Section:
    """The section without its multipliers."""
    return replace(section, blocks=section.blocks[:1])


def _figures(grid: Grid, found: Cells) -> Block:
    symbol = quantity(grid.metric).column.symbol
    title = captions.metric(grid.metric) + (f" ({symbol})" if symbol else "")
    return Block(title, "", found.table(lambda _v, _c, row: one(reading(grid.run, row))))


def _multipliers(grid: Grid, found: Cells, multiplier: Multiplier) -> Block | None:
    reference = grid.reference(multiplier.mode)
    if reference is None:
        return None
    ratios: list[Ratio] = []

    def number(variant: Variant, case: Case, _: Measurement) -> Cell:
        ratio = grid.multiplier(variant, case, multiplier.mode)
        shown = multiple(grid, variant, case, multiplier)
        if ratio is None or shown is None:
            return said(f"no {multiplier.mode}")
        if variant != reference.variant:
            ratios.append(ratio)
        return one(shown)

    table = found.table(number)
    taken = captions.ratios_taken(ratios) if multiplier != BYTES else ""
    note = f": {multiplier.formula}{taken}.{captions.stand_in(grid, reference)}"
    return Block(multiplier.title, note, table)


def _host_beside_device(grid: Grid, found: Cells) -> Block | None:
    host = grid.of(HOST)
    if grid.metric != LATENCY or not host.cells:
        return None

    def number(variant: Variant, case: Case, row: Measurement) -> Cell:
        issued = host.measured(variant, case, grid.phase, row.company)
        shown = reading(grid.run, issued) if issued else Reading(HOST, None)
        return Cell("{} / {}", (shown, reading(grid.run, row)))

    title = f"Host time / device time ({quantity(HOST).column.symbol})"
    note = ": what the host spends on issuing a call, beside what the device spends on it."
    return Block(title, note, found.table(number))
