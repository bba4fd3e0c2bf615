"""Population hygiene as something to measure: K candidates, one after another, and ways to reclaim memory."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from esbench.schema import PHASES, QUALITY, Case, Phase, Work
from impls.benchmark import inputs
from impls.benchmark.training import search
from impls.benchmark.training.candidates import (
    ARCHITECTURES,
    Widths,
    architectures,
    batches,
    largest,
    population,
    untrained,
    written_out,
)
from impls.benchmark.training.hygiene_trial import Trial, ask
from impls.training.hygiene import Mode, environment, refusal
from impls.verify import reference

OPERATORS = (ARCHITECTURES,)

REPLICATES = 3
"""So many fresh processes for each variant."""

FRESH = "fresh process"
RESIDENT = "resident set"
ALLOCATOR = "allocator"

ELSEWHERE: Mapping[Mode, str] = {
    "expandable": "a process reads the allocator's settings once: see wall_ns, of a fresh one",
    "subprocess": "it works in other processes, whose memory this one does not see: see wall_ns",
}


@dataclass(frozen=True)
class AbstractPopulation(ABC):
    """A way to train a population, one candidate after another."""

    @abstractmethod
    def plan(self, case: Case, device: str, seed: int) -> search.Search:
        """Say how it is trained."""

    @abstractmethod
    def chosen(self, widths: Sequence[Widths]) -> Sequence[Widths]:
        """Return the architectures that are trained, of those of the case."""


@variant(mode="base", baseline=True, operators=OPERATORS, source="no search")
@dataclass(frozen=True)
class OneArchitecture(AbstractPopulation):
    """The largest candidate, as often as there are candidates: memory has nothing to adapt to."""

    @override
    def plan(self, case: Case, device: str, seed: int) -> search.Search:
        return search.Search(case, device, seed)

    @override
    def chosen(self, widths: Sequence[Widths]) -> Sequence[Widths]:
        return [largest(widths)] * len(widths)


@variant(mode="naive", baseline=True, operators=OPERATORS, source="PyTorch's tutorial, as usually copied")
@dataclass(frozen=True)
class LeakySearch(AbstractPopulation):
    """Hooks that reach their own parameters, so that no candidate ever goes, and nothing reclaimed."""

    @override
    def plan(self, case: Case, device: str, seed: int) -> search.Search:
        return search.Search(case, device, seed, leaky=True)

    @override
    def chosen(self, widths: Sequence[Widths]) -> Sequence[Widths]:
        return widths


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
    """Hooks that let go; ``linked`` candidates are graphs that know each other, which the collector frees."""

    reclaim: Mode = "nothing"
    linked: bool = False

    @override
    def plan(self, case: Case, device: str, seed: int) -> search.Search:
        return search.Search(case, device, seed, mode=self.reclaim, linked=self.linked)

    @override
    def chosen(self, widths: Sequence[Widths]) -> Sequence[Widths]:
        return widths


class HygieneWorkload(Workload):
    """A search; its figures of memory are those of fresh processes."""

    noise_bytes = 0
    inputs: Sequence[Tensor] = ()

    def __init__(self, scheme: AbstractPopulation, case: Case, device: str, seed: int) -> None:
        """Draw the architectures and the rows.

        Raises:
            UnavailableError: the device lacks what is asked for.

        """
        self._plan = scheme.plan(case, device, seed)
        if reason := refusal(self._plan.mode, device):
            raise UnavailableError(reason)
        self._widths = scheme.chosen(architectures(case, seed))
        self._x = inputs.RotatingBuffers(batches(case, device, seed))
        self.inputs = self._x.items

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        return {} if "step" in self.unavailable else {"step": self._step}

    @property
    @override
    def unavailable(self) -> Mapping[Phase, str]:
        reasons = dict.fromkeys(PHASES[:-1], "a search is measured as a whole, as a step")
        reason = ELSEWHERE.get(self._plan.mode)
        return {**reasons, "step": reason} if reason else reasons

    @override
    def work(self, phase: Phase) -> Work | None:
        return None

    @override
    def enter(self, phase: Phase) -> None:
        self._x.restart()

    @override
    def verify(self) -> None:
        x, plan = self._x.items[0], self._plan
        if plan.mode == "subprocess":  # it can be held to what is held to the truth elsewhere
            self._check_isolated(x)
            return

        def look(number: int, model: nn.Sequential) -> None:
            self._check(number, model, x)

        outcome = search.run(plan, self._widths, x, look)
        outcome.release()

    @override
    def confirm(self, phase: Phase) -> None:
        for turn, tensor in enumerate(self._x.items):
            tensor.normal_(generator=torch.Generator(tensor.device).manual_seed(self._plan.seed + 5 + turn))
        self.verify()
        self.enter(phase)
        losses = self._step()
        for number, widths in enumerate(self._widths):
            slow, wide = self._written(number, widths, self._x.items[0])
            reference.compare(f"losses of candidate {number}", losses[number], wide[0], slow[0])

    @override
    def quality(self) -> Iterator[Figure]:
        plan, widths = self._plan, list(self._widths)
        trials = [ask(plan, widths, environment(plan.mode)) for _ in range(REPLICATES)]
        if len({trial.digests for trial in trials}) > 1:
            message = "fresh processes end with different weights"
            raise WrongResultError(message)
        yield Figure("wall_ns", FRESH, tuple(trial.wall_ns for trial in trials))
        yield Figure("pause_ns", FRESH, tuple(trial.pause_ns for trial in trials))
        yield Figure("alive_count", "after del", tuple(float(trial.alive) for trial in trials))
        yield Figure("alive_count", "after collection", tuple(float(t.alive_collected) for t in trials))
        yield from self._levels(trials)

    def _levels(self, trials: Sequence[Trial]) -> Iterator[Figure]:
        """Yield what the process, and torch's allocator, held at most."""
        names = {
            "process_over_largest": RESIDENT,
            "reserved_over_largest": ALLOCATOR,
            "fragmentation_percent": ALLOCATOR,
            "retries_count": ALLOCATOR,
        }
        reasons = dict.fromkeys(names, "")
        if not self._plan.device.startswith("cuda"):
            for name in list(names)[1:]:
                reasons[name] = "torch's allocator keeps count of what it reserves on CUDA only"
        alone = largest_alone(search.Search(self._plan.case, self._plan.device, self._plan.seed))
        if self._plan.mode == "subprocess":
            reasons = dict.fromkeys(names, "it is other processes' memory, of one candidate at a time")
        elif alone.resident_bytes is None or any(trial.resident_bytes is None for trial in trials):
            reasons["process_over_largest"] = "this system does not tell the peak of a part of a process"
        values: Mapping[str, Callable[[Trial], float]] = {
            "process_over_largest": lambda one: (one.resident_bytes or 0) / (alone.resident_bytes or 1),
            "reserved_over_largest": lambda one: one.reserved_bytes / alone.allocated_bytes,
            "fragmentation_percent": lambda one: 100 * (1 - one.allocated_bytes / one.reserved_bytes),
            "retries_count": lambda one: float(one.retries),
        }
        for name, method in names.items():
            if reasons[name]:
                yield Figure(name, method, reason=reasons[name])
            else:
                yield Figure(name, method, tuple(values[name](trial) for trial in trials))

    def _step(self) -> Tensor:
        outcome = search.run(self._plan, self._widths, self._x.take())
        # What leaks, or waits for a collection, goes when the search is over, not with the process.
        outcome.release()
        return outcome.losses

    def _written(self, number: int, widths: Widths, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return losses, then weights and biases of a candidate, written out: in its dtype and in float64."""
        case, found = self._plan.case, []
        model = untrained(widths, case, self._plan.device, self._plan.seed + number)
        values = [one.detach() for one in model.parameters()]
        for wide in (False, True):
            weights = [one.double() if wide else one for one in values]
            rows = x.double() if wide else x
            losses, *trained = written_out(weights[::2], weights[1::2], rows, case)
            pairs = zip(*trained, strict=True)
            found.append([torch.stack(losses), *(one for pair in pairs for one in pair)])
        return found[0], found[1]

    def _check(self, number: int, model: nn.Sequential, x: Tensor) -> None:
        """Hold a trained candidate to the same training written out.

        Raises:
            WrongResultError: its weights are others.

        """
        slow, wide = self._written(number, self._widths[number], x)
        for got, written, right in zip(model.parameters(), slow[1:], wide[1:], strict=True):
            reference.compare(f"weights of candidate {number}", got.detach(), right, written)

    def _check_isolated(self, x: Tensor) -> None:
        """Hold the first candidate of a process of its own to the same one here.

        Raises:
            WrongResultError: its weights are others.

        """
        plan = self._plan
        here = search.Search(plan.case, plan.device, plan.seed)
        right = search.run(here, self._widths[:1], x, lambda number, model: self._check(number, model, x))
        if search.run(plan, self._widths[:1], x).digests != right.digests:
            message = "a process of its own ends with other weights"
            raise WrongResultError(message)


@functools.cache
def largest_alone(plan: search.Search) -> Trial:
    """Train the largest candidate alone in a fresh process: what any search has to hold."""
    return ask(plan, [largest(architectures(plan.case, plan.seed))], {})


@build.register(AbstractPopulation)
def _population(scheme: AbstractPopulation, case: Case, device: str, seed: int) -> Workload:
    return HygieneWorkload(scheme, case, device, seed)


CHECKS = (population(3, 5, 4, "float64"),)
"""For the suite ``check``."""

suite(
    Suite(
        name="hygiene",
        description="what keeps memory flat: 16 MLPs of up to 3 x 1024 channels, one after another",
        cases=(population(16, 256, 64),),
        variants=("OneArchitecture", "LeakySearch", "CleanSearch*"),
        phases=("step", QUALITY),
        cell_s=10.0,
        active=(),
    )
)
