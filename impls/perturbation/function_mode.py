"""A torch function mode in which a plain model's layers use each member's weights.

The model is not modified. While it runs, a call of a torch layer function with a perturbed parameter becomes
a call of :meth:`~impls.perturbation.layer.PerturbedLayer.forward`, and functions of parameters with dense
noise are computed with each member's values. Any other function of a perturbed parameter raises an error, in
other threads too, and so does a layer that was not reached: no layer is silently left unperturbed. Some
calls, the first among them, run in a :class:`~impls.perturbation.guarded_mode.GuardedMode`, which also
refuses operations that a function mode does not see.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from typing_extensions import override

from esbench.errors import message_of
from impls.perturbation.decompositions import DECOMPOSITIONS, as_autocast
from impls.perturbation.layer import NORMALIZATIONS, LayerCall, LayerNoise, PerturbedLayer, RepeatedBatch
from impls.perturbation.layer_functions import (
    DTYPE_CASTS,
    ELEMENTWISE,
    EXPANSIONS,
    FEATURES_LAST,
    HANDLERS,
    PROPERTIES,
    LayerArguments,
    refuse_batch_statistics,
)
from impls.perturbation.member_tensors import (
    CHOSEN,
    FIRST,
    SECOND,
    UNKNOWN,
    MemberTensor,
    RowsAxis,
    compute_per_member,
    spread,
)
from impls.perturbation.operators import (
    AbstractConvolution,
    AbstractOperator,
    ChannelAffine,
    Linear,
    TransposedConvolution,
    TransposedLinear,
)
from impls.perturbation.products import PRODUCTS, TRANSPOSITIONS, read_product


class UnseenUseError(ValueError):
    """A perturbed parameter is used where the function mode is not active."""


class RowsError(ValueError):
    """An input of a layer has no axis of rows."""


class GuardedTensor(Tensor):
    """The class of values that a model computes from perturbed parameters alone.

    A function mode only sees functions of its own thread. In other threads this class refuses them, while
    ``torch.compile`` compiles them, and in later calls.
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
            name = resolve_name(func) or func
            message = (
                f"a perturbed parameter, or a value computed from it, is used by {name} in another thread, "
                "in compiled code or in a later call: run all layers in the thread that calls the "
                "population, do not compile them, and keep no such values"
            )
            raise UnseenUseError(message)
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class GuardedParameter(GuardedTensor, nn.Parameter):
    """The class of perturbed parameters while their model runs."""


RowsAxes = Mapping[str, Sequence[RowsAxis | torch.Size]]
"""Where the inputs of a layer have their rows, by its name; a size is that of an input without rows.

Layers that always have them in the first axis are left out.
"""


@dataclasses.dataclass
class CallHistory:
    """What earlier calls of a model on inputs of the same shapes have shown.

    Attributes:
        rows_axes: where the inputs of its layers have their rows, see :data:`RowsAxes`; None before the first
            call.
        calls: how often the model has run.
        uses: how often a layer, by its name, got an input of a shape, at most, in one of these calls.
    """

    rows_axes: RowsAxes | None = None
    calls: int = 0
    uses: dict[tuple[str, torch.Size], int] = dataclasses.field(default_factory=dict)


