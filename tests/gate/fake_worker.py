"""Fake workers without process, torch or clock, which have a planted fault, most often in head."""

import random
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from esbench.errors import UserError
from esbench.gate.gate import Gate
from esbench.gate.records import (
    ARMS,
    MORE,
    SAME,
    Arm,
    Begin,
    End,
    Hello,
    Message,
    Orders,
    Replicate,
    Revision,
    Surveyed,
    split_method,
)
from esbench.gate.worker_process import WorkerError
from tests import synthetic
from tests.gate.gate_cases import cell

CALL_NS = 1e6
SET_UP, ROUND, NOISY = 0.003, 0.003, 0.5
"""Relative standard deviations between set-ups, between rounds, and between set-ups if noisy."""
NAMES = ("Able", "Baker", "Charlie", "Dog")
VICTIM = NAMES[1]
"""The variant that has the fault."""
UNTIMED = "Echo"
"""A variant of the suite whose times the gate does not compare."""
COUNTS = {"peak_bytes": 1000.0, "noise_bytes": 100.0, "launches": 7.0, "graphs": 1.0}


def fake_workers(fault: str = "none") -> Callable[[Sequence[Orders], Path], Generator[tuple[int, Message]]]:
    """Return a function that starts fake workers; test_planted_faults.py explains each fault."""

    def start(orders: Sequence[Orders], folder: Path) -> Generator[tuple[int, Message]]:
        assert folder
        for number, order in enumerate(orders):
            for message in timings(fault, order) if order.replicates else survey(fault, order):
                yield number, message
            yield number, End()

    return start


def survey(fault: str, orders: Orders) -> Generator[Message]:
    """Yield the rows of this worker's share of the cells in both arms."""
    if fault == "unloadable":
        raise WorkerError("head cannot be loaded after base, in the same process: it is there already")
    if fault == "empty":
        raise WorkerError(str(UserError("no suite of that name")))
    cells = tuple(map(cell, (*NAMES, UNTIMED)))
    yield Hello(cells, cells[: len(NAMES)])
    for row in cells[orders.process :: orders.processes]:
        yield Begin(row.name, 0, 1)
        for arm in ARMS:
            is_victim = arm == "head" and row.variant.scheme in {VICTIM, UNTIMED}
            counts = {name: count + (fault == name and is_victim) for name, count in COUNTS.items()}
            if (fault == "missing" and is_victim) or (fault == "new" and arm == "base"):
                yield Surveyed(row, arm, "absent", reason="no such variant")
            elif fault == "wrong" and is_victim:
                yield Surveyed(row, arm, "failed", reason="wrong result: forward is off by 1")
            else:
                yield Surveyed(row, arm, "ok", counts)


def timings(fault: str, orders: Orders) -> Generator[Message]:
    """Yield replicates, unless the worker dies."""
    rng = random.Random(f"{fault} {orders.look} {orders.process}")  # noqa: S311  # noise, not a secret
    if fault == "dies" and orders.look == 0 and orders.process == 1:
        raise WorkerError("the worker ended with signal 9")
    for _ in range(orders.replicates):
        for name in orders.names:
            yield replicate(rng, fault, orders, name)


def replicate(rng: random.Random, fault: str, orders: Orders, name: str) -> Replicate:
    """Return a replicate; its head is slower if that is the fault."""
    control, _ = split_method(name)
    is_victim = name.startswith(VICTIM)
    slowdown = {"slower": 0.02 * is_victim, "unclear": 0.01 * is_victim, "everywhere": 0.012}.get(fault, 0.0)
    if control in {SAME, MORE}:
        is_seen = control == MORE and fault != "deaf"
        slowdown = 0.02 * is_seen + {"biased": 0.03, "fast": -0.03}.get(fault, 0.0) * (control == SAME)
    is_unclear = fault == "unclear" and is_victim
    slowdown += rng.gauss(0, NOISY if fault == "noisy" else NOISY / 5 if is_unclear else SET_UP)

    def visits(arm: Arm) -> tuple[tuple[float, ...], ...]:
        call_ns = CALL_NS * max(0.01, 1 + slowdown * (arm == "head"))
        calls = [[abs(call_ns * (1 + rng.gauss(0, ROUND)))] * 3 for _ in range(8)]
        if fault == "sometimes" and is_victim and arm == "head":  # a tenth of the calls
            calls = [[ns * (1.3 if rng.random() < 0.1 else 1) for ns in visit] for visit in calls]
        return tuple(map(tuple, calls))

    return Replicate(orders.look, orders.process, name, ARMS * 2, visits("base"), visits("head"))


def fake_gate(folder: Path, fault: str = "none") -> Gate:
    """Return a gate on fake workers, whose revisions would be in a folder."""
    return Gate(
        orders=Orders(roots={arm: str(folder / arm) for arm in ARMS}, device="cpu", suite="gate"),
        revisions={arm: Revision(asked=arm, commit="0" * 40) for arm in ARMS},
        environment=synthetic.environment(),
        cores=(None, None),
        start=fake_workers(fault),
    )
