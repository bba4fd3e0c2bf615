"""A run from its first line to its last: the plan measured, rows stored as they come."""

import math
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from esbench import stats, store
from esbench.measure.device_peaks import ceilings
from esbench.measure.failure import explain
from esbench.measure.instruments import Instruments
from esbench.measure.loop import Past, run
from esbench.measure.plan import Plan
from esbench.measure.recorder import Outcome
from esbench.measure.stopwatch import Stopwatch
from esbench.measure.timers import ClockError
from esbench.progress import Show
from esbench.registry import UnavailableError
from esbench.schema import SCHEMA_VERSION, Environment, Request, Run, RunEnd, RunHeader
from esbench.unfinished import Unfinished

PEAKS_SHARE = 0.2
"""The device peaks take at most this share of a time budget."""


def begin(  # noqa: PLR0913, PLR0917  # what stands in a header
    suite: str,
    environment: Environment,
    seed: int,
    results: Path,
    request: Request | None = None,
    code: dict[str, str] | None = None,
    sources: dict[str, str] | None = None,
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
        sources=sources or {},
    )
    return store.Writer(results, header)


def resume(kept: Unfinished) -> store.Writer:
    """Open the file of a run that was cut off, behind what is kept of it."""
    return store.Writer(kept.path.parent.parent, kept.run.header, kept.kept_bytes)


def conduct(  # a plan, where its rows go, and who looks on
    plan: Plan,
    writer: store.Writer,
    progress: Show,
    tools: Instruments,
    *,
    past: Run | None = None,
) -> Outcome:
    """Measure the plan into the file, and write how it ended, whatever happens.

    The file of a run that came to its end is compressed if it is large: ``writer.path`` may change.
    ``past`` is the part that is there already of a run that was cut off.
    """
    last = past.settled[-1] if past and past.settled else None
    before_s, start_s = last.wall_s if last else 0.0, time.monotonic()
    watch = Stopwatch(spent_s=last.spent_s if last else None)
    status: Literal["complete", "interrupted", "failed"] = "interrupted"
    invalid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    try:
        if not (past and past.ceilings):
            with watch.on("ceilings"):
                notes = _measure_ceilings(plan, tools, writer)
        outcome = run(
            plan,
            lambda records: writer.write(*records),
            progress,
            tools,
            Past(past.rows, past.settled) if past else None,
            watch,
        )
        status = "failed" if outcome.failed else "complete"
        found, _ = store.read_run(writer.path)
        invalid = (*(stats.invalid(found) if found else ()), *_disturbed(outcome.strangers))
        if not outcome.measured and plan.end_s < math.inf:
            invalid = (*invalid, "nothing was measured within the time budget: ask for a longer one")
    finally:
        end = RunEnd(
            status=status,
            wall_s=before_s + time.monotonic() - start_s,
            invalid=invalid,
            spent_s=dict(watch.spent_s),
        )
        # Where even this cannot be written, on a full disk, the error that ended the run is the one to see.
        with suppress(OSError) if status == "interrupted" else nullcontext():
            writer.write(end)
    writer.compress()
    return replace(outcome, notes=(*notes, *outcome.notes))


def _measure_ceilings(plan: Plan, tools: Instruments, writer: store.Writer) -> tuple[str, ...]:
    """Store what the device can do at most; a run goes on without it, and says so."""
    now_s = time.monotonic()
    end_s = now_s + PEAKS_SHARE * (plan.end_s - now_s)
    try:
        for found in ceilings(
            plan.device, sorted({case.dtype for case in plan.cases}), tools.clocks[0], end_s
        ):
            writer.write(found)
    except (UnavailableError, ClockError, RuntimeError, MemoryError) as error:
        return (f"no percent of the floor: the ceilings were not measured: {explain(error).reason}",)
    return ()


def _disturbed(strangers: tuple[str, ...]) -> tuple[str, ...]:
    """Say in words that others computed on the GPU during the run."""
    return (f"other processes on the GPU: {', '.join(strangers)}",) if strangers else ()
