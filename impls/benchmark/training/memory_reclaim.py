"""Suite ``memory_reclaim``: ways to keep memory flat while many candidates are trained one after another.

Allocators keep memory and read their settings once, so figures of memory come from fresh processes.
"""

import contextlib
import functools
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import (
    Figure,
    Suite,
    UnavailableError,
    Workload,
    WrongResultError,
    build,
    suite,
    variant,
)
from esbench.schema import PHASES, QUALITY, Case, Phase
from impls.benchmark.training import architecture_search
from impls.benchmark.training.architecture_search import (
    ARCHITECTURES,
    Search,
    Widths,
    architectures,
    batches,
    check_trained,
    largest,
    population,
    reference_training,
)
from impls.benchmark.training.workload import AbstractTrainingWorkload
from impls.training.memory_reclaim import Mode, Reclaimer, environment, isolated, refusal
from impls.verify import reference

OPERATORS = (ARCHITECTURES,)

REPLICATES = 3
"""Fresh processes per variant."""

ELSEWHERE: Mapping[Mode, str] = {
    "expandable": "a process reads the allocator's settings once: see wall_ns, from a fresh one",
    "subprocess": "it works in other processes, whose memory is not visible in this one: see wall_ns",
}


@dataclass(frozen=True)
class AbstractPopulation(ABC):
    """A way to train a population, one candidate after another."""

    @abstractmethod
    def search(self, case: Case, device: str, seed: int) -> Search:
        """Return how it is trained."""

    def chosen(self, widths: Sequence[Widths]) -> Sequence[Widths]:
        """Return the architectures to train instead of those of the case."""
        return widths


@variant(mode="base", baseline=True, operators=OPERATORS, source="no search")
@dataclass(frozen=True)
class OneArchitecture(AbstractPopulation):
    """The largest candidate, as often as there are candidates: memory is always reused."""

    @override
    def search(self, case: Case, device: str, seed: int) -> Search:
        return Search(case, device, seed)

    @override
    def chosen(self, widths: Sequence[Widths]) -> Sequence[Widths]:
        return [largest(widths)] * len(widths)


@variant(mode="naive", baseline=True, operators=OPERATORS, source="PyTorch's tutorial, as usually copied")
@dataclass(frozen=True)
class LeakySearch(AbstractPopulation):
    """Hooks that reference their own parameters, so that no candidate is ever freed; nothing is reclaimed."""

    @override
    def search(self, case: Case, device: str, seed: int) -> Search:
        return Search(case, device, seed, leaky=True)


@variant(
    operators=OPERATORS,
    reclaim=("nothing", "collect", "collect_batch", "iterator", "subprocess"),
    source="ours; iterator: NaiveGAflux",
)
@variant(
    operators=OPERATORS, reclaim=("empty_cache", "empty_cache_batch", "expandable", "pool"), source="torch"
)
@variant(operators=OPERATORS, reclaim=("nothing", "collect", "iterator"), linked=True, source="ours")
@dataclass(frozen=True)
class CleanSearch(AbstractPopulation):
    """Hooks that do not leak; ``linked`` candidates contain reference cycles, which the collector frees."""

    reclaim: Mode = "nothing"
    linked: bool = False

    @override
    def search(self, case: Case, device: str, seed: int) -> Search:
        return Search(case, device, seed, mode=self.reclaim, linked=self.linked)


