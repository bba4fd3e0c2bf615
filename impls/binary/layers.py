"""Binarized layers: weights and activations are +1 or -1, in packed bits.

The parameter ``weight`` holds logits: a weight is +1 with probability sigmoid(logit). The plain layer uses
the most likely bits; members of a population draw their own (:mod:`impls.schemes.binary`). Activations are
packed words (:mod:`impls.binary.bits`), images are NHWC: [rows, h, w, words]. A layer returns the bits of
y + bias > 0, or y + bias with ``outputs="real"``; y is the product divided by the square root of the fan-in.

These layers have no gradient by backpropagation: they are trained with populations.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic
from typing_extensions import override

from impls.binary import bits
from impls.binary.operators import AbstractPackedOperator, PackedConv2d, PackedLinear
from impls.perturbation.layer import AbstractLogitLayer
from impls.perturbation.layer_functions import HANDLERS, LayerArguments
from impls.perturbation.scheme import check_choice, check_count


def apply(x: Tensor, weight: Tensor, bias: Tensor | None, operator: AbstractPackedOperator) -> Tensor:
    """Apply the most likely bits of logits [o, i, *taps] to packed rows.

    It can be overridden by ``__torch_function__`` like torch's own functions, which is how members of a
    population use their own bits.

    Raises:
        ValueError: the rows do not fit the operator, or a parameter on a CPU is NaN.
    """
    if has_torch_function_variadic(x, weight):
        answer: Tensor = handle_torch_function(apply, (x, weight), x, weight, bias, operator)
        return answer
    parameters = [weight] if bias is None else [weight, bias]
    if any(parameter.device.type == "cpu" and bool(parameter.isnan().any()) for parameter in parameters):
        raise ValueError("a logit or threshold of a binarized layer is NaN: its bit is undefined")
    y = operator.apply_shared(operator.from_batch(x, 1), weight.detach().unsqueeze(0))
    if bias is not None:
        y = y + operator.bias(bias.detach().unsqueeze(0), y)
    return operator.to_batch(y, x)


def _read(x: Tensor, weight: Tensor, bias: Tensor | None, operator: AbstractPackedOperator) -> LayerArguments:  # noqa: ARG001  the signature of apply
    return LayerArguments(operator, x, bias)


HANDLERS[apply] = (1, _read)


def pair(name: str, sizes: int | bits.Pair, least: int) -> bits.Pair:
    """Return a vertical and a horizontal size, given one number for both or two.

    Raises:
        ValueError: there are not one or two integers of at least ``least``.
    """
    both = (sizes, sizes) if isinstance(sizes, int) else sizes
    if len(both) != 2 or not all(isinstance(size, int) and size >= least for size in both):  # noqa: PLR2004  height and width
        raise ValueError(f"{name} must be one or two integers of at least {least}, got {sizes!r}")
    return both


class AbstractBinarized(AbstractLogitLayer):
    """A layer whose weight holds logits and whose input is packed bits."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        bias: bool,
        outputs: str,
        normalized: bool,
        **factory_kwargs: Any,  # noqa: ANN401  torch's device and dtype
    ) -> None:
        super().__init__()
        check_choice("outputs", outputs, "bits", "real")
        self.outputs, self.normalized = outputs, normalized
        self.weight = nn.Parameter(torch.empty(shape, **factory_kwargs))
        self.bias = nn.Parameter(torch.empty(shape[0], **factory_kwargs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw logits N(0, 1) and set thresholds to 0."""
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class BinarizedLinear(AbstractBinarized):
    """Words [rows, words(in_features)] -> words [rows, words(out_features)], or real [rows, out_features].

    Args:
        in_features: bits of a row.
        out_features: outputs.
        bias: add a threshold to each output: a bit is 1 where product + bias > 0.
        outputs: ``bits`` or ``real``.
        normalized: normalize each output before its bias is added, over the rows of a call, or of each member
            in a population, which then needs several rows.

    Raises:
        ValueError: a size is below 1, or ``outputs`` is unknown.
    """

    def __init__(  # noqa: PLR0913  as torch.nn.Linear has them
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        outputs: str = "bits",
        normalized: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("in_features", in_features)
        check_count("out_features", out_features)
        shape, factory_kwargs = (out_features, in_features), {"device": device, "dtype": dtype}
        super().__init__(shape, bias=bias, outputs=outputs, normalized=normalized, **factory_kwargs)
        self.in_features, self.out_features = in_features, out_features

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Apply the most likely bits."""
        operator = PackedLinear(self.in_features, self.weight.dtype, self.outputs, self.normalized)
        return apply(x, self.weight, self.bias, operator)

    @override
    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, outputs={self.outputs}"


class BinarizedConv2d(AbstractBinarized):
    """Words [rows, h, w, words(in_channels)] -> words [rows, h', w', words(out_channels)], or real.

    Args:
        in_channels: bits per position.
        out_channels: outputs per position.
        kernel_size: height and width, or one number for both.
        stride: distance between output positions.
        padding: rows and columns of -1 around an image.
        bias: add a threshold to each output, see :class:`BinarizedLinear`.
        outputs: ``bits`` or ``real``.
        normalized: normalize each output channel over rows and positions.

    Raises:
        ValueError: a size is below 1, or ``outputs`` is unknown.
    """

    def __init__(  # noqa: PLR0913  as torch.nn.Conv2d has them
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | bits.Pair,
        *,
        stride: int | bits.Pair = 1,
        padding: int | bits.Pair = 0,
        bias: bool = True,
        outputs: str = "bits",
        normalized: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("in_channels", in_channels), ("out_channels", out_channels)):
            check_count(name, value)
        kernel = pair("kernel_size", kernel_size, 1)
        shape, factory_kwargs = (out_channels, in_channels, *kernel), {"device": device, "dtype": dtype}
        super().__init__(shape, bias=bias, outputs=outputs, normalized=normalized, **factory_kwargs)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel
        self.stride, self.padding = pair("stride", stride, 1), pair("padding", padding, 0)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Convolve with the most likely bits."""
        kind = (self.in_channels, self.weight.dtype, self.outputs, self.normalized)
        sizes = (self.kernel_size, self.stride, self.padding)
        return apply(x, self.weight, self.bias, PackedConv2d(*kind, *sizes))

    @override
    def extra_repr(self) -> str:
        sizes = f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
        return f"{self.in_channels}, {self.out_channels}, {sizes}, outputs={self.outputs}"


class BinarizedMaxPool2d(nn.Module):
    """Max pooling of packed images, which is OR: words [rows, h, w, words] -> [rows, h', w', words].

    Args:
        kernel_size: size of the window.
        stride: distance between windows; by default they do not overlap.
        padding: rows and columns of -1 around an image.
    """

    def __init__(
        self,
        kernel_size: int | bits.Pair,
        stride: int | bits.Pair | None = None,
        padding: int | bits.Pair = 0,
    ) -> None:
        super().__init__()
        self.kernel_size = pair("kernel_size", kernel_size, 1)
        self.stride = self.kernel_size if stride is None else pair("stride", stride, 1)
        self.padding = pair("padding", padding, 0)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the maximum of each window."""
        return bits.max_pool(x, self.kernel_size, self.stride, self.padding)

    @override
    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
