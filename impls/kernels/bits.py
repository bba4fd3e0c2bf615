"""Products of packed bits in Triton, for few rows of each member.

A launcher takes plain tensors on one CUDA device and returns a new one. Bits behind the last one, of all
words or of each tap's, must be 0 in all that comes in, and are 0 in words that are returned. See
:mod:`impls.kernels.words` for how words lie in memory and :mod:`impls.kernels.matrices` for more rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.words import Operands, load_words, operands, place, popcount, programs, scaled, tile

MOST_ROWS = 4
"""Rows in a tile of a product."""

MOST_COLUMNS = 512
"""Columns in a tile: four words of 32 bits for each of 128 threads."""

DEEP = 8
"""Rows of a weight's words that are loaded at once."""


@triton.jit
def _differing(
    x, weights, rows, columns, p, depth, width,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Count differing bits of every row and column of one member: [ROWS, COLUMNS // GROUP].

    ``x`` points to [p, depth * GROUP] and ``weights`` to [depth, width]; ``width`` counts halves.
    """
    counts = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    at_row = rows[:, None] * depth * GROUP
    # Which half of its word a column is: known for each register, as a thread has whole words.
    half = (tl.arange(0, COLUMNS) % GROUP)[None, None, :]
    for start in range(0, depth, DEEP):
        k = start + tl.arange(0, DEEP)
        here = (rows[:, None] < p) & (k < depth)[None, :]
        low = load_words(x + at_row + k[None, :] * GROUP, here)[:, :, None]
        if GROUP > 1:
            high = load_words(x + at_row + k[None, :] * GROUP + 1, here)[:, :, None]
            low = tl.where(half == 1, high, low)
        inside = (k < depth)[None, :, None] & (columns < width)[None, None, :]
        at = k.to(tl.int64)[None, :, None] * width + columns[None, None, :]
        counts += tl.sum(popcount(low ^ load_words(weights + at, inside)), axis=1)
    return tl.sum(counts.reshape(ROWS, COLUMNS // GROUP, GROUP), axis=2)


@triton.jit
def bit_product_kernel(
    out, x, weights, length, p, depth, width, x_stride, weight_stride, tiles, row_tiles,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply bits: the grid is tiles of columns times tiles of rows times members."""
    member, rows, columns = place(tiles, row_tiles, ROWS, COLUMNS)
    x += member * x_stride
    weights += member * weight_stride
    counts = _differing(x, weights, rows, columns, p, depth, width, GROUP, ROWS, DEEP, COLUMNS)
    o = width // GROUP
    column = (tl.program_id(0) % tiles).to(tl.int64) * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
    at = (member * p + rows[:, None]) * o + column[None, :]
    y = scaled(length - 2 * counts, length, out.dtype.element_ty)
    tl.store(out + at, y, mask=(rows[:, None] < p) & (column[None, :] < o))


@triton.jit
def bit_product_threshold_kernel(
    out, x, weights, thresholds, length, p, depth, width, out_width,
    x_stride, weight_stride, threshold_stride, tiles, row_tiles,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply bits, compare and pack: as :func:`bit_product_kernel`; a tile has whole words of outputs."""
    member, rows, columns = place(tiles, row_tiles, ROWS, COLUMNS)
    x += member * x_stride
    weights += member * weight_stride
    counts = _differing(x, weights, rows, columns, p, depth, width, GROUP, ROWS, DEEP, COLUMNS)
    o = width // GROUP
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    column = tile * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
    limits = tl.load(thresholds + member * threshold_stride + column, mask=column < o, other=0)
    above = (length - 2 * counts > limits[None, :]) & (column < o)[None, :]
    bits = above.to(tl.uint32) << (tl.arange(0, COLUMNS // GROUP) % 32).to(tl.uint32)[None, :]
    packed = tl.sum(bits.reshape(ROWS, COLUMNS // GROUP // 32, 32), axis=2).to(tl.int32, bitcast=True)
    word = tile * (COLUMNS // GROUP // 32) + tl.arange(0, COLUMNS // GROUP // 32)
    at = (member * p + rows[:, None]) * out_width + word[None, :]
    tl.store(out + at, packed, mask=(rows[:, None] < p) & (word[None, :] < out_width))


def bit_product(x: Tensor, weights: Tensor, length: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Multiply each member's rows of +1 and -1 with its own weights: [m, p, o].

    y = length - 2 sum_K popcount(x ^ w), or in a floating type that by the square root of the length. For
    words of 32 bits, K of them in a column, and outputs of e bytes:

    * bytes: 4 K o for each member, from memory once and from a cache for every four rows more, 4 K p and
      e p o written. For 1024 members with a row and a weight of 1024 x 1024 that is 139 MB in float32, 32 us
      at an H200's 4.3 TB/s.
    * operations: xor, popcount and an addition, K o p of each for a member. POPC runs at a quarter of the
      others' rate or less: 9 us for the same population, and each row more.

    Args:
        x: [m, p, K] words of int32 or int64.
        weights: [m, K, o], o contiguous, of the same type. The member axis of either may be expanded.
        length: bits that are summed over, without those behind the last one.
        dtype: of the product; int32 for the sums themselves.

    Raises:
        ValueError: the shapes or types do not fit.

    """
    read = operands(x, weights, dtype)
    out = read.output(dtype)
    if not out.numel():
        return out
    rows, columns, tiles, grid = _tiling(read, 32)
    with torch.cuda.device_of(x):
        bit_product_kernel[grid](
            out, read.x, read.weights, length, *read.sizes, *tiles,
            GROUP=read.group, ROWS=rows, DEEP=DEEP, COLUMNS=columns,
        )  # fmt: skip
    return out


def bit_product_threshold(x: Tensor, weights: Tensor, length: int, thresholds: Tensor) -> Tensor:
    """Multiply as :func:`bit_product`, and pack the bits of y > threshold: [m, p, words(o)] of the type of x.

    Bits behind output o are 0. Instead of y, p o / 8 bytes are written for each member.

    Args:
        x: [m, p, K] words of int32 or int64.
        weights: [m, K, o], o contiguous, of the same type. The member axis of either may be expanded.
        length: bits that are summed over, without those behind the last one.
        thresholds: [o], or [m, o] for members' own, of int32 or float32.

    Raises:
        ValueError: the shapes or types do not fit.

    """
    read = operands(x, weights)
    outputs = weights.shape[2]
    if thresholds.dtype not in {torch.int32, torch.float32} or thresholds.shape not in {
        (outputs,),
        (read.members, outputs),
    }:
        message = (
            f"thresholds must be [{outputs}] or [{read.members}, {outputs}] of int32 or float32, got "
            f"{thresholds.dtype} {list(thresholds.shape)}"
        )
        raise ValueError(message)
    words = -(-outputs // (32 * read.group))
    out = torch.empty(read.members, read.rows, words, device=x.device, dtype=x.dtype)
    if not out.numel():
        return out
    limits = thresholds.contiguous()
    # A tile has whole words of outputs, also where they are of 64 bits: the last one writes all of them.
    rows, columns, tiles, grid = _tiling(read, 64 * read.group)
    with torch.cuda.device_of(x):
        bit_product_threshold_kernel[grid](
            out.view(torch.int32), read.x, read.weights, limits, length, *read.sizes[:3], words * read.group,
            *read.sizes[3:], outputs if limits.dim() > 1 else 0, *tiles,
            GROUP=read.group, ROWS=rows, DEEP=DEEP, COLUMNS=columns,
        )  # fmt: skip
    return out


def _tiling(read: Operands, least: int) -> tuple[int, int, tuple[int, int], tuple[int]]:
    """Return rows and columns of a tile, how many tiles there are of both, and the grid."""
    width = read.weights.shape[2]
    rows, columns = tile(read.rows, MOST_ROWS), tile(width, MOST_COLUMNS, least)
    tiles = -(-width // columns), -(-read.rows // rows)
    return rows, columns, tiles, programs(read.members, *tiles)
