"""Clocks: the latency of calls in nanoseconds, by the host's timer or by CUDA events.

A clock returns one number for each call. The result of a call is freed before the clock is read again, so
freeing it is part of the time.
"""

import contextlib
import gc
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns as _host_ns
from typing import Protocol

from esbench.errors import UserError
from esbench.measure import cuda
from esbench.schema import METHODS
from esbench.workload import UnavailableError

Call = cuda.Call

MIN_S, MAX_S = 0.3, 3.0
"""The bounds of a warm-up on CUDA in seconds. The clock rates of the device settle during it."""

BLOCK_MARGIN = 1.5
"""The duration of a blocking kernel as a multiple of the expected time to issue the work after it."""
FIRST_BLOCK_NS, LONGEST_BLOCK_NS = 1e6, 20e6
"""The duration of the first blocking kernel, and the longest one: calls that take longer to issue are
dispatch-bound."""


def keep_inputs() -> None:
    """Do nothing before a call, whose inputs stay as they are."""


class ClockError(Exception):
    """A clock read an impossible value."""


@dataclass(frozen=True)
class Visit:
    """The readings of one visit.

    Attributes:
        samples: metric -> nanoseconds of each call; ``latency_ns`` is always one of the metrics.
        dispatch_bound: the number of samples of ``latency_ns`` in which the device may have waited for the
            host.
        grown: whether the allocator reserved more device memory during the visit.

    Raises:
        ClockError: a sample is negative, zero or not finite.
    """

    samples: Mapping[str, tuple[float, ...]]
    dispatch_bound: int = 0
    grown: bool = False

    def __post_init__(self) -> None:
        for value in itertools.chain.from_iterable(self.samples.values()):
            if not 0 < value < math.inf:  # or NaN
                raise ClockError(
                    f"the clock measured {value:g} ns for a call: the clock is wrong or too coarse, or the "
                    "call works on another device"
                )


class Clock(Protocol):
    """The interface of a clock, which times calls."""

    @property
    def method(self) -> str:
        """The name of the timing method."""

    @property
    def warm_up_s(self) -> tuple[float, float]:
        """The least and the most seconds of a warm-up that begins now."""

    def seconds(self) -> float:
        """Return the seconds since an arbitrary moment, for budgets."""

    def prepare(self, call: Call, turns: int) -> Call:
        """Return the function to time for a call that reads ``turns`` inputs in turn.

        Raises:
            UnavailableError: the method cannot time this call; the message says why.
        """

    def visit(self, call: Call, calls: int, renew: Call = keep_inputs) -> Visit:
        """Call ``calls`` times in a row; return the nanoseconds of each call.

        ``renew`` is called before each call, and is not part of its time.
        """


class HostClock:
    """The host's timer around each call, for a CPU, on which a call returns when its work is done."""

    method = "host"
    warm_up_s = (0.0, 0.1)

    def seconds(self) -> float:
        """Return the seconds since an arbitrary moment."""
        return _host_ns() / 1e9

    def prepare(self, call: Call, turns: int) -> Call:  # noqa: ARG002  # the interface of a clock
        """Return the call unchanged."""
        return call

    def visit(self, call: Call, calls: int, renew: Call = keep_inputs) -> Visit:
        """Return the nanoseconds of each of ``calls`` calls in a row."""
        samples = []
        for _ in range(calls):
            renew()
            start = _host_ns()
            call()
            samples.append(_host_ns() - start)
        return Visit({"latency_ns": tuple(samples)})


