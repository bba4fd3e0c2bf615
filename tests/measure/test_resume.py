"""A run that is interrupted at any moment loses no finished phase and can be resumed."""

import contextlib
import dataclasses
import itertools
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest

from esbench import store
from esbench.measure import runner
from esbench.measure.runner import run_cases
from esbench.schema import Checkpoint, Measurement, Phase, Record, Request, RunEnd
from esbench.store import ResumeError
from tests import synthetic
from tests.cli import cli_runner
from tests.fakes import CASE, FakeScheme, World
from tests.loop_cases import plan_of

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


def test_a_run_cut_off_at_any_moment_is_completed_as_if_it_had_not_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resumed run has the same rows and samples in the same order, wherever it was cut.

    At most one phase is measured again: a later cut keeps no less, and each checkpoint is there once.
    """
    monkeypatch.setattr(time, "sleep", lambda _: None)  # fakes have no late results to wait for
    for traces_last in (False, True):
        whole = measure(traces_last=traces_last)
        checkpoints = [line for line in whole if isinstance(line, Checkpoint)]
        assert len({(line.case, line.group, line.phase, line.traced) for line in checkpoints}) == len(
            checkpoints
        )
        sizes = []
        for cut in itertools.count():
            part = measure(cut_after=cut, traces_last=traces_last)
            if len(part) == len(whole):
                break
            first = kept(part)
            first += kept(measure(first, cut_after=1, traces_last=traces_last))
            rest = measure(first, traces_last=traces_last)
            assert without_times([*first, *rest]) == without_times(whole)
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
            writer.write(*rows, Checkpoint(case=CASE, group=0, phase=phase, wall_s=1.0))
        writer.write(rows[0])
    return writer.path


def test_what_is_settled_is_kept_wherever_the_file_ends(stored: Path) -> None:
    """Cut at any byte, the file keeps whole phases only and never half a line."""
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


def resume_and_end(path: Path) -> None:
    """Resume a run and end it at once; check that only the row after the last checkpoint was removed."""
    with runner.resume(store.read_unfinished(path)) as writer:
        writer.write(RunEnd(status="complete", wall_s=2.0))
    whole, problems = store.read_run(path)
    assert not problems
    assert whole is not None
    assert (len(whole.rows), whole.end) == (6, RunEnd(status="complete", wall_s=2.0))
    assert list(path.parent.glob(f"{path.stem}*")) == [path]


def test_the_newest_run_that_was_cut_off_is_resumed(stored: Path) -> None:
    """Completed runs and files without a run are passed over.

    Rows after the last checkpoint are measured again, so they are removed: otherwise they would appear twice.
    """
    results, slug = stored.parent.parent, stored.parent.name
    (stored.parent / "20990101T000000Z-quick-0001.jsonl").write_bytes(b"")
    (stored.parent / "20980101T000000Z-quick-0001.jsonl").write_bytes(b"nonsense\n")
    assert store.find_unfinished(results, slug) == stored
    resume_and_end(stored)
    with pytest.raises(ResumeError, match="nothing to resume"):
        store.find_unfinished(results, slug)
    with pytest.raises(ResumeError, match="is complete"):
        store.read_unfinished(stored)


def test_a_run_with_a_damaged_line_is_not_resumed(stored: Path) -> None:
    """The error names the line."""
    lines = stored.read_bytes().split(b"\n")
    stored.write_bytes(b"\n".join([*lines[:2], lines[2][:40], *lines[3:]]))
    with pytest.raises(ResumeError, match=r":3: .*run again"):
        store.read_unfinished(stored)


def keys(folder: Path) -> Counter[object]:
    """Return how often each row is in a run's file, whatever its values."""
    (path,) = folder.glob("*/*.jsonl*")
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


def test_a_run_that_is_killed_has_the_same_rows_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed with SIGKILL in a phase loses and repeats no row, and is readable meanwhile."""
    options = ("--suite", "quick", "--device", "cpu", "--cases", "Linear(128*", "--phases", "sample,forward")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run = ("run", *options, "--variants", "Flipped", "--out")
    monkeypatch.setattr(runner, "device_peaks", lambda *_: [])  # they make no rows and would take a second
    assert cli_runner.run(*run, str(whole)) == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "esbench", *run, str(cut)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    while not any(b'"phase":"' in file.read_bytes() for file in cut.glob("*/*.jsonl*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (path,) = cut.glob("*/*.jsonl*")
    found, problems = store.read_run(path)
    assert found is not None
    assert found.end is None
    assert all("half a line" in str(problem) for problem in problems)
    assert cli_runner.run("run", "--device", "cpu", "--resume", "--out", str(cut)) == 0
    assert keys(cut) == keys(whole)
