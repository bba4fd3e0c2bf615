"""Which layers have a gradient that is not finite, so that no rule touches them."""

import cmath
from collections.abc import Sequence

from torch import Tensor, nn


def bad_layers(gradients: Sequence[Tensor | None], layers: Sequence[int]) -> set[int]:
    """Return the layers of which some gradient is NaN or infinite, by one look at all where none is.

    Args:
        gradients: of any shapes and devices, sparse ones too.
        layers: the number of the layer of each.

    """
    if _are_finite([one for one in gradients if one is not None]):
        return set()
    return {
        layer
        for layer, one in zip(layers, gradients, strict=True)
        if one is not None and not bool(_values(one).isfinite().all())
    }


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _are_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether all are, as far as that can be told fast: no stands for perhaps not."""
    # What is not finite stays so in a sum. That may overflow, as the squares of a norm may.
    if all(one.is_cpu for one in gradients):
        return cmath.isfinite(sum([one.sum().item() for one in gradients]))
    # One synchronisation for all of a device.
    return bool(nn.utils.get_total_norm([_values(one) for one in gradients]).isfinite())
