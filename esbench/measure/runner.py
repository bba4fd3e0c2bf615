"""A whole run: device peaks, every case of the plan, and the record of how it ended."""

import contextlib
import gc
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from esbench import stats, store
from esbench.measure import max_population, memory
from esbench.measure.case_runner import CaseRunner, RunContext, trace_case
from esbench.measure.device_peaks import device_peaks
from esbench.measure.failure import Failure, classify
from esbench.measure.float32_precision import precision, unsupported_reason
from esbench.measure.instruments import Instruments
from esbench.measure.plan import Budget, Plan
from esbench.measure.recorder import Recorder, RunSummary, Stopwatch, Store, Watch, not_watched
from esbench.measure.remaining_time import SET_UP, TRACES, RemainingTime
from esbench.measure.timers import ClockError
from esbench.measure.validation import ExactChecks
from esbench.progress import Show
from esbench.registry import Entry, scheme_docs
from esbench.schema import (
    OUT_OF_MEMORY,
    QUALITY,
    SCHEMA_VERSION,
    Case,
    Environment,
    Measurement,
    Phase,
    Record,
    Request,
    Row,
    Run,
    RunEnd,
    RunHeader,
    Skipped,
    Variant,
)
from esbench.store import Unfinished
from esbench.workload import UnavailableError

PEAKS_SHARE = 0.2
"""The largest share of a time budget that the device peaks may take."""
SEARCH_CELLS = 20
"""The time limit of the search for the largest population in multiples of the time of a cell."""

SET_UP_S, WARM_UP_S, QUALITY_S = 0.25, 0.08, 0.1
"""Guesses of the seconds to set up and check a variant, to warm up a call, and to compute quality metrics."""


def begin(  # noqa: PLR0913, PLR0917  # the fields of a header
    suite: str,
    environment: Environment,
    seed: int,
    results: Path,
    request: Request | None = None,
    code: dict[str, str] | None = None,
    entries: Iterable[Entry] = (),
) -> store.Writer:
    """Open the file of a new run."""
    now = datetime.now(UTC)
    header = RunHeader(
        schema=SCHEMA_VERSION,
        run_id=store.new_run_id(suite, now),
        suite=suite,
        started=now.isoformat(timespec="seconds"),
        seed=seed,
        environment=environment,
        request=request,
        code=code or {},
        sources={entry.variant.name: entry.source for entry in entries if entry.source},
        docs=scheme_docs(entries),
    )
    return store.Writer(results, header)


def resume(unfinished: Unfinished) -> store.Writer:
    """Open the file of an unfinished run, after its last checkpoint."""
    return store.Writer(unfinished.path.parent.parent, unfinished.run.header, unfinished.kept_bytes)


def run(  # noqa: PLR0913  # the parts of a run
    plan: Plan,
    writer: store.Writer,
    progress: Show,
    instruments: Instruments,
    *,
    past: Run | None = None,
    begun_s: float | None = None,
    watch: Watch = not_watched,
) -> RunSummary:
    """Measure a plan; store its rows, and the end of the run even after an error.

    A large file is compressed when the run is complete, which changes ``writer.path``.

    Args:
        plan: the plan of the run.
        writer: the file of the run.
        progress: shows the variant and phase that run now.
        instruments: the instruments of the plan's device.
        past: the earlier part of a resumed run.
        begun_s: the time of :func:`time.monotonic` at which a run without interruptions would have begun.
            The time since then that ``past`` has not charged to an activity is charged to ``restarts``.
        watch: announces each variant before it runs.
    """
    last = past.checkpoints[-1] if past and past.checkpoints else None
    spent_s = dict(last.spent_s) if last else {}
    if past and begun_s is not None:
        uncharged_s = time.monotonic() - begun_s - sum(spent_s.values())
        spent_s["restarts"] = spent_s.get("restarts", 0.0) + uncharged_s
    stopwatch = Stopwatch(spent_s=spent_s)
    status: Literal["complete", "interrupted", "failed"] = "interrupted"
    invalid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    try:
        if not (past and past.device_peaks):
            with stopwatch.on("device peaks"):
                notes = _measure_peaks(plan, instruments, writer)
        summary = run_cases(
            plan,
            lambda records: writer.write(*records),
            progress,
            instruments,
            (*past.rows, *past.checkpoints) if past else (),
            stopwatch,
            watch,
        )
        status = "failed" if summary.failed else "complete"
        stored, _ = store.read_run(writer.path)
        invalid = stats.invalid_reasons(stored) if stored else ()
        if summary.other_processes:
            invalid = (*invalid, f"other processes on the GPU: {', '.join(summary.other_processes)}")
        if not summary.measured and plan.end_s < math.inf:
            invalid = (*invalid, "nothing was measured within the time budget: ask for a longer one")
    finally:
        spent_s = dict(stopwatch.spent_s)
        end = RunEnd(status=status, wall_s=sum(spent_s.values()), invalid=invalid, spent_s=spent_s)
        # If the disk is full, the error that ended the run is raised.
        with contextlib.suppress(OSError) if status == "interrupted" else contextlib.nullcontext():
            writer.write(end)
    writer.compress()
    return replace(summary, notes=(*notes, *summary.notes))


