"""Low-rank noise in the epilogue of the product that it belongs to, and its sum as one product."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.fused.scheme import AbstractFused
from impls.fused.updates import summed
from impls.options import check_count
from impls.schemes.lowrank import Factors, LowRank, LowRankSign, RedrawnFactors


class AbstractFusedLowRank(AbstractFused[Factors | RedrawnFactors]):
    """Both factors inside of the shared product's kernel; how they are drawn is left open."""

    rank: int

    def __post_init__(self) -> None:
        """Refuse a rank that is no power of two: tiles have as many rows."""
        check_count("rank", self.rank)
        if self.rank & (self.rank - 1):
            message = f"rank must be a power of two for a kernel, got {self.rank}"
            raise ValueError(message)

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

        assert isinstance(noise, Factors)  # noqa: S101  the plain scheme stores them
        low_rank_product(x, weight, noise.down[:, 0].flatten(2), noise.up[:, 0], sigma, y)

    @override
    def combine(self, noise: Factors | RedrawnFactors, utilities: Tensor) -> Tensor:
        assert isinstance(noise, Factors)  # noqa: S101  the plain scheme stores them
        shape = torch.Size((1, noise.up.shape[-1], *noise.down.shape[3:]))
        return summed(shape, noise.up, noise.down, utilities, factor=1 / math.sqrt(self.rank))


@variant(rank=(1, 4), source="EGGROLL, arXiv:2511.16652; the kernel is ours")
@dataclass(frozen=True)
class FusedLowRank(AbstractFusedLowRank):
    """:class:`~impls.schemes.lowrank.LowRank` in one kernel, which adds no pass over rows or outputs.

    Memory    that of the plain scheme.
    Work      that of the plain scheme; x meets ``down`` in the loop of the shared product. Utilities meet
              ``up`` in the tiles of the update's product.
    Quality   that of the plain scheme.
    """

    rank: int

    @property
    @override
    def plain(self) -> LowRank:
        return LowRank(self.rank)


@variant(source="the rank-one case of EGGROLL, arXiv:2511.16652, with signs; the kernel is ours")
@dataclass(frozen=True)
class FusedLowRankSign(AbstractFusedLowRank):
    """:class:`~impls.schemes.lowrank.LowRankSign` in one kernel, as :class:`FusedLowRank`.

    Memory    that of the plain scheme.
    Work      that of the plain scheme.
    Quality   that of the plain scheme.
    """

    rank: int = 1

    @property
    @override
    def plain(self) -> LowRankSign:
        return LowRankSign(self.rank)
