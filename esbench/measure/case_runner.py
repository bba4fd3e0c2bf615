"""One case of a run, from set-up to the last phase.

Variants that fit in memory together form a co-resident group: they are set up at the same time and timed in
the same rounds. A case with more variants than fit is measured in several groups, each with base and naive.
"""

import contextlib
import gc
import json
import math
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
import torch

from esbench.errors import message_line
from esbench.measure import gpu_monitor, memory, profiler, validation
from esbench.measure.failure import DeviceLostError, Failure, NotCheckedError, classify
from esbench.measure.float32_precision import precision
from esbench.measure.instruments import Instruments
from esbench.measure.interleave import LATENCY, REFERENCE_ROUNDS, TimedCall, interleave
from esbench.measure.memory import is_out_of_memory
from esbench.measure.neighbors import (
    VISITS,
    BaseTimes,
    SlowedDownError,
    has_running_threads,
    lasting_slowdown,
    time_base,
)
from esbench.measure.plan import MONITORED_PHASE, Budget, Plan, is_base_or_naive
from esbench.measure.recorder import Recorder
from esbench.measure.remaining_time import SET_UP
from esbench.measure.timers import Call, Clock
from esbench.measure.validation import ExactChecks, TorchState
from esbench.registry import Entry, is_reference
from esbench.schema import (
    LAUNCHES,
    OUT_OF_TIME,
    PHASES,
    QUALITY,
    Case,
    Conditions,
    Measurement,
    Phase,
    Row,
    Skipped,
    Variant,
)
from esbench.store import encode
from esbench.supervisor import SLOWS_OTHERS
from esbench.workload import QualityMetric, UnavailableError, Workload, WrongResultError, build

T = TypeVar("T")

BASE_PHASES: tuple[Phase, ...] = ("forward", "step")
"""The phases in which base is timed again: a hook may slow layers, products or optimizers down."""


@dataclass(frozen=True)
class RunContext:
    """The plan, checks, recorder, instruments and time limit that all cases of a run share."""

    plan: Plan
    checks: ExactChecks
    recorder: Recorder
    instruments: Instruments
    budget: Budget

    def waiting_entries(self, case: Case) -> list[Entry]:
        """Return the variants that are still to be measured on a case."""
        if self.recorder.is_done(case):
            return []
        entries = self.plan.entries_for(case)
        return [entry for entry in entries if not self.recorder.reason(entry.variant, case)]

    def waiting_cells(self, case: Case) -> int:
        """Return the number of cells that are still to be measured on a case."""
        return len(self.waiting_entries(case)) * self.plan.cells_of(self.plan.phases)

    def skipped_row(
        self, case: Case, entry: Entry, phase: Phase | None, failure: Failure, method: str | None = None
    ) -> Skipped:
        """Return the row of a failure.

        Raises:
            DeviceLostError: the device stopped responding, so nothing more can be measured.
        """
        if not self.instruments.alive():
            stopped = "the device stopped responding"
            # Announced before it is raised: on a lost device, freeing memory may raise or end the process.
            self.recorder.watch(entry.variant, case, phase or SET_UP, f"{stopped} ({failure.reason})")
            raise DeviceLostError(f"{stopped} after {entry.variant.name}: {failure.reason}")
        return Skipped(variant=entry.variant, case=case, phase=phase, method=method, **failure._asdict())


@dataclass(frozen=True, eq=False)
class PreparedVariant:
    """A variant that is set up.

    Attributes:
        unavailable: phase that it does not have -> the reason.
        fingerprints: for each phase those of the first result.
    """

    entry: Entry
    workload: Workload
    unavailable: Mapping[Phase, str]
    fingerprints: dict[Phase, validation.Fingerprints] = field(default_factory=dict)


ContextFor = Callable[[Entry], AbstractContextManager[None]]
"""Maps a variant to the context in which it is set up or called, such as one that charges the time to it."""


