"""A search in a fresh process, and what it took there: ``python -m`` of this module answers a question.

Allocators keep what they once had, and read their settings once: figures of two searches in one process would
be those of both.
"""

import contextlib
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from typing_extensions import override

from impls.benchmark.training import search
from impls.benchmark.training.candidates import Widths, architectures, batches
from impls.training import isolation
from impls.training.hygiene import Reclaimer

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Question(msgspec.Struct, frozen=True):
    """A search, the architectures that it trains, and with how many threads."""

    plan: search.Search
    widths: tuple[Widths, ...]
    threads: int


class Trial(msgspec.Struct, frozen=True):
    """What a fresh process found. ``resident_bytes`` is None where the system does not tell the peak.

    ``resident_bytes`` is the peak of the process's memory above what it held before the search; the other
    bytes are those of torch's CUDA allocator, 0 on a CPU.
    """

    wall_ns: float
    pause_ns: float
    alive: int
    alive_collected: int
    digests: tuple[str, ...]
    resident_bytes: int | None = None
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    retries: int = 0


class TimedReclaimer(Reclaimer):
    """Keeps count of the nanoseconds that releases take, and all collections, whoever asked for them."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.pause_ns = 0
        self._start_ns = 0

    @override
    def release(self) -> None:
        start_ns = time.perf_counter_ns()
        torch.cuda.empty_cache()
        self.pause_ns += time.perf_counter_ns() - start_ns

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Listen to the collector inside."""
        gc.callbacks.append(self._heard)
        try:
            yield
        finally:
            gc.callbacks.remove(self._heard)

    def _heard(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._start_ns = time.perf_counter_ns()
        else:
            self.pause_ns += time.perf_counter_ns() - self._start_ns


def trial(plan: search.Search, widths: Sequence[Widths]) -> Trial:
    """Train a population in this process, which should be fresh, and look at what it took."""
    case, is_cuda = plan.case, plan.device.startswith("cuda")
    x = batches(case, plan.device, plan.seed)[0]
    # What torch loads and starts with its first training is nobody's.
    search.run(search.Search(case, plan.device, plan.seed), architectures(case, plan.seed)[:1], x)
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before_bytes, reclaimer = _mark_resident(), TimedReclaimer()
    held_bytes = torch.cuda.memory_allocated() if is_cuda else 0
    start_ns = time.perf_counter_ns()
    with reclaimer.counting():
        outcome = search.run(plan, widths, x, reclaimer=reclaimer)
        if is_cuda:
            torch.cuda.synchronize()
    wall_ns = time.perf_counter_ns() - start_ns
    peak_bytes, alive = _status("VmHWM"), outcome.alive
    gc.collect()
    found = Trial(
        wall_ns=wall_ns,
        pause_ns=reclaimer.pause_ns,
        alive=alive,
        alive_collected=outcome.alive,
        digests=outcome.digests,
        resident_bytes=None if before_bytes is None or peak_bytes is None else peak_bytes - before_bytes,
    )
    if not is_cuda:
        return found
    return msgspec.structs.replace(
        found,
        reserved_bytes=int(torch.cuda.max_memory_reserved()),
        allocated_bytes=int(torch.cuda.max_memory_allocated()) - held_bytes,
        retries=int(torch.cuda.memory_stats().get("num_alloc_retries", 0)),
    )


def ask(plan: search.Search, widths: Sequence[Widths], environment: Mapping[str, str]) -> Trial:
    """Have a fresh process train a population.

    Raises:
        IsolationError: it could not.

    """
    question = Question(plan, tuple(widths), torch.get_num_threads())
    return isolation.answer(__name__, question, environment, Trial)


def _mark_resident() -> int | None:
    """Let the peak begin anew, and return the bytes that are resident now; None where that cannot be."""
    try:
        CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int | None:
    """Return the bytes that the system tells of this process, None where it does not."""
    with contextlib.suppress(OSError):
        for line in STATUS.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
    return None


def _main() -> None:
    question = isolation.asked(Question)
    torch.set_num_threads(question.threads)
    isolation.reply(trial(question.plan, question.widths))


if __name__ == "__main__":
    _main()
