"""Low-rank noise: a perturbation is the product of two thin factors, and is never formed."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.member_ops import add_factor_products, append_axes, count_signs, sum_pieces
from impls.perturbation.noise import Noise, NoiseStream, piece_bytes
from impls.perturbation.operators import AbstractOperator, TransposedLinear
from impls.perturbation.scheme import AbstractScheme, Flops, check_choice, check_count


@dataclass(frozen=True, eq=False)
class Factors(Noise):
    """The members' factors: E_m = up_m^T down_m / sqrt(rank).

    Attributes:
        down: factors applied to the inputs, [m, g, k, i, *taps].
        up: factors that make the outputs, [m, g, k, o].
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, eq=False)
class RedrawnFactors(Noise):
    """The stream that draws the factors again, and the weight's shape; no numbers are stored."""

    stream: NoiseStream
    weight: torch.Size


class AbstractLowRank(AbstractScheme[Factors | RedrawnFactors]):
    """E_m is a product of two factors; subclasses define their distribution.

    Rows are multiplied by the factors, never by E_m; the correction is one pass over the output for each
    rank.
    """

    rank: int
    regenerated: bool

    def __post_init__(self) -> None:
        check_count("rank", self.rank)

    @abstractmethod
    def factors(self, weight: torch.Size, stream: NoiseStream) -> Factors:
        """Draw the factors of the stream's members for a weight [g, o, i, *taps]."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> Factors | RedrawnFactors:
        return (
            RedrawnFactors(stream, weight.shape) if self.regenerated else self.factors(weight.shape, stream)
        )

    @override
    def forward(
        self,
        op: AbstractOperator,
        weight: Tensor,
        noise: Factors | RedrawnFactors,
        x: Tensor,
        sigma: float | Tensor,
    ) -> Tensor:
        y = op.apply_shared(x, weight)
        for members, factors in self._pieces(noise):
            self._add_correction(op, y[:, members], factors, x[:, members], sigma)
        return y

    @override
    def forward_transposed(
        self,
        op: TransposedLinear,
        weight: Tensor,
        noise: Factors | RedrawnFactors,
        x: Tensor,
        sigma: float | Tensor,
    ) -> Tensor:
        # The transpose of E_m has the factors swapped.
        y = op.apply_shared(x, weight)
        for members, factors in self._pieces(noise):
            swapped = Factors(down=factors.up, up=factors.down)
            self._add_correction(op.untransposed, y[:, members], swapped, x[:, members], sigma)
        return y

    def _add_correction(
        self, op: AbstractOperator, y: Tensor, factors: Factors, x: Tensor, sigma: float | Tensor
    ) -> None:
        """Add sigma times the product of each row with its member's E_m to y, in place."""
        inner = op.apply_per_member(x, factors.down)
        add_factor_products(y, inner * (sigma / math.sqrt(self.rank)), factors.up)

    @override
    def lookup(self, noise: Factors | RedrawnFactors, tokens: Tensor) -> Tensor:
        # Only the factors' rows of the tokens are multiplied.
        products = []
        for members, factors in self._pieces(noise):
            up, down = factors.up[:, 0], factors.down[:, 0]
            index = tokens[members].unsqueeze(1).expand(-1, self.rank, -1)
            products.append(torch.bmm(up.gather(2, index).mT, down))
        return torch.cat(products).div_(math.sqrt(self.rank))

    @override
    def weighted_sum(self, noise: Factors | RedrawnFactors, utilities: Tensor) -> Tensor:
        def sum_piece(members: slice, factors: Factors) -> Tensor:
            up = factors.up * append_axes(utilities[members] / math.sqrt(self.rank), factors.up)
            # All ranks of all members are the inner axis of one product, of views where there is one group.
            left, right = (values.transpose(0, 1).flatten(1, 2) for values in (up, factors.down.flatten(3)))
            return torch.bmm(left.mT, right).unflatten(2, factors.down.shape[3:])

        return sum_pieces(sum_piece(*piece) for piece in self._pieces(noise))

    @override
    def dense_noise(self, noise: Factors | RedrawnFactors) -> Tensor:
        dense = [
            torch.einsum("mgko,mgki->mgoi", factors.up, factors.down.flatten(3)).unflatten(
                3, factors.down.shape[3:]
            )
            for _, factors in self._pieces(noise)
        ]
        return torch.cat(dense).div_(math.sqrt(self.rank))

    @override
    def kappa(self, weight: Tensor, members: int) -> float:
        return 0.0

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        groups, outputs, inputs, *taps = weight
        factor_size = self.rank * groups * (outputs + inputs * math.prod(taps))
        return Flops(
            forward=2 * (weight.numel() + factor_size), update=2 * self.rank * weight.numel() * members
        )

    def _pieces(self, noise: Factors | RedrawnFactors) -> Iterator[tuple[slice, Factors]]:
        """Yield the members' factors: all at once if they are stored, else drawn in pieces."""
        if isinstance(noise, Factors):
            yield slice(0, len(noise.up)), noise
            return
        groups, outputs, inputs, *taps = noise.weight
        width = self.rank * groups * (outputs + inputs * math.prod(taps))
        factor_bytes = width * noise.stream.dtype.itemsize
        for start, stop in noise.stream.pieces(factor_bytes, piece_bytes(noise.stream.device)):
            yield slice(start, stop), self.factors(noise.weight, noise.stream.narrow(start, stop))


