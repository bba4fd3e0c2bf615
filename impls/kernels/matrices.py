"""Products of bits on int8 matrix units in Triton, for several rows of each member."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.words import load_words, operands, place, programs, scaled, tile

LEAST_ROWS = 16
"""Rows in the smallest tile that a matrix unit takes."""

MOST_ROWS = 128
"""Rows in a tile."""

MOST_COLUMNS = 128
"""Columns of words in a tile."""


def shape(rows: int) -> tuple[int, int]:
    """Return rows of a weight's words that a tile unpacks at once, and warps, for a tile of ``rows`` rows.

    Each thread then has whole words of both operands to unpack, and room for its part of the product.
    """
    return max(4, 128 // rows), 8 if rows == MOST_ROWS else 4


@triton.jit
def _unpacked(words, SIZE: tl.constexpr, DEEP: tl.constexpr):
    """Unpack words [SIZE, DEEP] to +1 and -1, int8 [SIZE, DEEP * 32], in an order that all words share.

    A register holds four of them: bits b, b + 8, b + 16 and b + 24 of its word. The bytes are taken apart and
    put together again in the same order, which the compiler leaves out.
    """
    bits = tl.join(words, words >> 1)
    bits = tl.join(bits, bits >> 2)
    bits = tl.join(bits, bits >> 4)
    # 255 for a bit that is 0, and 1 for one that is 1, in every byte: none borrows from the next.
    signs = 0xFFFFFFFF - (bits & 0x01010101) * 0xFE
    signs = tl.join(tl.join(signs, signs >> 16), tl.join(signs >> 8, signs >> 24))
    return signs.to(tl.int8).reshape(SIZE, DEEP * 32)


@triton.jit
def int8_product_kernel(
    out, x, weights, length, p, depth, width, x_stride, weight_stride, tiles, row_tiles,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply bits: the grid is tiles of columns times tiles of rows times members; outputs are rows."""
    member, rows, column = place(tiles, row_tiles, ROWS, COLUMNS)
    x += member * x_stride
    weights += member * weight_stride
    o = width // GROUP
    at_row = rows[:, None] * depth * GROUP
    y = tl.zeros((COLUMNS, ROWS), dtype=tl.int32)
    for start in range(0, depth * GROUP, DEEP):
        # Half k of a column: of word k // GROUP, and there beside the other half.
        k = start + tl.arange(0, DEEP)
        here = (k < depth * GROUP)[None, :]
        at = (k // GROUP).to(tl.int64)[None, :] * width + (k % GROUP)[None, :] + column[:, None] * GROUP
        signs = _unpacked(load_words(weights + at, here & (column[:, None] < o)), COLUMNS, DEEP)
        own = _unpacked(load_words(x + at_row + k[None, :], here & (rows[:, None] < p)), ROWS, DEEP)
        y = tl.dot(signs, tl.trans(own), acc=y, out_dtype=tl.int32)
    # Bits behind the last one are 0 on both sides: they came as (-1) * (-1).
    behind = tl.cdiv(depth * GROUP, DEEP) * DEEP * 32 - length
    at = (member * p + rows[None, :]) * o + column[:, None]
    y = scaled(y - behind, length, out.dtype.element_ty)
    tl.store(out + at, y, mask=(rows[None, :] < p) & (column[:, None] < o))


def int8_product(x: Tensor, weights: Tensor, length: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Multiply as :func:`impls.kernels.bits.bit_product`, for many rows of a member: [m, p, o].

    Bits are unpacked to +1 and -1 in int8 inside of the kernel, so that memory holds packed words only. For
    words of 32 bits, K of them in a column, and outputs of e bytes:

    * bytes: 4 K o for each member and each tile of 128 rows, 4 K p for each tile of 128 outputs, and e p o
      written.
    * operations: 64 K o p of int8 on the matrix units for a member, p rounded up to 16; and about one for
      each of 32 K o bits and tile of rows to unpack them: 72 us for 1024 members with a weight of
      1024 x 1024, at an H200's 1.5e13 integer operations a second.

    Args:
        x: [m, p, K] words of int32 or int64.
        weights: [m, K, o], o contiguous, of the same type. The member axis of either may be expanded.
        length: bits that are summed over, without those behind the last one.
        dtype: of the product; int32 for the sums themselves.

    Raises:
        ValueError: the shapes or types do not fit.

    """
    read = operands(x, weights, dtype)
    out, outputs = read.output(dtype), weights.shape[2]
    if not out.numel():
        return out
    rows, columns = tile(read.rows, MOST_ROWS, LEAST_ROWS), tile(outputs, MOST_COLUMNS, 64)
    tiles = -(-outputs // columns), -(-read.rows // rows)
    deep, warps = shape(rows)
    with torch.cuda.device_of(x):
        int8_product_kernel[programs(read.members, *tiles)](
            out, read.x, read.weights, length, *read.sizes, *tiles,
            GROUP=read.group, ROWS=rows, DEEP=deep, COLUMNS=columns, num_warps=warps,
        )  # fmt: skip
    return out
