"""The peak memory of a call, and a limit that raises an error before the machine is full.

Bytes are counted exactly by torch's allocators: on CUDA by their running maximum, on the CPU by replaying the
profiler's allocation events. Memory that libraries allocate outside of torch is not counted. The profiler
slows allocations down, so memory is measured in a separate pass.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from esbench.errors import message_of
from esbench.measure.timers import quiet

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]  # a missing module

METHOD = "allocator"
RESERVE_BYTES = 512 * 1024**2
"""The memory left to the rest of the machine by the limit."""

MARK = "esbench.memory"
CALLS = (2, 10)
"""The numbers of calls that are replayed on the CPU: the second only if the first seems to keep bytes."""
CONTAINER = Path("/sys/fs/cgroup")
"""The folder in which Linux gives the limits of a container."""

NO_ROOM = (
    *("can't allocate memory", "not enough memory", "bad_alloc", "cannot allocate memory"),
    *("cuda error: out of memory", "cublas_status_alloc_failed"),
)
"""Parts of the messages of torch's CPU allocator, C++, CUDA and cuBLAS if memory does not suffice."""


class Footprint(NamedTuple):
    """The memory of a call.

    Attributes:
        peak_bytes: the most bytes allocated at once, above those allocated before the call.
        kept_bytes: the bytes that each call leaves allocated after its result is freed.
        reserved_bytes: the most bytes that torch's CUDA allocator held in the run; None on the CPU.
        process_bytes: all bytes of the process, on the CPU its resident set; None if unknown.

    """

    peak_bytes: int
    kept_bytes: int
    reserved_bytes: int | None
    process_bytes: int | None


def footprint(
    call: Callable[[], object], device: str, process_bytes: Callable[[], int | None] | None = None
) -> Footprint:
    """Measure the memory of a call; ``process_bytes`` reads that of the process on CUDA."""
    with quiet():
        if device == "cuda":
            peak, growth = _cuda_levels(call)
            reserved = int(torch.cuda.max_memory_reserved())
            return Footprint(peak, growth, reserved, process_bytes() if process_bytes else None)
        peak, growth = _cpu_levels(call)
        return Footprint(peak, growth, None, int(psutil.Process().memory_info().rss))


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Return the peak of the bytes that one call allocates, above those allocated before it."""
    return footprint(call, device).peak_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory did not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = message_of(error).lower()
    return isinstance(error, RuntimeError) and any(part in message for part in NO_ROOM)


@contextlib.contextmanager
def limit_memory(limit_bytes: int | None = None) -> Iterator[None]:
    """Limit the bytes that this process can still allocate on the host; further allocations raise an error.

    Without a limit the system's out-of-memory killer may end the run, or another program. The default limit
    is the available memory less a reserve. An inner context never raises the limit of an outer one. On
    systems other than Linux this does nothing.
    """
    if not can_limit():
        yield
        return
    room = available_bytes() - RESERVE_BYTES if limit_bytes is None else limit_bytes
    _start_threads()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [psutil.Process().memory_info().data + max(room, 0), soft, hard]
    limit = min(bound for bound in limits if bound != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def can_limit() -> bool:
    """Return whether this system can limit the data of a process."""
    return resource is not None and psutil.LINUX


def available_bytes() -> int:
    """Return the bytes this process may still take from the machine, or from its container."""
    available = int(psutil.virtual_memory().available)
    try:
        most, used = (
            (CONTAINER / f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current")
        )
        return min(available, int(most) - int(used))
    except (OSError, ValueError):  # no container, an older kernel, or the limit "max"
        return available


def _cuda_levels(call: Callable[[], object]) -> tuple[int, int]:
    """Return peak and kept bytes of the second of two calls: the first warms up."""
    with _collection() as collect:
        call()
        collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak = int(torch.cuda.max_memory_allocated()) - before
        collect()
        return peak, max(int(torch.cuda.memory_allocated()) - before, 0)


def _cpu_levels(call: Callable[[], object]) -> tuple[int, int]:
    """Return peak and kept bytes of the last of some calls.

    The profiler records that a block is freed only if it recorded its allocation, so it records an earlier
    call as well, whose gradients, for example, the last call frees.
    """
    for calls in CALLS:
        peak, growth = _replay(call, calls)
        if growth <= 0:
            break
    return peak, max(growth, 0)


def _replay(call: Callable[[], object], calls: int) -> tuple[int, int]:
    """Return the highest and the last level of bytes since the last call began."""
    with _collection() as collect, torch.autograd.profiler.profile(profile_memory=True) as profile:
        for _ in range(calls - 1):
            call()
        collect()
        with torch.autograd.profiler.record_function(MARK):
            call()
        collect()
    events = profile.kineto_results.events()
    start_ns = next(event.start_ns() for event in events if event.name() == MARK)
    changes = [event for event in events if event.name() == "[memory]" and event.start_ns() >= start_ns]
    level = peak = 0
    for change in sorted(changes, key=lambda change: change.start_ns()):
        level += change.nbytes()
        peak = max(peak, level)
    return peak, level


@contextlib.contextmanager
def _collection() -> Iterator[Callable[[], object]]:
    """Yield a function that collects only garbage that was made inside the context."""
    gc.freeze()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()


def _start_threads() -> None:
    """Start torch's threads: the process would end if one could not be started under the limit."""
    torch.ones(1 << 20).sum()
