"""A run that is cut off at any moment loses nothing that was finished, and is completed by resuming it."""

import contextlib
import dataclasses
import gzip
import itertools
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from esbench import store
from esbench.measure import runner, validation
from esbench.measure.plan import Plan
from esbench.measure.runner import Past, run_cases
from esbench.schema import Checkpoint, Measurement, Phase, Record, Request, Row, RunEnd
from esbench.store import ResumeError
from tests import synthetic
from tests.fakes import CASE, FakeScheme, World

ROOT = Path(__file__).parents[2]
PHASES: tuple[Phase, ...] = ("sample", "forward", "update")
CASES = (CASE, msgspec.structs.replace(CASE, members=16), msgspec.structs.replace(CASE, members=32))
EXACT_S = 2**-7
"""A cost that a clock adds up without rounding, so that two runs have the same samples to the bit."""

KILLS = 3
EARLY = 0.3
"""The share of kills that come at any moment after the start, most of them before anything is stored."""
QUICK = (
    *("run", "--suite", "quick", "--device", "cpu", "--cases", "Linear*"),
    *("--variants", "Flipped*", "--phases", "sample,forward"),
)


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for late results: fakes have none."""
    monkeypatch.setattr(validation, "PATIENCE_S", (0.0, 0.0))


class Cut(BaseException):
    """What ends a run in the midst of it."""


def plan(world: World) -> Plan:
    """Three cases, and variants that have what can happen: a reason, no such phase, no room beside others."""
    entries = (
        FakeScheme("Base", world, cost_s=EXACT_S, phases=("forward",)).entry("base"),
        FakeScheme("A", world, cost_s=EXACT_S, built_bytes=600).entry(),
        FakeScheme("B", world, cost_s=2 * EXACT_S, built_bytes=600).entry(),
        FakeScheme("Big", world, built_bytes=5000).entry(),
    )
    return Plan(entries=entries, cases=CASES, phases=PHASES, cell_s=1.0)


def measure(
    past: Past | None = None, cut_after: int | None = None, *, traces_last: bool = False
) -> list[Record]:
    """Measure the plan; return what was stored, up to a cut after a number of batches."""
    world = World()
    tools = dataclasses.replace(world.tools, traces_last=traces_last)
    lines: list[Record] = []
    batches = itertools.count()

    def keep(records: Sequence[Record]) -> None:
        if next(batches) == cut_after:
            raise Cut
        lines.extend(records)

    with contextlib.suppress(Cut):
        run_cases(plan(world), keep, lambda *_: None, tools, past)
    return lines


def kept(lines: list[Record]) -> list[Record]:
    """Return the lines down to the last that settles something."""
    ends = [number for number, line in enumerate(lines, start=1) if isinstance(line, Checkpoint)]
    return lines[: max(ends, default=0)]


def without_times(lines: list[Record]) -> list[Record]:
    """Return the lines without what a clock on the wall says."""
    return [
        msgspec.structs.replace(line, wall_s=0.0, spent_s={}, costs_s={})
        if isinstance(line, Checkpoint)
        else line
        for line in lines
    ]


def test_a_run_cut_off_at_any_moment_is_completed_as_if_it_had_not_been() -> None:
    """The same rows with the same samples in the same order, wherever it was cut."""
    for traces_last in (False, True):
        whole = measure(traces_last=traces_last)
        cut = 0
        while len(part := measure(cut_after=cut, traces_last=traces_last)) < len(whole):
            first = kept(part)
            settled = [line for line in first if isinstance(line, Checkpoint)]
            past = Past([line for line in first if isinstance(line, Row)], settled)
            rest = measure(past, traces_last=traces_last)
            assert without_times([*first, *rest]) == without_times(whole)
            cut += 1
        assert cut > len(CASES) * len(PHASES)


def test_resuming_measures_at_most_one_phase_again() -> None:
    """What is settled when the run is cut is not called again, but for setting it up."""
    whole = measure()
    parts = [kept(measure(cut_after=cut)) for cut in range(20)]
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes)
    settled = [line for line in whole if isinstance(line, Checkpoint)]
    assert len(settled) == len({(line.case, line.group, line.phase) for line in settled})


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Return the file of a run without an end: two settled phases, and a row of the third."""
    header = msgspec.structs.replace(synthetic.header(), request=Request(cases="Linear*"))
    rows = synthetic.three(CASE)
    with store.Writer(tmp_path, header) as writer:
        for phase in ("sample", "forward"):
            writer.write(*rows, Checkpoint(case=CASE, group=0, phase=phase, wall_s=1.0))
        writer.write(rows[0])
    return writer.path


def test_what_is_settled_is_kept_wherever_the_file_ends(stored: Path) -> None:
    """Cut at any byte: whole phases or nothing of them, and never half a line."""
    content = stored.read_bytes()
    header = content.index(b"\n") + 1
    counts: Counter[int] = Counter()
    for end in range(header, len(content) + 1, 7):
        stored.write_bytes(content[:end])
        found = store.read_unfinished(stored)
        assert found.kept_bytes <= end
        assert len(found.run.rows) == 3 * len(found.run.checkpoints)
        counts[len(found.run.checkpoints)] += 1
    assert sorted(counts) == [0, 1, 2]