def run_cases(  # noqa: PLR0913, PLR0917  # the parts of a run
    plan: Plan,
    store: Store,
    progress: Show,
    instruments: Instruments,
    past: Iterable[Record] = (),
    stopwatch: Stopwatch | None = None,
    watch: Watch = not_watched,
) -> RunSummary:
    """Measure every case of a plan; store the rows of a phase as soon as it is complete.

    A variant that raises, is wrong or does not fit gets a row with its reason, and the run continues.
    ``past`` are the rows and checkpoints of the earlier part of a resumed run. ``progress`` is called between
    measurements. ``KeyboardInterrupt`` and errors of ``store`` are raised.

    Raises:
        DeviceLostError: the device stopped responding.
    """
    recorder = Recorder(store, progress, past, stopwatch, watch)
    checks = ExactChecks(plan.checks, plan.device, plan.seed)
    limit = memory.limit_memory() if plan.device == "cpu" else contextlib.nullcontext()
    gc.collect()  # once: later collections, one after each case, leave out all objects that exist by now
    with limit, memory.new_garbage():
        budget = Budget(plan, recorder.stopwatch.seconds, traces_last=instruments.traces_last)
        context = RunContext(plan, checks, recorder, instruments, budget)
        order = plan.order
        other_processes: dict[str, None] = {}
        cells = [len(plan.entries_for(case)) * len(plan.phases) for case in order]
        recorder.cells = sum(cells)
        recorder.cases = order
        recorder.remaining = _remaining_time(plan, recorder, traces_last=instruments.traces_last)
        for index, case in enumerate(order):
            recorder.done, later = sum(cells[:index]), order[index + 1 :]
            if recorder.is_done(case):
                continue
            recorder.give_up([entry.variant for entry in plan.entries_for(case)], case)
            if reason := unsupported_reason(case.dtype, plan.device):
                unavailable = Failure("unavailable", reason)  # never measured in another dtype
                reasons = [
                    context.skipped_row(case, entry, None, unavailable) for entry in plan.entries_for(case)
                ]
                recorder.checkpoint(reasons, case)
                continue
            budget.begin(context.waiting_cells(case), sum(map(context.waiting_cells, later)))
            case_runner = CaseRunner(case, context)
            with precision(case.dtype):
                for phase in case_runner.phases():
                    if phase == QUALITY:
                        case_runner.compute_quality()
                    else:
                        case_runner.time(phase)
            costs_s = case_runner.costs_s
            rows: Iterable[Row] = (
                *_find_largest_populations(case, context),
                *_stop_sweep(case, later, context, costs_s),
            )
            recorder.checkpoint(rows, case, costs_s=costs_s)
            other_processes.update(dict.fromkeys(instruments.other_processes()))
        for case in order if instruments.traces_last else ():
            if not recorder.is_traced(case):
                recorder.checkpoint([*trace_case(case, context)], case, traced=True)
    for note in budget.cut_notes(recorder.skipped):
        recorder.note(note)
    return replace(recorder.summary, other_processes=tuple(other_processes))


