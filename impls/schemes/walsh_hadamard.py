"""The fast Walsh-Hadamard transform in plain torch, by products with small Hadamard matrices.

Sylvester's matrix of A B rows is the Kronecker product of those of A and B rows, so multiplying by it is one
product with each over an axis of its own: for 1024 = 32 * 32 that is 64 multiplications a channel instead of
1024, in two passes that matrix units like, where ten passes of additions would each read everything. On a CPU
two factors of 32 take a ninth of the time of the whole product; one factor is fastest up to 64, factors as
equal as possible beyond. The smaller matrices are leading parts of the larger, so only the largest is kept.

Only what is needed is computed: rows and columns beyond the outputs and inputs are left out factor by factor.
"""

import torch
from torch import Tensor
from torch.nn import functional

FACTOR = 64
"""Rows of the largest factor."""

IMAGE_FACTOR = 16
"""The same on a CPU where space lies behind the channels: smaller products stay in its cache."""


def width(outputs: int, inputs: int) -> int:
    """Return the rows of the smallest Hadamard matrix with so many rows and columns: a power of two."""
    return 1 << (max(outputs, inputs) - 1).bit_length()


def factors(size: int, most: int = FACTOR) -> list[int]:
    """Split a power of two into powers of two of at most ``most``, as equal as possible, largest first."""
    bits = size.bit_length() - 1
    count = max(1, -(-bits // (most.bit_length() - 1)))
    return [1 << (bits + place) // count for place in reversed(range(count))]


def sylvester(size: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Make the Hadamard matrix of a power of two up to 256: +1 where i & j has an even number of bits."""
    places = torch.arange(size, device=device)
    common = places.unsqueeze(1) & places
    for shift in (4, 2, 1):
        common = common ^ (common >> shift)
    return (1 - 2 * (common & 1)).to(dtype)


def matrix(outputs: int, inputs: int, seed: Tensor) -> Tensor:
    """Write out the first rows and columns of the smallest Hadamard matrix that has them, [outputs, inputs].

    ``seed`` is the matrix of the largest factor at least, see :func:`sylvester`.
    """
    written, rest = seed[:1, :1], width(outputs, inputs)
    for size in reversed(factors(rest)):
        written = torch.kron(seed[:size, :size], written)[:outputs, :inputs]
    return written


def transform(x: Tensor, outputs: int, seed: Tensor) -> Tensor:
    """Multiply channels by the first rows of a Hadamard matrix: [b, i, s] -> [b, outputs, s].

    Args:
        x: batch, channels and what lies behind them.
        outputs: how many channels come out.
        seed: the matrix of the largest factor at least.

    """
    most = IMAGE_FACTOR if x.shape[2] > 1 and x.device.type == "cpu" else FACTOR
    *outer, inner = factors(width(outputs, x.shape[1]), most)
    return _transform(x, outputs, outer, inner, seed)


def _transform(x: Tensor, outputs: int, outer: list[int], inner: int, seed: Tensor) -> Tensor:
    """Multiply by the Kronecker product of the outer factors and the inner one, [b, i, s] -> [b, o, s]."""
    batch, inputs, space = x.shape
    if not outer or max(outputs, inputs) <= inner:
        return _product(x, outputs, seed)
    short = -inputs % inner
    if short:
        x = functional.pad(x, (0, 0, 0, short))
    rows, columns = -(-outputs // inner), x.shape[1] // inner
    if rows < columns:
        # The outer axis shrinks, so it comes first.
        x = _outer(x.reshape(batch, columns, inner * space), rows, outer, seed)
        x = _product(x.reshape(batch * rows, inner, space), inner, seed)
    else:
        x = _product(x.reshape(batch * columns, inner, space), inner, seed)
        x = _outer(x.reshape(batch, columns, inner * space), rows, outer, seed)
    return x.reshape(batch, rows * inner, space)[:, :outputs]


def _outer(x: Tensor, outputs: int, outer: list[int], seed: Tensor) -> Tensor:
    *more, inner = outer
    return _transform(x, outputs, more, inner, seed)


def _product(x: Tensor, outputs: int, seed: Tensor) -> Tensor:
    """Multiply channels by the leading part of one factor, [b, i, s] -> [b, outputs, s]."""
    part = seed[:outputs, : x.shape[1]]
    if x.shape[2] == 1:
        return functional.linear(x.squeeze(2), part).unsqueeze(2)
    return torch.matmul(part, x)
