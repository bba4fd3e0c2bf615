"""Products with a shared core of the channels that members pick, in Triton: two launches.

y_row = W x + s C x[picks_m]. Picking in the loop of the product would do it again for each tile of columns:
at (1024, 1024) that is 8 times an index of 8 bytes, and a load that no other lane shares, for each number of
x, which takes several times the product. So one kernel writes what is picked, and another has both products
in one set of sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.autotune import chosen
from impls.kernels.rows import Tiling, place, precision, product, strength, strength_of, whose, wide
from impls.kernels.tiles import multiplied
from impls.kernels.words import programs, tile

NAME = "two products"
"""Of its tiles in the tables of what was tuned."""

TILING = Tiling(rows=128, columns=128, deep=32, group=8, warps=8, stages=4)
"""Of two products of a 16-bit type, where nothing was tuned."""

PICKED = (4, 256)
"""Rows and picks of a program that picks."""


@triton.jit
def pick_kernel(
    picked, x, picks,
    rows, count, members, positions, x_repeat, x_member, x_row, x_column, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy each row's channels picks [m, count] to picked [rows, count]; the grid is all tiles."""
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles * ROWS + tl.arange(0, ROWS)
    column = program % tiles * COLUMNS + tl.arange(0, COLUMNS)
    repeat, member, position = whose(row, members, positions)
    edge = (row < rows)[:, None] & (column < count)[None, :]
    index = tl.load(picks + (member * count)[:, None] + column[None, :], mask=edge, other=0)
    x += repeat * x_repeat + member * x_member + position * x_row
    values = tl.load(x[:, None] + index.to(tl.int64) * x_column, mask=edge, other=0)
    tl.store(picked + (row * count)[:, None] + column[None, :], values, mask=edge)


@triton.jit
def added_kernel(
    y, x, weight, second, core, scales, sigma,
    rows, outputs, inputs, members, positions,
    x_repeat, x_member, x_row, x_column, y_repeat, y_member, y_row, y_column, weight_row,
    count, row_tiles, column_tiles,
    SCALED: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows, with second [rows, count] and core [o, count]; the grid is all tiles."""
    row, column = place(row_tiles, column_tiles, GROUP, ROWS, COLUMNS)
    repeat, member, position = whose(row, members, positions)
    inside, across = row < rows, column < outputs
    sums = tl.zeros((ROWS, COLUMNS), dtype=TYPE)
    sums = multiplied(
        sums, second + row * count, 1, inside, core, count, column, across, 0, count, TYPE, PRECISION, DEEP
    )
    sums *= strength(sigma, scales, repeat, inside, SCALED, TYPE)[:, None]
    x += repeat * x_repeat + member * x_member + position * x_row
    sums = multiplied(
        sums, x, x_column, inside, weight, weight_row, column, across, 0, inputs, TYPE, PRECISION, DEEP
    )
    y += repeat * y_repeat + member * y_member + position * y_row
    edge = inside[:, None] & across[None, :]
    tl.store(y[:, None] + column[None, :] * y_column, sums.to(y.dtype.element_ty), mask=edge)


def picked_rows(x: Tensor, picks: Tensor) -> Tensor:
    """Copy the channels that each row's member picks: [r, m, p, i] and [m, k] -> [r, m, p, k], contiguous.

    For R rows of e bytes a number e R i and 8 m k bytes are read, 8 for an index of int64, and e R k written.
    A pick is a load of its own.

    Args:
        x: [r, m, p, i], any strides.
        picks: int32 or int64, [m, k], each below i.

    Raises:
        ValueError: picks do not fit.

    """
    members = x.shape[1]
    if picks.dtype not in {torch.int32, torch.int64} or picks.dim() != 2 or len(picks) != members:  # noqa: PLR2004  as its axes are
        message = f"picks must be int32 or int64 [{members}, k], got {picks.dtype} {list(picks.shape)}"
        raise ValueError(message)
    count = picks.shape[1]
    picked = torch.empty((*x.shape[:3], count), device=x.device, dtype=x.dtype)
    if not picked.numel():
        return picked
    rows = x.shape[:3].numel()
    high, across = tile(rows, PICKED[0]), tile(count, PICKED[1])
    tiles = -(-count // across)
    with torch.cuda.device_of(x):
        pick_kernel[programs(-(-rows // high), tiles)](
            picked, x, picks.contiguous(),
            rows, count, members, x.shape[2], *x.stride(), tiles, ROWS=high, COLUMNS=across,
        )  # fmt: skip
    return picked


def added_product(
    x: Tensor,
    weight: Tensor,
    second: Tensor,
    core: Tensor,
    sigma: float | Tensor,
    y: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """Add two products, W x and sigma C z of rows z, into ``y``, which is returned.

    For R rows of e bytes a number, one position each:

    * bytes: e R (i + k + o) and e o (i + k); rows once more for each tile of columns, W and C for each tile
      of rows, out of a cache.
    * flops: 2 R o (i + k) on matrix units: 1 + k / i times those of the plain product.

    Args:
        x: [r, m, p, i], any strides.
        weight: [o, i].
        second: z, [r, m, p, k], contiguous.
        core: C, [o, k].
        sigma: a number, or [r]: one for each repeat.
        y: [r, m, p, o], any strides.
        tiling: how the products are cut, if not as was tuned for this GPU, or as :data:`TILING` has it.

    Raises:
        ValueError: shapes or types do not fit.

    """
    read = product(x, weight, y)
    count = core.shape[-1]
    fits = second.shape == (*x.shape[:3], count) and core.shape == (weight.shape[0], count)
    if not fits or not second.dtype == core.dtype == x.dtype or not second.is_contiguous():
        message = (
            f"the second product takes contiguous rows [r, m, p, k] and a core [o, k] of {x.dtype}, got "
            f"{second.dtype} {list(second.shape)} and {core.dtype} {list(core.shape)}"
        )
        raise ValueError(message)
    if not y.numel():
        return y
    tiling = chosen(NAME, read, tiling, TILING, count)
    scale = strength_of(sigma, x)
    with torch.cuda.device_of(x):
        added_kernel[read.grid(tiling)](
            y, x, read.weight, second, core.contiguous(), scale.scales, scale.number,
            *read.sizes, *read.strides, count, *read.tiles(tiling),
            SCALED=scale.is_scaled, TYPE=wide(x.dtype), PRECISION=precision(x.dtype),
            **tiling.options,
        )  # fmt: skip
    return y
