"""What stands in the cells of tables: numbers with their intervals, and where each of them comes from.

A cell is printed only where a table is: so the same table can show intervals, all digits, or none of it, and
any figure can be followed back to the run and the rows that it was computed from.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import pandas as pd
from tabulate import tabulate

from esbench.report import captions
from esbench.report.analysis.pivot import (
    Grid,
    Trace,
    headings,
)
from esbench.report.analysis.quality import EXACT, Estimate, Worth
from esbench.report.text import escape, one_line
from esbench.schema import Case, Run, Skipped, Variant
from esbench.units import (
    format_between,
    format_cell,
    format_cell_between,
    format_multiplier,
    format_multiplier_between,
    format_number,
)

Kind = Literal["quantity", "multiple", "number"]
"""How a number is shown: in the unit of its metric's column, as ``2.39x``, or as it is."""


SPEED_MULTIPLIER, TIME_MULTIPLIER, MEMORY_MULTIPLIER = (
    "speed_multiplier",
    "time_multiplier",
    "memory_multiplier",
)
"""The names of multiples: naive / variant of a time, variant / base of a time, variant / base of bytes."""


RATE_PER_MS, RATE_MULTIPLIER, EFFECTIVE_PERCENT = (
    "effective_members_per_ms",
    "rate_multiplier",
    "effective_percent",
)
"""The names of figures that combine several rows."""


COMPACT = "compact"
"""A style of a table in Markdown: no column of its source is padded."""


NOTHING = "-"
"""The cell of what never met in the run."""


EMPTY = "no samples"
"""The cell of a row that was stored without any sample."""


EMPTY_NOTE = f"{EMPTY}: the row was stored without any, measure it again"


INTERVAL = "95 % interval"


BLANK = ""
"""The cell of a number that the reason beside it explains."""


_SEVERAL = 2


@dataclass(frozen=True)
class Reading:
    """A number of a cell: under which name, in the unit that the name's suffix says, and whence.

    ``low`` and ``high`` are the ends of its 95 % interval, ``None`` where nobody knows them; ``is_between``
    says that they are part of what is read, whether intervals are asked for or not.
    """

    name: str
    value: float | None
    trace: Trace | None = None
    low: float | None = None
    high: float | None = None
    kind: Kind = "quantity"
    is_between: bool = False

    @property
    def half(self) -> float | None:
        """How far the farther end of the interval is from the number: with ±, no end is left outside."""
        if self.value is None or self.low is None or self.high is None:
            return None
        return max(self.high - self.value, self.value - self.low)

    def text(self, *, intervals: bool = False) -> str:
        """The number as a table shows it, with its interval where that is asked for and known."""
        intervals = intervals or self.is_between
        if self.kind == "quantity":
            cell = format_cell_between if intervals else format_cell
            return cell(self.name, self.value, self.half)
        if self.kind == "number":
            return (format_between if intervals else format_number)(self.value, self.half)
        return (format_multiplier_between if intervals else format_multiplier)(self.value, self.half)


@dataclass(frozen=True)
class Cell:
    """What stands in a cell: words, in which ``{}`` stands for each of its numbers in turn.

    Words without numbers are shown as they are. ``skipped`` is the row that says why there is no number.
    """

    words: str = "{}"
    readings: tuple[Reading, ...] = ()
    skipped: Skipped | None = None

    def text(self, *, intervals: bool = False) -> str:
        """The cell as a table shows it."""
        if not self.readings:
            return self.words
        return self.words.format(*(one.text(intervals=intervals) for one in self.readings))


def said(words: str) -> Cell:
    """A cell of words alone."""
    return Cell(words)


def one(reading: Reading, words: str = "{}") -> Cell:
    """A cell of one number."""
    return Cell(words, (reading,))


