"""The whole command, as somebody runs it in a repository of their own; nothing of it is left behind, ever."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest

from esbench.gate.records import Decision
from tests.gate.gate_plugin import of, plain, plugin
from tests.gate.gate_repository import commit, git, repository, state, worktrees, write

ROOT = Path(__file__).parents[2]
FILE = "their_variants.py"
WRONG = of("TinyTwo", "sum(self, x)", "return x.sum(dim=0) + 1")
# Whoever starts the tests in the background may have them ignore interrupts, and what they start too.
HEED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
PROGRAM = [sys.executable, "-c", f"{HEED}from esbench.cli import main; main()", "gate", "--device", "cpu"]
TINY = ["--suite", "tiny", "--plugin", FILE]


class Place(NamedTuple):
    """Where a gate is run: a repository, and folders outside of it."""

    top: Path
    out: Path
    temporary: Path
    environment: dict[str, str]

    def start(self, *arguments: str, folder: str = ".", **more: str) -> "subprocess.Popen[str]":
        """Start a gate."""
        return subprocess.Popen(
            [*PROGRAM, "--out", str(self.out), *arguments],
            cwd=self.top / folder,
            env={**self.environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, folder: str = ".", **more: str) -> "subprocess.CompletedProcess[str]":
        """Run a gate to its end, and look that it has left nothing behind and the repository as it was."""
        before = state(self.top)
        with self.start(*arguments, folder=folder, **more) as process:
            out, err = process.communicate(timeout=500)
        self.hold_to_nothing_left()
        assert state(self.top) == before
        assert "Traceback" not in err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def hold_to_nothing_left(self) -> None:
        """Look that there is no work tree, no temporary file and no worker."""
        assert worktrees(self.top) == []
        assert [one.name for one in self.temporary.iterdir()] == []
        assert self.workers() == []

    def workers(self) -> list[psutil.Process]:
        """The workers of gates that work in this place."""
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.temporary) in " ".join(one.cmdline()) and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def judgement(self) -> Decision:
        """What stands in gate.json."""
        return msgspec.json.decode((self.out / "gate.json").read_bytes(), type=Decision)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A repository of a package with two variants, and folders of its own for everything else."""
    top = repository(tmp_path / "repository", {FILE: plugin(plain("TinyOne"), plain("TinyTwo"))})
    for name in ("temporary", "home"):
        (tmp_path / name).mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "GITHUB_"))}
    environment = {
        **kept,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path / "temporary"),
        "HOME": str(tmp_path / "home"),
    }
    return Place(top, tmp_path / "out", tmp_path / "temporary", environment)


def only_line(done: "subprocess.CompletedProcess[str]") -> str:
    """The one line in which a command that came to nothing says why, behind what it said of its progress."""
    *_, line = done.stderr.splitlines()
    assert line.startswith("esbench: ")
    assert done.stderr.count("esbench: ") == 1
    assert done.stdout == ""
    return line


def test_a_revision_against_itself_does_not_fail(place: Place) -> None:
    """It passes; on a machine too noisy to say so it is inconclusive, and every sample is on disk."""
    done = place.run("--base", "HEAD", *TINY)
    assert done.returncode in {0, 3}, done.stdout + done.stderr
    found = place.judgement()
    assert found.exit_code == done.returncode
    assert {one.status for one in found.verdicts} <= {"PASS", "INCONCLUSIVE"}
    assert {one.cell.partition(" ")[0] for one in found.verdicts} == {"TinyOneTiny", "TinyTwoTiny"}
    assert len(found.controls) == 2
    commits = {one.commit for one in found.opening.revisions.values()}
    assert commits == {git(place.top, "rev-parse", "HEAD")}
    assert found.opening.code["base"] == found.opening.code["head"]
    lines = (place.out / "replicates.jsonl").read_bytes().splitlines()
    assert sum(b'"stage":"screen"' in line for line in lines) == found.settings.screen
    assert sum(b'"stage":"confirm"' in line for line in lines) == found.settings.confirm
    assert done.stdout.splitlines()[-1].startswith(("PASS: ", "INCONCLUSIVE: ", "INVALID: "))


