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
from esbench.schema import Case

NORMALISATIONS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Layers whose scales a population perturbs by dense noise: there is nothing to choose."""

WHAT_TO_RETURN = "return (module, rows), such as (model, torch.zeros(1, 3, 32, 32))"


class Layer(NamedTuple):
    """A layer of a model by its name, as a case to be measured, and how many numbers it has."""

    name: str
    case: Case
    size: int


class Other(NamedTuple):
    """Another module with trainable parameters, and what becomes of it; some have to be left unperturbed."""

    name: str
    why: str
    excluded: bool = False


class Layers(NamedTuple):
    """The layers that a scheme can be chosen for, and the rest of what is trained.

    ``size`` is how many numbers are perturbed in all. ``first_run`` is an expression for the rows that gave
    lazy layers their shapes; empty without such layers.
    """

    chosen: tuple[Layer, ...]
    others: tuple[Other, ...]
    size: int
    first_run: str = ""


def load_model(name: str) -> tuple[nn.Module, Tensor]:
    """Import a factory, ``module:factory``, and call it; return the model and rows to run it on.

    Raises:
        UserError: it cannot be imported, raises, or returns something else; or no rows came with the model
            and its first layer does not tell what they look like.

    """
    module, _, factory = name.partition(":")
    if not (module and factory):
        message = f"--model {name}: expected module:factory, such as my_models:mlp"
        raise UserError(message)
    made = _made(name, module, factory)
    model, rows = made if isinstance(made, tuple) and len(made) == 2 else (made, None)  # noqa: PLR2004  # a pair
    if not isinstance(model, nn.Module) or not (rows is None or isinstance(rows, Tensor)):
        message = (
            f"--model {name}: the factory returned {_kind(made)}: return an nn.Module, or {WHAT_TO_RETURN}"
        )
        raise UserError(message)
    if rows is not None and (rows.dim() == 0 or rows.shape[0] == 0):
        message = f"--model {name}: the example has no rows: {WHAT_TO_RETURN}"
        raise UserError(message)
    return model, _rows_for(name, model) if rows is None else rows


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
    shapes: dict[str, torch.Size] = {}
    is_lazy = any(
        isinstance(one, nn.UninitializedParameter | nn.UninitializedBuffer) for one in _tensors(model)
    )
    named = {name: module for name, module in model.named_modules() if _is_trained(module)}
    supported = {name: one for name, one in named.items() if _can_choose(one)}
    hooks = [
        module.register_forward_pre_hook(_remember(shapes, name), with_kwargs=True)
        for name, module in supported.items()
    ]
    try:
        with torch.no_grad():
            model.eval()(rows)
    except (Exception, SystemExit) as error:  # a model may raise anything: one line says it
        message = (
            f"the model raises on rows of shape {tuple(rows.shape)}: {_in_words(error)}: {WHAT_TO_RETURN}"
        )
        raise UserError(message) from error
    finally:
        for hook in hooks:
            hook.remove()
    template = msgspec.structs.replace(template, dtype=dtype or template.dtype)
    chosen = [
        Layer(
            name,
            _case(supported[name], shape, rows.shape[0], template, own=dtype is None),
            _size([supported[name]]),
        )
        for name, shape in shapes.items()
    ]
    if not chosen:
        message = (
            f"{type(model).__name__} has no trainable Linear or Conv2d layer that the example passes through"
        )
        raise UserError(message)
    for name in shapes:
        own = dict(supported[name].named_parameters(recurse=False))["weight"].dtype
        if not own.is_floating_point:
            message = (
                f"{name or 'the model'} is {_plain_name(own)}: only real floating point can be perturbed"
            )
            raise UserError(message)
    others = tuple(_others(named, shapes))
    excluded = {other.name for other in others if other.excluded}
    size = _size(module for name, module in named.items() if name not in excluded)
    return Layers(tuple(chosen), others, size, _expression(rows) if is_lazy else "")


def _size(modules: Iterable[nn.Module]) -> int:
    """How many numbers modules have that are trained, each once."""
    own = {id(one): one for module in modules for one in module.parameters(recurse=False)}
    return sum(one.numel() for one in own.values() if one.requires_grad)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _expression(rows: Tensor) -> str:
    """Code for rows of this shape and type."""
    dtype = "" if rows.dtype == torch.float32 else f", dtype={rows.dtype}"
    return f"torch.zeros({', '.join(map(str, rows.shape))}{dtype})"


def _plain_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _made(name: str, module: str, factory: str) -> object:
    """What the factory returns."""
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` has it
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module), factory)
    except (Exception, SystemExit) as error:  # whatever importing runs into, one line says it
        message = f"--model {name}: cannot import it: {_in_words(error)}"
        raise UserError(message) from error
    try:
        return make()
    except (Exception, SystemExit) as error:  # a factory may raise anything: one line says it
        message = f"--model {name}: the factory raises {_in_words(error)}"
        raise UserError(message) from error


def _rows_for(name: str, model: nn.Module) -> Tensor:
    """One row for a model that begins with a Linear layer."""
    first = next((module for module in model.modules() if _is_trained(module)), None)
    if not isinstance(first, nn.Linear) or isinstance(first.weight, nn.UninitializedParameter):
        what = f"begins with {type(first).__name__}" if first else "has no trainable parameter"
        message = f"--model {name}: the model {what}, so the shape of its rows is unknown: {WHAT_TO_RETURN}"
        raise UserError(message)
    return first.weight.new_zeros(1, first.in_features)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def _can_choose(module: nn.Module) -> bool:
    """Whether a scheme acts on the module: its own weight is trained, and computed from nothing else."""
    own = dict(module.named_parameters(recurse=False))
    return isinstance(module, nn.Linear | nn.Conv2d) and "weight" in own and own["weight"].requires_grad


def _remember(shapes: dict[str, torch.Size], name: str) -> Any:  # noqa: ANN401  # torch's own type of a hook
    def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        for value in (*arguments, *keywords.values()):
            if isinstance(value, Tensor):
                shapes.setdefault(name, value.shape)
                return

    return hook


def _case(module: nn.Module, shape: torch.Size, rows: int, template: Case, *, own: bool) -> Case:
    parameters = dict(module.named_parameters(recurse=False))
    dtype = _plain_name(parameters["weight"].dtype) if own else template.dtype
    space = module.kernel_size if isinstance(module, nn.Conv2d) else ()
    positions = shape[: -1 - len(space)].numel()
    repeats = template.repeats * max(1, positions // rows)
    changes: dict[str, Any] = {"bias": "bias" in parameters, "repeats": repeats, "dtype": dtype}
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
        out, inp = parameters["weight"].shape
        changes |= {"operator": "Linear", "out_channels": out, "in_channels": inp}
    return msgspec.structs.replace(template, **changes)


def _plain(widths: tuple[int, ...]) -> int | tuple[int, ...]:
    """One number where all are the same, as a suite writes it."""
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


def _kind(made: object) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return type(made).__name__


def _in_words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
