"""The tables: three blocks of time, two of memory, as pandas frames, as markdown and as text."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import pandas as pd
from tabulate import tabulate

from esbench.records import Case, Measurement, Mode, Phase, Run, Skipped, Variant
from esbench.report import captions
from esbench.report.footnotes import Footnotes
from esbench.report.grid import HOST, LARGEST, LATENCY, MEMORY, PEAK, TIMES, Grid, grids, headings
from esbench.report.remarks import remarks
from esbench.report.words import escape, one_line
from esbench.statistics import Ratio, median
from esbench.units import format_cell, format_multiplier, format_value, quantity


@dataclass(frozen=True)
class Comparison:
    """A multiplier: against which baseline, how it is taken, which way is better."""

    mode: Mode
    title: str
    formula: str


SPEED = Comparison("naive", "Speed multiplier vs. naive", "time(naive) / time(variant), higher is better")
TIME = Comparison("base", "Time multiplier vs. base", "time(variant) / time(base), lower is better")
BYTES = Comparison("base", "Memory multiplier vs. base", "bytes(variant) / bytes(base), lower is better")


@dataclass(frozen=True)
class Block:
    """One table: its title, what it compares, its cells as they are printed."""

    title: str
    note: str
    frame: pd.DataFrame


@dataclass(frozen=True)
class Section:
    """The blocks of one operator, phase, metric and method, and what must be said of all of them."""

    title: str
    origin: str
    conditions: str
    blocks: tuple[Block, ...]
    footnotes: tuple[str, ...]

    def markdown(self, level: int = 3) -> str:
        """The section as GitHub renders it."""
        parts = [f"{'#' * level} {escape(self.title)}", escape(f"{self.origin} {self.conditions}")]
        for block in self.blocks:
            parts += [
                f"**{escape(block.title)}**{escape(block.note)}",
                _table(block.frame, "pipe", escape),
            ]
        parts += ["<br>\n".join(map(escape, self.footnotes))]
        return "\n\n".join(filter(None, parts)) + "\n"

    def text(self) -> str:
        """The section for a terminal, without its origin: the tables of one run stand together."""
        parts = [one_line(f"{self.title} ({self.conditions.rstrip('.')})")]
        for block in self.blocks:
            parts += [f"{one_line(block.title + block.note)}\n{_table(block.frame, 'simple', one_line)}"]
        parts += ["\n".join(map(one_line, self.footnotes))]
        return "\n\n".join(filter(None, parts)) + "\n"


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

    def frame(self, number: Callable[[Variant, Case, Measurement], str]) -> pd.DataFrame:
        """Print the cells: what was measured as ``number`` says, and reasons where nothing was."""
        cells = [[self._cell(v, c, number) for c in self.cases] for v in self.variants]
        labels = pd.Index([v.label(self.grid.operator) for v in self.variants], name=self.grid.operator)
        return pd.DataFrame(cells, index=labels, columns=headings(self.cases))

    def _cell(self, variant: Variant, case: Case, number: Callable[[Variant, Case, Measurement], str]) -> str:
        found = self.grid.at(variant, case)
        if isinstance(found, Measurement):
            return number(variant, case, found) if any(found.samples) else self.notes.empty()
        return self._reason(found, self.grid.largest(variant, case)) if found else self.notes.hole()

    def _reason(self, skipped: Skipped, largest: Measurement | None) -> str:
        fits = ""
        if largest is not None:
            # A search that its budget ended has not tried what lies above.
            bound = "at least " if largest.stop == "budget" else ""
            fits = f", {bound}{format_value(LARGEST, median(largest))} fit"
        return self.notes.reason(skipped, fits)


def section(grid: Grid) -> Section:
    """The blocks of a grid: the figures themselves, and their multipliers."""
    cells = Cells.of(grid)
    times = (SPEED, TIME) if grid.metric.endswith(TIMES) else ()
    blocks = [
        _figures(grid, cells),
        *(_multipliers(grid, cells, one) for one in (*times, *((BYTES,) if grid.metric == PEAK else ()))),
        _host_beside_device(grid, cells),
    ]
    return Section(
        title=f"{grid.operator}, {grid.phase}: {captions.short_metric(grid.metric)}",
        origin=captions.origin(grid.run),
        conditions=captions.conditions(grid, grid.cases),
        blocks=tuple(block for block in blocks if block),
        footnotes=(*cells.notes, *remarks(grid)),
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


def _figures(grid: Grid, cells: Cells) -> Block:
    symbol = quantity(grid.metric).column.symbol
    title = captions.metric(grid.metric) + (f" ({symbol})" if symbol else "")
    return Block(title, "", cells.frame(lambda _v, _c, row: format_cell(grid.metric, median(row))))


def _multipliers(grid: Grid, cells: Cells, comparison: Comparison) -> Block | None:
    reference = grid.reference(comparison.mode)
    if reference is None:
        return None
    ratios: list[Ratio] = []

    def number(variant: Variant, case: Case, _: Measurement) -> str:
        ratio = grid.multiplier(variant, case, comparison.mode)
        if ratio is None:
            return f"no {comparison.mode}"
        if variant != reference.variant:
            ratios.append(ratio)
        return format_multiplier(ratio.value)

    frame = cells.frame(number)
    taken = captions.ratios_taken(ratios) if comparison != BYTES else ""
    note = f": {comparison.formula}{taken}.{captions.stand_in(grid, reference)}"
    return Block(comparison.title, note, frame)


def _host_beside_device(grid: Grid, cells: Cells) -> Block | None:
    host = grid.of(HOST)
    if grid.metric != LATENCY or not host.cells:
        return None

    def number(variant: Variant, case: Case, row: Measurement) -> str:
        issued = host.measured(variant, case, grid.phase, row.company)
        return " / ".join(format_cell(HOST, median(one) if one else None) for one in (issued, row))

    title = f"Host time / device time ({quantity(HOST).column.symbol})"
    note = ": what the host spends on issuing a call, beside what the device spends on it."
    return Block(title, note, cells.frame(number))


def _table(frame: pd.DataFrame, style: str, show: Callable[[str], str]) -> str:
    cells = [[show(label), *map(show, row)] for label, row in zip(frame.index, frame.to_numpy(), strict=True)]
    return tabulate(
        cells,
        headers=[show(str(frame.index.name)), *map(show, frame.columns)],
        tablefmt=style,
        colalign=("left", *["right"] * frame.shape[1]),
        disable_numparse=True,
    )
