"""A run and its file, from the first line to the last, with any errors in between."""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from esbench import store
from esbench.measure import device_peaks, runner
from esbench.measure.instruments import Instruments
from esbench.measure.recorder import RunSummary
from esbench.measure.timers import ClockError
from esbench.report.analysis.run_selection import select_runs
from esbench.schema import Checkpoint, Request, Run, RunEnd
from esbench.store import ResumeError, Writer, read_results, read_run, read_unfinished, run_name
from tests import synthetic
from tests.fakes import CASE, FakeScheme, World, raising
from tests.loop_cases import plan_of
from tests.synthetic import BASE


@pytest.fixture(autouse=True)
def no_device_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the peaks of this machine, which take a second to measure."""
    monkeypatch.setattr(runner, "device_peaks", lambda *_: [])


def conduct(
    folder: Path,
    *,
    scheme: FakeScheme | None = None,
    tools: Instruments | None = None,
    past: Checkpoint | None = None,
    **options: Any,
) -> tuple[RunSummary, Run]:
    """Measure a variant on a case; return the summary and the stored run."""
    scheme = scheme or FakeScheme("A", World())
    plan = plan_of(scheme.entry(), **options)
    with runner.begin("quick", synthetic.environment(), 0, folder) as writer:
        earlier = None
        if past:
            writer.write(past)
            earlier, _ = read_run(writer.path)
        summary = runner.run(plan, writer, lambda *_: None, tools or scheme.world.tools, past=earlier)
    return summary, stored_in(folder)


def stored_in(folder: Path) -> Run:
    """Return the one run in a folder."""
    (run,), problems = read_results(folder)
    assert not problems
    return run


def test_a_run_ends_with_where_its_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of the activities add up to the whole, also in a resumed run; a large file is compressed."""
    _, run = conduct(tmp_path / "whole")
    assert run.end is not None
    assert run.end.status == "complete"
    assert sum(run.end.spent_s.values()) == pytest.approx(run.end.wall_s, abs=0.1)
    assert {"set-up", "audit", "warm-up", "rounds", "memory", "other"} <= set(run.end.spent_s)
    earlier = Checkpoint(case=CASE, group=1, phase="forward", wall_s=100.0, spent_s={"rounds": 100.0})
    monkeypatch.setattr(store, "LARGE_BYTES", 100)
    _, run = conduct(tmp_path / "resumed", past=earlier)
    (path,) = tmp_path.glob("resumed/*/*")
    assert path.name.endswith(".jsonl.gz")
    assert run.end is not None
    assert run.end.spent_s["rounds"] >= 100
    assert sum(run.end.spent_s.values()) == pytest.approx(run.end.wall_s, abs=0.1)


def test_device_peaks_that_cannot_be_measured_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants are measured even if the clock fails or the budget is too short for the peaks."""

    def backwards(*_: object) -> NoReturn:
        message = "the clock went backwards by 5 ns"
        raise ClockError(message)

    end_s = time.monotonic() + 5 * device_peaks.PEAK_S["cpu"]
    attempts: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (backwards, {}, "the clock went backwards by 5 ns"),
        (device_peaks.device_peaks, {"end_s": end_s, "cell_s": 0.01}, "time budget of the run"),
    )
    for measuring, options, reason in attempts:
        monkeypatch.setattr(runner, "device_peaks", measuring)
        summary, run = conduct(tmp_path / reason, **options)
        assert (summary.measured, run.device_peaks) == (2, ())
        (note,) = summary.notes
        assert note.startswith("no percent of the roofline bound: the device peaks were not measured: ")
        assert note.endswith(reason)


def test_other_processes_on_the_gpu_make_a_run_invalid(tmp_path: Path) -> None:
    """Processes found at the start or after a case make the run invalid, but it is completed."""
    world = World()
    tools = dataclasses.replace(world.tools, other_processes=lambda: ("python (pid 7)",))
    summary, run = conduct(tmp_path, scheme=FakeScheme("A", world), tools=tools)
    assert run.end is not None
    assert run.end.invalid == ("other processes on the GPU: python (pid 7)",)
    assert summary.measured == 2


def test_an_interrupted_run_is_stored_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run can be resumed; a full disk is reported once, by the row that failed."""
    interrupted = FakeScheme("A", World(), act=raising(KeyboardInterrupt(), after=30))
    with pytest.raises(KeyboardInterrupt):
        conduct(tmp_path / "interrupt", scheme=interrupted)
    end = stored_in(tmp_path / "interrupt").end
    assert end is not None
    assert end.status == "interrupted"
    synced = []

    def full(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) > 2:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device"):
            conduct(tmp_path / "full")
    end = stored_in(tmp_path / "full").end
    assert end is None or end.status == "interrupted"


