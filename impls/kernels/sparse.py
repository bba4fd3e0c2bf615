"""Noise of a few input columns in the epilogue of the product that it belongs to, and its sum, in Triton.

Every row has a few columns of its member's own: y_row = W x + s sum_k x[column_k] v_k. What the row has at
these columns is gathered once, before the product, and meets the values before the sums are written.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.autotune import chosen
from impls.kernels.rows import (
    Tiling,
    place,
    precision,
    product,
    strength,
    strength_of,
    whose,
    wide,
)
from impls.kernels.tiles import multiplied
from impls.kernels.words import programs, tile

NAME = "sparse"
"""Of its tiles in the tables of what was tuned."""

TILING = Tiling(rows=128, columns=128, deep=64, group=8, warps=8, stages=3)
"""Of a product, where nothing was tuned."""

FEW = 2
"""Columns of a member that leave registers to spare in float32."""

MOST = 8
"""Columns of a member: a row's values at them stay in registers."""

AT_ONCE = 16
"""Rows of values that a sum loads at once."""

MOST_OUTPUTS = 256
"""Outputs in a tile of a sum: with 128 threads, 32 values in the registers of each."""


def tiling_of(kept: int, dtype: torch.dtype) -> Tiling:
    """Return the default tile sizes for ``kept`` columns of a member: values have to fit in registers."""
    return TILING._replace(rows=64) if kept > FEW and dtype is torch.float32 else TILING


