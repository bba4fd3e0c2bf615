"""A lock that lets only one run at a time measure on a device, across processes and users.

The lock is the operating system's, so a process that was killed holds nothing. A note next to the lock file
names the holder; it is read only while the lock is held, and ignored if its process does not exist. Both are
in the system's folder for temporary files, or in the folder named by the environment variable
ESBENCH_LOCK_DIR: set it if not all users of the device share that folder.
"""

import contextlib
import getpass
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil
from filelock import FileLock, Timeout

from esbench.errors import UserError

FOLDER = "ESBENCH_LOCK_DIR"
EVERYBODY = 0o666
"""Any user may lock what another one has unlocked."""
POLL_S = 1.0
UNKNOWN_HOLDER = "another run, of an unknown process"


class LockError(UserError):
    """The device is in use, or cannot be locked; the message says by whom, or why."""


class _Holder(msgspec.Struct, frozen=True):
    """The process that holds a lock."""

    pid: int
    user: str
    purpose: str
    since: str


@contextlib.contextmanager
def holding(
    key: str, purpose: str, say: Callable[[str], object], wait_s: float | None = None
) -> Iterator[None]:
    """Hold the lock of a device, by its GPU's UUID or ``cpu``, while the context lasts.

    Where another run holds it, ``say`` gets a line with who that is, again when it changes, and this one
    waits up to ``wait_s`` seconds, or until the device is free. ``purpose`` describes the run to others.

    Raises:
        LockError: it is still held after ``wait_s`` seconds, or it cannot be locked here.

    """
    folder = Path(os.environ.get(FOLDER) or tempfile.gettempdir())
    path = folder / f"esbench-{re.sub(r'[^0-9A-Za-z-]', '-', key)}.lock"
    note = path.with_suffix(".holder")
    lock = FileLock(path, mode=EVERYBODY)
    deadline_s = math.inf if wait_s is None else time.monotonic() + wait_s
    said = ""
    while not _acquired(lock, path):
        who = f"{key} is held by {_holder(note)}"
        if time.monotonic() >= deadline_s:
            message = f"{who}; only one run at a time measures on a device"
            raise LockError(message)
        if who != said:
            say(f"{who}; waiting for it to end")
            said = who
        time.sleep(POLL_S)
    try:
        # A note that cannot be written names no holder: the lock holds all the same.
        with contextlib.suppress(OSError):
            note.unlink(missing_ok=True)  # that of another user, who was killed, cannot be overwritten
            since = datetime.now(UTC).isoformat(timespec="seconds")
            note.write_bytes(msgspec.json.encode(_Holder(os.getpid(), _user(), purpose, since)))
            note.chmod(EVERYBODY)
        yield
    finally:
        with contextlib.suppress(OSError):
            note.unlink()
        lock.release()


def _acquired(lock: FileLock, path: Path) -> bool:
    """Return whether this process holds the lock now."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    except (OSError, NotImplementedError) as error:  # the latter where a file system cannot lock
        why = getattr(error, "strerror", None) or str(error)
        message = f"cannot lock {path}: {why}; set {FOLDER} to a folder where files can be locked"
        raise LockError(message) from error
    return True


def _holder(note: Path) -> str:
    """Return a description of the holder of a lock: purpose, process, user and time."""
    try:
        holder = msgspec.json.decode(note.read_bytes(), type=_Holder)
    except (OSError, msgspec.DecodeError):
        return UNKNOWN_HOLDER
    if not psutil.pid_exists(holder.pid):
        return UNKNOWN_HOLDER
    return f"{holder.purpose} (pid {holder.pid}, user {holder.user}, since {holder.since})"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # an id without a name, as in many containers
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"
