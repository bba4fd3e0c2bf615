"""A run and its file: what is stored, and how an interrupted run is resumed."""

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from esbench import store
from esbench.errors import UserError
from esbench.measure import device_peaks, runner
from esbench.measure.instruments import Instruments
from esbench.measure.recorder import RunSummary
from esbench.measure.runner import run_cases
from esbench.measure.timers import ClockError
from esbench.report.analysis.run_selection import select_runs
from esbench.schema import Checkpoint, Measurement, Phase, Record, Request, Run, RunEnd
from esbench.store import Writer, read_results, read_run, read_unfinished, run_name
from tests import synthetic
from tests.cli import cli_runner
from tests.fakes import CASE, FakeScheme, World, raising
from tests.loop_cases import plan_of, run_into, stored_in
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
    earlier = [past] if past else []
    return run_into(folder, plan_of(scheme, **options), tools or scheme.world.tools, *earlier)


def test_the_end_of_a_run_has_the_seconds_of_each_activity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of the activities add up to the whole, also in a resumed run; a large file is compressed."""
    _, run = conduct(tmp_path / "whole")
    assert run.end is not None
    assert run.end.status == "complete"
    assert sum(run.end.spent_s.values()) == pytest.approx(run.end.wall_s, abs=0.1)
    assert {"set-up", "check", "warm-up", "rounds", "memory", "other"} <= set(run.end.spent_s)
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
    end_s = time.monotonic() + 5 * device_peaks.PEAK_S["cpu"]
    attempts: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (
            Mock(side_effect=ClockError("the clock measured -5 ns")),
            {},
            "the clock measured -5 ns",
        ),
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


def test_an_interrupted_run_has_that_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_conditions_are_stored_once_per_visit(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match="is complete"):
        read_unfinished(path)
    with Writer(results, synthetic.header("small")) as small:
        small.write(RunEnd(status="complete", wall_s=1.0))
        small.compress()
    assert small.path.name == "small.jsonl"
    compressed_bytes = path.read_bytes()
    for content, words in (
        (compressed_bytes[:-9], "cannot be read: "),
        (compressed_bytes[:20] + b"x" * 99, "cannot be read: "),
    ):
        path.write_bytes(content)
        run, (problem,) = read_run(path)
        assert run is None
        assert words in str(problem)


def test_a_failed_compression_loses_nothing(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run survives a kill before each step of compression, and a full disk."""
    before, content = read_run(large)[0], large.read_bytes()

    for owner, moment in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, moment, Mock(side_effect=Cut))
            with pytest.raises(Cut):
                compressed(large)
        assert read_results(large.parent.parent) == ([before], [])
        assert large.read_bytes() == content
    for file in large.parent.glob("*"):
        if file != large:
            file.unlink()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    assert compressed(large) == large  # the run is complete, so a full disk is not an error
    assert list(large.parent.iterdir()) == [large]


ROOT = Path(__file__).parents[2]
PHASES: tuple[Phase, ...] = ("sample", "forward", "update")
CASES = (CASE, msgspec.structs.replace(CASE, members=16))
EXACT_S = 2**-7
"""A cost that adds up without rounding errors, so that two runs have bitwise equal samples."""


class Cut(BaseException):
    """The exception that interrupts a run."""


def measure(
    past: Iterable[Record] = (), cut_after: int | None = None, *, traces_last: bool = False
) -> list[Record]:
    """Measure variants with all kinds of rows: reasons, a missing phase, no room beside others.

    Return the stored records, up to the batch at which the run is cut.
    """
    world = World()
    entries = (
        FakeScheme("Base", world, cost_s=EXACT_S, phases=("forward",)).entry("base"),
        FakeScheme("A", world, cost_s=EXACT_S, built_bytes=600).entry(),
        FakeScheme("B", world, cost_s=2 * EXACT_S, built_bytes=600).entry(),
        FakeScheme("Big", world, built_bytes=5000).entry(),
    )
    lines: list[Record] = []
    batches = itertools.count()

    def keep(records: Sequence[Record]) -> None:
        if next(batches) == cut_after:
            raise Cut
        lines.extend(records)

    tools = dataclasses.replace(world.tools, traces_last=traces_last)
    with contextlib.suppress(Cut):
        run_cases(plan_of(*entries, cases=CASES, phases=PHASES), keep, lambda *_: None, tools, past)
    return lines


def kept(lines: list[Record]) -> list[Record]:
    """Return the lines down to the last checkpoint."""
    ends = [number for number, line in enumerate(lines, start=1) if isinstance(line, Checkpoint)]
    return lines[: max(ends, default=0)]


def without_times(lines: list[Record]) -> list[Record]:
    """Return the lines without fields that depend on the wall clock."""
    return [
        msgspec.structs.replace(line, wall_s=0.0, spent_s={}, costs_s={})
        if isinstance(line, Checkpoint)
        else line
        for line in lines
    ]


