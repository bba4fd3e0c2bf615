"""Products in which each member drops channels of its own, in Triton: the mask costs no pass over rows.

What a member keeps counts ``on``, and what it drops ``off``, in place of 1: 1 / q and 0 for gates that are on
with probability q; of rows that see the negated noise 2 - 1 / q and 2.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.autotune import chosen
from impls.kernels.rows import Product, Tiling, place, precision, product, whose, wide
from impls.kernels.tiles import channels, multiplied, weights

INPUTS, OUTPUTS = "dropped inputs", "dropped outputs"
"""Names of their tiles in the tables of what was tuned."""

TILING = Tiling(rows=128, columns=128, deep=64, group=8, warps=8, stages=3)
"""Of a product of which outputs are dropped, where nothing was tuned."""

INPUTS_TILING = TILING._replace(deep=32, stages=4)
"""The same of inputs: a tile of x and its mask pass through registers."""


class Gates(NamedTuple):
    """What channels that are on and off count, as a kernel takes it.

    Attributes:
        on: of all rows, where ``off`` is 0.
        factors: [2, r], on and off for each repeat instead; where a number will do, any tensor.
        is_mirrored: whether they are read from there.

    """

    on: float
    factors: Tensor
    is_mirrored: bool


def gates_of(on: float | Tensor, off: float | Tensor, x: Tensor) -> Gates:
    """Look at factors for activations [r, ...], numbers or one for each repeat."""
    # A kernel's numbers are float32.
    if not (isinstance(on, Tensor) or isinstance(off, Tensor) or off) and x.dtype is not torch.float64:
        return Gates(float(on), x, is_mirrored=False)
    wider = torch.promote_types(torch.float32, x.dtype)
    each = [torch.as_tensor(one, dtype=wider, device=x.device).expand(len(x)) for one in (on, off)]
    return Gates(0.0, torch.stack(each), is_mirrored=True)


@triton.jit
def gate(factors, repeats, repeat, inside, TYPE: tl.constexpr):
    """Return (on, off) of rows, of TYPE."""
    on = tl.load(factors + repeat, mask=inside, other=0)
    off = tl.load(factors + repeats + repeat, mask=inside, other=0)
    return on.to(TYPE), off.to(TYPE)


@triton.jit
def dropped_inputs_kernel(
    y, x, weight, kept, factors, on,
    rows, outputs, inputs, members, positions,
    x_repeat, x_member, x_row, x_column, y_repeat, y_member, y_row, y_column, weight_row,
    row_tiles, column_tiles, repeats,
    MIRRORED: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows, of which members keep inputs [m, i], 0 or 1; the grid is all tiles."""
    row, column = place(row_tiles, column_tiles, GROUP, ROWS, COLUMNS)
    repeat, member, position = whose(row, members, positions)
    inside, across = row < rows, column < outputs
    x += repeat * x_repeat + member * x_member + position * x_row
    kept += member * inputs
    if MIRRORED:
        each, off = gate(factors, repeats, repeat, inside, TYPE)
    sums = tl.zeros((ROWS, COLUMNS), dtype=TYPE)
    for start in range(0, inputs, DEEP):
        k = start + tl.arange(0, DEEP)
        values = channels(x, x_column, inside, k, inputs)
        own = channels(kept, 1, inside, k, inputs)
        if MIRRORED:
            share = tl.where(own != 0, each[:, None], off[:, None])
            values = (values.to(TYPE) * share).to(values.dtype)
        else:
            values = tl.where(own != 0, values, 0).to(values.dtype)
        shared = weights(weight, weight_row, column, across, k, inputs)
        sums = tl.dot(values, shared, acc=sums, out_dtype=TYPE, input_precision=PRECISION)
    if not MIRRORED:
        sums *= on
    edge = inside[:, None] & across[None, :]
    y += repeat * y_repeat + member * y_member + position * y_row
    tl.store(y[:, None] + column[None, :] * y_column, sums.to(y.dtype.element_ty), mask=edge)


