"""Where the rows of a run go: handed on one by one, counted, and never twice."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from esbench.progress import Show
from esbench.records import Measurement, Row, Skipped

Record = Callable[[Row], None]


@dataclass(frozen=True)
class Outcome:
    """How many rows of each kind a run gave, and what else there is to say about it.

    ``measured`` counts timed cells. A run with ``failed`` rows ends with exit code 1.
    """

    measured: int = 0
    unavailable: int = 0
    failed: int = 0
    notes: tuple[str, ...] = ()


class Ledger:
    """Hands rows on as they come, counts them, and says how far the run is.

    A cell is one variant and phase on one case.
    """

    def __init__(self, record: Record, progress: Show, cells: int) -> None:
        """Start with so many cells to come."""
        self._record = record
        self._progress = progress
        self._cells = cells
        self._done = 0
        self._measured = 0
        self._skipped: dict[Skipped, None] = {}
        self._notes: dict[str, None] = {}

    def enter(self, rows: Iterable[Row]) -> None:
        """Hand rows on; a reason that base or naive gave in an earlier company is not repeated."""
        for row in rows:
            if isinstance(row, Skipped):
                if row in self._skipped:
                    continue
                self._skipped[row] = None
            self._measured += isinstance(row, Measurement) and row.metric == "latency_ns"
            self._record(row)

    def note(self, text: str) -> None:
        """Keep something that belongs to no row."""
        self._notes[text] = None

    def announce(self, *words: str) -> None:
        """Say what runs now."""
        self._progress(self._done, self._cells, "  ".join(words))

    def settle(self, cells: int) -> None:
        """Count cells that are done, with a number or without."""
        self._done += cells

    def expect(self, cells: int) -> None:
        """Count cells that come on top."""
        self._cells += cells

    @property
    def outcome(self) -> Outcome:
        """The counts so far."""
        states = [row.status for row in self._skipped]
        return Outcome(
            self._measured, states.count("unavailable"), states.count("failed"), tuple(self._notes)
        )
