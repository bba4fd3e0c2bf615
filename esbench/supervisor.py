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
BOUND_THREADS = {"OMP_PROC_BIND": "spread", "OMP_PLACES": "threads"}
"""Variables of a child that has several threads, unless they are set: each thread runs on a CPU of its own.

Threads of OpenMP wait actively for each other. If the system puts two of them on one CPU, the one that waits
takes the time of the other: a call of 0.1 ms then takes 15 ms, for minutes.
"""
LIMIT_S = 60.0
"""The seconds without progress after which a child is killed, by default."""
BUDGET_SHARE, MIN_LIMIT_S = 0.5, 10.0
"""Within a time budget they are at most this share of the time that is left, but at least these seconds."""
POLL_S = 1.0
"""The seconds between two looks at the clock."""
NO_GROUP = -1
"""The group of a checkpoint that completes nothing, but keeps the row of a crash when the run is resumed."""
SLOWS_OTHERS = "it slows other variants down"
"""The beginning of a reason to end a process that counts only if it is found again in the next process."""
TABLES = "tables"
"""The activity after the run was stored."""
INTERRUPTED = 130

_IN_SET_UP = re.compile(
    rf"(the process ended|no progress|the device stopped responding|{SLOWS_OTHERS})"
    r".* during (set-up|\w+ check)"
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
        announced_s: when this was announced.
        variant, case: what is measured; None before the first variant and after the last one.
        activity: the set-up, check or phase of the variant.
        lost: why the process must end, if it must: the device is lost, or a variant slows others down.
        suspect: the variant that slowed others down in an earlier process.
        code: the exit code of the command, once it has ended.
    """

    start_s: float
    path: str = ""
    begun_s: float | None = None
    end_s: float | None = None
    excluded: tuple[Variant, ...] = ()
    limit_s: float = LIMIT_S
    announced_s: float = 0.0
    variant: Variant | None = None
    case: Case | None = None
    activity: str = ""
    lost: str = ""
    suspect: tuple[Variant, Case] | None = None
    code: int | None = None

    @property
    def overdue(self) -> str:
        """The reason to kill the child, if it makes no progress for too long; otherwise empty.

        Loading, and waiting for the device, have no limit.
        """
        limit_s = self.limit_s
        if self.end_s is not None:
            left_s = self.end_s - self.announced_s
            limit_s = min(limit_s, max(BUDGET_SHARE * left_s, MIN_LIMIT_S))
        is_limited = self.variant is not None or self.code is not None
        if not is_limited or time.monotonic() - self.announced_s < limit_s:
            return ""
        reason = f"no progress for {limit_s:.0f} s"
        is_shortened_by_budget = limit_s < self.limit_s
        return f"{OUT_OF_TIME}: {reason}" if is_shortened_by_budget else reason


class Child:
    """The child's side: it announces what it does. Without a supervisor this has no effect."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        self.announcement = (
            Announcement(start_s=time.monotonic()) if descriptor is None else _read(descriptor)
        )

    @property
    def is_supervised(self) -> bool:
        """Whether there is a supervisor."""
        return self._descriptor is not None

    def use_all_cpus(self) -> None:
        """Let this thread and those that it starts run on all CPUs of the supervisor.

        For a GPU: the threads of a driver or a compiler must not share the CPU that OpenMP gave this one.
        """
        if self.is_supervised and sys.platform == "linux":
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))

    @property
    def is_restarted(self) -> bool:
        """Whether an earlier child began the run."""
        return self.is_supervised and bool(self.announcement.path)

    def unfinished(self) -> store.Unfinished | None:
        """Return the run that an earlier child began."""
        return store.read_unfinished(Path(self.announcement.path)) if self.is_restarted else None

    def announce(self, **changes: object) -> None:
        """Announce what has changed."""
        if self._descriptor is not None:
            self.announcement = msgspec.structs.replace(
                self.announcement, announced_s=time.monotonic(), **changes
            )
            _write(self._descriptor, self.announcement)

    def watch(self, variant: Variant, case: Case, activity: str, lost: str = "") -> bool:
        """Announce which variant runs now; ``lost`` is why it forces the process to end, if it does.

        Return whether the supervisor starts a new process after the end of this one.
        """
        suspect = self.announcement.suspect
        if lost.startswith(SLOWS_OTHERS) and suspect not in (None, (variant, case)):
            return False  # another variant did so in the process before: the cause is outside of both
        if not self.announcement.lost:  # the first reason stays
            self.announce(variant=variant, case=case, activity=activity, lost=lost)
        return self.is_supervised


@cache
def child() -> Child:
    """Return this process's side as a child; a process without a supervisor announces nothing.

    On Linux the child is killed when its supervisor dies.
    """
    parent, _, descriptor = os.environ.pop(CHILD, "").partition(" ")
    if not descriptor:
        return Child()
    os.set_inheritable(int(descriptor), False)  # noqa: FBT003  # the signature of the system call
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it died before
            sys.exit(INTERRUPTED)
    return Child(int(descriptor))


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
    # A program that calls the command line sets sys.argv; its own arguments would not start it, even
    # if they end like those of the command, as in `pytest -k check`.
    script = getattr(sys.modules["__main__"], "__file__", None)
    is_script = script is not None and Path(script).absolute() == Path(sys.argv[0]).absolute()
    if os.name != "posix" or not is_script or sys.orig_argv[-len(arguments) :] != arguments:
        return Child()
    sys.exit(run_children([sys.executable, *sys.orig_argv[1:]], say))


