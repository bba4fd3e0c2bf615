"""Hadamard noise in one kernel with the product that it belongs to, in Triton: the transform costs a tile.

y_row = W x + s (H (x * in_m)) * out_m with H[o, i] = -1 to the number of bits that o and i have in common,
whatever the widths. Split both numbers into blocks of B, o = a B + b and i = a' B + b', and H falls into
-1^(a . a') and a matrix of B rows: all columns of one block a need

    z[row, a, b] = sum_b' H_B[b, b'] u[row, b'],      u[row, b'] = sum_a' -1^(a . a') x[row, a', b'].

The blocks a' are just the tiles of x that the product's loop over channels reads: each is flipped and added
to u with one sign for the whole tile, and when the loop is done one small product with H_B, made from its
indices, turns u into z. No pass is added, nothing is written in between, and rows may have any width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.autotune import chosen
from impls.kernels.rows import Tiling, corner, precision, product, strength, strength_of, whose, wide
from impls.kernels.tiles import channels, check_signs, flip, weights

NAME = "hadamard"
"""Of its tiles in the tables of what was tuned."""

TILING = Tiling(rows=128, columns=128, deep=64, group=8, warps=8, stages=3)
"""Of a product of a 16-bit type, where nothing was tuned."""

MOST_BLOCKS = 2
"""Blocks of ``deep`` columns in a tile: there is a sum of rows' channels for each."""


@triton.jit
def sign_of(first, second):
    """Return -1 to the number of bits that both int32 have in common."""
    bits = first & second
    bits ^= bits >> 16
    bits ^= bits >> 8
    bits ^= bits >> 4
    # The parity of four bits, looked up.
    return 1 - 2 * (0x6996 >> (bits & 15) & 1)


