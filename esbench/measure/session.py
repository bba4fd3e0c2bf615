"""A run from its first line to its last: the plan measured, rows stored as they come."""

import time
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from esbench import statistics, store
from esbench.measure.ceilings import ceilings
from esbench.measure.instruments import Instruments
from esbench.measure.ledger import Outcome
from esbench.measure.loop import Past, run
from esbench.measure.plan import Plan
from esbench.measure.stopwatch import Stopwatch
from esbench.measure.tenants import foreign_processes
from esbench.progress import Show
from esbench.records import SCHEMA_VERSION, Environment, Request, Run, RunEnd, RunHeader
from esbench.unfinished import Unfinished


def begin(  # noqa: PLR0913, PLR0917  # what stands in a header
    suite: str,
    environment: Environment,
    seed: int,
    results: Path,
    request: Request | None = None,
    code: dict[str, str] | None = None,
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

    ``past`` is the part that is there already of a run that was cut off.
    """
    start_s = time.monotonic()
    before_s = max((line.wall_s for line in past.settled), default=0.0) if past else 0.0
    watch = Stopwatch()
    status: Literal["complete", "interrupted", "failed"] = "interrupted"
    invalid: tuple[str, ...] = ()
    try:
        if not (past and past.ceilings):
            with watch.on("ceilings"):
                dtypes = sorted({case.dtype for case in plan.cases})
                writer.write(*ceilings(plan.device, dtypes, tools.clocks[0]))
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
        invalid = (*(statistics.invalid(found) if found else ()), *_intruders(plan.device))
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
    return outcome


def _intruders(device: str) -> tuple[str, ...]:
    """Return in words who else computes on the GPU at the end of a run."""
    found = foreign_processes() if device == "cuda" else ()
    return (f"other processes on the GPU at the end: {', '.join(found)}",) if found else ()
