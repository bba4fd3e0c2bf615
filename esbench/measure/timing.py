"""Clocks: how long one call takes, in nanoseconds, every sample kept.

A clock is told how often to call and returns one number for each call. What a call returns is
dropped before the clock is read, as it is in a loop; freeing the result is part of the cost.
The functions that read time are bound when this module is imported, so that nothing loaded
later can put another clock under a measurement.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import linear_regression, median
from time import perf_counter_ns as _host_ns
from typing import Protocol

import torch
from torch.cuda import synchronize as _synchronize

_event: Callable[[], torch.cuda.Event] = partial(torch.cuda.Event, enable_timing=True)
_record = torch.cuda.Event.record
_elapsed_ms = torch.cuda.Event.elapsed_time

Call = Callable[[], object]

VISIT_NS = 2e6
"""A visit lasts at least this long, so that switching between variants does not fill it."""
MOST_CALLS = 64
"""A visit has at most so many calls: every sample is stored."""
FLAT = 0.002
"""Warm is when block medians change by less than this share from one block to the next."""
BLOCKS = 5
"""Over so many blocks the slope is taken."""


class Clock(Protocol):
    """What times a call. A fake of it drives the loop in tests."""

    @property
    def method(self) -> str:
        """The name of the method, part of a row's key."""

    @property
    def warm_up_s(self) -> tuple[float, float]:
        """The least and the most seconds that a call is warmed up."""

    def seconds(self) -> float:
        """Seconds since some moment, for budgets."""

    def visit(self, call: Call, calls: int) -> tuple[float, ...]:
        """Call so many times in a row; return the nanoseconds of each."""


class HostClock:
    """The host's clock around each call: right where a call returns when its work is done."""

    method = "host"
    warm_up_s = (0.0, 0.1)

    def seconds(self) -> float:
        """Seconds since some moment."""
        return _host_ns() / 1e9

    def visit(self, call: Call, calls: int) -> tuple[float, ...]:
        """Return the nanoseconds of each of so many calls in a row."""
        samples = []
        for _ in range(calls):
            start = _host_ns()
            call()
            samples.append(float(_host_ns() - start))
        return tuple(samples)


class CudaClock:
    """CUDA events around each call on the current stream, with a cold L2 cache.

    Before each call a buffer of twice the L2 size that the device reports is overwritten, outside
    the events. The host's time to launch the call is in the number where the call is shorter.
    """

    method = "eager"
    warm_up_s = (0.3, 3.0)

    def __init__(self) -> None:
        """Hold the buffer that flushes the cache."""
        size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.flush_bytes = 2 * size
        self._flush = torch.empty(self.flush_bytes, dtype=torch.uint8, device="cuda")

    def seconds(self) -> float:
        """Seconds since some moment, by the host's clock."""
        return _host_ns() / 1e9

    def visit(self, call: Call, calls: int) -> tuple[float, ...]:
        """Return the nanoseconds of each of so many calls in a row."""
        pairs = [(_event(), _event()) for _ in range(calls)]
        _synchronize()
        for start, end in pairs:
            self._flush.zero_()
            _record(start)
            call()
            _record(end)
        _synchronize()
        return tuple(_elapsed_ms(start, end) * 1e6 for start, end in pairs)


def clock(device: str) -> Clock:
    """Return the clock for a device."""
    return CudaClock() if device == "cuda" else HostClock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Python's garbage collector out of what is measured inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Warm:
    """A call that has been warmed up: nanoseconds it took at the end, and how it got there.

    ``calls`` is how many a visit holds. ``slow`` says that one call alone took longer than the
    budget; it has been called once and is not called again.
    """

    call_ns: float
    calls: int
    slow: bool = False


def warm_up(call: Call, clock: Clock, budget_s: float) -> Warm:
    """Call until block medians are flat, within the clock's bounds and the budget in seconds."""
    least_s, most_s = clock.warm_up_s
    most_s = min(most_s, max(least_s, budget_s))
    start_s = clock.seconds()
    (first_ns,) = clock.visit(call, 1)
    if first_ns > budget_s * 1e9:
        return Warm(first_ns, calls=1, slow=True)
    blocks = [first_ns]
    while (spent_s := clock.seconds() - start_s) < most_s and not (spent_s >= least_s and _flat(blocks)):
        blocks.append(median(clock.visit(call, calls_per_visit(blocks[-1]))))
    return Warm(blocks[-1], calls_per_visit(blocks[-1]))


def calls_per_visit(call_ns: float) -> int:
    """Return how many calls of so many nanoseconds fill a visit."""
    return max(1, min(MOST_CALLS, math.ceil(VISIT_NS / max(call_ns, 1.0))))


def _flat(blocks: list[float]) -> bool:
    recent = blocks[-BLOCKS:]
    if len(recent) < BLOCKS:
        return False
    slope = linear_regression(range(BLOCKS), recent).slope
    return abs(slope) <= FLAT * median(recent)