def test_what_is_missing_or_wrong_fails_by_name(place: Place, tmp_path: Path) -> None:
    """On stdout, in both files, in the summary of a pull request and as annotations."""
    base = git(place.top, "rev-parse", "HEAD")
    commit(place.top, {FILE: plugin(WRONG)})
    summary = tmp_path / "summary.md"
    done = place.run("--base", base, *TINY, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 1, done.stderr
    rows = {(one.cell.partition(" ")[0], one.code, one.reason) for one in place.judgement().verdicts}
    assert rows == {
        ("TinyOneTiny", "missing", "no variant TinyOneTiny"),
        ("TinyTwoTiny", "wrong", "oracle: the sum is off"),
    }
    assert "FAIL" in done.stdout
    assert "no variant TinyOneTiny" in done.stdout
    page = (place.out / "summary.md").read_text(encoding="utf-8")
    assert page.startswith("### esbench gate: FAIL: ")
    assert summary.read_text(encoding="utf-8") == page
    cell = "Tiny(4, 4) members=8 | forward | host"
    commands = [line for line in done.stdout.splitlines() if line.startswith("::")]
    assert sorted(commands) == [
        "::error title=esbench gate%3A invalid::no cell was measured in both arms",
        f"::error title=esbench gate%3A missing::TinyOneTiny | {cell}, row, no variant TinyOneTiny",
        f"::error title=esbench gate%3A wrong::TinyTwoTiny | {cell}, output, oracle: the sum is off",
    ]


def test_a_dirty_tree_is_judged_where_it_is_asked_for(place: Place) -> None:
    """By its name; otherwise it is refused, for the tip is not what a person sees."""
    write(place.top, {FILE: plugin(WRONG)})
    assert "--head worktree" in only_line(place.run("--base", "HEAD", *TINY))
    done = place.run("--base", "HEAD", "--head", "worktree", "--variants", "TinyTwo", *TINY)
    assert done.returncode == 1, done.stderr
    (verdict,) = place.judgement().verdicts
    assert (verdict.code, verdict.reason) == ("wrong", "oracle: the sum is off")
    assert place.judgement().opening.revisions["head"].asked == "worktree"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--base", "nope"], "--base nope: no such revision in "),
        (["--head", "nope", "--base", "HEAD"], "--head nope: no such revision in "),
        (["--base=--upload-pack=touch gotcha"], "not a revision"),
        (["--base", "HEAD", "--device", "tpu"], "no device 'tpu'"),
        (["--base", "HEAD", "--margin", "1"], "--margin"),
        (["--base", "HEAD", "--margin", "nan"], "--margin"),
        (["--base", "HEAD", "--silence", "inf"], "--silence"),
        (["--base", "HEAD", "--plugin", FILE, "--suite", "nope"], "no suite 'nope'; there are: "),
        (["--base", "HEAD"], "no package of variants comes from this repository: name one with --plugin"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_ends_in_one_line_and_exit_code_2(
    place: Place, arguments: Sequence[str], words: str
) -> None:
    """It names what is wrong; an earlier verdict does not stand for the one that there is not."""
    write(place.out, {"gate.json": "an earlier one", "summary.md": "an earlier one"})
    done = place.run(*arguments)
    assert done.returncode == 2
    assert words in only_line(done)
    if "--margin" not in arguments and "--silence" not in arguments:  # refused before anything is looked at
        assert {path.name for path in place.out.iterdir()} <= {"replicates.jsonl"}


def test_without_a_repository_there_is_nothing_to_gate(place: Place, tmp_path: Path) -> None:
    """The line says so."""
    with place._replace(top=tmp_path).start("--base", "HEAD") as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert err.startswith(f"esbench: {tmp_path.resolve()} is in no git repository")


def test_a_base_that_cannot_be_loaded_is_no_baseline(place: Place) -> None:
    """Exit code 2, with the arm, the revision, the file and the error."""
    good = {FILE: plugin(plain("TinyOne"))}
    base = commit(place.top, {FILE: "raise ImportError('it never worked')\n"})
    commit(place.top, good)
    done = place.run("--base", base, *TINY)
    assert done.returncode == 2
    line = only_line(done)
    assert f"the worker of base cannot go on at start: PluginError: cannot load variants from {FILE}" in line
    assert "it never worked" in line
    assert f"base is {base}" in line


def test_acceptances_are_those_of_the_revision_that_is_judged(place: Place) -> None:
    """And are read before anything is measured."""
    acceptance = [
        'cell = "*"',
        'metric = "latency_ns"',
        'reason = "long ago, it was"',
        "expires = 2020-01-01",
    ]
    commit(place.top, {"gate.toml": "\n".join(["[[accept]]", *acceptance])})
    done = place.run("--base", "HEAD~1", *TINY)
    assert done.returncode == 2
    assert "gate.toml: the acceptance of latency_ns of * expired on 2020-01-01" in only_line(done)


def test_a_file_of_variants_is_named_from_where_one_is(place: Place) -> None:
    """As every other file on a command line, and not from the top of the tree that it is looked for in."""
    (place.top / "below").mkdir()
    done = place.run("--base", "HEAD", "--plugin", f"../{FILE}", "--suite", "nope", folder="below")
    assert done.returncode == 2
    assert only_line(done).startswith("esbench: no suite 'nope'; there are: ")
    assert "tiny" in only_line(done).split("there are: ")[1].split(", ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_full_disk_is_named(place: Place) -> None:
    """With the file that did not fit."""
    place.out.mkdir()
    file = place.out / "replicates.jsonl"
    file.symlink_to("/dev/full")
    done = place.run("--base", "HEAD", *TINY)
    assert done.returncode == 2
    assert only_line(done) == f"esbench: {file}: No space left on device"


@contextlib.contextmanager
def under_way(place: Place) -> Iterator["subprocess.Popen[str]"]:
    """A gate that measures."""
    with place.start("--base", "HEAD", *TINY) as process:
        try:
            assert process.stderr is not None
            deadline = time.monotonic() + 120
            for line in process.stderr:
                assert time.monotonic() < deadline, "nothing was measured"
                if "screen 1" in line:
                    break
            assert len(place.workers()) == 2
            assert len(worktrees(place.top)) == 2
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]],
    ids=["interrupt", "terminate, impatiently"],
)
def test_an_interrupt_leaves_nothing_behind(place: Place, signals: list[signal.Signals]) -> None:
    """Exit code 130, in one line; whoever asks again while it cleans up does not disturb it."""
    before = state(place.top)
    with under_way(place) as process:
        for one in signals:
            process.send_signal(one)
            time.sleep(0.05)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("interrupted: ")
    assert out == ""
    place.hold_to_nothing_left()
    assert state(place.top) == before
    assert not (place.out / "gate.json").exists()


