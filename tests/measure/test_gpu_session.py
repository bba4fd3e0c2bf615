"""``tools/gpu_session.sh`` runs steps with a time limit and packs what they leave, however it ends."""

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from esbench import wheels

ROOT = Path(__file__).parents[2]
BASH = shutil.which("bash") or "bash"
FAST = "grace=1 kill_after=1\n"


def start(tmp_path: Path, steps: str, *options: str) -> subprocess.Popen[str]:
    """Start a session of these steps on the CPU, which packs into the folder ``out``."""
    file = tmp_path / "trial.sh"
    file.write_text(FAST + steps)
    script = ROOT / "tools" / "gpu_session.sh"
    return subprocess.Popen(
        [BASH, str(script), str(file), "--device", "cpu", "--out", str(tmp_path / "out"), *options],
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
    """The lines of the summary that was packed."""
    return [line.split("\t") for line in packed(tmp_path)["gpu-session/trial/summary.tsv"].splitlines()]


def packed(tmp_path: Path) -> dict[str, str]:
    """Unpack the pieces: path -> text."""
    pieces = sorted((tmp_path / "out").glob("trial.tar.gz.*"))
    whole = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(fileobj=whole) as archive:
        return {
            member.name: content.read().decode()
            for member in archive
            if (content := archive.extractfile(member))
        }


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    """Every step has its line and its log, and what was stored and tuned is packed."""
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
    files = packed(tmp_path)
    assert files["results/card/run.jsonl"] == "found\n"
    assert files["gpu-session/trial/budget.log"] == "within 3.00\n"
    assert "results/after" not in files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "trial.sh"]  # nothing else is left


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_session_that_is_ended_packs_what_it_has(tmp_path: Path, number: signal.Signals) -> None:
    """After SIGTERM or SIGINT the finished steps and the log of the one in progress are packed."""
    process = start(tmp_path, 'step done 5 touch "$results/kept"\nstep long 60 bash -c "echo on; sleep 60"')
    while not any(path.read_text() for path in tmp_path.glob("*/gpu-session/trial/long.log")):
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert [line[:2] for line in summary(tmp_path)] == [["done", "ok"], ["long", "interrupted"]]
    files = packed(tmp_path)
    assert "results/kept" in files
    assert files["gpu-session/trial/long.log"] == "on\n"


def test_a_killed_session_has_packed_its_finished_steps(tmp_path: Path) -> None:
    """SIGKILL leaves no time to pack: every step is packed when it ends."""
    with start(tmp_path, 'step done 5 touch "$results/kept"\nstep long 2 sleep 2') as process:
        while not list(tmp_path.glob("*/gpu-session/trial/long.log")):
            time.sleep(0.05)
        process.kill()
    assert "results/kept" in packed(tmp_path)


def test_pieces_stay_below_the_limits(tmp_path: Path) -> None:
    """No file is larger than the limit, the pieces make one archive, and too many are reported."""
    fill = 'step fill 9 bash -c "head -c 50000 /dev/urandom | base64 -w 0 > $results/noise"\n'
    code, _ = session(tmp_path, "file_bytes=20000\n" + fill)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert code == 0
    assert max(sizes.values()) == 20000
    assert 3 <= len(sizes) <= 8
    assert len(packed(tmp_path)["results/noise"]) == 66668

    process = start(tmp_path, "file_bytes=20000 files=3\n" + fill)
    said, _ = process.communicate(timeout=60)
    assert "more than 2 files of 20000 bytes: the rest is left in" in said
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_steps_fit_into_the_limit(tmp_path: Path) -> None:
    """A step has the time that is left, is skipped where that is too little, and times can be scaled."""
    _, lines = session(tmp_path, "step less 10 echo {seconds}\nstep none 30 true", "--limit", "10")
    assert lines[1] == ["none", "skipped", "0", "no time left"]
    assert 5 <= float(packed(tmp_path)["gpu-session/trial/less.log"]) <= 8
    session(tmp_path, "step scaled 100 echo {seconds}", "--seconds-scale", "0.05")
    assert packed(tmp_path)["gpu-session/trial/scaled.log"] == "5.00\n"


def test_missing_packages_are_those_that_measuring_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command names what is missing in the pinned release, and nothing that only reports need."""
    absent = {"msgspec", "cogapp", "pytest-xdist"}
    monkeypatch.setattr(wheels, "_installed", lambda name: name not in absent)
    assert [text.partition("==")[0] for text in wheels.missing()] == ["msgspec", "pytest-xdist"]
    assert all("==" in text for text in wheels.missing())
