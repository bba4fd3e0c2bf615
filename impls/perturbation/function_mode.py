"""A torch function mode in which a plain model's layers use each member's weights.

The model is not modified. While it runs, a call of a torch layer function with a perturbed parameter becomes
a call of :meth:`~impls.perturbation.layer.PerturbedLayer.forward`. Any other function of such a parameter
raises an error, in other threads too, and so does a layer that was not reached: no layer is silently left
unperturbed. A population's first call also refuses operations that a function mode does not see.
"""

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass, _current_autograd_node
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from impls.perturbation.decompositions import DECOMPOSITIONS
from impls.perturbation.layer import LayerCall, LayerNoise, PerturbedLayer, memory_range
from impls.perturbation.operators import (
    AbstractConvolution,
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
"""Functions of rows and a module's own parameter that are computed with each member's values."""


class UnseenUseError(ValueError):
    """A perturbed parameter is used where the function mode is not active."""


class RowsError(ValueError):
    """An input of a layer has no axis of rows."""


class GuardedParameter(nn.Parameter):
    """The class of perturbed parameters while their model runs.

    A function mode only sees functions of its own thread. In other threads this class refuses them, and while
    ``torch.compile`` compiles them.
    """

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func not in PROPERTIES:
            message = (
                f"a perturbed parameter is used by {resolve_name(func) or func} in another thread or in "
                "compiled code while its population runs: run all layers in the thread that calls the "
                "population, and do not compile them"
            )
            raise UnseenUseError(message)
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class LayerIndex:
    """The perturbed layers of a model by the identity of their parameters.

    Attributes:
        layers: each layer by the id of its weight.
        names: the layers' names by the ids of weights and biases.
        parameters: weights and biases whose class is replaced by :class:`GuardedParameter`.
        checked: the shapes of inputs with which the model has run; the first call with new ones is checked.
    """

    def __init__(self, layers: Iterable[PerturbedLayer]) -> None:
        self.layers = {id(layer.weight): layer for layer in layers}
        owners = [
            (parameter, layer.name)
            for layer in self.layers.values()
            for parameter in (layer.weight, layer.bias)
            if parameter is not None
        ]
        self.names = {id(parameter): name for parameter, name in owners}
        # Parameters of another class keep it. GuardedParameter: another population runs the model.
        self.parameters = [
            parameter for parameter, _ in owners if type(parameter) in {nn.Parameter, GuardedParameter}
        ]
        self.checked: set[object] = set()


class MemberFunctionMode(TorchFunctionMode):
    """A context in which layer functions use each member's parameters."""

    def __init__(
        self,
        index: LayerIndex,
        noise: Mapping[str, LayerNoise],
        *,
        rows: int,
        members: int,
        sigma: float,
        antithetic: bool,
    ) -> None:
        super().__init__()
        self._layers, self._names, self._parameters = index.layers, index.names, index.parameters
        self._noise, self._rows, self._members = noise, rows, members
        self._sigma, self._antithetic = sigma, antithetic
        self._used: set[str] = set()
        self.calls: dict[str, list[LayerCall]] = {}
        """Calls of the layers that learn from rows, by layer name."""

    @override
    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no hints
        for parameter in self._parameters:
            parameter.__class__ = GuardedParameter
        return self

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for parameter in self._parameters:
            parameter.__class__ = nn.Parameter
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch has no hints
        if error is not None and isinstance(error.__context__, UnseenUseError):
            raise error.__context__ from None  # torch.compile raises an error of many lines in its place

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
            if layer is not None and layer.is_own_parameter and func is functional.layer_norm:
                return self._normalize_own(*args, **kwargs)  # type: ignore[arg-type]  # torch's arguments
            if layer is not None:
                return self._call_layer(layer, read(*args, **kwargs))
        decomposition = DECOMPOSITIONS.get(func)
        if decomposition is not None and any(id(leaf) in self._names for leaf in tree_leaves((args, kwargs))):
            return decomposition(self._call_linear, *args, **kwargs)
        if func is functional.embedding and (layer := self._layers.get(id(args[1]))):
            return self._embed(layer, *args, **kwargs)  # type: ignore[arg-type]  # torch's arguments
        if func in ELEMENTWISE and (layer := self._find_own_parameter(args)):
            return self._apply_elementwise(func, layer, args, kwargs)
        self._refuse_use(func, args)
        if kwargs:
            self._refuse_use(func, kwargs.values())
        return func(*args, **kwargs)

    def check_layers_used(self, model: str, optional: Container[str]) -> None:
        """Check that the model called all perturbed layers but optional ones.

        Raises:
            ValueError: it did not call a layer.
        """
        if len(self._used) == len(self._layers):
            return
        unused_layers = (
            layer
            for layer in self._layers.values()
            if layer.name not in self._used and layer.name not in optional
        )
        # Of a module with several weights, the name of the module.
        names = (layer.name if layer.is_own_parameter else layer.module_name for layer in unused_layers)
        unused = list(dict.fromkeys(names))
        if not unused:
            return
        if not self._used:
            message = (
                f"{model} used none of its {len(self._layers)} perturbed layers: pass the plain model to "
                "perturb(), not a compiled or scripted one"
            )
            raise ValueError(message)
        message = (
            f"{model} did not use the perturbed layers {', '.join(unused)}: call perturb() again if they "
            f"were replaced, or pass optional={unused} or exclude={unused} to perturb()"
        )
        raise ValueError(message)

    def _find_own_parameter(self, values: Iterable[object]) -> PerturbedLayer | None:
        """Return the layer of a module's own parameter that is one of the values, or None."""
        layers = (self._layers.get(id(value)) for value in values)
        return next((layer for layer in layers if layer is not None and layer.is_own_parameter), None)

    def _apply_elementwise(
        self,
        func: Callable[..., object],
        layer: PerturbedLayer,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Tensor:
        """Compute an elementwise function of rows and a module's own parameter, such as x * scale."""
        rows = [value for value in args if isinstance(value, Tensor) and value is not layer.weight]
        x, shape = rows[0] if rows else layer.weight, layer.weight.shape
        space = (
            x.dim() - 2 if func is functional.prelu else 0
        )  # axes after the channels, which prelu's weight has
        has_leading_one = len(shape) == x.dim() and shape[0] == 1
        if (
            len(rows) != 1
            or kwargs
            or x.shape[0] != self._rows
            or not (has_leading_one or len(shape) + space < x.dim())
        ):
            message = (
                f"parameter {layer.name!r} of shape {list(shape)} is used by {resolve_name(func)} without "
                f"rows: use it with a tensor [{self._rows}, ...], or freeze it with requires_grad_(False)"
            )
            raise RowsError(message)
        shape = shape[1:] if has_leading_one else shape
        self._note_use(layer, 0)

        def apply(part: Tensor, sigma: float) -> Tensor:
            values = self._member_values(layer, sigma)
            if layer.weight.dim() == 0:  # which does not promote, as a tensor with axes would
                values = values.to(torch.result_type(x, layer.weight))
            values = values.view(-1, *[1] * (x.dim() - 1 - len(shape) - space), *shape, *[1] * space)
            grouped = part.unflatten(0, (-1, self._members))
            if func is functional.prelu:
                return grouped.where(grouped > 0, grouped * values).flatten(0, 1)
            y = func(*(values if arg is layer.weight else grouped if arg is x else arg for arg in args))
            assert isinstance(y, Tensor)  # noqa: S101  elementwise functions return one
            return y.flatten(0, 1)

        with self._using_parameters():
            if not self._antithetic:
                return apply(x, self._sigma)
            half = len(x) // 2
            return torch.cat([apply(x[:half], self._sigma), apply(x[half:], -self._sigma)])

    def _normalize_own(
        self,
        x: Tensor,
        shape: Sequence[int],
        weight: Tensor,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Compute layer_norm with a module's own scale and shift."""
        y = functional.layer_norm(x, shape, eps=eps)
        for func, parameter in ((torch.mul, weight), (torch.add, bias)):
            if parameter is None:
                continue
            layer = self._layers.get(id(parameter))
            y = self._apply_elementwise(func, layer, (y, parameter), {}) if layer else func(y, parameter)
        return y

    def _embed(
        self,
        layer: PerturbedLayer,
        tokens: Tensor,
        table: Tensor,  # noqa: ARG002  torch's arguments
        padding_idx: int | None = None,  # noqa: ARG002  that of the module counts
        max_norm: float | None = None,
        **gradient_options: object,  # noqa: ARG002  no gradient is computed
    ) -> Tensor:
        """Look tokens up in the members' tables."""
        self._check_rows(layer, tokens)
        if max_norm is not None:
            message = f"layer {layer.name!r}: max_norm changes the weight in every call: leave it out"
            raise ValueError(message)
        self._note_use(layer, 0)
        with self._using_parameters():
            return self._look_up(layer, tokens)

    def _look_up(self, layer: PerturbedLayer, tokens: Tensor) -> Tensor:
        noise = self._noise[layer.name]
        return layer.embed(tokens, noise, self._members, self._sigma, antithetic=self._antithetic)

    def _forward(self, layer: PerturbedLayer, operator: AbstractOperator, x: Tensor) -> Tensor:
        noise = self._noise[layer.name]
        return layer.forward(operator, x, noise, self._members, self._sigma, antithetic=self._antithetic)

    def _member_values(self, layer: PerturbedLayer, sigma: float) -> Tensor:
        return layer.member_values(self._noise[layer.name], sigma)

    def _note_use(self, layer: PerturbedLayer, rows_axis: int) -> None:  # noqa: ARG002  for subclasses
        """Note that a layer is used, with the axis of its input that has the rows."""
        self._used.add(layer.name)

    def _using_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which perturbed parameters may be used."""
        return DisableTorchFunctionSubclass()

    def _check_rows(self, layer: PerturbedLayer, x: Tensor) -> None:
        if x.shape[0] != self._rows:
            message = (
                f"layer {layer.name!r} got an input of shape {list(x.shape)}, but the model got {self._rows} "
                "rows: keep the rows in the first axis, or in the second if positions are in the first"
            )
            raise RowsError(message)

    def _call_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute functional.linear, with each member's weight if it is perturbed."""
        layer = self._layers.get(id(weight))
        if layer is None:
            return functional.linear(x, weight, bias)
        return self._call_layer(layer, LayerArguments(Linear(), x, bias))

    def _call_layer(self, layer: PerturbedLayer, arguments: LayerArguments) -> Tensor:
        if arguments.bias is not layer.bias:
            message = (
                f"the weight of layer {layer.name!r} is used without its own bias: "
                f"pass exclude=[{layer.name!r}] to perturb(), or call the layer itself"
            )
            raise ValueError(message)
        operator, x = arguments.operator, arguments.x
        is_positions_first = (
            x.shape[0] != self._rows
            and x.dim() > 2  # noqa: PLR2004  [positions, rows, ..., features]
            and x.shape[1] == self._rows
            and (
                isinstance(operator, Linear)
                or (isinstance(operator, ChannelAffine) and not operator.trailing)
            )
        )
        if is_positions_first:
            x = x.transpose(0, 1)
        self._check_rows(layer, x)
        self._note_use(layer, int(is_positions_first))
        if layer.learns_from_rows:
            self.calls.setdefault(layer.name, []).append(LayerCall.of(operator, x))
        with self._using_parameters():
            y = self._forward(layer, operator, x)
        return y.transpose(0, 1) if is_positions_first else y

    def _refuse_use(self, func: Callable[..., object], values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, tuple | list):
                self._refuse_use(func, value)
            elif id(value) in self._names and func not in PROPERTIES:
                name = self._names[id(value)]
                message = (
                    f"a parameter of layer {name!r} is used by {resolve_name(func) or func}, which cannot be "
                    f"perturbed: pass exclude=[{name!r}] to perturb(), or call the layer itself"
                )
                raise ValueError(message)


class RecordedMode(MemberFunctionMode):
    """The mode while operations are recorded, for which parameters have to keep their class."""

    @override
    def __enter__(self) -> Self:
        self._parameters = []
        return super().__enter__()


class MemoryGuard(TorchDispatchMode):
    """Refuses operations on the memory of perturbed parameters.

    Below all of torch's functions, it sees scripted code, code that turns function modes off, and other
    tensors over this memory.

    Attributes:
        paused: whether operations are allowed, as those of the layers themselves.
        refusal: the message of the first operation that was refused, or ``""``.

    """

    def __init__(self, layers: Iterable[PerturbedLayer]) -> None:
        """Note where the parameters are."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no hints
        self.paused, self.refusal = False, ""
        with DisableTorchFunction():
            self._ranges = [
                (layer.name, memory)
                for layer in layers
                for parameter in (layer.weight, layer.bias)
                if parameter is not None and (memory := memory_range(parameter))
            ]

    @classmethod
    @override
    def is_infra_mode(cls) -> bool:
        """Let torch.compile compile in this mode; in modes that are no infrastructure it does not."""
        return True

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        """Do not load the compiler."""
        return False

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        in_backward = _current_autograd_node() is not None  # of a layer call, which was checked
        if not (self.paused or in_backward):
            with DisableTorchFunction():
                names = {name for value in tree_leaves((args, kwargs)) for name in self._names_at(value)}
            if names:
                name = min(names)
                self.refusal = self.refusal or (
                    f"a parameter of layer {name!r}, or a tensor that shares its memory, is used by {func} "
                    "outside of the layer: call the layer itself, without scripted code and other tensors, "
                    f"or pass exclude=[{name!r}] to perturb()"
                )
                raise ValueError(self.refusal)
        return func(*args, **(kwargs or {}))

    def _names_at(self, value: object) -> Iterator[str]:
        """Yield the names of the layers whose parameters share memory with a value."""
        if isinstance(value, Tensor) and (memory := memory_range(value)):
            for name, (start, stop) in self._ranges:
                if memory[0] < stop and start < memory[1]:
                    yield name


class RowsAxesMode(MemberFunctionMode):
    """A function mode that notes which axis of each layer's input has the rows, and perturbs nothing.

    It runs the model on another number of rows: an axis that had the same length by coincidence then has not.

    Attributes:
        rows_axes: the axes by the layers' names.
    """

    def __init__(self, index: LayerIndex, rows: int) -> None:
        super().__init__(index, {}, rows=rows, members=1, sigma=0.0, antithetic=False)
        self.rows_axes: dict[str, set[int]] = {}

    @override
    def _note_use(self, layer: PerturbedLayer, rows_axis: int) -> None:
        super()._note_use(layer, rows_axis)
        self.rows_axes.setdefault(layer.name, set()).add(rows_axis)

    @override
    def _forward(self, layer: PerturbedLayer, operator: AbstractOperator, x: Tensor) -> Tensor:
        y = operator.apply_shared(operator.from_batch(x, 1), layer.split_groups(layer.weight))
        return operator.to_batch(y, x)

    @override
    def _look_up(self, layer: PerturbedLayer, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, layer.weight)

    @override
    def _member_values(self, layer: PerturbedLayer, sigma: float) -> Tensor:
        return layer.weight.unsqueeze(0)


class FirstCallMode(MemberFunctionMode):
    """A function mode with a :class:`MemoryGuard`, which is too slow for every call.

    Attributes:
        rows_axes: which axes of the layers' inputs were taken for rows, by the layers' names.
    """

    @override
    def __enter__(self) -> Self:
        self.rows_axes: dict[str, set[int]] = {}
        self._guard = MemoryGuard(self._layers.values())
        self._guard.__enter__()  # type: ignore[no-untyped-call]  # torch has no hints
        return super().__enter__()

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._guard.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch has no hints
        if self._guard.refusal:  # the model may have caught the error
            raise ValueError(self._guard.refusal) from None

    @override
    def _call_layer(self, layer: PerturbedLayer, arguments: LayerArguments) -> Tensor:
        operator, axes = arguments.operator, arguments.x.dim()
        if layer.is_own_parameter and not isinstance(operator, ChannelAffine):
            message = (
                f"parameter {layer.name!r} of a {type(layer.module).__name__} is used as the weight of "
                f"{operator}: use torch's module for it, such as nn.Linear, or pass "
                f"exclude=[{layer.name!r}] to perturb()"
            )
            raise ValueError(message)
        has_no_rows = isinstance(operator, AbstractConvolution) and axes < layer.weight.dim()
        is_reversed = isinstance(operator, TransposedConvolution) != layer.has_input_axis_first
        if has_no_rows or is_reversed or operator.groups != layer.groups:
            message = (
                f"layer {layer.name!r} itself does not use its weight as this call does ({operator} on an "
                f"input of {axes} axes): call the layer itself, on all rows, or pass "
                f"exclude=[{layer.name!r}] to perturb()"
            )
            raise ValueError(message)
        if getattr(layer.module, "padding_idx", None) is not None:
            message = (
                f"the weight of embedding {layer.name!r} is also used as a linear layer, but its row "
                "padding_idx has no noise: create the embedding without padding_idx"
            )
            raise ValueError(message)
        return super()._call_layer(layer, arguments)

    @override
    def _note_use(self, layer: PerturbedLayer, rows_axis: int) -> None:
        super()._note_use(layer, rows_axis)
        self.rows_axes.setdefault(layer.name, set()).add(rows_axis)

    @override
    @contextmanager
    def _using_parameters(self) -> Iterator[None]:
        self._guard.paused = True
        try:
            with super()._using_parameters():
                yield
        finally:
            self._guard.paused = False


def _refuse_batch_statistics(args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise a ValueError for a BatchNorm that uses batch statistics, perturbed or not."""
    named = {**dict(zip(BATCH_NORM, args, strict=False)), **kwargs}
    if named.get("training") or named.get("running_mean") is None:
        message = (
            "BatchNorm normalizes across the population, which mixes the members: call model.eval() first, "
            "or use GroupNorm or LayerNorm"
        )
        raise ValueError(message)
