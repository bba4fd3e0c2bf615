"""The layers of a model as cases, with their shapes when the model runs on example rows."""

import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from esbench.errors import UserError
from esbench.measure.failure import classify
from esbench.schema import Case

NORMALISATIONS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Layers whose scales a population perturbs by dense noise, whatever the scheme."""

WHAT_TO_RETURN = "return (module, rows), such as (model, torch.zeros(1, 3, 32, 32))"


class Layer(NamedTuple):
    """A layer of a model: its name, its case to be measured, and its number of trainable entries."""

    name: str
    case: Case
    size: int


class OtherModule(NamedTuple):
    """A module with other trainable parameters: a text about it, and whether it must be excluded."""

    name: str
    reason: str
    excluded: bool = False


class Layers(NamedTuple):
    """The layers with a choice of scheme, other trainable modules, and the number of perturbed entries."""

    chosen: tuple[Layer, ...]
    others: tuple[OtherModule, ...]
    size: int


def load_model(name: str) -> tuple[nn.Module, Tensor]:
    """Import a factory, ``module:factory``, and call it; return the model and example rows.

    Raises:
        UserError: it cannot be imported, raises, or returns something else; or it returns no rows and the
            shape of a row does not follow from the first layer.

    """
    try:
        model, rows = _call_factory(name)
        return model, _rows_for(model) if rows is None else rows
    except UserError as error:
        message = f"--model {name}: {error}"
        raise UserError(message) from error


def layers(model: nn.Module, rows: Tensor, template: Case, *, dtype: str | None = None) -> Layers:
    """Return the layers of a model, in the order in which they are called.

    The repeats of a layer are multiplied by its positions in a row, such as the tokens of a sequence.

    Args:
        model: any module; it is run once, in evaluation mode.
        rows: example rows of its input, [rows, ...].
        template: members, repeats and sigma of the cases.
        dtype: the dtype of the cases, by default that of each layer.

    Raises:
        UserError: the model raises on the rows, or has no layer that can be perturbed, or one whose weight is
            not in real floating point.

    """
    named = {name: module for name, module in model.named_modules() if _is_trainable(module)}
    shapes = _shapes_seen(
        model, rows, {name: module for name, module in named.items() if _has_choice(module)}
    )
    if not shapes:
        message = (
            f"{type(model).__name__} has no trainable Linear or Conv2d layer that the example passes through"
        )
        raise UserError(message)
    chosen = []
    for name, shape in shapes.items():
        own = _own(named[name])["weight"].dtype
        if not own.is_floating_point:
            dtype_name = str(own).removeprefix("torch.")
            message = f"{name or 'the model'} is {dtype_name}: only real floating point can be perturbed"
            raise UserError(message)
        case = msgspec.structs.replace(template, dtype=dtype or str(own).removeprefix("torch."))
        chosen.append(Layer(name, _case(named[name], shape, len(rows), case), _size([named[name]])))
    others = tuple(_others(named, shapes))
    excluded = {layer.name for layer in others if layer.excluded}
    size = _size(module for name, module in named.items() if name not in excluded)
    return Layers(tuple(chosen), others, size)


def _call_factory(name: str) -> tuple[nn.Module, Tensor | None]:
    """Return the model of a factory, and the example rows if it returns any."""
    module, _, factory = name.partition(":")
    if not (module and factory):
        message = "expected module:factory, such as my_models:mlp"
        raise UserError(message)
    here = str(Path.cwd())
    if here not in sys.path:  # as for `python -m`
        sys.path.insert(0, here)
    with _one_line("cannot import it:"):
        make = getattr(importlib.import_module(module), factory)
    with _one_line("the factory raises"):
        result = make()
    match result:
        case nn.Module() as model:
            return model, None
        case (nn.Module() as model, Tensor() as rows):
            if rows.dim() and len(rows):
                return model, rows
            message = f"the example has no rows: {WHAT_TO_RETURN}"
            raise UserError(message)
    message = f"the factory returned {type(result).__name__}: return an nn.Module, or {WHAT_TO_RETURN}"
    raise UserError(message)


@contextlib.contextmanager
def _one_line(message: str, advice: str = "") -> Iterator[None]:
    """Turn any error of a user's code inside the context into an error of one line."""
    try:
        yield
    except BaseException as error:
        text = f"{message} {classify(error).reason}{advice}"
        raise UserError(text) from error


