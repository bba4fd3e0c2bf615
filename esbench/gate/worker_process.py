"""Worker processes of the gate: start them, read their messages, end them."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

import msgspec

import esbench
from esbench.gate.protocol import Begin, Done, Failure, Message, Orders

WORKER = ("-P", "-m", "esbench.gate.worker")
"""Arguments of Python; with ``-P`` the current folder is not searched for esbench."""
SILENCE_S = 300.0
"""Seconds without a message after which a worker is considered hung."""
END_S = 2.0
"""Seconds to wait for a worker to exit after it closed its connection."""
MALLOC_TUNABLES = ":".join(
    f"glibc.malloc.{name}={size}"
    for name, size in (("mmap_threshold", 2**30), ("trim_threshold", 2**32), ("top_pad", 2**26))
)
"""With these settings a process keeps freed memory. By default, earlier allocations decide whether a call
that allocates a megabyte faults its pages in every time, which changes the times of some cells by 24 %."""
QUOTED_CHARACTERS = 300
"""The most characters that an error quotes from a worker's log."""


class WorkerError(Exception):
    """A worker died, hangs, failed or sent an invalid message."""


class WorkerProcess:
    """A running worker."""

    def __init__(self, orders: Orders, log: Path, program: Sequence[str]) -> None:
        """Start the process; its output goes to the file ``log``, and its orders to a file next to it."""
        self.log = log
        self.heard_s = time.monotonic()
        self._subject = "the start"
        self.connection, worker_end = Pipe(duplex=False)
        file = log.with_suffix(".json")
        file.write_bytes(msgspec.json.encode(orders))
        harness = str(Path(esbench.__file__).resolve().parents[1])
        with worker_end, log.open("wb") as output:
            self.process = subprocess.Popen(  # noqa: S603  # a program of this project
                [sys.executable, *program, str(worker_end.fileno()), str(file)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[worker_end.fileno()],
                cwd=log.parent,
                env={
                    "GLIBC_TUNABLES": MALLOC_TUNABLES,
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, (harness, os.environ.get("PYTHONPATH")))),
                    "TMPDIR": str(log.parent),  # temporary files are deleted with the log
                },
                start_new_session=True,  # an interrupt reaches only the gate, which ends its workers
            )

    def receive(self) -> Message:
        """Return the next message, for which the caller has waited.

        Raises:
            WorkerError: the worker has ended or failed, or the message is invalid.
        """
        self.heard_s = time.monotonic()
        try:
            message: Message = msgspec.json.decode(self.connection.recv_bytes(), type=Message)
        except (EOFError, OSError):
            self.fail(self._exit_description())
        except ValueError as error:
            self.fail(f"sent an invalid message: {error}")
        if isinstance(message, Failure):
            raise WorkerError(f"{message.reason} (during {self._subject})")
        if isinstance(message, Begin):
            self._subject = message.subject
        return message

    def stop(self) -> None:
        """Kill the worker and the processes that it started."""
        with contextlib.suppress(OSError):  # the group may be gone
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        if self.process.stdin:
            self.process.stdin.close()

    def fail(self, event: str) -> NoReturn:
        """Raise a WorkerError with what the worker was doing, and what it printed last."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        quoted = f"; the last line it printed: {lines[-1][-QUOTED_CHARACTERS:]}" if lines else ""
        raise WorkerError(f"the worker {event} (during {self._subject}){quoted}")

    def _exit_description(self) -> str:
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "closed its connection but still runs"
        return f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"


def run_workers(
    orders: Sequence[Orders], folder: Path, program: Sequence[str] = WORKER
) -> Generator[tuple[int, Message]]:
    """Run workers at the same time; yield their numbers and messages as they come, until all are done.

    Logs and temporary files are in a new folder inside ``folder``. At the end, also after an error or an
    interrupt, all workers are killed and their files deleted.

    Raises:
        WorkerError: a worker died, hangs, failed or sent an invalid message.
    """
    with tempfile.TemporaryDirectory(prefix="logs-", dir=folder) as logs, contextlib.ExitStack() as stack:
        workers: dict[Connection, tuple[int, WorkerProcess]] = {}
        for number, order in enumerate(orders):
            worker = WorkerProcess(order, Path(logs) / f"{number}.log", program)
            stack.callback(worker.stop)
            workers[worker.connection] = number, worker
        while workers:
            _, quietest = min(workers.values(), key=lambda numbered: numbered[1].heard_s)
            ready = wait([*workers], max(0.0, quietest.heard_s + SILENCE_S - time.monotonic()))
            if not ready:
                quietest.fail(f"has sent no message for {SILENCE_S:g} s")
            for connection in [connection for connection in workers if connection in ready]:
                number, worker = workers[connection]
                message = worker.receive()
                yield number, message
                if isinstance(message, Done):
                    del workers[connection]
