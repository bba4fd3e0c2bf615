"""Checks of a user's model: which axes have rows, and rows against members evaluated by themselves."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_leaves, tree_map

from impls.perturbation.function_mode import LayerIndex, RowsAxes
from impls.perturbation.guarded_mode import InputsMode
from impls.perturbation.layer import version_of
from impls.perturbation.member_tensors import CHOSEN, FIRST, UNKNOWN, RowsAxis

if TYPE_CHECKING:
    from impls.perturbation.population import Population

CHECKED = 4
"""The most members, and the most repeats of each, that are evaluated."""

FEW_ROWS = (2, 3)
"""Numbers of rows with which a model is run to find where the inputs of its layers have them."""


def find_rows_axes(  # noqa: PLR0913, PLR0917  a model and its call
    model: nn.Module,
    method: str,
    index: LayerIndex,
    rows: int,
    rows_axis: int,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> RowsAxes:
    """Find where the inputs of a model's layers have their rows.

    The plain model runs on two and on three of the rows: their axis is the one whose length changes. Where
    positions are folded into this axis, a third run with another second row shows their order.

    Args:
        model: the model. Attributes and buffers that it changes are restored.
        method: the name of its method that runs.
        index: its perturbed layers.
        rows: the number of rows in its arguments.
        rows_axis: their axis.
        args: the model's arguments.
        kwargs: its keyword arguments.

    Returns:
        The axes of the layers, without those that could not be found: the number of calls may depend on
        numbers. They are :data:`CHOSEN` if the length of an input does, and :data:`UNKNOWN` if the model only
        works with the number of rows that it got.
    """

    def run(count: int, *, changes_second: bool = False) -> dict[str, list[Tensor]]:
        """Run the model on a few rows and return the inputs of its layers."""

        def select(value: object) -> object:
            axis = axis_of_rows(value, rows, rows_axis)
            if not isinstance(value, Tensor) or axis is None:
                return value
            few = value.index_select(axis, torch.arange(count, device=value.device) % rows)
            if changes_second:
                second = few.select(axis, 1)
                second.copy_(_other_values(second, value))
            return few

        few_args, few_kwargs = tree_map(select, (args, kwargs))
        mode = InputsMode(index, count)
        with restoring(model), mode:
            getattr(model, method)(*few_args, **few_kwargs)
        return mode.inputs

    axes: dict[str, Sequence[RowsAxis | torch.Size]] = {}
    try:
        fewer, more = (run(count) for count in FEW_ROWS)
        change_second = functools.cache(lambda: run(FEW_ROWS[1], changes_second=True))
        for name, inputs in more.items():
            found = _axes_of_layer(name, fewer.get(name, []), inputs, change_second)
            if found is not None and {*found} != {FIRST}:
                axes[name] = found
    except Exception:  # noqa: BLE001  the model may need the number of rows that it got
        return dict.fromkeys((layer.name for layer in index.layers.values()), UNKNOWN)
    return axes


def _axes_of_layer(
    name: str,
    fewer: Sequence[Tensor],
    more: Sequence[Tensor],
    change_second: Callable[[], Mapping[str, Sequence[Tensor]]],
) -> Sequence[RowsAxis | torch.Size] | None:
    """Return where the inputs of a layer have their rows, given those of two and of three rows.

    ``change_second`` returns those of all layers for three rows of which the second has changed.

    Returns:
        The axes; None if they could not be found, as the number of calls differs, or :data:`CHOSEN`.
    """
    if len(fewer) != len(more):
        return None
    axes = [_changing_axis(x.shape, y.shape) for x, y in zip(fewer, more, strict=True)]
    if None in axes:
        return CHOSEN
    if any(isinstance(axis, RowsAxis) and axis.after > 1 for axis in axes):
        changed = change_second().get(name, [])
        if [x.shape for x in changed] != [x.shape for x in more]:
            return CHOSEN
        axes = [_order_of_fold(*triple) for triple in zip(axes, more, changed, strict=True)]
    found = [axis for axis in dict.fromkeys(axes) if axis is not None]
    return found if len(found) == len({*axes}) else None


def check_same_axes(before: RowsAxes, now: RowsAxes) -> None:
    """Check that layers have their rows in a later call where they had them in the first.

    Raises:
        ValueError: a layer has not.
    """
    for name, axes in now.items():
        if axes is not UNKNOWN and not {*axes} <= {*before.get(name, (FIRST,))}:
            message = (
                "the model took another branch than in its first call with inputs of these shapes, and layer "
                f"{name!r} has its rows in another axis there, or none: call perturb() again for this branch"
            )
            raise ValueError(message)


def axis_of_rows(value: object, rows: int, rows_axis: int) -> int | None:
    """Return which of a tensor's first two axes has this number of rows; the expected one if both have."""
    if not isinstance(value, Tensor):
        return None
    axes = [axis for axis, size in enumerate(value.shape[:2]) if size == rows]
    return rows_axis if rows_axis in axes else next(iter(axes), None)


