"""Dropout inside of the product that it belongs to: masks of members' own, and blocks that groups share."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.fused.scheme import AbstractFusedRows
from impls.perturbation.scheme import check_choice, check_count, check_probability
from impls.schemes.blocks import BlocksNoise, DropoutBlocks, cells
from impls.schemes.dropout import DropoutMask, DropoutNoise

MOST_BLOCKS = 16
"""Blocks of an axis: a kernel keeps which are on in the bits of a number."""


@variant(
    side=("in", "out"),
    source="Srivastava et al. 2014 (dropout); Werfel, Xie, Seung 2005 (the update of outputs); kernels ours",
)
@dataclass(frozen=True)
class FusedDropoutMask(AbstractFusedRows[DropoutNoise]):
    """:class:`~impls.schemes.dropout.DropoutMask` in one kernel, which adds no pass over inputs or outputs.

    Memory    that of the plain scheme; no dropped copy of the rows.
    Work      that of the plain scheme, as is its update: of inputs a sum of masks, and one pass over the
              weight; of outputs a product with rows, which torch multiplies.
    Quality   that of the plain scheme.
    """

    p: float = 0.5
    side: Literal["in", "out"] = "in"

    def __post_init__(self) -> None:
        """Refuse a p that is no probability, and an unknown side."""
        check_probability("p", self.p)
        check_choice("side", self.side, "in", "out")

    @property
    @override
    def plain(self) -> DropoutMask:
        return DropoutMask(self.p, self.side)

    @override
    def launch(
        self, x: Tensor, weight: Tensor, noise: DropoutNoise, sigma: float | Tensor, y: Tensor
    ) -> None:
        from impls.kernels.dropout import dropped_inputs, dropped_outputs

        multiply = dropped_inputs if self.side == "in" else dropped_outputs
        multiply(x, weight, noise.kept[:, 0], *_counts(1 / (1 - self.p), sigma, noise.sigma), y)

    @override
    def weighted_sum(self, noise: DropoutNoise, utilities: Tensor) -> Tensor:
        return self.plain.weighted_sum(noise, utilities)


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
        if self.blocks > MOST_BLOCKS:
            message = (
                f"blocks must be at most {MOST_BLOCKS} for a kernel, got {self.blocks}: of narrower ones it "
                "multiplies more than is kept"
            )
            raise ValueError(message)

    @property
    @override
    def plain(self) -> DropoutBlocks:
        return DropoutBlocks(self.p, self.side, self.groups, self.blocks)

    @override
    def launch(self, x: Tensor, weight: Tensor, noise: BlocksNoise, sigma: float | Tensor, y: Tensor) -> None:
        from impls.kernels.blocks import Cut, kept_blocks

        scale = 1 / self.plain.density(torch.Size((1, *weight.shape)))
        groups, *blocks = noise.factors.shape
        cuts = []
        for count, width in zip(blocks, weight.shape, strict=True):
            unit, number = cells(width, count)
            cuts.append(Cut(count, number, unit))
        counts = _counts(scale, sigma, noise.sigma)
        kept_blocks(x, weight, noise.factors, (cuts[0], cuts[1]), *counts, y, noise.members.start % groups)

    @override
    def weighted_sum(self, noise: BlocksNoise, utilities: Tensor) -> Tensor:
        return self.plain.weighted_sum(noise, utilities)


def _counts(scale: float, sigma: float | Tensor, prepared: float) -> tuple[float | Tensor, float | Tensor]:
    """Return what is kept and what is dropped count in a call, in place of 1.

    At the sigma that noise was prepared for they count ``scale`` and nothing, at its negative as much less
    than 1 as that is more.
    """
    if not isinstance(sigma, Tensor):
        ratio = sigma / prepared
        return 1 + ratio * (scale - 1), 1 - ratio
    # Both rounded to one type: what should be 1 is.
    ratios = sigma.flatten() / sigma.new_full((), prepared)
    ratios = ratios.to(torch.promote_types(torch.float32, ratios.dtype))
    return 1 + ratios * (scale - 1), 1 - ratios