def run_children(command: Sequence[str], say: Callable[[str], object]) -> int:
    """Run a command in one child process after another until one ends without a crash; return its exit code.

    Raises:
        UserError: a child crashed twice while no variant ran.
    """
    announcement = Announcement(start_s=time.monotonic())
    crashed: list[tuple[Variant, Case]] = []
    crashes_without_variant = 0
    with tempfile.TemporaryFile() as file, _Interrupts() as interrupts:
        descriptor = file.fileno()
        while True:
            _write(descriptor, announcement)
            with _start_child(command, descriptor, interrupts) as (process, pipe):
                ending = _wait(process, pipe, descriptor)
            announcement = _read(descriptor)
            ending = announcement.lost or ending
            if announcement.code is not None and not announcement.lost:
                return announcement.code
            if interrupts.count:
                return INTERRUPTED
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h\n")  # shows the cursor, which the display of the child had hidden
            variant, case, suspect = announcement.variant, announcement.case, announcement.suspect
            if variant and case and ending.startswith(SLOWS_OTHERS) and suspect is None:
                suspect = variant, case  # the machine may have been slow, so a second process decides
                say(f"{variant.name} on {case.label}: {ending}: checking once more in a new process")
            elif variant and case and (variant, case) not in crashed:
                if suspect == (variant, case):
                    suspect = None
                crashed.append((variant, case))
                reason = f"{ending} during {announcement.activity}"
                if announcement.path:
                    store_crash(Path(announcement.path), variant, case, reason)
                say(f"{variant.name} on {case.label}: {reason}; the run goes on without it")
            else:
                _check_again(announcement, ending, crashes_without_variant)
                crashes_without_variant += 1
                say(f"{ending} while no variant ran: trying once more")
            announcement = Announcement(
                start_s=announcement.start_s,
                path=announcement.path,
                begun_s=announcement.begun_s,
                end_s=announcement.end_s,
                excluded=() if announcement.path else tuple(variant for variant, _ in crashed),
                suspect=suspect,
            )


def store_crash(path: Path, variant: Variant, case: Case, reason: str) -> None:
    """Store the row of a variant that ended the process, after the last checkpoint of an unfinished run.

    The checkpoint after it has the duration of the one before: the next child adds the time since then.

    Raises:
        UserError: the file cannot be read or resumed.
    """
    status: Literal["unavailable", "failed"] = "unavailable" if reason.startswith(OUT_OF_TIME) else "failed"
    row = Skipped(variant=variant, case=case, phase=None, status=status, reason=reason)
    unfinished = store.read_unfinished(path)  # the lines up to the last checkpoint
    kept = unfinished.run
    everything, _ = store.read_run(path)
    # The device's peaks are before the first checkpoint: without one they would be lost.
    peaks = everything.device_peaks if everything and not kept.device_peaks else ()
    last = kept.checkpoints[-1] if kept.checkpoints else None
    costs_of_case = [earlier.costs_s for earlier in kept.checkpoints if earlier.case == case]
    checkpoint = Checkpoint(
        case=case,
        group=NO_GROUP,
        phase=None,
        wall_s=last.wall_s if last else 0.0,
        spent_s=last.spent_s if last else {},
        costs_s=costs_of_case[-1] if costs_of_case else {},
    )
    with store.Writer(path.parent.parent, kept.header, unfinished.kept_bytes) as writer:
        writer.write(*peaks, row, checkpoint)


def _check_again(announcement: Announcement, ending: str, crashes_without_variant: int) -> None:
    """Raise a UserError if a crash outside of all variants was the second, or after the run was stored."""
    if announcement.activity == TABLES:
        raise UserError(
            f"{ending} after the run was stored in {announcement.path}: `esbench report` renders its tables"
        )
    if crashes_without_variant:
        remedy = "leave plug-ins out, or check this machine with `esbench doctor`"
        raise UserError(f"{ending} while no variant ran, for the second time: {remedy}")


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
def _start_child(
    command: Sequence[str], descriptor: int, interrupts: _Interrupts
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Start a child in its own session; yield it, and a pipe that is closed when it ends.

    In its own session it receives the Ctrl-C of the terminal only from the supervisor, and can be killed
    together with the processes that it has started.
    """
    pipe, held_by_child = os.pipe()
    environment = {**os.environ, CHILD: f"{os.getpid()} {descriptor}"}
    if environment.get("OMP_NUM_THREADS") != "1":  # a single thread may run on any CPU
        environment = {**BOUND_THREADS, **environment}
    process = subprocess.Popen(  # noqa: S603  # the command line of this process
        command, env=environment, pass_fds=(descriptor, held_by_child), start_new_session=True
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


def _wait(process: "subprocess.Popen[bytes]", pipe: int, descriptor: int) -> str:
    """Wait until a child ends or is overdue, and return which; a child that is overdue still runs.

    ``pipe`` is closed when the child ends; ``descriptor`` is that of the file of its announcements.
    """
    while process.poll() is None:
        # Popen.wait with a timeout would wake up twenty times per second while the child measures.
        is_closed, _, _ = select.select([pipe], [], [], POLL_S)
        if is_closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
        announcement = _read(descriptor)
        if process.returncode is None and announcement.overdue:
            return announcement.overdue
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


def _write(descriptor: int, announcement: Announcement) -> None:
    os.pwrite(descriptor, msgspec.json.encode(announcement) + b"\n", 0)


def _read(descriptor: int) -> Announcement:
    """Read the last announcement; if it is being written, read it again."""
    for _ in range(100):
        line, _, _ = os.pread(descriptor, 2**20, 0).partition(b"\n")
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=Announcement)
        time.sleep(POLL_S / 100)
    raise UserError(
        "a variant has overwritten the file in which the measuring process reports its progress: "
        "measure without the plug-in that registers it"
    )
