"""The layers of a model as cases: their shapes, found by running it on an example."""

import importlib
import sys
from collections.abc import Iterable, Iterator
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
"""Layers whose scales a population perturbs by dense noise: there is nothing to choose."""

WHAT_TO_RETURN = "return (module, rows), such as (model, torch.zeros(1, 3, 32, 32))"


class Layer(NamedTuple):
    """A layer of a model by its name, as a case to be measured, and how many numbers it has."""

    name: str
    case: Case
    size: int


class Other(NamedTuple):
    """Another module with trainable parameters: how it is perturbed, or that it must be excluded."""

    name: str
    why: str
    excluded: bool = False


class Layers(NamedTuple):
    """The layers with a choice of scheme, other trained modules, and the number of perturbed parameters."""

    chosen: tuple[Layer, ...]
    others: tuple[Other, ...]
    size: int


def load_model(name: str) -> tuple[nn.Module, Tensor]:
    """Import a factory, ``module:factory``, and call it; return the model and rows to run it on.

    Raises:
        UserError: it cannot be imported, raises, or returns something else; or no rows came with the model
            and its first layer does not tell what they look like.

    """
    try:
        model, rows = _made(name)
        return model, _rows_for(model) if rows is None else rows
    except UserError as error:
        message = f"--model {name}: {error}"
        raise UserError(message) from error


def layers(model: nn.Module, rows: Tensor, template: Case, *, dtype: str | None = None) -> Layers:
    """Return the layers of a model, in the order in which they see the example.

    A layer that sees several positions of a row, such as the tokens of a sequence, has as many repeats more.

    Args:
        model: any module; it is run once, in evaluation mode.
        rows: an example of its input, [rows, ...].
        template: members, repeats and sigma of the cases.
        dtype: of the cases; by default each layer's own.

    Raises:
        UserError: the model raises on the example, or holds no layer that can be perturbed, or one whose
            numbers are not real.

    """
    named = {name: module for name, module in model.named_modules() if _is_trained(module)}
    shapes = _shapes_seen(model, rows, {name: one for name, one in named.items() if _can_choose(one)})
    if not shapes:
        message = (
            f"{type(model).__name__} has no trainable Linear or Conv2d layer that the example passes through"
        )
        raise UserError(message)
    chosen = []
    for name, shape in shapes.items():
        own = _own(named[name])["weight"].dtype
        if not own.is_floating_point:
            what = str(own).removeprefix("torch.")
            message = f"{name or 'the model'} is {what}: only real floating point can be perturbed"
            raise UserError(message)
        case = msgspec.structs.replace(template, dtype=dtype or str(own).removeprefix("torch."))
        chosen.append(Layer(name, _case(named[name], shape, len(rows), case), _size([named[name]])))
    others = tuple(_others(named, shapes))
    excluded = {other.name for other in others if other.excluded}
    size = _size(module for name, module in named.items() if name not in excluded)
    return Layers(tuple(chosen), others, size)


def _made(name: str) -> tuple[nn.Module, Tensor | None]:
    """Return the model that a factory builds, and the input rows if it returns any."""
    module, _, factory = name.partition(":")
    if not (module and factory):
        message = "expected module:factory, such as my_models:mlp"
        raise UserError(message)
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` has it
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module), factory)
    except (Exception, SystemExit) as error:  # whatever importing runs into, one line says it
        message = f"cannot import it: {classify(error).reason}"
        raise UserError(message) from error
    try:
        made = make()
    except (Exception, SystemExit) as error:  # a factory may raise anything: one line says it
        message = f"the factory raises {classify(error).reason}"
        raise UserError(message) from error
    match made:
        case nn.Module() as model:
            return model, None
        case (nn.Module() as model, Tensor() as rows):
            if rows.dim() and len(rows):
                return model, rows
            message = f"the example has no rows: {WHAT_TO_RETURN}"
            raise UserError(message)
    message = f"the factory returned {type(made).__name__}: return an nn.Module, or {WHAT_TO_RETURN}"
    raise UserError(message)


def _rows_for(model: nn.Module) -> Tensor:
    """Return one row for a model that begins with a Linear layer."""
    first = next((module for module in model.modules() if _is_trained(module)), None)
    if isinstance(first, nn.Linear) and not isinstance(first.weight, nn.UninitializedParameter):
        return first.weight.new_zeros(1, first.in_features)
    what = f"begins with {type(first).__name__}" if first else "has no trainable parameter"
    message = f"the model {what}, so the shape of its rows is unknown: {WHAT_TO_RETURN}"
    raise UserError(message)


def _shapes_seen(model: nn.Module, rows: Tensor, modules: dict[str, nn.Module]) -> dict[str, torch.Size]:
    """Run the model; return the shape of the first input of each module that is called, in that order."""
    shapes: dict[str, torch.Size] = {}

    def remember(name: str) -> Any:  # noqa: ANN401  # torch's own type of a hook
        def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            tensors = (one for one in (*arguments, *keywords.values()) if isinstance(one, Tensor))
            for first in tensors:
                shapes.setdefault(name, first.shape)
                return

        return hook

    hooks = [one.register_forward_pre_hook(remember(name), with_kwargs=True) for name, one in modules.items()]
    try:
        with torch.no_grad():
            model.eval()(rows)
    except (Exception, SystemExit) as error:  # a model may raise anything: one line says it
        reason = classify(error).reason
        message = f"the model raises on rows of shape {tuple(rows.shape)}: {reason}: {WHAT_TO_RETURN}"
        raise UserError(message) from error
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in _own(module).values())


def _can_choose(module: nn.Module) -> bool:
    """Return whether a scheme acts on the module: its weight is trained, and computed from nothing else."""
    own = _own(module)
    return isinstance(module, nn.Linear | nn.Conv2d) and "weight" in own and own["weight"].requires_grad


def _size(modules: Iterable[nn.Module]) -> int:
    """Return the number of trainable entries of modules, each counted once."""
    own = {id(one): one for module in modules for one in _own(module).values()}
    return sum(one.numel() for one in own.values() if one.requires_grad)


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
    """Return a single number if all are equal, as in the cases of suites."""
    return widths[0] if len(set(widths)) == 1 else tuple(widths)


def _others(named: dict[str, nn.Module], shapes: dict[str, torch.Size]) -> Iterator[Other]:
    for name, module in named.items():
        kind = type(module).__name__
        if isinstance(module, NORMALISATIONS):
            yield Other(name, f"{kind}: dense noise, whatever the scheme")
        elif not _can_choose(module):
            yield Other(name, f"{kind}: cannot be perturbed", excluded=True)
        elif name not in shapes:
            yield Other(name, f"{kind}: the example does not come past it")
