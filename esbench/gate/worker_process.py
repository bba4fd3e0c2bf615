"""Worker processes of the gate: start them, read the messages that they write to a file, end them.

A message in a file does not wake the gate's process while a call is timed, as one in a pipe would.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

import esbench
from esbench.gate.records import Begin, End, Message, Orders

WORKER = ("-P", "-m", "esbench.gate.worker")
"""Arguments of Python; with ``-P`` the current folder is not searched for esbench."""
THREADS = 1
"""CPU threads of torch in a worker: more would be more sensitive to other load."""
SILENCE_S = 300.0
"""Seconds without a message after which a worker is considered hung."""
POLL_S = 0.2
"""Seconds between two looks at the files of messages."""
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
    """A running worker, whose files have the names ``path`` with different suffixes."""

    def __init__(self, orders: Orders, path: Path, program: Sequence[str]) -> None:
        self.log, messages, file = map(path.with_suffix, (".log", ".messages", ".orders"))
        file.write_bytes(msgspec.json.encode(orders))
        self._messages = messages.open("w+b", buffering=0)
        self._rest, self._subject = b"", "the start"
        self.heard_s, self.has_ended = time.monotonic(), False
        harness = str(Path(esbench.__file__).resolve().parents[1])
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(  # noqa: S603  # a program of this project
                [sys.executable, *program, str(file), str(messages)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=path.parent,
                env={
                    "GLIBC_TUNABLES": MALLOC_TUNABLES,
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, (harness, os.environ.get("PYTHONPATH")))),
                    "TMPDIR": str(path.parent),  # temporary files are deleted with the log
                },
                start_new_session=True,  # an interrupt reaches only the gate, which ends its workers
            )

    def messages(self) -> Iterator[Message]:
        """Yield the new messages.

        Raises:
            WorkerError: the worker has ended, failed or hangs, or a message is invalid.
        """
        code = self.process.poll()  # before reading, so that nothing is written afterwards
        *lines, self._rest = (self._rest + self._messages.read()).split(b"\n")
        for line in lines:
            try:
                message: Message = msgspec.json.decode(line, type=Message)
            except ValueError as error:
                self.fail(f"sent an invalid message: {error}")
            self.heard_s = time.monotonic()
            if isinstance(message, Begin):
                self._subject = message.subject
            elif isinstance(message, End) and message.failure:
                raise WorkerError(f"{message.failure} (during {self._subject})")
            self.has_ended = isinstance(message, End)
            yield message
        if code is not None and not self.has_ended:
            self.fail(f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}")
        if time.monotonic() > self.heard_s + SILENCE_S:
            self.fail(f"has sent no message for {SILENCE_S:g} s")

    def stop(self) -> None:
        """Kill the worker and the processes that it started."""
        with contextlib.suppress(OSError):  # the group may be gone
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._messages.close()
        if self.process.stdin:
            self.process.stdin.close()

    def fail(self, event: str) -> NoReturn:
        """Raise a WorkerError with what the worker was doing, and what it printed last."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        quoted = f"; the last line it printed: {lines[-1][-QUOTED_CHARACTERS:]}" if lines else ""
        raise WorkerError(f"the worker {event} (during {self._subject}){quoted}")


def run_workers(
    orders: Sequence[Orders], folder: Path, program: Sequence[str] = WORKER
) -> Generator[Message]:
    """Run workers at the same time; yield their messages as they come, until all are done.

    Their files are in a new folder inside ``folder``. At the end, also after an error or an interrupt, all
    workers are killed and their files deleted.

    Raises:
        WorkerError: a worker died, hangs, failed or sent an invalid message.
    """
    with tempfile.TemporaryDirectory(prefix="logs-", dir=folder) as logs, contextlib.ExitStack() as stack:
        workers = []
        for number, order in enumerate(orders):
            workers.append(WorkerProcess(order, Path(logs) / str(number), program))
            stack.callback(workers[-1].stop)
        while not all(worker.has_ended for worker in workers):
            time.sleep(POLL_S)
            for worker in workers:
                if not worker.has_ended:
                    yield from worker.messages()
