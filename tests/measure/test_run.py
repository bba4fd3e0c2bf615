"""A run from its first line to its last, whatever happens in between."""

import dataclasses
import os
import time
from pathlib import Path
from typing import NoReturn

import pytest

from esbench import store
from esbench.measure import device_peaks, runner
from esbench.measure.plan import Plan
from esbench.measure.recorder import RunSummary
from esbench.measure.timers import ClockError
from esbench.schema import Checkpoint, Run
from tests import synthetic
from tests.fakes import CASE, FakeScheme, World, raising


@pytest.fixture(autouse=True)
def no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the second that ceilings take on a real device."""
    monkeypatch.setattr(runner, "device_peaks", lambda *_: [])


def conduct(folder: Path, world: World) -> tuple[RunSummary, Run]:
    """Measure two variants on a case; return the outcome, and the run as it was stored."""
    entries = (FakeScheme("A", world).entry(), FakeScheme("Base", world).entry("base"))
    plan = Plan(entries=entries, cases=(CASE,), phases=("sample", "forward"), cell_s=1.0)
    with runner.begin("quick", synthetic.environment(), 0, folder) as writer:
        outcome = runner.run(plan, writer, lambda *_: None, world.tools)
    found, problems = store.read_run(writer.path)
    assert found is not None
    assert not problems
    return outcome, found


def test_a_run_ends_with_where_its_time_went(tmp_path: Path) -> None:
    """The activities add up to the whole."""
    _, run = conduct(tmp_path, World())
    assert run.end is not None
    assert run.end.status == "complete"
    assert sum(run.end.spent_s.values()) == pytest.approx(run.end.wall_s, abs=0.1)
    assert {"oracle", "audit", "warm-up", "rounds", "memory", "other"} <= set(run.end.spent_s)


def test_ceilings_that_cannot_be_measured_cost_no_more_than_the_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on and says what is missing."""

    def backwards(*_: object) -> NoReturn:
        message = "the clock went backwards by 5 ns"
        raise ClockError(message)

    monkeypatch.setattr(runner, "device_peaks", backwards)
    outcome, run = conduct(tmp_path, World())
    assert outcome.measured == 4
    assert run.device_peaks == ()
    (note,) = outcome.notes
    assert note.startswith("no percent of the roofline bound: the device peaks were not measured: ")
    assert note.endswith("the clock went backwards by 5 ns")


def test_device_peaks_take_no_more_than_their_share_of_a_time_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ten seconds in all they are left out, with a reason, and the variants are measured."""
    monkeypatch.undo()
    world = World()
    plan = Plan(
        entries=(FakeScheme("A", world).entry(),),
        cases=(CASE,),
        phases=("forward",),
        cell_s=0.01,
        end_s=time.monotonic() + 5 * device_peaks.PEAK_S["cpu"],
    )
    with runner.begin("quick", synthetic.environment(), 0, tmp_path) as writer:
        outcome = runner.run(plan, writer, lambda *_: None, world.tools)
    found, _ = store.read_run(writer.path)
    assert found is not None
    assert (outcome.measured, found.device_peaks) == (1, ())
    assert outcome.notes == (
        "no percent of the roofline bound: the device peaks were not measured: time budget of the run",
    )


def test_other_processes_on_the_gpu_make_a_run_invalid(tmp_path: Path) -> None:
    """At its start or after any case; it is measured to its end all the same."""
    world = World()
    tools = dataclasses.replace(world.tools, other_processes=lambda: ("python (pid 7)",))
    plan = Plan(entries=(FakeScheme("A", world).entry(),), cases=(CASE,), phases=("forward",), cell_s=1.0)
    with runner.begin("quick", synthetic.environment(), 0, tmp_path) as writer:
        runner.run(plan, writer, lambda *_: None, tools)
    run, _ = store.read_run(writer.path)
    assert run is not None
    assert run.end is not None
    assert run.end.invalid == ("other processes on the GPU: python (pid 7)",)


def test_a_full_disk_ends_a_run_with_its_own_error_and_keeps_what_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One OSError, not that of writing the end; the file can be read and the run resumed."""
    world, synced = World(), []

    def full(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) > 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        conduct(tmp_path, world)
    monkeypatch.undo()
    (path,) = tmp_path.glob("*/*.jsonl")
    run, _ = store.read_run(path)
    assert run is not None
    assert run.end is None or run.end.status == "interrupted"


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    """So that it can be resumed."""
    world = World()
    scheme = FakeScheme("A", world, act=raising(KeyboardInterrupt(), after=30))
    plan = Plan(entries=(scheme.entry(),), cases=(CASE,), phases=("sample", "forward"), cell_s=1.0)
    with (
        runner.begin("quick", synthetic.environment(), 0, tmp_path) as writer,
        pytest.raises(KeyboardInterrupt),
    ):
        runner.run(plan, writer, lambda *_: None, world.tools)
    run, _ = store.read_run(writer.path)
    assert run is not None
    assert run.end is not None
    assert run.end.status == "interrupted"


def test_a_resumed_run_accounts_for_all_its_parts(tmp_path: Path) -> None:
    """Wall time and activities are those of the whole run, not of the last part."""
    world = World()
    plan = Plan(entries=(FakeScheme("A", world).entry(),), cases=(CASE,), phases=("forward",), cell_s=1.0)
    with runner.begin("quick", synthetic.environment(), 0, tmp_path) as writer:
        line = Checkpoint(case=CASE, group=1, phase="forward", wall_s=100.0, spent_s={"rounds": 100.0})
        writer.write(line)
        past, _ = store.read_run(writer.path)
        runner.run(plan, writer, lambda *_: None, world.tools, past=past)
    run, _ = store.read_run(writer.path)
    assert run is not None
    assert run.end is not None
    assert run.end.spent_s["rounds"] >= 100
    assert sum(run.end.spent_s.values()) == pytest.approx(run.end.wall_s, abs=0.1)
