"""Regenerated noise: dense independent perturbations that are drawn at each use and never stored."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.member_ops import count_signs
from impls.perturbation.noise import Noise, NoiseStream, piece_bytes
from impls.perturbation.scheme import AbstractDenseScheme, check_choice


@dataclass(frozen=True, eq=False)
class StreamNoise(Noise):
    """The stream and the shape [g, o, i, *taps] to draw again; no numbers are stored."""

    stream: NoiseStream
    shape: torch.Size


class AbstractRegenerated(AbstractDenseScheme[StreamNoise]):
    """Independent entries for every member, drawn piece by piece; subclasses define ``dense_noise``."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> StreamNoise:
        # On meta this only checks that the stream can draw such shapes.
        self.dense_noise(StreamNoise(replace(stream, device=torch.device("meta")), weight.shape))
        return StreamNoise(stream, weight.shape)

    @override
    def pieces(self, noise: StreamNoise, members: int) -> Iterable[tuple[int, int, StreamNoise]]:
        for start, stop, stream in noise.stream.split(noise.shape.numel(), piece_bytes(noise.stream.device)):
            yield start, stop, replace(noise, stream=stream)


@variant(values="uniform", source="Regenerated, with entries made of a random byte each")
@variant(source="Salimans et al. 2017, arXiv:1703.03864: seeds are kept, noise is not")
@dataclass(frozen=True)
class Regenerated(AbstractRegenerated):
    """Independent entries, standard normal or uniform, drawn again in the forward and in the update.

    Normal E_m has the bits of :class:`~impls.schemes.dense.Perturbed` with the same seed, step and stream.
    Outputs and updates are summed in pieces, and differ from those of Perturbed by rounding. With the stream
    ``block`` a piece on a GPU, or of weights whose number is not a multiple of 16, is a block of members.

    ``values="uniform"`` draws from 256 equally spaced levels between -1.725 and 1.725, see
    :meth:`~impls.perturbation.noise.NoiseStream.levels`, which takes a CPU less than a fifth of the time.
    The change of an output is a sum over the inputs, so it is close to normal with either.

    Memory    0; temporarily one piece.
    Work      that of stored noise, plus drawing every number once for each reading.
    Quality   kappa = 0: entries are independent.
    """

    values: Literal["normal", "uniform"] = "normal"

    def __post_init__(self) -> None:
        check_choice("values", self.values, "normal", "uniform")

    @override
    def dense_noise(self, noise: StreamNoise) -> Tensor:
        draw = noise.stream.levels if self.values == "uniform" else noise.stream.normal
        return draw("dense", *noise.shape)


@variant(source="Regenerated, with the cheapest entries of unit variance")
@dataclass(frozen=True)
class RegeneratedSign(AbstractRegenerated):
    """Independent fair signs, drawn again in the forward and in the update: one bit for each weight.

    Memory    0; temporarily one piece.
    Work      that of stored noise, plus drawing every sign once for each reading.
    Quality   kappa = 0: entries are independent.
    """

    @override
    def dense_noise(self, noise: StreamNoise) -> Tensor:
        return noise.stream.signs("dense", *noise.shape)

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        return count_signs(weight.numel())
