"""The peak memory of a call, and a limit under which allocations raise an error before the machine is full.

Bytes are exact. On CUDA, torch's allocator reports their maximum; on the CPU, the allocations and frees that
torch's profiler recorded are added up. Memory that libraries allocate outside of torch is not counted. The
profiler slows allocations down, so memory is measured in a separate pass.
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
"""The available memory that :func:`limit_memory` leaves to other programs."""

MARK = "esbench.memory"
CALLS = (2, 10)
"""The numbers of calls that are profiled on the CPU: ten only if the last of two seems to keep bytes."""
CGROUP = Path("/sys/fs/cgroup")
"""The folder in which Linux gives the limits of a container."""

OUT_OF_MEMORY_TEXTS = (
    *("can't allocate memory", "not enough memory", "bad_alloc", "cannot allocate memory"),
    *("cuda error: out of memory", "cublas_status_alloc_failed"),
)
"""Parts of the out-of-memory messages of torch's CPU allocator, C++, CUDA and cuBLAS, in lower case."""


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
    """Measure the memory of a call; ``process_bytes`` returns the bytes that this process uses on the GPU."""
    with quiet():
        if device == "cuda":
            peak, kept = _measure_on_cuda(call)
            reserved = int(torch.cuda.max_memory_reserved())
            return Footprint(peak, kept, reserved, process_bytes() if process_bytes else None)
        peak, kept = _measure_on_cpu(call)
        return Footprint(peak, kept, None, int(psutil.Process().memory_info().rss))


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Return the peak of the bytes allocated during a call, above those allocated before it."""
    return footprint(call, device).peak_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = message_of(error).lower()
    return isinstance(error, RuntimeError) and any(part in message for part in OUT_OF_MEMORY_TEXTS)


@contextlib.contextmanager
def limit_memory(limit_bytes: int | None = None) -> Iterator[None]:
    """Limit the bytes that this process can allocate on the host inside the context.

    The default limit is the available memory less RESERVE_BYTES. An allocation above the limit raises an
    error; without a limit, the system's out-of-memory killer may end the run, or another program. An inner
    context never raises the limit of an outer one. On systems other than Linux this does nothing.
    """
    if not can_limit():
        yield
        return
    room_bytes = available_bytes() - RESERVE_BYTES if limit_bytes is None else limit_bytes
    torch.ones(1 << 20).sum()  # starts torch's threads: a thread that cannot start would end the process
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [psutil.Process().memory_info().data + max(room_bytes, 0), soft, hard]
    limit = min(bound for bound in limits if bound != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def can_limit() -> bool:
    """Return whether this system can limit the memory of a process."""
    return resource is not None and psutil.LINUX


def available_bytes() -> int:
    """Return the bytes this process may still take from the machine, or from its container."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
        return min(available, limit - used)
    except (OSError, ValueError):  # no container, an older kernel, or the limit "max"
        return available


def _measure_on_cuda(call: Callable[[], object]) -> tuple[int, int]:
    """Return the peak and the kept bytes of the second of two calls; the first fills caches."""
    with new_garbage() as collect:
        call()
        collect()  # reference cycles of the first call would otherwise be freed during the second
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak = int(torch.cuda.max_memory_allocated()) - before
        collect()
        kept = int(torch.cuda.memory_allocated()) - before
        return peak, max(kept, 0)  # negative if the call frees memory of the first, such as its gradients


def _measure_on_cpu(call: Callable[[], object]) -> tuple[int, int]:
    """Return the peak and the kept bytes of the last of several calls.

    The last call may free memory of an earlier one, such as its gradients. The profiler records a free only
    if it recorded the allocation, so earlier calls are profiled as well. A call that seems to keep memory may
    still fill a cache, so it is profiled again after more calls.
    """
    for calls in CALLS:
        peak, kept = _replay_allocations(call, calls)
        if kept <= 0:
            break
    return peak, max(kept, 0)


def _replay_allocations(call: Callable[[], object], calls: int) -> tuple[int, int]:
    """Return the highest and the final number of bytes allocated since the last call began."""
    with new_garbage() as collect, torch.autograd.profiler.profile(profile_memory=True) as profile:
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
def new_garbage() -> Iterator[Callable[[], object]]:
    """Yield a function that collects the garbage of objects created inside the context, and no other."""
    gc.freeze()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