@triton.jit
def sparse_kernel(
    y, x, weight, columns, values, scales, sigma,
    rows, outputs, inputs, members, positions,
    x_repeat, x_member, x_row, x_column, y_repeat, y_member, y_row, y_column, weight_row,
    row_tiles, column_tiles,
    KEPT: tl.constexpr, SLOTS: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows, with columns [m, KEPT] and values [m, KEPT, o]; the grid is all tiles."""
    row, column = place(row_tiles, column_tiles, GROUP, ROWS, COLUMNS)
    repeat, member, position = whose(row, members, positions)
    inside, across = row < rows, column < outputs
    x += repeat * x_repeat + member * x_member + position * x_row
    slot = tl.arange(0, SLOTS)
    own = (slot < KEPT)[:, None] & inside[None, :]
    which = tl.load(columns + member[None, :] * KEPT + slot[:, None], mask=own, other=0)
    narrow = tl.load(x[None, :] + which * x_column, mask=own, other=0).to(TYPE)
    narrow *= strength(sigma, scales, repeat, inside, SCALED, TYPE)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), dtype=TYPE)
    sums = multiplied(
        sums, x, x_column, inside, weight, weight_row, column, across, 0, inputs, TYPE, PRECISION, DEEP
    )
    edge = inside[:, None] & across[None, :]
    # Unrolled, and loaded all at once, many columns would not fit in registers.
    for k in tl.range(0, KEPT, num_stages=1):
        one = tl.sum(tl.where((slot == k)[:, None], narrow, 0), axis=0)
        change = tl.load(
            values + (member * KEPT + k)[:, None] * outputs + column[None, :], mask=edge, other=0
        )
        sums += one[:, None] * change.to(TYPE)
    y += repeat * y_repeat + member * y_member + position * y_row
    tl.store(y[:, None] + column[None, :] * y_column, sums.to(y.dtype.element_ty), mask=edge)


def sparse_product(
    x: Tensor,
    weight: Tensor,
    columns: Tensor,
    values: Tensor,
    sigma: float | Tensor,
    y: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """Multiply each row by W + sigma E_m, where E_m is 0 but for k columns, into ``y``, which is returned.

    For R rows of e bytes a number, one position each:

    * bytes: e R (i + o) and e i o of the product, e m k o of values and 8 m k of columns; columns, and x at
      them, once more for each tile of outputs, out of a cache.
    * flops: 2 R i o on matrix units, and 2 R k o beside them.

    Args:
        x: [r, m, p, i], any strides.
        weight: [o, i].
        columns: [m, k] of int64, contiguous; k is at most 8.
        values: [m, k, o], contiguous.
        sigma: a number, or [r]: one for each repeat.
        y: [r, m, p, o], any strides.
        tiling: how the product is cut, if not as was tuned for this GPU, or as :func:`tiling_of` has it.

    Raises:
        ValueError: shapes or types do not fit, or there are more columns.

    """
    read, kept = product(x, weight, y), columns.shape[-1]
    if columns.shape != (read.members, kept) or values.shape != (read.members, kept, weight.shape[0]):
        message = (
            f"columns must be [m, k] and values [m, k, o], got {list(columns.shape)} and {list(values.shape)}"
        )
        raise ValueError(message)
    if kept > MOST:
        message = f"a kernel takes at most {MOST} columns of a member, got {kept}"
        raise ValueError(message)
    if values.dtype is not x.dtype:
        message = f"values must have the type of the rows, {x.dtype}, got {values.dtype}"
        raise ValueError(message)
    if not y.numel():
        return y
    tiling = chosen(NAME, read, tiling, tiling_of(kept, x.dtype), kept)
    scale = strength_of(sigma, x)
    with torch.cuda.device_of(x):
        sparse_kernel[read.grid(tiling)](
            y, x, read.weight, columns.contiguous(), values.contiguous(), scale.scales, scale.number,
            *read.sizes, *read.strides, *read.tiles(tiling),
            KEPT=kept, SLOTS=tile(kept, MOST), SCALED=scale.is_scaled, TYPE=wide(x.dtype),
            PRECISION=precision(x.dtype),
            **tiling.options,
        )  # fmt: skip
    return y


@triton.jit
def column_sums_kernel(
    out, values, utilities, order, borders, kept, outputs, tiles,
    TYPE: tl.constexpr, AT_ONCE: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Sum what members have at one input column, for a tile of outputs: the grid is tiles times columns."""
    program = tl.program_id(0).to(tl.int64)
    column, output = program // tiles, program % tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    across = output < outputs
    begin, end = tl.load(borders + column), tl.load(borders + column + 1)
    sums = tl.zeros((OUTPUTS,), dtype=TYPE)
    for start in range(begin, end, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        there = at < end
        row = tl.load(order + at, mask=there, other=0)
        utility = tl.load(utilities + row // kept, mask=there, other=0).to(TYPE)
        change = tl.load(
            values + row[:, None] * outputs + output[None, :], mask=there[:, None] & across[None, :], other=0
        )
        sums += tl.sum(change.to(TYPE) * utility[:, None], axis=0)
    tl.store(out + column * outputs + output, sums.to(out.dtype.element_ty), mask=across)


class Sorted(NamedTuple):
    """Which rows of values belong to each column.

    Attributes:
        order: [m * k] of int64, rows of values by their column, and of a column by their member.
        borders: [i + 1] of int32, where in it each column begins.

    """

    order: Tensor
    borders: Tensor


def sorted_columns(columns: Tensor, inputs: int) -> Sorted:
    """Sort columns [m, k] of int64, in [0, inputs)."""
    # Sorting takes half the passes in 32 bits.
    ordered, order = columns.flatten().int().sort(stable=True)
    ends = torch.arange(inputs + 1, device=columns.device, dtype=torch.int32)
    return Sorted(order, torch.searchsorted(ordered, ends, out_int32=True))


def column_sums(rows: Sorted, values: Tensor, utilities: Tensor) -> Tensor:
    """Sum members' columns by their utilities, c_m v[m, k, o] at column i = columns[m, k]: [i, o].

    Rows of values are sorted by their column and each column adds its own, in the order of members: no
    atomics, the same bits every time, sums in float32 (float64 of float64).

    It could have been a product with a matrix of zeros and ones that is made in the kernel, as
    :func:`~impls.kernels.outer.weighted_outer`: 2 m k i o flops, as much as k products of the layer for as
    many rows as there are members. With m = 8192 and 1024 channels each way that takes 22 us times k on a
    GPU of 790 TFLOP/s. Sorting adds 16 MB of values times k up in 4 us times k, behind a sort of 8192 k
    numbers, some 20 us in a few launches that hardly grow; with 8192 channels it is 60 us against 1.4 ms
    times k.

    * bytes: e m k o of values once, e i o of the result, and those of a sort of m k numbers.
    * flops: 2 m k o, of no matrix unit.

    Args:
        rows: where each column's values are, of :func:`sorted_columns`.
        values: [m, k, o].
        utilities: [m], of the type of values, as is the sum.

    Raises:
        ValueError: shapes or types do not fit.

    """
    fits = values.dim() == 3 and utilities.shape == values.shape[:1]  # noqa: PLR2004  as its axes are
    if not fits or utilities.dtype is not values.dtype or rows.order.numel() != values.shape[:2].numel():
        message = (
            f"a sum takes values [m, k, o], utilities [m] of their type and m * k rows, got {values.dtype} "
            f"{list(values.shape)}, {utilities.dtype} {list(utilities.shape)} and {list(rows.order.shape)}"
        )
        raise ValueError(message)
    _, kept, outputs = values.shape
    inputs = len(rows.borders) - 1
    out = torch.empty(inputs, outputs, device=values.device, dtype=values.dtype)
    if not out.numel():
        return out
    width = tile(outputs, MOST_OUTPUTS, 32)
    tiles = -(-outputs // width)
    with torch.cuda.device_of(values):
        column_sums_kernel[programs(inputs, tiles)](
            out, values.contiguous(), utilities.contiguous(), rows.order, rows.borders, kept, outputs, tiles,
            TYPE=wide(values.dtype), AT_ONCE=AT_ONCE, OUTPUTS=width,
        )  # fmt: skip
    return out
