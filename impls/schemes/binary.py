"""Networks of bits: each member draws its own weights, +1 or -1, by the probabilities that logits stand for.

With P = sigmoid(logit), rounded to 256ths, and bits B_m of mean P, a member sees the weights 2 B_m - 1, and
the noise is sigma E_m = B_m - P. So the sum of c_m (B_m - P) is the score-function gradient with respect to
the logits, dP / d logit = P (1 - P) included. Sigma is no size of this noise, but of that of thresholds: the
update's directions are sigma^2 E_m, so that whatever sigma is it is that gradient.

Where P rounds to 0 or 1, for logits beyond 6.2, all members have the same bit and the gradient is 0: clamp
logits below that where bits are to be found again.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.binary import bits
from impls.binary.operators import AbstractPackedOperator, channels_last, packed_shape, unpacked
from impls.perturbation.noise import Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.options import check_choice
from impls.perturbation.scheme import AbstractScheme, Flops

OPERATORS = ("BinarizedLinear", "BinarizedConv2d")
"""The layers whose weights are logits."""

MOST_BYTES = 2**25
"""Random words that are drawn at a time, where the stream lets it."""


@dataclass(frozen=True, eq=False)
class AbstractBitsNoise(Noise):
    """What all noise of bits has.

    Attributes:
        p: P, rounded to 256ths, [g, o, i, *taps].
        sigma: the scale that E_m is divided by.

    """

    p: Tensor
    sigma: float


N = TypeVar("N", bound=AbstractBitsNoise)


class AbstractBitScheme(AbstractScheme[N]):
    """A scheme whose members have weights of bits, drawn by the probabilities of logits.

    It serves layers of bits only. There is no antithetic sampling: W - sigma E_m is no weight of bits.
    """

    @property
    @override
    def supports_antithetic(self) -> bool:
        return False

    @override
    def seen(self, weight: Tensor, change: Tensor) -> Tensor:
        return 2 * (probabilities(weight).to(change.dtype) + change) - 1

    @override
    def prepare(self, noise: N, weight: Tensor, sigma: float) -> N:
        return replace(noise, sigma=sigma)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        assert isinstance(op, AbstractPackedOperator)  # noqa: S101  the layers it is let to
        return self.product(op, noise, x)

    @abstractmethod
    def product(self, op: AbstractPackedOperator, noise: N, x: Tensor) -> Tensor:
        """Each row's product with its member's bits."""

    @override
    def dense_noise(self, noise: N) -> Tensor:
        values = unpacked(self.written(noise), noise.p.shape[2]).to(noise.p.dtype)
        return values.sub_(noise.p).div_(noise.sigma)

    @override
    def directions(self, noise: N) -> Tensor:
        return self.dense_noise(noise).mul_(noise.sigma**2)

    @abstractmethod
    def written(self, noise: N) -> Tensor:
        """Every member's bits, written out: [m, g, *taps, words, o]."""

    @override
    def deviation(self, weight: Tensor, sigma: float) -> Tensor:
        p = probabilities(weight)
        return (p * (1 - p)).sqrt() / sigma

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        # Work on words is none on numbers: what bounds a call is memory.
        return Flops(forward=0, update=0)


def probabilities(weight: Tensor) -> Tensor:
    """Return P of logits, rounded to 256ths, in their type.

    Raises:
        ValueError: some are NaN.

    """
    if weight.is_meta:
        return torch.empty_like(weight)
    # In float32 whatever the type, so that a copy in another has the same bits.
    return bits.quantised(weight.float().sigmoid()).to(weight.dtype) / 256


def drawn(stream: NoiseStream, draw: str, planes: Tensor) -> Tensor:
    """Draw bits of planes [9, *shape], as words [m, *shape]."""
    shape = planes.shape[1:]
    words = torch.empty(len(stream.members), *shape, dtype=planes.dtype, device=planes.device)
    if not planes.is_meta:
        for start, stop in stream.pieces(8 * words[:1].nbytes, MOST_BYTES):
            words[start:stop] = bits.sample(planes, stream.narrow(start, stop).words(draw, 8, *shape))
    return words


