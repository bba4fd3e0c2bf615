"""The CUDA operations that the clocks use: streams, events, graphs and flushing the cache."""

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns as _now_ns
from typing import Any

import torch
from torch.cuda import CUDAGraph
from torch.cuda import empty_cache as _empty_cache
from torch.cuda import memory_stats_as_nested_dict as _statistics
from torch.cuda import synchronize as _synchronize

Call = Callable[[], object]
Event = Any
"""An event of a device; the clocks only pass it on."""

_event: Callable[[], Event] = partial(torch.cuda.Event, enable_timing=True)
_record: Callable[[Event], None] = torch.cuda.Event.record
_done: Callable[[Event], bool] = torch.cuda.Event.query
_elapsed_ms: Callable[[Event, Event], float] = torch.cuda.Event.elapsed_time
_overwrite = torch.Tensor.zero_
_sum = torch.sum
_spin: Callable[[int], None] = torch.cuda._sleep  # noqa: SLF001  # the only kernel of a chosen duration
_end_allocating: Callable[[int, Any], None] = torch._C._cuda_endAllocateToPool  # noqa: SLF001  # no public function does it
_release_pool: Callable[[int, Any], None] = torch._C._cuda_releasePool  # noqa: SLF001  # the same

FASTEST_KHZ = 3_000_000
"""A clock rate that no GPU exceeds."""

PAUSE_S = 0.1
"""After a longer pause the device counts as idle."""

_ROW_BYTES = 4096
_ROW_FLOATS = _ROW_BYTES // 4
"""The size of a row of a cache buffer: torch sums many short rows in one pass, without allocating memory."""


class Streak:
    """The time for which a device has been busy without a pause: its clock rates settle during it."""

    def __init__(self) -> None:
        self._since_s = self._until_s = -math.inf

    def extend(self, start_s: float, end_s: float) -> None:
        """Add a period in which the device was busy."""
        if start_s - self._until_s > PAUSE_S:
            self._since_s = start_s
        self._until_s = end_s

    def seconds(self, now_s: float) -> float:
        """Return the seconds for which the device has been busy."""
        return self._until_s - self._since_s if now_s - self._until_s <= PAUSE_S else 0.0


class CacheBuffer:
    """A buffer larger than a cache: writing or reading all of it evicts everything else.

    After writing, the cache is full of dirty lines, which have to be written back to memory when they are
    replaced: the next call would wait for that, and its cold time would be too long. So the buffer is read
    as well, which leaves clean lines. Neither method allocates memory.

    Args:
        min_bytes: the size of the buffer; it is rounded up.
        device: the device of the buffer.
    """

    def __init__(self, min_bytes: int, device: str) -> None:
        rows = math.ceil(min_bytes / _ROW_BYTES)
        self.rows = torch.empty(rows, _ROW_FLOATS, device=device)  # float32
        self.sums = torch.empty(rows, device=device)
        self.write()

    def write(self) -> None:
        """Queue a kernel that zeroes the buffer: every line of the cache is dirty afterwards."""
        _overwrite(self.rows)

    def read(self) -> None:
        """Queue a kernel that reads the buffer: every line of the cache is clean afterwards."""
        _sum(self.rows, dim=1, out=self.sums)


class Cuda:
    """The operations of the current CUDA device that clocks need; work is queued on the current stream."""

    def __init__(self) -> None:
        self._index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(self._index)
        # The highest clock rate, so that spin() is never too short. Some builds of torch do not report it.
        self._cycles_per_ns = getattr(properties, "clock_rate", FASTEST_KHZ) / 1e6
        self.cache = CacheBuffer(2 * properties.L2_cache_size, "cuda")
        # One stream for all captures, because cuBLAS allocates a workspace for each stream.
        self._side = torch.cuda.Stream()
        self._failed_graphs: list[CUDAGraph] = []

    def now_ns(self) -> int:
        """Return the host's time in nanoseconds."""
        return _now_ns()

    def event(self) -> Event:
        """Return a new event, which may be recorded repeatedly."""
        return _event()

    def record(self, event: Event) -> None:
        """Queue the event, which takes the device's time when all earlier work is done."""
        _record(event)

    def done(self, event: Event) -> bool:
        """Return, without waiting, whether a recorded event is complete."""
        return _done(event)

    def elapsed_ns(self, start: Event, end: Event) -> int:
        """Return the device's time between two completed events, in whole nanoseconds."""
        return round(_elapsed_ms(start, end) * 1e6)

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        _synchronize()

    def spin(self, ns: float) -> None:
        """Queue a kernel of one thread that keeps the stream busy for at least ``ns`` nanoseconds."""
        _spin(math.ceil(ns * self._cycles_per_ns))

    def flush(self) -> None:
        """Queue kernels that fill the L2 cache with clean lines of a buffer."""
        self.cache.write()
        self.cache.read()

    def reserved_bytes(self) -> int:
        """Return the bytes of device memory that torch's allocator has reserved."""
        return int(_statistics(self._index)["reserved_bytes"]["all"]["current"])

    def capture(self, call: Call, turns: int) -> Sequence[Call]:
        """Make ``turns`` calls to warm up, then capture ``turns`` calls, each in a graph; return the replays.

        A replay returns the result of its call. The graphs share a memory pool, so the next replay of any of
        them overwrites that result.

        The current stream is captured; the default stream cannot be captured, so a side stream replaces it.
        Work of other threads (NVML, a progress display) is not captured and cannot break a capture.

        Raises:
            Exception: any error of the call or of CUDA. The device is usable afterwards.
        """
        current = torch.cuda.current_stream()
        stream = self._side if current == torch.cuda.default_stream() else current
        pool = torch.cuda.graph_pool_handle()
        _synchronize()
        with torch.cuda.stream(stream):
            for _ in range(turns):
                call()
            _synchronize()
            _empty_cache()  # a capture cannot reuse the cached memory of other pools
            try:
                replays = [self._capture_once(call, pool) for _ in range(turns)]
            finally:
                _synchronize()
        return replays

    def _capture_once(self, call: Call, pool: Any) -> Call:  # noqa: ANN401  # torch has no type for a pool
        """Capture a call in a graph whose memory is from a pool; return the function that replays it."""
        graph = CUDAGraph()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = call()
            except BaseException:  # after any error the capture has to be ended
                with contextlib.suppress(RuntimeError):  # the error of the call is raised instead
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:  # after any error the allocator has to be restored
            self._restore_allocator(graph, pool)
            raise

        def replay() -> object:
            graph.replay()
            return outputs

        return replay

    def _restore_allocator(self, graph: CUDAGraph, pool: Any) -> None:  # noqa: ANN401  # the same
        """Restore torch's allocator and default generator after a failed capture.

        If CUDA refuses to end a capture, torch keeps allocating in its pool, and ``empty_cache`` returns no
        memory. It also regards the default generator as captured until a capture that draws succeeds.
        """
        graph.reset()
        self._failed_graphs.append(graph)  # never freed: the allocator may refer to it
        with contextlib.suppress(RuntimeError):  # raised if torch has ended the allocation in the pool itself
            _end_allocating(self._index, pool)
            _release_pool(self._index, pool)
        _synchronize()
        random_graph = CUDAGraph()
        random_graph.capture_begin(capture_error_mode="thread_local")
        self.cache.rows[:1].random_()
        random_graph.capture_end()