def test_a_gate_that_is_killed_is_cleaned_up_after(place: Place) -> None:
    """Its workers end by themselves, and the next gate removes its work trees."""
    with under_way(place) as process:
        process.kill()
        process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while place.workers():
        assert time.monotonic() < deadline, "workers outlive the gate that asked them"
        time.sleep(0.05)
    assert len(worktrees(place.top)) == 2
    commit(place.top, {"gate.toml": "not toml"})
    with place.start("--base", "HEAD", *TINY) as process:
        process.communicate(timeout=100)
    assert process.returncode == 2
    assert worktrees(place.top) == []


ASKED_TWICE = """
import os, signal
from esbench.cli.interrupts import interruptible

def ask(number):
    os.kill(os.getpid(), number)

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with interruptible():
    ask(signal.SIGHUP)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
try:
    with interruptible():
        try:
            ask(signal.SIGTERM)
        finally:
            ask(signal.SIGINT)
            ask(signal.SIGTERM)
            print("cleaned up")
except KeyboardInterrupt:
    ask(signal.SIGTERM)
    print("interrupted")
"""


def test_who_asks_twice_does_not_disturb_the_cleaning_up() -> None:
    """What was ignored stays so; behind a gate that was not interrupted all is as it was before."""
    done = subprocess.run([sys.executable, "-c", ASKED_TWICE], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["True", "True", "cleaned up", "interrupted", ""]
    assert done.stderr == "interrupted: there is no verdict; workers and work trees are gone\n"