@dataclass
class CoResidentGroup:
    """The variants of one case that are set up at the same time.

    Attributes:
        variants: the variants that are set up.
        deferred: variants for the next group: they ran out of memory, but other candidates were set up.
        failures: the variants that were refused, with their reasons. A variant that runs out of memory with
            only base and naive beside it is one of them.
    """

    case: Case
    device: str
    seed: int
    synchronize: Callable[[], object]
    torch_state: TorchState = field(default_factory=TorchState)
    variants: list[PreparedVariant] = field(default_factory=list)
    deferred: list[Entry] = field(default_factory=list)
    failures: list[tuple[Entry, Failure]] = field(default_factory=list)

    def admit(
        self, entry: Entry, checks: ExactChecks, around: ContextFor = lambda _: contextlib.nullcontext()
    ) -> None:
        """Check a variant on the small exact cases, set it up on this case and check it here."""
        prepared = self._set_up(entry, checks, around)
        if prepared is not None:
            self.variants.append(prepared)
            return
        had_time = not self.failures or self.failures[-1][1].reason != OUT_OF_TIME
        if had_time:  # otherwise nothing was allocated, and garbage collection takes 0.1 s
            free_memory()

    def precheck(self, phase: Phase, around: ContextFor = lambda _: contextlib.nullcontext()) -> None:
        """Enter a phase with all variants, then check the call of each.

        A variant that fails is removed; if base has no room, the last candidate is removed instead.
        """
        called: set[Variant] = set()

        def enter(prepared: PreparedVariant) -> None:
            with around(prepared.entry):
                prepared.workload.enter(phase)
                self.torch_state.check()

        def call(prepared: PreparedVariant) -> None:
            with around(prepared.entry):
                if prepared.entry.variant in called:  # it ran out of memory, maybe after it read inputs
                    prepared.workload.enter(phase)
                called.add(prepared.entry.variant)
                prepared.fingerprints[phase] = validation.precheck(prepared.workload, phase, self.synchronize)
                self.torch_state.check()

        for action in (enter, call):
            done: set[Variant] = set()
            # After a failure a variant is removed, and base is tried again if another one made room for it.
            while remaining := [v.entry for v in self.in_phase(phase) if v.entry.variant not in done]:
                if self._try(remaining[0], action):
                    done.add(remaining[0].variant)
                else:
                    free_memory()

    def in_phase(self, phase: Phase) -> list[PreparedVariant]:
        """Return the variants that have the phase, baselines first."""
        return [prepared for prepared in self.variants if phase not in prepared.unavailable]

    @property
    def candidates(self) -> list[PreparedVariant]:
        """The variants that are compared with base and naive."""
        return [prepared for prepared in self.variants if not is_base_or_naive(prepared.entry)]

    def next_entries(self) -> list[Entry]:
        """Return the entries of the next group: base and naive again, and the deferred ones."""
        baselines = [prepared.entry for prepared in self.variants if is_base_or_naive(prepared.entry)]
        return [*baselines, *self.deferred] if self.deferred else []

    def free(self, before: Callable[[Entry], object] = lambda _: None) -> None:
        """Free everything that was set up, one variant after another; ``before`` is called with each."""
        while self.variants:
            prepared = self.variants.pop(0)
            before(prepared.entry)
            workload = weakref.ref(prepared.workload)
            del prepared
            if workload():  # in a reference cycle; a collection takes 0.1 s, too long for each variant
                gc.collect()
        free_memory()

    def _set_up(self, entry: Entry, checks: ExactChecks, around: ContextFor) -> PreparedVariant | None:
        try:
            with around(entry):
                if failure := checks.failure(entry, self.case.operator):
                    self.failures.append((entry, failure))
                    return None
                workload = build(entry.scheme, self.case, self.device, self.seed)
                validation.verify(entry, workload)
                self.torch_state.check()
                return PreparedVariant(entry, workload, missing_phases(workload))
        except BaseException as error:  # noqa: BLE001  # any error of a variant is stored as its reason
            self._record_failure(entry, error)
            return None
        finally:
            self.torch_state.restore()

    def _try(self, entry: Entry, action: Callable[[PreparedVariant], None]) -> bool:
        """Call ``action`` with a variant; return whether it succeeded.

        A variant that fails is removed. If base or naive runs out of memory, the last candidate is removed
        instead, because each group needs them. The argument is an entry, so that no variable of the caller
        keeps a removed variant allocated.
        """
        prepared = next(prepared for prepared in self.variants if prepared.entry is entry)
        try:
            action(prepared)
        except BaseException as error:  # noqa: BLE001  # any error of a variant is stored as its reason
            makes_room = is_out_of_memory(error) and is_base_or_naive(entry) and self.candidates
            removed = self.candidates[-1] if makes_room else prepared
            self.variants.remove(removed)
            self.torch_state.restore()
            self._record_failure(removed.entry, error)
            return False
        return True

    def _record_failure(self, entry: Entry, error: BaseException) -> None:
        """Store the failure of a variant, or defer it to the next group if others took its memory."""
        if is_out_of_memory(error) and self.candidates:
            self.deferred.append(entry)
        else:
            self.failures.append((entry, classify(error)))


