"""A product in which groups of members drop blocks of channels that they share, in Triton: it is smaller.

A tile has rows of one group only, and its loop visits the channels of the blocks that the group keeps. Tiles
of outputs that the group drops are written without a product.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.autotune import chosen
from impls.kernels.dropout import gate, gates_of
from impls.kernels.rows import Tiling, corner, precision, product, wide
from impls.kernels.tiles import multiplied
from impls.kernels.words import popcount, programs, tile

NAME = "dropped blocks"
"""Of its tiles in the tables of what was tuned."""

TILING = Tiling(rows=128, columns=128, deep=64, group=8, warps=8, stages=3)
"""Of a product, where nothing was tuned."""

MOST = 16
"""Blocks of an axis: the kernel keeps which are on in the bits of a number."""


def tiling_of(dtype: torch.dtype, reads: str | None = None) -> Tiling:
    """Return the tiles where nothing was tuned: sums of what is kept and what is dropped fit in registers.

    Args:
        dtype: what the tiles, which are those of 16 bits, may then be suited to.
        reads: how matrix units read it, if not as :func:`~impls.kernels.rows.precision` says.

    """
    if dtype is not torch.float32:
        return TILING
    return TILING._replace(columns=64, stages=3 if (reads or precision(dtype)) == "tf32" else 2)


class Cut(NamedTuple):
    """How an axis of channels is cut: block b begins at cell b * cells // blocks, the last one ends the axis.

    Attributes:
        blocks: how many there are.
        cells: how many cells there are, which no block cuts in two.
        unit: channels of a cell.

    """

    blocks: int
    cells: int
    unit: int


@triton.jit
def lowest(bits):
    """Return the place of the lowest bit that is set, of int32 above 0."""
    return popcount(((bits & -bits) - 1).to(tl.uint32))


@triton.jit
def border(block, width, blocks, cells, unit):
    """Return where a block of channels begins; behind the last one, where the axis ends."""
    return tl.where(block < blocks, block * cells // blocks * unit, width)


@triton.jit
def over_runs(
    bits, x, x_step, inside, weight, weight_step, column, across, inputs, blocks, cells, unit,
    TYPE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply over the channels of blocks whose bits are set: neighbours are one loop."""
    sums = tl.zeros((ROWS, COLUMNS), dtype=TYPE)
    for _ in range(popcount((bits & ((bits << 1) ^ -1)).to(tl.uint32))):
        # Adding the lowest bit of a run carries to where it ends.
        carried = bits + (bits & -bits)
        begin = border(lowest(bits), inputs, blocks, cells, unit)
        end = border(lowest(carried), inputs, blocks, cells, unit)
        sums = multiplied(
            sums, x, x_step, inside, weight, weight_step, column, across, begin, end, TYPE, PRECISION, DEEP
        )
        bits = bits & carried
    return sums