def _rows_for(model: nn.Module) -> Tensor:
    """Return one row for a model that begins with a Linear layer."""
    first = next((module for module in model.modules() if _is_trainable(module)), None)
    if isinstance(first, nn.Linear) and not isinstance(first.weight, nn.UninitializedParameter):
        return first.weight.new_zeros(1, first.in_features)
    reason = f"begins with {type(first).__name__}" if first else "has no trainable parameter"
    message = f"the model {reason}, so the shape of its rows is unknown: {WHAT_TO_RETURN}"
    raise UserError(message)


def _shapes_seen(model: nn.Module, rows: Tensor, modules: dict[str, nn.Module]) -> dict[str, torch.Size]:
    """Run the model; return the shape of the first input of each module that is called, in that order."""
    shapes: dict[str, torch.Size] = {}

    def record(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        for first in (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)):
            shapes.setdefault(name, first.shape)
            return

    hooks = [
        module.register_forward_pre_hook(partial(record, name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        message = f"the model raises on rows of shape {tuple(rows.shape)}:"
        with torch.no_grad(), _one_line(message, f": {WHAT_TO_RETURN}"):
            model.eval()(rows)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _is_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in _own(module).values())


def _has_choice(module: nn.Module) -> bool:
    """Return whether a scheme acts on the module: its weight is a trainable parameter."""
    own = _own(module)
    return isinstance(module, nn.Linear | nn.Conv2d) and "weight" in own and own["weight"].requires_grad


def _size(modules: Iterable[nn.Module]) -> int:
    """Return the number of trainable entries of modules, each counted once."""
    parameters = {parameter for module in modules for parameter in _own(module).values()}
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def _case(module: nn.Module, shape: torch.Size, rows: int, template: Case) -> Case:
    space = module.kernel_size if isinstance(module, nn.Conv2d) else ()
    positions = shape[: -1 - len(space)].numel()
    own = _own(module)
    changes: dict[str, Any] = {
        "bias": "bias" in own,
        "repeats": template.repeats * max(1, positions // rows),
    }
    if isinstance(module, nn.Conv2d):
        changes |= {
            "operator": "Conv2d",
            "out_channels": module.out_channels,
            "in_channels": module.in_channels,
            "kernel_size": tuple(module.kernel_size),
            "input_size": tuple(shape[-2:]),
            "stride": _plain(module.stride),
            "padding": module.padding if isinstance(module.padding, str) else _plain(module.padding),
            "dilation": _plain(module.dilation),
            "groups": module.groups,
            "padding_mode": module.padding_mode,
        }
    else:
        out, inp = own["weight"].shape
        changes |= {"operator": "Linear", "out_channels": out, "in_channels": inp}
    return msgspec.structs.replace(template, **changes)


def _plain(widths: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return a single number if all are equal, as in suites."""
    return widths[0] if len(set(widths)) == 1 else tuple(widths)


def _others(named: dict[str, nn.Module], shapes: dict[str, torch.Size]) -> Iterator[OtherModule]:
    for name, module in named.items():
        kind = type(module).__name__
        if isinstance(module, NORMALISATIONS):
            yield OtherModule(name, f"{kind}: dense noise, whatever the scheme")
        elif not _has_choice(module):
            yield OtherModule(name, f"{kind}: cannot be perturbed", excluded=True)
        elif name not in shapes:
            yield OtherModule(name, f"{kind}: it is not called on the example")
