"""Profiler traces taken after all timings, as on a GPU."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch

from esbench.measure import instruments as module
from esbench.measure import runner
from esbench.measure.instruments import Instruments, instruments
from esbench.measure.plan import TRACES_SHARE, Budget
from esbench.measure.profiler import ProfileError, Trace
from esbench.measure.recorder import RunSummary, Stopwatch
from esbench.measure.timers import Call, Visit, keep_inputs
from esbench.schema import Run, Skipped
from tests.fakes import CASE, FakeClock, FakeScheme, World
from tests.loop_cases import measure, measurements, plan_of, run_into

CASES = (CASE, msgspec.structs.replace(CASE, members=16))


def conduct(
    folder: Path, monkeypatch: pytest.MonkeyPatch, world: World, trace: Callable[[str], Trace]
) -> tuple[RunSummary, Run]:
    """Measure two variants on two cases; return the summary and the stored run."""
    monkeypatch.setattr(runner, "device_peaks", lambda *_: [])
    entries = (FakeScheme("Base", world).entry("base"), FakeScheme("A", world).entry())
    return run_into(folder, plan_of(*entries, cases=CASES), tracing(world, trace))


def tracing(world: World, trace: Callable[[str], Trace]) -> Instruments:
    """Return instruments that trace last; the trace depends on the variant that was called."""

    def taken(call: Call) -> Trace:
        call()
        return trace(world.log[-1])

    return dataclasses.replace(world.tools, trace=taken, traces_last=True)


def test_the_first_trace_comes_after_the_last_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All timings come first, because a trace attaches CUPTI, which slows later calls."""
    world, log = World(), []

    class LoggingClock(FakeClock):
        def visit(self, call: Call, calls: int, renew: Call = keep_inputs) -> Visit:
            log.append("time")
            return super().visit(call, calls, renew)

    world.clock = LoggingClock()

    def trace(name: str) -> Trace:
        log.append("trace")
        return Trace(launches=len(name))

    _, run = conduct(tmp_path, monkeypatch, world, trace)
    assert log.count("trace") == 8
    assert log[-8:] == ["trace"] * 8
    launches = measurements(run.rows, "launches")
    assert {(row.case, row.variant.scheme, row.phase): row.samples for row in launches} == {
        (case, name, phase): ((float(len(name)),),)
        for case in CASES
        for name in ("Base", "A")
        for phase in ("sample", "forward")
    }
    assert [line.traced for line in run.checkpoints][-3:] == [False, True, True]


def test_a_time_budget_holds_for_the_traces() -> None:
    """Only the planned phases are traced; the budget reserves time for traces and ends them."""
    world = World()

    def trace(_: str) -> Trace:
        world.clock.now_s += 600.0
        return Trace(launches=3)

    entries = (FakeScheme("Base", world).entry("base"), FakeScheme("A", world).entry())
    summary, lines = measure(
        *entries,
        tools=tracing(world, trace),
        stopwatch=Stopwatch(world.clock.seconds),
        cases=CASES,
        traced=("forward",),
        end_s=1000.0,
    )
    traced = measurements(lines, "launches")
    assert [row.phase for row in traced] == ["forward", "forward"]  # the second trace began in time
    assert "not all launches and streams were checked: time budget of the run" in summary.notes
    plan = plan_of(*entries, end_s=1000.0)
    assert Budget(plan, lambda: 0.0).spare_s == 1000.0
    assert Budget(plan, lambda: 0.0, traces_last=True).spare_s == 1000.0 - 1000.0 * TRACES_SHARE


def test_a_gpu_is_traced_last_and_a_cpu_phase_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the profiler does not slow later calls, so no variant is set up twice."""
    monkeypatch.setattr(module, "clocks", lambda *_: ())
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    with instruments("cuda") as gpu, instruments("cpu") as cpu:
        assert (gpu.traces_last, cpu.traces_last) == (True, False)


def test_labels_of_a_trace_are_read_with_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader adds a trace's labels to times that were stored long before the trace.

    A phase that works on another stream has failed: its times are dropped. A failed trace drops no times.
    """
    honest = Trace(launches=3)

    def labels(trace: Trace | Exception) -> tuple[RunSummary, Run, set[str]]:
        def traced(name: str) -> Trace:
            if name != "A":
                return honest
            if isinstance(trace, Exception):
                raise trace
            return trace

        summary, run = conduct(tmp_path / str(len(runs)), monkeypatch, World(), traced)
        runs.append(run)
        times = measurements(run.rows)
        assert all(not row.labels for row in times if row.variant.scheme == "Base")
        return summary, run, {label for row in times if row.variant.scheme == "A" for label in row.labels}

    runs: list[Run] = []
    summary, _, read_labels = labels(Trace(launches=3, waits=("cudaStreamSynchronize",)))
    assert read_labels == {"synchronizes inside: cudaStreamSynchronize, 1 times a call"}
    assert (summary.measured, summary.failed) == (8, 0)
    for error in (ProfileError("no records came back"), MemoryError()):
        summary, run, read_labels = labels(error)
        assert (summary.measured, summary.failed) == (8, 0)
        assert [label.partition(": ")[0] for label in read_labels] == [
            "launches and streams were not checked"
        ]
        assert {row.variant.scheme for row in measurements(run.rows, "launches")} == {"Base"}
    summary, run, _ = labels(Trace(launches=3, other_streams=(17,)))
    assert {row.variant.scheme for row in run.measurements} == {"Base"}
    assert {row.reason for row in run.rows if isinstance(row, Skipped)} == {
        f"wrong result: {phase} works on another stream (17), where it is not timed"
        for phase in ("sample", "forward")
    }
    assert (summary.measured, summary.failed) == (4, 4)
