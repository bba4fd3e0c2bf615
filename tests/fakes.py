"""A fake clock, memory and variants for tests of the measuring loop."""

import dataclasses
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from esbench.measure.instruments import Instruments
from esbench.measure.memory import Footprint
from esbench.measure.profiler import Trace
from esbench.measure.timers import Call, Visit, keep_inputs
from esbench.registry import Entry
from esbench.schema import Case, Mode, Phase, Variant, Work
from esbench.workload import build

FEWEST_ROUNDS = 6
"""The rounds of a call without noise: with fewer there is no interval of a median."""

CASE = Case(operator="Linear", out_channels=4, in_channels=4, members=8)


class FakeClock:
    """A clock that only moves when a fake variant is called."""

    method = "fake"

    def __init__(self, warm_up_s: tuple[float, float] = (0.0, 0.0), jitter: float = 0.0) -> None:
        self.warm_up_s = warm_up_s
        self.now_s = 0.0
        self._jitter = jitter
        self._rng = random.Random(0)  # noqa: S311  # noise, not a secret

    def seconds(self) -> float:
        """Return the time."""
        return self.now_s

    def prepare(self, call: Call, turns: int) -> Call:  # noqa: ARG002  # the signature of a clock
        """Return the call unchanged."""
        return call

    def visit(self, call: Call, calls: int, renew: Call = keep_inputs) -> Visit:
        """Return the times of the calls by this clock."""
        samples = []
        for _ in range(calls):
            renew()
            start_s = self.now_s
            call()
            samples.append((self.now_s - start_s) * 1e9 * self._rng.uniform(1, 1 + self._jitter))
        return Visit({"latency_ns": tuple(samples)})


class World:
    """A clock, a memory of a number of bytes, and a log of the variants called."""

    def __init__(self, room_bytes: int = 1000, jitter: float = 0.0) -> None:
        self.clock = FakeClock(jitter=jitter)
        self.room_bytes = room_bytes
        self.resident: weakref.WeakSet[FakeWorkload] = weakref.WeakSet()
        self.log: list[str] = []

    @property
    def tools(self) -> Instruments:
        """Return instruments that read this world."""
        return Instruments(clocks=(self.clock,), footprint=self.footprint, trace=self.trace)

    def footprint(self, call: Call) -> Footprint:
        """Call once, as the real instrument does."""
        call()
        return Footprint(peak_bytes=10**6, kept_bytes=0, reserved_bytes=None, process_bytes=None)

    def trace(self, call: Call) -> Trace:
        """Call once, as the real instrument does."""
        call()
        return Trace(launches=3, waits=(), other_streams=())

    def allocate(self, more_bytes: int) -> None:
        """Allocate bytes, or raise like torch's CPU allocator if there are not enough."""
        if sum(workload.held_bytes for workload in self.resident) + more_bytes > self.room_bytes:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                f"you tried to allocate {more_bytes} bytes. Error code 12 (Cannot allocate memory)"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class FakeScheme:
    """A variant with given costs in time and memory, which runs ``act`` in each call.

    ``act`` gets the phase, the number of the call of this workload, and its number since the phase was
    entered, from 1.
    """

    name: str
    world: World
    cost_s: float = 0.01
    built_bytes: int = 10
    bytes_per_member: int = 0
    entered_bytes: int = 0
    call_bytes: int = 0
    phases: tuple[Phase, ...] = ("sample", "forward")
    act: Callable[[Phase, int, int], object] = lambda phase, number, turn: torch.full((2,), float(turn))  # noqa: ARG005  # the names say what comes
    inputs: Sequence[torch.Tensor] = (torch.ones(1), torch.ones(1))
    confirms: bool = True
    check: Callable[[Case], None] = lambda case: None  # noqa: ARG005  # the name says what comes

    def entry(self, mode: Mode = "batched") -> Entry:
        """Return the entry that a registry would hold, without registering it."""
        variant = Variant(scheme=self.name, mode=mode, baseline=mode != "batched")
        return Entry(variant=variant, scheme=self, source="", package="tests")


class FakeWorkload:
    """A fake scheme set up on a case; it has no quality metrics."""

    def __init__(self, scheme: FakeScheme, case: Case) -> None:
        self.built_bytes = scheme.built_bytes + scheme.bytes_per_member * case.members
        scheme.world.allocate(self.built_bytes)
        self.scheme = scheme
        self.case = case
        self.held_bytes = self.built_bytes
        self.calls = self.turn = 0
        self.inputs = scheme.inputs
        scheme.world.resident.add(self)

    @property
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        """Return the calls, each of which advances the clock."""
        return {phase: partial(self._call, phase) for phase in self.scheme.phases}

    @property
    def unavailable(self) -> Mapping[Phase, str]:
        """Return a reason for the update only."""
        return {"update": "it learns nothing"}

    @property
    def noise_bytes(self) -> int:
        """Return the bytes that the workload holds."""
        return self.held_bytes

    def work(self, _: Phase) -> Work | None:
        """Return the same work for each phase."""
        return Work(flops=8.0, moved_bytes=16.0, output_bytes=8.0)

    def enter(self, phase: Phase) -> None:
        """Allocate the bytes of a forward, free those of other phases, and start with the first inputs."""
        self.turn = 0
        self.held_bytes = self.built_bytes
        if phase == "forward":
            self.scheme.world.allocate(self.scheme.entered_bytes)
            self.held_bytes += self.scheme.entered_bytes

    def verify(self) -> None:
        """Run the check of the scheme."""
        self.scheme.check(self.case)

    def confirm(self, _: Phase) -> None:
        """Write new inputs and accept the results: a fake scheme has no reference."""
        if self.scheme.confirms:
            for buffer in self.inputs:
                buffer.add_(1)

    def _call(self, phase: Phase) -> object:
        self.calls += 1
        self.turn += 1
        self.scheme.world.allocate(self.scheme.call_bytes)
        self.scheme.world.log.append(self.scheme.name)
        self.scheme.world.clock.now_s += self.scheme.cost_s
        return self.scheme.act(phase, self.calls, self.turn)


@build.register
def _(scheme: FakeScheme, case: Case, device: str, seed: int) -> Any:  # noqa: ARG001  # the signature of build
    return FakeWorkload(scheme, case)


def raising(error: BaseException, after: int = 0) -> Callable[[Phase, int, int], object]:
    """Return an action that raises from a given call on."""

    def act(_: Phase, number: int, turn: int) -> object:
        if number > after:
            raise error
        return torch.full((2,), float(turn))

    return act
