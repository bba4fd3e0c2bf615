"""Operators on activations that are packed bits: the two verbs, and a third for members' own packed weights.

Activations are +1 or -1, a bit each, see :mod:`impls.binary.bits`; rows are words [rows, *space, words]. A
weight
holds logits, and as a plain weight the sign of each, which is its most likely bit. Outputs are the products
of bits by the square root of how many there are, so that thresholds and their noise have one size at every
width; they are real, [r, m, *space, o], or words again, of those above 0.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from impls.binary import bits
from impls.perturbation.operators import AbstractOperator

WORDS = (torch.int32, torch.int64)
"""Types that words may have."""

Multiply = Callable[[Tensor, Tensor, int, torch.dtype], Tensor]
"""A product of bits: of rows [m, p, K] and columns [m, K, o], over so many bits, [m, p, o] in a type.

Outputs are of unit size: sums by the square root of how many bits they are over, in float32 at least, and
then rounded to the type. One weight, of m = 1, may come for all members where it came so to the operator.
"""

NORMALISED_EPS = 1e-5
"""Added to a variance, as torch's normalisation layers do."""


@dataclass(frozen=True)
class AbstractPackedOperator(AbstractOperator):
    """A layer kind on bits, with everything about it but its weight.

    Attributes:
        channels: input channels: what the last axis of rows holds in words.
        dtype: type of the outputs, where they are real.
        outputs: ``real`` scores, or ``bits``, packed as the input is.
        normalised: whether each output channel of each member is normalised over that member's rows, and over
            positions; never over other members.

    """

    LAYOUT: ClassVar[tuple[str, ...]]
    """What the axes of rows are."""

    channels: int
    dtype: torch.dtype
    outputs: str = "real"
    normalised: bool = False

    def bits(self, x: Tensor, weights: Tensor, multiply: Multiply | None = None) -> Tensor:
        """Apply to each member its own bits [m, 1, *taps, words, o]: [r, m, *s, words] -> [r, m, *s', o].

        One weight, of m = 1, may serve all members. ``multiply`` is the product, if it is not plain torch's.
        """
        # Plain torch takes its time for each word, and fewer pay for a copy; a kernel waits for bytes.
        rows, columns = self._operands(x, weights, joined=multiply is None)
        of = (self._fan_in(weights), self._wide if self.normalised else self.dtype)
        # A view that changes nothing is a call of torch's all the same, and a small layer is a few of them.
        has_space = rows.dim() > 3  # noqa: PLR2004  members, rows and words
        y = (multiply or products)(rows.flatten(1, -2) if has_space else rows, columns, *of)
        return self._finished((y.unflatten(1, rows.shape[1:-1]) if has_space else y).transpose(0, 1))

    @abstractmethod
    def _operands(self, x: Tensor, weights: Tensor, *, joined: bool) -> tuple[Tensor, Tensor]:
        """Lay rows out that the product reads, [m, r, *s', K], and columns, [m, K, o].

        With ``joined`` words of few bits may become fewer words of more.
        """

    @abstractmethod
    def _real(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the products of values +1 and -1 [r, m, *s, i] with real weights [m, 1, o, i, *taps]."""

    @override
    def apply_shared(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.bits(x, packed(weight > 0, x.dtype).unsqueeze(0))

    @override
    def apply_per_member(self, x: Tensor, weights: Tensor) -> Tensor:
        values = bits.signed(x, self.channels, weights.dtype)
        return self._finished(of_unit_size(self._real(values, weights), self._fan_in(weights), self._wide))

    @override
    def split(self, rows: Tensor, members: int) -> Tensor:
        words = bits.count(self.channels, rows.dtype) if rows.dtype in WORDS else -1
        if rows.dim() != len(self.LAYOUT) or rows.shape[-1] != words:
            message = (
                f"a layer of bits with {self.channels} input channels reads packed words "
                f"[{', '.join(self.LAYOUT)}], {bits.count(self.channels)} of int64 a row, got {rows.dtype} "
                f"{list(rows.shape)}: see impls.binary.bits.pack and impls.binary.bits.expand"
            )
            raise ValueError(message)
        rest = self.channels % (64 if rows.dtype is torch.int64 else 32)
        # On a GPU to look is to wait for it.
        if rest and rows.device.type == "cpu" and bool((rows[..., -1] >> rest).any()):
            message = (
                f"rows have bits behind the last of {self.channels} channels, where words are zero: they "
                "would be counted. impls.binary.bits.pack leaves them out"
            )
            raise ValueError(message)
        return rows.unflatten(0, (-1, members))

    @override
    def join(self, y: Tensor, rows: Tensor) -> Tensor:
        return (bits.thresholded(y, rows.dtype) if self.outputs == "bits" else y).flatten(0, 1)

    @override
    def bias(self, bias: Tensor, y: Tensor) -> Tensor:
        return bias.view(-1, *[1] * (y.dim() - 3), y.shape[-1])

    @property
    def _wide(self) -> torch.dtype:
        """The type that outputs are worked on in: at least float32."""
        return torch.promote_types(torch.float32, self.dtype)

    def _finished(self, y: Tensor) -> Tensor:
        """Bring outputs of unit size, which are changed, to what the rows of a member make of them."""
        if self.normalised:
            over = (0, *range(2, y.dim() - 1))
            if math.prod(y.shape[axis] for axis in over) == 1:
                message = "normalised over one value it is always 0: a member needs several rows or positions"
                raise ValueError(message)
            variance, mean = torch.var_mean(y, over, correction=0, keepdim=True)
            y = y.sub_(mean).mul_(torch.rsqrt(variance + NORMALISED_EPS))
        return y.to(self.dtype)

    @abstractmethod
    def _fan_in(self, weights: Tensor) -> int:
        """Return how many bits an output is a sum over."""


@dataclass(frozen=True)
class PackedLinear(AbstractPackedOperator):
    """A matrix product of bits over the last axis: rows [rows, words]."""

    LAYOUT = ("rows", "words")

    @override
    def _operands(self, x: Tensor, weights: Tensor, *, joined: bool) -> tuple[Tensor, Tensor]:
        return x.transpose(0, 1), weights[:, 0]

    @override
    def _real(self, x: Tensor, weights: Tensor) -> Tensor:
        rows, columns = x.transpose(0, 1), weights[:, 0].mT
        return (integer_products if x.dtype is torch.int8 else torch.bmm)(rows, columns).transpose(0, 1)

    @override
    def _fan_in(self, weights: Tensor) -> int:
        return self.channels


@dataclass(frozen=True)
class PackedConv2d(AbstractPackedOperator):
    """A convolution of packed images [rows, h, w, words]; what is outside of an image is -1.

    Attributes:
        kernel_size: its height and width.
        stride: how far apart output positions are.
        padding: how many rows and columns of -1 are put around an image.

    """

    LAYOUT = ("rows", "h", "w", "words")

    kernel_size: tuple[int, int] = (1, 1)
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] = 0

    @override
    def _operands(self, x: Tensor, weights: Tensor, *, joined: bool) -> tuple[Tensor, Tensor]:
        joined = joined and x.shape[-1] == 1
        sizes = (self.kernel_size, self.stride, self.padding, self.channels if joined else None)
        columns = weights[:, 0].flatten(1, -2)
        if joined:
            columns = bits.joined(columns.unbind(1), self.channels).movedim(0, 1)
        return bits.patches(x.transpose(0, 1), *sizes), columns

    @override
    def _real(self, x: Tensor, weights: Tensor) -> Tensor:
        vertical, horizontal = (self.padding,) * 2 if isinstance(self.padding, int) else self.padding
        images = functional.pad(x, (0, 0, horizontal, horizontal, vertical, vertical), value=-1.0)
        members = images.shape[1]
        channels = images.permute(0, 1, 4, 2, 3).flatten(1, 2)
        kernels = weights[:, 0].expand(members, *weights.shape[2:]).flatten(0, 1)
        y = functional.conv2d(channels, kernels, stride=self.stride, groups=members)
        return y.unflatten(1, (members, -1)).movedim(2, -1)

    @override
    def _fan_in(self, weights: Tensor) -> int:
        return self.channels * math.prod(self.kernel_size)


def products(rows: Tensor, columns: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Multiply bits in plain torch, as :data:`Multiply` says."""
    wide = torch.promote_types(torch.float32, dtype)
    y = of_unit_size(bits.products(rows, columns, length), length, wide)
    return y if y.dtype is dtype else y.to(dtype)


def of_unit_size(sums: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Divide sums of +1 and -1, which may be overwritten, by the square root of how many there are."""
    # Sums need not fit a narrow type, and what is left of them after scaling does.
    return sums.to(dtype).div_(math.sqrt(max(1, length)))


def integer_products(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply int8 matrices, one after another: [m, p, i], [m, i, o] -> int32 [m, p, o].

    Torch has a product of two such matrices and none of stacks; on CUDA it wants 17 rows, and multiples of 8.
    """
    rows, outputs = x.shape[1], weights.shape[2]
    if x.is_cuda:
        x = functional.pad(x, (0, -x.shape[2] % 8, 0, max(0, 17 - rows)))
        weights = functional.pad(weights, (0, -outputs % 8, 0, -weights.shape[1] % 8))
    found = [torch._int_mm(*pair) for pair in zip(x, weights, strict=True)]  # noqa: SLF001  torch's only one
    return torch.stack(found)[:, :rows, :outputs]


def packed(values: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Pack weights' bits [*, g, o, i, *taps], true for +1, for a product: [*, g, *taps, words, o].

    Words of one output lie apart, so that a product runs along outputs.
    """
    return bits.pack(channels_last(values), dtype).mT.contiguous()


def unpacked(words: Tensor, channels: int) -> Tensor:
    """Return the bits of packed weights, true for +1: [m, g, *taps, words, o] -> [m, g, o, i, *taps]."""
    found = bits.unpack(words.mT, channels)
    return found.movedim((-2, -1), (2, 3))


def channels_last(values: Tensor) -> Tensor:
    """View weights [g, o, i, *taps] as [g, *taps, o, i]."""
    return values.movedim((1, 2), (-2, -1))


def packed_shape(weight: torch.Size) -> tuple[int, ...]:
    """Return the shape of packed weights [g, o, i, *taps]: [g, *taps, words, o]."""
    return (weight[0], *weight[3:], bits.count(weight[2]), weight[1])
