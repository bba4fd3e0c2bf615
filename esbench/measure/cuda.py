"""The CUDA operations that the clocks use: streams, events, graphs and flushing the cache.

torch's functions are bound at import: a variant cannot replace them later.
"""

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
"""An event of a device, opaque to the clocks."""

_event: Callable[[], Event] = partial(torch.cuda.Event, enable_timing=True)
_record: Callable[[Event], None] = torch.cuda.Event.record
_done: Callable[[Event], bool] = torch.cuda.Event.query
_elapsed_ms: Callable[[Event, Event], float] = torch.cuda.Event.elapsed_time
_overwrite = torch.Tensor.zero_
_sum = torch.sum
_spin: Callable[[int], None] = torch.cuda._sleep  # noqa: SLF001  # the only kernel of a chosen duration
_end_allocating: Callable[[int, Any], None] = torch._C._cuda_endAllocateToPool  # noqa: SLF001  # nothing public ends a capture that broke
_release_pool: Callable[[int, Any], None] = torch._C._cuda_releasePool  # noqa: SLF001  # the same

FASTEST_KHZ = 3_000_000
"""An upper bound of GPU clocks."""

PAUSE_S = 0.1
"""After a longer pause the device counts as idle."""

_ROW_BYTES = 4096
"""Many short rows are summed in one pass, by a kernel that needs no memory besides its output."""


class Streak:
    """The time for which a device has been busy without a pause, in which its clocks settle."""

    def __init__(self) -> None:
        """Start with a device at rest."""
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

    Lines that were only written are dirty: the next call that needs their place waits until they are written
    back to memory, which makes its cold time too long. Reading the buffer afterwards leaves clean lines.
    Neither method allocates memory.

    Args:
        min_bytes: the size of the buffer; it is rounded up.
        device: the device of the buffer.

    """

    def __init__(self, min_bytes: int, device: str) -> None:
        """Allocate the buffer and zero it."""
        rows = math.ceil(min_bytes / _ROW_BYTES)
        self.rows = torch.empty(rows, _ROW_BYTES // 4, device=device)
        self.sums = torch.empty(rows, device=device)
        self.write()

    @property
    def nbytes(self) -> int:
        """The size of the buffer."""
        return self.rows.nbytes

    def write(self) -> None:
        """Queue a kernel that zeroes the buffer: every line of the cache is dirty afterwards."""
        _overwrite(self.rows)

    def read(self) -> None:
        """Queue a kernel that reads the buffer: every line of the cache is clean afterwards."""
        _sum(self.rows, dim=1, out=self.sums)


class Cuda:
    """The operations of the current CUDA device that clocks need; work is queued on the current stream."""

    def __init__(self) -> None:
        """Allocate the buffer that flushes the cache and the stream for captures."""
        self._index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(self._index)
        # The highest clock, in kHz, so that a block is never too short. Not every build of torch reports it.
        self._cycles_per_ns = getattr(properties, "clock_rate", FASTEST_KHZ) / 1e6
        self.cache = CacheBuffer(2 * properties.L2_cache_size, "cuda")
        # One stream for all captures, because cuBLAS allocates a workspace for each stream.
        self._side = torch.cuda.Stream()
        self._broken: list[CUDAGraph] = []

    def now_ns(self) -> int:
        """Return the host's clock."""
        return _now_ns()

    def event(self) -> Event:
        """Return a new event, which may be recorded repeatedly."""
        return _event()

    def record(self, event: Event) -> None:
        """Queue the event, which records the device's time when all earlier work is done."""
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
        """Queue a kernel that keeps the stream busy for at least this time: one thread that counts cycles."""
        _spin(math.ceil(ns * self._cycles_per_ns))

    def flush(self) -> None:
        """Queue kernels that fill the L2 cache with clean lines of a buffer."""
        self.cache.write()
        self.cache.read()

    def reserved_bytes(self) -> int:
        """Return the bytes of device memory that torch's allocator has reserved."""
        return int(_statistics(self._index)["reserved_bytes"]["all"]["current"])

    def capture(self, call: Call, turns: int) -> Sequence[Call]:
        """Capture ``turns`` calls in a row, each in its own graph; return their replays.

        A replay returns the result of its call, which is valid until the next replay of any of them, because
        they share a memory pool. Before the captures, the call is made ``turns`` times.

        The current stream is captured, or a side stream if that is the default stream, which cannot be
        captured. Work of other threads (NVML, a progress display) is not captured and cannot break a capture.

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
            _empty_cache()  # while capturing, the allocator cannot take back what other pools hold
            try:
                replays = [self._capture_once(call, pool) for _ in range(turns)]
            finally:
                _synchronize()
        return replays

    def _capture_once(self, call: Call, pool: Any) -> Call:  # noqa: ANN401  # torch has no type for a pool
        graph = CUDAGraph()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = call()
            except BaseException:  # a capture has to be ended after any error, which is raised again
                with contextlib.suppress(RuntimeError):  # the error of the call is raised
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:  # the pool has to be mended after any error, which is raised again
            self._mend(graph, pool)
            raise

        def replay() -> object:
            graph.replay()
            return outputs

        return replay

    def _mend(self, graph: CUDAGraph, pool: Any) -> None:  # noqa: ANN401  # the same
        """Restore the allocator and the generator after a broken capture.

        If CUDA refuses to end a capture, torch keeps allocating for it, returns no cached memory, and regards
        the default generator as captured, until another capture that draws succeeds.
        """
        graph.reset()
        self._broken.append(graph)  # the allocator may refer to it
        with contextlib.suppress(RuntimeError):  # it was not allocating any more
            _end_allocating(self._index, pool)
            _release_pool(self._index, pool)
        _synchronize()
        whole = CUDAGraph()
        whole.capture_begin(capture_error_mode="thread_local")
        self.cache.rows[:1].random_()
        whole.capture_end()
