"""Topology updates without training: RigL's rule for dropping and growing weights, computed in several ways.

Weight, mask and gradients stay constant, and every call makes the same choice: entries that change are zeroed
in a second weight and a momentum that nothing reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from typing_extensions import override

from esbench.registry import REGISTRY, variant
from esbench.schema import Case, Phase, Work
from esbench.workload import QualityMetric, UnavailableError, build
from impls.benchmark import inputs
from impls.benchmark.training.workload import AbstractTrainingWorkload, check_result
from impls.training import sparse_masks

OPERATORS = REGISTRY.reserve("TopologyUpdate")
ALPHA = 0.3
"""Share of the active entries that moves, as in RigL's first update."""


class AbstractTopology(ABC):
    """A way to update a mask; ``density`` is the share of active entries."""

    density: float

    @abstractmethod
    def choose(self, weight: Tensor, gradient: Tensor, mask: Tensor, count: int) -> Tensor:
        """Return the next mask."""


@variant(mode="base", baseline=True, operators=OPERATORS)
@dataclass(frozen=True)
class MaskMultiply(AbstractTopology):
    """Multiplies the gradient by the mask, in place: no update can be faster."""

    density: float = 0.1

    @override
    def choose(self, weight: Tensor, gradient: Tensor, mask: Tensor, count: int) -> Tensor:
        return gradient.mul_(mask)


@variant(mode="naive", baseline=True, operators=OPERATORS, source="rigl-torch, rewritten")
@dataclass(frozen=True)
class FullSort(AbstractTopology):
    """Two full sorts, masks of int64 that are scattered by rank, and a count that waits for the device."""

    density: float = 0.1

    @override
    def choose(self, weight: Tensor, gradient: Tensor, mask: Tensor, count: int) -> Tensor:
        return drop_and_grow_by_sorting(weight, gradient, mask, count)


@variant(operators=OPERATORS, source="Evci et al. 2020; the selection is ours")
@variant(operators=OPERATORS, narrowed=True, source="Evci et al. 2020; the selection is ours")
@dataclass(frozen=True)
class PartialSelection(AbstractTopology):
    """Two partial selections by index; ``narrowed`` bounds them by a sample, which waits for the device.

    On a CPU, torch's selection takes 16 bytes per candidate, for a value and an index, which no footprint
    contains, as torch's allocator does not count them; ``narrowed`` leaves few candidates.
    """

    narrowed: bool = False
    density: float = 0.1

    @override
    def choose(self, weight: Tensor, gradient: Tensor, mask: Tensor, count: int) -> Tensor:
        return sparse_masks.drop_and_grow(weight, gradient, mask, count, narrowed=self.narrowed)[0]