def test_a_resumed_file_is_cut_before_anything_is_added(stored: Path) -> None:
    """Rows that nothing settles are measured again, so they must not stand there twice."""
    found = store.read_unfinished(stored)
    with runner.resume(found) as writer:
        writer.write(RunEnd(status="complete", wall_s=2.0))
    whole, problems = store.read_run(stored)
    assert not problems
    assert whole is not None
    assert (len(whole.rows), whole.end) == (6, RunEnd(status="complete", wall_s=2.0))


def test_the_newest_run_that_was_cut_off_is_found(stored: Path) -> None:
    """Runs that came to their end, and files that hold none, are passed over."""
    (stored.parent / "20990101T000000Z-quick-0001.jsonl").write_bytes(b"")
    (stored.parent / "20980101T000000Z-quick-0001.jsonl").write_bytes(b"nonsense\n")
    assert store.find_unfinished(stored.parent.parent, stored.parent.name) == stored
    with runner.resume(store.read_unfinished(stored)) as writer:
        writer.write(RunEnd(status="failed", wall_s=2.0))
    with pytest.raises(ResumeError, match="nothing to resume"):
        store.find_unfinished(stored.parent.parent, stored.parent.name)
    with pytest.raises(ResumeError, match="came to its end"):
        store.read_unfinished(stored)


def test_a_compressed_run_that_was_cut_off_is_found_and_resumed(stored: Path) -> None:
    """It was compressed to be committed; it becomes a plain file again, to which the rest is added."""
    compressed = stored.with_name(stored.name + ".gz")
    compressed.write_bytes(gzip.compress(stored.read_bytes()))
    stored.unlink()
    found = store.read_unfinished(store.find_unfinished(stored.parent.parent, stored.parent.name))
    with runner.resume(found) as writer:
        writer.write(RunEnd(status="complete", wall_s=2.0))
    whole, problems = store.read_run(stored)
    assert not problems
    assert whole is not None
    assert (len(whole.rows), whole.end) == (6, RunEnd(status="complete", wall_s=2.0))
    assert list(stored.parent.iterdir()) == [stored]


def test_a_run_with_a_damaged_line_is_not_resumed(stored: Path) -> None:
    """Going on would lose the row that stood there."""
    lines = stored.read_bytes().split(b"\n")
    stored.write_bytes(b"\n".join([*lines[:2], lines[2][:40], *lines[3:]]))
    with pytest.raises(ResumeError, match=r":3: .*run again"):
        store.read_unfinished(stored)


def test_a_run_of_an_older_esbench_is_not_resumed(tmp_path: Path) -> None:
    """It does not say what was asked for."""
    with store.Writer(tmp_path, synthetic.header()) as writer:
        pass
    with pytest.raises(ResumeError, match="older esbench"):
        store.read_unfinished(writer.path)


def test_a_run_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """Resuming it would cut into it, whatever lock the device has."""
    header = msgspec.structs.replace(synthetic.header(), request=Request())
    with store.Writer(tmp_path, header) as writer:
        content = writer.path.read_bytes()
        with pytest.raises(BlockingIOError, match="is being written by another process"):
            runner.resume(store.read_unfinished(writer.path))
        assert writer.path.read_bytes() == content
    runner.resume(store.read_unfinished(writer.path)).close()


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start the command line in a new process."""
    return subprocess.Popen(
        [sys.executable, "-m", "esbench", *arguments, "--out", str(folder)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )


def keys(path: Path) -> Counter[object]:
    """Return how often each row stands in a run's file, whatever was measured."""
    found, problems = store.read_run(path)
    assert found is not None
    assert not problems
    assert found.end is not None
    assert found.end.status == "complete"
    return Counter(
        (row.variant, row.case, row.phase, row.metric, row.method, row.group)
        if isinstance(row, Measurement)
        else (row.variant, row.case, row.phase, row.status, row.reason)
        for row in found.rows
    )


def kill(process: subprocess.Popen[bytes], path: Path, rng: random.Random) -> None:
    """Kill a run at a random moment: anywhere from its start on, or shortly after it has stored something."""
    size, moment_s = path.stat().st_size, rng.uniform(0.0, 0.3)
    if rng.random() < EARLY:
        moment_s *= 10
    else:
        while process.poll() is None and path.stat().st_size <= size:
            time.sleep(0.01)
    time.sleep(moment_s)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_runs_killed_at_random_moments_have_the_same_rows(tmp_path: Path) -> None:
    """With kill -9, resumed each time: none lost, none doubled, and readable at every moment."""
    rng = random.Random(3)  # noqa: S311  # moments, not secrets
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert start(whole, *QUICK).wait() == 0
    (unbroken,) = whole.glob("*/*.jsonl")
    process = None
    for number in range(KILLS):
        if process is None:
            process = start(cut / str(number), *QUICK)
            while not any(file.read_bytes().endswith(b"\n") for file in cut.glob(f"{number}/*/*.jsonl")):
                time.sleep(0.01)
            (path,) = cut.glob(f"{number}/*/*.jsonl")
        kill(process, path, rng)
        found, problems = store.read_run(path)
        assert found is not None
        assert all("half a line" in str(problem) for problem in problems)
        process = None
        if found.end is None:
            process = start(path.parent.parent, "run", "--device", "cpu", "--resume")
        else:
            assert keys(path) == keys(unbroken)
    assert process is None or process.wait() == 0
    assert keys(path) == keys(unbroken)
