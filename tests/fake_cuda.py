"""A fake CUDA device with a timeline for the host and one for each stream.

Work is queued after the work that its stream already has. The host continues at once, unless the queue is
full; it waits only in ``synchronize``. An event has the time at which its stream reaches it.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from esbench.measure.cuda import Call, Cuda

QUEUE = 1024
"""Launches that fit into a stream's queue; with one more the host waits."""


FLUSH_NS = 30_000.0

SPIN_STRETCH = 1.2
"""The actual over the requested length of a spinning kernel, as when the clock is below its highest."""


class CaptureError(RuntimeError):
    """The error raised where CUDA would refuse to capture."""


@dataclass
class FakeEvent:
    """An event; ``at_ns`` is the device's time when it reached the event, infinite before it is recorded."""

    at_ns: float = float("inf")


@dataclass
class FakeCuda(Cuda):
    """A fake device for the CUDA clocks.

    ``verb_ns`` is the host's time for each operation other than a launch. ``backwards_ns`` sets the device's
    clock back between two events. ``refuses`` is the error of each capture.
    """

    host_ns: float = 0.0
    verb_ns: float = 2_000.0
    backwards_ns: float = 0.0
    refuses: str = ""
    reserved: int = 0
    flushes: int = 0
    replayed: list[int] = field(default_factory=list)
    spins: list[float] = field(default_factory=list)
    cold: bool = True
    _ends: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _waiting: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))
    _captured: list[tuple[float, float, str]] | None = None

    def launch(
        self, device_ns: float, stream: str = "current", *, launch_ns: float = 5_000.0, cold_ns: float = 0.0
    ) -> None:
        """Queue a kernel of ``device_ns``, plus ``cold_ns`` with a cold cache; issuing it takes host time."""
        if self._captured is not None:
            self._captured.append((device_ns, cold_ns, stream))
            return
        self.host_ns += launch_ns
        self._queue(device_ns + cold_ns * self.cold, stream)
        self.cold = False

    @override
    def now_ns(self) -> int:
        return round(self.host_ns)

    @override
    def event(self) -> FakeEvent:
        return FakeEvent()

    @override
    def record(self, event: FakeEvent) -> None:
        self.host_ns += self.verb_ns
        event.at_ns = self._queue(0.0, "current")

    @override
    def done(self, event: FakeEvent) -> bool:
        return event.at_ns <= self.host_ns

    @override
    def elapsed_ns(self, start: FakeEvent, end: FakeEvent) -> int:
        assert self.done(start)
        assert self.done(end)
        return round(end.at_ns - start.at_ns - self.backwards_ns)

    @override
    def synchronize(self) -> None:
        if self._captured is not None:
            raise CaptureError(
                "operation not permitted when stream is capturing\nSearch for it in the manual."
            )
        self.host_ns = max([self.host_ns + self.verb_ns, *self._ends.values()])

    @override
    def spin(self, ns: float) -> None:
        self.spins.append(ns)
        self.host_ns += self.verb_ns
        self._queue(ns * SPIN_STRETCH, "current")

    @override
    def flush(self) -> None:
        self.host_ns += self.verb_ns
        self._queue(FLUSH_NS, "current")
        self.flushes += 1
        self.cold = True

    @override
    def reserved_bytes(self) -> int:
        return self.reserved

    @override
    def capture(self, call: Call, turns: int) -> Sequence[Call]:
        for _ in range(turns):
            call()
        return [self._replay_of(call, number) for number in range(turns)]

    def _replay_of(self, call: Call, number: int) -> Call:
        """Capture a call; a replay is one launch."""
        if self.refuses:
            raise CaptureError(self.refuses)
        kernels: list[tuple[float, float, str]] = []
        self._captured = kernels
        try:
            outputs = call()
        finally:
            self._captured = None

        def replay() -> object:
            self.replayed.append(number)
            self.host_ns += self.verb_ns
            for device_ns, cold_ns, stream in kernels:
                self._queue(device_ns + cold_ns * self.cold, stream)
                self.cold = False
            return outputs

        return replay

    def _queue(self, device_ns: float, stream: str) -> float:
        waiting = self._waiting[stream]
        while waiting and waiting[0] <= self.host_ns:
            waiting.popleft()
        if len(waiting) >= QUEUE:
            self.host_ns = waiting.popleft()
        end_ns = max(self.host_ns, self._ends[stream]) + device_ns
        self._ends[stream] = end_ns
        waiting.append(end_ns)
        return end_ns
