"""Operators: the layer kinds that schemes act on, such as Linear and Convolution.

An operator applies one weight to all rows (``apply_shared``) or a weight to each member's rows
(``apply_per_member``), converts rows of a batch to activations [r, m, g, i, *space] and back, and views
biases in a shape to add; :mod:`impls.perturbation.member_ops` defines the axes. Padding modes other than
zeros need no code here: torch's module pads before it calls the convolution.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

SLOW_PRODUCT = 400
"""A matrix product of fewer multiplications is a plain loop in torch's bmm (ATen/native/LinearAlgebra.cpp),
which takes a CPU 1.3 to 30 times as long as elementwise operations."""

MAX_SEPARATE_INPUTS, MIN_SUMMED_INPUTS = 4, 64
"""A slow product adds up to the first number of inputs, times their weights, one after the other. From the
second number on, or with a single output, it multiplies elementwise and sums."""

MIN_OUTPUTS_PER_INPUT = 8
"""From this ratio of outputs to inputs, slow products with constant weights are faster with a copy in which
the weights of each input are contiguous."""


class AbstractOperator(ABC):
    """A layer kind with its hyperparameters, without its weight.

    Attributes:
        groups: groups of a convolution, 1 for other products with a weight; None for a normalization.

    """

    groups: int | None = 1

    def apply_shared(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply one weight [g, o, i, *taps] to all rows of x [r, m, g, i, *s] -> a new [r, m, g, o, *s'].

        Rows that are the same for all members are computed once.
        """
        if not has_equal_members(x):
            return self._apply_shared(x, weight)
        y = self._apply_shared(x[:, :1], weight)
        return y.expand(-1, x.shape[1], *y.shape[2:]).contiguous()

    @abstractmethod
    def _apply_shared(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply one weight to all rows, as :meth:`apply_shared`."""

    @abstractmethod
    def apply_per_member(self, x: Tensor, weights: Tensor) -> Tensor:
        """Apply the members' weights [m, g, o, i, *taps] to x [r, m, g, i, *s] -> [r, m, g, o, *s']."""

    def add_shared_to(self, y: Tensor, scale: float | Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return scale * y + apply_shared(x, weight); y [r, m, g, o, *s'] may be overwritten.

        If scale is the number 0, y may be uninitialized, and is the result.
        """
        product = self._apply_shared(x[:, :1] if has_equal_members(x) else x, weight)
        if torch.compiler.is_compiling():  # the compiler has no strided out=, but fuses these operations
            return y.copy_(product + y * scale if isinstance(scale, Tensor) or scale else product)
        out = product if product.shape == y.shape else y  # the product has the memory layout of a batch
        if isinstance(scale, Tensor):
            return torch.addcmul(product, y, scale, out=out)
        return torch.add(product, y, alpha=scale, out=out) if scale else y.copy_(product)

    def apply_with_biases(
        self,
        x: Tensor,
        weights: Tensor,
        biases: Tensor | None,
        *,
        reuses_weights: bool = False,  # noqa: ARG002  for linear layers
    ) -> Tensor:
        """Apply the members' weights, and add their biases [m, *bias].

        With ``reuses_weights`` many calls use these weights, which may then be copied to a faster layout.
        """
        y = self.apply_per_member(x, weights)
        return y if biases is None else y + self.bias(biases, y)

    def rows(self, values: Tensor, weight: Tensor) -> Tensor | None:  # noqa: ARG002  for subclasses
        """View activations or outputs [r, m, g, c, *s] as rows of a matrix product, [r, m, positions, c].

        Return None if applying this weight is not a matrix product; kernels for matrices then refuse it.
        """
        return None

    def empty_output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return uninitialized outputs [r, m, g, o, *s] of a weight for which :meth:`rows` has a view."""
        return x.new_empty(*x.shape[:3], weight.shape[1], *x.shape[4:])

    @abstractmethod
    def from_batch(self, rows: Tensor, members: int) -> Tensor:
        """Convert the rows [r * m, ...] of a batch, row = repeat * m + member, to activations."""

    @abstractmethod
    def to_batch(self, y: Tensor, rows: Tensor) -> Tensor:
        """Convert activations to rows of a batch, in the layout of the layer's input ``rows``."""

    @abstractmethod
    def bias(self, bias: Tensor, y: Tensor) -> Tensor:
        """View biases [m, *bias] in a shape that broadcasts to outputs ``y``."""


