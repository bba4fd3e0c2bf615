"""Product with low-rank noise in two kernels.

Each row has the factors of its member: y_row = W x + s (x . down_m) up_m, summed over ranks. A first kernel
computes x . down, once for each row: RANK numbers. The product's kernel adds their product with ``up`` to a
tile before it writes it. On capability 9.0 it runs beside the first one and waits for it only there: the
first kernel is bound by memory, the second one by tensor cores.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.kernels.gemm import (
    DOT_DTYPES,
    can_begin_early,
    gemm_of,
    is_before_hopper,
    load_of_members,
    operand,
    select_tiling,
)
from impls.kernels.lowrank_rng import check_rank, down_product, low_rank_rng_product
from impls.kernels.optional_triton import tl, triton
from impls.kernels.outer import sum_outer_products, weighted_outer
from impls.kernels.philox import Law, draw_of, fill
from impls.kernels.scheme import NARROW, AbstractFused
from impls.kernels.tiling import Tiling
from impls.schemes.lowrank import Factors, LowRank, LowRankSign, RedrawnFactors

UNROLLED = 4
"""Largest rank for which the loop over ranks is unrolled."""

TILING = Tiling(block_m=128, block_n=256, block_k=64, group_m=8, num_warps=8, num_stages=3)
"""Default tile sizes for a 16-bit dtype."""

COLUMNS = 64
"""Most columns of a tile that are finished at once: few, which leaves registers for the first kernel."""


@triton.jit
def add_rank(
    acc, out, x_down, up, r, start_m, start_n, RANK: tl.constexpr, IS_DESCRIBED: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Add to acc [m, n] the product of x . down and ``up`` at rank r."""
    offs_m = start_m + tl.arange(0, acc.shape[0])
    x_down_r = tl.load(x_down + offs_m.to(tl.int64) * RANK + r, mask=offs_m < out.rows, other=0)
    start, end = r * out.outputs + start_n, (r + 1) * out.outputs
    up_r = load_of_members(up, out, start_m, start, end, RANK * out.outputs, acc, IS_DESCRIBED)
    return acc + x_down_r[:, None] * up_r.to(ACC)