class SearchWorkload(AbstractTrainingWorkload):
    """A search; figures of its memory come from fresh processes."""

    def __init__(self, scheme: AbstractPopulation, case: Case, device: str, seed: int) -> None:
        """Draw architectures and rows; raise UnavailableError if the mode needs another device."""
        super().__init__(case, seed, batches(case, device, seed))
        self._search = scheme.search(case, device, seed)
        if reason := refusal(self._search.mode, device):
            raise UnavailableError(reason)
        self._widths = scheme.chosen(architectures(case, seed))

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        return {} if "step" in self.unavailable else {"step": self._step}

    @property
    @override
    def unavailable(self) -> Mapping[Phase, str]:
        reasons = dict.fromkeys(PHASES[:-1], "a search is measured as a whole, as a step")
        reason = ELSEWHERE.get(self._search.mode)
        return {**reasons, "step": reason} if reason else reasons

    @override
    def verify(self) -> None:
        search, x = self._search, self.inputs[0]

        def check(number: int, model: nn.Sequential) -> None:
            check_trained(search, number, self._widths[number], model, x)

        if search.mode != "subprocess":
            architecture_search.run(search, self._widths, x, check).release()
            return
        # Its weights are not here: compare their digest with a candidate that can be checked.
        here = architecture_search.run(replace(search, mode="nothing"), self._widths[:1], x, check)
        if architecture_search.run(search, self._widths[:1], x).digests != here.digests:
            message = "training in a separate process gives different weights"
            raise WrongResultError(message)

    @override
    def confirm(self, phase: Phase) -> None:
        super().confirm(phase)
        self.enter(phase)
        losses, x = self._step(), self.inputs[0]
        for number, widths in enumerate(self._widths):
            slow, _ = reference_training(self._search, number, widths, x, wide=False)
            exact, _ = reference_training(self._search, number, widths, x, wide=True)
            reference.compare(f"losses of candidate {number}", losses[number], exact, slow)

    @override
    def quality(self) -> Iterator[Figure]:
        trials = [
            isolated(
                run_trial, *_arguments(self._search, self._widths), environment=environment(self._search.mode)
            )
            for _ in range(REPLICATES)
        ]
        if len({trial.digests for trial in trials}) > 1:
            message = "fresh processes end with different weights"
            raise WrongResultError(message)
        fresh = "fresh process"
        yield Figure("wall_ns", fresh, tuple(trial.wall_ns for trial in trials))
        yield Figure("pause_ns", fresh, tuple(trial.pause_ns for trial in trials))
        yield Figure("alive_count", "after del", tuple(float(trial.alive) for trial in trials))
        yield Figure("alive_count", "after collection", tuple(float(t.alive_collected) for t in trials))
        yield from self._memory(trials)

    def _memory(self, trials: Sequence["Trial"]) -> Iterator[Figure]:
        """Yield the peak memory of the process and of torch's allocator."""
        search = self._search
        alone = largest_alone(Search(search.case, search.device, search.seed))
        elsewhere = "other processes hold the memory, of one candidate at a time"
        resident = allocator = elsewhere if search.mode == "subprocess" else ""
        if not resident and None in {alone.resident_bytes, *(trial.resident_bytes for trial in trials)}:
            resident = "this system does not report the peak of a part of a process"
        if not allocator and not search.device.startswith("cuda"):
            allocator = "torch's allocator reports what it reserves on CUDA only"
        figures: tuple[tuple[str, str, str, Callable[[Trial], float]], ...] = (
            (
                "process_over_largest",
                "resident set",
                resident,
                lambda one: (one.resident_bytes or 0) / (alone.resident_bytes or 1),
            ),
            (
                "reserved_over_largest",
                "allocator",
                allocator,
                lambda one: one.reserved_bytes / alone.allocated_bytes,
            ),
            (
                "fragmentation_percent",
                "allocator",
                allocator,
                lambda one: 100 * (1 - one.allocated_bytes / one.reserved_bytes),
            ),
            ("retries_count", "allocator", allocator, lambda one: float(one.retries)),
        )
        for name, method, reason, value in figures:
            samples = () if reason else tuple(value(trial) for trial in trials)
            yield Figure(name, method, samples, reason=reason)

    def _step(self) -> Tensor:
        outcome = architecture_search.run(self._search, self._widths, self._buffers.take())
        outcome.release()  # so that leaks do not add up over calls
        return outcome.losses


