"""A run from its first line to its last: the plan measured, each row stored as it comes."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from esbench import store
from esbench.measure.ledger import Outcome
from esbench.measure.loop import Plan, run
from esbench.progress import Show
from esbench.records import SCHEMA_VERSION, Environment, RunEnd, RunHeader


def begin(suite: str, environment: Environment, seed: int, results: Path) -> store.Writer:
    """Open the file of a new run."""
    now = datetime.now(UTC)
    header = RunHeader(
        schema=SCHEMA_VERSION,
        run_id=store.new_run_id(suite, now),
        suite=suite,
        started=now.isoformat(timespec="seconds"),
        seed=seed,
        environment=environment,
    )
    return store.Writer(results, header)


def conduct(plan: Plan, writer: store.Writer, progress: Show) -> Outcome:
    """Measure the plan into the file, and write how it ended, whatever happens."""
    start_s = time.monotonic()
    status: Literal["complete", "interrupted", "failed"] = "failed"
    try:
        outcome = run(plan, writer.write, progress)
        status = "failed" if outcome.failed else "complete"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        writer.write(RunEnd(status=status, wall_s=time.monotonic() - start_s))
    return outcome
