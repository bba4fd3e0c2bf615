"""Regenerated noise: dense independent perturbations that are drawn at each use and never stored."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.noise import Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import AbstractScheme, Flops, add

PIECE_BYTES = {"cpu": 2**23, "cuda": 2**28}
"""Bytes of E_m drawn at a time, if the stream allows it: they fit a CPU's cache, or are worth a launch."""


@dataclass(frozen=True, eq=False)
class StreamNoise(Noise):
    """The stream and the shape [g, o, i, *taps] to draw again; no numbers are stored."""

    stream: NoiseStream
    shape: torch.Size


class AbstractRegenerated(AbstractScheme[StreamNoise]):
    """Independent entries for every member, drawn piece by piece; subclasses define their distribution."""

    @abstractmethod
    def draw(self, noise: StreamNoise) -> Tensor:
        """Draw the entries of all members of this noise, [m, g, o, i, *taps]."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> StreamNoise:
        # On meta this only checks that the stream can draw such shapes.
        self.draw(StreamNoise(replace(stream, device=torch.device("meta")), weight.shape))
        return StreamNoise(stream, weight.shape)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: StreamNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y = op.apply_shared(x, weight)
        for start, stop in _pieces(noise):
            # A piece is freed before the next one is drawn.
            part = op.apply_per_member(x[:, start:stop], self.draw(noise.narrow(start, stop)))
            add(y[:, start:stop], part, sigma)
        return y

    @override
    def weighted_sum(self, noise: StreamNoise, utilities: Tensor) -> Tensor:
        # Pieces are summed in a wider type than each is computed in.
        wide = torch.promote_types(torch.float32, utilities.dtype)
        total = torch.zeros(noise.shape.numel(), device=utilities.device, dtype=wide)
        for start, stop in _pieces(noise):
            total += torch.mv(self.draw(noise.narrow(start, stop)).flatten(1).mT, utilities[start:stop])
        return total.view(noise.shape).to(utilities.dtype)

    @override
    def dense_noise(self, noise: StreamNoise) -> Tensor:
        return self.draw(noise)

    @override
    def kappa(self, weight: torch.Size, members: int) -> float:
        return 0.0

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        # One product: W + sigma E_m can be formed while E_m is drawn, and drawing counts as 0.
        return Flops(forward=2 * weight.numel(), update=2 * weight.numel() * members)


@variant(source="Salimans et al. 2017, arXiv:1703.03864: seeds are kept, noise is not")
@dataclass(frozen=True)
class Regenerated(AbstractRegenerated):
    """Independent standard normal entries, drawn again in the forward and in the update.

    E_m has the bits of :class:`~impls.schemes.dense.Perturbed` with the same seed, step and stream. Outputs
    and updates are summed in pieces, and differ from those of Perturbed by rounding. With the stream
    ``block`` a piece is a block of members; with ``philox`` it can be smaller.

    Memory    0; temporarily one piece.
    Work      that of stored noise, plus drawing every number once for each reading.
    Quality   kappa = 0: entries are independent.
    """

    @override
    def draw(self, noise: StreamNoise) -> Tensor:
        return noise.stream.normal("dense", *noise.shape)


@variant(source="Regenerated, with the cheapest entries of unit variance")
@dataclass(frozen=True)
class RegeneratedSign(AbstractRegenerated):
    """Independent fair signs, drawn again in the forward and in the update: one bit for each weight.

    Memory    0; temporarily one piece.
    Work      that of stored noise, plus drawing every sign once for each reading.
    Quality   kappa = 0: entries are independent.
    """

    @override
    def draw(self, noise: StreamNoise) -> Tensor:
        return noise.stream.signs("dense", *noise.shape)


def _pieces(noise: StreamNoise) -> Iterator[tuple[int, int]]:
    """Yield the members of each piece: (start, stop)."""
    stream = noise.stream
    most = PIECE_BYTES.get(stream.device.type, PIECE_BYTES["cpu"])
    return stream.pieces(noise.shape.numel() * stream.dtype.itemsize, most)
