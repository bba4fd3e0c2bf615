"""The layers of a model as cases, with the shapes of their inputs when it runs on example rows."""

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

NORMALIZATIONS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Layers whose parameters a population perturbs by dense noise with every scheme."""

RETURN_ADVICE = "return (module, rows), such as (model, torch.zeros(1, 3, 32, 32))"


class Layer(NamedTuple):
    """A layer that schemes act on: its name, the case to measure, and its number of trainable entries."""

    name: str
    case: Case
    size: int


class OtherModule(NamedTuple):
    """Another module with trainable parameters: what happens to it, and whether it must be excluded."""

    name: str
    reason: str
    excluded: bool = False


class Layers(NamedTuple):
    """The layers that schemes act on, other trainable modules, and the number of perturbed entries."""

    chosen: tuple[Layer, ...]
    others: tuple[OtherModule, ...]
    size: int


def load_model(name: str) -> tuple[nn.Module, Tensor]:
    """Import a factory, ``module:factory``, and call it; return the model and example rows.

    Raises:
        UserError: the factory cannot be imported, raises, or returns something else; or it returns no rows
            and the first layer does not determine the shape of a row.
    """
    try:
        model, rows = _call_factory(name)
        return model, _example_row(model) if rows is None else rows
    except UserError as error:
        raise UserError(f"--model {name}: {error}") from error


def layers(model: nn.Module, rows: Tensor, template: Case, *, dtype: str | None = None) -> Layers:
    """Return the layers of a model, in the order in which they are called.

    The repeats of a case are those of the template times the positions of a row, such as its tokens.

    Args:
        model: any module; it is run once, in evaluation mode.
        rows: example rows of its input, [rows, ...].
        template: members, repeats and sigma of the cases.
        dtype: the dtype of the cases, by default that of each layer.

    Raises:
        UserError: the model raises on the rows, has no Linear or Conv2d layer that can be perturbed, or has
            a weight that is not in real floating point.
    """
    named = {name: module for name, module in model.named_modules() if _is_trainable(module)}
    shapes = _input_shapes(
        model, rows, {name: module for name, module in named.items() if _has_trainable_weight(module)}
    )
    if not shapes:
        raise UserError(
            f"{type(model).__name__} has no trainable Linear or Conv2d layer that the example passes through"
        )
    chosen = []
    for name, shape in shapes.items():
        weight = _direct_parameters(named[name])["weight"]
        weight_dtype = str(weight.dtype).removeprefix("torch.")
        if not weight.is_floating_point():
            raise UserError(
                f"the weight of {name or 'the model'} is {weight_dtype}: "
                "only real floating point can be perturbed"
            )
        case = msgspec.structs.replace(template, dtype=dtype or weight_dtype)
        chosen.append(Layer(name, _case(named[name], shape, len(rows), case), _size([named[name]])))
    others = tuple(_others(named, shapes))
    excluded = {layer.name for layer in others if layer.excluded}
    size = _size(module for name, module in named.items() if name not in excluded)
    return Layers(tuple(chosen), others, size)


def _call_factory(name: str) -> tuple[nn.Module, Tensor | None]:
    """Return the model of a factory, and the example rows if it returns any."""
    module, _, factory = name.partition(":")
    if not (module and factory):
        raise UserError("expected module:factory, such as my_models:mlp")
    if (folder := str(Path.cwd())) not in sys.path:  # as for `python -m`
        sys.path.insert(0, folder)
    with _as_user_error("cannot import it:"):
        make = getattr(importlib.import_module(module), factory)
    with _as_user_error("the factory raises"):
        result = make()
    match result:
        case nn.Module() as model:
            return model, None
        case (nn.Module() as model, Tensor() as rows):
            if rows.dim() and len(rows):
                return model, rows
            raise UserError(f"the tensor that the factory returned has no rows: {RETURN_ADVICE}")
    raise UserError(f"the factory returned {type(result).__name__}: return an nn.Module, or {RETURN_ADVICE}")


@contextlib.contextmanager
def _as_user_error(message: str, advice: str = "") -> Iterator[None]:
    """Turn any error inside the context into a UserError of one line: message, error, advice."""
    try:
        yield
    except BaseException as error:  # a model is foreign code, which may raise anything
        text = f"{message} {classify(error).reason}{advice}"
        raise UserError(text) from error


def _example_row(model: nn.Module) -> Tensor:
    """Return a row of zeros, [1, in_features], for a model that begins with a Linear layer."""
    first = next((module for module in model.modules() if _is_trainable(module)), None)
    if isinstance(first, nn.Linear) and not isinstance(first.weight, nn.UninitializedParameter):
        return first.weight.new_zeros(1, first.in_features)
    reason = f"begins with {type(first).__name__}" if first else "has no trainable parameter"
    raise UserError(f"the model {reason}, so the shape of its rows is unknown: {RETURN_ADVICE}")


def _input_shapes(model: nn.Module, rows: Tensor, modules: dict[str, nn.Module]) -> dict[str, torch.Size]:
    """Run the model; return the input shape of each module that is called, in the order of the calls."""
    shapes: dict[str, torch.Size] = {}

    def record(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if first is not None:
            shapes.setdefault(name, first.shape)

    hooks = [
        module.register_forward_pre_hook(partial(record, name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        message = f"the model raises on rows of shape {tuple(rows.shape)}:"
        with torch.no_grad(), _as_user_error(message, f": {RETURN_ADVICE}"):
            model.eval()(rows)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def _direct_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _is_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in _direct_parameters(module).values())


def _has_trainable_weight(module: nn.Module) -> bool:
    """Return whether schemes act on the module: it is Linear or Conv2d, and its weight is trainable.

    With ``weight_norm`` and other parametrizations, the weight is no parameter of the module.
    """
    weight = _direct_parameters(module).get("weight")
    return isinstance(module, nn.Linear | nn.Conv2d) and weight is not None and weight.requires_grad


def _size(modules: Iterable[nn.Module]) -> int:
    """Return the number of trainable entries of modules; a parameter of several modules counts once."""
    parameters = {parameter for module in modules for parameter in _direct_parameters(module).values()}
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def _case(module: nn.Module, shape: torch.Size, rows: int, template: Case) -> Case:
    """Return the case of a Linear or Conv2d module whose input for ``rows`` example rows has this shape."""
    # The input is [rows, channels, height, width] or [rows, positions..., channels].
    positions = shape[: -3 if isinstance(module, nn.Conv2d) else -1].numel()
    parameters = _direct_parameters(module)
    changes: dict[str, Any] = {
        "bias": "bias" in parameters,
        "repeats": template.repeats * max(1, positions // rows),
    }
    if isinstance(module, nn.Conv2d):
        changes |= {
            "operator": "Conv2d",
            "out_channels": module.out_channels,
            "in_channels": module.in_channels,
            "kernel_size": tuple(module.kernel_size),
            "input_size": tuple(shape[-2:]),
            "stride": _collapse_equal(module.stride),
            "padding": module.padding if isinstance(module.padding, str) else _collapse_equal(module.padding),
            "dilation": _collapse_equal(module.dilation),
            "groups": module.groups,
            "padding_mode": module.padding_mode,
        }
    else:
        out, inp = parameters["weight"].shape
        changes |= {"operator": "Linear", "out_channels": out, "in_channels": inp}
    return msgspec.structs.replace(template, **changes)


def _collapse_equal(widths: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return a single number if all are equal, as suites write it, so that equal cases compare equal."""
    return widths[0] if len(set(widths)) == 1 else tuple(widths)


def _others(named: dict[str, nn.Module], shapes: dict[str, torch.Size]) -> Iterator[OtherModule]:
    """Yield the modules that have no case, with what happens to their parameters."""
    for name, module in named.items():
        class_name = type(module).__name__
        if isinstance(module, NORMALIZATIONS):
            yield OtherModule(name, f"{class_name}: dense noise, whatever the scheme")
        elif not _has_trainable_weight(module):
            yield OtherModule(name, f"{class_name}: not measured, so it is left out", excluded=True)
        elif name not in shapes:
            yield OtherModule(name, f"{class_name}: the model does not call it on the example")
