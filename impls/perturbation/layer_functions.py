"""Torch's functions of a layer's weight: how their arguments are read, and which others are allowed."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from impls.perturbation.operators import (
    AbstractOperator,
    ChannelAffine,
    Convolution,
    Linear,
    TransposedConvolution,
)


class LayerArguments(NamedTuple):
    """The arguments of a layer function; for a normalization x is normalized, but not yet scaled."""

    operator: AbstractOperator
    x: Tensor
    bias: Tensor | None = None


def _read_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> LayerArguments:  # noqa: A002  torch's name
    return LayerArguments(Linear(), input, bias)


def _read_convolution(
    input: Tensor,  # noqa: A002  torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> LayerArguments:
    return LayerArguments(Convolution(stride, padding, dilation, groups), input, bias)


def _read_transposed_convolution(
    input: Tensor,  # noqa: A002  torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
) -> LayerArguments:
    operator = TransposedConvolution(stride, padding, output_padding, groups, dilation)
    return LayerArguments(operator, input, bias)


def _normalization(function: Callable[..., Tensor]) -> tuple[int, Callable[..., LayerArguments]]:
    """Return the entry of :data:`HANDLERS` of a normalization.

    Torch's function normalizes, without its weight and bias; the members' scales and shifts are applied to
    its result.
    """
    names = tuple(inspect.signature(function).parameters)

    def read(*args: Any, **kwargs: Any) -> LayerArguments:  # noqa: ANN401  arguments of torch's function
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        bias = named.pop("bias", None)
        y = function(**{**named, "weight": None})
        if "normalized_shape" in named:
            return LayerArguments(ChannelAffine(y.dim() - 1 - len(named["normalized_shape"]), 0), y, bias)
        return LayerArguments(ChannelAffine(0, y.dim() - 2), y, bias)

    return names.index("weight"), read


HANDLERS: dict[Callable[..., object], tuple[int, Callable[..., LayerArguments] | None]] = {
    functional.linear: (1, _read_linear),
    functional.conv1d: (1, _read_convolution),
    functional.conv2d: (1, _read_convolution),
    functional.conv3d: (1, _read_convolution),
    functional.conv_transpose1d: (1, _read_transposed_convolution),
    functional.conv_transpose2d: (1, _read_transposed_convolution),
    functional.conv_transpose3d: (1, _read_transposed_convolution),
    functional.layer_norm: _normalization(functional.layer_norm),
    functional.rms_norm: _normalization(functional.rms_norm),
    functional.group_norm: _normalization(functional.group_norm),
    functional.batch_norm: _normalization(functional.batch_norm),
    functional.instance_norm: _normalization(functional.instance_norm),
}
"""For each layer function, the position of its weight argument and a function that reads its arguments.

Other packages, such as :mod:`impls.binary`, add their layer functions here.
"""


BATCH_NORM = tuple(inspect.signature(functional.batch_norm).parameters)
"""The names of batch_norm's parameters, in order."""


PROPERTIES = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "device", "dtype", "is_cuda", "is_meta", "itemsize", "layout", "nbytes", "ndim",
        "requires_grad", "shape",
    )
) | {
    Tensor.__len__, Tensor.__repr__, Tensor.dim, Tensor.element_size, Tensor.get_device, Tensor.is_complex,
    Tensor.is_contiguous, Tensor.is_floating_point, Tensor.nelement, Tensor.numel, Tensor.size, Tensor.stride,
}  # fmt: skip
"""Functions of a perturbed parameter that are allowed: all members have the same result."""


FEATURES_LAST = frozenset({functional.linear, functional.layer_norm, functional.rms_norm})
"""Layer functions that are computed as a torch module's if the weight is a module's own parameter."""


ELEMENTWISE = (
    frozenset(
        getattr(owner, name)
        for name in ("add", "sub", "mul", "div", "true_divide", "maximum", "minimum")
        for owner in (torch, Tensor)
    )
    | {
        getattr(Tensor, f"__{prefix}{name}__")
        for name in ("add", "sub", "mul", "truediv")
        for prefix in ("", "r")
    }
    | {functional.prelu}
)
"""Functions of rows and a parameter with dense noise that are computed by broadcasting."""


EXPANSIONS = frozenset(
    {Tensor.expand, Tensor.expand_as, Tensor.repeat, Tensor.broadcast_to, torch.broadcast_to}
)
"""Functions that may repeat a tensor for each row."""


DTYPE_CASTS = frozenset({Tensor.to, Tensor.type_as})
"""Functions that may take another tensor for its dtype alone."""


def refuse_batch_statistics(args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise a ValueError for a BatchNorm that uses batch statistics, perturbed or not."""
    named = {**dict(zip(BATCH_NORM, args, strict=False)), **kwargs}
    if named.get("training") or named.get("running_mean") is None:
        message = (
            "BatchNorm normalizes across the population, which mixes the members: call model.eval() first, "
            "or use GroupNorm or LayerNorm"
        )
        raise ValueError(message)
