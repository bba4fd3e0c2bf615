"""A stand-in for a worker, with a fault of one's choice: ``python -m tests.gate.fake_worker FAULT ORDERS``.

It speaks the protocol without torch, without a clock and without a tree: its times are seeded, so that what
the gate makes of a fault can be tested in a second and comes out the same each time.
"""

import os
import random
import signal
import sys
from dataclasses import dataclass

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
from esbench.schema import Case, Variant

LAUNCH_NS = 1e7
"""So slow that no cell has more rounds than it must: a fault shows in them as well."""
UNIT_NS = LAUNCH_NS / 200
BETWEEN, WITHIN = 0.001, 0.01
"""By which share processes differ, and launches of one process."""
NOISY = 0.3
"""By which share processes differ where that is the fault."""
CASE = Case(operator="Linear", out_channels=4, in_channels=4, members=8)
NAMES = ("Able", "Baker", "Charlie", "Dog")
VICTIM = NAMES[1]
"""The variant on which a fault falls."""
DIES_AT = 40
"""A worker that dies, hangs or lies does so at this visit."""


@dataclass
class StandIn:
    """Answers as a worker would, but for its fault."""

    fault: str
    orders: Orders
    cost_ns: float = 0.0
    noise: float = 0.0
    visits: int = 0

    def __post_init__(self) -> None:
        """Draw what this process has of its own."""
        name = f"{self.fault} {self.orders.arm} {self.orders.replicate} {self.orders.seed}"
        self._rng = random.Random(name)  # noqa: S311  # noise, not a secret

    @property
    def is_head(self) -> bool:
        """Whether this is the arm on which most faults fall."""
        return self.orders.arm == "head"

    def hello(self) -> Answer:
        """Say what this worker has: the same cells in both arms."""
        arm: Arm = self.orders.arm
        if self.fault == "unloadable" and not self.is_head:
            return WorkerFailure(number=0, arm=arm, reason="PluginError: cannot load variants from impls")
        absent = {VICTIM} if self.fault in {"missing", "dropped"} and self.is_head else set()
        names = () if self.fault == "empty" else NAMES
        return Hello(
            number=0,
            arm=arm,
            protocol=PROTOCOL - (self.fault == "older" and not self.is_head),
            packages={
                "impls": "/elsewhere" if self.fault == "elsewhere" and self.is_head else self.orders.root
            },
            code={"impls": self.orders.arm, "esbench": "one harness"},
            cells=tuple(
                Cell(variant=Variant(scheme=name), case=CASE, phase="forward", method="host")
                for name in names
                if name not in absent
            ),
            unknown="no suite of that name" if self.fault == "empty" else "",
        )

    def answer(self, question: Question) -> Answer:
        """Answer honestly, but for the fault."""
        number, arm = question.number, self.orders.arm
        match question:
            case Survey():
                return self._survey(question)
            case Open():
                self._open(question.cell.variant.scheme)
            case Control():
                more = question.units if self.fault != "deaf" else 200
                biased = self.fault == "biased" and self.is_head
                self.cost_ns = UNIT_NS * more * (1.03 if biased else 1) * self._own()
            case Visit():
                self.visits += 1
                samples = tuple(self._sample() for _ in range(question.launches))
                return Visited(number=number, arm=arm, samples=samples)
        return Opened(number=number, arm=arm, launch_ns=self.cost_ns)

    def _survey(self, question: Survey) -> Answer:
        number, arm = question.number, self.orders.arm
        hit = self.is_head and question.variant.scheme == VICTIM
        if (self.fault == "missing" and hit) or (self.fault == "new" and not self.is_head):
            return Refused(number=number, arm=arm, status="absent", reason="no such variant")
        if self.fault == "wrong" and hit:
            return Refused(number=number, arm=arm, status="failed", reason="oracle: forward is off by 1")
        figures = {
            "peak_bytes": 1000.0 + (self.fault == "peak_bytes" and hit),
            "noise_bytes": 100.0 + (self.fault == "noise_bytes" and hit),
            "launches": 7.0 + (self.fault == "launches" and hit),
        }
        return Found(number=number, arm=arm, figures={"forward": figures})

    def _open(self, name: str) -> None:
        slower = {"slower": 0.02 * (name == VICTIM), "everywhere": 0.012}.get(self.fault, 0.0)
        self.cost_ns = LAUNCH_NS * (1 + slower * self.is_head) * self._own()

    def _own(self) -> float:
        """The factor of this process: another layout, another place in the caches."""
        return 1 + self._rng.gauss(0, NOISY if self.fault == "noisy" else BETWEEN)

    def _sample(self) -> float:
        return abs(self.cost_ns * (1 + self._rng.gauss(0, WITHIN)))


def spoilt(line: bytes, worker: StandIn) -> bytes:
    """Return what a worker says instead at the moment of its fault."""
    if not worker.is_head or worker.visits < DIES_AT:
        return line
    match worker.fault:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "ended":
            os._exit(0)
        case "hung":
            sys.stdin.buffer.read()  # until its referee is gone
    words = {
        "garbage": b"Segmentation fault?\n",
        "half": line[: len(line) // 2] + b"\n",
        "nan": line.replace(b'"samples":[', b'"samples":[NaN,'),
        "null": line.replace(b'"samples":[', b'"samples":[null,'),
        "negative": line.replace(b'"samples":[', b'"samples":[-5.0,'),
        "zero": line.replace(b'"samples":[', b'"samples":[0.0,'),
        "swapped": line.replace(b'"arm":"head"', b'"arm":"base"'),
        "late": line.replace(b'"number":', b'"number":1'),
        "fewer": line[: line.rindex(b",")] + b"]}\n" if b"," in line else line,
    }
    return words.get(worker.fault, line)


def main() -> None:
    """Answer until nobody asks any more."""
    fault, orders = sys.argv[1:]
    worker = StandIn(fault, msgspec.json.decode(orders, type=Orders))
    out = sys.stdout.buffer

    def say(answer: Answer) -> None:
        out.write(spoilt(msgspec.json.encode(answer) + b"\n", worker))
        out.flush()

    say(worker.hello())
    for line in sys.stdin.buffer:
        say(worker.answer(msgspec.json.decode(line, type=Question)))


if __name__ == "__main__":
    main()
