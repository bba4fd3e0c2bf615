"""A fake CUDA device: a host's timeline, and one for each stream.

Work is queued after what its stream still has to do. The host goes on at once, unless the queue is
full; it waits in ``synchronize`` alone. Events take the time at which their stream comes to them.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from esbench.measure.cuda import Call

QUEUE = 1024
"""Launches that fit into a stream's queue; at one more the host waits."""
MIB = 2**20


class CaptureError(RuntimeError):
    """What the fake raises where CUDA refuses to capture."""


@dataclass
class FakeEvent:
    """The device's time when it came to the event; forever later until it is recorded."""

    at_ns: float = float("inf")


@dataclass
class FakeCuda:
    """A device by which the clocks can be driven.

    ``spun`` is how much longer than asked a spinning kernel lasts: the device's clock is below its highest.
    ``backwards_ns`` sets the device's clock back between two events. ``refuses`` is why it captures nothing.
    """

    l2_bytes: int = 50 * MIB
    host_ns: float = 0.0
    verb_ns: float = 2_000.0
    flush_ns: float = 30_000.0
    spun: float = 1.2
    backwards_ns: float = 0.0
    refuses: str = ""
    reserved: int = 0
    flushed: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    spins: list[float] = field(default_factory=list)
    cold: bool = True
    _ends: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _waiting: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))
    _captured: list[tuple[float, float, str]] | None = None

    @property
    def flush_bytes(self) -> int:
        """Twice the cache."""
        return 2 * self.l2_bytes

    def launch(
        self,
        device_ns: float,
        stream: str = "current",
        *,
        launch_ns: float = 5_000.0,
        cold_ns: float = 0.0,
    ) -> None:
        """Queue a kernel that lasts so long, longer with a cold cache; issuing it takes the host's time."""
        if self._captured is not None:
            self._captured.append((device_ns, cold_ns, stream))
            return
        self.host_ns += launch_ns
        self._queue(device_ns + cold_ns * self.cold, stream)
        self.cold = False

    def now_ns(self) -> int:
        """Return the host's time."""
        return round(self.host_ns)

    def event(self) -> FakeEvent:
        """Make an event."""
        return FakeEvent()

    def record(self, event: FakeEvent) -> None:
        """Let the event take the time at which the stream comes to it."""
        self.host_ns += self.verb_ns
        event.at_ns = self._queue(0.0, "current")

    def done(self, event: FakeEvent) -> bool:
        """Say whether the stream has come to it."""
        return event.at_ns <= self.host_ns

    def elapsed_ns(self, start: FakeEvent, end: FakeEvent) -> float:
        """Return the time between two events, which must be done."""
        assert self.done(start)
        assert self.done(end)
        return end.at_ns - start.at_ns - self.backwards_ns

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        if self._captured is not None:
            message = "operation not permitted when stream is capturing\nSearch for it in the manual."
            raise CaptureError(message)
        self.host_ns = max([self.host_ns + self.verb_ns, *self._ends.values()])

    def spin(self, ns: float) -> None:
        """Queue a kernel that lasts at least so long."""
        self.spins.append(ns)
        self.host_ns += self.verb_ns
        self._queue(ns * self.spun, "current")

    def flush(self) -> None:
        """Queue a kernel that overwrites the cache."""
        self.host_ns += self.verb_ns
        self._queue(self.flush_ns, "current")
        self.flushed.append(self.flush_bytes)
        self.cold = True

    def reserved_bytes(self) -> int:
        """Return what was set."""
        return self.reserved

    def capture(self, call: Call, turns: int) -> Sequence[Call]:
        """Capture ``turns`` calls; a replay is one launch."""
        for _ in range(turns):
            call()
        return [self._capture_once(call, number) for number in range(turns)]

    def _capture_once(self, call: Call, number: int) -> Callable[[], object]:
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