class TopologyWorkload(AbstractTrainingWorkload):
    """Chooses a new mask of a weight by the gradients in the buffers, and zeroes the entries that changed."""

    phase: Phase = "update"
    reason = "a topology update has no other phase"

    def __init__(self, scheme: AbstractTopology, case: Case, device: str, seed: int) -> None:
        shape, dtype = (case.out_channels, case.in_channels, *case.kernel_size), inputs.dtype_of(case)
        super().__init__(case, device, seed, inputs.normal(*shape, device=device, dtype=dtype, seed=seed))
        self._scheme = scheme
        self._weight, _ = inputs.normal(*shape, device=device, dtype=dtype, seed=seed + 3)
        nonzero = int(scheme.density * self._weight.numel())
        self._mask = sparse_masks.random_mask(self._weight, nonzero, Generator().manual_seed(seed))
        self._count = int(ALPHA * nonzero)
        self._weight.masked_fill_(~self._mask, 0)
        # Calls zero entries of these, and of no tensor that they read, so that all calls do the same work.
        self._zeroed_weight, self._momentum = self._weight.clone(), torch.ones_like(self._weight)

    @override
    def call(self) -> Tensor:
        after = self._scheme.choose(self._weight, self._buffers.take(), self._mask, self._count)
        if not isinstance(self._scheme, MaskMultiply):
            sparse_masks.zero_changed([self._zeroed_weight, self._momentum], self._mask, after)
        return after

    @override
    def work(self, phase: Phase) -> Work | None:
        mask, weight = self._mask.nbytes, self._weight.nbytes
        if isinstance(self._scheme, MaskMultiply):
            return Work(flops=self._weight.numel(), moved_bytes=2 * weight + mask, output_bytes=weight)
        # Reads weight, gradient and mask; writes the next mask and the changed entries.
        return Work(flops=0, moved_bytes=2 * weight + 2 * mask, output_bytes=mask)

    @override
    def verify(self) -> None:
        self.enter("update")
        gradient = self.inputs[0].clone()
        result = self.call()
        if not isinstance(self._scheme, MaskMultiply):
            check_update(self._weight, gradient, self._mask, result, self._count)
        else:
            check_result(torch.equal(result, gradient * self._mask), "the product with the mask is wrong")

    @override
    def quality(self) -> Iterable[QualityMetric]:
        raise UnavailableError(
            "the quality of an update shows in the accuracy of trained networks: see SparseDigits"
        )


build.register(AbstractTopology, TopologyWorkload)


@torch.no_grad()
def drop_and_grow_by_sorting(weight: Tensor, gradient: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return the next mask as rigl-torch computes it: two full sorts whose ranks are scattered back."""
    kept_count = int(mask.sum()) - count  # waits for the device
    kept = _rank_mask(torch.where(mask, weight.abs(), -1.0), kept_count)
    scores = torch.where(kept.bool(), gradient.abs().min() - 1, gradient.abs())  # kept entries come last
    return (kept + _rank_mask(scores, count)).bool()


def _rank_mask(scores: Tensor, count: int) -> Tensor:
    """Return 1 for the ``count`` largest scores and 0 for the others, int64, by sorting all of them."""
    order = scores.flatten().sort(descending=True).indices
    is_first = torch.arange(len(order), device=order.device) < count
    ones = torch.where(is_first, torch.ones_like(order), torch.zeros_like(order))
    return torch.empty_like(order).scatter(0, order, ones).view(scores.shape)


def check_update(weight: Tensor, gradient: Tensor, before: Tensor, after: Tensor, count: int) -> None:
    """Raise WrongResultError unless the mask ``after`` follows from the mask ``before`` by RigL's rule.

    The ``count`` active entries of smallest |weight| are dropped, then as many inactive ones of largest
    |gradient| are grown (Evci et al. 2020, algorithm 1). Among equal magnitudes any choice is right.
    """
    magnitudes, gradients = weight.abs().flatten(), gradient.abs().flatten()
    was_active, is_active = before.flatten(), after.flatten()
    active, active_after = int(before.sum()), int(after.sum())
    is_mask = after.dtype is torch.bool and after.shape == before.shape
    check_result(is_mask and active_after == active, f"{active_after} entries are active, before {active}")
    kept = active - count
    threshold = magnitudes[was_active].topk(kept).values.min() if kept else torch.inf
    is_largest_kept = bool(is_active[was_active & (magnitudes > threshold)].all())
    kept_after = int((is_active & was_active & (magnitudes >= threshold)).sum())
    check_result(is_largest_kept and kept_after >= kept, "an entry of large magnitude was dropped")
    # Dropped entries may grow again. Those of magnitude ``threshold`` may be kept or dropped: not compared.
    growable = ~was_active | (magnitudes < threshold)
    grown, not_grown = gradients[growable & is_active], gradients[growable & ~is_active]
    if count and len(grown) and len(not_grown):
        smallest, largest = grown.min(), not_grown.max()
        message = f"an entry with |gradient| {smallest:.3g} was grown instead of one with {largest:.3g}"
        check_result(bool(smallest >= largest), message)
