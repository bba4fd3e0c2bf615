"""Tensors without rows that differ from member to member, and where other tensors have their rows."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _is_alias_of  # type: ignore[attr-defined]  # torch has no hint
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_unflatten

from impls.perturbation.layer import PerturbedLayer


class MemberTensor(NamedTuple):
    """A perturbed parameter, or what a model computes from perturbed parameters alone.

    Attributes:
        tensor: what the model has: the parameter itself, its transpose, or the values of one member.
        name: the name of the parameter's layer.
        layer: the layer, if the tensor is its weight, its bias, or the transpose of its weight; else None.
        is_transposed: whether the tensor is the transpose of the layer's weight.
        values: the values of all members, [members, *shape]; with antithetic sampling [2 * members, *shape],
            first those with the noise. None for parameters and their transposes.
    """

    tensor: Tensor
    name: str
    layer: PerturbedLayer | None
    is_transposed: bool = False
    values: Tensor | None = None


class RowsAxis(NamedTuple):
    """Where a tensor has its rows: in an axis of before * rows * after elements.

    Attributes:
        axis: the axis.
        before: how many positions are folded into it before the rows.
        after: how many positions are folded into it after the rows.
    """

    axis: int
    before: int = 1
    after: int = 1

    def split(self, x: Tensor, sides: int, members: int) -> Tensor:
        """View the axis as [before, sides, repeats, members, after]; two sides are antithetic halves."""
        return x.unflatten(self.axis, (self.before, sides, -1, members, self.after))

    def join(self, y: Tensor) -> Tensor:
        """Undo :meth:`split`."""
        return y.flatten(self.axis, self.axis + 4)

    def to_first(self, x: Tensor, sides: int, members: int) -> Tensor:
        """Arrange a tensor as rows in the first axis; positions that are folded count as repeats."""
        return self.split(x, sides, members).movedim(self._order, (0, 1, 2, 3, 4)).flatten(0, 4)

    def from_first(self, y: Tensor, sides: int, members: int) -> Tensor:
        """Undo :meth:`to_first`."""
        y = y.unflatten(0, (sides, self.before, -1, self.after, members))
        return self.join(y.movedim((0, 1, 2, 3, 4), self._order))

    def is_axis_of(self, shape: torch.Size, rows: int) -> bool:
        """Return whether a tensor of this shape may have this number of rows in this axis."""
        return len(shape) > self.axis and shape[self.axis] == self.before * rows * self.after

    @property
    def _order(self) -> tuple[int, ...]:
        """The axes of :meth:`split` in the order sides, before, repeats, after, members."""
        return tuple(self.axis + offset for offset in (1, 0, 2, 4, 3))


FIRST = RowsAxis(0)
SECOND = RowsAxis(1)
UNKNOWN = (FIRST, SECOND)
"""The axes of the rows where they could not be found: an input of three or more axes may have either."""

CHOSEN: tuple[RowsAxis, ...] = ()
"""The axes of the rows where the number of rows depends on the values in them, as in a mixture of experts."""


def spread(values: Tensor, axis: RowsAxis, dim: int, sides: int, members: int) -> Tensor | None:
    """View values [sides * members, *shape] so that they broadcast to split rows, or return None.

    Args:
        values: the values.
        axis: that of the rows.
        dim: axes of the rows; as in torch, axes before those of ``shape`` have length 1.
        sides: 2 with antithetic sampling, else 1.
        members: the number of members.
    """
    shape = values.shape[1:]
    if len(shape) > dim:
        return None
    aligned = *[1] * (dim - len(shape)), *shape
    if aligned[axis.axis] != 1:
        return None
    first = axis.axis
    values = values.view(sides, members, *aligned).movedim((0, 1), (first, first + 2))
    return values.unsqueeze(first).unsqueeze(first + 4)


def compute_per_member(  # noqa: PLR0913, PLR0917  a call, and where its tensors have members
    func: Callable[..., object],
    leaves: Sequence[object],
    spec: TreeSpec,
    values: dict[int, Tensor],
    axes: dict[int, RowsAxis],
    sides: int,
    members: int,
) -> object:
    """Call a function with the values and the rows of each member in turn, by ``torch.vmap``.

    Args:
        func: the function.
        leaves: its arguments, flattened.
        spec: their nesting.
        values: the members' values [sides * members, *shape] of the arguments at these positions.
        axes: the axis of the rows of the arguments at these positions.
        sides: 2 with antithetic sampling, else 1.
        members: the number of members.

    Returns:
        The function's results: if an argument has rows with rows in the same axis, else
        [sides * members, *shape].

    Raises:
        ValueError: the results have another number of rows.
    """
    inputs = {at: value.unflatten(0, (sides, members)) for at, value in values.items()}
    inputs |= {at: axis.split(_tensor(leaves[at]), sides, members) for at, axis in axes.items()}
    result = next(iter(axes.values()), None)
    repeats = {x.shape[axes[at].axis + 2] for at, x in inputs.items() if at in axes}

    def run(*tensors: Tensor) -> object:
        arguments = list(leaves)
        for at, tensor in zip(inputs, tensors, strict=True):
            # Without sides and members, the axis is [before, repeats, after].
            arguments[at] = tensor.flatten(axes[at].axis, axes[at].axis + 2) if at in axes else tensor
        args, kwargs = tree_unflatten(arguments, spec)
        y = func(*args, **kwargs)
        if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(y)):
            message = f"its result {y!r} is no tensor"
            raise ValueError(message)
        if result is None:
            return y
        return tree_map(lambda values: values.unflatten(result.axis, (result.before, -1, result.after)), y)

    # After the axis of sides, that of members is one axis earlier.
    outer = tuple(axes[at].axis + 1 if at in axes else 0 for at in inputs)
    inner = tuple(axes[at].axis + 2 if at in axes else 0 for at in inputs)
    out = 0 if result is None else result.axis
    by_member = torch.vmap(run, inner, out + 2 if result else 0, randomness="different")
    y = torch.vmap(by_member, outer, out + 1 if result else 0, randomness="different")(*inputs.values())
    if result is None:
        return tree_map(lambda values: values.flatten(0, 1), y)

    def join(values: Tensor) -> Tensor:
        if {values.shape[result.axis + 2]} != repeats:
            message = f"its result has the shape {list(values.shape)}, without an axis of rows"
            raise ValueError(message)
        joined = result.join(values)
        # A copy of what shares memory with parameters, such as expanded ones, because these are not rows.
        parameters = (x for at, x in inputs.items() if at not in axes)
        return joined.clone() if any(_is_alias_of(joined, parameter) for parameter in parameters) else joined

    return tree_map(join, y)


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)  # noqa: S101  only tensors have rows
    return value