@dataclass(frozen=True)
class Table:
    """Labelled rows of cells under headings, and what the labels are of."""

    corner: str
    headings: tuple[str, ...]
    labels: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]

    def texts(self, *, intervals: bool = False) -> list[list[str]]:
        """The cells as they are shown, row by row."""
        return [[cell.text(intervals=intervals) for cell in row] for row in self.cells]

    @property
    def frame(self) -> pd.DataFrame:
        """The cells as they are shown, without intervals."""
        labels = pd.Index(self.labels, name=self.corner)
        return pd.DataFrame(self.texts(), index=labels, columns=list(self.headings))

    def first(self, labels: Sequence[str]) -> "Table":
        """The rows with these labels, in this table's order."""
        kept = [place for place, label in enumerate(self.labels) if label in labels]
        return Table(
            self.corner,
            self.headings,
            tuple(self.labels[place] for place in kept),
            tuple(self.cells[place] for place in kept),
        )


@dataclass(frozen=True)
class Block:
    """One table: its title, what it compares, its cells."""

    title: str
    note: str
    table: Table

    @property
    def frame(self) -> pd.DataFrame:
        """The cells as they are printed."""
        return self.table.frame


@dataclass(frozen=True)
class Section:
    """The blocks of one operator, phase, metric and method, and what must be said of all of them."""

    title: str
    origin: str
    conditions: str
    blocks: tuple[Block, ...]
    footnotes: tuple[str, ...]
    run_id: str = ""
    """That of the run whose reasons stand in it."""
    apart: str = ""
    """What tells its heading from those of other sections with the same title."""

    @property
    def heading(self) -> str:
        """The title of a section on a page with others."""
        return f"{self.title}{self.apart}"

    def markdown(self, level: int = 3, *, style: str = "pipe", intervals: bool = False) -> str:
        """The section as GitHub renders it; in style ``compact`` no column of its source is padded."""
        parts = [f"{'#' * level} {escape(self.heading)}", escape(f"{self.origin} {self.conditions}")]
        for block in self.blocks:
            parts += [
                f"**{escape(block.title)}**{escape(block.note)}",
                pipes(block.table, style, escape, intervals=intervals),
            ]
        parts += ["<br>\n".join(map(escape, self.footnotes))]
        return "\n\n".join(filter(None, parts)) + "\n"

    def text(self) -> str:
        """The section for a terminal, without its origin: the tables of one run stand together."""
        parts = [one_line(f"{self.title} ({self.conditions.rstrip('.')})")]
        for block in self.blocks:
            parts += [f"{one_line(block.title + block.note)}\n{pipes(block.table, 'simple', one_line)}"]
        parts += ["\n".join(map(one_line, self.footnotes))]
        return "\n\n".join(filter(None, parts)) + "\n"


