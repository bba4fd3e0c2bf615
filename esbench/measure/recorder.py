"""The recorder of a run in progress: it stores and counts rows and checkpoints, and adds up seconds."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from esbench.measure.remaining_time import SET_UP, TRACES, RemainingTime
from esbench.progress import CaseProgress, RunProgress, Show
from esbench.schema import QUALITY, Case, Checkpoint, Measurement, Phase, Record, Row, Skipped, Variant
from esbench.stats import median
from esbench.supervisor import crashed_in_set_up
from esbench.units import format_value

Store = Callable[[Sequence[Record]], None]
"""Stores records together: after an error, none of them is in the file."""


class Watch(Protocol):
    """Tells the supervisor which variant runs, so that it can store a row if the variant ends the process."""

    def __call__(self, variant: Variant, case: Case, activity: str, lost: str = "", /) -> bool:
        """Announce an activity; return whether a new process would follow the end of this one.

        ``lost`` is the reason why this process is about to end, such as a device that stopped responding.
        """


def not_watched(variant: Variant, case: Case, activity: str, lost: str = "") -> bool:  # noqa: ARG001  # a Watch
    """Announce nothing; there is no supervisor."""
    return False


VISIT_S = 10.0
"""Seconds without a report after which a visit is reported: most visits take milliseconds."""
GIVE_UP = 2
"""A variant that ends the process in the set-up of this many cases is not tried on the others."""


@dataclass(frozen=True)
class RunSummary:
    """The number of rows of each status in a run, and notes about the whole run.

    Attributes:
        measured: the number of cells with a time or with quality metrics.
        unavailable: the number of rows that cannot be measured on this machine.
        failed: the number of rows of variants that are wrong or raise.
        notes: lines about the whole run.
        other_processes: other processes that used the GPU during the run.
    """

    measured: int = 0
    unavailable: int = 0
    failed: int = 0
    notes: tuple[str, ...] = ()
    other_processes: tuple[str, ...] = ()


class Stopwatch:
    """Adds up the seconds spent on each activity; an inner activity pauses the outer one."""

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, spent_s: Mapping[str, float] | None = None
    ) -> None:
        self.seconds = now_s
        self._spent_s = dict(spent_s or {})
        self._running: list[str] = []
        self._since_s = now_s()

    @contextlib.contextmanager
    def on(self, activity: str) -> Iterator[None]:
        """Charge the time inside the context to an activity."""
        self._charge()
        self._running.append(activity)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    @property
    def spent_s(self) -> Mapping[str, float]:
        """Seconds by activity so far; ``other`` is the time outside of all activities."""
        self._charge()
        return dict(self._spent_s)

    def _charge(self) -> None:
        now_s = self.seconds()
        activity = self._running[-1] if self._running else "other"
        self._spent_s[activity] = self._spent_s.get(activity, 0.0) + now_s - self._since_s
        self._since_s = now_s


class Recorder:
    """Stores and counts rows, and reports progress.

    Attributes:
        cells: the number of cells of the run: a cell is a variant and phase on a case.
        done: the number of cells that have a result or a reason.
        cases: the cases of the run, as they are shown.
        remaining: the expected remaining time of the run.
    """

    def __init__(
        self,
        store: Store,
        progress: Show,
        past: Iterable[Record] = (),
        stopwatch: Stopwatch | None = None,
        watch: Watch = not_watched,
    ) -> None:
        self.watch = watch
        self.cells = self.done = 0
        self.stopwatch = stopwatch or Stopwatch()
        self.cases: Sequence[Case] = ()
        self.remaining = RemainingTime({}, {}, self.stopwatch.seconds)
        self._reported_s = self.stopwatch.seconds()
        self._fastest: dict[Case, str] = {}
        self._store = store
        self._progress = progress
        # Variant, case, phase, method and group of the times; a dict, because it keeps their order.
        self._timed: dict[tuple[Variant, Case, Phase, str, int], None] = {}
        self._with_quality: set[tuple[Variant, Case]] = set()
        # Without a phase, the reason is that for the whole case; without a method, for the whole phase.
        self._skipped: dict[tuple[Variant, Case, Phase | None, str | None], Skipped] = {}
        self._notes: dict[str, None] = {}
        past = list(past)
        checkpoints = [record for record in past if isinstance(record, Checkpoint)]
        self._phases_done = {(done.case, done.group, done.phase) for done in checkpoints}
        self._traced = {done.case for done in checkpoints if done.traced}
        self._costs_s = {done.case: done.costs_s for done in checkpoints}
        rows = [record for record in past if isinstance(record, Row)]
        # The variants that have rows in a phase of a group. A Skipped row does not store its group: None.
        self._stored_in_group = {
            (row.variant, row.case, row.group if isinstance(row, Measurement) else None)
            for row in rows
            if row.phase is not None
        }
        for row in rows:
            self._count(row)
        self._crashes = [row for row in self._skipped.values() if crashed_in_set_up(row)]

    def is_done(self, case: Case, group: int = 0, phase: Phase | None = None) -> bool:
        """Return whether all rows of a phase of a group are stored; without a phase, of the whole case."""
        is_case_done = (case, 0, None) in self._phases_done
        return is_case_done or (case, group, phase) in self._phases_done

    def may_join(self, variant: Variant, case: Case, group: int) -> bool:
        """Return whether a variant can be measured in a group of a case.

        If phases of the group are stored, only variants with rows in them can. Another variant may fit now,
        because one that took its memory has ended the process.
        """
        is_group_stored = any(done[:2] == (case, group) for done in self._phases_done)
        has_rows = not self._stored_in_group.isdisjoint({(variant, case, group), (variant, case, None)})
        return has_rows or not is_group_stored

    def is_traced(self, case: Case) -> bool:
        """Return whether the launches of a case, counted after all timing, are stored."""
        return case in self._traced

    def timed_phases(self, variant: Variant, case: Case) -> list[Phase]:
        """Return the phases of a variant that have a time on a case."""
        return list(dict.fromkeys(key[2] for key in self._timed if key[:2] == (variant, case)))

    def store_rows(self, rows: Iterable[Row], *checkpoints: Checkpoint) -> None:
        """Store rows. Reasons that are stored already are left out: base and naive are in every group."""
        fresh: list[Record] = [row for row in rows if self._count(row)]
        if fresh or checkpoints:
            self._store([*fresh, *checkpoints])

    def checkpoint(  # noqa: PLR0913  # the fields of a checkpoint
        self,
        rows: Iterable[Row],
        case: Case,
        group: int = 0,
        phase: Phase | None = None,
        costs_s: Mapping[Variant, float] | None = None,
        *,
        traced: bool = False,
    ) -> None:
        """Store rows and a line that marks their phase, or without a phase their case, as complete."""
        spent_s = self.stopwatch.spent_s
        line = Checkpoint(
            case=case,
            group=group,
            phase=phase,
            wall_s=sum(spent_s.values()),
            spent_s=dict(spent_s),
            costs_s={variant.name: cost_s for variant, cost_s in (costs_s or {}).items()},
            traced=traced,
        )
        rows = list(rows)
        if phase is None and not traced:
            self.remaining.finish(case)
        elif fastest := _fastest(rows):
            self._fastest[case] = fastest
        with self.stopwatch.on("storing"):
            self.store_rows(rows, line)

    def costs_s(self, case: Case) -> Mapping[str, float]:
        """Return the seconds that each variant took on a case in an earlier part of the run."""
        return self._costs_s.get(case, {})

    def give_up(self, variants: Iterable[Variant], case: Case) -> None:
        """Store a reason for each variant that ended the process in the set-up of GIVE_UP other cases."""
        for variant in variants:
            crashes = [row for row in self._crashes if row.variant == variant]
            if len(crashes) >= GIVE_UP and not self.reason(variant, case):
                row = crashes[-1]
                reason = f"not tried: it ended the process on {GIVE_UP} other cases: {row.reason}"
                self.store_rows([msgspec.structs.replace(row, case=case, reason=reason)])

    def reason(self, variant: Variant, case: Case) -> str:
        """Return the reason why a variant is not measured on a case in any phase, or an empty string."""
        row = self._skipped.get((variant, case, None, None))
        return row.reason if row else ""

    def note(self, text: str) -> None:
        """Add a note about the whole run."""
        self._notes[text] = None

    def announce(self, variant: Variant, case: Case, activity: str) -> None:
        """Report the variant and activity that run now, such as ``set-up`` or ``forward check``."""
        self.watch(variant, case, activity)
        self._report(variant, case, activity)

    def announce_visit(self, variant: Variant, case: Case, phase: Phase, method: str) -> None:
        """Announce the variant of a visit; report it if nothing was reported for VISIT_S."""
        self.watch(variant, case, phase)
        if self.stopwatch.seconds() - self._reported_s >= VISIT_S:
            self._report(variant, case, f"{phase} {method} rounds")

    def _report(self, variant: Variant, case: Case, activity: str) -> None:
        """Show the variant and activity with the progress of each case."""
        self._reported_s = self.stopwatch.seconds()
        phase, _, detail = activity.partition(" ")
        stages = {"check": SET_UP, "launches": TRACES}  # they check or trace all phases together
        stage = stages.get(detail, phase)
        self.remaining.begin((case, stage))
        cases = [
            CaseProgress(
                shown.label,
                self.remaining.share(shown),
                stage if shown == case else "",
                self._fastest.get(shown, ""),
            )
            for shown in self.cases
        ]
        run = RunProgress(self.remaining.left_s(), cases)
        self._progress(self.done, self.cells, f"{activity}  {variant.name}  {case.label}", run)

    @property
    def skipped(self) -> list[Skipped]:
        """The rows with a reason instead of a number, so far."""
        return list(self._skipped.values())

    @property
    def summary(self) -> RunSummary:
        """The counts so far."""
        states = [row.status for row in self._skipped.values()]
        return RunSummary(
            len(self._timed) + len(self._with_quality),
            states.count("unavailable"),
            states.count("failed"),
            tuple(self._notes),
        )

    def _count(self, row: Row) -> bool:
        """Count a row; return False for a reason that is stored already."""
        if isinstance(row, Skipped):
            return self._count_skipped(row)
        if row.phase == QUALITY:
            self._with_quality.add((row.variant, row.case))
        elif row.metric == "latency_ns":
            self._timed[row.variant, row.case, row.phase, row.method, row.group] = None
        return True

    def _count_skipped(self, row: Skipped) -> bool:
        """Count a reason; return False if it is stored already: a failure replaces only ``unavailable``."""
        key = (row.variant, row.case, row.phase, row.method)
        known = self._skipped.get(key)
        if known and (known.status == "failed" or row.status == "unavailable"):
            return False
        self._skipped[key] = row
        is_whole_phase = row.phase is not None and row.method is None
        if row.status == "failed" and is_whole_phase:  # the phase's times are invalid
            phase = (row.variant, row.case, row.phase)
            self._timed = {timed: None for timed in self._timed if timed[:3] != phase}
        return True


def _fastest(rows: Iterable[Row]) -> str:
    """Return the fastest variant among the times of a phase: ``fastest forward: Flipped 0.31 ms``."""
    times = {
        row: latency_ns
        for row in rows
        if isinstance(row, Measurement)
        and row.metric == "latency_ns"
        and row.variant.mode == "batched"
        and not row.variant.baseline
        and (latency_ns := median(row))
    }
    if not times:
        return ""
    row = min(times, key=lambda row: times[row])
    return f"fastest {row.phase}: {row.variant.name} {format_value(row.metric, times[row])}"
