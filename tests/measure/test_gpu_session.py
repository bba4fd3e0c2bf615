"""``tools/gpu_session.sh`` runs steps with a time limit and always packs their results."""

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from esbench import wheels

ROOT = Path(__file__).parents[2]
BASH = shutil.which("bash") or "bash"
SCRIPT = str(ROOT / "tools" / "gpu_session.sh")
FAST = "grace=0 kill_after=1\n"


def start(tmp_path: Path, steps: str, *options: str) -> subprocess.Popen[str]:
    """Start a session of these steps on the CPU that packs its results into the folder ``out``."""
    file = tmp_path / "trial.sh"
    file.write_text(FAST + steps)
    return subprocess.Popen(
        [BASH, SCRIPT, str(file), "--device", "cpu", "--out", str(tmp_path / "out"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHON": sys.executable, "TMPDIR": str(tmp_path)},
    )


def session(tmp_path: Path, steps: str, *options: str) -> tuple[int, list[list[str]]]:
    """Run a session; return its exit code and the lines of its summary as (name, status, seconds, note)."""
    process = start(tmp_path, steps, *options)
    process.communicate(timeout=60)
    return process.returncode, summary(tmp_path)


def summary(tmp_path: Path) -> list[list[str]]:
    """Return the lines of the summary beside the archive."""
    return [line.split("\t") for line in (tmp_path / "out" / "trial.summary.tsv").read_text().splitlines()]


def unpack_texts(tmp_path: Path) -> dict[str, str]:
    """Unpack the pieces; return path -> text, up to where the archive is cut off."""
    pieces = sorted((tmp_path / "out").glob("trial.tar.gz.*"))
    texts: dict[str, str] = {}
    joined = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(fileobj=joined, mode="r|gz") as archive:
        try:
            for member in archive:
                if content := archive.extractfile(member):
                    texts[member.name] = content.read().decode()
        except (EOFError, tarfile.ReadError):
            pass
    return texts


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    """Every step has its line and its log, and whatever it stored is packed."""
    code, lines = session(
        tmp_path,
        """
        step stores 5 bash -c "mkdir $results/card; echo found > $results/card/run.jsonl"
        step fails 5 bash -c "echo reason; exit 7"
        step hangs 1 sleep 60
        step deaf 1 bash -c "trap '' INT TERM; sleep 60 & wait; sleep 60"
        step budget 3 echo within {seconds}
        gpu step card 5 true
        step stop 5 false || stopped="a reason"
        step after 5 touch "$results/after"
        """,
    )
    assert code == 1
    assert [(name, status, note) for name, status, _, note in lines] == [
        ("stores", "ok", ""),
        ("fails", "failed", "exit code 7: reason"),
        ("hangs", "timeout", ""),
        ("deaf", "timeout", ""),
        ("budget", "ok", "within 3.00"),
        ("card", "skipped", "needs a GPU"),
        ("stop", "failed", "exit code 1: "),
        ("after", "skipped", "a reason"),
    ]
    files = unpack_texts(tmp_path)
    assert files["results/card/run.jsonl"] == "found\n"
    assert files["gpu-session/trial/budget.log"] == "within 3.00\n"
    assert "results/after" not in files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "trial.sh"]  # nothing else is left


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """Let processes started by a test react to SIGINT, even if the calling shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_interrupts")
def test_an_interrupted_session_packs_its_results(tmp_path: Path) -> None:
    """Finished steps are packed; after SIGTERM or SIGINT, so is the log of the step in progress."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        folder = tmp_path / number.name
        folder.mkdir()
        steps = 'step done 5 touch "$results/stored"\nstep long 5 bash -c "echo on; sleep 5"'
        process = start(folder, steps)
        while not any(path.read_text() for path in folder.glob("*/gpu-session/trial/long.log")):
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=20)
        assert "results/stored" in unpack_texts(folder), number
        if number != signal.SIGKILL:
            assert process.returncode == 128 + number
            assert [line[:2] for line in summary(folder)] == [["done", "ok"], ["long", "interrupted"]]
            assert unpack_texts(folder)["gpu-session/trial/long.log"] == "on\n"


def test_pieces_stay_below_the_limits(tmp_path: Path) -> None:
    """The archive is split; above the size limit, logs are cut off, results are kept, and packing fails."""
    steps = (
        'file_bytes=20000 files=3\nstep few 5 bash -c "echo found > $results/run"\n'
        'step fill 9 bash -c "head -c 50000 /dev/urandom | base64 -w 0"\n'
    )
    code, lines = session(tmp_path, steps)
    assert code == 1
    assert [line[:2] for line in lines] == [["few", "ok"], ["fill", "ok"], ["pack", "failed"]]
    folder = Path(lines[-1][3].removeprefix("more than 2 files of 20000 bytes: all is in "))
    assert len((folder / "gpu-session/trial/fill.log").read_text()) == 66668
    assert max(path.stat().st_size for path in (tmp_path / "out").iterdir()) == 20000
    assert unpack_texts(tmp_path)["results/run"] == "found\n"


def test_steps_fit_into_the_limit(tmp_path: Path) -> None:
    """A step gets the remaining time, or is skipped if that is too short; time limits can be scaled."""
    _, lines = session(tmp_path, "step less 10 echo {seconds}\nstep none 30 true", "--limit", "9")
    assert lines[1] == ["none", "skipped", "0", "no time left"]
    assert 5 <= float(unpack_texts(tmp_path)["gpu-session/trial/less.log"]) <= 8
    session(tmp_path, "step scaled 100 echo {seconds}", "--seconds-scale", "0.05")
    assert unpack_texts(tmp_path)["gpu-session/trial/scaled.log"] == "5.00\n"
    code, lines = session(tmp_path, "gpu step card 5 true\n")  # nothing was measured, so the session fails
    assert code == 1
    assert [line[:2] for line in lines] == [["card", "skipped"], ["session", "failed"]]


def test_a_bad_option_is_named_in_one_line(tmp_path: Path) -> None:
    """A bad option exits with 2 and is named on stderr with its value."""
    for arguments, words in (
        ("1 --limit abc", "--limit abc"),
        ("1 --device gpu", "--device gpu"),
        ("4", "PART 4"),
        ("1 --nope", "--nope"),
    ):
        done = subprocess.run(
            [BASH, SCRIPT, *arguments.split()], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), arguments
        assert words in done.stderr


def test_only_packages_for_measuring_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The install command has only missing packages that measuring needs, with pinned versions."""
    absent = {"msgspec", "cogapp", "pytest-xdist"}
    monkeypatch.setattr(wheels, "_is_installed", lambda name: name not in absent)
    assert [text.partition("==")[0] for text in wheels.missing_packages()] == ["msgspec", "pytest-xdist"]
    assert all("==" in text for text in wheels.missing_packages())