@triton.jit
def transformed(
    mixed, scale, own_outputs, inside, first, outputs,
    NARROW: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Turn u of one block, [rows, DEEP], into the noise of WIDTH columns from ``first`` on."""
    column = first + tl.arange(0, WIDTH)
    small = sign_of(tl.arange(0, DEEP)[:, None], (column % DEEP)[None, :]).to(NARROW)
    sums = tl.dot(mixed.to(NARROW), small, out_dtype=mixed.dtype, input_precision=PRECISION)
    return flip(sums * scale[:, None], channels(own_outputs, 1, inside, column, outputs))


@triton.jit
def hadamard_kernel(
    y, x, weight, own_inputs, own_outputs, scales, sigma,
    rows, outputs, inputs, members, positions,
    x_repeat, x_member, x_row, x_column, y_repeat, y_member, y_row, y_column, weight_row,
    row_tiles, column_tiles,
    BLOCKS: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows; BLOCKS blocks of DEEP columns or a part of one; the grid is all tiles."""
    down, along = corner(row_tiles, column_tiles, GROUP)
    row, column = down * ROWS + tl.arange(0, ROWS), along * COLUMNS + tl.arange(0, COLUMNS)
    first = along.to(tl.int32) * COLUMNS
    repeat, member, position = whose(row, members, positions)
    inside, across = row < rows, column < outputs
    x += repeat * x_repeat + member * x_member + position * x_row
    own_inputs += member * inputs
    block = first // DEEP
    sums = tl.zeros((ROWS, COLUMNS), dtype=TYPE)
    mixed = tl.zeros((ROWS, DEEP), dtype=TYPE)
    if BLOCKS > 1:
        others = tl.zeros((ROWS, DEEP), dtype=TYPE)
    # Signs are loaded one tile ahead by hand: the compiler does so only for what a product reads.
    signs = channels(own_inputs, 1, inside, tl.arange(0, DEEP), inputs)
    for start in range(0, inputs, DEEP):
        k = start + tl.arange(0, DEEP)
        ahead = channels(own_inputs, 1, inside, k + DEEP, inputs)
        values = channels(x, x_column, inside, k, inputs)
        shared = weights(weight, weight_row, column, across, k, inputs)
        sums = tl.dot(values, shared, acc=sums, out_dtype=TYPE, input_precision=PRECISION)
        flipped = flip(values.to(TYPE), signs)
        mixed += flipped * sign_of(block, start // DEEP).to(TYPE)
        if BLOCKS > 1:
            others += flipped * sign_of(block + 1, start // DEEP).to(TYPE)
        signs = ahead
    scale = strength(sigma, scales, repeat, inside, SCALED, TYPE)
    own_outputs += member * outputs
    noise = transformed(
        mixed,
        scale,
        own_outputs,
        inside,
        first,
        outputs,
        x.dtype.element_ty,
        COLUMNS // BLOCKS,
        DEEP,
        PRECISION,
    )
    if BLOCKS > 1:
        more = transformed(
            others,
            scale,
            own_outputs,
            inside,
            first + DEEP,
            outputs,
            x.dtype.element_ty,
            DEEP,
            DEEP,
            PRECISION,
        )
        noise = tl.join(noise, more).permute(0, 2, 1).reshape(ROWS, COLUMNS)
    y += repeat * y_repeat + member * y_member + position * y_row
    edge = inside[:, None] & across[None, :]
    tl.store(y[:, None] + column[None, :] * y_column, (sums + noise).to(y.dtype.element_ty), mask=edge)


def bounded(tiling: Tiling) -> Tiling:
    """Return tiles with fewer columns where they would be more than MOST_BLOCKS blocks."""
    return tiling._replace(columns=min(tiling.columns, MOST_BLOCKS * tiling.deep))


def blocks_of(tiling: Tiling) -> int:
    """Return how many blocks of the transform a tile's columns are."""
    return max(1, tiling.columns // tiling.deep)


def hadamard_product(
    x: Tensor,
    weight: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    sigma: float | Tensor,
    y: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """Multiply each row by W + sigma H between its member's signs, into ``y``, which is returned.

    For R rows of e bytes a number, one position each, in tiles of C columns and D channels:

    * bytes: e R (i + o) and e i o of the product, and m (i + o) of signs; x and signs once more for each tile
      of columns, W for each tile of rows, out of a cache.
    * flops: 2 R i o of the product and 2 R o D of the transform on matrix units: 1 + D / i times the plain
      one, 1.06 at (1024, 1024). Beside them 2 R i operations for each block of D columns, at most two of
      them in a tile, and one exclusive or on each number of x for each tile of columns.

    The alternative, a kernel that transforms rows once and a product that adds them in its epilogue, moves
    R (3 i + 2 o) bytes in its first pass in 16-bit types and reads R o numbers again: at (1024, 1024) and
    R = 8192 the pass is 42 MB, 10 us of an H200's memory beside a product of 22 us. It needs room for R o
    numbers and a second launch, but it costs less and less as o grows, where here each tile of columns sums
    its rows' channels anew.

    Args:
        x: [r, m, p, i], any strides.
        weight: [o, i].
        inputs: signs [m, i] as int8, contiguous.
        outputs: signs [m, o] as int8, contiguous.
        sigma: a number, or [r]: one for each repeat.
        y: [r, m, p, o], any strides.
        tiling: how the product is cut, if not as was tuned for this GPU, or as :data:`TILING` has it. Tiles
            get fewer columns where they would be more than two blocks of channels.

    Raises:
        ValueError: shapes or types do not fit.

    """
    read = product(x, weight, y)
    check_signs("inputs", inputs, read.members, weight.shape[1])
    check_signs("outputs", outputs, read.members, weight.shape[0])
    if not y.numel():
        return y
    tiling = bounded(chosen(NAME, read, tiling, TILING))
    scale = strength_of(sigma, x)
    with torch.cuda.device_of(x):
        hadamard_kernel[read.grid(tiling)](
            y, x, read.weight, inputs, outputs, scale.scales, scale.number,
            *read.sizes, *read.strides, *read.tiles(tiling), BLOCKS=blocks_of(tiling),
            SCALED=scale.is_scaled, TYPE=wide(x.dtype), PRECISION=precision(x.dtype),
            **tiling.options,
        )  # fmt: skip
    return y