def _remaining_time(plan: Plan, recorder: Recorder, *, traces_last: bool) -> RemainingTime:
    """Return the expected time of the stages that are not stored yet."""
    guesses_s: dict[str, float] = {SET_UP: SET_UP_S}
    for phase in plan.timed:
        guesses_s[phase] = len(plan.methods_of(phase)) * (plan.cell_s + WARM_UP_S)
    if QUALITY in plan.phases:
        guesses_s[QUALITY] = QUALITY_S
    if traces_last:
        guesses_s[TRACES] = SET_UP_S
    variants: dict[tuple[Case, str], int] = {}
    for case in plan.order:
        phases = [phase for phase in plan.phases if not recorder.is_done(case, 0, phase)]
        stages = [*([SET_UP, *phases] if phases else []), *([TRACES] if traces_last else [])]
        variants |= dict.fromkeys(((case, name) for name in stages), len(plan.entries_for(case)))
    return RemainingTime(variants, guesses_s, recorder.stopwatch.seconds)


def _measure_peaks(plan: Plan, instruments: Instruments, writer: store.Writer) -> tuple[str, ...]:
    """Measure and store the device peaks; return a note if that fails, otherwise nothing."""
    now_s = time.monotonic()
    end_s = now_s + PEAKS_SHARE * (plan.end_s - now_s)
    try:
        dtypes = sorted({case.dtype for case in plan.cases})
        for peak in device_peaks(plan.device, dtypes, instruments.clocks[0], end_s):
            writer.write(peak)
    except (UnavailableError, ClockError, RuntimeError, MemoryError) as error:
        return (
            f"no percent of the roofline bound: the device peaks were not measured: {classify(error).reason}",
        )
    return ()


def _find_largest_populations(case: Case, context: RunContext) -> Iterator[Measurement]:
    """For each variant that ran out of memory on a case, yield the largest population that fits."""
    plan, recorder = context.plan, context.recorder
    if not plan.timed:
        return
    # Base and naive have only the phase forward.
    phase: Phase = "forward" if "forward" in plan.timed else plan.timed[0]
    for entry in plan.entries_for(case):
        spare_s = context.budget.spare_s
        if not recorder.reason(entry.variant, case).startswith(OUT_OF_MEMORY) or spare_s <= 0:
            continue
        recorder.announce(entry.variant, case, "largest population")
        fits = max_population.fit_test(entry, case, phase, plan.device, plan.seed)
        try:
            with recorder.stopwatch.on("largest population"):
                largest = max_population.find_largest(
                    fits, case.members, min(SEARCH_CELLS * plan.cell_s, spare_s), recorder.stopwatch.seconds
                )
        except BaseException as error:  # noqa: BLE001  # any error of a variant is a note
            recorder.note(f"no largest population of {entry.variant.name}: {classify(error).reason}")
            continue
        yield Measurement(
            variant=entry.variant,
            case=case,
            phase=phase,
            metric="largest_members",
            method=max_population.METHOD,
            samples=((float(largest.members),),),
            stop=largest.stop,
        )


def _stop_sweep(
    case: Case, later: Sequence[Case], context: RunContext, costs_s: Mapping[Variant, float]
) -> Iterator[Skipped]:
    """Yield a reason for each larger case, if a variant took too long or ran out of memory in a sweep."""
    plan = context.plan
    if not plan.sweep:
        return
    size = plan.size(case)
    for entry in plan.entries_for(case):
        cost_s = costs_s.get(entry.variant, 0.0)
        cost_s += context.recorder.costs_s(case).get(entry.variant.name, 0.0)
        if context.recorder.reason(entry.variant, case).startswith(OUT_OF_MEMORY):
            reason = f"stopped: {OUT_OF_MEMORY} already at {plan.sweep} {size}"
        elif cost_s > plan.stop_s:
            took = f"{plan.sweep} {size} took {cost_s:.3g} s in all, above {plan.stop_s:g} s"
            reason = f"time budget: {took}"
        else:
            continue
        for larger in later:
            if plan.size(larger) > size and entry.supports(larger):
                yield Skipped(
                    variant=entry.variant, case=larger, phase=None, status="unavailable", reason=reason
                )
