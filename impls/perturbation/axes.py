"""The axis letters, once, and the two moves along them that every scheme shares.

===  =======================================================================
r    repeats: rows that each member sees
m    members of the population
g    groups of a grouped convolution; 1 for everything else
o    output channels of a group
i    input channels of a group (the second axis of a torch weight)
k    channels kept, or the rank
...  taps of a weight (kernel height and width), or space of an activation
===  =======================================================================

Activations are [r, m, g, i, *space], a weight is [g, o, i, *taps], the members' own weights are
[m, g, o, i, *taps]. Groups are explicit so that a grouped convolution is g independent layers to
a scheme, as it is to mathematics.
"""

import torch
from torch import Tensor


def take(x: Tensor, index: Tensor) -> Tensor:
    """Pick channels of x [r, m, g, c, *s] by each member's own index [m, g, k] -> [r, m, g, k, *s]."""
    space = x.shape[4:]
    if space.numel() == 1:
        picked = x.flatten(3).gather(3, index.expand(x.shape[0], *index.shape))
        return picked.unflatten(3, (index.shape[2], *space)) if space else picked
    # Channels are contiguous runs of space here: selecting whole runs beats gathering elements.
    channels = x.shape[3]
    lanes = torch.arange(index.shape[0] * index.shape[1], device=index.device).view(*index.shape[:2], 1)
    runs = x.flatten(1, 3).index_select(1, (index + lanes * channels).flatten())
    return runs.unflatten(1, index.shape)


def over_taps(values: Tensor, like: Tensor) -> Tensor:
    """Append axes of length 1 until values has as many axes as ``like``."""
    return values.reshape(*values.shape, *[1] * (like.dim() - values.dim()))