@variant(
    rank=1,
    regenerated=True,
    values="uniform",
    source="EGGROLL, arXiv:2511.16652, with factors made of random bytes that are drawn again",
)
@variant(rank=1, regenerated=True, source="EGGROLL, arXiv:2511.16652, with factors that are drawn again")
@variant(rank=(1, 4), source="EGGROLL, arXiv:2511.16652; the form for convolutions is ours")
@dataclass(frozen=True)
class LowRank(AbstractLowRank):
    """E_m = up_m @ down_m / sqrt(rank), both factors standard normal, or uniform over 256 levels.

    ``regenerated`` stores only the stream. The forward and the update draw the factors again, with the same
    bits. ``values`` is as in :class:`~impls.schemes.regenerated.Regenerated`.

    Memory    n * g * rank * (o + i * taps) numbers, or 0 with ``regenerated``.
    Work      2 * rank * g * (o + i * taps) flops of a row and output position, and one pass over the output
              for each rank; the update is one product [o, n * rank] x [n * rank, i * taps].
    Quality   kappa = 0: members are independent. Entries are products of normals, with heavier tails: at rank
              one, d / n becomes (o + 2) (i * taps + 2) / n. With uniform factors, whose fourth moment is
              1.8 instead of 3, it becomes (o + 0.8) (i * taps + 0.8) / n.
    """

    rank: int
    regenerated: bool = False
    values: Literal["normal", "uniform"] = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("values", self.values, "normal", "uniform")

    @override
    def factors(self, weight: torch.Size, stream: NoiseStream) -> Factors:
        groups, outputs, *inner = weight
        draw = stream.levels if self.values == "uniform" else stream.normal
        return Factors(
            down=draw("down", groups, self.rank, *inner), up=draw("up", groups, self.rank, outputs)
        )


@variant(regenerated=True, source="EGGROLL, arXiv:2511.16652, with signs that are drawn again")
@variant(source="the rank-one case of EGGROLL, arXiv:2511.16652, with signs")
@dataclass(frozen=True)
class LowRankSign(AbstractLowRank):
    """E_m = up_m @ down_m / sqrt(rank), both factors fair signs.

    Signs are stored in the weight's dtype. Torch has no product of int8 and floats, and converting signs
    takes a CPU a tenth to a third of a forward.

    Memory    n * g * rank * (o + i * taps) numbers, or 0 with ``regenerated``.
    Work      that of :class:`LowRank`.
    Quality   kappa = 0. At rank one every entry is a sign, without heavy tails.
    """

    rank: int = 1
    regenerated: bool = False

    @override
    def factors(self, weight: torch.Size, stream: NoiseStream) -> Factors:
        groups, outputs, *inner = weight
        return Factors(
            down=stream.signs("down", groups, self.rank, *inner),
            up=stream.signs("up", groups, self.rank, outputs),
        )

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        groups, outputs, *inner = weight
        return count_signs(self.rank * groups * (outputs + math.prod(inner) - 1))
