"""Control of a worker process by the gate: start it, ask questions, check the answers, end it."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

import esbench
from esbench.gate.protocol import Answer, Control, Failure, Open, Orders, Question, Survey
from esbench.gate.records import Arm

WORKER = ("-P", "-m", "esbench.gate.worker")
"""Arguments of Python; with ``-P`` the current folder is not searched for esbench."""
SILENCE_S = 300.0
"""Seconds without an answer after which a worker is considered hung."""
END_S = 2.0
"""Seconds to wait for a worker to exit after it closed its connection."""
MALLOC_TUNABLES = ":".join(
    f"glibc.malloc.{name}={size}"
    for name, size in (("mmap_threshold", 2**30), ("trim_threshold", 2**32), ("top_pad", 2**26))
)
"""With these settings a process keeps freed memory. By default, earlier allocations decide whether a call
that allocates a megabyte faults its pages in every time, and the times of some cells vary between processes
with a standard deviation of 24 % instead of 1.7 %."""
QUOTED_CHARACTERS = 300
"""The most characters that an error quotes from a worker's log."""

A = TypeVar("A", bound=Answer)


class WorkerError(Exception):
    """A worker died, hangs, failed or sent an invalid answer."""


class WorkerProcess:
    """A running worker; it answers one question at a time."""

    def __init__(self, orders: Orders, log: Path, program: Sequence[str] = WORKER) -> None:
        """Start the process; its output goes to the file ``log``."""
        self.arm = orders.arm
        self.log = log
        self._subject = "the start"
        self._connection, worker_end = Pipe()
        harness = str(Path(esbench.__file__).resolve().parents[1])
        with worker_end, log.open("wb") as output:
            self.process = subprocess.Popen(  # noqa: S603  # a program of this project
                [sys.executable, *program, str(worker_end.fileno()), msgspec.json.encode(orders).decode()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[worker_end.fileno()],
                cwd=orders.root,
                env={
                    "GLIBC_TUNABLES": MALLOC_TUNABLES,
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, (harness, os.environ.get("PYTHONPATH")))),
                    "TMPDIR": str(log.parent),  # temporary files are deleted with the log
                },
                start_new_session=True,  # an interrupt reaches only the gate, which ends its workers
            )

    def ask(self, question: Question, kind: type[A]) -> A:
        """Send a question and return the answer; for errors see :meth:`receive`."""
        self.send(question)
        return self.receive(kind)

    def send(self, question: Question) -> None:
        """Send a question."""
        match question:
            case Survey():
                self._subject = f"the survey of {question.cells[0].name}"
            case Open():
                self._subject = f"the timing of {question.cell.name}"
            case Control():
                self._subject = f"{question.units} units of control work"
        with contextlib.suppress(OSError):  # a dead worker is noticed by the missing answer
            self._connection.send_bytes(msgspec.json.encode(question))

    def receive(self, kind: type[A]) -> A:
        """Wait for the answer to the last question, or for the first message.

        Raises:
            WorkerError: there is no answer, or it has another type.
        """
        try:
            if not self._connection.poll(SILENCE_S):
                self._fail(f"did not answer for {SILENCE_S:g} s")
            answer: Answer = msgspec.json.decode(self._connection.recv_bytes(), type=Answer)
        except (EOFError, OSError):
            self._fail(self._exit_description())
        except ValueError as error:
            self._fail(f"sent an invalid answer: {error}")
        if not isinstance(answer, kind):
            reason = answer.reason if isinstance(answer, Failure) else f"sent {type(answer).__name__}"
            self._fail(f"failed: {reason}")
        return answer

    def stop(self) -> None:
        """Kill the worker and the processes that it started."""
        with contextlib.suppress(OSError):  # the group may be gone
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._connection.close()

    def _exit_description(self) -> str:
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "closed its connection but still runs"
        return f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _fail(self, event: str) -> NoReturn:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        quoted = f"; the last line it printed: {lines[-1][-QUOTED_CHARACTERS:]}" if lines else ""
        raise WorkerError(f"the worker of {self.arm} {event} (during {self._subject}){quoted}")


@contextlib.contextmanager
def start_workers(
    orders: Mapping[Arm, Orders], program: Sequence[str] = WORKER
) -> Iterator[dict[Arm, WorkerProcess]]:
    """Start a worker for each arm; at the end of the context, kill the workers and delete their files.

    Logs and temporary files are next to the folders of the revisions.
    """
    parent = Path(orders["base"].root).parent
    with tempfile.TemporaryDirectory(prefix="logs-", dir=parent) as folder, contextlib.ExitStack() as stack:
        workers: dict[Arm, WorkerProcess] = {}
        for arm, order in orders.items():
            workers[arm] = WorkerProcess(order, Path(folder) / f"{arm}.log", program)
            stack.callback(workers[arm].stop)
        yield workers
