"""Tensor operations over members that several schemes use: channels, signs and shared cores.

The axes of all tensors of this package:

===  =======================================================================
r    repeats: rows that each member sees
m    members of the population
g    groups of a grouped convolution; 1 for other layers
o    output channels of a group
i    input channels of a group (the second axis of a torch weight)
k    selected channels, or the rank
...  taps of a weight (kernel height and width), or space of an activation
===  =======================================================================

Activations are [r, m, g, i, *space], a weight is [g, o, i, *taps], the members' weights are
[m, g, o, i, *taps]. To a scheme a grouped convolution is g independent layers.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from impls.perturbation.noise import NoiseStream
from impls.perturbation.operators import AbstractOperator


def take_channels(x: Tensor, index: Tensor) -> Tensor:
    """Select channels of x [r, m, g, c, *s] by each member's index [m, g, k] -> [r, m, g, k, *s]."""
    space = x.shape[4:]
    if space.numel() == 1:
        picked = x.flatten(3).gather(3, index.expand(x.shape[0], *index.shape))
        return picked.unflatten(3, (index.shape[2], *space)) if space else picked
    # A channel is a contiguous run of positions here: selecting whole runs is faster than gathering elements.
    channels = x.shape[3]
    lanes = torch.arange(index.shape[0] * index.shape[1], device=index.device).view(*index.shape[:2], 1)
    runs = x.flatten(1, 3).index_select(1, (index + lanes * channels).flatten())
    return runs.unflatten(1, index.shape)


def append_axes(values: Tensor, like: Tensor) -> Tensor:
    """Append axes of length 1 until ``values`` has as many axes as ``like``."""
    return values.reshape(*values.shape, *[1] * (like.dim() - values.dim()))


# Signs are int8 for values of any type: a multiplication costs the same on a CPU, and they take a quarter of
# the memory of float32. They are converted to a wider type only in sums.


def draw_signs(stream: NoiseStream, draw: str, *shape: int) -> Tensor:
    """Draw fair signs as int8, [m, *shape]."""
    return replace(stream, dtype=torch.int8).signs(draw, *shape)


def flip_signs(x: Tensor, signs: Tensor) -> Tensor:
    """Multiply activations [r, m, g, c, *s] by each member's signs [m, g, c]."""
    return x * append_axes(signs, x[0])


def add_with_signs(y: Tensor, values: Tensor, signs: Tensor, sigma: float | Tensor) -> Tensor:
    """Add sigma * signs * values to y in place.

    Args:
        y: [r, m, g, c, *s].
        values: of the same shape; it is overwritten if sigma is a tensor.
        signs: [m, g, c].
        sigma: a number, or a tensor that broadcasts to y.

    """
    wide = append_axes(signs, y[0])
    if isinstance(sigma, Tensor):
        return y.addcmul_(values.mul_(wide), sigma)
    return y.addcmul_(values, wide, value=sigma)


def sum_pieces(parts: Iterable[Tensor]) -> Tensor:
    """Add up parts in float32 or their dtype, whichever is wider, and round to their dtype once."""
    total: Tensor | None = None
    for part in parts:
        wide = part.to(torch.promote_types(torch.float32, part.dtype))
        total = wide if total is None else total.add_(wide)
    assert total is not None  # noqa: S101  a population has members
    return total.to(part.dtype)


def sum_outer_products(utilities: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
    """Sum utilities[m] * outputs[m] inputs[m]^T over members: [m], [m, g, o], [m, g, i] -> [g, o, i]."""
    weighted = outputs * append_axes(utilities, outputs)
    return torch.bmm(weighted.permute(1, 2, 0), inputs.to(weighted.dtype).transpose(0, 1))


# With g independent cores, member j has core j modulo g. The loss of quality by sharing is divided by g, for
# the same arithmetic and g times the cores' memory. Members take cores in turn, so that a population of any
# size uses all of them evenly, however it is split.


def same_core_fraction(members: int, cores: int) -> float:
    """Return the fraction of pairs of different members that have the same core: about 1 / cores.

    The kappa of one core is multiplied by it. It is 0 where no two members share a core.
    """
    if members < 2:  # noqa: PLR2004  there are no pairs
        return 1.0
    rounds, rest = divmod(members, cores)
    same = rest * (rounds + 1) * rounds + (cores - rest) * rounds * (rounds - 1)
    return same / (members * (members - 1))


def apply_cores(op: AbstractOperator, x: Tensor, cores: Tensor, members: range) -> Tensor:
    """Apply to each member's rows the member's core: [r, m, g, i, *s] -> [r, m, g, o, *s'].

    Members with the same core are computed as repeats of one member, and neither x nor a core is copied. If
    the operator returns its batch with the cores in front, the result is copied once into the members' order,
    which takes 1 to 3 % of the product's time.

    Args:
        op: the operator.
        x: activations [r, m, g, i, *s] of these members.
        cores: [count, g, o, i, *taps].
        members: their indices in the whole population.

    """
    count, total = cores.shape[0], len(members)
    if count == 1:
        return op.apply_shared(x, cores[0])
    first = members.start % count
    head = min(total, -members.start % count)
    whole = (total - head) // count * count
    parts = []
    if head:
        parts.append(op.apply_per_member(x[:, :head], cores[first : first + head]))
    if whole:
        rounds = x[:, head : head + whole].unflatten(1, (-1, count)).flatten(0, 1)
        parts.append(op.apply_per_member(rounds, cores).unflatten(0, (x.shape[0], -1)).flatten(1, 2))
    if head + whole < total:
        parts.append(op.apply_per_member(x[:, head + whole :], cores[: total - head - whole]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def members_of_core(core: int, count: int, members: range) -> slice:
    """Return the positions of the members that have a core, relative to the first of these members."""
    return slice((core - members.start) % count, None, count)


def group_by_core(values: Tensor, count: int, members: range) -> Tensor:
    """Arrange values [m, ...] by their members' cores, [count, rounds, ...], padded with zeros."""
    first = members.start % count
    rounds = -(-(first + len(members)) // count)
    if rounds * count != len(members):
        padded = values.new_zeros(rounds * count, *values.shape[1:])
        padded[first : first + len(members)] = values
        values = padded
    return values.unflatten(0, (rounds, count)).transpose(0, 1)


def unused_core_bytes(cores: Tensor, members: range) -> int:
    """Return the bytes of cores [count, ...] that no member uses if there are fewer members than cores."""
    return cores[0].nbytes * max(0, cores.shape[0] - len(members))


def member_cores(cores: Tensor, members: range) -> Tensor:
    """Return the core of each member, [m, ...] of cores [count, ...]; a view if there is one core."""
    count = cores.shape[0]
    if count == 1:
        return cores.expand(len(members), *cores.shape[1:])
    return cores[torch.arange(members.start, members.stop, device=cores.device) % count]
