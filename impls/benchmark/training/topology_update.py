"""Topology updates without training: one rule for dropping and growing weights, computed in several ways.

Weight, mask and gradients stay constant, so that every call finds the same scores; changed entries are zeroed
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
from impls.benchmark.training.workload import AbstractTrainingWorkload, ensure
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
    """One multiplication by the mask, of the gradient in place: a lower bound of any update."""

    density: float = 0.1

    @override
    def choose(self, weight: Tensor, gradient: Tensor, mask: Tensor, count: int) -> Tensor:
        return gradient.mul_(mask)


@variant(mode="naive", baseline=True, operators=OPERATORS, source="rigl-torch, rewritten")
@dataclass(frozen=True)
class FullSort(AbstractTopology):
    """Two full sorts, int64 masks scattered from their order, and a count that waits for the device."""

    density: float = 0.1

    @override
    def choose(self, weight: Tensor, gradient: Tensor, mask: Tensor, count: int) -> Tensor:
        return drop_and_grow_by_sorting(weight, gradient, mask, count)


@variant(operators=OPERATORS, source="Evci et al. 2020; the selection is ours")
@variant(operators=OPERATORS, narrowed=True, source="Evci et al. 2020; the selection is ours")
@dataclass(frozen=True)
class PartialSelection(AbstractTopology):
    """Two partial selections by index; ``narrowed`` bounds them by a sample, which waits for the device.

    On a CPU, torch selects through pairs of a value and an index, 16 bytes per candidate, which its allocator
    does not count, so they are missing from every footprint; ``narrowed`` leaves few candidates.
    """

    narrowed: bool = False
    density: float = 0.1

    @override
    def choose(self, weight: Tensor, gradient: Tensor, mask: Tensor, count: int) -> Tensor:
        return sparse_masks.drop_and_grow(weight, gradient, mask, count, narrowed=self.narrowed)[0]


class TopologyWorkload(AbstractTrainingWorkload):
    """Selects a new mask for a weight, by the gradients in the buffers, and zeroes changed entries."""

    phase: Phase = "update"
    reason = "a topology update has no other phase"

    def __init__(self, scheme: AbstractTopology, case: Case, device: str, seed: int) -> None:
        """Draw weight [out, in, *kernel], gradients and mask."""
        shape, dtype = (case.out_channels, case.in_channels, *case.kernel_size), inputs.dtype_of(case)
        super().__init__(case, device, seed, inputs.normal(*shape, device=device, dtype=dtype, seed=seed))
        self._scheme = scheme
        self._weight, _ = inputs.normal(*shape, device=device, dtype=dtype, seed=seed + 3)
        nonzero = int(scheme.density * self._weight.numel())
        self._mask = sparse_masks.random_mask(self._weight, nonzero, Generator().manual_seed(seed))
        self._count = int(ALPHA * nonzero)
        self._weight.masked_fill_(~self._mask, 0)
        self._changed, self._momentum = self._weight.clone(), torch.ones_like(self._weight)

    @override
    def call(self) -> Tensor:
        after = self._scheme.choose(self._weight, self._buffers.take(), self._mask, self._count)
        if not isinstance(self._scheme, MaskMultiply):
            sparse_masks.zero_changed([self._changed, self._momentum], self._mask, after)
        return after

    @override
    def work(self, phase: Phase) -> Work | None:
        mask, weight = self._mask.nbytes, self._weight.nbytes
        if isinstance(self._scheme, MaskMultiply):
            moved, output = 2 * weight + mask, weight
            return Work(flops=self._weight.numel(), moved_bytes=moved, output_bytes=output)
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
            ensure(torch.equal(result, gradient * self._mask), "the product with the mask is wrong")

    @override
    def quality(self) -> Iterable[QualityMetric]:
        message = "the quality of an update shows in the accuracy of trained networks: see SparseDigits"
        raise UnavailableError(message)


build.register(AbstractTopology, TopologyWorkload)


@torch.no_grad()
def drop_and_grow_by_sorting(weight: Tensor, gradient: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return the next mask as rigl-torch computes it: two full sorts whose ranks are scattered back."""
    stays = _rank_mask(torch.where(mask, weight.abs(), -1.0), int(mask.sum()) - count)  # waits for the device
    scores = torch.where(stays.bool(), gradient.abs().min() - 1, gradient.abs())
    return (stays + _rank_mask(scores, count)).bool()


def _rank_mask(scores: Tensor, count: int) -> Tensor:
    """Return 1 for the ``count`` largest scores and 0 for the others, int64, by sorting all of them."""
    order = scores.flatten().sort(descending=True).indices
    is_first = torch.arange(len(order), device=order.device) < count
    ones = torch.where(is_first, torch.ones_like(order), torch.zeros_like(order))
    return torch.empty_like(order).scatter(0, order, ones).view(scores.shape)


def check_update(weight: Tensor, gradient: Tensor, before: Tensor, after: Tensor, count: int) -> None:
    """Raise WrongResultError unless a mask follows RigL's rule; among equal scores any choice is right."""
    magnitude, steepness = weight.abs().flatten(), gradient.abs().flatten()
    active_before, active_after = before.flatten(), after.flatten()
    active_count, active_count_after = int(before.sum()), int(after.sum())
    is_same_kind = after.dtype is torch.bool and after.shape == before.shape
    ensure(
        is_same_kind and active_count_after == active_count,
        f"{active_count_after} entries are active, before {active_count}",
    )
    stay = active_count - count
    least = magnitude[active_before].topk(stay).values.min() if stay else torch.inf
    largest_stay = bool(active_after[active_before & (magnitude > least)].all())
    stayed = int((active_after & active_before & (magnitude >= least)).sum())
    ensure(largest_stay and stayed >= stay, "an entry of large magnitude was dropped")
    growable = ~active_before | (magnitude < least)
    if count and bool((growable & active_after).any()) and bool((growable & ~active_after).any()):
        worst, best = steepness[growable & active_after].min(), steepness[growable & ~active_after].max()
        message = f"an entry with gradient {worst:.3g} was grown instead of one with {best:.3g}"
        ensure(bool(worst >= best), message)