class CaseRunner:
    """Measures one case: sets up its groups one after another and measures each phase of each group.

    Attributes:
        costs_s: the seconds that each variant took, over all groups.
    """

    def __init__(self, case: Case, context: RunContext) -> None:
        """Store the case; nothing is set up yet."""
        self.case = case
        self.context = context
        self.costs_s: dict[Variant, float] = {}
        self._group_number = 0
        self._reference_rounds_s = 0.0  # the expected seconds of the rounds of base, naive and dense noise
        self._begin_group()

    def phases(self) -> Iterator[Phase]:
        """Set up one group after another; yield each phase to be measured while its group is set up."""
        waiting = self.context.waiting_entries(self.case)
        while waiting:
            self._begin_group()
            try:
                self._set_up(waiting)
                waiting = self._group.next_entries()
                if self._group_number == 0 or self._group.candidates:  # not base and naive alone once more
                    yield from self._phases_in_order(len(waiting))
            finally:
                self._group.free(self._watch_clean_up)
            self.costs_s = self._group_costs_s | self.costs_s  # base and naive: of their first group
            self._group_number += 1

    def time(self, phase: Phase) -> None:
        """Time all variants in the same rounds, method by method; read the other instruments; store all."""
        context = self.context
        variants, cells = self._group.in_phase(phase), 0
        rows: dict[PreparedVariant, list[Row]] = {prepared: [] for prepared in variants}
        rng = random.Random(f"{context.plan.seed} {self.case.label} {self._group_number} {phase}")  # noqa: S311  # an order, not a secret
        seconds = context.recorder.stopwatch.seconds
        start_s, rounds_s = seconds(), 0.0
        for clock in context.instruments.clocks:
            timed = [v for v in variants if context.plan.is_timed(v.entry, phase, clock.method)]
            cells += len(timed)
            calls = self._warm_calls(timed, phase, clock, rows)
            rounds_start_s = seconds()
            with context.recorder.stopwatch.on("rounds"):
                interleave(list(calls.values()), rng)
            rounds_s += seconds() - rounds_start_s
            for prepared in [*calls]:  # popped, so that all graphs are freed before memory is measured
                rows[prepared] += self._rows_of_call(prepared, phase, clock, calls.pop(prepared))
        stored = [row for prepared in variants for row in self._add_readings(prepared, phase, rows[prepared])]
        finds_slowdowns = not context.plan.is_screening
        if finds_slowdowns and (ratio := self._base_slowdown()) > 1:
            slower = f"base took {ratio:.3g}x as long after these rounds as after its set-up"
            stored = [add_labels(row, (slower,)) for row in stored]
        if finds_slowdowns and has_running_threads():
            stored = [add_labels(row, ("threads used the CPU after these rounds",)) for row in stored]
        context.budget.add_overhead(cells, seconds() - start_s - rounds_s)
        missing = [
            context.skipped_row(self.case, v.entry, phase, Failure("unavailable", v.unavailable[phase]))
            for v in self._group.variants
            if phase in v.unavailable
        ]
        self._store(phase, [*missing, *stored])

    def compute_quality(self) -> None:
        """Store the quality metrics of each variant, or the reason why it has none, in its first group."""
        rows: list[Row] = []
        for prepared in self._new_variants:
            self._announce(prepared.entry, QUALITY)
            metrics = self._attempt(prepared.entry, QUALITY, QUALITY, partial(self._quality_rows, prepared))
            rows += [metrics] if isinstance(metrics, Skipped) else metrics
        self._store(QUALITY, rows)

    def _quality_rows(self, prepared: PreparedVariant) -> list[Row]:
        rows = quality_rows(prepared.workload, self._measurement(prepared, QUALITY))
        self._group.torch_state.check()
        return rows

    def _begin_group(self) -> None:
        plan, synchronize = self.context.plan, self.context.instruments.synchronize
        self._group = CoResidentGroup(self.case, plan.device, plan.seed, synchronize)
        self._group_costs_s: dict[Variant, float] = {}
        self._base_times: BaseTimes = {}

    @property
    def _new_variants(self) -> list[PreparedVariant]:
        """The variants that were not in an earlier group; base and naive are in every group."""
        return self._group.variants if self._group_number == 0 else self._group.candidates

    def _set_up(self, entries: Sequence[Entry]) -> None:
        """Set up and check the variants; store a row for each that is wrong, does not fit or has no time."""
        budget, seconds = self.context.budget, self.context.recorder.stopwatch.seconds
        start_s = seconds()
        for entry in entries:
            may_join = self.context.recorder.may_join(entry.variant, self.case, self._group_number)
            if not is_base_or_naive(entry) and not may_join:
                self._group.deferred.append(entry)
                continue
            self._announce(entry, SET_UP)
            # Time to set this variant up, as long as for those before it, and to measure it and them, which
            # takes at least as long as their set-up.
            count, spent_s = len(self._group.variants), seconds() - start_s
            reserve_s = spent_s / max(count, 1) + max((count + 1) * budget.variant_s, spent_s)
            around = partial(self._charge, activity="set-up", reserve_s=reserve_s)
            self._group.admit(entry, self.context.checks, around)
            self._write_failures()
            if entry.variant.mode == "base":
                times = self._time_base()
                # A call that takes long was timed only once, which is too few to compare with.
                self._base_times = {metric: means for metric, means in times.items() if len(means) == VISITS}
            elif not self.context.plan.is_screening:
                self._check_neighbors(entry)
        start_s, count = seconds(), len(self._group.variants)
        self._reference_rounds_s = 0.0
        for phase in self.context.plan.timed:
            self._group.precheck(phase, partial(self._around_precheck, phase))
            self._write_failures()
        budget.add_checks(count, seconds() - start_s)

    def _check_neighbors(self, entry: Entry) -> None:
        """Check that after the set-up of a variant base is as fast as before, and no thread keeps running.

        Raises:
            SlowedDownError: base is slower or a thread runs, and a supervisor starts a new process.
        """
        if has_running_threads():
            finding = "threads used the CPU"
        elif (ratio := self._base_slowdown()) > 1:
            finding = f"base took {ratio:.3g}x as long"
        else:
            return
        recorder, variant = self.context.recorder, entry.variant
        reason = f"{SLOWS_OTHERS} ({finding})"
        if recorder.watch(variant, self.case, SET_UP, reason):
            raise SlowedDownError(f"{variant.name} on {self.case.label}: {reason}")
        recorder.note(f"{finding} after the set-up of {variant.name} on {self.case.label}")
        self._base_times = self._time_base()

    def _base_slowdown(self) -> float:
        """Time base again; return the ratio to its first times if it stays slower, otherwise 1."""
        if not self._base_times or self.context.budget.spare_s <= 0:
            return 1.0
        with self.context.recorder.stopwatch.on("neighbors"):
            measure_after_pause = partial(self._time_base, after_pause=True)
            return lasting_slowdown(self._base_times, self._time_base, measure_after_pause)

    def _time_base(self, *, after_pause: bool = False) -> BaseTimes:
        """Return the times of the forward and the step of base by the first clock, if it is set up."""
        times: dict[str, Sequence[float]] = {}
        for phase in BASE_PHASES:
            base = next((v for v in self._group.in_phase(phase) if v.entry.variant.mode == "base"), None)
            if base is None:
                continue
            try:
                base.workload.enter(phase)
                call, clock = base.workload.phases[phase], self.context.instruments.clocks[0]
                phase_times = time_base(call, clock, after_pause=after_pause)
            except BaseException as error:  # noqa: BLE001  # its rows have the reason
                classify(error)  # raises a KeyboardInterrupt
            else:
                times |= {f"{phase} {metric}": means for metric, means in phase_times.items()}
        return times

    @contextlib.contextmanager
    def _around_precheck(self, phase: Phase, entry: Entry) -> Iterator[None]:
        """Charge a check to its variant, unless base, naive and dense noise need the time that is left."""
        self._announce(entry, f"{phase} check")
        seconds = self.context.recorder.stopwatch.seconds
        start_s = seconds()
        with self._charge(entry, "check", self._reference_rounds_s):
            yield
        if is_reference(entry.variant):
            # References are checked first. A check makes two calls, as a round does: its time is a forecast.
            rounds = REFERENCE_ROUNDS if phase in self.context.plan.reference_phases else 1
            self._reference_rounds_s += rounds * (seconds() - start_s)

    def _write_failures(self) -> None:
        """Store a row for each failure of the group since the last call."""
        while self._group.failures:
            entry, failure = self._group.failures.pop(0)
            self.context.recorder.store_rows([self.context.skipped_row(self.case, entry, None, failure)])

    def _phases_in_order(self, deferred: int) -> Iterator[Phase]:
        """Yield the phases that are not stored yet, in a seeded order; quality comes last.

        Within a time limit the step and the forward come first: rankings need them. The budget reserves time
        for the number of ``deferred`` variants, which are in later groups.
        """
        plan, recorder = self.context.plan, self.context.recorder
        rng = random.Random(f"{plan.seed} {self.case.label} {self._group_number}")  # noqa: S311  # an order, not a secret
        timed = rng.sample(plan.timed, len(plan.timed))
        if plan.end_s < math.inf:
            timed.sort(key=lambda phase: (phase != "step", phase != "forward"))
        order = [*timed, QUALITY] if QUALITY in plan.phases else timed
        waiting = [phase for phase in order if not recorder.is_done(self.case, self._group_number, phase)]
        for phase in order:
            if phase in waiting:
                group_cells = len(self._group.variants) * plan.cells_of(waiting[waiting.index(phase) :])
                self.context.budget.cells = group_cells + deferred * plan.cells_of(order)
                yield phase
            recorder.done += len(self._new_variants)

    def _warm_calls(
        self,
        variants: Sequence[PreparedVariant],
        phase: Phase,
        clock: Clock,
        rows: dict[PreparedVariant, list[Row]],
    ) -> dict[PreparedVariant, TimedCall]:
        """Return the warmed-up call of each variant; if it has none, add the reason to its ``rows``."""
        calls = {}
        cell_s = self.context.budget.cell_s(len(variants))
        for prepared in variants:
            self._announce(prepared.entry, f"{phase} {clock.method}")
            warm_up = partial(self._warm_up, prepared, phase, clock, cell_s)
            call = self._attempt(prepared.entry, phase, "warm-up", warm_up, clock.method)
            if isinstance(call, Skipped):
                rows[prepared].append(call)
            else:
                calls[prepared] = call
        return calls

    def _warm_up(self, prepared: PreparedVariant, phase: Phase, clock: Clock, cell_s: float) -> TimedCall:
        """Prepare the call of a variant for the clock and warm it up."""
        workload = prepared.workload
        workload.enter(phase)
        plain = workload.phases[phase]
        timed: Call = clock.prepare(plain, max(1, len(workload.inputs)))
        if timed is not plain:
            validation.check_replay(workload, phase, timed)
        context, entry = self.context, prepared.entry
        call = TimedCall(
            timed,
            clock,
            cell_s,
            is_baseline=is_base_or_naive(entry),
            is_reference=is_reference(entry.variant) and phase in context.plan.reference_phases,
            renew=validation.InputRenewal(workload.inputs),
            conditions=self._read_conditions,
            before=partial(context.recorder.announce_visit, entry.variant, self.case, phase, clock.method),
            failed=partial(context.skipped_row, self.case, entry, phase),
        )
        call.warm_up()
        return call

    def _read_conditions(self) -> Conditions | None:
        """Check that the visit changed no global state, and read what the device reports."""
        self._group.torch_state.check()
        return self.context.instruments.conditions()

    def _rows_of_call(
        self, prepared: PreparedVariant, phase: Phase, clock: Clock, call: TimedCall
    ) -> Sequence[Row]:
        """Return a row for each metric of a timed call, or one with the reason why it has none.

        The call may have failed, or what its variant declares (work, labels) cannot be stored.
        """
        if call.failure:
            return [self.context.skipped_row(self.case, prepared.entry, phase, call.failure, clock.method)]
        # "memory" is the activity to which the run charges this time.
        rows = self._attempt(
            prepared.entry,
            phase,
            "memory",
            lambda: storable(self._metric_rows(prepared, phase, clock, call)),
            is_timed=True,
        )
        return [rows] if isinstance(rows, Skipped) else rows

    def _metric_rows(
        self, prepared: PreparedVariant, phase: Phase, clock: Clock, call: TimedCall
    ) -> Iterator[Measurement]:
        """Yield a row for each metric of a clock, with its samples."""
        work = prepared.workload.work(phase)
        self._group.torch_state.check()
        labels = call.labels + self.context.checks.labels(prepared.entry, self.case.operator)
        for metric, rounds in call.rounds.items():
            yield self._measurement(prepared, phase)(
                metric=metric,
                method=clock.method,
                samples=tuple(rounds),
                stop=call.stop,
                warm_up=call.warmed.state,
                labels=labels,
                positions=tuple(call.positions),
                # Conditions are stored once for all times of a visit: see `esbench.store`.
                conditions=tuple(call.conditions) if metric == LATENCY else (),
                work=work,
            )

    def _add_readings(self, prepared: PreparedVariant, phase: Phase, times: list[Row]) -> list[Row]:
        """Return the rows of a phase: times and other readings, or the reason why the times are invalid."""
        if not any(isinstance(row, Measurement) for row in times):
            return times
        self._announce(prepared.entry, f"{phase} memory and launches")
        read = partial(self._read_instruments, prepared, phase)
        readings = self._attempt(prepared.entry, phase, "memory", read, is_timed=True)
        if isinstance(readings, Skipped):
            return [readings]
        labels, others = readings
        return [*(add_labels(row, labels) for row in times), *others]

    def _read_instruments(self, prepared: PreparedVariant, phase: Phase) -> tuple[tuple[str, ...], list[Row]]:
        """Read memory, launches, utilization and energy; return labels for the times, and rows.

        Raises:
            NotCheckedError: nothing was compared with a reference after timing.
            WrongResultError: the times are invalid.
        """
        context, workload = self.context, prepared.workload
        call, measurement = workload.phases[phase], self._measurement(prepared, phase)
        noise_bytes = workload.noise_bytes if phase == "sample" else None
        # Noise may be stored in the workload, so that the call does not return it.
        result_bytes = validation.count_bytes(call()) if noise_bytes is None else noise_bytes
        footprint = context.instruments.footprint(call)
        validation.check_memory(footprint, phase, result_bytes)
        is_traced = phase in context.plan.traced and not context.instruments.traces_last
        count, labels = count_launches(context.instruments, call, phase) if is_traced else (None, ())
        counts = {
            ("peak_bytes", memory.METHOD): footprint.peak_bytes,
            ("reserved_bytes", memory.METHOD): footprint.reserved_bytes,
            ("process_bytes", "process"): footprint.process_bytes,
            (LAUNCHES, profiler.METHOD): count,
            ("noise_bytes", "state"): noise_bytes,
        }
        rows: list[Row] = [
            measurement(metric=metric, method=method, samples=((float(value),),))
            for (metric, method), value in counts.items()
            if value is not None
        ]
        if phase == MONITORED_PHASE and context.plan.is_monitored(self.case, prepared.entry.variant):
            rows += self._activity_rows(call, prepared.entry.variant, measurement)
        if not context.plan.is_screening:
            is_compared = validation.postcheck(workload, phase, prepared.fingerprints[phase])
            if not is_compared and not is_base_or_naive(prepared.entry):
                raise NotCheckedError("confirm() of its workload compares no result on new inputs")
        self._group.torch_state.check()
        return labels, storable(rows)

    def _activity_rows(
        self, call: Call, variant: Variant, measurement: Callable[..., Measurement]
    ) -> list[Row]:
        """Return utilization, power and energy of a call, if the device reports them and there is time."""
        context = self.context
        if context.instruments.activity is None:
            return []
        if context.budget.spare_s < gpu_monitor.PACE.lead_in_s + gpu_monitor.PACE.max_s:
            context.recorder.note(f"utilization, power and energy of {variant.name}: {OUT_OF_TIME}")
            return []
        activity = context.instruments.activity(call)
        if activity.reason:
            context.recorder.note(f"utilization, power and energy: {activity.reason}")
        return [
            measurement(metric=metric, method=gpu_monitor.METHOD, samples=(samples,))
            for metric, samples in activity.samples.items()
        ]

    def _store(self, phase: Phase, rows: Sequence[Row]) -> None:
        self.context.recorder.checkpoint(rows, self.case, self._group_number, phase, self._group_costs_s)

    def _measurement(self, prepared: PreparedVariant, phase: Phase) -> Callable[..., Measurement]:
        variant = prepared.entry.variant
        return partial(Measurement, variant=variant, case=self.case, phase=phase, group=self._group_number)

    def _watch_clean_up(self, entry: Entry) -> None:
        self.context.recorder.watch(entry.variant, self.case, "clean-up")

    def _announce(self, entry: Entry, activity: str) -> None:
        self.context.recorder.announce(entry.variant, self.case, activity)

    def _attempt(  # noqa: PLR0913  # an action, and the fields of the row if it fails
        self,
        entry: Entry,
        phase: Phase,
        activity: str,
        action: Callable[[], T],
        method: str | None = None,
        *,
        is_timed: bool = False,
    ) -> T | Skipped:
        """Return the result of an action on a variant, or the reason if it raises or no time is left."""
        try:
            with self._charge(entry, activity, is_timed=is_timed):
                return action()
        except DeviceLostError:
            raise
        except BaseException as error:  # noqa: BLE001  # any error of a variant is stored as its reason
            self._group.torch_state.restore()
            return self.context.skipped_row(self.case, entry, phase, classify(error), method)

    @contextlib.contextmanager
    def _charge(
        self, entry: Entry, activity: str, reserve_s: float = 0.0, *, is_timed: bool = False
    ) -> Iterator[None]:
        """Check that there is time left, then charge the time inside the context to a variant.

        Args:
            entry: the variant.
            activity: the activity of the run to which the time is charged as well.
            reserve_s: seconds that have to be left in the case.
            is_timed: whether the call of the variant is timed already.

        Raises:
            UnavailableError: no time is left.
        """
        is_repeated = self._group_number > 0 and is_base_or_naive(entry)  # each group needs them
        if not is_repeated:
            self.context.budget.check(entry, reserve_s, is_timed=is_timed)
        stopwatch = self.context.recorder.stopwatch
        start_s = stopwatch.seconds()
        try:
            with stopwatch.on(activity):
                yield
        finally:
            cost_s = stopwatch.seconds() - start_s
            self._group_costs_s[entry.variant] = self._group_costs_s.get(entry.variant, 0.0) + cost_s


