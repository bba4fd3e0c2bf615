"""Fake workers without process, torch or clock, which have a planted fault, most often in head."""

import itertools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from esbench.gate.gate import CONTROL_UNITS, Gate
from esbench.gate.protocol import (
    Answer,
    Control,
    Hello,
    Open,
    Opened,
    Orders,
    Question,
    Rows,
    Survey,
    Visit,
    Visited,
)
from esbench.gate.records import ARMS, Arm, Cell, Revision, Surveyed
from esbench.gate.worker_process import A, WorkerError, WorkerProcess
from esbench.schema import Case, Variant
from tests import synthetic

LAUNCH_NS = 1e7
"""So slow that a cell has only the minimum number of rounds."""
BETWEEN, WITHIN, NOISY = 0.001, 0.01, 0.3
"""Relative standard deviations between processes, between launches, and between processes if noisy."""
CASE = Case(operator="Linear", out_channels=4, in_channels=4, members=8)
NAMES = ("Able", "Baker", "Charlie", "Dog")
VICTIM = NAMES[1]
"""The variant that has the fault."""
DIES_AT = 40
"""The visit at which a worker dies."""
COUNTS = {"peak_bytes": 1000.0, "noise_bytes": 100.0, "launches": 7.0}


class FakeWorker(WorkerProcess):
    """A worker that answers like a real one except for its fault; test_planted_faults.py explains each."""

    def __init__(self, orders: Orders, fault: str, number: int, visited: list[Arm]) -> None:
        """Prepare the first message; ``number`` seeds the noise of the times, ``visited`` gets the visits."""
        self.visited = visited
        self.arm, self.fault, self.is_head = orders.arm, fault, orders.arm == "head"
        self.launch_ns, self.visits = 0.0, 0
        self.rng = random.Random(f"{fault} {self.arm} {number}")  # noqa: S311  # noise, not a secret
        self.answer: Answer = self._hello()

    def send(self, question: Question) -> None:
        """Prepare the answer."""
        self.answer = self._reply(question)

    def receive(self, answer_type: type[A]) -> A:
        """Return the answer, unless the worker has died."""
        if (self.fault == "dies" and self.is_head and self.visits >= DIES_AT) or (
            self.fault == "unloadable" and not self.is_head
        ):
            raise WorkerError(f"the worker of {self.arm} ended")
        assert isinstance(self.answer, answer_type)
        return self.answer

    def stop(self) -> None:
        """Do nothing: there is no process."""

    def _hello(self) -> Hello:
        """Return the same cells in both arms, unless the fault changes them."""
        names = () if self.fault == "empty" else NAMES
        absent = VICTIM if self.fault in {"missing", "dropped"} and self.is_head else ""
        is_elsewhere = self.fault == "installed" or (self.fault == "elsewhere" and self.is_head)
        return Hello(
            own_packages=() if is_elsewhere else ("impls",),
            code={"impls": self.arm},
            harness="one harness",
            cells=tuple(
                Cell(Variant(scheme=name), CASE, "forward", "host") for name in names if name != absent
            ),
            unknown="" if names else "no suite of that name",
        )

    def _reply(self, question: Question) -> Answer:
        """Return the answer to a question; times are random around LAUNCH_NS."""
        match question:
            case Survey(cells=(cell,)):
                return Rows((self._survey(cell),))
            case Open(cell=cell):
                slowdown = {"slower": 0.02 * (cell.variant.scheme == VICTIM), "everywhere": 0.012}
                self.launch_ns = LAUNCH_NS * (1 + slowdown.get(self.fault, 0.0) * self.is_head)
            case Control(units=units):
                bias = 0.03 * (self.fault == "biased" and self.is_head)
                work = 1.0 if self.fault == "deaf" else units / CONTROL_UNITS
                self.launch_ns = LAUNCH_NS * work * (1 + bias)
            case Visit(launches=launches):
                self.visits += 1
                self.visited.append(self.arm)
                times = (self.launch_ns * (1 + self.rng.gauss(0, WITHIN)) for _ in range(launches))
                return Visited(tuple(map(abs, times)))
        # Each process is slower or faster as a whole, as real ones are by their memory layout.
        self.launch_ns *= 1 + self.rng.gauss(0, NOISY if self.fault == "noisy" else BETWEEN)
        return Opened(abs(self.launch_ns))

    def _survey(self, cell: Cell) -> Surveyed:
        """Return the row of a cell."""
        is_victim = self.is_head and cell.variant.scheme == VICTIM
        if (self.fault == "missing" and is_victim) or (self.fault == "new" and not self.is_head):
            return Surveyed(cell, self.arm, "absent", reason="no such variant")
        if self.fault == "wrong" and is_victim:
            return Surveyed(cell, self.arm, "failed", reason="wrong result: forward is off by 1")
        counts = {name: count + (self.fault == name and is_victim) for name, count in COUNTS.items()}
        return Surveyed(cell, self.arm, "ok", counts)


def fake_gate(folder: Path, workers: "FakeWorkers") -> Gate:
    """Return a gate on fake workers, whose revisions would be in a folder."""
    return Gate(
        orders=Orders(device="cpu", threads=1, seed=0, suite="gate"),
        folders={arm: folder / arm for arm in ARMS},
        revisions={arm: Revision(asked=arm, commit="0" * 40) for arm in ARMS},
        environment=synthetic.environment(),
        start=workers,
    )


class FakeWorkers:
    """A factory of fake workers with a fault; their times are the same in each gate."""

    def __init__(self, fault: str) -> None:
        """Start to count the pairs of processes."""
        self.fault, self.numbers = fault, itertools.count()
        self.visited: list[Arm] = []
        """The arm of each visit, in the order of visits."""

    @contextmanager
    def __call__(self, orders: Mapping[Arm, Orders]) -> Iterator[dict[Arm, WorkerProcess]]:
        """Start a worker for each arm."""
        number = next(self.numbers)
        yield {arm: FakeWorker(order, self.fault, number, self.visited) for arm, order in orders.items()}
