"""Hadamard noise inside of the product that it belongs to."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.fused.cores import check_one_core
from impls.fused.scheme import AbstractFused
from impls.fused.updates import summed
from impls.schemes.hadamard import Hadamard, HadamardNoise


@variant(source="ours")
@dataclass(frozen=True)
class FusedHadamard(AbstractFused[HadamardNoise]):
    """:class:`~impls.schemes.hadamard.Hadamard` in one kernel, from the product's own tiles.

    One core: of several each has an order of its own, which takes a tile's channels from all over the row.

    Memory    that of the plain scheme, and nothing for transformed rows.
    Work      a tile of 128 columns sums its rows' channels, with signs, in the loop of the shared product,
              and ends with a product of 64 channels: 64 / i more on matrix units, and two additions for each
              number of a row and tile.
    Quality   that of the plain scheme.
    """

    cores: int = 1

    def __post_init__(self) -> None:
        """Refuse several cores."""
        check_one_core(self.cores)

    @property
    @override
    def plain(self) -> Hadamard:
        return Hadamard()

    @override
    def launch(
        self, x: Tensor, weight: Tensor, noise: HadamardNoise, sigma: float | Tensor, y: Tensor
    ) -> None:
        from impls.kernels.hadamard import hadamard_product

        hadamard_product(x, weight, _inputs(noise)[:, 0], noise.outputs[:, 0], sigma, y)

    @override
    def weighted_sum(self, noise: HadamardNoise, utilities: Tensor) -> Tensor:
        inputs = _inputs(noise)
        taps = () if noise.taps is None else noise.taps.shape[1:]
        weight = torch.Size((1, noise.outputs.shape[2], inputs.shape[2], *taps))
        return summed(weight, noise.outputs, inputs, utilities, hadamard=True)


def _inputs(noise: HadamardNoise) -> Tensor:
    """Return the members' signs of inputs: a convolution of one tap has one more for each member."""
    return noise.inputs if noise.taps is None else noise.inputs * noise.taps.view(-1, 1, 1)