def planes_of(p: Tensor) -> Tensor:
    """Return the bit planes of P in the layout of a product, [9, g, *taps, words, o]."""
    if p.is_meta:
        return torch.empty(9, *packed_shape(p.shape), dtype=torch.int64, device=p.device)
    return bits.planes((channels_last(p) * 256).short()).mT.contiguous()


@dataclass(frozen=True, eq=False)
class BinaryNoise(AbstractBitsNoise):
    """The bits of each member.

    Attributes:
        words: packed, [m, g, *taps, words, o].
        values: the same as numbers +1 and -1, [m, g, o, i, *taps], where the forward multiplies them.

    """

    SHARED = frozenset({"p", "sigma"})

    words: Tensor
    values: Tensor | None = None


@variant(operators=OPERATORS, source="Bernoulli weights, score function: Williams 1992")
@variant(operators=OPERATORS, stored="float", baseline=True, source="products of +1 and -1 in floats")
@variant(operators=OPERATORS, stored="int8", baseline=True, source="products of +1 and -1 in int8")
@dataclass(frozen=True)
class Binary(AbstractBitScheme[BinaryNoise]):
    """Each member draws every bit of its own.

    Args:
        stored: what a forward multiplies: packed ``bits`` by exclusive or and counting, or what one would
            have without it: numbers in the weight's type (``float``) or, of matrices, bytes (``int8``).

    Memory    g * o * taps * 8 ceil(i / 64) bytes a member: a 32nd of dense float32 noise, and stored numbers
              besides where they are asked for; 4 bytes a weight for P.
    Work      each word of weights read once, one exclusive or and one count of bits for each and each row;
              drawing takes 8 random words for each, bit plane by bit plane of P.
    Quality   kappa = 0 for fair bits: entries are independent. They differ in variance, v = P (1 - P), as
              logits do: kappa = E[v^2] / E[v]^2 - 1, which is 0.047 for logits N(0, 1).
    """

    stored: Literal["bits", "float", "int8"] = "bits"

    def __post_init__(self) -> None:
        """Refuse what is not known."""
        check_choice("stored", self.stored, "bits", "float", "int8")

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> BinaryNoise:
        if self.stored == "int8" and weight.dim() > 3:  # noqa: PLR2004  it has taps
            message = "torch has no convolution of int8"
            raise ValueError(message)
        p = probabilities(weight)
        return BinaryNoise(p, 1.0, drawn(stream, "bits", planes_of(p)))

    @override
    def prepare(self, noise: BinaryNoise, weight: Tensor, sigma: float) -> BinaryNoise:
        noise = super().prepare(noise, weight, sigma)
        if self.stored == "bits":
            return noise
        dtype = torch.int8 if self.stored == "int8" else weight.dtype
        if weight.is_meta:
            shape = (noise.words.shape[0], *weight.shape)
            return replace(noise, values=torch.empty(shape, dtype=dtype, device=weight.device))
        return replace(noise, values=unpacked(noise.words, weight.shape[2]).to(dtype).mul_(2).sub_(1))

    @override
    def product(self, op: AbstractPackedOperator, noise: BinaryNoise, x: Tensor) -> Tensor:
        return op.bits(x, noise.words) if noise.values is None else op.batched(x, noise.values)

    @override
    def written(self, noise: BinaryNoise) -> Tensor:
        return noise.words

    @override
    def weighted_sum(self, noise: BinaryNoise, utilities: Tensor) -> Tensor:
        # In a wide type: utilities about their mean leave little of two large sums.
        wide = torch.promote_types(torch.float32, utilities.dtype)
        c, p = utilities.to(wide), noise.p
        total = bits.weighted_sum(noise.words, c, p.shape[2], axis=-2).movedim((-2, -1), (2, 1))
        return (total - c.sum() * p.to(wide)) * noise.sigma

    @override
    def read_bytes(self, weight: Tensor, noise: BinaryNoise) -> int:
        return (noise.words if noise.values is None else noise.values).nbytes

    @override
    def kappa(self, weight: torch.Size, members: int) -> float | None:
        return 0.0

    @override
    def kappa_of(self, weight: Tensor, members: int) -> float | None:
        variance = self.deviation(weight.double(), 1.0).square()
        total = float(variance.sum())
        return weight.numel() * float(variance.square().sum()) / total**2 - 1 if total else None