def _other_values(row: Tensor, inputs: Tensor) -> Tensor:
    """Return other values for a row of inputs, with integers in the range of those of the inputs."""
    if row.dtype == torch.bool:
        return row
    if row.is_floating_point() or row.is_complex():
        return -row - 1
    least, most = inputs.min(), inputs.max()
    return least + most - row if least < most else torch.where(row > 0, row - 1, row + 1)


def _changing_axis(fewer: torch.Size, more: torch.Size) -> RowsAxis | torch.Size | None:
    """Return the axis of two and of three rows, the size of an input without rows, or None if it is neither.

    Positions that are folded into the axis are taken to be after the rows.
    """
    if fewer == more:
        return more
    different = [axis for axis, sizes in enumerate(zip(fewer, more, strict=False)) if sizes[0] != sizes[1]]
    if len(fewer) != len(more) or len(different) != 1:
        return None
    (axis,) = different
    folded = more[axis] // FEW_ROWS[1]
    lengths = tuple(folded * count for count in FEW_ROWS)
    return RowsAxis(axis, after=folded) if (fewer[axis], more[axis]) == lengths else None


def _order_of_fold(
    axis: RowsAxis | torch.Size | None, x: Tensor, changed: Tensor
) -> RowsAxis | torch.Size | None:
    """Return an axis with the numbers of positions before and after its rows, found by changing a row.

    In an axis [before * rows * after], element i belongs to row i // after % rows. Only elements of the row
    that has changed can differ, which few orders of positions and rows explain.

    Args:
        axis: the axis, where all positions are taken to be after the rows. Axes without positions, and what
            is no axis, are returned unchanged.
        x: the layer's input for three rows.
        changed: the same after the second row has changed.

    Returns:
        The axis; None if nothing differs, or if not exactly one order explains it.
    """
    if not isinstance(axis, RowsAxis) or axis.after == 1:
        return axis
    positions = axis.after
    differs = (x != changed).movedim(axis.axis, 0).reshape(x.shape[axis.axis], -1).any(1)
    elements = differs.nonzero()
    if not len(elements):
        return None
    orders = [
        RowsAxis(axis.axis, before=positions // after, after=after)
        for after in range(1, positions + 1)
        if positions % after == 0 and bool((elements // after % FEW_ROWS[1] == 1).all())
    ]
    return orders[0] if len(orders) == 1 else None


@contextlib.contextmanager
def restoring(model: nn.Module) -> Iterator[list[str]]:
    """Restore what a forward changes: attributes, buffers and torch's global random generators.

    Of attributes, also the contents of containers and dataclasses, and other tensors than parameters.

    Yields:
        A list, which has the names of the changed attributes after the context.
    """
    states: dict[int, _State] = {}
    with DisableTorchFunctionSubclass():  # a value of a perturbed parameter may be stored, but not used
        for module in model.modules():
            _save(vars(module), None, states)
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    changed: list[str] = []
    try:
        with torch.random.fork_rng(devices):
            yield changed
    finally:
        with DisableTorchFunctionSubclass():
            names = [name for state in states.values() for name in state.restore()]
        changed += dict.fromkeys(names)


class _State(NamedTuple):
    """What an attribute of a module has before a forward.

    Attributes:
        name: the attribute's name; None for a dictionary of attributes, whose keys are the names.
        value: a container, or a tensor.
        before: a shallow copy of the container, or a copy of the tensor.
        version: the number of the tensor's in-place changes.
    """

    name: str | None
    value: Any
    before: Any
    version: int = 0

    def restore(self) -> list[str]:
        """Restore the value; return the names of the attributes that have changed."""
        if isinstance(self.value, Tensor):
            # A copy would change the version of the others. Tensors of inference mode have none.
            if self.value.is_inference():
                is_same = torch.equal(self.value, self.before)
            else:
                is_same = version_of(self.value) == self.version
            if is_same:
                return []
            self.value.copy_(self.before)
            return [str(self.name)]
        now, before = _items(self.value), _items(self.before)
        keys = [key for key in {**now, **before} if now.get(key, _ABSENT) is not before.get(key, _ABSENT)]
        if keys:
            self.value.clear()
            add = self.value.extend if isinstance(self.value, list | deque) else self.value.update
            add(self.before)
        return [self.name or str(key) for key in keys]


_ABSENT = object()


def _save(value: object, name: str | None, states: dict[int, _State]) -> None:
    """Save the containers and tensors of an attribute, by their ids."""
    if id(value) in states:
        return
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        states[id(value)] = _State(name, value, value.clone(), version_of(value))
    elif isinstance(value, dict | list | set | deque):
        states[id(value)] = _State(name, value, copy.copy(value))
        for key, item in _items(value).items():
            holds_attributes = name is None and key in {"_buffers", "_parameters", "_modules"}
            _save(item, None if holds_attributes else name or str(key), states)
    elif isinstance(value, tuple):
        for item in value:
            _save(item, name, states)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        _save(vars(value), name, states)


def _items(container: Mapping[Any, Any] | Collection[Any]) -> Mapping[Any, Any]:
    """Return the values of a container by key, by index, or those of a set by themselves."""
    if isinstance(container, Mapping):
        return container
    return {value: value for value in container} if isinstance(container, set) else dict(enumerate(container))


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Run torch's transformers as in training: in evaluation their fast path sets padded positions to 0."""
    is_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_enabled)


@_without_fast_path()
def check_rows(
    population: "Population", method: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Compare rows of random members, each evaluated alone by the plain model with the member's weights.

    The reference is computed in float64. The error may be at most four times that of the plain model in its
    own dtype, which counts as 1 % of the output at most, plus a few roundings.

    Raises:
        ValueError: a row differs or is not a number, or no tensor that the model returns has a row for each
            input row.
    """
    noise = population.sample(secrets.randbelow(2**31))
    y, members = population.call(method, *args, noise=noise, **kwargs), population.members
    outputs = tree_leaves(y)
    first = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
    row_count = first.shape[population.rows_axis]
    axes = [axis_of_rows(y, row_count, population.rows_axis) for y in outputs]
    if all(axis is None for axis in axes):
        returned = ", ".join(
            f"shape {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__ for y in outputs
        )
        message = (
            f"verify compares rows, but the model returned {returned}: return a tensor [{row_count}, ...] "
            f"for {row_count} rows"
        )
        raise ValueError(message)

    def row_outputs(model: nn.Module, row: int, dtype: torch.dtype | None) -> Tensor:
        """Return a model's outputs for one row, evaluated alone, as one vector."""

        def keep_row(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            # Arguments without rows in one of the first two axes are passed whole.
            axis = axis_of_rows(value, row_count, population.rows_axis)
            value = value if axis is None else value.narrow(axis, row, 1)
            return value.to(dtype) if dtype and value.is_floating_point() else value

        alone_args, alone_kwargs = tree_map(keep_row, (args, kwargs))
        leaves = tree_leaves(getattr(model, method)(*alone_args, **alone_kwargs))
        return join(leaves, 0)

    def join(ys: Iterable[Tensor], row: int) -> Tensor:
        """Return the outputs of a row as one vector in float64, with the infinities beside the others."""
        pairs = zip(ys, axes, strict=True)
        return _split_infinities(
            torch.cat([y.select(axis, row).double().flatten() for y, axis in pairs if axis is not None])
        )

    # Copies: functional_call() does not restore a module that a model has under two names.
    narrow_model, wide_model = copy.deepcopy(population.model), copy.deepcopy(population.model).double()
    plain = copy.deepcopy(dict(wide_model.named_parameters(remove_duplicate=False)))
    narrow_error = 0.0
    expected: dict[tuple[int, int], Tensor] = {}
    repeats = row_count // members
    for repeat, member in itertools.product(_choose(repeats), _choose(members)):
        is_negated = population.antithetic and repeat >= repeats // 2
        row = repeat * members + member
        sigma = -population.sigma if is_negated else population.sigma
        changes = {
            name: sigma * value.double() for name, value in population.perturbation(noise, member).items()
        }
        weights = population.effective_weights({name: plain[name] for name in changes}, changes)
        wide_model.load_state_dict(weights, strict=False)
        wide = row_outputs(wide_model, row, torch.float64)
        if wide.isnan().any():
            raise ValueError(
                f"row {row} is not a number in the plain model with the weights of member {member}: call "
                "verify with weights and inputs that are finite"
            )
        narrow_model.load_state_dict(population.member(noise, member, negated=is_negated), strict=False)
        narrow_error = max(narrow_error, float((row_outputs(narrow_model, row, None) - wide).norm()))
        expected[repeat, member] = wide
    largest = max(float(wide.norm()) for wide in expected.values())
    narrow_error = min(narrow_error, largest / 100)  # a model that draws random numbers differs by more
    compared = [y for y, axis in zip(outputs, axes, strict=True) if axis is not None]
    # Integers, such as those of argmax, must be equal.
    eps = max((torch.finfo(y.dtype).eps for y in compared if y.is_floating_point()), default=0.0)
    roundings = 1024 if eps == torch.finfo(torch.float64).eps else 4
    for (repeat, member), wide in expected.items():
        row = repeat * members + member
        error = float((join(outputs, row) - wide).norm())
        allowed = 4 * narrow_error + roundings * eps * float(wide.norm())
        if not error <= allowed:
            message = (
                f"row {row} (repeat {repeat}, member {member}) differs by {error:.2g} from the plain model "
                f"with this member's weights, more than {allowed:.2g}: the model must not mix or reorder "
                "rows, draw random numbers, or use copies of weights"
            )
            raise ValueError(message)


def _split_infinities(y: Tensor) -> Tensor:
    """Return a vector with 0 for each infinity, and after it a vector of the infinities' signs."""
    return torch.cat([y.masked_fill(y.isinf(), 0), y.sign() * y.isinf()])


def _choose(count: int) -> list[int]:
    """Return the first, the last and random numbers below ``count``, without a global generator."""
    drawn = secrets.SystemRandom().sample(range(count), min(CHECKED - 2, count))
    return sorted({0, count - 1, *drawn})
