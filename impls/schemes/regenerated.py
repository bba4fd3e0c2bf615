"""Regenerated noise: dense perturbations that are drawn wherever they are read, and never stored."""

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
"""How much of the members' E_m is drawn at a time, where the stream allows it.

On a CPU what stays in its cache until it is used; on a GPU what is worth its launches.
"""


@dataclass(frozen=True, eq=False)
class StreamNoise(Noise):
    """Nothing is stored: the stream, and the shape [g, o, i, *taps] to draw again."""

    stream: NoiseStream
    shape: torch.Size


class AbstractRegenerated(AbstractScheme[StreamNoise]):
    """Independent entries for every member, drawn piece by piece; which entries is left open."""

    @abstractmethod
    def draw(self, noise: StreamNoise) -> Tensor:
        """Draw the entries of all members of this noise, [m, g, o, i, *taps]."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> StreamNoise:
        # Shapes and counters are held to what the stream can draw; on meta nothing is drawn.
        self.draw(StreamNoise(replace(stream, device=torch.device("meta")), weight.shape))
        return StreamNoise(stream, weight.shape)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: StreamNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y = op.apply_shared(x, weight)
        for start, stop in _pieces(noise):
            # No name keeps a piece while the next one is drawn.
            part = op.apply_per_member(x[:, start:stop], self.draw(noise.narrow(start, stop)))
            add(y[:, start:stop], part, sigma)
        return y

    @override
    def weighted_sum(self, noise: StreamNoise, utilities: Tensor) -> Tensor:
        # A sum of many pieces needs more digits than the product that each of them is.
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
        # One product: W + sigma E_m can be formed as E_m is drawn, which counts as no arithmetic.
        return Flops(forward=2 * weight.numel(), update=2 * weight.numel() * members)


@variant(source="Salimans et al. 2017, arXiv:1703.03864: seeds are kept, noise is not")
@dataclass(frozen=True)
class Regenerated(AbstractRegenerated):
    """Independent standard normal entries, drawn again in the forward and in the update.

    E_m has the bits of :class:`~impls.schemes.dense.Perturbed` with the same seed, step and stream; outputs
    and updates are summed in pieces, and differ from its by rounding. With the stream ``philox`` a piece is
    as small as it should be; with ``block`` it is a block of members.

    Memory    nothing; a piece while it is drawn.
    Work      that of stored noise, and every number drawn once more for each reading.
    Quality   kappa = 0: entries are independent.
    """

    @override
    def draw(self, noise: StreamNoise) -> Tensor:
        return noise.stream.normal("dense", *noise.shape)


@variant(source="Regenerated, with the cheapest entries of unit variance")
@dataclass(frozen=True)
class RegeneratedSign(AbstractRegenerated):
    """Independent fair signs, drawn again in the forward and in the update: a bit for each weight.

    Memory    nothing; a piece while it is drawn.
    Work      that of stored noise, and every sign drawn once more for each reading.
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
