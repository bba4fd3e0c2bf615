"""What stands in the cells of tables: numbers with their intervals, and where each of them comes from.

A cell is printed only where a table is: so the same table can show intervals, all digits, or none of it, and
any figure can be followed back to the run and the rows that it was computed from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from esbench.schema import Measurement, Skipped
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

SPEED, TIME, BYTES = "speed_multiplier", "time_multiplier", "memory_multiplier"
"""The names of multiples: naive / variant of a time, variant / base of a time, variant / base of bytes."""
RATE, AGAINST, SHARE = "effective_members_per_ms", "rate_multiplier", "effective_percent"
"""The names of figures that combine several rows."""


@dataclass(frozen=True)
class Trace:
    """Where a figure comes from: the run, and its rows.

    The first row is of the variant and the case that the figure is about; the others are what it was compared
    or combined with. ``rule`` says in words how the figure follows from their samples.
    """

    run_id: str
    rule: str
    rows: tuple[Measurement, ...]


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
