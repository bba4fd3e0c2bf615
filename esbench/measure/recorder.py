"""Where the rows of a run go: handed on together with what they settle, counted, and never twice."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from esbench.progress import Show
from esbench.schema import QUALITY, Case, Checkpoint, Phase, Record, Row, Skipped, Variant

Store = Callable[[Sequence[Record]], None]
"""Takes records that belong together: all of them are on disk, or none."""


@dataclass(frozen=True)
class Outcome:
    """How many rows of each kind a run gave, and what else there is to say about it.

    ``measured`` counts the cells with a time, or with figures of quality. A run with ``failed`` rows ends
    with exit code 1. ``strangers`` are other processes that were seen on the GPU.
    """

    measured: int = 0
    unavailable: int = 0
    failed: int = 0
    notes: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()


class Recorder:
    """Hands rows on as they come, counts them, and says how far the run is.

    A cell is one variant and phase on one case. Rows and settled phases of a run that is resumed are known
    from the start.
    """

    def __init__(
        self,
        store: Store,
        progress: Show,
        rows: Iterable[Row] = (),
        settled: Iterable[Checkpoint] = (),
    ) -> None:
        """Start with what an earlier part of the run has left."""
        self._store = store
        self._progress = progress
        self._cells = self._done = 0
        self._timed: dict[tuple[Variant, Case, Phase, str, int], None] = {}
        self._with_quality: set[tuple[Variant, Case]] = set()
        self._skipped: dict[object, Skipped] = {}
        self._notes: dict[str, None] = {}
        known = tuple(settled)
        self._settled = {(one.case, one.company, one.phase) for one in known}
        self._whole = {one.case for one in known if one.phase is None}
        self._traced = {one.case for one in known if one.traced}
        self._costs_s = {one.case: one.costs_s for one in known}
        self._before_s = max((one.wall_s for one in known), default=0.0)
        self._start_s = time.monotonic()
        for row in rows:
            self._count(row)

    @property
    def wall_s(self) -> float:
        """How long the run has taken, in all its parts."""
        return self._before_s + time.monotonic() - self._start_s

    def is_settled(self, case: Case, company: int = 0, phase: Phase | None = None) -> bool:
        """Say whether all rows of a company's phase, or of a whole case, are there already."""
        return case in self._whole or (case, company, phase) in self._settled

    def is_traced(self, case: Case) -> bool:
        """Say whether the launches of a case, which are counted after all timing, are there already."""
        return case in self._traced

    def timed_phases(self, variant: Variant, case: Case) -> list[Phase]:
        """Return the phases of a variant that have a time on a case."""
        return list(
            dict.fromkeys(phase for one, where, phase, *_ in self._timed if (one, where) == (variant, case))
        )

    def enter(self, rows: Iterable[Row], *lines: Checkpoint) -> None:
        """Hand rows on; a reason that base or naive gave in an earlier company is not repeated."""
        fresh: list[Record] = [row for row in rows if self._count(row)]
        if fresh or lines:
            self._store([*fresh, *lines])

    def settle(self, rows: Iterable[Row], line: Checkpoint) -> None:
        """Hand rows on, and with them that they are all of a phase, or of a case."""
        self.enter(rows, msgspec.structs.replace(line, wall_s=self.wall_s))

    def costs_s(self, case: Case) -> Mapping[str, float]:
        """Return what each variant had cost on a case before the run was cut off."""
        return self._costs_s.get(case, {})

    def reason(self, variant: Variant, case: Case) -> str:
        """Return the reason that stands for all of a variant on a case, or nothing."""
        row = self._skipped.get((variant, case, None, None))
        return row.reason if row else ""

    def note(self, text: str) -> None:
        """Keep something that belongs to no row."""
        self._notes[text] = None

    def announce(self, *words: str) -> None:
        """Say what runs now."""
        self._progress(self._done, self._cells, "  ".join(words))

    def finish(self, cells: int) -> None:
        """Count cells that are done, with a number or without."""
        self._done += cells

    def expect(self, cells: int) -> None:
        """Count cells that are to come."""
        self._cells += cells

    @property
    def skipped(self) -> list[Skipped]:
        """The rows without a number so far."""
        return list(self._skipped.values())

    @property
    def outcome(self) -> Outcome:
        """The counts so far."""
        states = [row.status for row in self._skipped.values()]
        return Outcome(
            len(self._timed) + len(self._with_quality),
            states.count("unavailable"),
            states.count("failed"),
            tuple(self._notes),
        )

    def _count(self, row: Row) -> bool:
        """Count a row, unless its place is taken."""
        if isinstance(row, Skipped):
            if _place(row) in self._skipped:
                return False
            self._skipped[_place(row)] = row
            if row.status == "failed" and row.phase and row.method is None:  # it may have been timed before
                phase = (row.variant, row.case, row.phase)
                self._timed = {key: None for key in self._timed if key[:3] != phase}
        elif row.phase == QUALITY:
            self._with_quality.add((row.variant, row.case))
        elif row.metric == "latency_ns":
            self._timed[row.variant, row.case, row.phase, row.method, row.company] = None
        return True


def _place(row: Skipped) -> object:
    return row.variant, row.case, row.phase, row.method
