"""Data classes of tables: cells with numbers, their intervals and origins; blocks and sections of a page.

A cell is formatted only when a table is printed, so the same table can be shown with intervals or without.
Each number has the stored rows that it was computed from.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tabulate import tabulate

from esbench.report import captions
from esbench.report.analysis.pivot import Grid, headings
from esbench.report.analysis.quality import EXACT, EffectiveSize, Estimate
from esbench.schema import Case, Measurement, Skipped, Variant
from esbench.text import escape, one_line
from esbench.units import format_cell, format_multiplier, format_number

Kind = Literal["quantity", "multiple", "number"]
"""How a number is shown: in the unit of its metric's column, as ``2.39x``, or as it is."""
SPEED_MULTIPLIER, TIME_MULTIPLIER = "speed_multiplier", "time_multiplier"
MEMORY_MULTIPLIER = "memory_multiplier"
RATE_PER_MS, RATE_MULTIPLIER = "effective_members_per_ms", "rate_multiplier"
EFFECTIVE_PERCENT = "effective_percent"
NOTHING = "-"
"""The cell of a variant and case that are not in the run."""
EMPTY = "no samples"
EMPTY_NOTE = f"{EMPTY}: the row was stored without any, measure it again"
INTERVAL = "95 % interval"


@dataclass(frozen=True)
class CellNumber:
    """A number in a cell, in the unit given by the suffix of its metric's name.

    Attributes:
        name: the metric.
        value: the number, or None if it is missing.
        rows: the stored rows that it is computed from: first that of its own variant and case, then those of
            references such as base.
        low, high: the ends of its 95 % interval, None if unknown.
        has_interval: whether the interval is always shown.
        least_digits: significant digits that are shown even if the interval supports fewer.
    """

    name: str
    value: float | None
    rows: tuple[Measurement, ...] = ()
    low: float | None = None
    high: float | None = None
    kind: Kind = "quantity"
    has_interval: bool = False
    least_digits: int = 1

    @property
    def half(self) -> float | None:
        """The distance from the number to the farther end of its interval, as shown after ±."""
        if self.value is None or self.low is None or self.high is None:
            return None
        return max(self.high - self.value, self.value - self.low)

    def text(self, *, intervals: bool = False) -> str:
        """Return the number as a table shows it, with its interval on request and if known."""
        with_interval = intervals or self.has_interval
        if self.kind == "quantity":
            return format_cell(
                self.name, self.value, self.half, with_interval=with_interval, least_digits=self.least_digits
            )
        show = format_number if self.kind == "number" else format_multiplier
        return show(self.value, self.half, with_interval=with_interval, least_digits=self.least_digits)


@dataclass(frozen=True)
class Cell:
    """The content of a cell: a template with ``{}`` for each number, or text without numbers.

    ``skipped`` is the row with the reason why there is no number.
    """

    template: str
    numbers: tuple[CellNumber, ...] = ()
    skipped: Skipped | None = None

    def text(self, *, intervals: bool = False) -> str:
        """Return the cell as a table shows it."""
        if not self.numbers:
            return self.template
        return self.template.format(*(number.text(intervals=intervals) for number in self.numbers))


def number_cell(number: CellNumber, template: str = "{}") -> Cell:
    """Return a cell of one number."""
    return Cell(template, (number,))


@dataclass(frozen=True)
class Table:
    """Rows of cells with labels, under headings; ``corner`` is the heading of the labels."""

    corner: str
    headings: tuple[str, ...]
    labels: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]

    def texts(self, *, intervals: bool = False) -> list[list[str]]:
        """Return the cells as they are shown, row by row."""
        return [[cell.text(intervals=intervals) for cell in row] for row in self.cells]

    def markdown(self, *, intervals: bool = False) -> str:
        """Return the table for GitHub, not padded."""
        rule = [":-", *["-:"] * len(self.headings)]
        lines = [[self.corner, *self.headings], *self._rows(intervals=intervals)]
        head, *rows = (list(map(escape, line)) for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))

    def text(self) -> str:
        """Return the table for a terminal, labels left and numbers right."""
        lines = [[self.corner, *self.headings], *self._rows()]
        head, *rows = (list(map(one_line, line)) for line in lines)
        alignment = ("left", *["right"] * len(self.headings))
        return tabulate(rows, headers=head, tablefmt="simple", colalign=alignment, disable_numparse=True)

    def _rows(self, *, intervals: bool = False) -> list[list[str]]:
        texts = self.texts(intervals=intervals)
        return [[label, *row] for label, row in zip(self.labels, texts, strict=True)]


@dataclass(frozen=True)
class Block:
    """A table with its title and a note on its values."""

    title: str
    note: str
    table: Table


@dataclass(frozen=True)
class Section:
    """The tables of one operator, phase, metric and method, with their captions and footnotes.

    Attributes:
        title: operator, phase and metric.
        conditions: dtype, batch and method.
        footnotes: reasons and warnings on cells and samples.
        run_id: the run of the cells; empty for a section of several runs.
        heading_suffix: the end of the heading, where a page has several sections of this title.
    """

    title: str
    origin: str
    conditions: str
    blocks: tuple[Block, ...]
    footnotes: tuple[str, ...]
    run_id: str = ""
    heading_suffix: str = ""

    def markdown(self, level: int = 3, *, intervals: bool = False) -> str:
        """Return the section as Markdown for GitHub."""
        heading = escape(f"{self.title}{self.heading_suffix}")
        parts = [f"{'#' * level} {heading}", escape(f"{self.origin} {self.conditions}")]
        for block in self.blocks:
            title = f"**{escape(block.title)}**{escape(block.note)}"
            parts += [title, block.table.markdown(intervals=intervals)]
        parts += ["<br>\n".join(map(escape, self.footnotes))]
        return "\n\n".join(filter(None, parts)) + "\n"

    def text(self) -> str:
        """Return the section for a terminal, without its origin."""
        parts = [one_line(f"{self.title} ({self.conditions.rstrip('.')})")]
        for block in self.blocks:
            parts += [f"{one_line(block.title + block.note)}\n{block.table.text()}"]
        parts += ["\n".join(map(one_line, self.footnotes))]
        return "\n\n".join(filter(None, parts)) + "\n"


