"""Studies of the harness that nobody took, for tests of their figures and pages, and a clock to take one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import msgspec

from esbench.measure.accuracy.kernels import Kernel
from esbench.measure.accuracy.timers import Timer
from esbench.measure.timers import Visit
from esbench.schema import Environment
from esbench.studies.timer_accuracy import SCHEMA, Missing, Question, Reading, Study
from esbench.studies.timer_accuracy_run import Pace, Plan

HERE = Environment(
    device="cpu",
    device_name="Some CPU",
    cpu="Some CPU",
    threads=2,
    memory_bytes=1,
    platform="p",
    python="3.11",
    torch="2.13",
    esbench="0.1",
    load=0.5,
)


TORCH, BY_CALL = "torch.utils.benchmark", "torch.utils.benchmark, call by call"


ROUNDS = 10


def reading(
    question: Question, kernel: str, arm: str, rounds: Sequence[Sequence[float]], **fields: Any
) -> Reading:
    """Make a reading from microseconds."""
    samples = tuple(tuple(1e3 * sample for sample in samples) for samples in rounds)
    return Reading(question=question, kernel=kernel, arm=arm, samples=samples, **fields)


def study_of(*readings: Reading, missing: tuple[Missing, ...] = (), number: int = 0, **fields: Any) -> Study:
    """Make a study of readings."""
    return Study(
        schema=SCHEMA,
        study_id=f"study-{number}",
        started="2026-11-21T00:00:00+00:00",
        seed=0,
        wall_s=100.0,
        environment=msgspec.structs.replace(HERE, **fields),
        load_after=1.5,
        readings=readings,
        missing=missing,
    )


WHOLE = study_of(
    reading("agreement", "a | b", "esbench", [[200, 202, 198]] * ROUNDS),
    reading("agreement", "a | b", TORCH, [[200.5, 200]] * ROUNDS),
    reading("twins", "add", "first name", [[10, 11]] * ROUNDS, places=(0, 1) * 5),
    reading("twins", "add", "second name", [[10, 11]] * ROUNDS, places=(1, 0) * 5),
    reading("sequence", "add", "first name", [[10, 11]] * ROUNDS),
    reading("sequence", "add", "second name", [[12, 13]] * ROUNDS),
    reading("length", "wait", "esbench", [[1000.5]] * ROUNDS, expected_ns=1e6),
    reading("replicates", "add", "process 1", [[10]] * ROUNDS),
    reading("replicates", "add", "process 2", [[10.01]] * ROUNDS),
    missing=(Missing(question="sampler", arm="sampled", reason="no GPU"),),
)


class FakeClock:
    """A clock that kernels move, and that reads so many times what passed."""

    method = "fake"
    warm_up_s = (0.0, 0.0)

    def __init__(self) -> None:
        """Start at zero."""
        self.now_s = 0.0

    def seconds(self) -> float:
        """Return the time."""
        return self.now_s

    def prepare(self, call: Callable[[], object], turns: int) -> Callable[[], object]:  # noqa: ARG002  # a clock's signature
        """Return the call as it is."""
        return call

    def visit(self, call: Callable[[], object], calls: int) -> Visit:
        """Return what the calls took."""
        return Visit({"latency_ns": tuple(self.read(call, calls))})

    def read(self, call: Callable[[], object], calls: int, share: float = 1.0) -> Iterator[float]:
        """Yield so many times what each call took."""
        for _ in range(calls):
            start_s = self.now_s
            call()
            yield (self.now_s - start_s) * 1e9 * share

    def kernel(self, name: str, cost_s: float, expected_ns: float | None = None) -> Kernel:
        """Return a call that takes so long."""

        def call() -> None:
            self.now_s += cost_s

        return Kernel(name, call, expected_ns)


def fake_plan(clock: FakeClock) -> Plan:
    """Plan a study of two kernels and two rounds without a process."""
    biased = Timer(BY_CALL, lambda call, calls: tuple(clock.read(call, calls, 1.05)))
    broken = Timer("broken", Mock(side_effect=RuntimeError("no driver")))
    return Plan(
        clock=clock,
        kernels=[clock.kernel("short", 1e-4), clock.kernel("long", 1e-3)],
        waits=[clock.kernel("wait", 1e-3, 1e6)],
        timers=[biased, broken],
        reasons={"cuda-bench": "not installed"},
        unsampled="no GPU",
        pace=Pace(sittings=1, rounds=2, processes=0),
    )
