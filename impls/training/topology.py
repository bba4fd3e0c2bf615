"""Which connections a sparse weight has: dropped by magnitude, grown by gradient, always as many as before.

The rule is that of RigL (Evci et al., Rigging the Lottery, 2020, algorithm 1). Connections are chosen by
index and never by a threshold, so that their number is exact whatever the weights and gradients are: tied,
zero or no numbers at all. Those that were dropped may be grown again, and keep their value then.
"""

import math
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

SAMPLE = 2**14
"""So many scores, evenly apart, say above which of them the largest ones lie."""
SPARE = 5.0
"""That bound is lower by so many standard errors: otherwise too few would be above it too often."""
WORTH = 4
"""Scores are narrowed down only where no more than one in so many is wanted."""


def scattered(weight: Tensor, kept: int, generator: Generator) -> Tensor:
    """Return a mask of exactly so many entries, at random; the same whatever the weight's device is.

    Args:
        weight: any shape; the mask has the same, and its device.
        kept: how many entries are connected.
        generator: on the CPU.

    """
    mask = torch.zeros(weight.numel(), dtype=torch.bool)
    mask[torch.randperm(weight.numel(), generator=generator)[:kept]] = True
    return mask.view(weight.shape).to(weight.device)


@torch.no_grad()
def by_sorting(weight: Tensor, gradient: Tensor, mask: Tensor, moved: int) -> Tensor:
    """Return the next mask as rigl-torch finds it: two full sorts, whose ranks are scattered back.

    Args:
        weight: any shape.
        gradient: the dense one, in the same shape.
        mask: bool, in the same shape: what is connected now.
        moved: how many connections are dropped, and as many grown.

    """
    kept = int(mask.sum()) - moved  # waits for the device
    stays = _first(torch.where(mask, weight.abs(), -1.0), kept)
    lifted = torch.where(stays.bool(), gradient.abs().min() - 1, gradient.abs())
    return (stays + _first(lifted, moved)).bool()


@torch.no_grad()
def by_selection(
    weight: Tensor, gradient: Tensor, mask: Tensor, moved: int, *, narrowed: bool
) -> tuple[Tensor, Tensor]:
    """Return the next mask from two partial selections of ``moved`` entries, and whether it is one.

    Where a gradient is not finite, the mask is the one that was. Temporary are the scores, masks, and a
    value and an index for each candidate.

    Args:
        weight: any shape.
        gradient: the dense one, in the same shape and type.
        mask: bool, in the same shape: what is connected now.
        moved: how many connections are dropped, and as many grown; at most as many as there are.
        narrowed: look through a sample first, and select among those entries that it leaves. On a CPU, where
            torch selects through pairs of all values and indices, this takes a tenth of the time; elsewhere
            it would make the host wait for the device, and without it nothing does.

    Returns:
        The mask, and a bool without dimensions on its device.

    """
    found = mask.flatten().clone()
    scores = weight.abs().flatten().nan_to_num_(nan=0.0).neg_()  # finite, as what is not connected is not
    scores.masked_fill_(~found, -math.inf)
    if moved:
        found[_largest(scores, moved, narrowed=narrowed)] = False
    torch.abs(gradient.flatten(), out=scores)
    is_finite = scores.amax().isfinite()
    scores.masked_fill_(found, -math.inf)
    if moved:
        found[_largest(scores, moved, narrowed=narrowed)] = True
    return torch.where(is_finite, found.view(mask.shape), mask), is_finite


@torch.no_grad()
def restart(weight: Tensor, slots: Sequence[Tensor], before: Tensor, after: Tensor) -> None:
    """Set what is not connected to zero, and what is new; survivors keep every bit of theirs.

    Args:
        weight: changed in place.
        slots: what the optimizer keeps for each of its entries, changed in place.
        before: the mask until now.
        after: the mask from now on.

    """
    others = ~(before & after)
    for one in (weight, *slots):
        one.masked_fill_(others, 0)


def _largest(scores: Tensor, count: int, *, narrowed: bool) -> Tensor:
    """Return the indices of the ``count`` largest of scores [n], in any order."""
    if narrowed and WORTH * count <= len(scores):
        sample = scores[:: max(1, len(scores) // SAMPLE) | 1]  # an odd step does not follow a column
        expected = len(sample) * count / len(scores)
        place = math.ceil(expected + SPARE * math.sqrt(expected)) + 1
        if place < len(sample):
            least = sample.topk(place).values[-1]
            candidates = (scores >= least).nonzero().flatten()
            if count <= len(candidates) < len(scores) // 2:
                return candidates[scores[candidates].topk(count, sorted=False).indices]
    return scores.topk(count, sorted=False).indices


def _first(scores: Tensor, count: int) -> Tensor:
    """Return 1 for the ``count`` largest scores and 0 for the others, int64, by sorting all of them."""
    order = scores.flatten().sort(descending=True).indices
    is_first = torch.arange(len(order), device=order.device) < count
    ones = torch.where(is_first, torch.ones_like(order), torch.zeros_like(order))
    return torch.empty_like(order).scatter(0, order, ones).view(scores.shape)
