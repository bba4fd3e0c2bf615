"""A scheme that computes what another one does in another way: all else is the wrapped scheme's own."""

from abc import abstractmethod
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from impls.perturbation.noise import Noise, NoiseStream, PhiloxStream
from impls.perturbation.scheme import AbstractScheme, Flops

N = TypeVar("N", bound=Noise)


class AbstractWrapper(AbstractScheme[N]):
    """Noise, slow truth, quality and least work are those of :attr:`plain`, the scheme that it wraps.

    What is left open is what it is for: the forward, the update, and which layers it serves.
    """

    @property
    @abstractmethod
    def plain(self) -> AbstractScheme[N]:
        """The scheme that is wrapped."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> N:
        if self.stream == "philox" and not isinstance(stream, PhiloxStream):
            message = (
                f"{self} draws its noise inside of a kernel, by the counters of the stream philox: another "
                "stream has other numbers. Leave the stream out, or ask for philox"
            )
            raise ValueError(message)
        return self.plain.sample(weight, stream)

    @override
    def dense_noise(self, noise: N) -> Tensor:
        return self.plain.dense_noise(noise)

    @override
    def prepare(self, noise: N, weight: Tensor, sigma: float) -> N:
        return self.plain.prepare(noise, weight, sigma)

    @override
    def seen(self, weight: Tensor, change: Tensor) -> Tensor:
        return self.plain.seen(weight, change)

    @override
    def directions(self, noise: N) -> Tensor:
        return self.plain.directions(noise)

    @property
    @override
    def contrasts(self) -> bool:
        return self.plain.contrasts

    @property
    @override
    def learns_from_rows(self) -> bool:
        return self.plain.learns_from_rows

    @property
    @override
    def shard_multiple(self) -> int:
        return self.plain.shard_multiple

    @property
    @override
    def supports_antithetic(self) -> bool:
        return self.plain.supports_antithetic

    @override
    def kappa(self, weight: torch.Size, members: int) -> float | None:
        return self.plain.kappa(weight, members)

    @override
    def kappa_of(self, weight: Tensor, members: int) -> float | None:
        return self.plain.kappa_of(weight, members)

    @override
    def deviation(self, weight: Tensor, sigma: float) -> Tensor | float:
        return self.plain.deviation(weight, sigma)

    @override
    def kept(self, weight: torch.Size) -> float:
        return self.plain.kept(weight)

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops | None:
        return self.plain.flops(weight, members)

    @override
    def read_bytes(self, weight: Tensor, noise: N) -> int:
        return self.plain.read_bytes(weight, noise)
