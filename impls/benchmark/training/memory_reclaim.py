"""Suite ``memory_reclaim``: ways to keep memory flat while many candidates are trained one after another.

Allocators keep memory and read their settings once, so memory is measured in fresh processes.
"""

import functools
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import Suite, suite, variant
from esbench.schema import QUALITY, Case
from esbench.workload import QualityMetric, build
from impls.benchmark.training import architecture_search
from impls.benchmark.training.architecture_search import (
    ARCHITECTURES,
    Search,
    Widths,
    architectures,
    batches,
    check_losses,
    largest_architecture,
    search_case,
)
from impls.benchmark.training.workload import (
    AbstractTrainingWorkload,
    check_result,
    check_supported,
    quality_metric,
)
from impls.training.memory_reclaim import Mode, call_in_fresh_process, environment, refusal

OPERATORS = (ARCHITECTURES,)

REPLICATES = 3
"""Fresh processes per variant."""

ELSEWHERE: Mapping[Mode, str] = {
    "expandable": "a process reads the allocator's settings once: see wall_ns, from a fresh one",
    "subprocess": "it works in other processes, whose memory is not visible in this one: see wall_ns",
}


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
class CleanSearch:
    """Hooks that do not leak; ``linked`` candidates contain reference cycles, which the collector frees."""

    reclaim: Mode = "nothing"
    linked: bool = False


@variant(mode="base", baseline=True, operators=OPERATORS, source="no search")
@dataclass(frozen=True)
class OneArchitecture(CleanSearch):
    """The largest candidate, as often as there are candidates: memory is always reused."""


@variant(mode="naive", baseline=True, operators=OPERATORS, source="PyTorch's tutorial, as usually copied")
@dataclass(frozen=True)
class LeakySearch(CleanSearch):
    """Hooks that reference their own parameters, so that no candidate is ever freed; nothing is reclaimed."""


class SearchWorkload(AbstractTrainingWorkload):
    """An architecture search; its memory is measured in fresh processes."""

    def __init__(self, scheme: CleanSearch, case: Case, device: str, seed: int) -> None:
        """Draw architectures and rows; raise UnavailableError if the mode needs another device."""
        super().__init__(case, device, seed, batches(case, device, seed))
        leaky = isinstance(scheme, LeakySearch)
        self._search = Search(case, device, seed, scheme.reclaim, leaky=leaky, linked=scheme.linked)
        reason = refusal(scheme.reclaim, device)
        check_supported(not reason, reason)
        self._widths = architectures(case, seed)
        if isinstance(scheme, OneArchitecture):
            self._widths = (largest_architecture(self._widths),) * len(self._widths)
        self.phase = None if scheme.reclaim in ELSEWHERE else "step"
        self.reason = ELSEWHERE.get(scheme.reclaim, "a search is measured as a whole, as a step")

    @override
    def call(self) -> Tensor:
        outcome = architecture_search.run(self._search, self._widths, self._buffers.take())
        outcome.release()  # so that leaks do not add up over calls
        return outcome.losses

    @override
    def verify(self) -> None:
        widths = self._widths[:1] if self._search.mode == "subprocess" else self._widths  # processes are slow
        outcome = architecture_search.run(self._search, widths, self.inputs[0])
        outcome.release()
        check_losses(self._search, widths, outcome.losses, self.inputs[0])

    @override
    def quality(self) -> Iterator[QualityMetric]:
        search = self._search
        variables = environment(search.mode)
        trials = [
            call_in_fresh_process(run_trial, search, self._widths, environment=variables)
            for _ in range(REPLICATES)
        ]
        check_result(len({trial.losses for trial in trials}) == 1, "fresh processes have different losses")
        alone = largest_alone(Search(search.case, search.device, search.seed))
        reasons = {}  # why a method has no value
        if None in {trial.resident_bytes for trial in (alone, *trials)}:
            reasons["resident set"] = "this system does not report the peak memory of a part of a process"
        if not search.device.startswith("cuda"):
            reasons["allocator"] = "torch's allocator reports what it reserves on CUDA only"
        if search.mode == "subprocess":
            reasons |= dict.fromkeys(("resident set", "allocator"), "other processes hold the memory")
        values = [trial.metrics(alone) for trial in trials]
        for metric, method in values[0]:
            samples = (trial_values[metric, method] for trial_values in values)
            yield quality_metric(metric, method, samples, reasons.get(method, ""))


