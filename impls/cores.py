"""Several shared cores: member j has core j modulo their number, in one batched product.

With g independent cores, each shared by every g-th member, what members lose by sharing falls to a g-th,
at the same arithmetic and g times the cores' memory. Members take cores in turn, so that a population of any
size uses all of them evenly, whatever its split.
"""

import torch
from torch import Tensor

from impls.operators import AbstractOperator


def per_core(op: AbstractOperator, x: Tensor, cores: Tensor, members: range) -> Tensor:
    """Apply to each member's rows its own core: [r, m, g, i, *s] -> [r, m, g, o, *s'].

    Rounds of members stand beside the repeats, so nothing is copied where the cores divide the members.

    Args:
        op: the operator.
        x: activations [r, m, g, i, *s] of these members.
        cores: [count, g, o, i, *taps].
        members: their places in the whole population.

    """
    count, total = cores.shape[0], len(members)
    if count == 1:
        return op.shared(x, cores[0])
    turned = cores.roll(-(members.start % count), 0)
    whole = total - total % count
    parts = []
    if whole:
        rounds = x[:, :whole].unflatten(1, (-1, count)).flatten(0, 1)
        parts.append(op.batched(rounds, turned).unflatten(0, (x.shape[0], -1)).flatten(1, 2))
    if whole < total:
        parts.append(op.batched(x[:, whole:], turned[: total - whole]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def by_core(values: Tensor, count: int, members: range) -> Tensor:
    """Lay out values [m, ...] by their members' cores, [count, rounds, ...]; zeros where no member is."""
    first = members.start % count
    rounds = -(-(first + len(members)) // count)
    if rounds * count != len(members):
        padded = values.new_zeros(rounds * count, *values.shape[1:])
        padded[first : first + len(members)] = values
        values = padded
    return values.unflatten(0, (rounds, count)).transpose(0, 1)
