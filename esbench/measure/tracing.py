"""What calls launch and where they work: read by a profiler, on CUDA after everything has been timed.

The first trace on a GPU attaches CUPTI, which slows every later launch down. So a run first times all of its
cases, and then sets each variant up once more, alone, for its traces. A trace may show that a call works
where it is not timed: the reader of a run drops the times of a phase that has failed.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from esbench.measure import profiler, validation
from esbench.measure.failure import explain
from esbench.measure.group import release
from esbench.measure.instruments import Instruments
from esbench.measure.precision import precision
from esbench.measure.timers import Call
from esbench.measure.torch_state import TorchState
from esbench.registry import Entry, build
from esbench.schema import LAUNCHES, OUT_OF_TIME, Case, Measurement, Phase, Row

if TYPE_CHECKING:
    from esbench.measure.case_runner import Bench


def launches(tools: Instruments, call: Call, phase: Phase) -> tuple[int | None, tuple[str, ...]]:
    """Return how much a call launches, and labels for its times; there is no count if the profiler fails.

    Raises:
        WrongResultError: the call works where it is not timed.

    """
    try:
        trace = tools.trace(call)
    except (profiler.ProfileError, OSError, json.JSONDecodeError) as error:
        return None, (_unseen(error),)
    validation.check_streams(trace, phase)
    return trace.launches, validation.waiting(trace)


def traced(case: Case, bench: "Bench") -> Iterator[Row]:
    """Yield what each variant launches in each phase of a case that was timed, or why it has failed.

    The labels of the times stand beside the launches; the reader of a run copies them to the times.
    """
    for entry in bench.plan.entries_for(case):
        timed = bench.ledger.timed_phases(entry.variant, case)
        phases = [phase for phase in timed if phase in bench.plan.traced]
        if phases and bench.watch.seconds() >= bench.plan.end_s:
            bench.ledger.note(f"launches and streams were not all looked at: {OUT_OF_TIME}")
            return
        if phases:
            with precision(case.dtype), bench.watch.on("launches"):
                yield from _traced(entry, case, phases, bench)
            release()


def _traced(entry: Entry, case: Case, phases: list[Phase], bench: "Bench") -> Iterator[Row]:
    """Set a variant up and trace its phases."""
    surroundings, workload = TorchState(), None
    for phase in phases:
        bench.ledger.announce(entry.variant.label(case.operator), case.label, f"{phase} launches")
        try:
            if workload is None:
                workload = build(entry.scheme, case, bench.plan.device, bench.plan.seed)
            workload.enter(phase)
            count, labels = launches(bench.tools, workload.phases[phase], phase)
            surroundings.check()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
            row = bench.reason(entry, case, phase, explain(error))
            if row.status == "failed":
                yield row
                continue
            count, labels = None, (_unseen(error),)
        yield Measurement(
            variant=entry.variant,
            case=case,
            phase=phase,
            metric=LAUNCHES,
            method=profiler.METHOD,
            samples=() if count is None else ((float(count),),),
            labels=labels,
        )


def _unseen(error: BaseException) -> str:
    return f"launches and streams were not looked at: {explain(error).reason}"
