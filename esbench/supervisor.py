"""The supervisor of a command that measures: a crash or a hang costs one variant its rows, not the run.

The command runs once more in a child process, which measures. Before each action the child announces the
variant that it runs. If the child crashes or makes no progress, the supervisor stores a row with the reason
for that variant and starts a new child, which resumes the run without it.

Announcements are written to a file that both processes have open: a message on a pipe would wake the
supervisor while a call is timed.
"""

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Literal, Self

import msgspec

from esbench import store
from esbench.errors import UserError
from esbench.schema import OUT_OF_TIME, Case, Checkpoint, Skipped, Variant

CHILD = "ESBENCH_CHILD"
"""The environment variable by which a child knows its supervisor."""
LIMIT_S = 60.0
"""The seconds without progress after which a child is killed, by default."""
BUDGET_SHARE, LEAST_LIMIT_S = 0.5, 10.0
"""Within a time budget they are at most this share of the time that is left, but at least these seconds."""
POLL_S = 1.0
"""The seconds between two looks at the clock."""
NO_GROUP = -1
"""The group of a checkpoint that completes nothing, but keeps the row of a crash when the run is resumed."""
TABLES = "tables"
"""The activity after the run was stored."""
INTERRUPTED = 130

_IN_SET_UP = re.compile(
    r"(the process ended|no progress|the device stopped responding).* during (set-up|\w+ check)"
)
_SET_PDEATHSIG = 1
"""The command of Linux's ``prctl`` that sets the signal for the death of the parent process."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a child does at the moment, and what the next child has to know of the run.

    Attributes:
        start_s: when the command began, by :func:`time.monotonic` like the other times.
        path: the file of the run; empty before it is opened.
        begun_s: the current time minus the duration of the run so far.
        end_s: when the time budget ends.
        excluded: variants that ended the process before there was a file to store their rows in.
        limit_s: the seconds without progress after which the child is killed.
        said_s: when this was announced.
        variant, case: what is measured; None before the first variant and after the last one.
        activity: the set-up, check or phase of the variant.
        lost: why the device is lost, if it is.
        code: the exit code of the command, once it has ended.

    """

    start_s: float
    path: str = ""
    begun_s: float | None = None
    end_s: float | None = None
    excluded: tuple[Variant, ...] = ()
    limit_s: float = LIMIT_S
    said_s: float = 0.0
    variant: Variant | None = None
    case: Case | None = None
    activity: str = ""
    lost: str = ""
    code: int | None = None

    @property
    def delay(self) -> str:
        """The reason to kill the child, if it makes no progress for too long; otherwise empty.

        Loading, and waiting for the device, have no limit.
        """
        limit_s = self.limit_s
        if self.end_s is not None:
            limit_s = min(limit_s, max(BUDGET_SHARE * (self.end_s - self.said_s), LEAST_LIMIT_S))
        is_limited = self.variant is not None or self.code is not None
        if not is_limited or time.monotonic() - self.said_s < limit_s:
            return ""
        reason = f"no progress for {limit_s:.0f} s"
        return reason if limit_s == self.limit_s else f"{OUT_OF_TIME}: {reason}"


class Child:
    """The child's side: it announces what it does. Without a supervisor this has no effect."""

    def __init__(self, board: int | None = None) -> None:
        """Continue after the last announcement in the file with the descriptor ``board``."""
        self._board = board
        self.said = Announcement(start_s=time.monotonic()) if board is None else _read(board)

    @property
    def is_supervised(self) -> bool:
        """Whether there is a supervisor."""
        return self._board is not None

    @property
    def is_restarted(self) -> bool:
        """Whether an earlier child began the run."""
        return self.is_supervised and bool(self.said.path)

    def unfinished(self) -> store.Unfinished | None:
        """Return the run that an earlier child began."""
        return store.read_unfinished(Path(self.said.path)) if self.is_restarted else None

    def announce(self, **changes: object) -> None:
        """Announce what has changed."""
        if self._board is not None:
            self.said = msgspec.structs.replace(self.said, said_s=time.monotonic(), **changes)
            _write(self._board, self.said)

    def watch(self, variant: Variant, case: Case, activity: str, lost: str = "") -> None:
        """Announce the variant that runs from now on, or that was running when the device was lost."""
        if not self.said.lost:
            self.announce(variant=variant, case=case, activity=activity, lost=lost)


@cache
def child() -> Child:
    """Return this process's side as a child; a process without a supervisor announces nothing.

    On Linux the child is killed when its supervisor dies.
    """
    parent, _, board = os.environ.pop(CHILD, "").partition(" ")
    if not board:
        return Child()
    os.set_inheritable(int(board), False)  # noqa: FBT003  # the signature of the system call
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it died before
            sys.exit(INTERRUPTED)
    return Child(int(board))


def crashed_in_set_up(row: Skipped) -> bool:
    """Return whether a row is that of a variant that ended the process before it was timed."""
    return row.status == "failed" and _IN_SET_UP.fullmatch(row.reason) is not None


def supervise(say: Callable[[str], object]) -> Child:
    """Run the command of this process in child processes, and exit with the code of the last one.

    In a child, and where the command line is called from a program, return at once.

    Args:
        say: called with a line about each crash.

    Raises:
        SystemExit: the command has ended in a child.
        UserError: a child crashed twice while no variant ran.

    """
    if child().is_supervised:
        return child()
    arguments = sys.argv[1:]
    if os.name != "posix" or sys.orig_argv[-len(arguments) :] != arguments:
        return Child()
    sys.exit(run_children([sys.executable, *sys.orig_argv[1:]], say))


