"""Tensor operations over members that several schemes use: channels, signs and shared cores.

The axes of all tensors of this package:

===== =====================================================================
r     repeats: rows that each member sees
m     members of the population
g     groups of a grouped convolution; 1 for other layers
o     output channels of a group
i     input channels of a group (the second axis of a torch weight)
k     selected channels, or the rank
*taps kernel height and width of a weight
*s    height and width of an activation, also written ``*space``
===== =====================================================================

Activations are [r, m, g, i, *space], a weight is [g, o, i, *taps], the members' weights are
[m, g, o, i, *taps]. To a scheme a grouped convolution is g independent layers.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from impls.perturbation.noise import NoiseStream
from impls.perturbation.operators import AbstractOperator

MAX_SEPARATE_TERMS = 4
"""Up to this rank, rank-one terms are added to the output one by one; above, their sum is computed first."""


def take_channels(x: Tensor, index: Tensor) -> Tensor:
    """Select channels of x [r, m, g, c, *s] by each member's index [m, g, k] -> [r, m, g, k, *s]."""
    if x.shape[3] == 1:
        return x  # the only channel
    space = x.shape[4:]
    if space.numel() == 1:
        selected = x.flatten(3).gather(3, index.expand(x.shape[0], *index.shape))
        return selected.unflatten(3, (index.shape[2], *space)) if space else selected
    if len(space) == 1 and x.stride(3) == 1:  # the features of tokens, which are contiguous
        shape = (*x.shape[:3], *space, index.shape[2])
        return x.mT.gather(4, index.unsqueeze(2).expand(shape)).mT
    # With space, copying whole channels (contiguous positions) is faster than gathering elements.
    first_channel = torch.arange(0, index.shape[:2].numel() * x.shape[3], x.shape[3], device=index.device)
    rows = (index + first_channel.view(*index.shape[:2], 1)).flatten()
    return x.flatten(1, 3).index_select(1, rows).unflatten(1, index.shape)


