"""Binary weights: each member draws its weights, +1 or -1, with the probabilities that logits give.

With P = sigmoid(logit), rounded to 256ths, and bits B_m of mean P, a member has the weights 2 B_m - 1, and
its noise is sigma E_m = B_m - P. The sum of c_m (B_m - P) is the score-function gradient with respect to the
logits (the factor dP / d logit = P (1 - P) included). Sigma does not scale this noise, only that of
thresholds: the update's directions are sigma^2 E_m, which makes the update this gradient for any sigma.

Where abs(logit) is above 6.2, P rounds to 0 or 1: all members have the same bit, and the gradient is 0. Clamp
logits to +-6.2 to keep them trainable.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.binary import bits
from impls.binary.operators import AbstractPackedOperator, channels_last, packed_shape, unpack_weights
from impls.binary.products import weighted_sum
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.member_ops import count_signs
from impls.perturbation.noise import Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import (
    AbstractScheme,
    Flops,
    check_choice,
    check_count,
    inverse_participation_ratio,
)

OPERATORS = ("BinarizedLinear", "BinarizedConv2d")
"""The layers whose weights are logits."""

MAX_BYTES = 2**25
"""Bytes of random words drawn at a time, if the stream allows it."""


@dataclass(frozen=True, eq=False)
class AbstractBitsNoise(Noise):
    """Noise of binary weights.

    Attributes:
        p: P, rounded to 256ths, [g, o, i, *taps].
        sigma: the scale that E_m is divided by.
    """

    p: Tensor
    sigma: float


N = TypeVar("N", bound=AbstractBitsNoise)


class AbstractBitScheme(AbstractScheme[N]):
    """A scheme whose members have binary weights, drawn with the probabilities that logits give.

    It serves layers whose weights are logits. Antithetic sampling is not supported: W - sigma E_m is not a
    binary weight.
    """

    draws_binary_weights = True

    @property
    @override
    def supports_antithetic(self) -> bool:
        return False

    @property
    @override
    def stores_weight(self) -> bool:
        return True

    @override
    def is_up_to_date(self, noise: N, weight: Tensor) -> bool:
        return torch.equal(noise.p, probabilities(weight))

    @override
    def effective_weight(self, weight: Tensor, change: Tensor) -> Tensor:
        return 2 * (probabilities(weight).to(change.dtype) + change) - 1

    @override
    def prepare(self, noise: N, weight: Tensor, sigma: float) -> N:
        return replace(noise, sigma=sigma)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        assert isinstance(op, AbstractPackedOperator)  # noqa: S101  other layers are refused
        return self.product(op, noise, x)

    @abstractmethod
    def product(self, op: AbstractPackedOperator, noise: N, x: Tensor) -> Tensor:
        """Apply each member's bits to its rows."""

    @override
    def dense_noise(self, noise: N) -> Tensor:
        values = unpack_weights(self.packed_bits(noise), noise.p.shape[2]).to(noise.p.dtype)
        return values.sub_(noise.p).div_(noise.sigma)

    @override
    def update_directions(self, noise: N) -> Tensor:
        return self.dense_noise(noise).mul_(noise.sigma**2)

    @abstractmethod
    def packed_bits(self, noise: N) -> Tensor:
        """Return the packed bits of all members, [m, g, *taps, words, o]."""

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        return count_signs(weight.numel())

    @override
    def noise_std(self, weight: Tensor, sigma: float) -> Tensor:
        p = probabilities(weight)
        return (p * (1 - p)).sqrt() / sigma

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        # Operations on packed words are not flops; the minimum work of a call is its memory traffic.
        return Flops(forward=0, update=0)


def probabilities(weight: Tensor) -> Tensor:
    """Return P of logits, rounded to 256ths, in the logits' dtype.

    Raises:
        ValueError: a logit is NaN.
    """
    if weight.is_meta:
        return torch.empty_like(weight)
    # In float32 for every dtype, so that bits do not depend on the dtype.
    return bits.round_probabilities(weight.float().sigmoid()).to(weight.dtype) / 256


