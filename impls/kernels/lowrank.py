"""Low-rank noise in the epilogue of the product that it belongs to, in Triton.

Every row has its member's own factors: y_row = W x + s (x . down_m) up_m, summed over ranks. The row's
product with ``down`` is taken in the loop over channels, from the same tile of x that the matrix product
reads, and ``up`` meets the sums before they are written: no pass over x or y is added.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.autotune import chosen
from impls.kernels.ranks import check_rank
from impls.kernels.rows import (
    LEAST,
    Product,
    Tiling,
    place,
    precision,
    product,
    strength,
    strength_of,
    whose,
    wide,
)
from impls.kernels.tiles import deepen

NAME = "low rank"
"""Of its tiles in the tables of what was tuned."""

UNROLLED = tl.constexpr(4)
"""Ranks of which ``up`` is loaded all at once."""

TILING = Tiling(rows=128, columns=128, deep=64, group=8, warps=8, stages=3)
"""Of a product with stored factors, where nothing was tuned."""


def tiling_of(rank: int) -> Tiling:
    """Return the default tile sizes: a thread's share of ``down`` has to fit in its registers.

    It is as many numbers as a tile has rows, channels and ranks, divided by the threads.
    """
    if rank == 1:
        return TILING
    if rank <= UNROLLED.value:
        return TILING._replace(rows=64)
    rows = max(LEAST, 512 // rank)
    return TILING._replace(rows=rows, deep=32 if rows == 64 else LEAST, stages=4)  # noqa: PLR2004  as compiled


@triton.jit
def raised(
    sums, narrow, scale, up, member, rank, k, outputs, column, edge, RANK: tl.constexpr, TYPE: tl.constexpr
):
    """Add what ``up`` makes of rank k of ``narrow`` [RANK, rows]."""
    one = tl.sum(tl.where((rank == k)[:, None], narrow, 0), axis=0) * scale
    own = tl.load(up + (member * RANK + k)[:, None] * outputs + column[None, :], mask=edge, other=0)
    return sums + one[:, None] * own.to(TYPE)


@triton.jit
def low_rank_kernel(
    y, x, weight, down, up, scales, sigma,
    rows, outputs, inputs, members, positions,
    x_repeat, x_member, x_row, x_column, y_repeat, y_member, y_row, y_column, weight_row,
    row_tiles, column_tiles,
    RANK: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows, with down [m, RANK, i] and up [m, RANK, o]; the grid is all tiles."""
    row, column = place(row_tiles, column_tiles, GROUP, ROWS, COLUMNS)
    repeat, member, position = whose(row, members, positions)
    inside, across = row < rows, column < outputs
    x += repeat * x_repeat + member * x_member + position * x_row
    sums = tl.zeros((ROWS, COLUMNS), dtype=TYPE)
    narrow = tl.zeros((RANK, ROWS), dtype=TYPE)
    rank = tl.arange(0, RANK)
    for start in range(0, inputs, DEEP):
        k = start + tl.arange(0, DEEP)
        here = inside[:, None] & (k < inputs)[None, :]
        sums, values = deepen(
            sums, x, x_column, inside, weight, weight_row, column, across, k, inputs, TYPE, PRECISION
        )
        at = (member[None, :] * RANK + rank[:, None])[:, :, None] * inputs + k[None, None, :]
        own = tl.load(down + at, mask=here[None, :, :], other=0)
        narrow += tl.sum(values.to(TYPE)[None, :, :] * own.to(TYPE), axis=2)
    scale = strength(sigma, scales, repeat, inside, SCALED, TYPE)
    edge = inside[:, None] & across[None, :]
    if RANK <= UNROLLED:
        for k in tl.static_range(RANK):
            sums = raised(sums, narrow, scale, up, member, rank, k, outputs, column, edge, RANK, TYPE)
    else:
        # Unrolled, and loaded all at once, many ranks would not fit in registers.
        for k in tl.range(0, RANK, num_stages=1):
            sums = raised(sums, narrow, scale, up, member, rank, k, outputs, column, edge, RANK, TYPE)
    y += repeat * y_repeat + member * y_member + position * y_row
    tl.store(y[:, None] + column[None, :] * y_column, sums.to(y.dtype.element_ty), mask=edge)


def low_rank_product(
    x: Tensor,
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    sigma: float | Tensor,
    y: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """Multiply each row by W + sigma up_m^T down_m / sqrt(k), into ``y``, which is returned.

    For R rows of e bytes a number, one position each:

    * bytes: e R (i + o) and e i o of the product, and e m k (i + o) of factors; x, W and ``down`` once more
      for each tile of the other axis, out of a cache.
    * flops: 2 R i o on matrix units, and 2 R k i for each tile of columns + 2 R k o beside them.

    Args:
        x: [r, m, p, i], any strides.
        weight: [o, i].
        down: [m, k, i], contiguous; k as :func:`~impls.kernels.ranks.check_rank` has it.
        up: [m, k, o], contiguous.
        sigma: a number, or [r]: one for each repeat.
        y: [r, m, p, o], any strides.
        tiling: how the product is cut, if not as was tuned for this GPU, or as :func:`tiling_of` has it.

    Raises:
        ValueError: shapes or types do not fit.

    """
    read: Product = product(x, weight, y)
    rank, (outputs, inputs) = down.shape[1], weight.shape
    if down.shape != (read.members, rank, inputs) or up.shape != (read.members, rank, outputs):
        message = f"factors must be [m, k, i] and [m, k, o], got {list(down.shape)} and {list(up.shape)}"
        raise ValueError(message)
    check_rank(rank)
    if not y.numel():
        return y
    tiling = chosen(NAME, read, tiling, tiling_of(rank), rank)
    scale = strength_of(sigma, x, 1 / math.sqrt(rank))
    with torch.cuda.device_of(x):
        low_rank_kernel[read.grid(tiling)](
            y, x, read.weight, down, up, scale.scales, scale.number,
            *read.sizes, *read.strides, *read.tiles(tiling),
            RANK=rank, SCALED=scale.is_scaled, TYPE=wide(x.dtype), PRECISION=precision(x.dtype),
            **tiling.options,
        )  # fmt: skip
    return y