def missing_phases(workload: Workload) -> dict[Phase, str]:
    """Return each timed phase that a workload does not have, with its reason.

    Raises:
        TypeError: a reason is not a text.
    """
    phases = workload.phases
    missing = [phase for phase in PHASES if phase not in phases]
    reasons = {phase: workload.unavailable.get(phase, f"it has no phase {phase}") for phase in missing}
    for phase, reason in reasons.items():
        if not isinstance(reason, str):
            raise TypeError(
                f"unavailable[{phase!r}] is of type {type(reason).__name__}: give the reason as a str"
            )
    return {phase: message_line(reason) for phase, reason in reasons.items()}


def add_labels(row: Row, labels: tuple[str, ...]) -> Row:
    """Return a measurement with more labels, and a row without a number as it is."""
    return msgspec.structs.replace(row, labels=row.labels + labels) if isinstance(row, Measurement) else row


def storable(rows: Iterable[Row]) -> list[Row]:
    """Return rows, after checking that what their variant declares can be stored.

    Raises:
        ValueError: a row could not be read back, for instance because ``flops`` is NaN.
    """
    checked = list(rows)
    for row in checked:
        encode(row)
    return checked


def quality_rows(workload: Workload, measurement: Callable[..., Measurement]) -> list[Row]:
    """Return a row for each quality metric of a workload: its samples, or the reason why it has none.

    Raises:
        UnavailableError: the workload has no quality metrics.
    """
    compute = getattr(workload, "quality", None)
    if compute is None:
        raise UnavailableError("no quality metrics: its workload has no method quality")
    workload.enter(QUALITY)
    rows = storable(_quality_row(metric, measurement) for metric in compute())
    metrics = [(row.metric, row.method) for row in rows if isinstance(row, Measurement)]
    for metric, method in metrics:
        if metrics.count((metric, method)) > 1:
            raise ValueError(f"its method quality returns the metric {metric} by {method} twice")
    return rows


