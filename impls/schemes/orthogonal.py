"""Orthogonal noise: low-rank members that are orthogonal to each other, as long as the weight has room."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.noise import NoiseStream
from impls.schemes.lowrank import PIECE_BYTES, AbstractLowRank, Factors

DRAWN = 4096
"""Members, about, whose rounds are drawn in one go: small weights have many rounds of few members."""


@variant(source="ours; orthogonal directions: Choromanski et al. 2018, arXiv:1804.02395")
@dataclass(frozen=True)
class Orthogonal(AbstractLowRank):
    """E_m is low rank, and orthogonal to the E_m of every other member of its round.

    A round has two orthogonal bases that its members share, U [o, o] and V [i * taps, i * taps], scaled to
    entries of unit variance, and o * i * taps pairs (u, v) of their columns. Each member takes ``rank`` pairs
    of its own: E_m = sum of u v^T / sqrt(rank), with different u and v within the member where the widths
    allow. When the pairs are used up, the next round has other bases. So has every group of a convolution.

    The bases are S C T: C is the discrete Hartley transform, which has any width; S and T are diagonals of
    fair signs; and where in C a round begins is random. By T and that beginning, second moments of E_m, and
    of members of different rounds, are those of independent signs; by S, a gradient that looks like a column
    of C is not seen by one member alone. Such bases cost two signs a channel. A decomposition of Gaussian
    matrices costs several times what the forward takes, and does not exist in narrow types.

    Memory    n * g * rank * (o + i * taps) numbers, the columns that members pick, or none.
    Work      that of :class:`~impls.schemes.lowrank.LowRank`; drawing looks numbers up and takes no normals.
    Quality   kappa = -(share of pairs of members that are in one round): -1 up to o * i * taps / rank
              members, where cos^2 = n / d and n_eff = n / (1 - n / d) is above n; from there on it goes
              to 0 as (o * i * taps / rank) / n.
    """

    rank: int = 1
    regenerated: bool = False

    @override
    def factors(self, weight: torch.Size, stream: NoiseStream) -> Factors:
        _, outputs, *inner = weight
        room, width, device = self._room(weight), math.prod(inner), stream.device
        members = torch.arange(stream.members.start, stream.members.stop, device=device)
        place = (members % room * self.rank)[:, None] + torch.arange(self.rank, device=device)
        # Every pair of columns once, the first min(o, i * taps) of them without meeting a column again.
        short = place % min(outputs, width)
        long = (short + place // min(outputs, width)) % max(outputs, width)
        rows, columns = (short, long) if outputs <= width else (long, short)
        return Factors(
            down=self._picked("inputs", weight, stream, width, columns).unflatten(3, inner),
            up=self._picked("outputs", weight, stream, outputs, rows),
        )

    @override
    def kappa(self, weight: torch.Size, members: int) -> float:
        full, rest = divmod(members, room := self._room(weight))
        together = full * room * (room - 1) + rest * (rest - 1)
        return -together / max(1, members * (members - 1))

    def _room(self, weight: torch.Size) -> int:
        """How many members a round has.

        Raises:
            ValueError: not even one.

        """
        pairs = weight[1:].numel()
        if self.rank > pairs:
            message = f"rank = {self.rank} is above the {pairs} weights of a group of {tuple(weight[1:])}"
            raise ValueError(message)
        return pairs // self.rank

    def _picked(
        self, side: str, weight: torch.Size, stream: NoiseStream, width: int, columns: Tensor
    ) -> Tensor:
        """Return columns [m, k] of the members' bases of a width: [m, g, k, width]."""
        room, device = self._room(weight), stream.device
        together = max(1, DRAWN // room)
        first, last = (member // room // together for member in (stream.members[0], stream.members[-1]))
        shared, shape = stream.shared(), (together, weight[0])

        def drawn(draw: str, *inner: int) -> Tensor:
            goes = [shared.signs(f"{side} {draw} {go}", *shape, *inner)[0] for go in range(first, last + 1)]
            return torch.cat(goes)

        shifts = [shared.integers(f"{side} begin {go}", width, *shape)[0] for go in range(first, last + 1)]
        members = torch.arange(stream.members.start, stream.members.stop, device=device)
        rounds = members // room - first * together
        picked = (columns[:, None] + torch.cat(shifts)[rounds].unsqueeze(2)) % width
        signs = drawn("rows", width)[rounds].unsqueeze(2)
        flips = drawn("columns", width)[rounds].gather(2, picked).unsqueeze(3)
        return _hartley(picked, width, stream).mul_(signs).mul_(flips)


def _hartley(columns: Tensor, width: int, stream: NoiseStream) -> Tensor:
    """Return columns [m, ...] of the discrete Hartley transform, scaled to unit variance: [m, ..., width].

    The entry in row j and column c is cos t + sin t = sqrt(2) cos(t - pi / 4), t = 2 pi j c / width, so only
    j c modulo the width counts. With j = far + near it is a sum of two, which few rows have: one addition and
    one look-up for each entry, with the same bits whoever else is drawn.
    """
    angles = torch.arange(width, device=columns.device, dtype=torch.float64).mul_(2 * math.pi / width)
    entries = angles.sub_(math.pi / 4).cos_().mul_(math.sqrt(2)).to(stream.dtype).repeat(2)
    near = torch.arange(math.isqrt(width - 1) + 1, device=columns.device)
    far = torch.arange(0, width, len(near), device=columns.device)
    index_bytes = columns[0].numel() * width * torch.int64.itemsize
    step = max(1, PIECE_BYTES.get(columns.device.type, PIECE_BYTES["cpu"]) // index_bytes)
    parts = []
    for part in columns.unsqueeze(-1).split(step):
        places = (part * far % width).unsqueeze(-1) + (part * near % width).unsqueeze(-2)
        picked = places.flatten(-2)[..., :width]
        parts.append(entries.index_select(0, picked.flatten()).view(picked.shape))
    return torch.cat(parts) if len(parts) > 1 else parts[0]
