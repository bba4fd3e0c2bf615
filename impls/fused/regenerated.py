"""Dense noise that is drawn inside of the kernels that read it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.fused.draws import draw_of
from impls.fused.scheme import NARROW, AbstractFused
from impls.schemes.regenerated import Regenerated, RegeneratedSign, StreamNoise


class AbstractFusedRegenerated(AbstractFused[StreamNoise]):
    """E_m is drawn where rows meet it, and where it is summed; which entries it has is left open."""

    SIGNS: ClassVar[bool]
    """Whether they are signs, and not normals."""

    @property
    @override
    def stream(self) -> str:
        return "philox"

    @override
    def launch(self, x: Tensor, weight: Tensor, noise: StreamNoise, sigma: float | Tensor, y: Tensor) -> None:
        from impls.kernels.regenerated import regenerated_product

        regenerated_product(x, weight, draw_of(noise.stream, "dense"), sigma, y, signs=self.SIGNS)

    @override
    def weighted_sum(self, noise: StreamNoise, utilities: Tensor) -> Tensor:
        from impls.kernels.noise_sums import noise_sum

        draw = draw_of(noise.stream, "dense")
        total = noise_sum(draw, utilities, noise.shape.numel(), signs=self.SIGNS)
        return total.view(noise.shape).to(utilities.dtype)


@variant(source="Salimans et al. 2017, arXiv:1703.03864, with noise drawn in the kernels; those are ours")
@dataclass(frozen=True)
class FusedRegenerated(AbstractFusedRegenerated):
    """:class:`~impls.schemes.regenerated.Regenerated` in one kernel for the forward and one for the update.

    Normals that a kernel draws are those of the stream up to a few float32 roundings, so float64 is refused.

    Memory    nothing: no number of noise ever leaves the registers of who drew it.
    Work      that of the plain scheme. Drawing is the floor: n o i normals, at 1e12 a second, in the forward,
              for every block of a member's rows, and in the update.
    Quality   that of the plain scheme.
    """

    SIGNS: ClassVar[bool] = False

    @property
    @override
    def plain(self) -> Regenerated:
        return Regenerated()

    @property
    @override
    def dtypes(self) -> frozenset[torch.dtype]:
        return NARROW


@variant(source="FusedRegenerated, with the cheapest entries of unit variance")
@dataclass(frozen=True)
class FusedRegeneratedSign(AbstractFusedRegenerated):
    """:class:`~impls.schemes.regenerated.RegeneratedSign` in kernels, as :class:`FusedRegenerated`.

    Memory    nothing.
    Work      that of the plain scheme. One call of Philox draws 128 signs, so that turning and adding a
              number, three operations for each sign and row, is the floor.
    Quality   that of the plain scheme.
    """

    SIGNS: ClassVar[bool] = True

    @property
    @override
    def plain(self) -> RegeneratedSign:
        return RegeneratedSign()
