"""Flipped noise in one kernel with the product that it belongs to, in Triton.

y_row = W x + s (C (x * in_m)) * out_m. The core's product comes first and is scaled and flipped where its
sums stand; the plain product adds to the same sums. So nothing is written in between, and a tile has one
set of sums. Two of them in one loop would read x once: 56 KiB out of a cache for 64 channels of 128 x 128
outputs, here 72. But they fill the registers, and with one set capability 9.0 has room for tiles of
128 x 256: 52.

What was left out is fp8. A core of signs is exact in it, rows are not: it has 4 significant bits, bfloat16 8.
Exact rows would be two of fp8, and two products at twice the speed take the time of one; besides, numbers far
below their row's largest would be lost. A core of int8 that is widened on its way would save 8 of the 40 KiB
that 64 channels of the first product read out of a cache, and pay with the core's way through registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.autotune import chosen
from impls.kernels.rows import Tiling, place, precision, product, strength, strength_of, whose, wide
from impls.kernels.tiles import channels, check_signs, flip, multiplied, weights

NAME = "flipped"
"""Of its tiles in the tables of what was tuned."""

TILING = Tiling(rows=128, columns=128, deep=32, group=8, warps=8, stages=4)
"""Of a product of a 16-bit type, where nothing was tuned."""


@triton.jit
def flipped_kernel(
    y, x, weight, core, own_inputs, own_outputs, scales, sigma,
    rows, outputs, inputs, members, positions,
    x_repeat, x_member, x_row, x_column, y_repeat, y_member, y_row, y_column, weight_row,
    row_tiles, column_tiles,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    SCALED: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows; INPUTS and OUTPUTS say which signs there are; the grid is all tiles."""
    row, column = place(row_tiles, column_tiles, GROUP, ROWS, COLUMNS)
    repeat, member, position = whose(row, members, positions)
    inside, across = row < rows, column < outputs
    x += repeat * x_repeat + member * x_member + position * x_row
    sums = tl.zeros((ROWS, COLUMNS), dtype=TYPE)
    for start in range(0, inputs, DEEP):
        k = start + tl.arange(0, DEEP)
        values = channels(x, x_column, inside, k, inputs)
        if INPUTS:
            values = flip(values, channels(own_inputs + member * inputs, 1, inside, k, inputs))
        shared = weights(core, inputs, column, across, k, inputs)
        sums = tl.dot(values, shared, acc=sums, out_dtype=TYPE, input_precision=PRECISION)
    sums *= strength(sigma, scales, repeat, inside, SCALED, TYPE)[:, None]
    if OUTPUTS:
        sums = flip(sums, channels(own_outputs + member * outputs, 1, inside, column, outputs))
    sums = multiplied(
        sums, x, x_column, inside, weight, weight_row, column, across, 0, inputs, TYPE, PRECISION, DEEP
    )
    y += repeat * y_repeat + member * y_member + position * y_row
    edge = inside[:, None] & across[None, :]
    tl.store(y[:, None] + column[None, :] * y_column, sums.to(y.dtype.element_ty), mask=edge)


def flipped_product(
    x: Tensor,
    weight: Tensor,
    core: Tensor,
    inputs: Tensor | None,
    outputs: Tensor | None,
    sigma: float | Tensor,
    y: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """Multiply each row by W + sigma C with its member's signs on inputs, outputs or both, into ``y``.

    For R rows of e bytes a number, one position each:

    * bytes: e R (i + o) and 2 e i o of the products, and m i and/or m o of signs; x twice and the inputs'
      signs once for each tile of columns, W and C for each tile of rows, out of a cache.
    * flops: 4 R i o on matrix units: the floor is two products, 2.0 times the plain one. Flipping is one
      operation on each number of x for each tile of columns.

    Args:
        x: [r, m, p, i], any strides.
        weight: [o, i].
        core: C, [o, i].
        inputs: signs [m, i] as int8, contiguous, or None: not flipped. In float64 they are widened first.
        outputs: signs [m, o] as int8, contiguous, or None: not flipped.
        sigma: a number, or [r]: one for each repeat.
        y: [r, m, p, o], any strides.
        tiling: how the products are cut, if not as was tuned for this GPU, or as :data:`TILING` has it.

    Returns:
        y.

    Raises:
        ValueError: shapes or types do not fit.

    """
    read = product(x, weight, y)
    if core.shape != weight.shape or core.dtype is not weight.dtype:
        expected = f"{weight.dtype} {list(weight.shape)}"
        message = f"a core is as its weight, {expected}, got {core.dtype} {list(core.shape)}"
        raise ValueError(message)
    check_signs("inputs", inputs, read.members, weight.shape[1])
    check_signs("outputs", outputs, read.members, weight.shape[0])
    if not y.numel():
        return y
    if inputs is not None and x.dtype is torch.float64:
        # The compiler fails where rows of a product in float64 come from numbers of fewer bits too.
        inputs = inputs.long()
    tiling = chosen(NAME, read, tiling, TILING)
    scale = strength_of(sigma, x)
    with torch.cuda.device_of(x):
        flipped_kernel[read.grid(tiling)](
            y, x, read.weight, core.contiguous(), x if inputs is None else inputs,
            x if outputs is None else outputs, scale.scales, scale.number,
            *read.sizes, *read.strides, *read.tiles(tiling),
            INPUTS=inputs is not None, OUTPUTS=outputs is not None,
            SCALED=scale.is_scaled, TYPE=wide(x.dtype), PRECISION=precision(x.dtype),
            **tiling.options,
        )  # fmt: skip
    return y
