"""Flipped noise in one kernel with the product that it belongs to."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.fused.cores import check_one_core
from impls.fused.scheme import AbstractFused
from impls.fused.updates import summed
from impls.perturbation.scheme import check_choice
from impls.schemes.flipped import Flipped, FlippedNoise, FlippedSign


class AbstractFusedFlipped(AbstractFused[FlippedNoise]):
    """Both products in one kernel, in one set of sums; how the core is drawn is left open."""

    side: Literal["in", "out", "both"]
    cores: int

    def __post_init__(self) -> None:
        """Refuse an unknown side and several cores."""
        check_choice("side", self.side, "in", "out", "both")
        check_one_core(self.cores)

    @override
    def launch(
        self, x: Tensor, weight: Tensor, noise: FlippedNoise, sigma: float | Tensor, y: Tensor
    ) -> None:
        from impls.kernels.flipped import flipped_product

        inputs, outputs = (None if signs is None else signs[:, 0] for signs in (noise.inputs, noise.outputs))
        flipped_product(x, weight, noise.core[0, 0].flatten(1), inputs, outputs, sigma, y)

    @override
    def weighted_sum(self, noise: FlippedNoise, utilities: Tensor) -> Tensor:
        if noise.inputs is None or noise.outputs is None:
            return self.plain.weighted_sum(noise, utilities)  # a sum of signs, and one pass over the core
        return summed(noise.core.shape[1:], noise.outputs, noise.inputs, utilities, noise.core)


@variant(side=("in", "out", "both"), source="NESgpu; both sides: Flipout, arXiv:1803.04386; kernel ours")
@dataclass(frozen=True)
class FusedFlipped(AbstractFusedFlipped):
    """:class:`~impls.schemes.flipped.Flipped` in one kernel: nothing is written between its products.

    Memory    that of the plain scheme, and nothing in between.
    Work      two products; signs are flipped in registers. The update of one side is the plain scheme's: a
              sum of signs, and one pass over the core; of both sides it is one product in a kernel.
    Quality   that of the plain scheme.
    """

    side: Literal["in", "out", "both"] = "in"
    cores: int = 1

    @property
    @override
    def plain(self) -> Flipped:
        return Flipped(self.side)


@variant(source="ours; Wen et al. 2018 (Flipout), arXiv:1803.04386, have the signs")
@dataclass(frozen=True)
class FusedFlippedSign(AbstractFusedFlipped):
    """:class:`~impls.schemes.flipped.FlippedSign` in one kernel, as :class:`FusedFlipped`.

    The core is exact in fp8, but there is no kernel for it: rows are not. Exact rows of bfloat16 would be two
    of fp8 at least, and two products at twice the speed take the time of one.

    Memory    that of the plain scheme.
    Work      that of :class:`FusedFlipped`.
    Quality   that of the plain scheme.
    """

    side: Literal["in", "out", "both"] = "both"
    cores: int = 1

    @property
    @override
    def plain(self) -> FlippedSign:
        return FlippedSign(self.side)
