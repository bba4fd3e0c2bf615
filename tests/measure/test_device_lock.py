"""The lock that allows one run on a device at a time, with real processes."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import FileLock

from esbench.errors import UserError
from esbench.measure import device_lock
from esbench.measure.device_lock import lock_device

HOLD = """
import sys
from types import SimpleNamespace

sys.modules["esbench.measure.environment"] = SimpleNamespace(device_uuid=lambda _: None)  # without torch
from esbench.measure.device_lock import lock_device

with lock_device(sys.argv[1], sys.argv[2], print, wait_s=0):
    print("held", flush=True)
    sys.stdin.read()
"""
"""A run that holds a lock until its input ends."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lock in the test's own folder, and poll often."""
    monkeypatch.setenv("ESBENCH_LOCK_DIR", str(tmp_path))
    monkeypatch.setattr(device_lock, "POLL_S", 0.01)
    return tmp_path


@contextlib.contextmanager
def holder() -> Iterator["subprocess.Popen[str]"]:
    """Start a process that holds the CPU's lock, and kill it at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, "cpu", "suite quick"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def refusal() -> str:
    """Return the error of a run that does not wait for the lock."""
    with pytest.raises(UserError) as error, lock_device("cpu", "suite readme", pytest.fail, wait_s=0):
        pass
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_device_in_use_is_refused_or_waited_for(folder: Path) -> None:
    """The error has suite, process and time; a run that waits says so once, then runs."""
    messages: list[str] = []
    with holder() as process:
        message = refusal()
        assert message.startswith(f"cpu is in use by suite quick (pid {process.pid}, since 20")
        assert message.endswith("): wait for it to end, as only one run may use a device")
        with (
            pytest.raises(UserError, match="suite quick"),
            lock_device("cpu", "", messages.append, wait_s=0.05),
        ):
            pass
        assert len(messages) == 1
        with lock_device("mig/0", "", pytest.fail):  # another device is free
            assert {"esbench-mig-0.lock", "esbench-cpu.lock"} <= {path.name for path in folder.iterdir()}

        def say(line: str) -> None:
            messages.append(line)
            assert process.stdin
            process.stdin.close()

        with lock_device("cpu", "suite readme", say):
            assert process.wait(10) == 0
    assert len(messages) == 2
    assert f"suite quick (pid {process.pid}" in messages[1]
    assert messages[1].endswith(": waiting for it to end, which no time budget counts")


def test_a_killed_process_loses_its_lock() -> None:
    """A killed process loses its lock to a waiting run."""
    with holder() as process, lock_device("cpu", "suite readme", lambda _: process.kill()):
        assert process.wait(10) == -signal.SIGKILL
        assert f"suite readme (pid {os.getpid()}" in refusal()


@pytest.mark.skipif(os.name != "posix", reason="other systems have no such permissions")
def test_a_lock_is_exclusive_and_released_after_an_error(folder: Path) -> None:
    """A process cannot lock twice; an error removes the note. Other users can lock, whatever the umask."""
    before = os.umask(0o077)
    try:
        with lock_device("cpu", "suite quick", pytest.fail):
            assert f"pid {os.getpid()}" in refusal()
            (folder / "esbench-cpu.holder").write_bytes(b"\xff")
            assert refusal().startswith("cpu is in use by another run:")
            assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o666}
    finally:
        os.umask(before)
    with pytest.raises(FileNotFoundError), lock_device("cpu", "suite quick", pytest.fail):
        (folder / "missing").unlink()
    assert not (folder / "esbench-cpu.holder").exists()
    with lock_device("cpu", "", pytest.fail, wait_s=0):
        pass


def test_an_error_of_a_lock_file_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that is not a folder and another user's unreadable lock are errors of one line."""
    (folder / "file").write_text("", encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setenv("ESBENCH_LOCK_DIR", str(folder / "file" / "below"))
        message = refusal()
        assert message.startswith("cannot lock ")
        assert "set ESBENCH_LOCK_DIR to a folder" in message

    monkeypatch.setattr(FileLock, "acquire", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert refusal() == (
        f"cannot lock {folder / 'esbench-cpu.lock'} (Permission denied): "
        "set ESBENCH_LOCK_DIR to a folder where files can be locked"
    )
