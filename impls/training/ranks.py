"""What ranks of torch.distributed agree on: gradients are averaged, masks are the first rank's.

Without other ranks nothing is sent. Every rank has to come here for the same layers in the same order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed


def are_others() -> bool:
    """Whether there are other ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size() > 1


def summed(tensor: Tensor) -> Tensor:
    """Return the sum over ranks; the tensor may be overwritten."""
    if are_others():
        distributed.all_reduce(tensor)
    return tensor


def totals(counts: Sequence[int], device: torch.device) -> list[int]:
    """Return the sums of numbers over ranks, sent by way of a device."""
    if not are_others():
        return list(counts)
    return [round(one) for one in summed(torch.tensor(counts, dtype=torch.float64, device=device)).tolist()]


def of_the_first(mask: Tensor) -> Tensor:
    """Return the first rank's mask: ties may be broken differently elsewhere."""
    if not are_others():
        return mask
    words = mask.to(torch.uint8)
    distributed.broadcast(words, 0)
    return words.bool()
