"""Memory: the peak of one call, a ceiling that turns a full machine into an error, and that error.

The peak is counted by torch's own allocators, exact to the byte: on CUDA by their running
maximum, on the CPU by replaying the profiler's allocation events. It is not the process's
resident size. On the CPU it costs some tens of microseconds for each allocation, so it is a pass
of its own.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from esbench.measure.timing import quiet

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]  # a missing module

METHOD = "allocator"
RESERVE_BYTES = 512 * 1024**2
"""What the ceiling leaves to the rest of the machine."""

MARK = "esbench.peak"
CONTAINER = Path("/sys/fs/cgroup")
"""Where Linux says what a container may use."""

NO_ROOM = ("can't allocate memory", "not enough memory", "bad_alloc", "cannot allocate memory")
"""How torch's CPU allocator, on Linux, macOS and Windows, and C++ say that there is no memory."""


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Return the most bytes that one call holds at once above those held before it."""
    with quiet():
        return _cuda_peak(call) if device == "cuda" else _cpu_peak(call)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory did not suffice, on either device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in words for sign in NO_ROOM)


@contextlib.contextmanager
def ceiling(limit_bytes: int | None = None) -> Iterator[None]:
    """Let this process allocate so many bytes more on the host and no more, then an error.

    Without a ceiling a case that does not fit wakes the system's out-of-memory killer, which
    ends the run, or another program. By default the ceiling is what the machine has available
    less a reserve. An inner ceiling never lifts an outer one. Where the system has no such limit
    (macOS has it and ignores it, Windows has none) this does nothing.
    """
    if not can_limit():
        yield
        return
    room = available_bytes() - RESERVE_BYTES if limit_bytes is None else limit_bytes
    _start_threads()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [held_bytes() + max(room, 0), soft, hard]
    limit = min(bound for bound in limits if bound != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def can_limit() -> bool:
    """Say whether this system can limit the data of a process."""
    return resource is not None and psutil.LINUX


def held_bytes() -> int:
    """Return the bytes of this process that count against its ceiling."""
    return int(psutil.Process().memory_info().data)


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


def _cuda_peak(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def _cpu_peak(call: Callable[[], object]) -> int:
    """Replay what a call allocates and frees.

    The profiler sees a block being freed only if it saw it allocated. So the call is made twice:
    what the second frees of the first, gradients for example, is seen.
    """
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        call()
        with torch.autograd.profiler.record_function(MARK):
            call()
    events = profile.kineto_results.events()
    start_ns = next(event.start_ns() for event in events if event.name() == MARK)
    changes = [event for event in events if event.name() == "[memory]" and event.start_ns() >= start_ns]
    level = peak = 0
    for change in sorted(changes, key=lambda change: change.start_ns()):
        level += change.nbytes()
        peak = max(peak, level)
    return peak


def _start_threads() -> None:
    """Start torch's threads: under a ceiling one that cannot be started ends the process."""
    torch.ones(1 << 20).sum()