def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run has the same rows and samples in the same order, wherever it was cut.

    At most one phase is measured again: a later cut keeps no less, and each checkpoint is there once.
    """
    monkeypatch.setattr(time, "sleep", lambda _: None)  # fakes have no late results to wait for
    for traces_last in (False, True):
        uninterrupted = measure(traces_last=traces_last)
        checkpoints = [line for line in uninterrupted if isinstance(line, Checkpoint)]
        assert len({(line.case, line.group, line.phase, line.traced) for line in checkpoints}) == len(
            checkpoints
        )
        sizes = []
        for cut in itertools.count():
            interrupted = measure(cut_after=cut, traces_last=traces_last)
            if len(interrupted) == len(uninterrupted):
                break
            first = kept(interrupted)
            first += kept(measure(first, cut_after=1, traces_last=traces_last))
            resumed = measure(first, traces_last=traces_last)
            assert without_times([*first, *resumed]) == without_times(uninterrupted)
            sizes.append(len(first))
        assert sizes == sorted(sizes)
        assert len(sizes) > len(CASES) * len(PHASES)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Return the file of an unfinished run: two phases with checkpoints, and a row of the third."""
    header = msgspec.structs.replace(synthetic.header(), request=Request(cases="Linear*"))
    rows = synthetic.three(CASE)
    with store.Writer(tmp_path, header) as writer:
        for phase in ("sample", "forward"):
            in_phase = (msgspec.structs.replace(row, phase=phase) for row in rows)
            writer.write(*in_phase, Checkpoint(case=CASE, group=0, phase=phase, wall_s=1.0))
        writer.write(msgspec.structs.replace(rows[0], phase="update"))
    return writer.path


def test_a_truncated_file_keeps_whole_phases(stored: Path) -> None:
    """Cut at any byte, the file keeps whole phases only and never half a line."""
    content = stored.read_bytes()
    header = content.index(b"\n") + 1
    counts: Counter[int] = Counter()
    for end in range(header, len(content) + 1, 7):
        stored.write_bytes(content[:end])
        unfinished = store.read_unfinished(stored)
        assert unfinished.kept_bytes <= end
        assert len(unfinished.run.rows) == 3 * len(unfinished.run.checkpoints)
        counts[len(unfinished.run.checkpoints)] += 1
    assert sorted(counts) == [0, 1, 2]


def resume_and_end(path: Path) -> None:
    """Resume a run and end it at once; check that only the row after the last checkpoint was removed."""
    with runner.resume(store.read_unfinished(path)) as writer:
        writer.write(RunEnd(status="complete", wall_s=2.0))
    run, problems = store.read_run(path)
    assert not problems
    assert run is not None
    assert (len(run.rows), run.end) == (6, RunEnd(status="complete", wall_s=2.0))
    assert list(path.parent.glob(f"{path.stem}*")) == [path]


def test_the_newest_unfinished_run_is_resumed(stored: Path) -> None:
    """Completed runs and files without a run are passed over.

    Rows after the last checkpoint are measured again, so they are removed: otherwise they would appear twice.
    """
    results, slug = stored.parent.parent, stored.parent.name
    (stored.parent / "20990101T000000Z-quick-0001.jsonl").write_bytes(b"")
    (stored.parent / "20980101T000000Z-quick-0001.jsonl").write_bytes(b"nonsense\n")
    assert store.find_unfinished(results, slug) == stored
    resume_and_end(stored)
    with pytest.raises(UserError, match="nothing to resume"):
        store.find_unfinished(results, slug)
    with pytest.raises(UserError, match="is complete"):
        store.read_unfinished(stored)


def test_a_run_cut_off_after_its_header_is_resumed(stored: Path) -> None:
    """The line of the header may have no end, as a kill during the first write leaves it."""
    header, *_ = stored.read_bytes().split(b"\n")
    for cut in (header, header + b"\n"):
        stored.write_bytes(cut)
        with runner.resume(store.read_unfinished(stored)) as writer:
            writer.write(RunEnd(status="complete", wall_s=2.0))
        run, problems = store.read_run(stored)
        assert not problems
        assert run is not None
        assert run.end is not None


def test_a_run_with_a_damaged_line_is_not_resumed(stored: Path) -> None:
    """The error names the line."""
    lines = stored.read_bytes().split(b"\n")
    stored.write_bytes(b"\n".join([*lines[:2], lines[2][:40], *lines[3:]]))
    with pytest.raises(UserError, match=r":3: .*run again"):
        store.read_unfinished(stored)


def keys(folder: Path) -> Counter[object]:
    """Return how often each row is in a run's file, whatever its values."""
    (path,) = folder.glob("*/*.jsonl*")
    run, problems = store.read_run(path)
    assert run is not None
    assert not problems
    assert run.end is not None
    assert run.end.status == "complete"
    return Counter(
        (row.variant, row.case, row.phase, row.metric, row.method, row.group)
        if isinstance(row, Measurement)
        else (row.variant, row.case, row.phase, row.status, row.reason)
        for row in run.rows
    )


def test_a_run_that_is_killed_has_the_same_rows_when_it_is_resumed(tmp_path: Path) -> None:
    """A run killed with SIGKILL in a phase loses and repeats no row, and is readable meanwhile."""
    options = ("--suite", "quick", "--device", "cpu", "--cases", "Linear(128*", "--phases", "sample,forward")
    uninterrupted, cut = tmp_path / "whole", tmp_path / "cut"
    run = ("run", *options, "--variants", "Flipped", "--results")
    assert cli_runner.run(*run, str(uninterrupted)) == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "esbench", *run, str(cut)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    while not any(b'"phase":"' in file.read_bytes() for file in cut.glob("*/*.jsonl*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (path,) = cut.glob("*/*.jsonl*")
    unfinished, problems = store.read_run(path)
    assert unfinished is not None
    assert unfinished.end is None
    assert all("half a line" in str(problem) for problem in problems)
    assert cli_runner.run("run", "--device", "cpu", "--resume", "--results", str(cut)) == 0
    assert keys(cut) == keys(uninterrupted)