def pipes(table: Table, style: str, show: Callable[[str], str], *, intervals: bool = False) -> str:
    """A table as text in one of tabulate's styles, its labels left and its numbers right.

    ``compact`` is one more style: Markdown in as few characters as can be.
    """
    texts = table.texts(intervals=intervals)
    rows = [[show(label), *map(show, row)] for label, row in zip(table.labels, texts, strict=True)]
    head = [show(table.corner), *map(show, table.headings)]
    if style == COMPACT:
        lines = [head, [":-", *["-:"] * len(table.headings)], *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return tabulate(
        rows,
        headers=head,
        tablefmt=style,
        colalign=("left", *["right"] * len(table.headings)),
        disable_numparse=True,
    )


@dataclass
class Footnotes:
    """Collects the notes of a table while its cells are printed."""

    reasons: list[str] = field(default_factory=list)
    holes: bool = False

    def __iter__(self) -> Iterator[str]:
        """What the cells hint at, once they are printed."""
        if self.holes:
            yield f"{NOTHING}: not in this run"
        for number, reason in enumerate(self.reasons, start=1):
            yield f"[{number}] {reason}"

    def hole(self) -> str:
        """The cell of what never met in the run."""
        self.holes = True
        return NOTHING

    def empty(self) -> str:
        """The cell of a row without any sample."""
        return self.hint(EMPTY, EMPTY_NOTE)

    def reason(self, skipped: Skipped, more: str = "") -> str:
        """The cell of a row without a number, and what else there is to say in it."""
        hint = "failed" if skipped.status == "failed" else captions.shorten(skipped.reason)
        return self.hint(f"{hint}{more}", f"{skipped.status}: {skipped.reason}")

    def hint(self, hint: str, note: str) -> str:
        """A cell that has room for a hint, and what there is to say of it."""
        if note not in self.reasons:
            self.reasons.append(note)
        return f"{hint} [{self.reasons.index(note) + 1}]"


class Column(NamedTuple):
    """A column of a table: its heading, and the cell of a variant, nothing where it has no number."""

    heading: str
    cell: Callable[[Variant], Cell | None]


def section(  # noqa: PLR0913, PLR0917  # the parts of a section
    grid: Grid, case: Case, what: str, block: Block, footnotes: Iterable[str], apart: str = ""
) -> Section:
    """A section of one table, with what its footnotes hint at."""
    (heading,) = (name for one, name in _headings(grid.run, case.operator) if one == case)
    return Section(
        title=f"{case.operator} {heading}: {what}",
        origin=captions.origin(grid.run),
        conditions=captions.conditions(grid, [case]),
        blocks=(block,),
        footnotes=tuple(footnotes),
        run_id=grid.run.header.run_id,
        apart=apart,
    )


def _headings(run: Run, operator: str) -> list[tuple[Case, str]]:
    cases = list(dict.fromkeys(row.case for row in run.rows if row.case.operator == operator))
    return list(zip(cases, headings(cases), strict=True))


def table(
    case: Case,
    variants: Sequence[Variant],
    columns: Sequence[Column],
    reason: Callable[[Variant], Skipped | None],
    notes: Footnotes,
) -> Table:
    """Fill the cells; the first that a variant has no number for holds the reason, if there is one."""
    cells = []
    for variant in variants:
        shown, why = [column.cell(variant) for column in columns], reason(variant)
        if why and None in shown:
            shown[shown.index(None)] = Cell(notes.reason(why), skipped=why)
        filled = (cell if cell is not None else said(BLANK if why else notes.hole()) for cell in shown)
        cells.append(tuple(filled))
    return Table(
        corner=case.operator,
        headings=tuple(column.heading for column in columns),
        labels=tuple(variant.label(case.operator) for variant in variants),
        cells=tuple(cells),
    )


def number(name: str, value: float | None, trace: Trace | None) -> Cell | None:
    """A number as it is, where there is one."""
    return None if value is None else one(Reading(name, value, trace, kind="number"))


def mean(name: str, found: Estimate | None, trace: Trace | None) -> Cell | None:
    """A mean over replicates, where there is one."""
    if found is None:
        return None
    half = found.half
    low, high = (None, None) if half is None else (found.mean - half, found.mean + half)
    return one(Reading(name, found.mean, trace, low, high, kind="number"))


def members(name: str, found: Worth | None, trace: Trace | None) -> Cell | None:
    """The independent members that a population is worth, where that is a number."""
    if found is None:
        return None
    if found.is_exact:
        return said(EXACT)
    if found.is_bound:
        return one(Reading(name, found.value, trace, kind="number"), "at least {}")
    low, high = known_ends(found)
    return one(Reading(name, found.value, trace, low, high, kind="number"))


def known_ends(found: Worth) -> tuple[float | None, float | None]:
    """The interval of n_eff, where its replicates give it two ends."""
    if found.replicates < _SEVERAL or not math.isfinite(found.high):
        return None, None
    return found.low, found.high


def ends(found: Worth | None) -> Cell | None:
    """The interval of n_eff; a single replicate has none, and a closed form needs none."""
    if found is None:
        return None
    if not found.replicates:
        return said("closed form")
    if found.replicates == 1:
        return said("one value")
    low, high = format_number(found.low), format_number(found.high)
    return said(f"{low} to {high}" if math.isfinite(found.high) else f"at least {low}")


def half(found: Estimate | None) -> Cell | None:
    """Half the interval; a single replicate has none."""
    return said(format_number(found.half) if found.half is not None else "one value") if found else None
