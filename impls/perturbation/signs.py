"""Members' own signs: one byte each, whatever the type of what they flip.

Multiplying by a byte costs what multiplying by a float does, on a CPU too, drawing it no more, and reading
it a quarter of float32: so signs are stored as int8 and widened only where they are summed.
"""

from dataclasses import replace

import torch
from torch import Tensor

from impls.perturbation.axes import over_taps
from impls.perturbation.noise import NoiseStream


def drawn(stream: NoiseStream, draw: str, *shape: int) -> Tensor:
    """Draw fair signs as int8, [m, *shape]."""
    return replace(stream, dtype=torch.int8).signs(draw, *shape)


def flipped(x: Tensor, signs: Tensor) -> Tensor:
    """Multiply activations [r, m, g, c, *s] by each member's signs [m, g, c]."""
    return x * over_taps(signs, x[0])


def add_flipped(y: Tensor, values: Tensor, signs: Tensor, sigma: float | Tensor) -> Tensor:
    """Add sigma * signs * values to y in place, in one pass where sigma is a number; values are used up."""
    wide = over_taps(signs, y[0])
    if isinstance(sigma, Tensor):
        return y.addcmul_(values.mul_(wide), sigma)
    return y.addcmul_(values, wide, value=sigma)


def crossed(utilities: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
    """Sum utilities[m] * outputs[m] inputs[m]^T over members: [m], [m, g, o], [m, g, i] -> [g, o, i]."""
    weighted = outputs * over_taps(utilities, outputs)
    return torch.bmm(weighted.permute(1, 2, 0), inputs.to(weighted.dtype).transpose(0, 1))
