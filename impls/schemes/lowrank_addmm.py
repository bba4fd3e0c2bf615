"""Low-rank noise whose correction is written first, so that ``addmm`` adds the matrix product to it."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.member_ops import add_factor_products, append_axes
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import AbstractWrapper
from impls.schemes.lowrank import Factors, LowRank


@variant(rank=(1, 4), source="EGGROLL, arXiv:2511.16652; with addmm in place, as beta = 1 of cuBLAS")
@dataclass(frozen=True)
class AddmmLowRank(AbstractWrapper[Factors]):
    """:class:`~impls.schemes.lowrank.LowRank` by library calls: y = correction, then y += x W^T in place.

    The wrapped scheme computes the product first, and adds the correction in another pass. Here ``addmm``
    reads y and overwrites it, where a plain product would only write it. Convolutions have no such call, and
    tokens another memory layout: their product is added to y in another pass.

    Memory    same as the wrapped scheme.
    Work      same as the wrapped scheme; y is written once for each rank and once by the product, and read as
              often.
    Quality   same as the wrapped scheme.
    """

    rank: int

    def __post_init__(self) -> None:
        """Check the options, as the wrapped scheme does."""
        _ = self.plain

    @property
    @override
    def plain(self) -> Any:  # a LowRank
        return LowRank(self.rank)

    @override
    def why_unsupported(self, module: nn.Module) -> str:
        reason: str = self.plain.why_unsupported(module)
        return reason

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: Factors, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        inner = op.apply_per_member(x, noise.down)
        # Contiguous, because the layout of y is that of its factor, and addmm has to view y as a matrix.
        scaled = (inner * (sigma / math.sqrt(self.rank))).contiguous()
        y = scaled[:, :, :, :1] * append_axes(noise.up[:, :, 0], scaled[0])
        y = y.to(inner.dtype)  # with autocast, that of products
        add_factor_products(y, scaled[:, :, :, 1:], noise.up[:, :, 1:])
        return op.add_shared_to(y, 1.0, x, weight)

    @override
    def weighted_sum(self, noise: Factors, utilities: Tensor) -> Tensor:
        return self.plain.weighted_sum(noise, utilities)
