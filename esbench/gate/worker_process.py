"""The gate's handle on a worker: start the process, ask questions, check the answers, end the process."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
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
    WorkerFailure,
)

WORKER = ("-P", "-m", "esbench.gate.worker")
"""Arguments of Python; ``-P`` keeps the worker from importing an esbench of the folder that it runs in."""
SILENCE_S = 300.0
"""A worker that does not answer for this long is considered hung."""
GRACE_S = 2.0
"""Seconds to wait for the end of a worker that closed its output."""
MALLOC_TUNABLES = ":".join(
    f"glibc.malloc.{name}={size}"
    for name, size in (("mmap_threshold", 2**30), ("trim_threshold", 2**32), ("top_pad", 2**26))
)
"""Freed memory stays with the process. Otherwise whether a call of a megabyte faults its pages in each time
depends on earlier allocations, and some cells differ between processes of one revision with a standard
deviation of 24 % instead of 1.7 %."""
STDERR_CHARACTERS = 300
"""How much of the last line on a worker's stderr an error quotes."""

A = TypeVar("A", bound=Answer)


class WorkerError(Exception):
    """A worker died, hangs or sent no valid answer; its measurements cannot be used."""


class WorkerProcess:
    """A running worker, which is asked one question at a time.

    Every method raises :class:`WorkerError` if the worker does not answer as it should.
    """

    def __init__(self, arm: Arm, orders: Orders, log: Path, program: Sequence[str] = WORKER) -> None:
        """Start the process; its stderr goes to the file ``log``."""
        self.arm = arm
        self.log = log
        self._stopped = False
        self._subject = "start"
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._start(orders, program)

    def _start(self, orders: Orders, program: Sequence[str]) -> None:
        command = [sys.executable, *program, msgspec.json.encode(orders).decode()]
        harness = str(Path(esbench.__file__).resolve().parents[1])
        paths = os.pathsep.join(filter(None, (harness, os.environ.get("PYTHONPATH", ""))))
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(  # noqa: S603  # this project's own program
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=orders.root,
                env={
                    "GLIBC_TUNABLES": MALLOC_TUNABLES,
                    **os.environ,
                    "PYTHONPATH": paths,
                    "TMPDIR": str(self.log.parent),  # temporary files go when the worker goes
                },
                start_new_session=True,  # an interrupt reaches only the gate, which ends its workers
            )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def hello(self) -> Hello:
        """Wait for the first message."""
        return self._required(Hello)

    def ask(self, question: Question, kind: type[A]) -> A | Refused:
        """Send a question, and wait for an answer of this kind or a refusal."""
        self._send(question)
        return self._answer(kind)

    def require(self, question: Question, kind: type[A]) -> A:
        """Send a request that the worker has answered before, so that a refusal is an error."""
        self._send(question)
        return self._required(kind)

    def stop(self) -> None:
        """Kill the worker and the processes that it started."""
        if self._stopped:  # its process id may have been reused
            return
        self._stopped = True
        with contextlib.suppress(OSError):  # its process group may be gone
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.reader.join(GRACE_S)  # a process that left the group may still hold the output open
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def _send(self, question: Question) -> None:
        match question:
            case Survey():
                label = question.variant.label(question.case.operator)
                self._subject = f"the survey of {label} on {question.case.label}"
            case Open():
                self._subject = question.cell.name
            case Control():
                self._subject = f"{question.units} units of control work"
        self._write(msgspec.json.encode(question) + b"\n")

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None  # noqa: S101  # it is a pipe
        with contextlib.suppress(OSError, ValueError):  # a dead worker is noticed by the missing answer
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None  # noqa: S101  # it is a pipe
        with self.process.stdout as stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put(b"")

    def _required(self, kind: type[A]) -> A:
        answer = self._answer(kind)
        if isinstance(answer, Refused):
            self._fail("refused", answer.reason)
        return answer

    def _answer(self, kind: type[A]) -> A | Refused:
        try:
            line = self._lines.get(timeout=SILENCE_S)
        except queue.Empty:
            self._fail("did not answer", f"for {SILENCE_S:g} s")
        if not line:
            self._fail("ended", f"with {self._ending()}")
        try:
            answer: Answer = msgspec.json.decode(line, type=Answer)
        except (ValueError, RecursionError) as error:
            self._fail("sent no valid answer", str(error))
        if isinstance(answer, WorkerFailure):
            self._fail("failed", answer.reason)
        if not isinstance(answer, kind | Refused):
            self._fail("answered another question", type(answer).__name__)
        return answer

    def _ending(self) -> str:
        try:
            code = self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "its output closed, still running"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _fail(self, what: str, how: str) -> NoReturn:
        stderr = ""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            stderr = f"; last line on stderr: {lines[-1][-STDERR_CHARACTERS:]}" if lines else ""
        message = f"the worker of {self.arm} {what} at {self._subject}: {how}{stderr}"
        raise WorkerError(message)


@contextlib.contextmanager
def start_workers(
    orders: Mapping[Arm, Orders], program: Sequence[str] = WORKER
) -> Iterator[dict[Arm, WorkerProcess]]:
    """Start a worker for each arm; end all of them when the context is left.

    The logs are beside the work trees, so that removing the folder of a killed gate removes both.
    """
    parent = Path(orders["base"].root).parent
    with tempfile.TemporaryDirectory(prefix="logs-", dir=parent) as folder, contextlib.ExitStack() as stack:
        found: dict[Arm, WorkerProcess] = {}
        for arm, one in orders.items():
            found[arm] = WorkerProcess(arm, one, Path(folder) / f"{arm}.log", program)
            stack.callback(found[arm].stop)
        yield found