@triton.jit
def dropped_outputs_kernel(
    y, x, weight, kept, factors, on,
    rows, outputs, inputs, members, positions,
    x_repeat, x_member, x_row, x_column, y_repeat, y_member, y_row, y_column, weight_row,
    row_tiles, column_tiles, repeats,
    MIRRORED: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows, of which members keep outputs [m, o], 0 or 1; the grid is all tiles."""
    row, column = place(row_tiles, column_tiles, GROUP, ROWS, COLUMNS)
    repeat, member, position = whose(row, members, positions)
    inside, across = row < rows, column < outputs
    x += repeat * x_repeat + member * x_member + position * x_row
    sums = tl.zeros((ROWS, COLUMNS), dtype=TYPE)
    sums = multiplied(
        sums, x, x_column, inside, weight, weight_row, column, across, 0, inputs, TYPE, PRECISION, DEEP
    )
    edge = inside[:, None] & across[None, :]
    own = tl.load(kept + member[:, None] * outputs + column[None, :], mask=edge, other=0)
    if MIRRORED:
        each, off = gate(factors, repeats, repeat, inside, TYPE)
        sums *= tl.where(own != 0, each[:, None], off[:, None])
    else:
        sums = tl.where(own != 0, sums * on, 0)
    y += repeat * y_repeat + member * y_member + position * y_row
    tl.store(y[:, None] + column[None, :] * y_column, sums.to(y.dtype.element_ty), mask=edge)


def dropped_inputs(
    x: Tensor,
    weight: Tensor,
    kept: Tensor,
    on: float | Tensor,
    off: float | Tensor,
    y: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """Multiply each row, of which its member keeps some channels, by W, into ``y``, which is returned.

    With numbers, of which ``off`` is 0, channels are left out or not, and the sums scaled: nothing is rounded
    on the way. Else a channel is scaled in the tile of x, and rounded to its type as a scaled copy would be.

    For R rows of e bytes a number, one position each:

    * bytes: e R (i + o) and e i o of the product, and m i of masks; x, W and masks once more for each tile of
      the other axis, out of a cache.
    * flops: 2 R i o on matrix units, and a selection for each number of a tile of x beside them.

    Args:
        x: [r, m, p, i], any strides.
        weight: [o, i].
        kept: bool [m, i], contiguous.
        on: what a kept channel counts: a number, or [r], one for each repeat.
        off: what a dropped one counts, likewise.
        y: [r, m, p, o], any strides.
        tiling: how the product is cut, if not as was tuned for this GPU, or as
            :data:`INPUTS_TILING` has it.

    Raises:
        ValueError: shapes or types do not fit.

    """
    read = product(x, weight, y)
    tiling = chosen(INPUTS, read, tiling, INPUTS_TILING)
    return _launch(dropped_inputs_kernel, read, kept, weight.shape[1], (on, off), tiling)


def dropped_outputs(
    x: Tensor,
    weight: Tensor,
    kept: Tensor,
    on: float | Tensor,
    off: float | Tensor,
    y: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """Multiply each row by W and keep some of the outputs, as its member does: as :func:`dropped_inputs`.

    * bytes: e R (i + o) and e i o of the product, and m o of masks, once.
    * flops: 2 R i o on matrix units, and a selection for each output beside them.

    Args:
        x: [r, m, p, i], any strides.
        weight: [o, i].
        kept: bool [m, o], contiguous.
        on: what a kept channel counts: a number, or [r], one for each repeat.
        off: what a dropped one counts, likewise.
        y: [r, m, p, o], any strides.
        tiling: how the product is cut, if not as was tuned for this GPU, or as :data:`TILING` has it.

    Raises:
        ValueError: shapes or types do not fit.

    """
    read = product(x, weight, y)
    tiling = chosen(OUTPUTS, read, tiling, TILING)
    return _launch(dropped_outputs_kernel, read, kept, weight.shape[0], (on, off), tiling)


def _launch(
    kernel: Any,  # noqa: ANN401  what triton makes of a function has no type
    read: Product,
    kept: Tensor,
    width: int,
    factors: tuple[float | Tensor, float | Tensor],
    tiling: Tiling,
) -> Tensor:
    """Launch a kernel with masks [m, width]."""
    if kept.dtype is not torch.bool or kept.shape != (read.members, width):
        message = f"masks must be bool [m, {width}], got {kept.dtype} {list(kept.shape)}"
        raise ValueError(message)
    if not read.y.numel():
        return read.y
    gates, x = gates_of(*factors, read.x), read.x
    # The compiler makes no operands of float64 from bytes.
    masks = kept.to(x.dtype) if x.dtype is torch.float64 else kept.contiguous().view(torch.int8)
    with torch.cuda.device_of(x):
        kernel[read.grid(tiling)](
            read.y, x, read.weight, masks, gates.factors, gates.on,
            *read.sizes, *read.strides, *read.tiles(tiling), len(x),
            MIRRORED=gates.is_mirrored, TYPE=wide(x.dtype), PRECISION=precision(x.dtype),
            **tiling.options,
        )  # fmt: skip
    return read.y
