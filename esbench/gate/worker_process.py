"""A worker as the referee has it: a child process that is asked, waited for, and ended."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

import esbench
from esbench.gate.protocol import (
    Answer,
    Arm,
    Control,
    Hello,
    Open,
    Orders,
    Question,
    Refused,
    Survey,
    Visit,
    WorkerFailure,
)

WORKER = ("-P", "-m", "esbench.gate.worker")
"""What Python is told to run: the harness that judges, never one in the folder that the worker is in."""
SILENCE_S = 120.0
"""A worker that says nothing for so long hangs."""
GRACE_S = 2.0
"""So long is waited for what must come at once: the end of a worker that closed its output."""
KEEPING = ":".join(
    f"glibc.malloc.{name}={size}"
    for name, size in (("mmap_threshold", 2**30), ("trim_threshold", 2**32), ("top_pad", 2**26))
)
"""What is freed stays with the process. Else it depends on what a process happened to allocate before
whether a call of a megabyte faults its pages in anew each time: some cells then differ by a quarter between
processes of one revision (standard deviation 24 % as it was, 1.7 % so)."""
LAST_WORDS = 300
"""So many characters of what a worker wrote to stderr are worth repeating."""

A = TypeVar("A", bound=Answer)


class WorkerError(Exception):
    """A worker died, hangs or speaks nonsense: what was measured with it says nothing."""


class Child:
    """One worker: asked one thing at a time.

    Raises:
        WorkerError: whenever it does not answer as it should.

    """

    def __init__(self, orders: Orders, log: Path, program: Sequence[str] = WORKER) -> None:
        """Start it; ``log`` takes what it writes to stderr."""
        self.arm: Arm = orders.arm
        self._log = log
        self._number = 0
        self._stopped = False
        self._subject = "start"
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        command = [sys.executable, *program, msgspec.json.encode(orders).decode()]
        harness = str(Path(esbench.__file__).resolve().parents[1])
        paths = os.pathsep.join(filter(None, (harness, os.environ.get("PYTHONPATH", ""))))
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(  # noqa: S603  # this project's own program
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=orders.root,
                env={
                    "GLIBC_TUNABLES": KEEPING,
                    **os.environ,
                    "PYTHONPATH": paths,
                    "TMPDIR": str(
                        log.parent
                    ),  # what torch or a variant leaves there goes when the worker does
                },
                start_new_session=True,  # an interrupt reaches the referee alone, which ends its workers
            )
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()

    def hello(self, silence_s: float = SILENCE_S) -> Hello:
        """Wait for what it says first."""
        answer = self._hear(silence_s)
        if not isinstance(answer, Hello):
            self._fail("answered what it was not asked", type(answer).__name__)
        return answer

    def ask(self, question: Question, kind: type[A], silence_s: float = SILENCE_S) -> A | Refused:
        """Put a question under the next number, and wait for an answer of this kind."""
        self._number += 1
        self._subject = _subject(question) or self._subject
        line = msgspec.json.encode(msgspec.structs.replace(question, number=self._number)) + b"\n"
        assert self._process.stdin is not None  # noqa: S101  # it was asked for as a pipe
        with contextlib.suppress(OSError, ValueError):  # who is dead or stopped is heard of by no answer
            self._process.stdin.write(line)
            self._process.stdin.flush()
        answer = self._hear(silence_s)
        if not isinstance(answer, kind | Refused):
            self._fail("answered what it was not asked", type(answer).__name__)
        return answer

    def stop(self) -> None:
        """End it and what it has started, whatever they do."""
        if self._stopped:  # long ago, perhaps: by now its number may be somebody else's
            return
        self._stopped = True
        with contextlib.suppress(OSError):  # it leads a group of its own, which may be gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._ear.join(GRACE_S)  # longer only where somebody left the group with the output in hand
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None  # noqa: S101  # it was asked for as a pipe
        with self._process.stdout as stream:
            for line in stream:
                self._answers.put(line)
        self._answers.put(b"")

    def _hear(self, silence_s: float) -> Answer:
        try:
            line = self._answers.get(timeout=silence_s)
        except queue.Empty:
            self._fail("said nothing", f"for {silence_s:g} s")
        if not line:
            self._fail("ended", f"with {self._ending()}")
        try:
            answer: Answer = msgspec.json.decode(line, type=Answer)
        except (ValueError, RecursionError) as error:
            self._fail("gave no usable answer", str(error))
        if isinstance(answer, WorkerFailure):
            self._fail("cannot go on", answer.reason)
        if (answer.number, answer.arm) != (self._number, self.arm):
            swapped = f"answer {answer.number} of {answer.arm} to question {self._number}"
            self._fail("answered what it was not asked", swapped)
        return answer

    def _ending(self) -> str:
        try:
            code = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "its output closed, and still there"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _fail(self, what: str, how: str) -> NoReturn:
        said = ""
        with contextlib.suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            said = f"; its last words: {lines[-1][-LAST_WORDS:]}" if lines else ""
        message = f"the worker of {self.arm} {what} at {self._subject}: {how}{said}"
        raise WorkerError(message)


def _subject(question: Question) -> str:
    """Return what a question is about; a visit is about what was opened before."""
    match question:
        case Survey():
            return f"the survey of {question.variant.label(question.case.operator)} on {question.case.label}"
        case Open():
            return question.cell.name
        case Control():
            return f"{question.units} units of its own work"
        case Visit():
            return ""


@contextlib.contextmanager
def children(orders: Sequence[Orders], program: Sequence[str] = WORKER) -> Iterator[dict[Arm, Child]]:
    """Start a worker for each order; end them all, whatever happens.

    Their logs lie beside their trees: who sweeps up after a gate that was killed takes both.
    """
    beside = Path(orders[0].root).parent
    with tempfile.TemporaryDirectory(prefix="logs-", dir=beside) as folder, contextlib.ExitStack() as stack:
        found: dict[Arm, Child] = {}
        for one in orders:
            found[one.arm] = Child(one, Path(folder) / f"{one.arm}.log", program)
            stack.callback(found[one.arm].stop)
        yield found
