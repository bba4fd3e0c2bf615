"""The command ``gate`` in a repository with a package of variants; it leaves nothing behind."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest

from esbench.gate import gate, records
from esbench.gate.records import Decision
from tests.cli_runner import run
from tests.gate.gate_plugin import of, plain, plugin
from tests.gate.gate_repository import commit, git, repository, state, worktrees, write

ROOT = Path(__file__).parents[2]
FILE = "their_variants.py"
GOOD = plugin(plain("TinyOne"), plain("TinyTwo"))
WRONG = plugin(of("TinyTwo", "sum(self, x)", "return x.sum(dim=0) + 1"))
TINY = ["--device", "cpu", "--suite", "tiny", "--plugin", FILE]
assert gate  # imported before Settings is replaced: the class keeps its default


class Ended(NamedTuple):
    """How a gate ended: its exit code, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def only_line(self) -> str:
        """The one line of a command that could not decide; before it there is only progress."""
        line = self.err.splitlines()[-1]
        assert self.code == 2
        assert line.startswith("esbench: ")
        assert self.err.count("esbench: ") == 1
        assert self.out == ""
        return line


class Place:
    """A repository with two variants, and folders for output and temporary files."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Make the repository; change into it."""
        self.top = repository(folder / "repository", {FILE: GOOD, "below/empty.txt": ""})
        self.out, self.temporary = folder / "out", folder / "temporary"
        for one in (self.temporary, folder / "home"):
            one.mkdir()
        self.capsys = capsys
        for name in [name for name in os.environ if name.startswith(("GIT_", "GITHUB_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(folder / "home"))
        monkeypatch.setenv("TMPDIR", str(self.temporary))
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        monkeypatch.chdir(self.top)
        small = functools.partial(records.Settings, screen=2, confirm=2)
        monkeypatch.setattr(records, "Settings", small)  # each replicate starts two processes
        monkeypatch.setattr(gate, "MIN_ROUNDS", 4)
        monkeypatch.setattr(gate, "MAX_ROUNDS", 8)

    def run(self, *arguments: str) -> Ended:
        """Run a gate in this process; check that it leaves everything as it was."""
        before = state(self.top)
        self.capsys.readouterr()
        code = run("gate", "--out", str(self.out), *arguments)
        ended = Ended(code, *self.capsys.readouterr())
        self.check_nothing_left()
        assert state(self.top) == before
        assert "Traceback" not in ended.err
        return ended

    def check_nothing_left(self) -> None:
        """Look for work trees, temporary files and workers."""
        assert worktrees(self.top) == []
        assert [one.name for one in self.temporary.iterdir()] == []
        assert self.workers() == []

    def workers(self) -> list[psutil.Process]:
        """The workers whose work trees are in this place."""
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.temporary) in " ".join(one.cmdline()) and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def decision(self) -> Decision:
        """The content of gate.json."""
        return msgspec.json.decode((self.out / "gate.json").read_bytes(), type=Decision)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Place:
    """A repository to be gated in this process."""
    return Place(tmp_path, monkeypatch, capsys)


def test_a_revision_against_itself_does_not_fail(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder below the top, whose files a plug-in is named from; every sample is on disk."""
    monkeypatch.chdir(place.top / "below")
    done = place.run("--base", "HEAD", "--device", "cpu", "--suite", "tiny", "--plugin", f"../{FILE}")
    assert done.code in {0, 3}, done.out + done.err
    found = place.decision()
    assert found.exit_code == done.code
    assert {one.status for one in found.verdicts} <= {"PASS", "INCONCLUSIVE"}
    assert {one.cell.partition(" ")[0] for one in found.verdicts} == {"TinyOneTiny", "TinyTwoTiny"}
    assert len(found.controls) == 2
    assert {one.commit for one in found.opening.revisions.values()} == {git(place.top, "rev-parse", "HEAD")}
    assert found.opening.code["base"] == found.opening.code["head"]
    lines = (place.out / "replicates.jsonl").read_bytes().splitlines()
    assert sum(b'"stage":"screen"' in line for line in lines) == found.settings.screen
    assert sum(b'"stage":"confirm"' in line for line in lines) == found.settings.confirm
    assert done.out.splitlines()[-1].startswith(("PASS: ", "INCONCLUSIVE: ", "INVALID: "))


def test_a_missing_or_wrong_row_fails_by_name(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stdout, in both files and on GitHub; a dirty folder is measured only if asked for."""
    write(place.top, {FILE: WRONG})
    assert "--head worktree" in place.run("--base", "HEAD", *TINY).only_line
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    done = place.run("--base", "HEAD", "--head", "worktree", *TINY)
    assert done.code == 1, done.err
    found = place.decision()
    assert found.opening.revisions["head"].asked == "worktree"
    assert {(one.cell.partition(" ")[0], one.code, one.reason) for one in found.verdicts} == {
        ("TinyOneTiny", "missing", "no variant TinyOneTiny"),
        ("TinyTwoTiny", "wrong", "oracle: the sum is off"),
    }
    assert "FAIL" in done.out
    page = (place.out / "summary.md").read_text(encoding="utf-8")
    assert page.startswith("### esbench gate: FAIL: ")
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == page
    cell = "Tiny(4, 4) members=8 | forward | host"
    assert sorted(line for line in done.out.splitlines() if line.startswith("::")) == [
        "::error title=esbench gate%3A invalid::no cell was measured in both arms",
        f"::error title=esbench gate%3A missing::TinyOneTiny | {cell}, row, no variant TinyOneTiny",
        f"::error title=esbench gate%3A wrong::TinyTwoTiny | {cell}, output, oracle: the sum is off",
    ]


def test_a_base_that_cannot_be_loaded_is_an_error(place: Place) -> None:
    """Exit code 2, with the arm, the revision, the file and the error, in one line."""
    base = commit(place.top, {FILE: "raise SystemExit('it never\\nworked')\n"})
    commit(place.top, {FILE: GOOD})
    line = place.run("--base", base, *TINY).only_line
    assert f"the worker of base failed at start: PluginError: cannot load variants from {FILE}" in line
    assert "SystemExit: it never worked" in line
    assert f"base is {base}" in line


def test_bad_usage_ends_in_one_line_and_exit_code_2(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names what is wrong, and an earlier decision is removed; waivers are those of head."""
    waiver = '[[accept]]\ncell = "*"\nmetric = "row"\nreason = "long ago, it was"\nexpires = 2020-01-01\n'
    commit(place.top, {"gate.toml": waiver})
    for arguments, words in (
        (["--base", "nope"], "--base nope: no such revision in "),
        (["--head", "nope", "--base", "HEAD"], "--head nope: no such revision in "),
        (["--base=--upload-pack=touch gotcha"], "not a revision"),
        (["--base", "HEAD", "--device", "tpu"], "no device 'tpu'"),
        (["--base", "HEAD", "--margin", "nan"], "--margin"),
        (["--base", "HEAD", "--silence", "inf"], "--silence"),
        (["--base", "HEAD~1", *TINY], "gate.toml: the waiver for row of * expired on 2020-01-01"),
    ):
        write(place.out, {"gate.json": "an earlier one", "summary.md": "an earlier one"})
        assert words in place.run(*arguments).only_line
        if not {"--margin", "--silence"} & {*arguments}:  # refused before anything is looked at
            assert list(place.out.iterdir()) == [], arguments
    monkeypatch.chdir(tmp_path)
    assert f"{tmp_path.resolve()} is not in a git repository" in place.run("--base", "HEAD").only_line


def test_an_interrupt_leaves_nothing_behind(place: Place) -> None:
    """Exit code 130, in one line; further signals while it cleans up do not disturb it."""
    # Programs started in the background may ignore interrupts, and pass this on to what they start.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from esbench.cli import main; main()"
    command = [sys.executable, "-c", program, "gate", "--out", str(place.out), "--base", "HEAD", *TINY]
    before = state(place.top)
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stderr is not None
            deadline = time.monotonic() + 120
            for line in process.stderr:
                assert time.monotonic() < deadline, "nothing was measured"
                if "screen 1" in line:
                    break
            assert len(place.workers()) == len(worktrees(place.top)) == 2
            for one in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                process.send_signal(one)
                time.sleep(0.05)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("interrupted: ")
    assert out == ""
    place.check_nothing_left()
    assert state(place.top) == before
    assert not (place.out / "gate.json").exists()


SIGNALLED = """
import os, signal
from esbench.cli.gate import interruptible

def send(number):
    os.kill(os.getpid(), number)

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with interruptible():
    send(signal.SIGHUP)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
try:
    with interruptible():
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGINT)
            send(signal.SIGTERM)
            print("cleaned up")
except KeyboardInterrupt:
    send(signal.SIGTERM)
    print("interrupted")
"""


def test_signals_after_the_first_are_ignored() -> None:
    """Ignored signals stay ignored; without an interrupt the handlers are as before."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["True", "True", "cleaned up", "interrupted", ""]
    assert done.stderr == "interrupted: no decision; workers and work trees are removed\n"
