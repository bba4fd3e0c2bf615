"""One company, from setting it up to its last phase."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec

from esbench.measure import gpu_monitor, memory, profiler, quality, tracing, validation
from esbench.measure.budget import ACTIVE, COSTS, Budget
from esbench.measure.failure import DeviceLostError, Failure, explain
from esbench.measure.group import CoResidentGroup, Member
from esbench.measure.instruments import Instruments
from esbench.measure.interleave import LATENCY, TimedCall, interleave
from esbench.measure.oracle import Oracle
from esbench.measure.plan import Plan, is_baseline
from esbench.measure.recorder import Recorder
from esbench.measure.stopwatch import Stopwatch
from esbench.measure.timers import Call, Clock
from esbench.registry import Entry
from esbench.schema import (
    LAUNCHES,
    OUT_OF_TIME,
    QUALITY,
    Case,
    Checkpoint,
    Conditions,
    Measurement,
    Phase,
    Row,
    Skipped,
    Variant,
)

Costs = Mapping[Variant, float]
"""Variant -> the seconds that it took on a case, in all."""


@dataclass(frozen=True)
class Bench:
    """What a run works with."""

    plan: Plan
    oracle: Oracle
    ledger: Recorder
    tools: Instruments
    watch: Stopwatch
    budget: Budget

    def settle(  # noqa: PLR0913  # the fields of a line
        self,
        rows: Iterable[Row],
        case: Case,
        company: int,
        phase: Phase | None,
        costs_s: Costs,
        *,
        traced: bool = False,
    ) -> None:
        """Store the rows of a phase, or of a case, with the line that says that they are all of it."""
        line = Checkpoint(
            case=case,
            company=company,
            phase=phase,
            wall_s=0.0,
            spent_s=dict(self.watch.spent_s),
            costs_s={variant.name: cost_s for variant, cost_s in costs_s.items()},
            traced=traced,
        )
        with self.watch.on("storing"):
            self.ledger.settle(rows, line)

    def reason(
        self, entry: Entry, case: Case, phase: Phase | None, fault: Failure, method: str | None = None
    ) -> Skipped:
        """Return the row of a reason.

        Raises:
            DeviceLostError: the reason is that the device is gone: nothing more can be measured.

        """
        if not self.tools.alive():
            message = f"the device does not answer any more since {entry.variant.name}: {fault.reason}"
            raise DeviceLostError(message)
        return Skipped(variant=entry.variant, case=case, phase=phase, method=method, **fault._asdict())


@dataclass(frozen=True)
class CaseRunner:
    """One company, from setting it up to its last phase. ``costs_s`` adds up what each variant took."""

    company: CoResidentGroup
    number: int
    bench: Bench
    costs_s: dict[Variant, float] = field(default_factory=dict)

    def set_up(self, entries: Sequence[Entry]) -> None:
        """Admit what passes the oracle, fits and has time; write a row for everything else."""
        cut: list[Row] = []
        for entry in entries:
            returns = self.number > 0 and is_baseline(entry)
            if returns or self.bench.budget.has_room(entry, self.company.variants):
                self._announce(entry, "set-up")
                with self._charged(entry, "set-up"):
                    self.company.admit(entry, self.bench.oracle)
                self._write_faults()
            else:
                cut.append(self._reason(entry, None, Failure("unavailable", OUT_OF_TIME)))
        self.bench.ledger.enter(cut)
        self.bench.ledger.finish(len(self.bench.plan.phases) * len(cut))
        for phase in self.bench.plan.timed:
            self.company.rehearse(phase, partial(self._rehearsing, phase))
            self._write_faults()

    @contextmanager
    def _rehearsing(self, phase: Phase, entry: Entry) -> Iterator[None]:
        """Look for time before a rehearsal; what all others are compared with is rehearsed in any case."""
        self._announce(entry, f"{phase} rehearsal")
        if not is_baseline(entry):
            self.bench.budget.check()
        with self._charged(entry, "audit"):
            yield

    def _write_faults(self) -> None:
        """Write a row for everybody who was turned away since the last time."""
        while self.company.faults:
            entry, fault = self.company.faults.pop(0)
            self.bench.ledger.enter([self._reason(entry, None, fault)])
            self.bench.ledger.finish(len(self.bench.plan.phases))

    def measure(self) -> None:
        """Measure phase after phase, in a seeded order, those that are not settled yet; quality at last."""
        case, plan = self.company.case, self.bench.plan
        seed = f"{plan.seed} {case.label} {self.number}"
        order = random.Random(seed).sample(plan.timed, len(plan.timed))  # noqa: S311  # an order, not a secret
        waiting = [
            phase for phase in plan.phases if not self.bench.ledger.is_settled(case, self.number, phase)
        ]
        members = self.company.variants
        self.bench.budget.expect(members, len(members) * plan.cells_of(waiting))
        for phase in [*order, *({QUALITY} & {*plan.phases})]:
            if phase in waiting:
                rng = random.Random(f"{seed} {phase}")  # noqa: S311  # an order, not a secret
                found = self._qualities() if phase == QUALITY else self._measure_phase(phase, rng)
                self.bench.settle([*self._absent(phase), *found], case, self.number, phase, self.costs_s)
            self.bench.ledger.finish(len(self.company.members))

    def _qualities(self) -> Iterator[Row]:
        """Yield what each member says of its quality, or why it says nothing; once, in its first company."""
        for member in self.company.members if self.number == 0 else self.company.guests:
            entry, figure = member.entry, self._figure(member, QUALITY)
            self._announce(entry, QUALITY)
            try:
                self.bench.budget.check()
                with self._charged(entry, QUALITY):
                    rows = quality.rows(member.workload, figure)
                self.company.surroundings.check()
            except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
                rows = [self._reason(entry, QUALITY, explain(error))]
            yield from rows

    def _absent(self, phase: Phase) -> Iterator[Row]:
        """Yield a reason for each member that has no such phase to be timed."""
        for member in self.company.members:
            if phase not in {QUALITY, *member.workload.phases}:
                reason = member.workload.unavailable.get(phase, f"it has no phase {phase}")
                yield self._reason(member.entry, phase, Failure("unavailable", reason))

    def _measure_phase(self, phase: Phase, rng: random.Random) -> list[Row]:
        """Time all members in the same rounds, method by method; then the other instruments."""
        members = self.company.in_phase(phase)
        rows: dict[Variant, list[Row]] = {member.entry.variant: [] for member in members}
        for clock in self.bench.tools.clocks:
            timed = [one for one in members if self.bench.plan.is_timed(one.entry, phase, clock.method)]
            for member, row in self._timed(timed, phase, clock, rng):
                rows[member.entry.variant].append(row)
        for member in members:
            self._announce(member.entry, f"{phase} memory and launches")
            found = rows[member.entry.variant]
            if not any(isinstance(row, Measurement) for row in found):
                continue
            try:
                self.bench.budget.check()
                with self._charged(member.entry, "memory"):
                    labels, figures = self._figures(member, phase)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
                rows[member.entry.variant] = [self._reason(member.entry, phase, explain(error))]
            else:
                rows[member.entry.variant] = [*_labelled(found, labels), *figures]
        return [row for found in rows.values() for row in found]

    def _timed(
        self, members: Sequence[Member], phase: Phase, clock: Clock, rng: random.Random
    ) -> Iterator[tuple[Member, Row]]:
        """Yield each member's times by one method, or the reason for none."""
        tracks: list[tuple[Member, TimedCall]] = []
        cell_s = self.bench.budget.cell_s(len(members))
        for member in members:
            self._announce(member.entry, f"{phase} {clock.method}")
            try:
                self.bench.budget.check()
                with self._charged(member.entry, "warm-up"):
                    tracks.append((member, self._warm(member, phase, clock, cell_s)))
            except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
                yield member, self._reason(member.entry, phase, explain(error), clock.method)
        with self.bench.watch.on("rounds"):
            interleave([track for _, track in tracks], rng)
        for member, track in tracks:
            self._charge(member.entry, track.spent_s)
            if track.fault:
                yield member, self._reason(member.entry, phase, track.fault, clock.method)
            else:
                yield from ((member, row) for row in self._times(member, phase, clock, track))

    def _warm(self, member: Member, phase: Phase, clock: Clock, cell_s: float) -> TimedCall:
        """Prepare a member's call for the clock and warm it up."""
        workload = member.workload
        workload.enter(phase)
        plain = workload.phases[phase]
        call: Call = clock.prepare(plain, max(1, len(workload.inputs)))
        if call is not plain:
            validation.check_replay(workload, phase, call)
        track = TimedCall(
            call,
            clock,
            cell_s,
            stays=is_baseline(member.entry),
            conditions=self._conditions,
        )
        track.warm_up()
        return track

    def _conditions(self) -> Conditions | None:
        """Read what the device says beside a visit, and look whether the call left the rest as it was."""
        self.company.surroundings.check()
        return self.bench.tools.conditions()

    def _times(self, member: Member, phase: Phase, clock: Clock, track: TimedCall) -> Iterator[Row]:
        work = member.workload.work(phase)
        for metric, rounds in track.rounds.items():
            yield self._figure(member, phase)(
                metric=metric,
                method=clock.method,
                samples=tuple(rounds),
                stop=track.stop,
                warm_up=track.warm_up_state,
                labels=track.labels,
                places=tuple(track.places),
                # The other times are of the same visits: stored once, see `esbench.store`.
                conditions=tuple(track.conditions) if metric == LATENCY else (),
                work=work,
            )

    def _figures(self, member: Member, phase: Phase) -> tuple[tuple[str, ...], list[Row]]:
        """Return what the other instruments read of a phase, and labels for its times.

        Raises:
            WrongResultError: they show that the times are not what they seem.

        """
        tools, workload = self.bench.tools, member.workload
        call, figure = workload.phases[phase], self._figure(member, phase)
        footprint = tools.footprint(call)
        validation.check_memory(footprint, phase)
        is_traced = phase in self.bench.plan.traced and not tools.traces_last
        launches, labels = tracing.launches(tools, call, phase) if is_traced else (None, ())
        counts = {
            ("peak_bytes", memory.METHOD): footprint.peak_bytes,
            ("reserved_bytes", memory.METHOD): footprint.reserved_bytes,
            ("process_bytes", "process"): footprint.process_bytes,
            (LAUNCHES, profiler.METHOD): launches,
            ("noise_bytes", "state"): workload.noise_bytes if phase == "sample" else None,
        }
        rows: list[Row] = [
            figure(metric=metric, method=method, samples=((float(count),),))
            for (metric, method), count in counts.items()
            if count is not None
        ]
        rows += self._activity(call, phase, member.entry.variant, figure)
        validation.confirm(workload, phase, member.prints[phase])
        self.company.surroundings.check()
        return labels, rows

    def _activity(
        self, call: Call, phase: Phase, variant: Variant, figure: Callable[..., Measurement]
    ) -> list[Row]:
        wanted = phase == ACTIVE and self.bench.plan.is_active(self.company.case, variant)
        if not wanted or self.bench.tools.activity is None:
            return []
        if self.bench.budget.spare_s < COSTS[self.bench.plan.device].active_s:
            self.bench.ledger.note(f"utilisation, power and energy of {variant.name}: {OUT_OF_TIME}")
            return []
        found = self.bench.tools.activity(call)
        if found.reason:
            self.bench.ledger.note(f"utilisation, power and energy: {found.reason}")
        return [
            figure(metric=metric, method=gpu_monitor.METHOD, samples=(samples,))
            for metric, samples in found.samples.items()
        ]

    def _figure(self, member: Member, phase: Phase) -> Callable[..., Measurement]:
        return partial(
            Measurement,
            variant=member.entry.variant,
            case=self.company.case,
            phase=phase,
            company=self.number,
        )

    def _reason(
        self, entry: Entry, phase: Phase | None, fault: Failure, method: str | None = None
    ) -> Skipped:
        return self.bench.reason(entry, self.company.case, phase, fault, method)

    def _announce(self, entry: Entry, what: str) -> None:
        case = self.company.case
        self.bench.ledger.announce(entry.variant.label(case.operator), case.label, what)

    @contextmanager
    def _charged(self, entry: Entry, name: str) -> Iterator[None]:
        """Charge what happens inside to an activity of the run, and to a variant."""
        start_s = self.bench.watch.seconds()
        try:
            with self.bench.watch.on(name):
                yield
        finally:
            taken_s = self.bench.watch.seconds() - start_s
            self._charge(entry, taken_s)
            self.bench.budget.learn(entry.variant, taken_s, is_set_up=name in {"set-up", "audit"})

    def _charge(self, entry: Entry, seconds: float) -> None:
        self.costs_s[entry.variant] = self.costs_s.get(entry.variant, 0.0) + seconds


def _labelled(rows: Iterable[Row], labels: tuple[str, ...]) -> Iterator[Row]:
    """Add labels to times."""
    for row in rows:
        if labels and isinstance(row, Measurement):
            yield msgspec.structs.replace(row, labels=row.labels + labels)
        else:
            yield row