@triton.jit
def add_up(acc, out, stored, operands, start_m, start_n, OPTIONS: tl.constexpr, ACC: tl.constexpr):
    """Add to acc [m, n] the product of x . down [rows, rank] with the stored ``up`` [members, rank * o]."""
    up, x_down = stored[0], operands[0]
    rank: tl.constexpr = OPTIONS[0]
    if OPTIONS[2]:
        tl.extra.cuda.gdc_wait()
    if OPTIONS[3]:
        for r in tl.static_range(rank):
            acc = add_rank(acc, out, x_down, up, r, start_m, start_n, rank, OPTIONS[1], ACC)
    else:
        # Unrolled, loads of all ranks would be in registers at the same time.
        for r in tl.range(0, rank, num_stages=1):
            acc = add_rank(acc, out, x_down, up, r, start_m, start_n, rank, OPTIONS[1], ACC)
    return acc


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

    * bytes: e R (2 i + o) + e i o of the products, e m k (i + o) of factors and 8 R k between the kernels; x
      and W are read again from a cache for each tile of the other axis.
    * flops: 2 R i o on tensor cores; on other units 2 R k (i + o).
    """
    gemm = gemm_of(x, weight, y)
    rank, (outputs, inputs) = down.shape[1], weight.shape
    down = operand("down", down, (gemm.members, rank, inputs), x.dtype)
    up = operand("up", up, (gemm.members, rank, outputs), x.dtype)
    x_down = down_product(x, down, rank, sigma / math.sqrt(rank))
    tiling = select_tiling("low rank", gemm, tiling, TILING.keep_warps(x.dtype), rank)
    columns = min(COLUMNS, gemm.columns, tiling.block_n)
    values, waits = gemm.describe_members(up, tiling, columns), can_begin_early(x.device)
    is_unrolled = rank <= UNROLLED and not is_before_hopper(x.device)
    options = rank, not isinstance(values, Tensor), waits, is_unrolled
    return gemm.launch(
        tiling, (x_down,), stored=[values], LAST=add_up, OPTIONS=options, FLATTEN=is_unrolled,
        columns=columns, launch_pdl=waits,
    )  # fmt: skip


PIECE_BYTES = 2**26
"""Bytes of factors that an update draws at once."""


class AbstractFusedLowRank(AbstractFused[Factors | RedrawnFactors]):
    """Low-rank noise by kernels."""

    rank: int
    regenerated: bool

    @property
    @abstractmethod
    def law(self) -> Law:
        """The distribution of the factors."""

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
        low_rank_rng_product(x, weight, down, up, self.rank, sigma, y, law=self.law)

    @override
    def weighted_sum(self, noise: Factors | RedrawnFactors, utilities: Tensor) -> Tensor:
        if not isinstance(noise, Factors):
            return self._sum_redrawn(noise, utilities)
        shape = torch.Size((1, noise.up.shape[-1], *noise.down.shape[3:]))
        return sum_outer_products(shape, noise.up, noise.down, utilities, factor=1 / math.sqrt(self.rank))

    def _sum_redrawn(self, noise: RedrawnFactors, utilities: Tensor) -> Tensor:
        """Draw the factors again, PIECE_BYTES at a time, and sum them."""
        dtype = torch.int8 if self.law == "sign" else utilities.dtype
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
                    law=self.law,
                ).view(-1, width)
                for draw, width in zip((up, down), widths, strict=True)
            )
            total += weighted_outer(
                left, right, utilities[piece], factor=1 / math.sqrt(self.rank), is_part=True
            )
        return total.to(utilities.dtype).view(noise.weight)


@variant(
    rank=1,
    regenerated=True,
    values="uniform",
    source="EGGROLL, arXiv:2511.16652, with factors made of random bytes in the kernels",
)
@variant(rank=1, regenerated=True, source="EGGROLL, arXiv:2511.16652, with factors drawn in the kernels")
@variant(rank=(1, 4), source="EGGROLL, arXiv:2511.16652; the kernel is ours")
@dataclass(frozen=True)
class FusedLowRank(AbstractFusedLowRank):
    """:class:`~impls.schemes.lowrank.LowRank` in two kernels, with another pass over x but none over y.

    With ``regenerated`` the kernels of the forward draw the factors from the stream ``philox``: the first one
    ``down``, once for each block of a member's rows, and the product's kernel ``up``. Drawn normals differ
    from the stream's by a few float32 roundings, so float64 is refused; uniform factors are the stream's.

    Memory    same as the wrapped scheme; regenerated, rank float32 numbers for each row during a forward, and
              at most 64 MiB of factors during an update.
    Work      same as the wrapped scheme. Regenerated, another pass over x and n rank (o + i) normals, at 1e12
              a second; an update writes and reads as many.
    Quality   same as the wrapped scheme.
    """

    PLAIN = LowRank

    rank: int
    regenerated: bool = False
    values: Literal["normal", "uniform"] = "normal"

    @property
    @override
    def law(self) -> Law:
        return self.values

    @property
    @override
    def dtypes(self) -> frozenset[torch.dtype]:
        return NARROW if self.regenerated and self.values == "normal" else DOT_DTYPES


@variant(regenerated=True, source="EGGROLL, arXiv:2511.16652, with signs drawn in the kernels")
@variant(source="the rank-one case of EGGROLL, arXiv:2511.16652, with signs; the kernel is ours")
@dataclass(frozen=True)
class FusedLowRankSign(AbstractFusedLowRank):
    """:class:`~impls.schemes.lowrank.LowRankSign` in two kernels, as :class:`FusedLowRank`.

    Drawn signs are the stream's in every dtype.

    Memory    same as the wrapped scheme; regenerated, rank float32 numbers for each row during a forward, and
              at most 64 MiB of factors, a byte each, during an update.
    Work      same as the wrapped scheme. Regenerated, another pass over x and a Philox call for 128 signs.
    Quality   same as the wrapped scheme.
    """

    PLAIN = LowRankSign

    rank: int = 1
    regenerated: bool = False

    @property
    @override
    def law(self) -> Law:
        return "sign"
