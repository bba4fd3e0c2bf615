"""Orthogonal noise: low-rank members that are orthogonal to each other, in rounds of at most d / rank."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.noise import NoiseStream, piece_bytes
from impls.schemes.lowrank import AbstractLowRank, Factors

DRAWN = 4096
"""Approximate number of members whose rounds are drawn in one call; small weights have small rounds."""


@variant(source="ours; orthogonal directions: Choromanski et al. 2018, arXiv:1804.02395")
@dataclass(frozen=True)
class Orthogonal(AbstractLowRank):
    """E_m is low rank, and orthogonal to the E_m of every other member of its round.

    The members of a round share two orthogonal bases, U [o, o] and V [i * taps, i * taps], scaled to entries
    of unit variance, with o * i * taps pairs (u, v) of columns. Each member has ``rank`` pairs: E_m = sum of
    u v^T / sqrt(rank), with different u and v within a member where the widths allow. When all pairs are
    used, the next round has other bases. Groups of a convolution have different bases.

    The bases are S C T: C is the discrete Hartley transform, which exists for any width; S and T are
    diagonals of fair signs; the first column of a round is random. T and the first column make second moments
    of E_m, and of members of different rounds, equal to those of independent signs; S spreads a gradient that
    equals a column of C over all members. Such bases take two signs per channel. A decomposition of Gaussian
    matrices would take several times as long as the forward, and torch has none in narrow types.

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
        place = (members % round_size * self.rank)[:, None] + torch.arange(self.rank, device=device)
        # Every pair of columns occurs once; the first min(o, i * taps) pairs have no column in common.
        short = place % min(outputs, width)
        long = (short + place // min(outputs, width)) % max(outputs, width)
        rows, columns = (short, long) if outputs <= width else (long, short)
        return Factors(
            down=self._basis_columns("inputs", weight, stream, width, columns).unflatten(3, inner),
            up=self._basis_columns("outputs", weight, stream, outputs, rows),
        )

    @override
    def kappa(self, weight: Tensor, members: int) -> float:
        full, remainder = divmod(members, round_size := self._round_size(weight.shape))
        together = full * round_size * (round_size - 1) + remainder * (remainder - 1)
        return -together / max(1, members * (members - 1))

    def _round_size(self, weight: torch.Size) -> int:
        """Return the number of members of a round.

        Raises:
            ValueError: the rank is above the number of pairs.

        """
        pairs = weight[1:].numel()
        if self.rank > pairs:
            shape = tuple(weight[1:])
            message = (
                f"rank = {self.rank} is above the {pairs} weights of a layer, or of a convolution's group, "
                f"of shape {shape}"
            )
            raise ValueError(message)
        return pairs // self.rank

    def _basis_columns(
        self, side: str, weight: torch.Size, stream: NoiseStream, width: int, columns: Tensor
    ) -> Tensor:
        """Return these columns [m, k] of each member's basis (U or V): [m, g, k, width]."""
        round_size, device = self._round_size(weight), stream.device
        together = max(1, DRAWN // round_size)
        first, last = (member // round_size // together for member in (stream.members[0], stream.members[-1]))
        shared, shape = stream.shared(), (together, weight[0])

        def drawn(draw: str, *inner: int) -> Tensor:
            draws = [
                shared.signs(f"{side} {draw} {index}", *shape, *inner)[0] for index in range(first, last + 1)
            ]
            return torch.cat(draws)

        shifts = [
            shared.integers(f"{side} begin {index}", width, *shape)[0] for index in range(first, last + 1)
        ]
        members = torch.arange(stream.members.start, stream.members.stop, device=device)
        rounds = members // round_size - first * together
        picked = (columns[:, None] + torch.cat(shifts)[rounds].unsqueeze(2)) % width
        signs = drawn("rows", width)[rounds].unsqueeze(2)
        flips = drawn("columns", width)[rounds].gather(2, picked).unsqueeze(3)
        return _hartley_columns(picked, width, stream).mul_(signs).mul_(flips)


def _hartley_columns(columns: Tensor, width: int, stream: NoiseStream) -> Tensor:
    """Return columns [m, ...] of the discrete Hartley transform, scaled to unit variance: [m, ..., width].

    The entry in row j and column c is cos t + sin t = sqrt(2) cos(t - pi / 4) with t = 2 pi j c / width, so
    it depends on j c modulo the width only. With j = far + near, each entry takes one addition and one
    look-up.
    """
    angles = torch.arange(width, device=columns.device, dtype=torch.float64).mul_(2 * math.pi / width)
    entries = angles.sub_(math.pi / 4).cos_().mul_(math.sqrt(2)).to(stream.dtype).repeat(2)
    near = torch.arange(math.isqrt(width - 1) + 1, device=columns.device)
    far = torch.arange(0, width, len(near), device=columns.device)
    index_bytes = columns[0].numel() * width * torch.int64.itemsize
    step = max(1, piece_bytes(columns.device) // index_bytes)
    parts = []
    for part in columns.unsqueeze(-1).split(step):
        places = (part * far % width).unsqueeze(-1) + (part * near % width).unsqueeze(-2)
        picked = places.flatten(-2)[..., :width]
        parts.append(entries.index_select(0, picked.flatten()).view(picked.shape))
    return torch.cat(parts) if len(parts) > 1 else parts[0]