def draw_bits(stream: NoiseStream, draw: str, planes: Tensor) -> Tensor:
    """Draw bits with the probabilities in bit planes [9, *shape], as words [m, *shape].

    A bit is drawn by comparing its probability in 256ths with eight random bits.
    """
    shape = planes.shape[1:]
    words = torch.empty(len(stream.members), *shape, dtype=planes.dtype, device=planes.device)
    if not planes.is_meta:
        for start, stop in stream.pieces(8 * words[:1].nbytes, MAX_BYTES):
            words[start:stop] = bits.sample(planes, stream.narrow(start, stop).words(draw, 8, *shape))
    return words


def bit_planes(p: Tensor) -> Tensor:
    """Return the bit planes of P in the layout of packed weights, [9, g, *taps, words, o].

    P in 256ths is 0 to 256, a number of nine bits.
    """
    if p.is_meta:
        return torch.empty(9, *packed_shape(p.shape), dtype=torch.int64, device=p.device)
    return bits.pack_planes((channels_last(p) * 256).short()).mT.contiguous()


@dataclass(frozen=True, eq=False)
class BinaryNoise(AbstractBitsNoise):
    """The bits of each member.

    Attributes:
        words: packed bits, [m, g, *taps, words, o].
        values: the same as +1 and -1, [m, g, o, i, *taps], if the forward multiplies numbers.
    """

    SHARED = frozenset({"p", "sigma"})

    words: Tensor
    values: Tensor | None = None


@variant(operators=OPERATORS, source="Bernoulli weights, score function: Williams 1992")
@variant(operators=OPERATORS, stored="float", baseline=True, source="products of +1 and -1 in floats")
@variant(operators=OPERATORS, stored="int8", baseline=True, source="products of +1 and -1 in int8")
@dataclass(frozen=True)
class Binary(AbstractBitScheme[BinaryNoise]):
    """Every member has independent bits.

    Args:
        stored: the form of weights that a forward reads: packed ``bits`` (exclusive or and popcount), or for
            comparison numbers of the weight's dtype (``float``) or, for Linear only, bytes (``int8``).

    Memory    g * o * taps * 8 ceil(i / 64) bytes per member, a 32nd of dense float32 noise, plus the numbers
              of ``float`` and ``int8``; 4 bytes per weight for P.
    Work      each word of weights is read once, with one exclusive or and one popcount per row; drawing takes
              8 random words for each, bit plane by bit plane of P.
    Quality   kappa = 0 for fair bits: entries are independent. Otherwise their variances v = P (1 - P)
              differ: kappa = E[v^2] / E[v]^2 - 1, which is 0.047 for logits N(0, 1).
    """

    stored: Literal["bits", "float", "int8"] = "bits"

    def __post_init__(self) -> None:
        check_choice("stored", self.stored, "bits", "float", "int8")

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> BinaryNoise:
        if self.stored == "int8" and weight.dim() > 3:  # noqa: PLR2004  it has taps
            message = "stored='int8' does not support convolutions: use stored='bits' or stored='float'"
            raise UnsupportedError(message)
        p = probabilities(weight)
        return BinaryNoise(p, sigma=1.0, words=draw_bits(stream, "bits", bit_planes(p)))

    @override
    def prepare(self, noise: BinaryNoise, weight: Tensor, sigma: float) -> BinaryNoise:
        noise = super().prepare(noise, weight, sigma)
        if self.stored == "bits":
            return noise
        dtype = torch.int8 if self.stored == "int8" else weight.dtype
        if weight.is_meta:
            shape = (noise.words.shape[0], *weight.shape)
            return replace(noise, values=torch.empty(shape, dtype=dtype, device=weight.device))
        unpacked = unpack_weights(noise.words, weight.shape[2]).to(dtype)
        return replace(noise, values=unpacked.mul_(2).sub_(1))  # 0 or 1 -> -1 or +1

    @override
    def product(self, op: AbstractPackedOperator, noise: BinaryNoise, x: Tensor) -> Tensor:
        if noise.values is None:
            return op.apply_packed(x, noise.words)
        return op.apply_per_member(x, noise.values)

    @override
    def packed_bits(self, noise: BinaryNoise) -> Tensor:
        return noise.words

    @override
    def weighted_sum(self, noise: BinaryNoise, utilities: Tensor) -> Tensor:
        # In at least float32: with centered utilities, two large sums have a small difference.
        wide = torch.promote_types(torch.float32, utilities.dtype)
        c, p = utilities.to(wide), noise.p
        total = weighted_sum(noise.words, c, p.shape[2])  # [g, *taps, i, o]
        total = total.movedim((-2, -1), (2, 1))
        return (total - c.sum() * p.to(wide)) * noise.sigma

    @override
    def read_bytes(self, weight: Tensor, noise: BinaryNoise) -> int:
        return (noise.words if noise.values is None else noise.values).nbytes

    @override
    def kappa(self, weight: Tensor, members: int) -> float | None:
        share = inverse_participation_ratio(self.noise_std(weight.double(), 1.0).square())
        return None if share is None else weight.numel() * share - 1


