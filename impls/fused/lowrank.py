"""Low-rank noise in the epilogue of the product that it belongs to, and its sum as one product."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.fused.draws import draw_of
from impls.fused.scheme import FLOATING, NARROW, AbstractFused
from impls.fused.updates import summed
from impls.perturbation.scheme import check_count
from impls.schemes.lowrank import Factors, LowRank, LowRankSign, RedrawnFactors

MOST_RANK = 32
"""Factors that rows of a tile meet in registers."""

PIECE_BYTES = 2**26
"""Factors that an update has in memory at once, which are drawn for it again."""


class AbstractFusedLowRank(AbstractFused[Factors | RedrawnFactors]):
    """Both factors inside of the shared product's kernel; how they are drawn is left open."""

    SIGNS: ClassVar[bool]
    """Whether factors are of signs, and not of normals."""

    rank: int
    regenerated: bool

    def __post_init__(self) -> None:
        """Refuse a rank that is no power of two, as tiles have as many rows, or above what a kernel holds."""
        check_count("rank", self.rank)
        if self.rank & (self.rank - 1):
            message = f"rank must be a power of two for a kernel, got {self.rank}"
            raise ValueError(message)
        if self.rank > MOST_RANK:
            message = (
                f"rank must be at most {MOST_RANK} for a kernel, which keeps a row's products with so many "
                f"factors in registers, got {self.rank}"
            )
            raise ValueError(message)

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
        from impls.kernels.lowrank import low_rank_product
        from impls.kernels.redrawn import redrawn_product

        if isinstance(noise, Factors):
            low_rank_product(x, weight, noise.down[:, 0].flatten(2), noise.up[:, 0], sigma, y)
            return
        down, up = (draw_of(noise.stream, name) for name in ("down", "up"))
        redrawn_product(x, weight, down, up, self.rank, sigma, y, signs=self.SIGNS)

    @override
    def weighted_sum(self, noise: Factors | RedrawnFactors, utilities: Tensor) -> Tensor:
        if not isinstance(noise, Factors):
            return self._redrawn(noise, utilities)
        shape = torch.Size((1, noise.up.shape[-1], *noise.down.shape[3:]))
        return summed(shape, noise.up, noise.down, utilities, factor=1 / math.sqrt(self.rank))

    def _redrawn(self, noise: RedrawnFactors, utilities: Tensor) -> Tensor:
        """Draw factors of some members after others into memory once more, and sum these."""
        from impls.kernels.fills import fill
        from impls.kernels.outer import weighted_outer

        kind = torch.int8 if self.SIGNS else utilities.dtype
        widths = noise.weight[1], noise.weight[2:].numel()
        each = self.rank * sum(widths) * kind.itemsize
        total = utilities.new_zeros(widths, dtype=torch.promote_types(torch.float32, utilities.dtype))
        up, down = (draw_of(noise.stream, name) for name in ("up", "down"))
        at_once = max(1, PIECE_BYTES // each)
        for start in range(0, len(utilities), at_once):
            piece = slice(start, start + at_once)
            left, right = (
                fill(
                    utilities.new_empty(len(utilities[piece]), self.rank * width, dtype=kind),
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
    """:class:`~impls.schemes.lowrank.LowRank` in one kernel, which adds no pass over rows or outputs.

    ``regenerated`` draws the factors in the forward's kernels, from the stream ``philox``: ``down`` in a
    first one, once for a block of a member's rows, and ``up`` in the product's. Normals that a kernel draws
    are the stream's up to a few float32 roundings, so float64 is refused then.

    Memory    that of the plain scheme; regenerated, rank numbers in float32 for each row during a forward,
              and 64 MiB of factors at most during an update.
    Work      that of the plain scheme; x meets ``down`` in the loop of the shared product. Regenerated, one
              pass over x more, and n rank (o + i) normals, at 1e12 a second; an update writes and reads as
              many.
    Quality   that of the plain scheme.
    """

    SIGNS: ClassVar[bool] = False

    rank: int
    regenerated: bool = False

    @property
    @override
    def plain(self) -> LowRank:
        return LowRank(self.rank, self.regenerated)

    @property
    @override
    def dtypes(self) -> frozenset[torch.dtype]:
        return NARROW if self.regenerated else FLOATING


@variant(regenerated=True, source="EGGROLL, arXiv:2511.16652, with signs drawn in the kernels")
@variant(source="the rank-one case of EGGROLL, arXiv:2511.16652, with signs; the kernel is ours")
@dataclass(frozen=True)
class FusedLowRankSign(AbstractFusedLowRank):
    """:class:`~impls.schemes.lowrank.LowRankSign` in one kernel, as :class:`FusedLowRank`.

    Signs that a kernel draws are the stream's in every type.

    Memory    that of the plain scheme; regenerated, rank numbers in float32 for each row during a forward,
              and 64 MiB of factors, a byte each, at most during an update.
    Work      that of the plain scheme. Regenerated, one pass over x more, and a call of Philox for 128 signs.
    Quality   that of the plain scheme.
    """

    SIGNS: ClassVar[bool] = True

    rank: int = 1
    regenerated: bool = False

    @property
    @override
    def plain(self) -> LowRankSign:
        return LowRankSign(self.rank, self.regenerated)
