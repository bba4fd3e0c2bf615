"""Product in which each group of members drops blocks of channels, so that less is multiplied.

A tile has rows of one group, and its loop visits only the blocks of channels that the group keeps. Tiles of
outputs that the group drops are written without a product.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.kernels.binary_matmul import popcount
from impls.kernels.dropout import gate_arguments, gate_factors, load_factors
from impls.kernels.gemm import (
    Gemm,
    accumulator_dtype,
    check_row_count,
    describe,
    gemm_loop,
    gemm_of,
    grid_of,
    operand,
    row_to_member,
    select_tiling,
    tile_index,
)
from impls.kernels.optional_triton import TensorDescriptor, tl, triton
from impls.kernels.scheme import AbstractFusedRows
from impls.kernels.tiling import Tiling, block_size, input_precision
from impls.schemes.blocks import BlocksNoise, DropoutBlocks, split_into_cells

TILING = Tiling(block_m=128, block_n=128, block_k=64, group_m=8, num_warps=8, num_stages=3)
"""Default tile sizes."""

MAX_BLOCKS = 16
"""Largest number of blocks of an axis: the kernel keeps a bit for each block in an int32."""


def default_tiling(dtype: torch.dtype) -> Tiling:
    """Return the default tile sizes, for which sums over kept and over dropped blocks fit in registers.

    They are those of a 16-bit dtype, which :meth:`~impls.kernels.tiling.Tiling.for_dtype` then makes
    smaller.
    """
    if dtype is not torch.float32:
        return TILING
    return TILING._replace(block_n=64, num_stages=3 if input_precision(dtype) == "tf32" else 2)


class Cut(NamedTuple):
    """Division of an axis of channels into blocks: block b begins at cell b * cells // blocks.

    Attributes:
        blocks: number of blocks.
        cells: number of cells, each of which belongs to one block.
        unit: channels of a cell; the last cell extends to the end of the axis.
    """

    blocks: int
    cells: int
    unit: int

    @classmethod
    def of(cls, width: int, blocks: int) -> "Cut":
        """Divide ``width`` channels as the plain scheme does."""
        unit, cells = split_into_cells(width, blocks)
        return cls(blocks, cells, unit)

    def has_whole_tiles(self, width: int, tile: int) -> bool:
        """Return whether each block of ``width`` channels begins and ends with a tile of this size."""
        borders = [*(block * self.cells // self.blocks * self.unit for block in range(self.blocks)), width]
        return not any(border % tile for border in borders)


@triton.jit
def lowest_bit(bits):
    """Return the index of the lowest set bit of a positive int32."""
    return popcount(((bits & -bits) - 1).to(tl.uint32))


@triton.jit
def first_channel(block, width, blocks, cells, unit):
    """Return the first channel of a block; ``width`` for block ``blocks``, which is after the last one."""
    return tl.where(block < blocks, block * cells // blocks * unit, width)


@triton.jit
def multiply_kept_channels(
    bits, x, start_m, first_x, stride_xi, mask_m, weight, start_n, stride_wo, outputs,
    inputs, blocks, cells, unit, DESCRIPTORS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum the product over the channels of the blocks with set bits; adjacent blocks share a loop.

    ``x`` points to each row's first channel. With DESCRIPTORS it is a descriptor, whose row ``start_m`` and
    column ``first_x`` are the first ones.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    # A run of set bits begins at each set bit after a bit that is not set.
    runs = popcount((bits & ~(bits << 1)).to(tl.uint32))
    for _ in range(runs):
        # Adding the lowest bit of a run carries to the bit after its end.
        carried = bits + (bits & -bits)
        begin = first_channel(lowest_bit(bits), inputs, blocks, cells, unit)
        end = first_channel(lowest_bit(carried), inputs, blocks, cells, unit)
        if DESCRIPTORS:
            for start in range(begin, end, BLOCK_K):
                a = x.load([start_m, first_x + start])
                b = weight.load([start_n, start]).T
                acc = tl.dot(a, b, acc=acc, out_dtype=ACC, input_precision=PRECISION)
        else:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            acc = gemm_loop(
                acc, x, stride_xi, mask_m, weight, stride_wo, offs_n, offs_n < outputs, begin, end,
                ACC, PRECISION, BLOCK_K,
            )  # fmt: skip
        bits = bits & carried
    return acc


@triton.jit
def block_of(channel, blocks, cells, unit):
    """Return the block of a channel: the last one that begins at its cell or before it."""
    cell = tl.minimum(channel // unit, cells - 1)
    return ((cell + 1) * blocks - 1) // cells


@triton.jit
def kept_blocks_kernel(
    y, x, weight, changes, factors, on,
    repeats, members, positions, outputs, inputs,
    stride_xr, stride_xm, stride_xp, stride_xi, stride_yr, stride_ym, stride_yp, stride_yo, stride_wo,
    groups, first, group_tiles, tiles_n,
    in_blocks, in_cells, in_unit, out_blocks, out_cells, out_unit,
    DESCRIPTORS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y of a group's rows; the grid is tiles of outputs, of rows, and groups.

    ``changes`` [groups, output blocks, input blocks] is -1 where either block is off. With ``factors``,
    dropped blocks are multiplied too, unless their factors are 0.

    With DESCRIPTORS ``x``, ``y`` and ``weight`` are descriptors, see :func:`describe_groups`.
    """
    pid = tl.program_id(0)
    if not DESCRIPTORS:
        pid = pid.to(tl.int64)  # takes fewer registers; descriptors take int32 only
    row_tile, column_tile = tile_index(pid, groups * group_tiles, tiles_n, GROUP_M)
    group = (row_tile // group_tiles).to(tl.int32)
    # Members take groups in turn; ``first`` is the group of member 0.
    first_member = (group + groups - first) % groups
    count = (members - first_member + groups - 1) // groups
    start_m, start_n = row_tile % group_tiles * BLOCK_M, column_tile * BLOCK_N
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    # A group may have no member; then no row exists.
    repeat, index, position = row_to_member(offs_m, tl.maximum(count, 1), positions)
    member = first_member + index * groups
    mask_m, mask_n = offs_m < tl.cast(repeats, tl.int64) * count * positions, offs_n < outputs
    if not DESCRIPTORS:
        x += repeat * stride_xr + member * stride_xm + position * stride_xp

    in_block, out_block = tl.arange(0, IN), tl.arange(0, OUT)
    pointers = changes + (group * out_blocks + out_block[:, None]) * in_blocks + in_block[None, :]
    mask_blocks = (out_block < out_blocks)[:, None] & (in_block < in_blocks)[None, :]
    is_kept = (tl.load(pointers, mask=mask_blocks, other=-1).to(tl.float32) > -1).to(tl.int32)
    in_bits = tl.sum(tl.max(is_kept, axis=0) << in_block, axis=0)
    out_bits = tl.sum(tl.max(is_kept, axis=1) << out_block, axis=0)
    if DESCRIPTORS:
        needs_product = (out_bits >> block_of(start_n, out_blocks, out_cells, out_unit) & 1) != 0
        is_on = needs_product
    else:
        block = block_of(offs_n, out_blocks, out_cells, out_unit).to(tl.int32)
        is_on = ((out_bits >> block) & 1) != 0
        needs_product = tl.max((is_on & mask_n).to(tl.int32), axis=0) != 0
        is_on = is_on[None, :]
    if factors is not None:
        row_on, row_off = load_factors(factors, repeats, repeat, mask_m, ACC)
        needs_dropped = tl.max((row_off != 0).to(tl.int32), axis=0) != 0
        needs_product = needs_product | needs_dropped
    acc = multiply_kept_channels(
        tl.where(needs_product, in_bits, 0), x, start_m, first_member * inputs, stride_xi, mask_m,
        weight, start_n, stride_wo, outputs, inputs, in_blocks, in_cells, in_unit,
        DESCRIPTORS, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if factors is not None:
        dropped = multiply_kept_channels(
            tl.where(needs_dropped, in_bits ^ ((1 << in_blocks) - 1), 0), x, start_m, first_member * inputs,
            stride_xi, mask_m, weight, start_n, stride_wo, outputs, inputs, in_blocks, in_cells, in_unit,
            DESCRIPTORS, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = tl.where(is_on, row_on[:, None], row_off[:, None]) * acc + row_off[:, None] * dropped
    elif DESCRIPTORS:
        acc *= on  # a sum of no products is 0
    else:
        acc = tl.where(is_on, acc * on, 0)
    if DESCRIPTORS:
        y.store([start_m, first_member * outputs + start_n], acc.to(y.dtype))
    else:
        y += repeat * stride_yr + member * stride_ym + position * stride_yp
        y = y[:, None] + offs_n.to(tl.int64)[None, :] * stride_yo
        tl.store(y, acc.to(y.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def describe_groups(
    gemm: Gemm, groups: int, cuts: tuple[Cut, Cut], tiling: Tiling
) -> list[TensorDescriptor | None]:
    """Return descriptors of y, x and the weight; None where blocks are not whole tiles, for example.

    A row of y and x has the channels of one member of each group, one group after another.
    """
    out, inner = cuts
    (outputs, inputs), (_, members, positions, _) = gemm.weight.shape, gemm.x.shape
    are_tiles = out.has_whole_tiles(outputs, tiling.block_n) and inner.has_whole_tiles(inputs, tiling.block_k)
    if (
        members % groups
        or positions > 1
        or not (are_tiles and gemm.x.is_contiguous() and gemm.y.is_contiguous())
    ):
        return [None]
    return [
        describe(gemm.y.view(-1, groups * outputs), tiling.block_m, tiling.block_n),
        describe(gemm.x.view(-1, groups * inputs), tiling.block_m, tiling.block_k),
        describe(gemm.weight, tiling.block_n, tiling.block_k),
    ]


def block_dropout_product(
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

    ``cuts`` divide outputs and inputs into at most 16 blocks each. ``changes`` [groups, output blocks, input
    blocks] are -1 where a group drops either block, and larger where it keeps both. Member j is in group
    (``first`` + j) modulo the number of groups. Kept blocks have the factor ``on`` and dropped ones ``off``,
    numbers or [r], one for each repeat. Other arguments are those of all launchers, see
    :mod:`impls.kernels.gemm`.

    For rows that keep fractions q_i of inputs and q_o of outputs:

    * bytes: e R (q_i i + o) and at most e i o; x and W are reread from cache for each tile of the other
      axis.
    * flops: 2 R q_i q_o i o on tensor cores, where blocks are whole tiles; 2 R i o for rows whose dropped
      blocks have a factor.
    """
    gemm = gemm_of(x, weight, y)
    out, inner = cuts
    changes = operand("changes", changes, (len(changes), out.blocks, inner.blocks), x.dtype)
    if max(out.blocks, inner.blocks) > MAX_BLOCKS:
        raise ValueError(
            f"a kernel takes at most {MAX_BLOCKS} blocks, got {out.blocks} of outputs "
            f"and {inner.blocks} of inputs"
        )
    if not y.numel():
        return y
    repeats, members, positions, _ = x.shape
    groups = len(changes)
    group_rows = repeats * -(-members // groups) * positions
    tiling = select_tiling(
        "dropped blocks", gemm, tiling, default_tiling(x.dtype), out.blocks, inner.blocks, groups
    )
    tiling = tiling.clip(group_rows, *weight.shape)
    group_tiles, column_tiles = -(-group_rows // tiling.block_m), -(-weight.shape[0] // tiling.block_n)
    check_row_count(groups * group_rows, groups * tiling.block_m)  # members are rounded up to whole groups
    described = describe_groups(gemm, groups, cuts, tiling)
    has_descriptors = None not in described
    operands = described if has_descriptors else (y, x, gemm.weight)
    with torch.cuda.device_of(x):
        kept_blocks_kernel[grid_of(groups, group_tiles, column_tiles)](
            *operands, changes, *gate_arguments(on, off, x),
            repeats, members, positions, *weight.shape, *gemm.strides,
            groups, first % groups, group_tiles, column_tiles, *inner, *out,
            DESCRIPTORS=has_descriptors,
            IN=block_size(inner.blocks, MAX_BLOCKS), OUT=block_size(out.blocks, MAX_BLOCKS),
            ACC=accumulator_dtype(x.dtype), PRECISION=input_precision(x.dtype), **tiling.options,
        )  # fmt: skip
    return y


@variant(source="ours")
@variant(side="both", groups=8, source="ours")
@dataclass(frozen=True)
class FusedDropoutBlocks(AbstractFusedRows[BlocksNoise]):
    """:class:`~impls.schemes.blocks.DropoutBlocks` with the products of all groups in one kernel.

    Blocks should be at least as wide as tiles, about 128 channels: for narrower ones a tile computes more
    than is kept. Rows of antithetic halves, which see 2 W - (W + sigma E), need all blocks.

    Memory    same as the wrapped scheme, without copies of kept channels.
    Work      same as the wrapped scheme, in whole tiles. The update is the wrapped scheme's: a pass over the
              weight for each group, or a product of torch with the rows.
    Quality   same as the wrapped scheme.
    """

    PLAIN = DropoutBlocks

    p: float = 0.5
    side: Literal["in", "both"] = "in"
    groups: int = 4
    blocks: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks > MAX_BLOCKS:
            raise ValueError(
                f"blocks must be at most {MAX_BLOCKS} for a kernel, got {self.blocks}: use fewer, or "
                "DropoutBlocks"
            )

    @override
    def launch(self, x: Tensor, weight: Tensor, noise: BlocksNoise, sigma: float | Tensor, y: Tensor) -> None:
        scale = 1 / self.plain.density(torch.Size((1, *weight.shape)))
        on, off = gate_factors(scale, sigma, noise.sigma)
        groups, out_blocks, in_blocks = noise.factors.shape
        cuts = Cut.of(weight.shape[0], out_blocks), Cut.of(weight.shape[1], in_blocks)
        block_dropout_product(x, weight, noise.factors, cuts, on, off, y, noise.members.start % groups)
