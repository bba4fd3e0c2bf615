"""Several shared cores: member j has core j modulo their number, in one batched product.

With g independent cores, each shared by every g-th member, what members lose by sharing falls to a g-th,
at the same arithmetic and g times the cores' memory. Members take cores in turn, so that a population of any
size uses all of them evenly, whatever its split.
"""

import torch
from torch import Tensor

from impls.perturbation.operators import AbstractOperator


def shared_pairs(members: int, cores: int) -> float:
    """Return the share of pairs of different members that have one core: 1 / cores of a large population.

    It is what kappa of one core is to be multiplied by, exactly: 0 where each member has a core of its own.
    """
    if members < 2:  # noqa: PLR2004  there are no pairs
        return 1.0
    rounds, rest = divmod(members, cores)
    same = rest * (rounds + 1) * rounds + (cores - rest) * rounds * (rounds - 1)
    return same / (members * (members - 1))


def per_core(op: AbstractOperator, x: Tensor, cores: Tensor, members: range) -> Tensor:
    """Apply to each member's rows its own core: [r, m, g, i, *s] -> [r, m, g, o, *s'].

    Rounds of members stand beside the repeats, and neither x nor a core is copied. An operator may give its
    batch back with the cores in front; then the result is copied once into the members' order, which takes
    1 to 3 % of the product's time. Writing products there with strides instead costs a CPU as much.

    Args:
        op: the operator.
        x: activations [r, m, g, i, *s] of these members.
        cores: [count, g, o, i, *taps].
        members: their places in the whole population.

    """
    count, total = cores.shape[0], len(members)
    if count == 1:
        return op.shared(x, cores[0])
    first = members.start % count
    head = min(total, -members.start % count)
    whole = (total - head) // count * count
    parts = []
    if head:
        parts.append(op.batched(x[:, :head], cores[first : first + head]))
    if whole:
        rounds = x[:, head : head + whole].unflatten(1, (-1, count)).flatten(0, 1)
        parts.append(op.batched(rounds, cores).unflatten(0, (x.shape[0], -1)).flatten(1, 2))
    if head + whole < total:
        parts.append(op.batched(x[:, head + whole :], cores[: total - head - whole]))
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


def unread_bytes(cores: Tensor, members: range) -> int:
    """Return the bytes of cores [count, ...] that no member has: there may be fewer members than cores."""
    return cores[0].nbytes * max(0, cores.shape[0] - len(members))


def own_cores(cores: Tensor, members: range) -> Tensor:
    """Return the core of each member, [m, ...] of cores [count, ...]: a view where there is one core."""
    count = cores.shape[0]
    if count == 1:
        return cores.expand(len(members), *cores.shape[1:])
    return cores[torch.arange(members.start, members.stop, device=cores.device) % count]
