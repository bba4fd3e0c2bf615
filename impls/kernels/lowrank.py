"""Product with low-rank noise in one kernel.

Each row has the factors of its member: y_row = W x + s (x . down_m) up_m, summed over ranks. The product with
``down`` is taken in the loop over channels, from the tile of x that the matrix product reads, and ``up`` is
added before y is written: no pass over x or y is added.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.kernels.gemm import (
    DOT_DTYPES,
    dot_accumulate,
    gemm_of,
    load_sigma,
    noise_scale,
    operand,
    row_to_member,
    select_tiling,
    tile_offsets,
)
from impls.kernels.lowrank_rng import check_rank, low_rank_rng_product
from impls.kernels.optional_triton import tl, triton
from impls.kernels.outer import sum_outer_products, weighted_outer
from impls.kernels.philox import draw_of, fill
from impls.kernels.scheme import NARROW, AbstractFused
from impls.kernels.tiling import MIN_BLOCK, Tiling
from impls.schemes.lowrank import Factors, LowRank, LowRankSign, RedrawnFactors

UNROLLED = tl.constexpr(4)
"""Largest rank for which the loop over ranks is unrolled."""

TILING = Tiling(block_m=128, block_n=128, block_k=64, group_m=8, num_warps=8, num_stages=3)
"""Default tile sizes at rank 1."""


def default_tiling(rank: int) -> Tiling:
    """Return the default tile sizes for a rank.

    A thread's part of ``down``, BLOCK_M * BLOCK_K * rank numbers divided by the threads, has to fit in
    registers.
    """
    if rank == 1:
        return TILING
    if rank <= UNROLLED.value:
        return TILING._replace(block_m=64)
    block_m = max(MIN_BLOCK, 512 // rank)
    block_k = 32 if block_m == 64 else MIN_BLOCK  # noqa: PLR2004  rows of the larger matrix instruction
    return TILING._replace(block_m=block_m, block_k=block_k, num_stages=4)


@triton.jit
def add_rank(
    acc, x_down, scale, up, member, rank, r, outputs, offs_n, mask, RANK: tl.constexpr, ACC: tl.constexpr
):
    """Add the noise of rank r to ``acc`` [m, n]: scale * x_down[r] times row r of each member's ``up``."""
    x_down_r = tl.sum(tl.where((rank == r)[:, None], x_down, 0), axis=0) * scale
    up_r = tl.load(up + (member * RANK + r)[:, None] * outputs + offs_n[None, :], mask=mask, other=0)
    return acc + x_down_r[:, None] * up_r.to(ACC)


