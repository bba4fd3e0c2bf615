"""A topology update by itself: which connections are dropped and grown, by one rule and in several ways.

Weight, mask and two gradients in turn stay as they are, so that every call finds the same scores; what is new
is set to zero in a weight and a momentum of their own, which nobody reads.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from typing_extensions import override

from esbench.registry import REGISTRY, Figure, UnavailableError, Workload, WrongResultError, build, variant
from esbench.schema import Case, Phase, Work
from impls.benchmark import inputs
from impls.benchmark.training.written_updates import check
from impls.training import topology

OPERATORS = REGISTRY.reserve("TopologyUpdate")
ALPHA = 0.3
"""The share of connections that moves: that of the first update."""
ONLY = "a topology update has no other phase"
NO_QUALITY = "which connections a network ends with shows in its accuracy: see SparseDigits"


class AbstractTopology:
    """A way to update connections; ``density`` is the share that is connected."""

    density: float

    @abstractmethod
    def choose(self, weight: Tensor, gradient: Tensor, mask: Tensor, moved: int) -> Tensor:
        """Return the next mask."""


@variant(mode="base", baseline=True, operators=OPERATORS)
@dataclass(frozen=True)
class MaskMultiply:
    """One multiplication of a weight by its mask: what no update of a mask can cost less than."""

    density: float = 0.1


@variant(mode="naive", baseline=True, operators=OPERATORS, source="rigl-torch's way, written anew")
@dataclass(frozen=True)
class FullSort(AbstractTopology):
    """Two full sorts, int64 masks scattered from their order, and a count that waits for the device."""

    density: float = 0.1

    @override
    def choose(self, weight: Tensor, gradient: Tensor, mask: Tensor, moved: int) -> Tensor:
        return topology.by_sorting(weight, gradient, mask, moved)


@variant(operators=OPERATORS, source="Evci et al. 2020; the selection is ours")
@variant(operators=OPERATORS, narrowed=True, source="Evci et al. 2020; the selection is ours")
@dataclass(frozen=True)
class PartialSelection(AbstractTopology):
    """Two partial selections by index; ``narrowed``: of what a sample leaves, which waits for the device.

    On a CPU torch selects through pairs of a value and an index for each candidate, 16 bytes behind the back
    of its allocator, where no footprint shows them: narrowed they are few.
    """

    narrowed: bool = False
    density: float = 0.1

    @override
    def choose(self, weight: Tensor, gradient: Tensor, mask: Tensor, moved: int) -> Tensor:
        return topology.by_selection(weight, gradient, mask, moved, narrowed=self.narrowed)[0]


class AbstractUpdateWorkload(Workload):
    """A weight [out, in, *kernel], its mask, and what is read in turn."""

    noise_bytes = 0
    inputs: Sequence[Tensor] = ()
    unavailable: Mapping[Phase, str] = dict.fromkeys(("sample", "forward", "step"), ONLY)

    def __init__(self, density: float, case: Case, device: str, seed: int) -> None:
        """Draw them."""
        self._case, self._seed = case, seed
        shape = (case.out_channels, case.in_channels, *case.kernel_size)
        drawn = inputs.normal(*shape, device=device, dtype=inputs.dtype_of(case), seed=seed)
        kept = int(density * drawn[0].numel())
        self._mask = topology.scattered(drawn[0], kept, Generator().manual_seed(seed))
        self._moved = int(ALPHA * kept)
        self._reads = inputs.RotatingBuffers(self._read(drawn))
        self.inputs = self._reads.items

    @abstractmethod
    def _read(self, drawn: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what calls read in turn."""

    @abstractmethod
    def _update(self) -> Tensor:
        """Do what is timed."""

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        return {"update": self._update}

    @override
    def enter(self, phase: Phase) -> None:
        self._reads.restart()

    @override
    def confirm(self, phase: Phase) -> None:
        for seed, one in enumerate(self.inputs, self._seed + 5):
            one.normal_(generator=Generator(one.device).manual_seed(seed))
        self.verify()

    @override
    def quality(self) -> Iterable[Figure]:
        raise UnavailableError(NO_QUALITY)


class MultiplyWorkload(AbstractUpdateWorkload):
    """A weight is multiplied by a mask, where it is."""

    @override
    def _read(self, drawn: Sequence[Tensor]) -> Sequence[Tensor]:
        return drawn

    @override
    def _update(self) -> Tensor:
        return self._reads.take().mul_(self._mask)

    @override
    def work(self, phase: Phase) -> Work | None:
        one = self._reads.items[0]
        moved = 2 * one.nbytes + self._mask.nbytes
        return Work(flops=one.numel(), moved_bytes=moved, output_bytes=one.nbytes)

    @override
    def verify(self) -> None:
        self.enter("update")
        expected = self._reads.items[0].double() * self._mask
        if not torch.equal(self._update().double(), expected):
            message = "a weight times its mask is something else"
            raise WrongResultError(message)


class TopologyWorkload(AbstractUpdateWorkload):
    """Connections are chosen, and what is new becomes zero."""

    def __init__(self, scheme: AbstractTopology, case: Case, device: str, seed: int) -> None:
        """Draw a weight beside the gradients."""
        super().__init__(scheme.density, case, device, seed)
        self._scheme = scheme
        (self._weight, _) = inputs.normal(
            *self._mask.shape, device=device, dtype=inputs.dtype_of(case), seed=seed + 3
        )
        self._weight.masked_fill_(~self._mask, 0)
        self._changed, self._momentum = self._weight.clone(), torch.ones_like(self._weight)

    @override
    def _read(self, drawn: Sequence[Tensor]) -> Sequence[Tensor]:
        return drawn

    @override
    def _update(self) -> Tensor:
        after = self._scheme.choose(self._weight, self._reads.take(), self._mask, self._moved)
        topology.restart(self._changed, [self._momentum], self._mask, after)
        return after

    @override
    def work(self, phase: Phase) -> Work | None:
        mask, weight = self._mask.nbytes, self._weight.nbytes
        # The weight, the gradient and the mask are read, the next mask and what is new are written.
        return Work(flops=0, moved_bytes=2 * weight + 2 * mask, output_bytes=mask)

    @override
    def verify(self) -> None:
        self.enter("update")
        after = self._update()
        check(self._weight, self._reads.items[0], self._mask, after, self._moved)


@build.register
def _multiply(scheme: MaskMultiply, case: Case, device: str, seed: int) -> Workload:
    return MultiplyWorkload(scheme.density, case, device, seed)


@build.register(AbstractTopology)
def _topology(scheme: AbstractTopology, case: Case, device: str, seed: int) -> Workload:
    return TopologyWorkload(scheme, case, device, seed)