def _quality_row(metric: QualityMetric, measurement: Callable[..., Measurement]) -> Row:
    """Return the row of a metric, or its reason if it has no samples or some that are not finite."""
    row = measurement(metric=metric.metric, method=metric.method, samples=(metric.samples,))
    not_finite = sum(not math.isfinite(sample) for sample in metric.samples)
    if metric.reason:
        reason = metric.reason
    elif not metric.samples:
        reason = "the metric has no samples"
    elif not_finite:
        reason = f"{not_finite} of {len(metric.samples)} samples are not finite"
    else:
        return row
    return Skipped(
        variant=row.variant,
        case=row.case,
        phase=QUALITY,
        status="unavailable",
        reason=reason,
        method=metric.method,
    )


def count_launches(instruments: Instruments, call: Call, phase: Phase) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of launches of a call and labels for its times; None if the profiler fails.

    Raises:
        WrongResultError: the call works on a stream where it is not timed.
    """
    try:
        trace = instruments.trace(call)
    except (profiler.ProfileError, OSError, json.JSONDecodeError) as error:
        return None, (_no_trace_label(error),)
    if trace.other_streams:
        streams = ", ".join(map(str, trace.other_streams))
        raise WrongResultError(f"{phase} works on another stream ({streams}), where it is not timed")
    if not trace.waits:
        return trace.launches, ()
    names = ", ".join(dict.fromkeys(trace.waits))
    return trace.launches, (f"synchronizes inside: {names}, {len(trace.waits)} times a call",)


def trace_case(case: Case, context: RunContext) -> Iterator[Row]:
    """Yield the launches of each variant in each timed phase of a case, or the reason for a failure.

    The first trace on a GPU attaches CUPTI, which slows later launches down. So a run times all cases first,
    and then sets each variant up once more, alone, for its traces. `esbench.store` reads the two together: it
    drops the times of a phase that worked on another stream, and copies the labels of a trace to the times.
    """
    for entry in context.plan.entries_for(case):
        timed = context.recorder.timed_phases(entry.variant, case)
        is_failed = bool(context.recorder.reason(entry.variant, case))
        phases = [phase for phase in timed if phase in context.plan.traced and not is_failed]
        if phases and context.recorder.stopwatch.seconds() >= context.plan.end_s:
            context.recorder.note(f"not all launches and streams were checked: {OUT_OF_TIME}")
            return
        if phases:
            with precision(case.dtype), context.recorder.stopwatch.on("launches"):
                yield from _trace_variant(entry, case, phases, context)
            free_memory()


def _trace_variant(entry: Entry, case: Case, phases: list[Phase], context: RunContext) -> Iterator[Row]:
    """Set a variant up alone; yield the launches of each phase, or the reason for a failure."""
    torch_state, workload = TorchState(), None
    for phase in phases:
        context.recorder.announce(entry.variant, case, f"{phase} launches")
        try:
            if workload is None:
                workload = build(entry.scheme, case, context.plan.device, context.plan.seed)
            workload.enter(phase)
            count, labels = count_launches(context.instruments, workload.phases[phase], phase)
            torch_state.check()
        except BaseException as error:  # noqa: BLE001  # any error of a variant is stored as its reason
            row = context.skipped_row(case, entry, phase, classify(error))
            if row.status == "failed":
                yield row
                continue
            count, labels = None, (_no_trace_label(error),)
        yield Measurement(
            variant=entry.variant,
            case=case,
            phase=phase,
            metric=LAUNCHES,
            method=profiler.METHOD,
            samples=() if count is None else ((float(count),),),
            labels=labels,
        )


def _no_trace_label(error: BaseException) -> str:
    return f"launches and streams were not checked: {classify(error).reason}"


def free_memory() -> None:
    """Collect garbage and return unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # raised by a device that is lost; the next call reports it
            torch.cuda.empty_cache()