@triton.jit
def low_rank_kernel(
    y, x, weight, down, up, sigmas, sigma,
    rows, outputs, inputs, members, positions,
    stride_xr, stride_xm, stride_xp, stride_xi, stride_yr, stride_ym, stride_yp, stride_yo, stride_wo,
    tiles_m, tiles_n,
    RANK: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y with factors down [members, RANK, i] and up [members, RANK, o]."""
    offs_m, offs_n = tile_offsets(tiles_m, tiles_n, GROUP_M, BLOCK_M, BLOCK_N)
    repeat, member, position = row_to_member(offs_m, members, positions)
    mask_m, mask_n = offs_m < rows, offs_n < outputs
    x += repeat * stride_xr + member * stride_xm + position * stride_xp
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    x_down = tl.zeros((RANK, BLOCK_M), dtype=ACC)
    rank = tl.arange(0, RANK)
    for start in range(0, inputs, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = mask_m[:, None] & (offs_k < inputs)[None, :]
        acc, values = dot_accumulate(
            acc, x, stride_xi, mask_m, weight, stride_wo, offs_n, mask_n, offs_k, inputs, ACC, PRECISION
        )
        offsets = (member[None, :] * RANK + rank[:, None])[:, :, None] * inputs + offs_k[None, None, :]
        down_k = tl.load(down + offsets, mask=mask_k[None, :, :], other=0)
        x_down += tl.sum(values.to(ACC)[None, :, :] * down_k.to(ACC), axis=2)
    scale = load_sigma(sigmas, sigma, repeat, mask_m, ACC)
    mask = mask_m[:, None] & mask_n[None, :]
    if RANK <= UNROLLED:
        for r in tl.static_range(RANK):
            acc = add_rank(acc, x_down, scale, up, member, rank, r, outputs, offs_n, mask, RANK, ACC)
    else:
        # Unrolled, loads of all ranks would be in registers at the same time.
        for r in tl.range(0, RANK, num_stages=1):
            acc = add_rank(acc, x_down, scale, up, member, rank, r, outputs, offs_n, mask, RANK, ACC)
    y += repeat * stride_yr + member * stride_ym + position * stride_yp
    tl.store(y[:, None] + offs_n[None, :] * stride_yo, acc.to(y.dtype.element_ty), mask=mask)


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

    Factors are ``down`` [m, k, i] and ``up`` [m, k, o], for a k of
    :func:`~impls.kernels.lowrank_rng.check_rank`. Other arguments are those of all launchers, see
    :mod:`impls.kernels.gemm`.

    * bytes: e R (i + o) + e i o of the product and e m k (i + o) of factors; x, W and ``down`` are read again
      from a cache for each tile of the other axis.
    * flops: 2 R i o on tensor cores; on other units 2 R k i for each tile of columns, and 2 R k o.
    """
    gemm = gemm_of(x, weight, y)
    rank, (outputs, inputs) = down.shape[1], weight.shape
    check_rank(rank)
    down = operand("down", down, (gemm.members, rank, inputs), x.dtype)
    up = operand("up", up, (gemm.members, rank, outputs), x.dtype)
    tiling = select_tiling("low rank", gemm, tiling, default_tiling(rank), rank)
    operands = (down, up, *noise_scale(sigma, x, 1 / math.sqrt(rank)))
    return gemm.launch(low_rank_kernel, tiling, operands, RANK=rank)


PIECE_BYTES = 2**26
"""Bytes of factors that an update draws at once."""


class AbstractFusedLowRank(AbstractFused[Factors | RedrawnFactors]):
    """Low-rank noise by kernels; subclasses define how factors are drawn."""

    SIGNS: ClassVar[bool]
    """Whether factors are random signs; otherwise they are normal."""

    rank: int
    regenerated: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rank(self.rank)

    @property
    @override
    def stream(self) -> str:
        return "philox" if self.regenerated else "block"

    @override
    def launch(
        self,
        x: Tensor,
        weight: Tensor,
        noise: Factors | RedrawnFactors,
        sigma: float | Tensor,
        y: Tensor,
    ) -> None:
        if isinstance(noise, Factors):
            low_rank_product(x, weight, noise.down[:, 0].flatten(2), noise.up[:, 0], sigma, y)
            return
        down, up = (draw_of(noise.stream, name) for name in ("down", "up"))
        low_rank_rng_product(x, weight, down, up, self.rank, sigma, y, signs=self.SIGNS)

    @override
    def weighted_sum(self, noise: Factors | RedrawnFactors, utilities: Tensor) -> Tensor:
        if not isinstance(noise, Factors):
            return self._sum_redrawn(noise, utilities)
        shape = torch.Size((1, noise.up.shape[-1], *noise.down.shape[3:]))
        return sum_outer_products(shape, noise.up, noise.down, utilities, factor=1 / math.sqrt(self.rank))

    def _sum_redrawn(self, noise: RedrawnFactors, utilities: Tensor) -> Tensor:
        """Draw the factors again, PIECE_BYTES at a time, and sum them."""
        dtype = torch.int8 if self.SIGNS else utilities.dtype
        widths = noise.weight[1], noise.weight[2:].numel()
        member_bytes = self.rank * sum(widths) * dtype.itemsize
        total = utilities.new_zeros(widths, dtype=torch.promote_types(torch.float32, utilities.dtype))
        up, down = (draw_of(noise.stream, name) for name in ("up", "down"))
        at_once = max(1, PIECE_BYTES // member_bytes)
        for start in range(0, len(utilities), at_once):
            piece = slice(start, start + at_once)
            left, right = (
                fill(
                    utilities.new_empty(len(utilities[piece]), self.rank * width, dtype=dtype),
                    draw._replace(members=draw.members[piece]),
                    signs=self.SIGNS,
                ).view(-1, width)
                for draw, width in zip((up, down), widths, strict=True)
            )
            total += weighted_outer(
                left, right, utilities[piece], factor=1 / math.sqrt(self.rank), is_part=True
            )
        return total.to(utilities.dtype).view(noise.weight)


@variant(rank=1, regenerated=True, source="EGGROLL, arXiv:2511.16652, with factors drawn in the kernels")
@variant(rank=(1, 4), source="EGGROLL, arXiv:2511.16652; the kernel is ours")
@dataclass(frozen=True)
class FusedLowRank(AbstractFusedLowRank):
    """:class:`~impls.schemes.lowrank.LowRank` in one kernel without a further pass over x or y.

    With ``regenerated`` the kernels of the forward draw the factors from the stream ``philox``: the first one
    ``down``, once for each block of a member's rows, and the product's kernel ``up``. Drawn normals differ
    from the stream's by a few float32 roundings, so float64 is refused.

    Memory    same as the wrapped scheme; regenerated, rank float32 numbers for each row during a forward, and
              at most 64 MiB of factors during an update.
    Work      same as the wrapped scheme. Regenerated, another pass over x and n rank (o + i) normals, at 1e12
              a second; an update writes and reads as many.
    Quality   same as the wrapped scheme.
    """

    PLAIN = LowRank

    SIGNS: ClassVar[bool] = False

    rank: int
    regenerated: bool = False

    @property
    @override
    def dtypes(self) -> frozenset[torch.dtype]:
        return NARROW if self.regenerated else DOT_DTYPES


@variant(regenerated=True, source="EGGROLL, arXiv:2511.16652, with signs drawn in the kernels")
@variant(source="the rank-one case of EGGROLL, arXiv:2511.16652, with signs; the kernel is ours")
@dataclass(frozen=True)
class FusedLowRankSign(AbstractFusedLowRank):
    """:class:`~impls.schemes.lowrank.LowRankSign` in one kernel, as :class:`FusedLowRank`.

    Drawn signs are the stream's in every dtype.

    Memory    same as the wrapped scheme; regenerated, rank float32 numbers for each row during a forward, and
              at most 64 MiB of factors, a byte each, during an update.
    Work      same as the wrapped scheme. Regenerated, another pass over x and a Philox call for 128 signs.
    Quality   same as the wrapped scheme.
    """

    PLAIN = LowRankSign

    SIGNS: ClassVar[bool] = True

    rank: int = 1
    regenerated: bool = False
