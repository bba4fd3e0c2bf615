"""Operators on packed bits: linear layers and convolutions of activations and weights that are +1 or -1.

Activations are packed (:mod:`impls.binary.bits`): rows are words [rows, *space, words]. A weight holds
logits; the plain weight is their sign, the most likely bit. Outputs are divided by the square root of the
fan-in, so that thresholds and their noise have the same scale at any width. They are real, [r, m, *space, o],
or packed bits of y > 0.
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
from impls.binary.products import bit_product
from impls.perturbation.operators import AbstractOperator

Multiply = Callable[[Tensor, Tensor, int, torch.dtype], Tensor]
"""A product of packed rows [m, p, K] and columns [m, K, o]: (rows, columns, length, dtype) -> [m, p, o].

The sums over ``length`` bits are divided by its square root in at least float32, then rounded to ``dtype``.
Columns of m = 1 are shared by all members.
"""

NORMALIZED_EPS = 1e-5
"""Added to the variance, as in torch's normalization layers."""


@dataclass(frozen=True)
class AbstractPackedOperator(AbstractOperator):
    """A layer of packed bits, without its weight.

    Attributes:
        channels: number of input channels, packed in the last axis of rows.
        dtype: dtype of real outputs.
        outputs: ``real``, or ``bits``, packed like the input.
        normalized: normalize each member's output channels over its rows and positions.
    """

    LAYOUT: ClassVar[tuple[str, ...]]
    """Names of the axes of rows."""

    channels: int
    dtype: torch.dtype
    outputs: str = "real"
    normalized: bool = False

    def apply_packed(self, x: Tensor, weights: Tensor, multiply: Multiply | None = None) -> Tensor:
        """Apply each member's packed weight [m, 1, *taps, words, o]: [r, m, *s, words] -> [r, m, *s', o].

        A weight of m = 1 is shared by all members. ``multiply`` replaces plain torch's product.
        """
        # Plain torch's runtime grows with the number of words, so joining words is worth the copy.
        rows, columns = self._operands(x, weights, joined=multiply is None)
        multiply = multiply or scaled_product
        dtype = self._compute_dtype if self.normalized else self.dtype
        # Without positions there is nothing to flatten: views cost calls, which matter in small layers.
        if rows.dim() == 3:  # noqa: PLR2004  members, rows and words
            y = multiply(rows, columns, self._fan_in, dtype)
        else:
            y = multiply(rows.flatten(1, -2), columns, self._fan_in, dtype).unflatten(1, rows.shape[1:-1])
        return self._normalize_and_round(y.transpose(0, 1))

    @abstractmethod
    def _operands(self, x: Tensor, weights: Tensor, *, joined: bool) -> tuple[Tensor, Tensor]:
        """Return the operands of the product: rows [m, r, *s', K] and columns [m, K, o].

        With ``joined``, words of few bits may be joined into fewer words.
        """

    @abstractmethod
    def _multiply_signs(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the product of +1 and -1 [r, m, *s, i] with real weights [m, 1, o, i, *taps]."""

    @override
    def _apply_shared(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.apply_packed(x, pack_weights(weight > 0).unsqueeze(0))

    @override
    def apply_per_member(self, x: Tensor, weights: Tensor) -> Tensor:
        values = bits.unpack_as_signs(x, self.channels, weights.dtype)
        sums = self._multiply_signs(values, weights)
        return self._normalize_and_round(scale_sums(sums, self._fan_in, self._compute_dtype))

    @override
    def from_batch(self, rows: Tensor, members: int) -> Tensor:
        words = bits.word_count(self.channels)
        if rows.dim() != len(self.LAYOUT) or rows.shape[-1] != words or rows.dtype is not torch.int64:
            raise ValueError(
                f"a binarized layer with {self.channels} input channels reads packed words "
                f"[{', '.join(self.LAYOUT)}], {words} of int64 a row, got {rows.dtype} {list(rows.shape)}: "
                "see impls.binary.bits.pack and impls.binary.bits.expand"
            )
        used_bits = self.channels % bits.WORD_BITS
        # On a GPU this check would wait for the device.
        if used_bits and rows.device.type == "cpu" and bool((rows[..., -1] >> used_bits).any()):
            raise ValueError(
                f"rows have bits after the last of {self.channels} channels, which must be zero: they would "
                "be counted. Pack rows with impls.binary.bits.pack"
            )
        return rows.unflatten(0, (-1, members))

    @override
    def to_batch(self, y: Tensor, rows: Tensor) -> Tensor:
        return (bits.pack(y) if self.outputs == "bits" else y).flatten(0, 1)

    @override
    def bias(self, bias: Tensor, y: Tensor) -> Tensor:
        return bias.view(-1, *[1] * (y.dim() - 3), y.shape[-1])

    @property
    def _compute_dtype(self) -> torch.dtype:
        """The dtype in which outputs are computed: at least float32."""
        return torch.promote_types(torch.float32, self.dtype)

    def _normalize_and_round(self, y: Tensor) -> Tensor:
        """Normalize outputs in place if requested, and round them to their dtype."""
        if self.normalized:
            axes = (0, *range(2, y.dim() - 1))
            if math.prod(y.shape[axis] for axis in axes) == 1:
                raise ValueError("normalizing one value gives 0: a member needs several rows or positions")
            variance, mean = torch.var_mean(y, axes, correction=0, keepdim=True)
            y = y.sub_(mean).mul_(torch.rsqrt(variance + NORMALIZED_EPS))
        return y.to(self.dtype)

    @property
    @abstractmethod
    def _fan_in(self) -> int:
        """The number of bits that an output is a sum over."""


@dataclass(frozen=True)
class PackedLinear(AbstractPackedOperator):
    """A linear layer of packed bits: rows [rows, words]."""

    LAYOUT = ("rows", "words")

    @override
    def _operands(self, x: Tensor, weights: Tensor, *, joined: bool) -> tuple[Tensor, Tensor]:
        return x.transpose(0, 1), weights[:, 0]

    @override
    def _multiply_signs(self, x: Tensor, weights: Tensor) -> Tensor:
        rows, columns = x.transpose(0, 1), weights[:, 0].mT
        return (integer_products if x.dtype is torch.int8 else torch.bmm)(rows, columns).transpose(0, 1)

    @property
    @override
    def _fan_in(self) -> int:
        return self.channels


@dataclass(frozen=True)
class PackedConv2d(AbstractPackedOperator):
    """A convolution of packed images [rows, h, w, words], padded with -1.

    Attributes:
        kernel_size: height and width of the kernel.
        stride: distance between output positions.
        padding: rows and columns of -1 around an image.
    """

    LAYOUT = ("rows", "h", "w", "words")

    kernel_size: bits.Pair = (1, 1)
    stride: bits.Pair = (1, 1)
    padding: bits.Pair = (0, 0)

    @override
    def _operands(self, x: Tensor, weights: Tensor, *, joined: bool) -> tuple[Tensor, Tensor]:
        columns, joined_bits = weights[:, 0].flatten(1, -2), None
        if joined and x.shape[-1] == 1:
            joined_bits = self.channels
            columns = bits.join_words(columns.unbind(1), joined_bits).movedim(0, 1)
        images = x.transpose(0, 1)
        return bits.patches(images, self.kernel_size, self.stride, self.padding, joined_bits), columns

    @override
    def _multiply_signs(self, x: Tensor, weights: Tensor) -> Tensor:
        vertical, horizontal = self.padding
        images = functional.pad(x, (0, 0, horizontal, horizontal, vertical, vertical), value=-1.0)
        members = images.shape[1]
        channels = images.permute(0, 1, 4, 2, 3).flatten(1, 2)
        kernels = weights[:, 0].expand(members, *weights.shape[2:]).flatten(0, 1)
        y = functional.conv2d(channels, kernels, stride=self.stride, groups=members)
        return y.unflatten(1, (members, -1)).movedim(2, -1)

    @property
    @override
    def _fan_in(self) -> int:
        return self.channels * math.prod(self.kernel_size)


def scaled_product(rows: Tensor, columns: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Multiply packed bits in plain torch, see :data:`Multiply`."""
    wide = torch.promote_types(torch.float32, dtype)
    y = scale_sums(bit_product(rows, columns, length), length, wide)
    return y.to(dtype)


def scale_sums(sums: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Divide sums of ``length`` +1 and -1, which may be overwritten, by its square root."""
    # Converted first: a narrow dtype may not hold the sums.
    return sums.to(dtype).div_(math.sqrt(max(1, length)))


def integer_products(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply stacks of int8 matrices: [m, p, i], [m, i, o] -> int32 [m, p, o].

    Torch multiplies only two at a time; on CUDA it needs at least 17 rows and multiples of 8.
    """
    rows, outputs = x.shape[1], weights.shape[2]
    if x.is_cuda:
        x = functional.pad(x, (0, -x.shape[2] % 8, 0, max(0, 17 - rows)))
        weights = functional.pad(weights, (0, -outputs % 8, 0, -weights.shape[1] % 8))
    y = [torch._int_mm(*pair) for pair in zip(x, weights, strict=True)]  # noqa: SLF001  no public name
    return torch.stack(y)[:, :rows, :outputs]


def pack_weights(values: Tensor) -> Tensor:
    """Pack weights [*, g, o, i, *taps], true for +1, along inputs: [*, g, *taps, words, o].

    Outputs are contiguous: the product's inner loops run along them.
    """
    return bits.pack(channels_last(values)).mT.contiguous()


def unpack_weights(words: Tensor, channels: int) -> Tensor:
    """Unpack weights [m, g, *taps, words, o] to bool [m, g, o, i, *taps], true for +1."""
    return bits.unpack(words.mT, channels).movedim((-2, -1), (2, 3))


def channels_last(values: Tensor) -> Tensor:
    """View weights [g, o, i, *taps] as [g, *taps, o, i]."""
    return values.movedim((1, 2), (-2, -1))


def packed_shape(weight: torch.Size) -> tuple[int, ...]:
    """Return the shape of packed weights [g, o, i, *taps]: [g, *taps, words, o]."""
    return (weight[0], *weight[3:], bits.word_count(weight[2]), weight[1])
