"""A lock that lets only one run at a time measure on a device, across processes and users.

The operating system releases the lock of a process that was killed. A note next to the lock file describes
the holder. Both are in the system's folder for temporary files, or in the folder named by the environment
variable ESBENCH_LOCK_DIR: set it if not all users of the device share that folder.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from esbench.errors import UserError

FOLDER = "ESBENCH_LOCK_DIR"
ANY_USER = 0o666
"""The mode of the files: any user may lock the device next."""
POLL_S = 1.0
FOREVER_S = -1.0
"""The time limit by which filelock waits without one."""


class LockError(UserError):
    """The device is in use, or cannot be locked."""


@contextlib.contextmanager
def lock_device(
    key: str, purpose: str, say: Callable[[str], object], wait_s: float | None = None
) -> Iterator[None]:
    """Lock a device while the context lasts.

    Args:
        key: the UUID of a GPU, or ``cpu``.
        purpose: a description of this run for others.
        say: is called with a line about the holder if another run holds the lock, before waiting.
        wait_s: seconds to wait for the lock, by default until the device is free.

    Raises:
        LockError: the lock is still held after ``wait_s`` seconds, or its file cannot be locked.

    """
    folder = Path(os.environ.get(FOLDER) or tempfile.gettempdir())
    path = folder / f"esbench-{re.sub(r'[^0-9A-Za-z-]', '-', key)}.lock"
    note = path.with_suffix(".holder")
    lock = FileLock(path, mode=ANY_USER)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if wait_s != 0:
                say(f"{key} is held by {_holder(note)}; waiting for it to end")
            lock.acquire(timeout=FOREVER_S if wait_s is None else wait_s, poll_interval=POLL_S)
    except Timeout:
        message = f"{key} is held by {_holder(note)}; only one run at a time measures on a device"
        raise LockError(message) from None
    except (OSError, NotImplementedError) as error:  # the latter where a file system cannot lock
        reason = getattr(error, "strerror", None) or error
        message = f"cannot lock {path}: {reason}; set {FOLDER} to a folder where files can be locked"
        raise LockError(message) from error
    try:
        with contextlib.suppress(OSError):  # without a note the device is locked all the same
            note.unlink(missing_ok=True)  # the note of another user who was killed cannot be overwritten
            since = datetime.now(UTC).isoformat(timespec="seconds")
            note.write_text(f"{purpose} (pid {os.getpid()}, since {since})", encoding="utf-8")
            note.chmod(ANY_USER)
        yield
    finally:
        with contextlib.suppress(OSError):
            note.unlink()
        lock.release()


def _holder(note: Path) -> str:
    """Return the first line of the note that describes the holder of a lock."""
    try:
        return note.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, UnicodeDecodeError, IndexError):
        return "another run"
