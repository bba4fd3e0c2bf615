"""Fake workers without process, torch or clock, which have a planted fault, most often in head."""

import itertools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from esbench.gate.protocol import (
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

LAUNCH_NS = 1e7
"""So slow that a cell has only the minimum number of rounds."""
BETWEEN, WITHIN, NOISY = 0.001, 0.01, 0.3
"""Relative standard deviations between processes, between launches, and between processes if noisy."""
CASE = Case(operator="Linear", out_channels=4, in_channels=4, members=8)
NAMES = ("Able", "Baker", "Charlie", "Dog")
VICTIM = NAMES[1]
"""The variant that has the fault."""
FAILS_AT = 40
"""The visit from which on a worker sends garbage."""


class FakeWorker(WorkerProcess):
    """A worker that answers like a real one except for its fault; the rest of the test is the gate's code."""

    def _start(self, orders: Orders, program: Sequence[str]) -> None:
        self.fault, number = program
        self.root, self.is_head = orders.root, self.arm == "head"
        self.launch_ns, self.visits = 0.0, 0
        self.rng = random.Random(f"{self.fault} {self.arm} {number}")  # noqa: S311  # noise, not a secret
        self._lines.put(msgspec.json.encode(self._hello()))

    def _write(self, line: bytes) -> None:
        answer = self._reply(msgspec.json.decode(line, type=Question))
        broken = self.fault == "garbage" and self.is_head and self.visits >= FAILS_AT
        self._lines.put(b"Segmentation fault?\n" if broken else msgspec.json.encode(answer))

    def stop(self) -> None:
        """Do nothing: there is no process to end."""

    def _hello(self) -> Answer:
        """Return the same cells in both arms, unless the fault changes them."""
        if self.fault == "unloadable" and not self.is_head:
            return WorkerFailure(reason="PluginError: cannot load variants from impls")
        absent = VICTIM if self.fault in {"missing", "dropped"} and self.is_head else ""
        is_elsewhere = self.fault == "installed" or (self.fault == "elsewhere" and self.is_head)
        return Hello(
            packages={"impls": "/elsewhere" if is_elsewhere else self.root},
            code={"impls": self.arm, "esbench": "one harness"},
            cells=tuple(
                Cell(variant=Variant(scheme=name), case=CASE, phase="forward", method="host")
                for name in (NAMES if self.fault != "empty" else ())
                if name != absent
            ),
            unknown="no suite of that name" if self.fault == "empty" else "",
        )

    def _reply(self, question: Question) -> Answer:
        match question:
            case Survey():
                return self._survey(question)
            case Open():
                slower = {"slower": 0.02 * (question.cell.variant.scheme == VICTIM), "everywhere": 0.012}
                self.launch_ns = LAUNCH_NS * (1 + slower.get(self.fault, 0.0) * self.is_head)
            case Control():
                units = question.units if self.fault != "deaf" else 200
                self.launch_ns = (
                    LAUNCH_NS / 200 * units * (1 + 0.03 * (self.fault == "biased" and self.is_head))
                )
            case Visit():
                self.visits += 1
                times = (self.launch_ns * (1 + self.rng.gauss(0, WITHIN)) for _ in range(question.launches))
                return Visited(samples=tuple(map(abs, times)))
        # Each process is slower or faster as a whole, as real ones are by their memory layout.
        self.launch_ns *= 1 + self.rng.gauss(0, NOISY if self.fault == "noisy" else BETWEEN)
        return Opened(launch_ns=abs(self.launch_ns))

    def _survey(self, question: Survey) -> Answer:
        is_victim = self.is_head and question.variant.scheme == VICTIM
        if (self.fault == "missing" and is_victim) or (self.fault == "new" and not self.is_head):
            return Refused(status="absent", reason="no such variant")
        if self.fault == "wrong" and is_victim:
            return Refused(status="failed", reason="oracle: forward is off by 1")
        counts = {"peak_bytes": 1000.0, "noise_bytes": 100.0, "launches": 7.0}
        figures = {name: count + (self.fault == name and is_victim) for name, count in counts.items()}
        return Found(figures={"forward": figures})


class FakeWorkers:
    """A factory of fake workers with a fault; their times are the same in each gate."""

    def __init__(self, fault: str) -> None:
        """Start to count the pairs of processes."""
        self.fault, self.number = fault, itertools.count()

    @contextmanager
    def __call__(self, orders: Mapping[Arm, Orders]) -> Iterator[dict[Arm, WorkerProcess]]:
        """Start a worker for each arm."""
        program = self.fault, str(next(self.number))
        yield {arm: FakeWorker(arm, one, Path(os.devnull), program) for arm, one in orders.items()}
