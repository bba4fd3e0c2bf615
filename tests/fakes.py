"""A clock, a memory and variants that nobody waits for: what drives the loop in tests."""

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from functools import partial

import torch

from esbench.measure.instruments import Instruments
from esbench.measure.timing import Call
from esbench.records import Case, Mode, Phase, Variant
from esbench.registry import Entry, build

CASE = Case(operator="Linear", out_channels=4, in_channels=4, members=8)


class FakeClock:
    """A clock that only moves when a fake variant is called."""

    method = "fake"

    def __init__(self, warm_up_s: tuple[float, float] = (0.0, 0.0)) -> None:
        """Start at zero, without a warm-up unless one is asked for."""
        self.warm_up_s = warm_up_s
        self.now_s = 0.0

    def seconds(self) -> float:
        """Return the time."""
        return self.now_s

    def visit(self, call: Call, calls: int) -> tuple[float, ...]:
        """Return what the calls took by this clock."""
        samples = []
        for _ in range(calls):
            start_s = self.now_s
            call()
            samples.append((self.now_s - start_s) * 1e9)
        return tuple(samples)


class World:
    """A clock, a memory of so many bytes, and the names of variants in the order of their calls."""

    def __init__(self, room_bytes: int = 1000) -> None:
        """Start with nothing in memory."""
        self.clock = FakeClock()
        self.room_bytes = room_bytes
        self.resident: weakref.WeakSet[FakeWorkload] = weakref.WeakSet()
        self.log: list[str] = []

    @property
    def tools(self) -> Instruments:
        """Instruments that read this world."""
        return Instruments(clock=self.clock, peak_bytes=self.peak_bytes)

    def peak_bytes(self, call: Call) -> int:
        """Call once, as the real instrument does."""
        call()
        return 7

    def take(self, more_bytes: int) -> None:
        """Fail as torch's CPU allocator does where memory does not suffice."""
        if sum(workload.held_bytes for workload in self.resident) + more_bytes > self.room_bytes:
            message = (
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                f"you tried to allocate {more_bytes} bytes. Error code 12 (Cannot allocate memory)"
            )
            raise RuntimeError(message)


@dataclasses.dataclass(frozen=True, eq=False)
class FakeScheme:
    """A variant that takes so long and so much, and does ``act`` in each call.

    ``act`` gets the phase and the number of the call of this workload, from 1.
    """

    name: str
    world: World
    cost_s: float = 0.01
    built_bytes: int = 10
    entered_bytes: int = 0
    call_bytes: int = 0
    phases: tuple[Phase, ...] = ("sample", "forward")
    act: Callable[[Phase, int], object] = lambda phase, number: torch.ones(2)  # noqa: ARG005  # the names say what comes
    check: Callable[[Case], None] = lambda case: None  # noqa: ARG005  # the name says what comes

    def entry(self, mode: Mode = "batched") -> Entry:
        """Register nothing; return the entry a registry would hold."""
        variant = Variant(scheme=self.name, mode=mode, baseline=mode != "batched")
        return Entry(variant=variant, scheme=self, source="", package="tests")


class FakeWorkload:
    """A fake scheme set up on a case."""

    def __init__(self, scheme: FakeScheme, case: Case) -> None:
        """Take the scheme's memory."""
        scheme.world.take(scheme.built_bytes)
        self.scheme = scheme
        self.case = case
        self.held_bytes = scheme.built_bytes
        self.calls = 0
        scheme.world.resident.add(self)

    @property
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        """The calls, each of which moves the clock."""
        return {phase: partial(self._call, phase) for phase in self.scheme.phases}

    @property
    def unavailable(self) -> Mapping[Phase, str]:
        """A reason for the update alone."""
        return {"update": "it learns nothing"}

    @property
    def noise_bytes(self) -> int:
        """What the workload holds."""
        return self.held_bytes

    def enter(self, phase: Phase) -> None:
        """Hold what a forward needs, and only then."""
        self.held_bytes = self.scheme.built_bytes
        if phase == "forward":
            self.scheme.world.take(self.scheme.entered_bytes)
            self.held_bytes += self.scheme.entered_bytes

    def verify(self) -> None:
        """Do what the scheme says."""
        self.scheme.check(self.case)

    def _call(self, phase: Phase) -> object:
        self.calls += 1
        self.scheme.world.take(self.scheme.call_bytes)
        self.scheme.world.log.append(self.scheme.name)
        self.scheme.world.clock.now_s += self.scheme.cost_s
        return self.scheme.act(phase, self.calls)


@build.register
def _(scheme: FakeScheme, case: Case, device: str, seed: int) -> FakeWorkload:  # noqa: ARG001  # the signature of build
    return FakeWorkload(scheme, case)