@dataclass
class Footnotes:
    """Numbered footnotes of a table, collected while its cells are filled."""

    notes: list[str] = field(default_factory=list)
    has_missing: bool = False

    def __iter__(self) -> Iterator[str]:
        """Yield the footnotes as they are printed below the table."""
        if self.has_missing:
            yield f"{NOTHING}: not in this run"
        for number, note in enumerate(self.notes, start=1):
            yield f"[{number}] {note}"

    def missing_cell(self) -> Cell:
        """Return a cell for a row that is not in the run."""
        self.has_missing = True
        return Cell(NOTHING)

    def skipped_cell(self, row: Skipped, more: str = "") -> Cell:
        """Return a cell of a row without a number: a short reason, and a footnote with the whole one."""
        hint = "failed" if row.status == "failed" else captions.short_reason(row.reason)
        return Cell(self.mark(f"{hint}{more}", f"{row.status}: {row.reason}"), skipped=row)

    def mark(self, text: str, note: str) -> str:
        """Add the number of a footnote to a text."""
        if note not in self.notes:
            self.notes.append(note)
        return f"{text} [{self.notes.index(note) + 1}]"


def variants_table(
    case: Case,
    variants: Iterable[Variant],
    cells: Callable[[Variant], Mapping[str, Cell | None]],
    reason: Callable[[Variant], Skipped | None],
    notes: Footnotes,
) -> Table:
    """Return a table with a row for each variant; its first cell without a number shows the reason, if known.

    ``cells`` returns the cells of a variant by their headings, None where the run has no such number, and
    ``reason`` why a number is missing.
    """
    labels, rows = [], []
    headings: tuple[str, ...] = ()
    for variant in variants:
        by_heading, skipped = cells(variant), reason(variant)
        headings, row = tuple(by_heading), list(by_heading.values())
        if skipped and None in row:
            row[row.index(None)] = notes.skipped_cell(skipped)
        labels.append(variant.label(case.operator))
        rows.append(tuple(cell or (Cell("") if skipped else notes.missing_cell()) for cell in row))
    return Table(case.operator, headings, tuple(labels), tuple(rows))


def case_section(  # noqa: PLR0913, PLR0917  # the parts of a section
    grid: Grid, case: Case, topic: str, block: Block, footnotes: Iterable[str], heading_suffix: str = ""
) -> Section:
    """Return a section with one table about one case."""
    cases = list(dict.fromkeys(row.case for row in grid.run.rows if row.case.operator == case.operator))
    return Section(
        title=f"{case.operator} {headings(cases)[cases.index(case)]}: {topic}",
        origin=captions.origin(grid.run),
        conditions=captions.conditions(grid, [case]),
        blocks=(block,),
        footnotes=tuple(footnotes),
        run_id=grid.run.header.run_id,
        heading_suffix=heading_suffix,
    )


def mean_number(metric: str, mean: Estimate | None, rows: tuple[Measurement, ...]) -> CellNumber:
    """Return a mean over replicates in the unit of its metric; equal replicates give it no interval."""
    low, high = (mean.mean - mean.half, mean.mean + mean.half) if mean and mean.half else (None, None)
    return CellNumber(metric, mean.mean if mean else None, rows, low, high)


def estimate_cell(metric: str, estimate: Estimate | None, rows: tuple[Measurement, ...]) -> Cell | None:
    """Return the cell of a mean over replicates, or None without a mean."""
    if estimate is None:
        return None
    mean, half = estimate.mean, estimate.half
    low, high = (None, None) if half is None else (mean - half, mean + half)
    return number_cell(CellNumber(metric, mean, rows, low, high, kind="number"))


def n_eff_cell(metric: str, n_eff: EffectiveSize | None, rows: tuple[Measurement, ...] = ()) -> Cell | None:
    """Return the cell of n_eff, or None without n_eff."""
    if n_eff is None:
        return None
    if n_eff.is_exact:
        return Cell(EXACT)
    low, high = n_eff_ends(n_eff)
    number = CellNumber(metric, n_eff.value, rows, low, high, kind="number")
    return number_cell(number, "at least {}" if n_eff.is_bound else "{}")


def n_eff_ends(n_eff: EffectiveSize) -> tuple[float | None, float | None]:
    """Return the interval of n_eff, if several replicates give it two ends."""
    return (n_eff.low, n_eff.high) if n_eff.replicates > 1 and math.isfinite(n_eff.high) else (None, None)


def n_eff_interval_cell(n_eff: EffectiveSize | None) -> Cell | None:
    """Return the cell of the interval of n_eff; a single replicate and a closed form have none."""
    if n_eff is None:
        return None
    if n_eff.replicates < 2:  # noqa: PLR2004  # an interval takes two
        return Cell("one value" if n_eff.replicates else "closed form")
    low, high = format_number(n_eff.low), format_number(n_eff.high)
    return Cell(f"{low} to {high}" if math.isfinite(n_eff.high) else f"at least {low}")
