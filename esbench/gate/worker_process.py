"""The gate's handle on a worker: start the process, ask questions, check the answers, end the process."""

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
"""Arguments of Python; ``-P`` keeps the worker from importing an esbench of the folder that it runs in."""
SILENCE_S = 300.0
"""A worker that does not answer for this long is considered hung."""
END_S = 2.0
"""Seconds to wait for a worker to exit after it closed its connection."""
MALLOC_TUNABLES = ":".join(
    f"glibc.malloc.{name}={size}"
    for name, size in (("mmap_threshold", 2**30), ("trim_threshold", 2**32), ("top_pad", 2**26))
)
"""Freed memory stays with the process. Otherwise whether a call of a megabyte faults its pages in each time
depends on earlier allocations, and some cells differ between processes of one revision with a standard
deviation of 24 % instead of 1.7 %."""
QUOTED_CHARACTERS = 300
"""How much of the last line of a worker's log an error quotes."""

A = TypeVar("A", bound=Answer)


class WorkerError(Exception):
    """A worker died, hangs, failed or sent no valid answer; its measurements cannot be used."""


class WorkerProcess:
    """A running worker, which is asked one question at a time."""

    def __init__(self, orders: Orders, log: Path, program: Sequence[str] = WORKER) -> None:
        """Start the process; what it prints goes to the file ``log``."""
        self.arm = orders.arm
        self.log = log
        self._subject = "the start"
        self._connection, theirs = Pipe()
        harness = str(Path(esbench.__file__).resolve().parents[1])
        with theirs, log.open("wb") as output:
            self.process = subprocess.Popen(  # noqa: S603  # this project's own program
                [sys.executable, *program, str(theirs.fileno()), msgspec.json.encode(orders).decode()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                cwd=orders.root,
                env={
                    "GLIBC_TUNABLES": MALLOC_TUNABLES,
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, (harness, os.environ.get("PYTHONPATH")))),
                    "TMPDIR": str(log.parent),  # temporary files go when the worker goes
                },
                start_new_session=True,  # an interrupt reaches only the gate, which ends its workers
            )

    def ask(self, question: Question, kind: type[A]) -> A:
        """Send a question and return the answer.

        Raises:
            WorkerError: no answer of this type arrives.

        """
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
            WorkerError: no answer of this type arrives.

        """
        try:
            if not self._connection.poll(SILENCE_S):
                self._fail(f"did not answer for {SILENCE_S:g} s")
            answer: Answer = msgspec.json.decode(self._connection.recv_bytes(), type=Answer)
        except (EOFError, OSError):
            self._fail(self._ending())
        except ValueError as error:
            self._fail(f"sent no valid answer: {error}")
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

    def _ending(self) -> str:
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "closed its connection but still runs"
        return f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _fail(self, event: str) -> NoReturn:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        quoted = f"; the last line it printed: {lines[-1][-QUOTED_CHARACTERS:]}" if lines else ""
        message = f"the worker of {self.arm} {event} (during {self._subject}){quoted}"
        raise WorkerError(message)


@contextlib.contextmanager
def start_workers(
    orders: Mapping[Arm, Orders], program: Sequence[str] = WORKER
) -> Iterator[dict[Arm, WorkerProcess]]:
    """Start a worker for each arm; end all of them when the context is left.

    Logs and temporary files are next to the folders of the revisions, and are deleted with the workers.
    """
    parent = Path(orders["base"].root).parent
    with tempfile.TemporaryDirectory(prefix="logs-", dir=parent) as folder, contextlib.ExitStack() as stack:
        workers: dict[Arm, WorkerProcess] = {}
        for arm, order in orders.items():
            workers[arm] = WorkerProcess(order, Path(folder) / f"{arm}.log", program)
            stack.callback(workers[arm].stop)
        yield workers