def has_equal_members(x: Tensor) -> bool:
    """Return whether all members of activations [r, m, ...] are views of the same memory."""
    return x.shape[1] > 1 and x.stride(1) == 0


def no_rows_reason(module: nn.Module) -> str:
    """Return why :meth:`AbstractOperator.rows` is None for a module, or ``""`` if it is not."""
    if isinstance(module, nn.Linear | nn.MultiheadAttention | nn.RNNBase | nn.RNNCellBase):
        return ""
    if not isinstance(module, nn.Conv2d):
        return "this layer is not a matrix product"
    taps = math.prod(module.kernel_size)
    is_padded = module.padding_mode != "zeros" or module.padding not in {"valid", "same", (0, 0)}
    if taps > 1:
        return f"a convolution with {taps} taps needs {taps} copies of its input to be a matrix product"
    if module.groups > 1:
        return f"a convolution with {module.groups} groups is {module.groups} matrix products"
    if module.stride != (1, 1):
        return "a convolution with a stride needs a copy of its input to be a matrix product"
    return "a padded convolution needs a copy of its input to be a matrix product" if is_padded else ""


@dataclass(frozen=True)
class Linear(AbstractOperator):
    """A linear layer.

    All axes between rows and features are one axis of space, the tokens. Activations [r, m, 1, c, tokens] are
    views of a batch whose features are contiguous in memory; methods move the features last to multiply them.
    """

    def _matrices(self, weights: Tensor) -> Tensor:
        """View weights [..., o, i] as matrices [..., outputs, inputs] of this layer."""
        return weights

    def _matrix(self, weight: Tensor) -> Tensor:
        """View a weight [1, o, i] as a matrix [outputs, inputs]."""
        return self._matrices(weight.select(0, 0))  # faster than an index

    @override
    def _apply_shared(self, x: Tensor, weight: Tensor) -> Tensor:
        return _swap_tokens(functional.linear(_swap_tokens(x), self._matrix(weight)))

    @override
    def add_shared_to(self, y: Tensor, scale: float | Tensor, x: Tensor, weight: Tensor) -> Tensor:
        sums, rows = _swap_tokens(y), _swap_tokens(x)
        is_one_each = y.dim() == 4 and y.shape[0] == 1  # noqa: PLR2004  one row of a member, without tokens
        is_strided = not (is_one_each or sums.is_contiguous())
        is_mixed = not x.dtype == y.dtype == weight.dtype
        if isinstance(scale, Tensor) or is_strided or is_mixed or has_equal_members(x):
            return super().add_shared_to(y, scale, x, weight)
        # addmm adds to its output, which saves a pass over y and a temporary.
        sums = sums.view(-1, y.shape[3])
        torch.addmm(sums, rows.reshape(-1, x.shape[3]), self._matrix(weight).t(), beta=scale, out=sums)
        return y

    @override
    def apply_per_member(self, x: Tensor, weights: Tensor) -> Tensor:
        rows, weights = _swap_tokens(x), self._matrices(weights)
        if has_equal_members(x):  # the members' weights are the outputs of one product
            y = functional.linear(rows[:, 0, 0], weights.flatten(0, 2)).unflatten(-1, weights.shape[:3])
            return y.movedim(1, 4) if x.dim() > 4 else y  # noqa: PLR2004  with tokens
        count = _count_vectors(x)
        spread = weights.unsqueeze(2) if x.dim() > 4 else weights  # noqa: PLR2004  broadcasts to tokens
        if _is_elementwise(count, weights):
            first, *others = spread.unbind(-1)
            return _swap_tokens(_add_multiples(rows[..., :1] * first, rows[..., 1:], others))
        if _is_sum_of_products(count, weights):
            return _swap_tokens((rows.unsqueeze(-2) * spread).sum(-1))
        return self._as_activations(torch.bmm(self._member_rows(rows), weights[:, 0].mT), rows)

    @override
    def apply_with_biases(
        self, x: Tensor, weights: Tensor, biases: Tensor | None, *, reuses_weights: bool = False
    ) -> Tensor:
        matrices, count = self._matrices(weights), _count_vectors(x)
        if (
            biases is None
            or not x.dtype == weights.dtype == biases.dtype
            or _is_sum_of_products(count, matrices)
        ):
            return super().apply_with_biases(x, weights, biases)
        rows = _swap_tokens(x)
        outputs, inputs = matrices.shape[2:]
        if reuses_weights and outputs >= MIN_OUTPUTS_PER_INPUT * inputs and _is_elementwise(count, matrices):
            start, factors = biases.unsqueeze(1), matrices.movedim(3, 0).contiguous()
            if x.dim() > 4:  # noqa: PLR2004  with tokens
                start, factors = start.unsqueeze(2), factors.unsqueeze(3)
            return _swap_tokens(_add_multiples(start, rows, factors.unbind()))
        if reuses_weights and outputs > inputs and count * outputs * inputs >= SLOW_PRODUCT:
            matrices = matrices.mT.contiguous().mT  # faster with each input's weights contiguous
        y = torch.baddbmm(biases.unsqueeze(1), self._member_rows(rows), matrices[:, 0].mT)
        return self._as_activations(y, rows)

    @staticmethod
    def _member_rows(rows: Tensor) -> Tensor:
        """Arrange rows [r, m, 1, *tokens, i] by member: [m, r * tokens, i]; a linear layer has one group."""
        members = rows[:, :, 0].transpose(0, 1)
        return members if members.dim() == 3 else members.flatten(1, -2)  # noqa: PLR2004  without tokens

    @staticmethod
    def _as_activations(y: Tensor, rows: Tensor) -> Tensor:
        """Arrange outputs [m, r * tokens, o] of these rows as activations."""
        if rows.dim() > 4:  # noqa: PLR2004  with tokens
            y = y.unflatten(1, (len(rows), *rows.shape[3:-1]))
        return _swap_tokens(y.transpose(0, 1).unsqueeze(2))

    @override
    def rows(self, values: Tensor, weight: Tensor) -> Tensor:
        # Without tokens the axis of the one group is that of one position.
        return _swap_tokens(values)[:, :, 0] if values.dim() > 4 else values  # noqa: PLR2004  with tokens

    @override
    def empty_output(self, x: Tensor, weight: Tensor) -> Tensor:
        return _swap_tokens(x.new_empty(*x.shape[:3], *x.shape[4:], self._matrices(weight).shape[1]))

    @override
    def from_batch(self, rows: Tensor, members: int) -> Tensor:
        if rows.dim() == 2:  # noqa: PLR2004  without tokens
            return rows.view(-1, members, 1, rows.shape[1])
        return _swap_tokens(rows.flatten(1, -2).unflatten(0, (-1, members)).unsqueeze(2))

    @override
    def to_batch(self, y: Tensor, rows: Tensor) -> Tensor:
        if rows.dim() == 2:  # noqa: PLR2004  without tokens
            return y.reshape(-1, y.shape[3])
        return _swap_tokens(y).reshape(*rows.shape[:-1], y.shape[3])

    @override
    def bias(self, bias: Tensor, y: Tensor) -> Tensor:
        bias = bias.unsqueeze(1)
        return bias.unsqueeze(3) if y.dim() > 4 else bias  # noqa: PLR2004  with tokens


