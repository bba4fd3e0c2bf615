"""Updates that are sums of outer products: of factors, or of signs around what all members share."""

import torch
from torch import Tensor


def summed(  # noqa: PLR0913  what a sum takes, and what its members share
    weight: torch.Size,
    outputs: Tensor,
    inputs: Tensor,
    utilities: Tensor,
    core: Tensor | None = None,
    *,
    hadamard: bool = False,
    factor: float = 1.0,
    first: int = 0,
) -> Tensor:
    """Sum utilities[m] * outputs[m] inputs[m]^T over members in one kernel, and multiply what they share.

    With a core it is the update of flips on both sides, with ``hadamard`` that of a Hadamard matrix between
    signs, with neither that of low-rank noise.

    Args:
        weight: [1, o, i, *taps], which the sum has the shape of.
        outputs: [m, 1, o] or, of several ranks, [m, 1, k, o]: int8 or the utilities' type.
        inputs: [m, 1, i, *taps] or [m, 1, k, i, *taps]: likewise.
        utilities: [m]; the sum has their type.
        core: [1, o, i, *taps] or [cores, 1, o, i, *taps], of which members take one after another in turn.
        hadamard: whether to multiply by (-1)^popcount(o & i), for a weight without taps.
        factor: what the sum is multiplied by.
        first: where in the population the first member stands: member j has core j modulo their number.

    """
    from impls.kernels.outer import weighted_outer

    shape = (weight[1], weight[2:].numel())
    left, right = (values.reshape(-1, width) for values, width in zip((outputs, inputs), shape, strict=True))
    if core is not None:
        core = core.reshape(-1, *shape)
    total = weighted_outer(left, right, utilities, core, hadamard=hadamard, factor=factor, first=first)
    return total.view(weight)
