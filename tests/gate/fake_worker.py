"""Workers without torch, clock or work tree that have a fault, in this process or in one of their own.

``python -m tests.gate.fake_worker FAULT ORDERS`` speaks the protocol like a real worker. Times are drawn from
a seed, so the decision on a fault is the same each time.
"""

import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from esbench.gate.protocol import (
    PROTOCOL,
    Answer,
    Arm,
    Cell,
    Control,
    Found,
    Hello,
    Open,
    Opened,
    Orders,
    Question,
    Refused,
    Survey,
    Visit,
    Visited,
    WorkerFailure,
)
from esbench.gate.worker_process import WorkerProcess
from esbench.schema import Case, Variant

PROGRAM = ("-P", "-m", "tests.gate.fake_worker")
LAUNCH_NS = 1e7
"""So slow that a cell has no more than the least number of rounds."""
UNIT_NS = LAUNCH_NS / 200
BETWEEN, WITHIN = 0.001, 0.01
"""Relative standard deviations between processes and between launches."""
NOISY = 0.3
"""The one between processes for the fault ``noisy``."""
CASE = Case(operator="Linear", out_channels=4, in_channels=4, members=8)
NAMES = ("Able", "Baker", "Charlie", "Dog")
VICTIM = NAMES[1]
"""The variant that has the fault."""
FAILS_AT = 40
"""The visit at which a worker dies, hangs or lies."""


class FakeWorker:
    """Answers as a worker would, except for its fault, which most often is in head."""

    def __init__(self, fault: str, orders: Orders) -> None:
        """Seed the times of this process."""
        self.fault, self.orders = fault, orders
        self.is_head = orders.arm == "head"
        self.launch_ns = 0.0
        self.visits = 0
        name = f"{fault} {orders.arm} {orders.replicate} {orders.seed}"
        self._rng = random.Random(name)  # noqa: S311  # noise, not a secret

    def hello(self) -> Answer:
        """Name the same cells in both arms, unless that is the fault."""
        arm: Arm = self.orders.arm
        if self.fault == "unloadable" and not self.is_head:
            return WorkerFailure(number=0, arm=arm, reason="PluginError: cannot load variants from impls")
        absent = {VICTIM} if self.fault in {"missing", "dropped"} and self.is_head else set()
        elsewhere = self.fault == "installed" or (self.fault == "elsewhere" and self.is_head)
        return Hello(
            number=0,
            arm=arm,
            protocol=PROTOCOL - (self.fault == "older" and not self.is_head),
            packages={"impls": "/elsewhere" if elsewhere else self.orders.root},
            code={"impls": self.orders.arm, "esbench": "one harness"},
            cells=tuple(
                Cell(variant=Variant(scheme=name), case=CASE, phase="forward", method="host")
                for name in (NAMES if self.fault != "empty" else ())
                if name not in absent
            ),
            unknown="no suite of that name" if self.fault == "empty" else "",
        )

    def answer(self, question: Question) -> Answer:
        """Answer, unless the fault is in the answer."""
        number, arm = question.number, self.orders.arm
        match question:
            case Survey():
                return self._survey(question)
            case Open():
                slower = {"slower": 0.02 * (question.cell.variant.scheme == VICTIM), "everywhere": 0.012}
                self.launch_ns = LAUNCH_NS * (1 + slower.get(self.fault, 0.0) * self.is_head) * self._own()
            case Control():
                units = question.units if self.fault != "deaf" else 200
                biased = self.fault == "biased" and self.is_head
                self.launch_ns = UNIT_NS * units * (1.03 if biased else 1) * self._own()
            case Visit():
                self.visits += 1
                times = (self.launch_ns * (1 + self._rng.gauss(0, WITHIN)) for _ in range(question.launches))
                return Visited(number=number, arm=arm, samples=tuple(map(abs, times)))
        return Opened(number=number, arm=arm, launch_ns=self.launch_ns)

    def _survey(self, question: Survey) -> Answer:
        number, arm = question.number, self.orders.arm
        hit = self.is_head and question.variant.scheme == VICTIM
        if (self.fault == "missing" and hit) or (self.fault == "new" and not self.is_head):
            return Refused(number=number, arm=arm, status="absent", reason="no such variant")
        if self.fault == "wrong" and hit:
            return Refused(number=number, arm=arm, status="failed", reason="oracle: forward is off by 1")
        counts = {"peak_bytes": 1000.0, "noise_bytes": 100.0, "launches": 7.0}
        figures = {name: count + (self.fault == name and hit) for name, count in counts.items()}
        return Found(number=number, arm=arm, figures={"forward": figures})

    def _own(self) -> float:
        """The factor by which this process is slower: another layout, another place in the caches."""
        return 1 + self._rng.gauss(0, NOISY if self.fault == "noisy" else BETWEEN)

    def line(self, answer: Answer) -> bytes:
        """The answer as a line, with the fault of the channel or process from some visit on."""
        line = msgspec.json.encode(answer) + b"\n"
        if not self.is_head or self.visits < FAILS_AT:
            return line
        match self.fault:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "ended":
                os._exit(0)
            case "hung":
                sys.stdin.buffer.read()  # until the gate is gone
            case "garbage":
                return b"Segmentation fault?\n"
            case "half":
                return line[: len(line) // 2] + b"\n"
            case "fewer":
                return line[: line.rindex(b",")] + b"]}\n" if b"," in line else line
        old, new = {
            "nan": (b'"samples":[', b'"samples":[NaN,'),
            "null": (b'"samples":[', b'"samples":[null,'),
            "negative": (b'"samples":[', b'"samples":[-5.0,'),
            "zero": (b'"samples":[', b'"samples":[0.0,'),
            "swapped": (b'"arm":"head"', b'"arm":"base"'),
            "late": (b'"number":', b'"number":1'),
        }.get(self.fault, (b"", b""))
        return line.replace(old, new) if old else line


class InProcess(WorkerProcess):
    """A fake worker without a process: everything after the pipe is the gate's own code."""

    def _start(self, orders: Orders, program: Sequence[str]) -> None:
        self._fake = FakeWorker(program[0], orders)
        self._answers.put(self._fake.line(self._fake.hello()))

    def _send(self, line: bytes) -> None:
        self._answers.put(self._fake.line(self._fake.answer(msgspec.json.decode(line, type=Question))))

    def stop(self) -> None:
        """There is no process to be ended."""


@contextmanager
def in_process(orders: Sequence[Orders], fault: str) -> Iterator[dict[Arm, WorkerProcess]]:
    """Start fake workers with a fault in this process."""
    yield {one.arm: InProcess(one, Path(os.devnull), (fault,)) for one in orders}


def main() -> None:
    """Answer until stdin ends."""
    fault, orders = sys.argv[1:]
    worker = FakeWorker(fault, msgspec.json.decode(orders, type=Orders))
    out = sys.stdout.buffer
    out.write(worker.line(worker.hello()))
    out.flush()
    for line in sys.stdin.buffer:
        out.write(worker.line(worker.answer(msgspec.json.decode(line, type=Question))))
        out.flush()


if __name__ == "__main__":
    main()