def test_conditions_are_stored_once_and_read_beside_each_time_of_the_visit(tmp_path: Path) -> None:
    """Rows of another group, method or phase, and metrics other than times, have their own."""
    with_conditions = synthetic.clocks(synthetic.time_row(BASE, CASE, 1.0), 1000)
    others: list[dict[str, Any]] = [
        {"metric": "warm_latency_ns"},
        {"metric": "warm_latency_ns", "group": 1},
        {"metric": "warm_latency_ns", "method": "graph"},
        {"metric": "warm_latency_ns", "phase": "update"},
        {"metric": "peak_bytes"},
    ]
    without_conditions = msgspec.structs.replace(with_conditions, conditions=())
    with Writer(tmp_path, synthetic.header()) as writer:
        writer.write(
            *(msgspec.structs.replace(without_conditions, **changed) for changed in others), with_conditions
        )
    run = stored_in(tmp_path)
    assert [bool(row.conditions) for row in run.measurements] == [True, False, False, False, False, True]
    assert run.measurements[0].conditions == with_conditions.conditions


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the plain file of a completed run, with the limit for large files set below its size."""
    header = msgspec.structs.replace(synthetic.header(), request=Request())
    row = synthetic.time_row(BASE, CASE, *(1 + number / 7 for number in range(1000)))
    with Writer(tmp_path / "results", header) as writer:
        writer.write(row, RunEnd(status="complete", wall_s=1.0))
    size = writer.path.stat().st_size
    monkeypatch.setattr(store, "LARGE_BYTES", size - 1)
    return writer.path


def compressed(path: Path) -> Path:
    """Compress a run's file as its writer does when the run ends; return the new one."""
    run, _ = read_run(path)
    assert run is not None
    writer = Writer(path.parent.parent, run.header, kept_bytes=path.stat().st_size)
    writer.compress()
    return writer.path


def test_a_large_file_is_compressed_when_its_run_ends(large: Path) -> None:
    """A compressed run keeps its id and is read by either name; a small file stays as it is.

    A damaged file is refused.
    """
    (before, _), results = read_run(large), large.parent.parent
    path = compressed(large)
    assert sorted(path.parent.iterdir()) == [path]
    assert path.name == large.name + ".gz"
    assert before is not None
    assert (run_name(path), run_name(large)) == (before.header.run_id,) * 2
    assert read_run(path) == read_run(large) == (before, [])
    assert read_results(results) == ([before], [])
    assert select_runs(results, lambda _: Path("page")).runs == [before]
    with pytest.raises(ResumeError, match="is complete"):
        read_unfinished(path)
    with Writer(results, synthetic.header("small")) as small:
        small.write(RunEnd(status="complete", wall_s=1.0))
        small.compress()
    assert small.path.name == "small.jsonl"
    whole = path.read_bytes()
    for content, words in (
        (whole[:-9], "cannot be read: "),
        (whole[:20] + b"x" * 99, "cannot be read: "),
    ):
        path.write_bytes(content)
        run, (problem,) = read_run(path)
        assert run is None
        assert words in str(problem)


def test_compressing_loses_nothing_whatever_happens(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run survives a kill before each step of compression, and a full disk."""
    before, content = read_run(large)[0], large.read_bytes()

    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> NoReturn:
        raise Killed

    def full(_: int) -> NoReturn:
        raise OSError(28, "No space left on device")

    for owner, moment in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, moment, killed)
            with pytest.raises(Killed):
                compressed(large)
        assert read_results(large.parent.parent) == ([before], [])
        assert large.read_bytes() == content
    for file in large.parent.glob("*"):
        if file != large:
            file.unlink()
    monkeypatch.setattr(os, "fsync", full)
    assert compressed(large) == large  # the run is complete, so a full disk is not an error
    assert list(large.parent.iterdir()) == [large]