def _swap_tokens(values: Tensor) -> Tensor:
    """Swap features and tokens, if there are tokens: [r, m, 1, c, tokens] <-> [r, m, 1, tokens, c]."""
    return values.mT if values.dim() > 4 else values  # noqa: PLR2004  with tokens


def _add_multiples(y: Tensor, rows: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Return y + sum_i x_i f_i for the inputs x_i in the last axis of ``rows`` and their factors f_i."""
    for index, factor in enumerate(factors):
        y = torch.addcmul(y, rows[..., index : index + 1], factor)  # not in place, for derivatives
    return y


def _count_vectors(x: Tensor) -> int:
    """Return how many vectors (rows times tokens) of activations [r, m, 1, c, *tokens] a member has."""
    return x.shape[0] * x.shape[4:].numel()


def _is_elementwise(rows: int, weights: Tensor) -> bool:
    """Return whether a few elementwise operations are faster than a product with each member's weight.

    A single input always is, as this gives the same bits; several are only in at least float32.
    """
    if _is_autocast(weights):
        return False
    outputs, inputs = weights.shape[2:]
    is_small = inputs <= MAX_SEPARATE_INPUTS and rows * inputs * outputs < SLOW_PRODUCT
    return inputs == 1 or (is_small and weights.dtype.itemsize >= torch.float32.itemsize)


def _is_sum_of_products(rows: int, weights: Tensor) -> bool:
    """Return whether multiplying elementwise, then summing, is faster than a matrix product per member."""
    outputs, inputs = weights.shape[2:]
    is_small = rows * inputs * outputs < SLOW_PRODUCT and (outputs == 1 or inputs >= MIN_SUMMED_INPUTS)
    is_wide = weights.dtype.itemsize >= torch.float32.itemsize  # else products are rounded before the sum
    return is_small and is_wide and weights.is_cpu and not _is_autocast(weights)


def _is_autocast(weights: Tensor) -> bool:
    """Return whether autocast casts the arguments of products, which it does not do for those of sums."""
    return not weights.is_meta and torch.is_autocast_enabled(weights.device.type)


@dataclass(frozen=True)
class TransposedLinear(Linear):
    """A linear layer with the transpose of its weight: x [r, m, 1, o] -> [r, m, 1, i]."""

    @property
    def untransposed(self) -> Linear:
        """The layer with the weight itself."""
        return Linear()

    @override
    def _matrices(self, weights: Tensor) -> Tensor:
        return weights.mT


_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
_Sizes = int | tuple[int, ...]


class AbstractConvolution(AbstractOperator):
    """A convolution over one, two or three axes of space, as many as the weight has axes of taps."""

    groups: int

    @abstractmethod
    def _convolve(self, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        """Convolve x [n, groups * i, *s] with a weight [groups, o, i, *taps] -> [n, groups * o, *s']."""

    @override
    def _apply_shared(self, x: Tensor, weight: Tensor) -> Tensor:
        y = self._convolve(x.flatten(2, 3).flatten(0, 1), weight, self.groups)
        return y.unflatten(0, x.shape[:2]).unflatten(2, weight.shape[:2])

    @override
    def apply_per_member(self, x: Tensor, weights: Tensor) -> Tensor:
        members, groups = weights.shape[:2]
        if groups == 1 and has_equal_members(x):  # the members' weights are outputs of one convolution
            y = self._convolve(x[:, 0].flatten(1, 2), weights.flatten(0, 2).unsqueeze(0), 1)
            return y.unflatten(1, weights.shape[:3])
        # The members' weights are groups of one convolution.
        y = self._convolve(x.flatten(1, 3), weights.flatten(0, 1), members * groups)
        return y.unflatten(1, weights.shape[:3])

    @override
    def from_batch(self, rows: Tensor, members: int) -> Tensor:
        return rows.unflatten(1, (self.groups, -1)).unflatten(0, (-1, members))

    @override
    def to_batch(self, y: Tensor, rows: Tensor) -> Tensor:
        return y.flatten(2, 3).reshape(rows.shape[0], -1, *y.shape[4:])

    @override
    def bias(self, bias: Tensor, y: Tensor) -> Tensor:
        return bias.view(-1, *y.shape[2:4], *[1] * (y.dim() - 4))


@dataclass(frozen=True)
class Convolution(AbstractConvolution):
    """A convolution, with the arguments of ``torch.nn.functional.conv2d``."""

    stride: _Sizes = 1
    padding: _Sizes | str = 0
    dilation: _Sizes = 1
    groups: int = 1

    @override
    def rows(self, values: Tensor, weight: Tensor) -> Tensor | None:
        # With one tap, no stride and no padding, positions are the rows of a matrix product.
        strides = {self.stride} if isinstance(self.stride, int) else set(self.stride)
        paddings = {self.padding} if isinstance(self.padding, int | str) else set(self.padding)
        is_one_tap = weight[0, 0, 0].numel() == 1 and self.groups == 1
        if not (is_one_tap and strides == {1} and paddings <= {0, "valid", "same"}):
            return None
        return values[:, :, 0].flatten(3).mT

    @override
    def apply_per_member(self, x: Tensor, weights: Tensor) -> Tensor:
        outputs, inputs = weights.shape[2:4]
        is_wide = weights.dtype.itemsize >= torch.float32.itemsize and not _is_autocast(weights)
        padding, is_image = self.padding, weights.dim() == 6  # noqa: PLR2004  two axes of taps
        if x.is_cpu and weights.shape[1] == 1 and has_equal_members(x):
            if is_image and not isinstance(padding, str):
                return self._multiply_patches(x[:, 0, 0], weights, padding)
        elif x.is_cpu and outputs == 1 < inputs and is_wide:
            return self._sum_taps(x, weights[:, :, 0])
        return super().apply_per_member(x, weights)

    def _multiply_patches(self, x: Tensor, weights: Tensor, padding: _Sizes) -> Tensor:
        """Apply weights [m, 1, o, i, *taps] to images [r, i, *s], up to 12 times as fast as torch on a CPU.

        All members' weights are the rows of one matrix, which multiplies the patches of each image. The first
        convolution of a model has few channels, so that its patches take little memory beside the outputs.
        """
        taps = weights.shape[4:]
        patches = functional.unfold(x, taps, self.dilation, padding, self.stride)
        y = weights.flatten(3).flatten(0, 2) @ patches  # [m * o, i * taps] x [r, i * taps, positions]
        sizes = [self._shifts(axis, x.shape[2 + axis], count)[0] for axis, count in enumerate(taps)]
        return y.view(len(x), *weights.shape[:3], *sizes)

    def _sum_taps(self, x: Tensor, weights: Tensor) -> Tensor:
        """Apply weights [m, g, i, *taps] of one output channel, 8 to 10 times as fast as torch on a CPU.

        A matrix product multiplies all positions by each tap; shifted by their taps, the products are added.
        """
        space, taps = x.shape[4:], weights.shape[3:]
        products = (weights.flatten(3).mT @ x.flatten(4)).unflatten(4, space).unflatten(3, taps)
        axes = [
            self._shifts(axis, size, count)
            for axis, (size, count) in enumerate(zip(space, taps, strict=True))
        ]
        y = products.new_zeros(*x.shape[:3], *(size for size, _ in axes))
        for shifts in itertools.product(*(shifts for _, shifts in axes)):
            tap, read, written = zip(*shifts, strict=True)
            y[(..., *written)] += products[:, :, :, *tap][(..., *read)]
        return y.unsqueeze(3)

    def _shifts(self, axis: int, size: int, taps: int) -> tuple[int, list[tuple[int, slice, slice]]]:
        """Return an axis' size in the output, and for each tap what it reads and where it adds it."""
        stride, dilation = (
            value if isinstance(value, int) else value[axis] for value in (self.stride, self.dilation)
        )
        span = dilation * (taps - 1)
        if isinstance(self.padding, str):
            total = span if self.padding == "same" else 0
            before = total // 2
        else:
            before = self.padding if isinstance(self.padding, int) else self.padding[axis]
            total = 2 * before
        outputs = (size + total - span - 1) // stride + 1
        shifts = []
        for tap in range(taps):
            offset = tap * dilation - before  # output p reads input p * stride + offset
            first = max(0, -(offset // stride))
            stop = min(outputs, -((offset - size) // stride))
            if first < stop:
                source = slice(first * stride + offset, (stop - 1) * stride + offset + 1, stride)
                shifts.append((tap, source, slice(first, stop)))
        return outputs, shifts

    @override
    def _convolve(self, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        function = _CONVOLUTIONS[weight.dim() - 4]
        return function(x, weight.flatten(0, 1), None, self.stride, self.padding, self.dilation, groups)


@dataclass(frozen=True)
class TransposedConvolution(AbstractConvolution):
    """A transposed convolution, with the arguments of ``torch.nn.functional.conv_transpose2d``."""

    stride: _Sizes = 1
    padding: _Sizes = 0
    output_padding: _Sizes = 0
    groups: int = 1
    dilation: _Sizes = 1

    @override
    def _convolve(self, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        function = _TRANSPOSED[weight.dim() - 4]
        kernel = weight.transpose(1, 2).flatten(0, 1)
        return function(
            x, kernel, None, self.stride, self.padding, self.output_padding, groups, self.dilation
        )


@dataclass(frozen=True)
class ChannelAffine(AbstractOperator):
    """The affine part of a normalization layer: each channel is multiplied by its scale.

    The weight keeps torch's shape.

    Attributes:
        leading: axes of a row before the weight's axes: 0 for BatchNorm2d, 1 for LayerNorm over tokens.
        trailing: axes of a row after the weight's axes: 2 for BatchNorm2d, 0 for LayerNorm.
    """

    groups = None

    leading: int
    trailing: int

    @override
    def _apply_shared(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * self._view(weight.unsqueeze(0))

    @override
    def apply_per_member(self, x: Tensor, weights: Tensor) -> Tensor:
        return x * self._view(weights)

    @override
    def from_batch(self, rows: Tensor, members: int) -> Tensor:
        return rows.unflatten(0, (-1, members))

    @override
    def to_batch(self, y: Tensor, rows: Tensor) -> Tensor:
        return y.reshape(rows.shape)

    @override
    def bias(self, bias: Tensor, y: Tensor) -> Tensor:
        return self._view(bias)

    def _view(self, values: Tensor) -> Tensor:
        """View scales or shifts [m, *weight] in a shape that broadcasts to activations."""
        return values.view(values.shape[0], *[1] * self.leading, *values.shape[1:], *[1] * self.trailing)