MIXED_BYTES = 2**23
"""Bytes of mixed weights computed at a time, so that they fit a cache."""


@dataclass(frozen=True, eq=False)
class MixtureNoise(AbstractBitsNoise):
    """Two samples for each group of members, and each member's choice between them for each input.

    Attributes:
        members: the members of the noise.
        first: the member with row 0 of ``columns``: the first member of the first group.
        samples: packed bits, [groups, 2, g, *taps, words, o].
        columns: packed choices of all members from ``first`` on, one bit per input,
            [members.stop - first, g, *taps, words, 1].
    """

    SHARED = frozenset({"p", "sigma", "first", "samples", "columns"})

    members: range
    first: int
    samples: Tensor
    columns: Tensor


@variant(operators=OPERATORS, source="ours")
@dataclass(frozen=True)
class BinaryMixture(AbstractBitScheme[MixtureNoise]):
    """Consecutive members share two samples of bits, and each takes every column from one of the two.

    The update is a contrast of the samples B_0 and B_1. A group of S members with fair choices s_m (0 or 1)
    has the estimate 2 / (S - 1) * sum_m c_m (s_m - mean s) * (B_1 - B_0); the population's estimate is the
    mean over members of their groups' estimates. It is unbiased and does not depend on the group's mean
    utility. (The sum of c_m (B_m - P) with utilities centered within groups would be half the gradient.) The
    last group may have a single member; s_m - 1/2 then replaces s_m - mean s.

    Args:
        group: number of members that share two samples; populations are split at multiples of it.

    Memory    2 g * o * taps * 8 ceil(i / 64) bytes per group, and 1 / (2 o) of that per member.
    Work      that of :class:`Binary`, without reading a weight for each member.
    Quality   kappa is about o * group / n for fair bits and i inputs (taps included), so n_eff is about
              n / (1 + group / i): a group should have fewer members than a row has inputs.
    """

    group: int = 64

    def __post_init__(self) -> None:
        check_count("group", self.group, 2)

    @property
    @override
    def shard_multiple(self) -> int:
        return self.group

    @property
    @override
    def update_directions_differ(self) -> bool:
        return True

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> MixtureNoise:
        p, members = probabilities(weight), stream.members
        planes = bit_planes(p)
        first = members.start // self.group * self.group
        groups = range(first // self.group, -(-members.stop // self.group))
        shape = (len(groups), 2, *planes.shape[1:])
        samples = torch.empty(shape, dtype=planes.dtype, device=planes.device)
        shared = stream.shared()
        for row, group in enumerate(groups):
            for number in range(2):
                samples[row, number] = draw_bits(shared, f"sample {number} of group {group}", planes)[0]
        # The update centers choices within groups, so those of all members of the first group are drawn.
        choice_stream = replace(stream, members=range(first, members.stop))
        columns = choice_stream.words("columns", *planes.shape[1:-1], 1)
        return MixtureNoise(p, sigma=1.0, members=members, first=first, samples=samples, columns=columns)

    @override
    def product(self, op: AbstractPackedOperator, noise: MixtureNoise, x: Tensor) -> Tensor:
        outputs = [op.apply_packed(x[:, start:stop], mixed) for start, stop, mixed in self._mix_groups(noise)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    @override
    def packed_bits(self, noise: MixtureNoise) -> Tensor:
        return torch.cat([mixed for _, _, mixed in self._mix_groups(noise)])

    def _members_of_group(self, noise: MixtureNoise, group: int) -> range:
        """Return a group's members as indices of the noise's members."""
        first = group * self.group - (noise.members.start - noise.first)
        return range(len(noise.members))[max(0, first) : max(0, first + self.group)]

    def _mix_groups(self, noise: MixtureNoise) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (start, stop, bits) of members of one group; 0 is the first member of the noise."""
        size = max(1, MIXED_BYTES // max(1, noise.samples[0, 0].nbytes))
        columns = noise.columns[noise.members.start - noise.first :]
        for group, (bits_0, bits_1) in enumerate(noise.samples):
            differing = bits_0 ^ bits_1
            members = self._members_of_group(noise, group)
            for start in members[::size]:
                stop = min(start + size, members.stop)
                # The bits of sample 1 in columns where the choice is 1, else those of sample 0.
                yield start, stop, (columns[start:stop] & differing).bitwise_xor_(bits_0)

    @override
    def read_bytes(self, weight: Tensor, noise: MixtureNoise) -> int:
        return noise.samples.nbytes + noise.columns.nbytes

    @override
    def weighted_sum(self, noise: MixtureNoise, utilities: Tensor) -> Tensor:
        wide = torch.promote_types(torch.float32, utilities.dtype)
        c, total = utilities.to(wide), torch.zeros_like(noise.p, dtype=wide)
        # The first rows of ``columns`` may belong to members before those of this noise.
        coefficients = self._choice_coefficients(noise)[noise.members.start - noise.first :]
        # Sum over groups of (sum_m c_m a_m) * (B_1 - B_0); a_m is the choice coefficient of member m.
        for group in range(len(noise.samples)):
            indices = self._members_of_group(noise, group)
            members = slice(indices.start, indices.stop)
            contrast = torch.tensordot(c[members], coefficients[members].to(wide), dims=1)
            (difference,) = self._sample_difference(noise, group, group + 1)
            total += contrast * difference
        return total * noise.sigma

    @override
    def update_directions(self, noise: MixtureNoise) -> Tensor:
        # Rows of ``columns``, which begin at the first member of a group.
        start = noise.members.start - noise.first
        rows = torch.arange(start, start + len(noise.members), device=noise.samples.device)
        difference = self._sample_difference(noise, 0, len(noise.samples))[rows // self.group]
        return self._choice_coefficients(noise)[rows] * difference * noise.sigma

    def _choice_coefficients(self, noise: MixtureNoise) -> Tensor:
        """Return 2 S / (S - 1) * (s_m - mean s) for each row of ``columns``: [rows, g, 1, i, *taps]."""
        coefficients = unpack_weights(noise.columns, noise.p.shape[2]).to(noise.p.dtype)
        for choices in coefficients.split(self.group):
            size = len(choices)
            choices.sub_(choices.mean(0) if size > 1 else 0.5).mul_(2 * size / max(1, size - 1))
        return coefficients

    def _sample_difference(self, noise: MixtureNoise, start: int, stop: int) -> Tensor:
        """Return B_1 - B_0 of groups ``start`` to ``stop``, [stop - start, g, o, i, *taps]."""
        bits_0, bits_1 = (
            unpack_weights(noise.samples[start:stop, number], noise.p.shape[2]).to(noise.p.dtype)
            for number in range(2)
        )
        return bits_1 - bits_0
