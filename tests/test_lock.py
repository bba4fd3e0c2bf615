"""One run on a device at a time, with real processes."""

import contextlib
import getpass
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esbench.errors import UserError
from esbench.measure import device_lock
from esbench.measure.device_lock import LockError, holding

HOLD = """
import sys
from esbench.measure.device_lock import holding

with holding(sys.argv[1], sys.argv[2], print, wait_s=0):
    print("held", flush=True)
    sys.stdin.read()
"""
"""A run that holds a lock until its input ends."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lock in a folder of this test, and look often."""
    monkeypatch.setenv("ESBENCH_LOCK_DIR", str(tmp_path))
    monkeypatch.setattr(device_lock, "POLL_S", 0.01)
    return tmp_path


@contextlib.contextmanager
def holder(key: str = "cpu", purpose: str = "suite quick") -> Iterator["subprocess.Popen[str]"]:
    """Start a process that holds a lock, and end it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, key, purpose], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def refusal(key: str = "cpu") -> str:
    """Return why a device cannot be had at once."""
    with pytest.raises(LockError) as error, holding(key, "suite readme", pytest.fail, wait_s=0):
        pass
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_free_device_is_held_without_a_word() -> None:
    """Twice in a row."""
    for _ in range(2):
        with holding("cpu", "suite quick", pytest.fail):
            pass


def test_who_does_not_wait_is_told_who_holds_the_device() -> None:
    """The suite, the process, the user and since when; a person can mend it, so it is a UserError."""
    with holder() as process:
        told = refusal()
    assert told.startswith(
        f"cpu is held by suite quick (pid {process.pid}, user {getpass.getuser()}, since 20"
    )
    assert told.endswith("); only one run at a time measures on a device")
    assert issubclass(LockError, UserError)


def test_a_second_run_says_for_whom_it_waits_and_then_takes_its_turn() -> None:
    """Once, though it looks many times."""
    said: list[str] = []
    with holder() as process:

        def say(line: str) -> None:
            said.append(line)
            assert process.stdin
            process.stdin.close()

        with holding("cpu", "suite readme", say):
            assert process.wait(10) == 0
    assert len(said) == 1
    assert f"suite quick (pid {process.pid}" in said[0]
    assert said[0].endswith("; waiting for it to end")


def test_patience_ends() -> None:
    """After the seconds that were given, having said whom it waited for."""
    said: list[str] = []
    with (
        holder(),
        pytest.raises(LockError, match="held by suite quick"),
        holding("cpu", "", said.append, wait_s=0.05),
    ):
        pass
    assert len(said) == 1


def test_a_holder_that_is_killed_holds_nothing(folder: Path) -> None:
    """Its note is there still, and nobody believes it."""
    with holder() as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert str(process.pid) in (folder / "esbench-cpu.holder").read_text(encoding="utf-8")
        with holding("cpu", "suite readme", pytest.fail, wait_s=0):
            pass


def test_who_waits_for_a_holder_that_is_killed_goes_on() -> None:
    """The system takes the lock back."""
    with holder() as process, holding("cpu", "suite readme", lambda _: process.kill()):
        assert process.wait(10) == -signal.SIGKILL


def test_the_note_of_a_process_that_is_gone_is_not_believed(folder: Path) -> None:
    """The lock is held, but by somebody else, who has not written yet."""
    with holder() as gone:
        pass
    with holder():
        note = folder / "esbench-cpu.holder"
        note.write_text(f'{{"pid":{gone.pid},"user":"u","purpose":"p","since":"s"}}', encoding="utf-8")
        assert device_lock.SOMEBODY in refusal()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{" * 10_000,
        b"0" * 10_000,
        b'{"pid":"1","user":"u","purpose":"p","since":"s"}',
        b'{"pid":-1,"user":"u","purpose":"p","since":"s"}',
        b'{"pid":99999999999999999999,"user":"u","purpose":"p","since":"s"}',
        b'{"pid":1,"user":"\\u001b[2J","purpose":"p","since":"s"}',
        b'{"pid":1,"user":"u","purpose":"two\\nlines","since":"s"}',
    ],
    ids=lambda nonsense: repr(nonsense[:20]),
)
def test_nonsense_in_the_note_is_nobodys_name(folder: Path, nonsense: bytes) -> None:
    """One line all the same."""
    with holder():
        (folder / "esbench-cpu.holder").write_bytes(nonsense)
        assert device_lock.SOMEBODY in refusal()


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the folder may be used again
def test_no_note_is_more_than_one_line(folder: Path, note: bytes) -> None:
    """Whatever stands in it."""
    (folder / "note").write_bytes(note)
    assert device_lock._holder(folder / "note").isprintable()  # noqa: SLF001  # a process for each note would take minutes


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_note_that_is_no_file_of_ours_stops_nobody(folder: Path, kind: str) -> None:
    """In a folder that everybody writes in; what a link points to is left as it is."""
    note, elsewhere = folder / "esbench-cpu.holder", folder / "elsewhere"
    elsewhere.write_text("precious", encoding="utf-8")
    if kind == "pipe":
        os.mkfifo(note)
    elif kind == "link":
        note.symlink_to(elsewhere)
    else:
        note.mkdir()
    with holder():
        assert device_lock.SOMEBODY in refusal()
    assert elsewhere.read_text(encoding="utf-8") == "precious"


def test_devices_do_not_wait_for_each_other(folder: Path) -> None:
    """Each key has a lock of its own, whatever characters it has."""
    with holder("MIG-a/0/1"), holding("cpu", "", pytest.fail, wait_s=0):
        assert "MIG-a/0/1 is held by" in refusal("MIG-a/0/1")
        assert sorted(path.name for path in folder.iterdir()) == [
            "esbench-MIG-a-0-1.holder",
            "esbench-MIG-a-0-1.lock",
            "esbench-cpu.holder",
            "esbench-cpu.lock",
        ]


def test_a_run_does_not_enter_twice() -> None:
    """Not even within one process."""
    with holding("cpu", "suite quick", pytest.fail):
        assert f"pid {os.getpid()}" in refusal()


def test_an_error_inside_frees_the_device(folder: Path) -> None:
    """It passes through, and the note is wiped."""
    with pytest.raises(FileNotFoundError), holding("cpu", "", pytest.fail):
        (folder / "missing").unlink()
    assert (folder / "esbench-cpu.holder").read_bytes() == b""
    with holding("cpu", "", pytest.fail, wait_s=0):
        pass


@pytest.mark.skipif(os.name != "posix", reason="other systems have no such permissions")
def test_other_users_can_lock_the_same_files(folder: Path) -> None:
    """Whatever the mask of the one who made them says."""
    before = os.umask(0o077)
    try:
        with holding("cpu", "", pytest.fail):
            modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    finally:
        os.umask(before)
    assert modes == {0o666}


def test_a_folder_where_nothing_can_be_locked_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the way out."""
    (folder / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("ESBENCH_LOCK_DIR", str(folder / "file" / "below"))
    told = refusal()
    assert told.startswith("cannot lock ")
    assert "set ESBENCH_LOCK_DIR to a folder" in told


def test_the_lock_of_another_user_that_is_closed_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is where that user's files are not for others."""

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FileLock, "acquire", denied)
    assert refusal() == (
        f"cannot lock {folder / 'esbench-cpu.lock'}: Permission denied; "
        "set ESBENCH_LOCK_DIR to a folder where files can be locked"
    )


def test_locks_are_in_the_folder_for_temporary_files_by_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All users of a machine share it."""
    monkeypatch.delenv("ESBENCH_LOCK_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with holding("cpu", "", pytest.fail):
        assert (folder / "esbench-cpu.lock").exists()


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in many containers."""

    def nameless() -> str:
        raise KeyError

    monkeypatch.setattr(getpass, "getuser", nameless)
    with holding("cpu", "", pytest.fail):
        assert f"user {os.getuid()}" in refusal()