@dataclass(frozen=True)
class Trial:
    """The time and memory of a search in a fresh process; peaks of bytes are of torch's CUDA allocator."""

    wall_ns: float
    pause_ns: float  # of garbage collections and of releasing torch's cache
    alive: int  # parameters that are left, without a garbage collection
    alive_collected: int  # the same after a garbage collection
    losses: tuple[float, ...]  # of all candidates and steps
    resident_bytes: int | None = None  # peak of the process above that before; None if not reported
    reserved_bytes: int = 0
    allocated_bytes: int = 0  # above those before
    retries: int = 0  # allocations that first had to release the cache

    def metrics(self, alone: "Trial") -> dict[tuple[str, str], float]:
        """Return values by metric and method; ratios are to a trial of the largest candidate alone.

        Sizes that are not reported count as 0.
        """
        over_largest = (self.resident_bytes or 0) / (alone.resident_bytes or 1)
        unused = 1 - self.allocated_bytes / max(1, self.reserved_bytes)
        return {
            ("wall_ns", "fresh process"): self.wall_ns,
            ("pause_ns", "fresh process"): self.pause_ns,
            ("alive_count", "after del"): self.alive,
            ("alive_count", "after collection"): self.alive_collected,
            ("process_over_largest", "resident set"): over_largest,
            ("reserved_over_largest", "allocator"): self.reserved_bytes / max(1, alone.allocated_bytes),
            ("fragmentation_percent", "allocator"): 100 * unused,
            ("retries_count", "allocator"): self.retries,
        }


def run_trial(search: Search, widths: Sequence[Widths]) -> Trial:
    """Train a population in this process, which should be fresh, and measure it."""
    case, is_cuda, pause_ns = search.case, search.device.startswith("cuda"), 0

    def measure_pause(phase: str, _: object = None) -> None:
        """Add the duration of a garbage collection: ``gc`` calls this with "start" and "stop"."""
        nonlocal pause_ns
        now_ns = time.perf_counter_ns()
        pause_ns += -now_ns if phase == "start" else now_ns

    def release_cache() -> None:
        measure_pause("start")
        torch.cuda.empty_cache()
        measure_pause("stop")

    x = batches(case, search.device, search.seed)[0]
    # A first training loads what torch needs.
    warm_up = Search(case, search.device, search.seed)
    architecture_search.run(warm_up, architectures(case, search.seed)[:1], x)
    gc.collect()
    torch.cuda.empty_cache()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    before_bytes = reset_peak()
    held_bytes = torch.cuda.memory_allocated()
    start_ns = time.perf_counter_ns()
    gc.callbacks.append(measure_pause)
    outcome = architecture_search.run(search, widths, x, release_cache)
    if is_cuda:
        torch.cuda.synchronize()
    gc.callbacks.remove(measure_pause)
    wall_ns = time.perf_counter_ns() - start_ns
    resident_bytes = None if before_bytes is None else status_bytes("VmHWM") - before_bytes
    alive = outcome.alive
    gc.collect()
    # Without CUDA, torch reports 0.
    return Trial(
        wall_ns=wall_ns,
        pause_ns=pause_ns,
        alive=alive,
        alive_collected=outcome.alive,
        losses=tuple(outcome.losses.flatten().tolist()),
        resident_bytes=resident_bytes,
        reserved_bytes=int(torch.cuda.max_memory_reserved()),
        allocated_bytes=int(torch.cuda.max_memory_allocated() - held_bytes),
        retries=int(torch.cuda.memory_stats().get("num_alloc_retries", 0)),
    )


@functools.cache
def largest_alone(search: Search) -> Trial:
    """Train the largest candidate alone in a fresh process: the minimum memory of a search."""
    return call_in_fresh_process(
        run_trial, search, [largest_architecture(architectures(search.case, search.seed))]
    )


def reset_peak() -> int | None:
    """Reset the process's peak memory; return its current memory in bytes, or None if not reported."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """Return a number of bytes from Linux's status of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


build.register(CleanSearch, SearchWorkload)

CHECKS = (search_case(3, 5, 4, "float64"),)
"""For the suite ``check``."""

suite(
    Suite(
        name="memory_reclaim",
        description="ways to keep memory flat: 16 MLPs of up to 3 x 1024 channels, one after another",
        cases=(search_case(16, 256, 64),),
        variants=("OneArchitecture", "LeakySearch", "CleanSearch*"),
        phases=("step", QUALITY),
        cell_s=10.0,
        active=(),
        limit_s=600.0,
    )
)
