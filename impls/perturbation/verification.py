"""Checks of a user's model: which axes have rows, and rows against members evaluated by themselves."""

import contextlib
import copy
import itertools
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from impls.perturbation.function_mode import LayerIndex, RowsAxesMode, RowsError

if TYPE_CHECKING:
    from impls.perturbation.population import Population

CHECKED = 4
"""The most members, and the most repeats of each, that are evaluated."""

OTHER_ROWS = (3, 5, 7)
"""Numbers of rows with which a model is run to find its axes of rows; another axis may have one of them."""


def check_rows_axes(
    model: nn.Module,
    index: LayerIndex,
    rows_axes: Mapping[str, set[int]],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> None:
    """Check that no other axis was taken for that of the rows because it has the same length.

    The plain model runs on a few of the rows. A model that only works with the number of rows that it got is
    not checked.

    Args:
        model: the model. Attributes and buffers that it changes are restored.
        index: its perturbed layers.
        rows_axes: the axes of the layers' inputs that were taken for rows.
        args: the model's arguments.
        kwargs: its keyword arguments.

    Raises:
        ValueError: with other numbers of rows a layer's input has them in another axis, or not at all.
    """
    rows = next(len(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
    reason = ""
    for count in (other for other in OTHER_ROWS if other != rows):
        mode = RowsAxesMode(index, count)
        few_args, few_kwargs = tree_map(partial(_select_rows, rows=rows, count=count), (args, kwargs))
        try:
            with restoring(model), mode:
                model(*few_args, **few_kwargs)
        except RowsError as error:
            reason = str(error)
            continue
        except Exception:  # noqa: BLE001  the model may need the number of rows that it got
            return
        different = [name for name, axes in mode.rows_axes.items() if axes != rows_axes.get(name, axes)]
        if not different:
            return
        reason = f"layer {different[0]!r} has rows in another axis"
    message = (
        f"an axis without rows is as long as the {rows} rows by coincidence, and was taken for them (with "
        f"{count} rows: {reason}): use another number of repeats or members"
    )
    raise ValueError(message)


def _select_rows(value: object, *, rows: int, count: int) -> object:
    """Return ``count`` rows of a tensor with rows, repeated if it has fewer; other values as they are."""
    if not isinstance(value, Tensor) or value.shape[:1] != (rows,):
        return value
    return value[torch.arange(count, device=value.device) % rows]


@contextlib.contextmanager
def restoring(model: nn.Module) -> Iterator[list[str]]:
    """Restore what a forward changes: attributes, buffers and torch's global random generators.

    Yields:
        A list, which has the names of the changed attributes after the context.
    """
    attributes = [(vars(module), {**vars(module)}) for module in model.modules()]
    attributes += [(module._buffers, {**module._buffers}) for module in model.modules()]  # noqa: SLF001  in place
    buffers = [(buffer, buffer.clone(), buffer._version) for buffer in model.buffers()]  # noqa: SLF001  no public name
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    changed: list[str] = []
    try:
        with torch.random.fork_rng(devices):
            yield changed
    finally:
        for now, before in attributes:
            changed += [name for name in now if now[name] is not before.get(name)]
            now.clear()
            now.update(before)
        for buffer, value, version in buffers:
            if buffer._version != version:  # noqa: SLF001  a copy would change the version of the others
                buffer.copy_(value)


def check_rows(population: "Population", args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Compare rows of random members, each evaluated alone by the plain model with the member's weights.

    The reference is computed in float64. The error may be at most four times that of the plain model in its
    own dtype, which counts as 1 % of the output at most, plus a few roundings.

    Raises:
        ValueError: a row differs, or no tensor that the model returns has a row for each input row.
    """
    noise = population.sample(secrets.randbelow(2**31))
    outputs, members = tree_leaves(population(*args, noise=noise, **kwargs)), population.members
    row_count = next(len(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
    has_rows = [isinstance(y, Tensor) and y.shape[:1] == (row_count,) for y in outputs]
    if not any(has_rows):
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
            # Arguments whose first axis is not the rows are passed whole.
            value = value[row : row + 1] if value.shape[:1] == (row_count,) else value
            return value.to(dtype) if dtype and value.is_floating_point() else value

        alone_args, alone_kwargs = tree_map(keep_row, (args, kwargs))
        leaves = tree_leaves(model(*alone_args, **alone_kwargs))
        return _join(y[0] for y, is_row in zip(leaves, has_rows, strict=True) if is_row)

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
        narrow_model.load_state_dict(population.member(noise, member, negated=is_negated), strict=False)
        narrow_error = max(narrow_error, float((row_outputs(narrow_model, row, None) - wide).norm()))
        expected[repeat, member] = wide
    largest = max(float(wide.norm()) for wide in expected.values())
    narrow_error = min(narrow_error, largest / 100)  # a model that draws random numbers differs by more
    compared = [y for y, is_row in zip(outputs, has_rows, strict=True) if is_row]
    eps = max(torch.finfo(y.dtype).eps for y in compared if y.is_floating_point())
    roundings = 1024 if eps == torch.finfo(torch.float64).eps else 4
    for (repeat, member), wide in expected.items():
        row = repeat * members + member
        error = float((_join(y[row] for y in compared) - wide).norm())
        allowed = 4 * narrow_error + roundings * eps * float(wide.norm())
        if not error <= allowed:
            message = (
                f"row {row} (repeat {repeat}, member {member}) differs by {error:.2g} "
                f"from the model with this member's weights alone, allowed {allowed:.2g}: do not mix or "
                "reorder rows, draw random numbers, or use copies of weights"
            )
            raise ValueError(message)


def _join(outputs: Iterable[Tensor]) -> Tensor:
    """Return outputs as one vector in float64."""
    return torch.cat([y.double().flatten() for y in outputs])


def _choose(count: int) -> list[int]:
    """Return the first, the last and random numbers below ``count``, without a global generator."""
    drawn = secrets.SystemRandom().sample(range(count), min(CHECKED - 2, count))
    return sorted({0, count - 1, *drawn})