def add_to_channels(y: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Add values [r, m, g, k, *s] to y [r, m, g, c, *s] in place, at each member's channels [m, g, k]."""
    return y.scatter_add_(3, append_axes(index, y[0]).expand(values.shape), values.to(y.dtype))


def add_factor_products(y: Tensor, inner: Tensor, up: Tensor) -> None:
    """Add the product of ``inner`` with each member's factor ``up`` to ``y``, in place.

    Args:
        y: the output [r, m, g, o, *s], in any memory layout.
        inner: the rows' products with the factor ``down``, scaled: [r, m, g, k, *s].
        up: [m, g, k, o].
    """
    if up.shape[2] > MAX_SEPARATE_TERMS:
        y += torch.einsum("rmgk...,mgko->rmgo...", inner, up)
        return
    for k in range(up.shape[2]):  # zip() of unbind() takes a few microseconds longer
        y.addcmul_(inner.narrow(3, k, 1), append_axes(up.select(2, k), y.select(0, 0)))


def append_axes(values: Tensor, like: Tensor) -> Tensor:
    """Append axes of length 1 until ``values`` has as many axes as ``like``."""
    count = like.dim() - values.dim()
    return values.reshape(*values.shape, *[1] * count) if count else values


def view_per_channel(factors: Tensor, x: Tensor) -> Tensor:
    """View factors [m, g, c] in a shape that multiplies activations x [r, m, g, c, *s]."""
    return append_axes(factors, x[0]) if x.dim() > 4 else factors  # noqa: PLR2004  with space


# Signs are int8 for activations of any dtype: they take a quarter of the memory of float32, and the
# multiplication takes the same time. Only sums convert them to a wider dtype.


def draw_signs(stream: NoiseStream, draw: str, *shape: int) -> Tensor:
    """Draw fair signs as int8, [m, *shape]."""
    return replace(stream, dtype=torch.int8).signs(draw, *shape)


def count_signs(number: int) -> float:
    """Return 2^number, the number of ways to choose signs; infinity if it is too large for a float."""
    return 2.0**number if number < sys.float_info.max_exp else math.inf


def flip_signs(x: Tensor, signs: Tensor) -> Tensor:
    """Multiply activations [r, m, g, c, *s] by each member's signs [m, g, c]."""
    return x * view_per_channel(signs, x)


def add_with_signs(y: Tensor, values: Tensor, signs: Tensor, sigma: float | Tensor) -> Tensor:
    """Add sigma * signs * values to y in place.

    Args:
        y: [r, m, g, c, *s].
        values: of y's shape; overwritten if sigma is a tensor.
        signs: [m, g, c].
        sigma: a number, or a tensor that broadcasts to y.
    """
    factors = view_per_channel(signs, y)
    if isinstance(sigma, Tensor):
        return y.addcmul_(values.mul_(factors), sigma)
    return y.addcmul_(values, factors, value=sigma)


def sum_pieces(pieces: Iterable[Tensor]) -> Tensor:
    """Sum tensors of one shape and dtype, in at least float32, and round to their dtype once."""
    total: Tensor | None = None
    for piece in pieces:
        wide = piece.to(torch.promote_types(torch.float32, piece.dtype))
        total = wide if total is None else total.add_(wide)
    assert total is not None  # noqa: S101  a population has members
    return total.to(piece.dtype)


def sum_outer_products(utilities: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
    """Sum utilities[m] * outputs[m] inputs[m]^T over members: [m], [m, g, o], [m, g, i] -> [g, o, i]."""
    weighted = outputs * append_axes(utilities, outputs)
    return torch.bmm(weighted.permute(1, 2, 0), inputs.to(weighted.dtype).transpose(0, 1))


# Shared cores: with g independent cores, member j has core j modulo g. This divides kappa by about g, for the
# same arithmetic and g times the memory of a core.


def same_core_fraction(members: int, cores: int) -> float:
    """Return the fraction of pairs of members that have the same core, about 1 / cores.

    Kappa of several cores is this fraction times kappa of one core. A single member counts as 1.
    """
    if members < 2:  # noqa: PLR2004  there are no pairs
        return 1.0
    rounds, remainder = divmod(members, cores)
    same = remainder * (rounds + 1) * rounds + (cores - remainder) * rounds * (rounds - 1)
    return same / (members * (members - 1))


def apply_cores(op: AbstractOperator, x: Tensor, cores: Tensor, members: range) -> Tensor:
    """Apply each member's core to its rows: [r, m, g, i, *s] -> [r, m, g, o, *s'].

    Members with the same core are computed as repeats of one member; neither x nor a core is copied.

    Args:
        op: the operator.
        x: activations [r, m, g, i, *s].
        cores: [count, g, o, i, *taps].
        members: the members in x, as indices in the whole population.
    """
    count, total = cores.shape[0], len(members)
    if count == 1:
        return op.apply_shared(x, cores[0])
    first = members.start % count
    start = min(total, -members.start % count)
    stop = start + (total - start) // count * count
    outputs = []
    if start:  # members before the first that has core 0
        outputs.append(op.apply_per_member(x[:, :start], cores[first : first + start]))
    if start < stop:  # complete rounds of all cores
        rounds = x[:, start:stop].unflatten(1, (-1, count)).flatten(0, 1)
        outputs.append(op.apply_per_member(rounds, cores).unflatten(0, (x.shape[0], -1)).flatten(1, 2))
    if stop < total:  # an incomplete last round
        outputs.append(op.apply_per_member(x[:, stop:], cores[: total - stop]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def members_of_core(core: int, count: int, members: range) -> slice:
    """Return which of these members have this core, as a slice of a tensor [m, ...]."""
    return slice((core - members.start) % count, None, count)


def group_by_core(values: Tensor, count: int, members: range) -> Tensor:
    """Arrange values [m, ...] by core: [count, rounds, ...], padded with zeros."""
    first = members.start % count
    rounds = -(-(first + len(members)) // count)
    if rounds * count != len(members):
        padded = values.new_zeros(rounds * count, *values.shape[1:])
        padded[first : first + len(members)] = values
        values = padded
    return values.view(rounds, count, *values.shape[1:]).transpose(0, 1)


def unused_core_bytes(cores: Tensor, members: range) -> int:
    """Return the bytes of the cores that no member has; 0 unless there are fewer members than cores."""
    return cores[0].nbytes * max(0, cores.shape[0] - len(members))


def member_cores(cores: Tensor, members: range) -> Tensor:
    """Return the core of each member: cores [count, ...] -> [m, ...]; a view if there is one core."""
    count = cores.shape[0]
    if count == 1:
        return cores.expand(len(members), *cores.shape[1:])
    return cores[torch.arange(members.start, members.stop, device=cores.device) % count]
