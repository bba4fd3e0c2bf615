"""Which connections a sparse weight has: dropped by magnitude, grown by gradient, always as many as before.

The rule is that of RigL (Evci et al., Rigging the Lottery, 2020, algorithm 1). Connections are chosen by
index and never by a threshold, so that their number is exact whatever the weights and gradients are: tied,
zero or no numbers at all. Those that were dropped may be grown again, and keep their value then.
"""

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

SAMPLE = 2**14
"""So many scores, drawn at random, say between which two of them the one lies that is just chosen."""
SPARE = 5.0
"""These bounds are so many standard errors apart from it: nearer it would lie outside of them too often."""
FEW = 16
"""Of scores between the bounds that many are few: one in so many of all."""


def seeded(seed: int) -> Generator:
    """Return a generator on the CPU.

    Raises:
        ValueError: the seed is no whole number of 64 bits.

    """
    is_whole = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    if not is_whole or not -(2**63) <= seed < 2**64:
        message = f"seed {seed!r}: expected a whole number of 64 bits"
        raise ValueError(message)
    return Generator().manual_seed(int(seed))


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
    value and an index for each candidate: at most 16 bytes for each entry of a float32 weight, whatever part
    of it is connected and moves.

    Args:
        weight: any shape.
        gradient: the dense one, in the same shape and type.
        mask: bool, in the same shape: what is connected now.
        moved: how many connections are dropped, and as many grown; at most as many as there are.
        narrowed: look through a sample first, and select among those entries that it leaves in doubt. On a
            CPU, where torch selects through pairs of all values and indices, 16 bytes each, this takes a
            tenth of the time; elsewhere it would make the host wait for the device, and without it nothing
            does.

    Returns:
        The mask, and a bool without dimensions on its device.

    """
    found = mask.flatten().clone()
    scores = weight.abs().flatten().nan_to_num_(nan=0.0).neg_()  # finite, as what is not connected is not
    scores.masked_fill_(~found, -math.inf)
    found ^= _largest(scores, moved, narrowed=narrowed)
    torch.abs(gradient.flatten(), out=scores)
    is_finite = scores.amax().isfinite()
    if narrowed and not is_finite:
        return mask.clone(), is_finite
    scores.masked_fill_(found, -math.inf)
    found ^= _largest(scores, moved, narrowed=narrowed)
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
    """Return a mask [n] of the ``count`` largest of scores [n]; of equal ones any may be in it."""
    if narrowed and len(scores) > SAMPLE and (chosen := _narrowed(scores, count)) is not None:
        return chosen
    is_less = 2 * count <= len(scores)  # what is selected has an index each: select what is chosen, or is not
    selected = scores.topk(count if is_less else len(scores) - count, largest=is_less, sorted=False).indices
    chosen = torch.full_like(scores, not is_less, dtype=torch.bool)
    chosen[selected] = is_less
    return chosen


def _narrowed(scores: Tensor, count: int) -> Tensor | None:
    """Return the same by way of a sample, or None where that misleads or leaves too many in doubt."""
    generator = Generator().manual_seed(0)
    drawn = torch.randint(len(scores), (SAMPLE,), generator=generator).to(scores.device)
    sample = scores[drawn]
    share = count / len(scores)
    spare = SPARE * math.sqrt(SAMPLE * share * (1 - share)) + 1
    upper, lower = math.floor(SAMPLE * share - spare), math.ceil(SAMPLE * share + spare)
    most = float(sample.kthvalue(SAMPLE - upper).values) if upper >= 0 else math.inf
    least = float(sample.kthvalue(SAMPLE - lower).values) if lower < SAMPLE else -math.inf
    chosen = scores > most
    left = count - int(chosen.count_nonzero())
    part = torch.empty_like(chosen)
    for is_above, bound, are_tied in (
        (torch.ge, most, True),
        (torch.gt, least, False),
        (torch.ge, least, True),
    ):
        if left <= 0:
            break
        is_above(scores, bound, out=part)
        part &= ~chosen
        size = int(part.count_nonzero())
        if size > left and are_tied:
            _cut(part, left)
        elif size > left:
            if size * FEW > len(scores):
                return None
            candidates = part.nonzero().flatten()
            part.zero_()[candidates[scores[candidates].topk(left, sorted=False).indices]] = True
        chosen |= part
        left -= min(size, left)
    return chosen if left == 0 else None


def _cut(part: Tensor, count: int) -> None:
    """Leave the first ``count`` entries of a mask [n] that has more, by halving: no index is needed."""
    low, high = 0, len(part)
    while high - low > 1:
        middle = (low + high) // 2
        here = int(part[low:middle].count_nonzero())
        if here >= count:
            high = middle
        else:
            low, count = middle, count - here
    part[high:] = False


def _first(scores: Tensor, count: int) -> Tensor:
    """Return 1 for the ``count`` largest scores and 0 for the others, int64, by sorting all of them."""
    order = scores.flatten().sort(descending=True).indices
    is_first = torch.arange(len(order), device=order.device) < count
    ones = torch.where(is_first, torch.ones_like(order), torch.zeros_like(order))
    return torch.empty_like(order).scatter(0, order, ones).view(scores.shape)