class LayerIndex:
    """The perturbed layers of a model by the identity of their parameters.

    Attributes:
        layers: each layer by the id of its weight.
        names: the layers' names by the ids of weights and biases.
        biases: each layer with a bias by the id of its bias.
        parameters: weights and biases whose class is replaced by :class:`GuardedParameter`.
        histories: those of the calls of the model, by the shapes of its inputs.
        checked_operators: the layers' names, their operators and the axes of their inputs in these calls.
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
        self.biases = {id(layer.bias): layer for layer in self.layers.values() if layer.bias is not None}
        # Parameters of another class keep it. GuardedParameter: another population runs the model.
        self.parameters = [
            parameter for parameter, _ in owners if type(parameter) in {nn.Parameter, GuardedParameter}
        ]
        self.histories = defaultdict[object, CallHistory](CallHistory)
        self.checked_operators: set[tuple[str, AbstractOperator, int]] = set()


class MemberFunctionMode(TorchFunctionMode):
    """A context in which layer functions use each member's parameters."""

    def __init__(  # noqa: PLR0913  what the layers of a call need
        self,
        index: LayerIndex,
        noise: Mapping[str, LayerNoise],
        *,
        rows: int,
        members: int,
        sigma: float,
        antithetic: bool,
        rows_axes: RowsAxes,
        batches: Mapping[int, RepeatedBatch] = MappingProxyType({}),
    ) -> None:
        """Store the arguments; ``batches`` has the batches that all members see, by the ids of their rows."""
        super().__init__()
        self._rows_axes, self._batches = rows_axes, batches
        self._layers, self._names, self._parameters = index.layers, index.names, index.parameters
        self._biases, self._checked_operators = index.biases, index.checked_operators
        self._derived: dict[int, MemberTensor] = {}
        self._noise, self._rows, self._members = noise, rows, members
        self._sigma, self._antithetic = sigma, antithetic
        self._sides = 1 + antithetic
        self._used: set[str] = set()
        self.uses: dict[tuple[str, torch.Size], int] = {}
        """How often each layer got an input of a shape."""
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
            raise error.__context__ from None  # our own error; torch.compile made another of it

    @override
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # The function has no perturbed parameters: their class refuses them.
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        if func is functional.batch_norm:
            refuse_batch_statistics(args, kwargs)
        position, read = HANDLERS.get(func, (0, None))
        if read is not None:
            weight = args[position] if len(args) > position else kwargs.get("weight")
            layer = self._layers.get(id(weight))
            if layer is not None and (not layer.is_own_parameter or func in FEATURES_LAST):
                rows = args[0] if args else kwargs.get("input")
                if id(rows) in self._names or id(rows) in self._derived:
                    return self._call_on_members(func, args, kwargs)
                return self._call_layer(layer, read(*args, **kwargs))
        return self._call_other(func, args, kwargs)

    def _call_other(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Compute a function that is not that of a layer with a single weight."""
        decomposition = DECOMPOSITIONS.get(func)
        if decomposition is not None and any(id(leaf) in self._names for leaf in tree_leaves((args, kwargs))):
            self._refuse_values_as_inputs(func, args[:3])
            return decomposition(self._call, *args, **kwargs)
        if func is functional.embedding:
            layer = self._layers.get(id(args[1] if len(args) > 1 else kwargs.get("weight")))
            if layer is not None and layer.groups:
                return self._embed(layer, *args, **kwargs)  # type: ignore[arg-type]  # torch's arguments
        if self._has_perturbed(args) or (kwargs and self._has_perturbed(kwargs.values())):
            return self._use_parameters(func, args, kwargs)
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

    def check_outputs(self, y: object) -> None:
        """Check that each tensor that the model returns has rows, and is no parameter.

        Raises:
            ValueError: a tensor is a perturbed parameter, or computed from such parameters alone.
        """
        if isinstance(y, Tensor) and not self._has_perturbed((y,)):
            return
        for leaf in tree_leaves(y):
            if (member_tensor := self._find(leaf)) is not None:
                message = (
                    f"the model returned a tensor of shape {list(member_tensor.tensor.shape)} that depends "
                    f"on parameter {member_tensor.name!r} and not on the rows: return it for each row, for "
                    "example with expand()"
                )
                raise ValueError(message)

    def _has_perturbed(self, values: Iterable[object]) -> bool:
        """Return whether a perturbed parameter, or a value computed from it, is among these values."""
        for value in values:
            if isinstance(value, tuple | list):
                if self._has_perturbed(value):
                    return True
            elif id(value) in self._names or id(value) in self._derived:
                return True
        return False

    def _find(self, value: object) -> MemberTensor | None:
        """Return a perturbed parameter, or a value computed from it, as a member tensor; else None."""
        if id(value) in self._derived:
            return self._derived[id(value)]
        name = self._names.get(id(value))
        if name is None:
            return None
        assert isinstance(value, Tensor)  # noqa: S101  parameters are tensors
        return MemberTensor(value, name, self._layers.get(id(value), self._biases.get(id(value))))

    def _use_parameters(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Compute a function of perturbed parameters, or refuse it."""
        if func in PROPERTIES:
            return func(*args, **kwargs)
        names = [] if args else ["input"]
        names += ["size"] if func in EXPANSIONS else []
        args = [*args, *(kwargs[name] for name in names if name in kwargs)]
        kwargs = {name: value for name, value in kwargs.items() if name not in names}
        y: Tensor | None = None
        if func in TRANSPOSITIONS:
            y = self._transpose(func, args, kwargs)
        elif func in EXPANSIONS:
            y = self._expand_to_rows(func, args)
        elif func is Tensor.__getitem__:
            y = self._look_up_index(*args)
        elif func in PRODUCTS and not kwargs:
            y = self._multiply(func, args)
        elif func in ELEMENTWISE and not kwargs:
            y = self._compute_elementwise(func, args)
        return self._compute_per_member(func, args, kwargs) if y is None else y

    def _transpose(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Tensor | None:
        """Return a perturbed matrix transposed, or None if the function does something else."""
        weight = self._find(args[0])
        if weight is None or not self._is_matrix(weight.tensor):
            return None
        with self._using_parameters():
            view = func(*args, **kwargs)
            assert isinstance(view, Tensor)  # noqa: S101  these functions return one
            if view.stride() != weight.tensor.stride()[::-1] or view.shape != weight.tensor.shape[::-1]:
                return None
        return self._note_derived(weight._replace(tensor=view, is_transposed=not weight.is_transposed))

    def _is_matrix(self, value: object) -> bool:
        """Return whether a value is the weight of a layer, or its transpose, and a matrix."""
        member_tensor = self._find(value)
        return (
            member_tensor is not None
            and member_tensor.layer is not None
            and member_tensor.tensor.dim() == 2  # noqa: PLR2004  a matrix's axes
            and not isinstance(member_tensor.layer.module, NORMALIZATIONS)
        )

    def _multiply(self, func: Callable[..., object], args: Sequence[object]) -> Tensor | None:
        """Multiply rows with each member's matrix, or return None if the function has other arguments."""
        if func is not torch.einsum and self._is_matrix(args[1]) and id(args[0]) in self._derived:
            return self._call_on_members(func, args, {})
        product = read_product(func, args, self._is_matrix)
        weight = None if product is None else self._find(product.weight)
        if product is None or weight is None or weight.layer is None:
            return None
        operator = TransposedLinear() if product.summed == int(weight.is_transposed) else Linear()
        y = self._call_layer(weight.layer, LayerArguments(operator, product.x, product.bias))
        return y if product.order is None else y.permute(*product.order)

    def _call_on_members(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Tensor:
        """Call a layer function on an input without rows that differs from member to member."""
        member_tensor = self._find(args[0])
        assert member_tensor is not None  # noqa: S101  the caller has found it
        return self._run_on_members(
            member_tensor.name,
            self._values(func, member_tensor),
            lambda values: self.__torch_function__(func, (), (values, *args[1:]), kwargs),
        )

    def _run_on_members(self, name: str, values: Tensor, call: Callable[[Tensor], object]) -> Tensor:
        """Call a layer function on values [sides * members, *shape] as rows; return its member tensor."""
        before = self._rows, self._rows_axes
        self._rows, self._rows_axes = len(values), {}
        try:
            y = call(values)
        finally:
            self._rows, self._rows_axes = before
        assert isinstance(y, Tensor)  # noqa: S101  layer functions return one
        return self._derive(name, y)

    def _repeat_for_members(self, x: Tensor) -> Tensor:
        """Return a tensor without rows for each member, [sides * members, *shape]."""
        return x.expand(self._sides * self._members, *x.shape)

    def _values(self, func: Callable[..., object], member_tensor: MemberTensor) -> Tensor:
        """Return the values of all members, [sides * members, *shape].

        Raises:
            ValueError: the tensor is a weight whose noise is not dense.
        """
        if member_tensor.values is not None:
            return member_tensor.values
        layer = member_tensor.layer
        assert layer is not None  # noqa: S101  parameters have one
        parameter = layer.bias if id(member_tensor.tensor) in self._biases else layer.weight
        assert parameter is not None  # noqa: S101  it was found by its id
        values = self._parameter_values(layer, parameter)
        if values is None:
            message = (
                f"a parameter of layer {layer.name!r} is used by {resolve_name(func) or func}, which cannot "
                f"be perturbed: pass exclude=[{layer.name!r}] to perturb(), or call the layer itself"
            )
            raise ValueError(message)
        if parameter is layer.weight:
            self._used.add(layer.name)
        return values.mT if member_tensor.is_transposed else values

    def _parameter_values(self, layer: PerturbedLayer, parameter: Tensor) -> Tensor | None:
        """Return the values of a parameter with dense noise, [sides * members, *shape], else None."""
        change = layer.dense_parameter_noise(parameter, self._noise[layer.name])
        if change is None:
            return None
        with self._using_parameters():
            plain = parameter.detach()  # it gets no gradient
            sigma = self._sigma * layer.sigma_ratio
            values = torch.add(plain, change, alpha=sigma)
            if not self._antithetic:
                return values
            return torch.cat([values, torch.sub(plain, change, alpha=sigma)])

    def _derive(self, name: str, values: Tensor) -> Tensor:
        """Return what the model gets for values of all members without rows: those of the first."""
        with self._using_parameters():
            first = values[0]
        return self._note_derived(MemberTensor(first, name, None, values=values))

    def _note_derived(self, member_tensor: MemberTensor) -> Tensor:
        member_tensor.tensor.__class__ = GuardedTensor
        self._derived[id(member_tensor.tensor)] = member_tensor
        return member_tensor.tensor

    def _compute_elementwise(self, func: Callable[..., object], args: Sequence[object]) -> Tensor | None:
        """Compute an elementwise function of rows and member values, such as x * scale.

        Return None if it has other arguments.
        """
        parameters = [member_tensor for arg in args if (member_tensor := self._find(arg)) is not None]
        rows = [arg for arg in args if isinstance(arg, Tensor) and self._find(arg) is None]
        if len(parameters) != 1 or len(rows) != 1:
            return None
        (member_tensor,), (x,) = parameters, rows
        axis = self._rows_axis(member_tensor.name, x)
        if axis is None:
            return None
        values = self._values(func, member_tensor)
        with self._using_parameters():
            if not member_tensor.tensor.dim():  # which does not promote, as a tensor with axes would
                values = values.to(torch.result_type(x, member_tensor.tensor))
            if func is functional.prelu:  # the channels are the second axis
                values = values.view(*values.shape, *[1] * (x.dim() - 2))
            spread_values = spread(values, axis, x.dim(), self._sides, self._members)
            if spread_values is None:
                return None
            split = axis.split(x, self._sides, self._members)
            if func is functional.prelu:
                split, spread_values = as_autocast(split, spread_values)
                return axis.join(split.where(split > 0, split * spread_values))
            substitutes = {id(x): split, id(member_tensor.tensor): spread_values}
            y = func(*(substitutes.get(id(arg), arg) for arg in args))
            assert isinstance(y, Tensor)  # noqa: S101  elementwise functions return one
            return axis.join(y)

    def _expand_to_rows(self, func: Callable[..., object], args: Sequence[object]) -> Tensor | None:
        """Repeat member values for each row, or return None if the function has another result."""
        member_tensor = self._find(args[0])
        if member_tensor is None:
            return None
        sizes, like = _read_sizes(args[1:]), args[1]
        shape = member_tensor.tensor.shape
        shape = torch.Size([*[1] * (len(sizes) - len(shape)), *shape])
        pairs = zip(sizes, shape, strict=True)
        expanded = torch.Size(n * old if func is Tensor.repeat else old if n < 0 else n for n, old in pairs)
        expansion = expansion_of(member_tensor.name)
        if isinstance(like, Tensor):
            axis = self._rows_axis(member_tensor.name, like)
        elif expansion in self._rows_axes:
            axis = self._rows_axis(expansion, torch.empty(expanded, device="meta"))
        else:
            axes = (axis for axis in (FIRST, SECOND) if axis.is_axis_of(expanded, self._rows))
            axis = next((axis for axis in axes if shape[axis.axis] == 1), None)
        if axis is None or shape[axis.axis] != 1:
            return None
        values, at = self._values(func, member_tensor), axis.axis
        repeats, sizes[at] = self._rows // len(values), 1
        with self._using_parameters():
            values = values.reshape(len(values), *shape)
            values = values.repeat(1, *sizes) if func is Tensor.repeat else values.expand(-1, *sizes)
            one_repeat = spread(values, axis, len(sizes), self._sides, self._members)
            assert one_repeat is not None  # noqa: S101  it has the length 1 at this axis
            split = axis.before, self._sides, repeats, self._members, axis.after
            # A copy, because the values themselves are not rows.
            return axis.join(
                one_repeat.expand(*one_repeat.shape[:at], *split, *one_repeat.shape[at + 5 :])
            ).clone()

    def _look_up_index(self, weight: object, index: object) -> Tensor | None:
        """Return rows of a layer's table, as an Embedding does, or None for another index or parameter."""
        layer = self._layers.get(id(weight))
        if layer is None or not layer.groups or not isinstance(index, Tensor) or not self._is_matrix(weight):
            return None
        if index.dtype in {torch.bool, torch.uint8}:  # which are masks
            return None
        return self._embed(layer, index, layer.weight)

    def _compute_per_member(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Apply a function without a handler of its own to each member's values of the parameters.

        The parameters must have dense noise.
        """
        leaves, spec = tree_flatten((args, kwargs))
        values: dict[int, Tensor] = {}
        axes: dict[int, RowsAxis] = {}
        name = ""
        for index, leaf in enumerate(leaves):
            if (member_tensor := self._find(leaf)) is not None:
                values[index], name = self._values(func, member_tensor), member_tensor.name
        may_have_rows = 0 not in values or func not in DTYPE_CASTS  # parameter.to(x) reads only x's dtype
        for index, leaf in enumerate(leaves):
            if index not in values and isinstance(leaf, Tensor) and may_have_rows:
                axis = self._rows_axis(name, leaf)
                axes |= {} if axis is None else {index: axis}
        changes_first = self._changes_first(func, args, kwargs)

        def call(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401  torch's arguments
            y = func(*args, **kwargs)
            return args[0] if changes_first else y

        try:
            with self._using_parameters():
                y = compute_per_member(call, leaves, spec, values, axes, self._sides, self._members)
        except Exception as error:
            message = (
                f"parameter {name!r} is used by {resolve_name(func) or func}, which cannot be computed for "
                f"each member ({message_of(error)}): freeze it with requires_grad_(False), or pass "
                f"exclude=[{name!r}] to perturb()"
            )
            raise ValueError(message) from error
        if axes:
            return args[0] if changes_first else y
        # Without rows the result is again one value per member.
        return tree_map(functools.partial(self._derive, name), y)

    def _embed(
        self,
        layer: PerturbedLayer,
        input: Tensor,  # noqa: A002  torch's name
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        **gradient_options: object,  # noqa: ARG002  no gradient is computed
    ) -> Tensor:
        """Look tokens up in the members' tables."""
        axis = self._find_rows(layer, input)
        if axis is None:
            return self._run_on_members(
                layer.name,
                self._repeat_for_members(input),
                lambda values: self._embed(layer, values, weight, padding_idx, max_norm),
            )
        if max_norm is not None:
            message = f"layer {layer.name!r}: max_norm changes the weight in every call: leave it out"
            raise ValueError(message)
        self._used.add(layer.name)
        with self._using_parameters():
            y = self._look_up(layer, axis.to_first(input, self._sides, self._members))
            return axis.from_first(y, self._sides, self._members)

    def _look_up(self, layer: PerturbedLayer, tokens: Tensor) -> Tensor:
        noise, sigma = self._noise[layer.name], self._sigma * layer.sigma_ratio
        return layer.embed(tokens, noise, self._members, sigma, antithetic=self._antithetic)

    def _forward(
        self, layer: PerturbedLayer, operator: AbstractOperator, x: Tensor, *, has_bias: bool
    ) -> Tensor:
        """Compute a layer function of rows with each member's weight, and its bias or no bias."""
        noise, sigma = self._noise[layer.name], self._sigma * layer.sigma_ratio
        if not has_bias:
            noise = dataclasses.replace(noise, bias=None)
        return layer.forward(
            operator,
            x,
            noise,
            self._members,
            sigma,
            antithetic=self._antithetic,
            batch=self._batches.get(id(x)),
        )

    def _using_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which perturbed parameters may be used."""
        return DisableTorchFunctionSubclass()

    def _call(self, func: Callable[..., object], *args: object) -> Any:  # noqa: ANN401  the function's result
        """Compute a function of torch, with each member's parameters if they are perturbed."""
        return self.__torch_function__(func, (), args)

    def _call_layer(self, layer: PerturbedLayer, arguments: LayerArguments) -> Tensor:
        operator, x, bias = arguments
        use = layer.name, operator, x.dim()
        if use not in self._checked_operators:
            self._check_operator(layer, operator, x.dim())
            self._checked_operators.add(use)
        has_bias = bias is layer.bias
        if not has_bias and not _takes_features_last(operator):
            message = (
                f"the weight of layer {layer.name!r} is used without its own bias: "
                f"pass exclude=[{layer.name!r}] to perturb(), or call the layer itself"
            )
            raise ValueError(message)
        axis = self._find_rows(layer, x)
        if axis is None:
            return self._run_on_members(
                layer.name,
                self._repeat_for_members(x),
                lambda values: self._call_layer(layer, arguments._replace(x=values)),
            )
        if axis == SECOND and not _takes_features_last(operator):
            raise self._without_rows(layer.name, x)
        rows = x if axis is FIRST else axis.to_first(x, self._sides, self._members)
        self._used.add(layer.name)
        if layer.learns_from_rows:
            self.calls.setdefault(layer.name, []).append(LayerCall.of(operator, rows))
        with self._using_parameters():
            y = self._forward(layer, operator, rows, has_bias=has_bias)
            if axis is not FIRST:
                y = axis.from_first(y, self._sides, self._members)
        if has_bias or bias is None:
            return y
        shifted: Tensor = self._call(torch.add, y, bias)
        return shifted

    def _check_operator(self, layer: PerturbedLayer, operator: AbstractOperator, axes: int) -> None:
        """Check that a layer's weight is used as the layer itself does, on an input with that many axes.

        Raises:
            ValueError: it is not.
        """
        is_reversed = isinstance(operator, TransposedConvolution) != layer.has_input_axis_first
        axes_with_rows = layer.weight.dim() + isinstance(operator, ChannelAffine)
        is_of_torch = isinstance(operator, AbstractConvolution | Linear | ChannelAffine)
        has_no_rows = is_of_torch and axes < axes_with_rows
        is_matrix = layer.weight.dim() == 2  # noqa: PLR2004  a matrix's axes
        is_other = operator.groups != layer.groups and not (layer.is_own_parameter and is_matrix)
        if has_no_rows or is_reversed or is_other or (isinstance(operator, Linear) and not is_matrix):
            message = (
                f"layer {layer.name!r} itself does not use its weight as this call does ({operator} on an "
                f"input of {axes} axes): call the layer itself, on all rows, or pass "
                f"exclude=[{layer.name!r}] to perturb()"
            )
            raise ValueError(message)
        if isinstance(operator, TransposedLinear) and (
            layer.learns_from_rows or layer.scheme.draws_binary_weights
        ):
            message = (
                f"{layer.scheme} of layer {layer.name!r} cannot multiply by the transpose of its weight: use "
                "another scheme for this layer"
            )
            raise ValueError(message)
        if layer.padding_idx is not None:
            message = (
                f"the weight of embedding {layer.name!r} is also used as a linear layer, but its row "
                "padding_idx has no noise: create the embedding without padding_idx"
            )
            raise ValueError(message)

    def _find_rows(self, layer: PerturbedLayer, x: Tensor) -> RowsAxis | None:
        """Return where an input of a layer has its rows, or None if it is the same for all rows.

        Raises:
            RowsError: it has another number of rows.
        """
        use = layer.name, x.shape
        self.uses[use] = self.uses.get(use, 0) + 1
        axis = self._rows_axis(layer.name, x)
        if axis is None and x.shape not in self._rows_axes.get(layer.name, ()):
            raise self._without_rows(layer.name, x)
        return axis

    def _without_rows(self, name: str, x: Tensor) -> "RowsError":
        """Return the error for an input of a layer that has no rows, or a choice of them."""
        message = f"layer {name!r} got an input of shape {list(x.shape)}, "
        if self._rows_axes.get(name) is CHOSEN:
            message += (
                "whose length depends on the values in the rows, as in a mixture of experts: evaluate each "
                "expert on all rows, and multiply its output by 0 where it is not chosen"
            )
        else:
            message += (
                f"but the model got {self._rows} rows: keep all rows in the first axis, or in the second if "
                "positions are in the first"
            )
        return RowsError(message)

    def _changes_first(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> bool:
        """Return whether a function changes its first argument.

        Raises:
            ValueError: this is a perturbed parameter, or a value computed from it.
        """
        label = getattr(func, "__name__", "")  # that of += is add_
        changes_first = label == "__setitem__" or (label.endswith("_") and not label.endswith("__"))
        changes_parameter = kwargs.get("inplace") is True and id(args[0]) in self._names
        if not (changes_first or changes_parameter) and kwargs.get("out") is None:
            return False
        member_tensor = self._find(args[0])
        if member_tensor is not None or not changes_first:
            name = "" if member_tensor is None else f" {member_tensor.name!r}"
            message = (
                f"parameter{name} is changed by {resolve_name(func)}: freeze it with requires_grad_(False), "
                "or pass exclude to perturb()"
            )
            raise ValueError(message)
        return True

    def _rows_axis(self, name: str, x: Tensor) -> RowsAxis | None:
        """Return where an input of a layer has its rows, or None if it has none.

        Raises:
            RowsError: it may have them in several axes, in which the layer has had rows, or it is a choice
                of rows.
        """
        if (axes := self._rows_axes.get(name)) is not None:
            if axes is CHOSEN:
                raise self._without_rows(name, x)
            axes = (FIRST,) if axes is UNKNOWN and x.dim() <= 2 else axes  # noqa: PLR2004  [rows, features]
            matching = [
                axis
                for axis in axes
                if (axis.is_axis_of(x.shape, self._rows) if isinstance(axis, RowsAxis) else axis == x.shape)
            ]
            if len(matching) > 1:
                message = (
                    f"layer {name!r} got an input of shape {list(x.shape)}, in which another axis is as long "
                    f"as the {self._rows} rows by coincidence: use another number of repeats or members"
                )
                raise RowsError(message)
            if matching:
                (axis,) = matching
                return axis if isinstance(axis, RowsAxis) else None
        if x.dim() and x.shape[0] == self._rows:
            return FIRST
        if x.dim() > 2 and x.shape[1] == self._rows:  # noqa: PLR2004  [positions, rows, ..., features]
            return SECOND
        return None

    def _refuse_values_as_inputs(self, func: Callable[..., object], inputs: Sequence[object]) -> None:
        for value in tree_leaves(inputs):
            if id(value) in self._derived:
                message = (
                    f"{resolve_name(func)} got an input that depends on parameter "
                    f"{self._derived[id(value)].name!r} and not on the rows: expand() it to the rows first"
                )
                raise ValueError(message)


def _takes_features_last(operator: AbstractOperator) -> bool:
    """Return whether an operator acts on the last axes, whatever axes are before them."""
    return isinstance(operator, Linear) or (isinstance(operator, ChannelAffine) and not operator.trailing)


def expansion_of(name: str) -> str:
    """Return the name that stands for a parameter after expand() or repeat() among the inputs of layers."""
    return f"{name} expanded"


def _read_sizes(args: Sequence[object]) -> list[int]:
    """Return the sizes that expand() and repeat() take as ints, as a sequence, or as those of a tensor."""
    (first, *_) = args
    sizes = first.shape if isinstance(first, Tensor) else first if isinstance(first, Sequence) else args
    return [size for size in sizes if isinstance(size, int)]
