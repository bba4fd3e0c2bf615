"""Function modes for some calls of a model: those that are recorded, guarded, or run on a few rows.

A function mode does not see scripted code, code that turns function modes off, and other tensors over a
parameter's memory. :class:`GuardedMode` finds them, but is too slow for every call.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, _current_autograd_node
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from impls.perturbation.function_mode import LayerIndex, MemberFunctionMode, expansion_of
from impls.perturbation.layer import PerturbedLayer, memory_range
from impls.perturbation.layer_functions import EXPANSIONS
from impls.perturbation.member_tensors import FIRST, MemberTensor, RowsAxis
from impls.perturbation.operators import AbstractOperator, Linear


class RecordedMode(MemberFunctionMode):
    """The mode while operations are recorded, for which tensors have to keep their class."""

    @override
    def _note_derived(self, member_tensor: MemberTensor) -> Tensor:
        self._derived[id(member_tensor.tensor)] = member_tensor
        return member_tensor.tensor

    @override
    def __enter__(self) -> Self:
        self._parameters = []
        return super().__enter__()


WRITTEN_OUT_BYTES, WRITTEN_OUT_BYTES_OF_DENSE = 2**20, 2**24
"""The most bytes of all members' weights of a layer with which one product is the fastest forward; the second
number is for noise that takes at least as many bytes itself."""


class PreparedMode(RecordedMode):
    """The mode while a forward is recorded for many calls with one noise.

    Small linear layers use the members' written-out weights, which are then computed once for all calls.
    """

    @override
    def _forward(
        self, layer: PerturbedLayer, operator: AbstractOperator, x: Tensor, *, has_bias: bool
    ) -> Tensor:
        # In narrow dtypes rounding of the sums would change the noise.
        is_wide = layer.weight.itemsize >= 4 and not torch.is_autocast_enabled(x.device.type)  # noqa: PLR2004  bytes
        noise, sigma = self._noise[layer.name], self._sigma * layer.sigma_ratio
        size = self._members * layer.weight.nbytes
        limit = WRITTEN_OUT_BYTES_OF_DENSE if noise.weight.nbytes >= size else WRITTEN_OUT_BYTES
        if not (isinstance(operator, Linear) and is_wide and self._sides * size <= limit):
            return super()._forward(layer, operator, x, has_bias=has_bias)
        if not has_bias:
            noise = replace(noise, bias=None)
        return layer.forward_written_out(
            operator, x, noise, self._members, sigma, antithetic=self._antithetic, reuses_noise=True
        )


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

    def protect(self, name: str, tensor: Tensor) -> None:
        """Refuse operations on the memory of a tensor, too."""
        if (memory := memory_range(tensor)) is not None:
            self._ranges.append((name, memory))

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


class GuardedMode(MemberFunctionMode):
    """A function mode with a :class:`MemoryGuard`, which is too slow for every call."""

    @override
    def __enter__(self) -> Self:
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
    def _note_derived(self, member_tensor: MemberTensor) -> Tensor:
        if member_tensor.values is not None:
            self._guard.protect(member_tensor.name, member_tensor.values)
        return super()._note_derived(member_tensor)

    @override
    @contextmanager
    def _using_parameters(self) -> Iterator[None]:
        self._guard.paused = True
        try:
            with super()._using_parameters():
                yield
        finally:
            self._guard.paused = False


class InputsMode(GuardedMode):
    """A function mode that notes the inputs of the layers, and perturbs nothing.

    Attributes:
        inputs: the inputs by the layers' names, in the order of the calls.
    """

    def __init__(self, index: LayerIndex, rows: int) -> None:
        super().__init__(index, {}, rows=rows, members=1, sigma=0.0, antithetic=False, rows_axes={})
        self.inputs: dict[str, list[Tensor]] = {}

    @override
    def _find_rows(self, layer: PerturbedLayer, x: Tensor) -> RowsAxis:
        self.inputs.setdefault(layer.name, []).append(x)
        return FIRST

    @override
    def _forward(
        self, layer: PerturbedLayer, operator: AbstractOperator, x: Tensor, *, has_bias: bool
    ) -> Tensor:
        weight = layer.split_groups(layer.weight)
        if layer.groups is None and operator.groups is not None:
            weight = weight.unsqueeze(0)
        y = operator.apply_shared(operator.from_batch(x, 1), weight)
        return operator.to_batch(y, x)

    @override
    def _look_up(self, layer: PerturbedLayer, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, layer.weight)

    @override
    def _call_on_members(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Tensor:
        with self._using_parameters():
            y = func(*args, **kwargs)
        assert isinstance(y, Tensor)  # noqa: S101  layer functions return one
        self._note_values(y, args)
        return y

    @override
    def _use_parameters(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        leaves = tree_leaves((args, kwargs))
        names = [tensor.name for leaf in leaves if (tensor := self._find(leaf)) is not None]
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and self._find(leaf) is None]
        self._changes_first(func, args, kwargs)
        y: object = self._expand_to_rows(func, args) if func in EXPANSIONS else None
        is_expanded = y is not None
        if y is None:
            with self._using_parameters():
                y = func(*args, **kwargs)
        for name in names:
            if func in EXPANSIONS and not others:
                self.inputs.setdefault(expansion_of(name), []).extend(tree_leaves(y))
            self.inputs.setdefault(name, []).extend(others)
        if not others and not is_expanded:
            self._note_values(y, args)
        return y

    @override
    def _parameter_values(self, layer: PerturbedLayer, parameter: Tensor) -> Tensor | None:
        with self._using_parameters():
            return parameter.unsqueeze(0)

    def _note_values(self, y: object, args: Sequence[object]) -> None:
        """Note results that are computed from parameters alone, with the name of the first."""
        name = next(tensor.name for leaf in tree_leaves(args) if (tensor := self._find(leaf)) is not None)
        for leaf in tree_leaves(y):
            if isinstance(leaf, Tensor) and self._find(leaf) is None:
                with self._using_parameters():
                    values = leaf.unsqueeze(0)
                self._derived[id(leaf)] = MemberTensor(leaf, name, None, values=values)
