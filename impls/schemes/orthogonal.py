"""Orthogonal noise: low-rank members that are orthogonal to each other, in rounds of at most d / rank."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.member_ops import count_signs
from impls.perturbation.noise import NoiseStream, piece_bytes
from impls.schemes.lowrank import AbstractLowRank, Factors

MEMBERS_PER_DRAW = 4096
"""One call draws rounds of about this many members: a round of a small weight has few."""


@variant(source="ours; orthogonal directions: Choromanski et al. 2018, arXiv:1804.02395")
@dataclass(frozen=True)
class Orthogonal(AbstractLowRank):
    """E_m is low rank, and orthogonal to the E_m of every other member of its round.

    The members of a round share two orthogonal bases, U [o, o] and V [i * taps, i * taps], scaled to entries
    of unit variance. There are o * i * taps pairs (u, v) of their columns, and each member has ``rank`` of
    the pairs: E_m = sum of u v^T / sqrt(rank). A member's u and v differ where the widths allow. When all
    pairs are used, the next round has other bases. Groups of a convolution have different bases.

    A basis is S C T. C is the discrete Hartley transform (Bracewell 1983), which exists for any width. S and
    T are diagonal matrices of fair signs, and a round begins at a random column. T and the random column give
    E_m, and pairs of members of different rounds, the second moments of independent signs. S spreads a
    gradient that equals a column of C over all members. A basis takes two signs per channel. Decomposing
    Gaussian matrices would take several times as long as the forward, and torch cannot do it in bfloat16.

    Memory    n * g * rank * (o + i * taps) numbers, or 0 with ``regenerated``.
    Work      that of :class:`~impls.schemes.lowrank.LowRank`; drawing is a table look-up.
    Quality   kappa = -(share of pairs of members in the same round): -1 up to o * i * taps / rank members,
              where cos^2 = n / d and n_eff = n / (1 - n / d) is above n; for larger n it tends to 0 as
              (o * i * taps / rank) / n.
    """

    rank: int = 1
    regenerated: bool = False

    @override
    def factors(self, weight: torch.Size, stream: NoiseStream) -> Factors:
        _, outputs, *inner = weight
        round_size, width, device = self._round_size(weight), math.prod(inner), stream.device
        members = torch.arange(stream.members.start, stream.members.stop, device=device)
        # A round numbers all pairs of a column of the smaller basis and a column of the larger one. The first
        # min(o, i * taps) pairs have no column in common.
        pairs = (members % round_size * self.rank)[:, None] + torch.arange(self.rank, device=device)
        small_columns = pairs % min(outputs, width)
        large_columns = (small_columns + pairs // min(outputs, width)) % max(outputs, width)
        up_columns, down_columns = (
            (small_columns, large_columns) if outputs <= width else (large_columns, small_columns)
        )
        return Factors(
            down=self._basis_columns("inputs", weight, stream, width, down_columns).unflatten(3, inner),
            up=self._basis_columns("outputs", weight, stream, outputs, up_columns),
        )

    @override
    def kappa(self, weight: Tensor, members: int) -> float:
        round_size = self._round_size(weight.shape)
        rounds, remainder = divmod(members, round_size)
        same_round_pairs = rounds * round_size * (round_size - 1) + remainder * (remainder - 1)
        return -same_round_pairs / max(1, members * (members - 1))

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        groups, outputs, *inner = weight
        signs = count_signs(self.rank * groups * (outputs + math.prod(inner) - 1))
        return math.prod([float(outputs * math.prod(inner))] * (self.rank * groups), start=signs)

    def _round_size(self, weight: torch.Size) -> int:
        """Return the number of members of a round.

        Raises:
            UnsupportedError: the rank is above the number of pairs.
        """
        pairs = weight[1:].numel()
        if self.rank > pairs:
            raise UnsupportedError(
                f"rank = {self.rank} is above the {pairs} weights of shape {tuple(weight[1:])} that a layer, "
                f"or a group of a convolution, has: use a rank of at most {pairs}"
            )
        return pairs // self.rank

    def _basis_columns(
        self, side: str, weight: torch.Size, stream: NoiseStream, width: int, columns: Tensor
    ) -> Tensor:
        """Return columns of each member's basis, U or V: indices [m, k] -> [m, g, k, width]."""
        round_size, shared, members = self._round_size(weight), stream.shared(), stream.members
        rounds_per_draw = max(1, MEMBERS_PER_DRAW // round_size)
        members_per_draw = rounds_per_draw * round_size
        draws = range(members[0] // members_per_draw, members[-1] // members_per_draw + 1)
        rounds = torch.arange(members.start, members.stop, device=stream.device) // round_size
        member_rounds = rounds - draws.start * rounds_per_draw
        shape = (rounds_per_draw, weight[0])

        def draw_signs(name: str) -> Tensor:
            signs = [shared.signs(f"{side} {name} {draw}", *shape, width)[0] for draw in draws]
            return torch.cat(signs)[member_rounds]

        begin = [shared.integers(f"{side} begin {draw}", width, *shape)[0] for draw in draws]
        columns = (columns[:, None] + torch.cat(begin)[member_rounds].unsqueeze(2)) % width
        row_signs = draw_signs("rows").unsqueeze(2)
        column_signs = draw_signs("columns").gather(2, columns).unsqueeze(3)
        return _hartley_columns(columns, width, stream).mul_(row_signs).mul_(column_signs)


def _hartley_columns(columns: Tensor, width: int, stream: NoiseStream) -> Tensor:
    """Return columns of the discrete Hartley transform, scaled to unit variance: [m, ...] -> [m, ..., width].

    The entry in row j and column c is cos t + sin t = sqrt(2) cos(t - pi / 4) with t = 2 pi j c / width, so
    it depends on j c modulo the width only. With j = far + near, each entry takes one addition and one
    look-up.
    """
    angles = torch.arange(width, device=columns.device, dtype=torch.float64).mul_(2 * math.pi / width)
    entries = angles.sub_(math.pi / 4).cos_().mul_(math.sqrt(2)).to(stream.dtype).repeat(2)
    near = torch.arange(math.isqrt(width - 1) + 1, device=columns.device)
    far = torch.arange(0, width, len(near), device=columns.device)
    index_bytes = columns[0].numel() * width * torch.int64.itemsize
    members_at_once = max(1, piece_bytes(columns.device) // index_bytes)
    pieces = []
    for piece in columns.unsqueeze(-1).split(members_at_once):
        # A sum of two remainders is below 2 * width, for which ``entries`` are repeated.
        sums = (piece * far % width).unsqueeze(-1) + (piece * near % width).unsqueeze(-2)
        index = sums.flatten(-2)[..., :width]
        pieces.append(entries.index_select(0, index.flatten()).view(index.shape))
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
