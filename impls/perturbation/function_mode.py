"""A torch function mode in which a plain model's layers use each member's weights.

The model is not modified. While it runs, calls of torch's layer functions with a perturbed parameter are
replaced by calls of its :class:`~impls.perturbation.layer.PerturbedLayer`. Any other function that uses such
a parameter raises an error, so no layer is silently left unperturbed.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from typing_extensions import override

from impls.perturbation.layer import LayerCall, LayerNoise, PerturbedLayer
from impls.perturbation.operators import AbstractOperator, ChannelAffine, Conv2d, Linear


class Call(NamedTuple):
    """The arguments of a layer function: operator, input (normalized, but not yet scaled) and bias."""

    operator: AbstractOperator
    x: Tensor
    bias: Tensor | None = None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call:  # noqa: A002  torch's name
    return Call(Linear(), input, bias)


def _conv2d(
    input: Tensor,  # noqa: A002  torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Call:
    return Call(Conv2d(stride, padding, dilation, groups), input, bias)


def _normalization(function: Callable[..., Tensor]) -> tuple[int, Callable[..., Call]]:
    """Return the handler of a normalization: torch normalizes, and scale and shift are the member's."""
    names = tuple(inspect.signature(function).parameters)

    def read(*args: Any, **kwargs: Any) -> Call:  # noqa: ANN401  arguments of torch's function
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        bias = named.pop("bias", None)
        y = function(**{**named, "weight": None})
        if "normalized_shape" in named:
            return Call(ChannelAffine(y.dim() - 1 - len(named["normalized_shape"]), 0), y, bias)
        return Call(ChannelAffine(0, y.dim() - 2), y, bias)

    return names.index("weight"), read


HANDLERS: dict[Callable[..., object], tuple[int, Callable[..., Call] | None]] = {
    functional.linear: (1, _linear),
    functional.conv2d: (1, _conv2d),
    functional.layer_norm: _normalization(functional.layer_norm),
    functional.rms_norm: _normalization(functional.rms_norm),
    functional.group_norm: _normalization(functional.group_norm),
    functional.batch_norm: _normalization(functional.batch_norm),
    functional.instance_norm: _normalization(functional.instance_norm),
}
"""For each layer function, the position of its weight and a function that reads the arguments of a call.

Other packages, such as :mod:`impls.binary`, add their layer functions here.
"""


BATCH_NORM = tuple(inspect.signature(functional.batch_norm).parameters)
"""The names of batch_norm's parameters, in order."""


class MemberFunctionMode(TorchFunctionMode):
    """A context in which layer functions use each member's parameters."""

    def __init__(
        self,
        layers: Iterable[PerturbedLayer],
        noise: Mapping[str, LayerNoise],
        *,
        rows: int,
        members: int,
        sigma: float,
        antithetic: bool,
    ) -> None:
        """Store the layers, their noise by name, and the layout of the rows."""
        super().__init__()
        self._layers = {id(layer.weight): layer for layer in layers}
        self._names = {
            id(parameter): layer.name
            for layer in self._layers.values()
            for parameter in (layer.weight, layer.bias)
            if parameter is not None
        }
        self._noise, self._rows, self._members = noise, rows, members
        self._sigma, self._antithetic = sigma, antithetic
        self._reached = False
        self.calls: dict[str, list[LayerCall]] = {}
        """Calls of the layers that learn from rows, by layer name."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is functional.batch_norm:
            _refuse_batch_statistics(args, kwargs)
        position, read = HANDLERS.get(func, (0, None))
        if read is not None:
            weight = args[position] if len(args) > position else kwargs.get("weight")
            layer = self._layers.get(id(weight))
            if layer is not None:
                return self._call_layer(layer, read(*args, **kwargs))
        if _changes_its_argument(func):
            self._refuse_use(func, args[:1])
        result = func(*args, **kwargs)
        if isinstance(result, Tensor | tuple | list):
            self._refuse_use(func, (*args, *kwargs.values()))
        return result

    def check_layers_used(self, model: str) -> None:
        """Check that the run used a perturbed layer.

        Raises:
            ValueError: it did not.

        """
        if not self._reached:
            message = (
                f"{model} ran without using any of its {len(self._layers)} perturbed layers: compiled "
                "and scripted code cannot be perturbed, pass the plain model"
            )
            raise ValueError(message)

    def _call_layer(self, layer: PerturbedLayer, call: Call) -> Tensor:
        if call.bias is not layer.bias:
            message = (
                f"the weight of layer {layer.name!r} is used with the bias of another layer: "
                "exclude the layer, or call the layer itself"
            )
            raise ValueError(message)
        if call.x.shape[0] != self._rows:
            message = (
                f"layer {layer.name!r} got {call.x.shape[0]} rows where the population has {self._rows}: "
                "a model must not change the first axis of its input"
            )
            raise ValueError(message)
        self._reached = True
        if layer.learns_from_rows:
            self.calls.setdefault(layer.name, []).append(LayerCall.of(call.operator, call.x))
        noise = self._noise[layer.name]
        return layer.forward(
            call.operator, call.x, noise, self._members, self._sigma, antithetic=self._antithetic
        )

    def _refuse_use(self, func: Callable[..., object], values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, tuple | list):
                self._refuse_use(func, value)
            elif id(value) in self._names:
                name = self._names[id(value)]
                message = (
                    f"a parameter of layer {name!r} is used by {resolve_name(func) or func}, which no "
                    "scheme can perturb: exclude the layer, or call the layer itself"
                )
                raise ValueError(message)


def _refuse_batch_statistics(args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise an error for a BatchNorm, perturbed or not, that uses batch statistics."""
    named = {**dict(zip(BATCH_NORM, args, strict=False)), **kwargs}
    if named.get("training") or named.get("running_mean") is None:
        message = (
            "BatchNorm with batch statistics normalizes across the population, so members would "
            "depend on each other: call model.eval() first, or use GroupNorm or LayerNorm"
        )
        raise ValueError(message)


def _changes_its_argument(func: Callable[..., object]) -> bool:
    """Return whether a torch function works in place: ``add_``, ``__iadd__``, ``__setitem__``."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in {"__init__", "__invert__", "__index__", "__int__"}
        )
    return name.endswith("_")