@triton.jit
def kept_blocks_kernel(
    y, x, weight, changes, factors, on,
    repeats, members, positions, outputs, inputs,
    x_repeat, x_member, x_row, x_column, y_repeat, y_member, y_row, y_column, weight_row,
    groups, first, group_tiles, column_tiles,
    in_blocks, in_cells, in_unit, out_blocks, out_cells, out_unit,
    IN: tl.constexpr, OUT: tl.constexpr, MIRRORED: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of a group's rows by what it keeps: the grid is tiles of outputs, of rows, and groups.

    ``changes`` is [groups, output blocks, input blocks] and -1 where either block is off.
    """
    row_tile, column_tile = corner(groups * group_tiles, column_tiles, GROUP)
    group = (row_tile // group_tiles).to(tl.int32)
    # Members take groups in turn, and ``first`` is that of the first one here.
    offset = (group + groups - first) % groups
    count = (members - offset + groups - 1) // groups
    row = row_tile % group_tiles * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    image = row // positions
    each = tl.maximum(count, 1)
    repeat, member, position = image // each, offset + image % each * groups, row % positions
    inside, across = image < tl.cast(repeats, tl.int64) * count, column < outputs
    x += repeat * x_repeat + member * x_member + position * x_row

    one, other = tl.arange(0, IN), tl.arange(0, OUT)
    at = changes + (group * out_blocks + other[:, None]) * in_blocks + one[None, :]
    there = (other < out_blocks)[:, None] & (one < in_blocks)[None, :]
    both = (tl.load(at, mask=there, other=-1).to(tl.float32) > -1).to(tl.int32)  # fmt: skip
    inner = tl.sum(tl.max(both, axis=0) << one, axis=0)
    outer = tl.sum(tl.max(both, axis=1) << other, axis=0)
    cell = tl.minimum(column // out_unit, out_cells - 1)
    is_on = ((outer >> (((cell + 1) * out_blocks - 1) // out_cells).to(tl.int32)) & 1) != 0

    is_wanted = tl.max((is_on & across).to(tl.int32), axis=0) != 0
    if MIRRORED:
        share, rest = gate(factors, repeats, repeat, inside, TYPE)
        is_mixed = tl.max((rest != 0).to(tl.int32), axis=0) != 0
        is_wanted = is_wanted | is_mixed
    sums = over_runs(
        tl.where(is_wanted, inner, 0), x, x_column, inside, weight, weight_row, column, across, inputs,
        in_blocks, in_cells, in_unit, TYPE, PRECISION, ROWS, COLUMNS, DEEP,
    )  # fmt: skip
    if MIRRORED:
        dropped = over_runs(
            tl.where(is_mixed, inner ^ ((1 << in_blocks) - 1), 0), x, x_column, inside,
            weight, weight_row, column, across, inputs,
            in_blocks, in_cells, in_unit, TYPE, PRECISION, ROWS, COLUMNS, DEEP,
        )  # fmt: skip
        sums = tl.where(is_on[None, :], share[:, None], rest[:, None]) * sums + rest[:, None] * dropped
    else:
        sums = tl.where(is_on[None, :], sums * on, 0)
    edge = inside[:, None] & across[None, :]
    y += repeat * y_repeat + member * y_member + position * y_row
    tl.store(y[:, None] + column[None, :] * y_column, sums.to(y.dtype.element_ty), mask=edge)


def kept_blocks(
    x: Tensor,
    weight: Tensor,
    changes: Tensor,
    cuts: tuple[Cut, Cut],
    on: float | Tensor,
    off: float | Tensor,
    y: Tensor,
    first: int = 0,
    tiling: Tiling | None = None,
) -> Tensor:
    """Multiply each row by the blocks of W that its member's group keeps, into ``y``, which is returned.

    For R rows of e bytes a number, one position each, and a share q_i of inputs and q_o of outputs kept:

    * bytes: e R (q_i i + o) and e i o at most; x and W once more for each tile of the other axis, out of a
      cache.
    * flops: 2 R q_i q_o i o on matrix units, where borders of blocks are those of tiles; of rows whose
      dropped blocks count too, 2 R i o.

    Args:
        x: [r, m, p, i], any strides.
        weight: [o, i].
        changes: [groups, output blocks, input blocks], -1 where either block is off and more where both are
            on; member j is in group (first + j) modulo their number.
        cuts: of outputs and of inputs.
        on: what the blocks that are on count: a number, or [r], one for each repeat.
        off: what all others count, likewise.
        y: [r, m, p, o], any strides.
        first: the group of the first member.
        tiling: how the product is cut, if not as was tuned for this GPU, or as :func:`tiling_of` has it.

    Raises:
        ValueError: shapes or types do not fit, or there are more than 16 blocks.

    """
    read = product(x, weight, y)
    out, inner = cuts
    if changes.dim() != 3 or changes.shape[1:] != (out.blocks, inner.blocks):  # noqa: PLR2004  as its axes are
        message = f"changes must be [groups, {out.blocks}, {inner.blocks}], got {list(changes.shape)}"
        raise ValueError(message)
    if max(out.blocks, inner.blocks) > MOST:
        message = (
            f"a kernel takes at most {MOST} blocks, got {out.blocks} of outputs and {inner.blocks} of inputs"
        )
        raise ValueError(message)
    if not y.numel():
        return y
    repeats, members, positions, _ = x.shape
    groups = len(changes)
    largest = repeats * -(-members // groups) * positions
    tiling = chosen(NAME, read, tiling, tiling_of(x.dtype), out.blocks, inner.blocks, groups)
    tiling = tiling.within(largest, *weight.shape)
    group_tiles, column_tiles = -(-largest // tiling.rows), -(-weight.shape[0] // tiling.columns)
    gates = gates_of(on, off, x)
    with torch.cuda.device_of(x):
        kept_blocks_kernel[programs(groups, group_tiles, column_tiles)](
            y, x, read.weight, changes.contiguous(), gates.factors, gates.on,
            repeats, members, positions, *weight.shape, *read.strides,
            groups, first % groups, group_tiles, column_tiles, *inner, *out,
            IN=tile(inner.blocks, MOST), OUT=tile(out.blocks, MOST),
            MIRRORED=gates.is_mirrored, TYPE=wide(x.dtype), PRECISION=precision(x.dtype),
            **tiling.options,
        )  # fmt: skip
    return y
