"""Traces that come after everything has been timed, as on a GPU."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch

from esbench import store
from esbench.measure import instruments as module
from esbench.measure import runner
from esbench.measure.budget import Budget
from esbench.measure.instruments import Instruments, instruments
from esbench.measure.plan import COSTS, Plan
from esbench.measure.profiler import ProfileError, Trace
from esbench.measure.recorder import RunSummary, Stopwatch
from esbench.measure.timers import Call, Visit
from esbench.schema import Measurement, Record, Run, Skipped
from tests import synthetic
from tests.fakes import CASE, FakeClock, FakeScheme, World

LARGER = msgspec.structs.replace(CASE, members=16)
HONEST = Trace(launches=3)


@pytest.fixture(autouse=True)
def no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the second that ceilings take on a real device."""
    monkeypatch.setattr(runner, "device_peaks", lambda *_: [])


def conduct(folder: Path, world: World, tools: Instruments) -> tuple[RunSummary, Run]:
    """Measure two variants on two cases; return the outcome, and the run as it is read."""
    entries = (FakeScheme("Base", world).entry("base"), FakeScheme("A", world).entry())
    plan = Plan(entries=entries, cases=(CASE, LARGER), phases=("sample", "forward"), cell_s=1.0)
    with runner.begin("quick", synthetic.environment(), 0, folder) as writer:
        outcome = runner.run(plan, writer, lambda *_: None, tools)
    run, problems = store.read_run(writer.path)
    assert run is not None
    assert not problems
    return outcome, run


def tracing(world: World, trace: Callable[[str], Trace]) -> Instruments:
    """Instruments that trace last, and find what is said of the variant that was called."""

    def taken(call: Call) -> Trace:
        call()
        return trace(world.log[-1])

    return dataclasses.replace(world.tools, trace=taken, traces_last=True)


def rows(run: Run, metric: str) -> list[Measurement]:
    """The rows of a metric."""
    return [row for row in run.measurements if row.metric == metric]


def test_the_first_trace_comes_after_the_last_timing(tmp_path: Path) -> None:
    """Of all cases, phases and variants: a trace attaches CUPTI, and what is timed then is slower."""
    world = World()
    log: list[str] = []

    class LoggingClock(FakeClock):
        def visit(self, call: Call, calls: int) -> Visit:
            log.append("time")
            return super().visit(call, calls)

    world.clock = LoggingClock()

    def trace(name: str) -> Trace:
        log.append("trace")
        return Trace(launches=len(name))

    _, run = conduct(tmp_path, world, tracing(world, trace))
    assert log.count("trace") == 8
    assert log[-8:] == ["trace"] * 8
    found = {(row.case, row.variant.scheme, row.phase): row.samples for row in rows(run, "launches")}
    assert found == {
        (case, name, phase): ((float(len(name)),),)
        for case in (CASE, LARGER)
        for name in ("Base", "A")
        for phase in ("sample", "forward")
    }
    assert [line.traced for line in run.checkpoints][-3:] == [False, True, True]


def test_a_time_budget_holds_for_the_traces() -> None:
    """Only the phases that the plan names are traced, time is kept for them, and they end with the budget."""
    world = World()

    def trace(_: str) -> Trace:
        world.clock.now_s += 600.0
        return HONEST

    entries = (FakeScheme("Base", world).entry("base"), FakeScheme("A", world).entry())
    plan = Plan(
        entries=entries,
        cases=(CASE, LARGER),
        phases=("sample", "forward"),
        cell_s=1.0,
        traced=("forward",),
        end_s=1000.0,
    )
    lines: list[Record] = []
    outcome = runner.run_cases(
        plan, lines.extend, lambda *_: None, tracing(world, trace), None, Stopwatch(world.clock.seconds)
    )
    traced = [line for line in lines if isinstance(line, Measurement) and line.metric == "launches"]
    assert [row.phase for row in traced] == ["forward", "forward"]  # the second one was begun in time
    assert "launches and streams were not all looked at: time budget of the run" in outcome.notes

    costs = COSTS["cpu"]
    budgets = [Budget(plan, lambda: 0.0, traces_last=last) for last in (False, True)]
    whole_s, kept_s = (budget.spare_s for budget in budgets)
    assert whole_s - kept_s == pytest.approx(4 * (costs.pair_s + costs.trace_s))


def test_a_gpu_is_traced_last_and_a_cpu_phase_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the profiler has no after-effects, and no variant is set up twice."""

    @contextmanager
    def entered(_: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(module, "clocks", lambda *_: ())
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    monkeypatch.setattr(torch.cuda, "stream", entered)
    with instruments("cuda") as gpu, instruments("cpu") as cpu:
        assert (gpu.traces_last, cpu.traces_last) == (True, False)


def test_what_a_trace_tells_is_said_of_the_times(tmp_path: Path) -> None:
    """They were stored long before it: the label stands beside the launches, once, and is read with both."""
    world = World()
    seen = {"A": Trace(launches=3, waits=("cudaStreamSynchronize",))}
    _, run = conduct(tmp_path, world, tracing(world, lambda name: seen.get(name, HONEST)))
    label = "synchronises inside: cudaStreamSynchronize, 1 times a call"
    assert {(row.variant.scheme, row.labels) for row in rows(run, "latency_ns")} == {
        ("Base", ()),
        ("A", (label,)),
    }


def test_work_on_another_stream_takes_the_times_back(tmp_path: Path) -> None:
    """The phase has failed, whatever was stored of it; the honest one keeps its times."""
    world = World()
    seen = {"A": Trace(launches=3, other_streams=(17,))}
    outcome, run = conduct(tmp_path, world, tracing(world, lambda name: seen.get(name, HONEST)))
    assert {row.variant.scheme for row in run.measurements} == {"Base"}
    reasons = {row.reason for row in run.rows if isinstance(row, Skipped)}
    assert reasons == {
        f"oracle: {phase} works on another stream (17), where it is not timed"
        for phase in ("sample", "forward")
    }
    assert (outcome.measured, outcome.failed) == (4, 4)


@pytest.mark.parametrize("error", [ProfileError("no records came back"), MemoryError()])
def test_a_trace_that_fails_costs_no_time(tmp_path: Path, error: Exception) -> None:
    """The times are kept, without launches, and say that the streams were not looked at."""
    world = World()

    def trace(name: str) -> Trace:
        if name == "A":
            raise error
        return HONEST

    outcome, run = conduct(tmp_path, world, tracing(world, trace))
    assert (outcome.measured, outcome.failed) == (8, 0)
    labels = {label for row in rows(run, "latency_ns") for label in row.labels}
    assert len(labels) == 1
    assert labels.pop().startswith("launches and streams were not looked at: ")
    assert {row.variant.scheme for row in rows(run, "launches")} == {"Base"}
