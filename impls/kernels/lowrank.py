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

from impls.kernels.rows import (
    Product,
    Tiling,
    deepen,
    place,
    precision,
    product,
    strength,
    strength_of,
    whose,
    wide,
)
from impls.kernels.tuned import tuned

NAME = "low rank"
"""Of its tiles in the tables of what was tuned."""

TILING = Tiling(rows=128, columns=128, deep=64, group=8, warps=8, stages=3)
"""Of a product with stored factors, where nothing was tuned."""


def tiling_of(rank: int) -> Tiling:
    """Return the tiles of a product where nothing was tuned: factors have to fit in registers too."""
    return TILING if rank == 1 else TILING._replace(deep=32, stages=4)


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
            sums, x, weight, k, inputs, inside, column, outputs, x_column, weight_row, TYPE, PRECISION
        )
        at = (member[None, :] * RANK + rank[:, None])[:, :, None] * inputs + k[None, None, :]
        own = tl.load(down + at, mask=here[None, :, :], other=0)
        narrow += tl.sum(values.to(TYPE)[None, :, :] * own.to(TYPE), axis=2)
    scale = strength(sigma, scales, repeat, inside, SCALED, TYPE)
    edge = inside[:, None] & across[None, :]
    for k in tl.static_range(RANK):
        one = tl.sum(tl.where((rank == k)[:, None], narrow, 0), axis=0) * scale
        own = tl.load(up + (member * RANK + k)[:, None] * outputs + column[None, :], mask=edge, other=0)
        sums += one[:, None] * own.to(TYPE)
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
        down: [m, k, i], contiguous; k is a power of two.
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
    if rank & (rank - 1):
        message = f"a kernel takes a rank that is a power of two, got {rank}"
        raise ValueError(message)
    if not y.numel():
        return y
    tiling = tiling or tuned(NAME, x, read.rows, outputs, inputs, rank) or tiling_of(rank).suited(x.dtype)
    tiling = tiling.within(read.rows, outputs, inputs)
    scale = strength_of(sigma, x, 1 / math.sqrt(rank))
    with torch.cuda.device_of(x):
        low_rank_kernel[read.grid(tiling)](
            y, x, read.weight, down, up, scale.scales, scale.number,
            *read.sizes, *read.strides, *read.tiles(tiling),
            RANK=rank, SCALED=scale.is_scaled, TYPE=wide(x.dtype), PRECISION=precision(x.dtype),
            GROUP=tiling.group, ROWS=tiling.rows, COLUMNS=tiling.columns, DEEP=tiling.deep,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
    return y