class CudaClock:
    """CUDA events around each call on the current stream, and the host's clock around its launch.

    A visit makes the calls in three passes:

    1. ``host_latency_ns``: the host's time to issue a call to an idle device.
    2. ``warm_latency_ns``: the device's time between two events, with a warm L2 cache.
    3. ``latency_ns``: the same with a cold L2 cache: before the first event of each call, a buffer of twice
       its size is written and read.

    In passes 2 and 3, a kernel blocks the stream before the first event until the host has issued the call
    and the second event, so that the device does not wait for launches. If the first event completes before
    everything is issued, the device may have waited, and the sample counts as dispatch-bound.
    """

    def __init__(self, method: str, device: cuda.Cuda, streak: cuda.Streak) -> None:
        """Store the method, ``eager`` or ``graph``, and what all clocks of a device share."""
        self.method = method
        self._device = device
        self._streak = streak
        self._event_pairs: list[tuple[cuda.Event, cuda.Event]] = []
        # The host's time to issue what surrounds a call on the device: events and cache flush.
        self._surrounding_ns = FIRST_BLOCK_NS

    @property
    def warm_up_s(self) -> tuple[float, float]:
        """The bounds of a warm-up; the lower bound shrinks by the time for which the device has been busy."""
        return max(0.0, MIN_S - self._streak.seconds(self.seconds())), MAX_S

    def seconds(self) -> float:
        """Return the seconds since an arbitrary moment, by the host's clock."""
        return self._device.now_ns() / 1e9

    def prepare(self, call: Call, turns: int) -> Call:
        """Return the call itself; for the method ``graph``, a function that replays ``turns`` graphs in turn.

        Raises:
            UnavailableError: the call cannot be captured in a graph.
        """
        if self.method != "graph":
            return call
        try:
            with quiet():
                replays = self._device.capture(call, turns)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # any error of a variant is stored as its reason
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise UnavailableError(f"graph capture failed: {lines[0]}") from error
        in_turn = itertools.cycle(replays)

        def replay() -> object:
            return next(in_turn)()

        return replay

    def visit(self, call: Call, calls: int, renew: Call = keep_inputs) -> Visit:
        """Time ``calls`` calls in a row on the host, then on the device with a warm and with a cold cache."""
        device = self._device
        start_s = self.seconds()
        while len(self._event_pairs) < calls:
            self._event_pairs.append((device.event(), device.event()))
        reserved = device.reserved_bytes()
        host = [self._issued_ns(call, renew) for _ in range(calls)]
        block_ns = min(BLOCK_MARGIN * (median(host) + self._surrounding_ns), LONGEST_BLOCK_NS)
        warm, _ = self._device_ns(call, calls, renew, block_ns, flush=False)
        cold, dispatch_bound = self._device_ns(call, calls, renew, block_ns, flush=True)
        grown = device.reserved_bytes() > reserved
        self._streak.extend(start_s, self.seconds())
        samples = {"latency_ns": cold, "warm_latency_ns": warm, "host_latency_ns": tuple(host)}
        return Visit(samples, dispatch_bound=dispatch_bound, grown=grown)

    def _issued_ns(self, call: Call, renew: Call) -> int:
        """Return the nanoseconds in which the host issues a call to an idle device."""
        renew()
        self._device.synchronize()
        start = self._device.now_ns()
        call()
        issued_ns = self._device.now_ns() - start
        self._device.synchronize()
        return issued_ns

    def _device_ns(
        self, call: Call, calls: int, renew: Call, block_ns: float, *, flush: bool
    ) -> tuple[tuple[float, ...], int]:
        """Return the device's nanoseconds of each call, and the number of dispatch-bound calls."""
        device, dispatch_bound, surrounding_ns = self._device, 0, []
        event_pairs = self._event_pairs[:calls]
        for start, end in event_pairs:
            renew()
            device.spin(block_ns)  # long enough to issue the rest, so that the device does not wait for it
            issue_start_ns = device.now_ns()
            if flush:
                device.flush()
            device.record(start)
            call_start_ns = device.now_ns()
            call()
            call_end_ns = device.now_ns()
            device.record(end)
            dispatch_bound += device.done(start)  # then the kernel of spin() has ended too early
            issue_ns = device.now_ns() - issue_start_ns
            surrounding_ns.append(issue_ns - (call_end_ns - call_start_ns))
        device.synchronize()
        self._surrounding_ns = median(surrounding_ns)
        return tuple(device.elapsed_ns(start, end) for start, end in event_pairs), dispatch_bound


def clocks(device: str, methods: tuple[str, ...] = ()) -> tuple[Clock, ...]:
    """Return a clock for each of the methods, by default for all of the device; see :func:`check_methods`."""
    check_methods(device, methods)
    if device == "cpu":
        return (HostClock(),)
    operations, streak = cuda.Cuda(), cuda.Streak()
    return tuple(
        CudaClock(method, operations, streak) for method in dict.fromkeys(methods or METHODS[device])
    )


def check_methods(device: str, methods: Iterable[str]) -> None:
    """Raise a UserError if a device cannot be timed by one of these methods."""
    for method in methods:
        if method not in METHODS[device]:
            raise UserError(f"no method {method!r} on {device}; available: {', '.join(METHODS[device])}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable Python's garbage collector inside the context."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
