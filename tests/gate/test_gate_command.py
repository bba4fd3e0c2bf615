"""The command ``gate`` in a repository with a package of variants; it leaves no files behind."""

import contextlib
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest

from esbench import progress
from esbench.gate import gate, records
from esbench.gate.records import MEAN, Begin, Decision
from esbench.gate.worker_process import run_workers
from tests.cli.cli_runner import run
from tests.gate.gate_cases import CELLS, evidence, replay
from tests.gate.gate_plugin import correct_variant, plugin, variant_with
from tests.gate.gate_repository import commit, git, repository, state, write
from tests.gate.test_planted_faults import WAIVER

FILE = "their_variants.py"
GOOD = plugin(*map(correct_variant, ("TinyOne", "TinyTwo", "TinyThree")))
WRONG = plugin(
    variant_with("TinyTwo", "sum(self, x)", "return x.sum(dim=0) + 1"), correct_variant("TinyThree")
)
TINY = ["--device", "cpu", "--suite", "tiny", "--plugin", FILE]


class Ended(NamedTuple):
    """The result of a gate command: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def only_line(self) -> str:
        """Return the one error line of a command that could not decide; only progress may precede it."""
        assert self.code == 2
        assert self.err.splitlines()[-1].startswith("esbench: ")
        assert self.err.count("esbench: ") == 1
        assert self.out == ""
        return self.err.splitlines()[-1]


class Workspace:
    """A repository with two variants, and folders for output and temporary files."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Create the repository and change into it."""
        # An empty package impls saves the workers the seconds that importing the real one takes.
        files = {FILE: GOOD, "below/empty.txt": "", "impls/__init__.py": ""}
        self.top = repository(folder / "repository", files)
        self.out, self.temporary, self.capsys = folder / "out", folder / "temporary", capsys
        self.temporary.mkdir()
        (folder / "home").mkdir()
        for name in [name for name in os.environ if name.startswith(("GIT_", "GITHUB_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(folder / "home"))
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        monkeypatch.chdir(self.top)

    def run(self, *arguments: str) -> Ended:
        """Run a gate in this process; check that the repository is unchanged."""
        before = state(self.top)
        self.capsys.readouterr()
        code = run("gate", "--out", str(self.out), *arguments)
        ended = Ended(code, *self.capsys.readouterr())
        assert list(self.temporary.iterdir()) == []
        assert self.workers() == []
        assert state(self.top) == before
        return ended

    def workers(self) -> list[psutil.Process]:
        """Return the worker processes of gates in this repository."""
        workers = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if is_alive and str(self.temporary) in " ".join(process.cmdline()):
                    workers.append(process)
        return workers

    def decision(self) -> Decision:
        """Return the content of gate.json."""
        return msgspec.json.decode((self.out / "gate.json").read_bytes(), type=Decision)


@pytest.fixture
def workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Workspace:
    """Return a repository for a gate in this process."""
    return Workspace(tmp_path, monkeypatch, capsys)


def start_with(monkeypatch: pytest.MonkeyPatch, start: Callable[..., Any]) -> None:
    """Let gates start their workers by this function."""
    monkeypatch.setattr(gate, "Gate", functools.partial(gate.Gate, start=start))


def test_a_revision_against_itself_passes(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers are fakes: the times of real ones may be too noisy to pass.

    A waiver may apply to nothing, because the suite is named.
    """
    start_with(monkeypatch, replay(evidence()))
    commit(workspace.top, {"gate.toml": WAIVER})
    done = workspace.run("--base", "HEAD", "--separate", "--margin", "0.01", *TINY)
    assert done.code == 0, done.out + done.err
    decision = workspace.decision()
    assert (decision.exit_code, decision.opening.separate, decision.settings.margin) == (0, True, 0.01)
    assert {verdict.status for verdict in decision.verdicts} == {"PASS"}
    assert [verdict.cell for verdict in decision.verdicts] == [*(cell.name for cell in CELLS), MEAN]
    assert len(decision.controls) == 2
    tip = git(workspace.top, "rev-parse", "HEAD")
    assert {revision.commit for revision in decision.opening.revisions.values()} == {tip}
    lines = (workspace.out / "replicates.jsonl").read_bytes().splitlines()
    assert sum(b'"record":"replicate"' in line for line in lines) >= 5 * decision.settings.looks[0]
    assert done.out.splitlines()[-1].startswith("PASS: ")


def test_a_missing_or_wrong_row_fails_by_name(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is named on stdout, in both files and on GitHub; uncommitted changes are measured if asked.

    A row that is the same in both arms is timed. The gate may run from a subfolder.
    """
    settings = records.Settings(looks=(4,), processes=1)
    monkeypatch.setattr(records.Settings, "of", lambda *_, **__: settings)
    write(workspace.top, {FILE: WRONG})
    assert "--head worktree" in workspace.run("--base", "HEAD", *TINY).only_line
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.chdir(workspace.top / "below")
    done = workspace.run("--base", "HEAD", "--head", "worktree", *TINY)
    assert done.code == 1, done.err
    decision = workspace.decision()
    assert decision.exit_code == 1
    assert decision.opening.revisions["head"].asked == "worktree"
    timed = [verdict for verdict in decision.verdicts if verdict.metric == "latency_ns"]
    assert {verdict.cell.split()[0] for verdict in timed} == {"TinyThreeTiny", "geometric"}
    assert {verdict.status for verdict in timed} <= {"PASS", "INCONCLUSIVE"}
    assert {
        (verdict.cell.split()[0], verdict.reason) for verdict in decision.verdicts if verdict not in timed
    } == {
        ("TinyOneTiny", "missing: the suite of head does not have it"),
        ("TinyTwoTiny", "wrong result: the sum is off"),
    }
    assert "FAIL" in done.out
    assert "\n::error title=esbench gate::FAIL: TinyTwoTiny" in done.out
    page = (workspace.out / "summary.md").read_text(encoding="utf-8")
    assert page.startswith("### esbench gate: FAIL: ")
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == page


def test_bad_usage_ends_in_one_line_and_exit_code_2(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the error, an earlier decision is removed, and waivers are read from head."""
    waiver = '[[accept]]\ncell = "*"\nmetric = "row"\nreason = "long ago, it was"\nexpires = 2020-01-01\n'
    commit(workspace.top, {"gate.toml": waiver})
    for arguments, words in (
        (["--base", "nope"], "--base nope: no such revision in "),
        (["--head", "nope", "--base", "HEAD"], "--head nope: no such revision in "),
        (["--base", "HEAD", "--device", "tpu"], "no device 'tpu'"),
        (["--base", "HEAD~1", *TINY], "gate.toml: the waiver for row of * expired on 2020-01-01"),
    ):
        write(workspace.out, {"gate.json": "an earlier one", "summary.md": "an earlier one"})
        assert words in workspace.run(*arguments).only_line
        assert list(workspace.out.iterdir()) == [], arguments
    assert "--margin" in workspace.run("--base", "HEAD", "--margin", "nan").only_line
    workspace.out.rmdir()
    workspace.out.write_text("a file")
    assert (
        f"--out {workspace.out}: {workspace.out} is not a folder" in workspace.run("--base", "HEAD").only_line
    )
    monkeypatch.chdir(tmp_path)
    workspace.out.unlink()
    assert "not a git repository" in workspace.run("--base", "HEAD").only_line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_nothing_behind(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """An interrupt exits with 130; further signals do not stop the clean-up, and handlers are restored.

    So does a terminal that is closed.
    """
    worker_counts: list[int] = []
    outer = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
    before = signal.getsignal(number)
    remove = shutil.rmtree

    @contextlib.contextmanager
    def showing() -> Iterator[progress.Show]:
        def show(_done: int, _total: int, activity: str, *_: object) -> None:
            if activity.endswith("a check") and not worker_counts:
                worker_counts.append(len(workspace.workers()))
                os.kill(os.getpid(), number)

        yield show

    def disturbed(*arguments: Any, **options: Any) -> None:
        for another in (number, signal.SIGINT) if worker_counts else ():
            os.kill(os.getpid(), another)
        remove(*arguments, **options)

    begin = msgspec.json.encode(Begin("a check", 0, 1)) + b"\n"  # and nothing more
    program = f"import sys, time; open(sys.argv[2], 'ab', 0).write({begin!r}); time.sleep(600)"
    start_with(monkeypatch, functools.partial(run_workers, program=("-S", "-c", program)))
    monkeypatch.setattr(progress, "showing", showing)
    monkeypatch.setattr(shutil, "rmtree", disturbed)
    monkeypatch.setattr("esbench.cli.gate._cores", lambda: (None, None))
    done = workspace.run("--base", "HEAD", *TINY)
    assert (done.code, done.out, worker_counts) == (130, "", [2])
    assert done.err.splitlines()[-1] == "interrupted: no decision; workers and their files are removed"
    assert not (workspace.out / "gate.json").exists()
    assert signal.getsignal(number) == before
    signal.signal(signal.SIGHUP, outer)
