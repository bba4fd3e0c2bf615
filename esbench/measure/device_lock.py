"""A lock with which only one run at a time measures on a device, across processes and users.

The operating system releases the lock of a process that was killed. A file next to the lock file describes
the run that holds the lock. Both files are in the system's folder for temporary files. If the users of a
device do not share that folder, set the environment variable ESBENCH_LOCK_DIR to one that they share.
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
from esbench.measure.environment import device_uuid

FOLDER = "ESBENCH_LOCK_DIR"
ANY_USER = 0o666
"""The mode of the files: any user may lock the device next."""
POLL_S = 1.0
FOREVER_S = -1.0
"""The timeout with which filelock waits without a limit."""


@contextlib.contextmanager
def lock_device(
    device: str, purpose: str, say: Callable[[str], object], wait_s: float | None = None
) -> Iterator[None]:
    """Lock a device while the context lasts.

    Args:
        device: ``cpu``, or ``cuda`` for the current GPU.
        purpose: a description of this run for users of other runs.
        say: called with a line about the run that holds the lock, if there is one, before waiting.
        wait_s: the seconds to wait for the lock, by default until the device is free.

    Raises:
        UserError: the lock is still held after ``wait_s`` seconds, or its file cannot be locked.
    """
    key = device_uuid(device) or device
    folder = Path(os.environ.get(FOLDER) or tempfile.gettempdir())
    path = folder / f"esbench-{re.sub(r'[^0-9A-Za-z-]', '-', key)}.lock"
    note = path.with_suffix(".holder")
    lock = FileLock(path, mode=ANY_USER)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if wait_s != 0:
                say(f"{key} is in use by {_holder(note)}: waiting for it to end, which no time budget counts")
            lock.acquire(timeout=FOREVER_S if wait_s is None else wait_s, poll_interval=POLL_S)
    except Timeout:
        raise UserError(
            f"{key} is in use by {_holder(note)}: wait for it to end, as only one run may use a device"
        ) from None
    except (OSError, NotImplementedError) as error:  # NotImplementedError: the file system has no locks
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot lock {path} ({reason}): set {FOLDER} to a folder where files can be locked"
        ) from error
    try:
        with contextlib.suppress(OSError):  # the note is optional: the device is locked without it
            note.unlink(missing_ok=True)  # a note that another user's killed run left cannot be overwritten
            since = datetime.now(UTC).isoformat(timespec="seconds")
            note.write_text(f"{purpose} (pid {os.getpid()}, since {since})", encoding="utf-8")
            note.chmod(ANY_USER)
        yield
    finally:
        with contextlib.suppress(OSError):
            note.unlink()
        lock.release()


def _holder(note: Path) -> str:
    """Return the description of the run that holds a lock."""
    try:
        return note.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, UnicodeDecodeError, IndexError):
        return "another run"