def run_children(command: Sequence[str], say: Callable[[str], object]) -> int:
    """Run a command in one child process after another until one ends without a crash; return its exit code.

    Raises:
        UserError: a child crashed twice while no variant ran.

    """
    said, crashed, unexplained = Announcement(start_s=time.monotonic()), [], 0
    with tempfile.TemporaryFile() as file, _Interrupts() as interrupts:
        board = file.fileno()
        while True:
            _write(board, said)
            with _started(command, board, interrupts) as (process, pipe):
                how = _wait(process, pipe, board)
            said = _read(board)
            how = said.lost or how
            if said.code is not None and not said.lost:
                return said.code
            if interrupts.count:
                return INTERRUPTED
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h\n")  # shows the cursor, which the display of the child had hidden
            if said.variant and said.case and (said.variant, said.case) not in crashed:
                crashed.append((said.variant, said.case))
                reason = f"{how} during {said.activity}"
                if said.path:
                    store_crash(Path(said.path), said.variant, said.case, reason)
                say(f"{said.variant.name} on {said.case.label}: {reason}; the run goes on without it")
            else:
                _check_again(said, how, unexplained)
                unexplained += 1
                say(f"{how} while no variant ran: trying once more")
            said = Announcement(
                start_s=said.start_s,
                path=said.path,
                begun_s=said.begun_s,
                end_s=said.end_s,
                excluded=() if said.path else tuple(variant for variant, _ in crashed),
            )


def store_crash(path: Path, variant: Variant, case: Case, reason: str) -> None:
    """Store the row of a variant that ended the process, after the last checkpoint of an unfinished run.

    The checkpoint after it has the duration of the one before: the next child adds the time since then.

    Raises:
        ResumeError: the file cannot be read or resumed.

    """
    status: Literal["unavailable", "failed"] = "unavailable" if reason.startswith(OUT_OF_TIME) else "failed"
    row = Skipped(variant=variant, case=case, phase=None, status=status, reason=reason)
    unfinished = store.read_unfinished(path)
    kept = unfinished.run
    whole, _ = store.read_run(path)
    peaks = whole.device_peaks if whole and not kept.device_peaks else ()
    last = kept.checkpoints[-1] if kept.checkpoints else None
    mark = Checkpoint(
        case=case,
        group=NO_GROUP,
        phase=None,
        wall_s=last.wall_s if last else 0.0,
        spent_s=last.spent_s if last else {},
        costs_s=next((line.costs_s for line in reversed(kept.checkpoints) if line.case == case), {}),
    )
    with store.Writer(path.parent.parent, kept.header, unfinished.kept_bytes) as writer:
        writer.write(*peaks, row, mark)


def _check_again(said: Announcement, how: str, unexplained: int) -> None:
    """Check that a crash outside of all variants may be followed by another attempt.

    Raises:
        UserError: it was the second one, or the run is complete.

    """
    if said.activity == TABLES:
        message = f"{how} after the run was stored in {said.path}: `esbench report` renders its tables"
        raise UserError(message)
    if unexplained:
        remedy = "leave plug-ins out, or check this machine with `esbench doctor`"
        message = f"{how} while no variant ran, for the second time: {remedy}"
        raise UserError(message)


class _Interrupts:
    """Forwards the first Ctrl-C to the child, which ends the run in order; kills it at the second.

    Attributes:
        count: the number of times.
        process: the child, if one is running.

    """

    def __init__(self) -> None:
        self.count = 0
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.count += 1
        if self.process and self.count == 1:
            self.process.send_signal(signal.SIGINT)
        elif self.process:
            _kill(self.process)


@contextlib.contextmanager
def _started(
    command: Sequence[str], board: int, interrupts: _Interrupts
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Start a child in a session of its own; yield it, and a pipe that is closed when it ends.

    In a session of its own it receives the Ctrl-C of the terminal only from the supervisor, and can be killed
    together with the processes that it has started.
    """
    pipe, held_by_child = os.pipe()
    environment = {**os.environ, CHILD: f"{os.getpid()} {board}"}
    process = subprocess.Popen(  # noqa: S603  # the command line of this process
        command, env=environment, pass_fds=(board, held_by_child), start_new_session=True
    )
    interrupts.process = process
    try:
        os.close(held_by_child)
        yield process, pipe
    finally:
        _kill(process)
        process.wait()
        interrupts.process = None
        os.close(pipe)


def _wait(process: "subprocess.Popen[bytes]", pipe: int, board: int) -> str:
    """Wait for a child; kill it if it makes no progress. Return how it ended."""
    while process.poll() is None:
        closed, _, _ = select.select([pipe], [], [], POLL_S)
        if closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
        said = _read(board)
        if process.returncode is None and said.delay:
            return said.delay
    code = process.returncode
    if code >= 0:
        return f"the process ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"the process ended with {names.get(-code, f'signal {-code}')}{hint}"


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a child and the processes that it has started; those may outlive it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _write(board: int, said: Announcement) -> None:
    os.pwrite(board, msgspec.json.encode(said) + b"\n", 0)


def _read(board: int) -> Announcement:
    """Read the last announcement; if it is being written, read it again."""
    for _ in range(100):
        line, _, _ = os.pread(board, 2**20, 0).partition(b"\n")
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=Announcement)
        time.sleep(POLL_S / 100)
    message = "a variant has overwritten what the measuring process announces: leave its plug-in out"
    raise UserError(message)
