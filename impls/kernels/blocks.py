"""A product in which groups of members drop blocks of channels that they share, in Triton: it is smaller.

A tile has rows of one group only, and its loop visits the channels of the blocks that the group keeps. Tiles
of outputs that the group drops are written without a product.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.kernels.binary_matmul import popcount
from impls.kernels.dropout import gate, gate_factors, gates_of
from impls.kernels.gemm import accumulator_dtype, gemm_loop, gemm_of, grid_of, select_tiling, tile_index
from impls.kernels.optional_triton import tl, triton
from impls.kernels.scheme import AbstractFusedRows
from impls.kernels.tiling import Tiling, block_size, input_precision
from impls.perturbation.scheme import check_choice, check_count, check_probability
from impls.schemes.blocks import BlocksNoise, DropoutBlocks, cells

NAME = "dropped blocks"
"""Of its tiles in the tables of what was tuned."""

TILING = Tiling(block_m=128, block_n=128, block_k=64, group_m=8, num_warps=8, num_stages=3)
"""Of a product, where nothing was tuned."""

MAX_BLOCKS = 16
"""Blocks of an axis: the kernel keeps which are on in the bits of a number."""


def default_tiling(dtype: torch.dtype, reads: str | None = None) -> Tiling:
    """Return the tiles where nothing was tuned: sums of what is kept and what is dropped fit in registers.

    Args:
        dtype: what the tiles, which are those of 16 bits, may then be suited to.
        reads: how matrix units read it, if not as :func:`~impls.kernels.rows.precision` says.

    """
    if dtype is not torch.float32:
        return TILING
    return TILING._replace(block_n=64, num_stages=3 if (reads or input_precision(dtype)) == "tf32" else 2)


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
    bits, x, x_step, mask_m, weight, weight_step, offs_n, mask_n, inputs, blocks, cells, unit,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply over the channels of blocks whose bits are set: neighbours are one loop."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for _ in range(popcount((bits & ((bits << 1) ^ -1)).to(tl.uint32))):
        # Adding the lowest bit of a run carries to where it ends.
        carried = bits + (bits & -bits)
        begin = border(lowest(bits), inputs, blocks, cells, unit)
        end = border(lowest(carried), inputs, blocks, cells, unit)
        acc = gemm_loop(
            acc, x, x_step, mask_m, weight, weight_step, offs_n, mask_n, begin, end, ACC, PRECISION, BLOCK_K
        )
        bits = bits & carried
    return acc


@triton.jit
def kept_blocks_kernel(
    y, x, weight, changes, factors, on,
    repeats, members, positions, outputs, inputs,
    stride_xr, stride_xm, stride_xp, stride_xi, stride_yr, stride_ym, stride_yp, stride_yo, stride_wo,
    groups, first, group_tiles, tiles_n,
    in_blocks, in_cells, in_unit, out_blocks, out_cells, out_unit,
    IN: tl.constexpr, OUT: tl.constexpr, MIRRORED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of a group's rows by what it keeps: the grid is tiles of outputs, of rows, and groups.

    ``changes`` is [groups, output blocks, input blocks] and -1 where either block is off.
    """
    row_tile, column_tile = tile_index(groups * group_tiles, tiles_n, GROUP_M)
    group = (row_tile // group_tiles).to(tl.int32)
    # Members take groups in turn, and ``first`` is that of the first one here.
    offset = (group + groups - first) % groups
    count = (members - offset + groups - 1) // groups
    offs_m = row_tile % group_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    image = offs_m // positions
    each = tl.maximum(count, 1)
    repeat, member, position = image // each, offset + image % each * groups, offs_m % positions
    mask_m, mask_n = image < tl.cast(repeats, tl.int64) * count, offs_n < outputs
    x += repeat * stride_xr + member * stride_xm + position * stride_xp

    one, other = tl.arange(0, IN), tl.arange(0, OUT)
    at = changes + (group * out_blocks + other[:, None]) * in_blocks + one[None, :]
    there = (other < out_blocks)[:, None] & (one < in_blocks)[None, :]
    both = (tl.load(at, mask=there, other=-1).to(tl.float32) > -1).to(tl.int32)  # fmt: skip
    inner = tl.sum(tl.max(both, axis=0) << one, axis=0)
    outer = tl.sum(tl.max(both, axis=1) << other, axis=0)
    cell = tl.minimum(offs_n // out_unit, out_cells - 1)
    is_on = ((outer >> (((cell + 1) * out_blocks - 1) // out_cells).to(tl.int32)) & 1) != 0

    is_wanted = tl.max((is_on & mask_n).to(tl.int32), axis=0) != 0
    if MIRRORED:
        share, rest = gate(factors, repeats, repeat, mask_m, ACC)
        is_mixed = tl.max((rest != 0).to(tl.int32), axis=0) != 0
        is_wanted = is_wanted | is_mixed
    acc = over_runs(
        tl.where(is_wanted, inner, 0), x, stride_xi, mask_m, weight, stride_wo, offs_n, mask_n, inputs,
        in_blocks, in_cells, in_unit, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if MIRRORED:
        dropped = over_runs(
            tl.where(is_mixed, inner ^ ((1 << in_blocks) - 1), 0), x, stride_xi, mask_m,
            weight, stride_wo, offs_n, mask_n, inputs,
            in_blocks, in_cells, in_unit, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = tl.where(is_on[None, :], share[:, None], rest[:, None]) * acc + rest[:, None] * dropped
    else:
        acc = tl.where(is_on[None, :], acc * on, 0)
    edge = mask_m[:, None] & mask_n[None, :]
    y += repeat * stride_yr + member * stride_ym + position * stride_yp
    tl.store(y[:, None] + offs_n[None, :] * stride_yo, acc.to(y.dtype.element_ty), mask=edge)


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
        tiling: how the product is cut, if not as was tuned for this GPU, or as :func:`default_tiling` has it.

    Raises:
        ValueError: shapes or types do not fit, or there are more than 16 blocks.

    """
    read = gemm_of(x, weight, y)
    out, inner = cuts
    if changes.dim() != 3 or changes.shape[1:] != (out.blocks, inner.blocks):  # noqa: PLR2004  as its axes are
        message = f"changes must be [groups, {out.blocks}, {inner.blocks}], got {list(changes.shape)}"
        raise ValueError(message)
    if max(out.blocks, inner.blocks) > MAX_BLOCKS:
        message = (
            f"a kernel takes at most {MAX_BLOCKS} blocks, got {out.blocks} of outputs "
            f"and {inner.blocks} of inputs"
        )
        raise ValueError(message)
    if not y.numel():
        return y
    repeats, members, positions, _ = x.shape
    groups = len(changes)
    largest = repeats * -(-members // groups) * positions
    tiling = select_tiling(NAME, read, tiling, default_tiling(x.dtype), out.blocks, inner.blocks, groups)
    tiling = tiling.clipped(largest, *weight.shape)
    group_tiles, column_tiles = -(-largest // tiling.block_m), -(-weight.shape[0] // tiling.block_n)
    gates = gates_of(on, off, x)
    with torch.cuda.device_of(x):
        kept_blocks_kernel[grid_of(groups, group_tiles, column_tiles)](
            y, x, read.weight, changes.contiguous(), gates.factors, gates.on,
            repeats, members, positions, *weight.shape, *read.strides,
            groups, first % groups, group_tiles, column_tiles, *inner, *out,
            IN=block_size(inner.blocks, MAX_BLOCKS), OUT=block_size(out.blocks, MAX_BLOCKS),
            MIRRORED=gates.is_mirrored, ACC=accumulator_dtype(x.dtype), PRECISION=input_precision(x.dtype),
            **tiling.options,
        )  # fmt: skip
    return y


@variant(source="ours")
@variant(side="both", groups=8, source="ours")
@dataclass(frozen=True)
class FusedDropoutBlocks(AbstractFusedRows[BlocksNoise]):
    """:class:`~impls.schemes.blocks.DropoutBlocks` with the products of all groups in one kernel.

    A tile has rows of one group, and visits the blocks that the group keeps. Blocks should be as wide as
    tiles, some 128 channels: of a narrower one a tile computes more than is kept. Rows of antithetic halves
    that see 2 W - (W + sigma E) need every block.

    Memory    that of the plain scheme; no copies of kept channels.
    Work      that of the plain scheme, in whole tiles. The update is the plain scheme's: a pass over the
              weight for each group, or a product with rows, which torch multiplies.
    Quality   that of the plain scheme.
    """

    p: float = 0.5
    side: Literal["in", "both"] = "in"
    groups: int = 4
    blocks: int = 2

    def __post_init__(self) -> None:
        """Refuse what is no probability, side or number, and more blocks than a kernel knows."""
        check_probability("p", self.p)
        check_choice("side", self.side, "in", "both")
        check_count("groups", self.groups, 2)
        check_count("blocks", self.blocks)
        if self.blocks > MAX_BLOCKS:
            message = (
                f"blocks must be at most {MAX_BLOCKS} for a kernel, got {self.blocks}: of narrower ones it "
                "multiplies more than is kept"
            )
            raise ValueError(message)

    @property
    @override
    def plain(self) -> DropoutBlocks:
        return DropoutBlocks(self.p, self.side, self.groups, self.blocks)

    @override
    def launch(self, x: Tensor, weight: Tensor, noise: BlocksNoise, sigma: float | Tensor, y: Tensor) -> None:
        scale = 1 / self.plain.density(torch.Size((1, *weight.shape)))
        groups, *blocks = noise.factors.shape
        cuts = []
        for count, width in zip(blocks, weight.shape, strict=True):
            unit, number = cells(width, count)
            cuts.append(Cut(count, number, unit))
        counts = gate_factors(scale, sigma, noise.sigma)
        kept_blocks(x, weight, noise.factors, (cuts[0], cuts[1]), *counts, y, noise.members.start % groups)

    @override
    def weighted_sum(self, noise: BlocksNoise, utilities: Tensor) -> Tensor:
        return self.plain.weighted_sum(noise, utilities)