@dataclass(frozen=True)
class Trial:
    """What a search took in a fresh process.

    Attributes:
        wall_ns: time of the search.
        pause_ns: time spent on garbage collections and on releasing torch's cache.
        alive: number of parameters that are left, without a garbage collection.
        alive_collected: and after one.
        digests: of each candidate's trained weights.
        resident_bytes: peak memory of the process above that before the search; None if not reported.
        reserved_bytes: peak of torch's CUDA allocator, as are the following.
        allocated_bytes: above that before the search.
        retries: allocations that first had to release the cache.

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
    """Measures the nanoseconds of cache releases and, inside ``measuring()``, of all garbage collections."""

    def __init__(self) -> None:
        """Start from 0."""
        self.pause_ns = 0
        self._start_ns = 0

    @override
    def release_cache(self) -> None:
        start_ns = time.perf_counter_ns()
        torch.cuda.empty_cache()
        self.pause_ns += time.perf_counter_ns() - start_ns

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the garbage collections inside a block."""
        gc.callbacks.append(self._on_collection)
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._start_ns = time.perf_counter_ns()
        else:
            self.pause_ns += time.perf_counter_ns() - self._start_ns


def run_trial(search: Search, widths: Sequence[Widths], threads: int) -> Trial:
    """Train a population in this process, which should be fresh, and measure it."""
    torch.set_num_threads(threads)
    case, is_cuda = search.case, search.device.startswith("cuda")
    x = batches(case, search.device, search.seed)[0]
    # A first training loads what torch needs.
    warm_up = Search(case, search.device, search.seed)
    architecture_search.run(warm_up, architectures(case, search.seed)[:1], x)
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before_bytes, reclaimer = _reset_peak(), TimedReclaimer()
    held_bytes = torch.cuda.memory_allocated() if is_cuda else 0
    start_ns = time.perf_counter_ns()
    with reclaimer.measuring():
        outcome = architecture_search.run(search, widths, x, reclaimer=reclaimer)
        if is_cuda:
            torch.cuda.synchronize()
    wall_ns = time.perf_counter_ns() - start_ns
    peak_bytes, alive = _status_bytes("VmHWM"), outcome.alive
    gc.collect()
    return Trial(
        wall_ns=wall_ns,
        pause_ns=reclaimer.pause_ns,
        alive=alive,
        alive_collected=outcome.alive,
        digests=outcome.digests,
        resident_bytes=None if before_bytes is None or peak_bytes is None else peak_bytes - before_bytes,
        reserved_bytes=int(torch.cuda.max_memory_reserved()) if is_cuda else 0,
        allocated_bytes=int(torch.cuda.max_memory_allocated()) - held_bytes if is_cuda else 0,
        retries=int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if is_cuda else 0,
    )


def _arguments(search: Search, widths: Sequence[Widths]) -> tuple[Search, tuple[Widths, ...], int]:
    return search, tuple(widths), torch.get_num_threads()


@functools.cache
def largest_alone(search: Search) -> Trial:
    """Train the largest candidate alone in a fresh process: the minimum memory of a search."""
    widths = [largest(architectures(search.case, search.seed))]
    return isolated(run_trial, *_arguments(search, widths))


def _reset_peak() -> int | None:
    """Reset the process's peak memory and return its present one; None where Linux does not report it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int | None:
    """Return a number of bytes from the status of this process, or None."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
    return None


@build.register(AbstractPopulation)
def _build(scheme: AbstractPopulation, case: Case, device: str, seed: int) -> Workload:
    return SearchWorkload(scheme, case, device, seed)


CHECKS = (population(3, 5, 4, "float64"),)
"""For the suite ``check``."""

suite(
    Suite(
        name="memory_reclaim",
        description="ways to keep memory flat: 16 MLPs of up to 3 x 1024 channels, one after another",
        cases=(population(16, 256, 64),),
        variants=("OneArchitecture", "LeakySearch", "CleanSearch*"),
        phases=("step", QUALITY),
        cell_s=10.0,
        active=(),
    )
)
