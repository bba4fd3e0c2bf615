"""Which layers of a model are perturbed, and by which scheme."""

import fnmatch
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from impls.perturbation.layer import NORMALISATIONS, SUPPORTED, PerturbedLayer
from impls.perturbation.noise import STREAMS
from impls.perturbation.scheme import AbstractScheme, AnyScheme


def by_pattern(scheme: AnyScheme | Mapping[str, AnyScheme]) -> dict[str, AnyScheme]:
    """Return schemes by name pattern: one scheme is for all layers.

    Raises:
        ValueError: something stands there that is no scheme.

    """
    patterns = dict(scheme) if isinstance(scheme, Mapping) else {"*": scheme}
    for pattern, value in patterns.items():
        if not isinstance(value, AbstractScheme):
            message = f"the scheme for {pattern!r} must be an instance such as Permuted(), got {value!r}"
            raise ValueError(message)  # noqa: TRY004  one kind of error for every bad argument
    return patterns


def stream_of(schemes: Iterable[AnyScheme], asked: str | None = None) -> str:
    """Return the stream that all of these schemes can draw from: ``philox`` where one of them needs it.

    Raises:
        ValueError: another one was asked for, or one that there is not.

    """
    needing = next((scheme for scheme in schemes if scheme.stream == "philox"), None)
    if asked is None:
        return "philox" if needing else "block"
    if asked not in STREAMS:
        message = f"no stream {asked!r}; there are: {', '.join(STREAMS)}"
        raise ValueError(message)
    if needing and asked != "philox":
        message = (
            f"{needing} draws its noise inside of a kernel, from the stream philox: leave stream out, or ask "
            f"for philox, not {asked!r}"
        )
        raise ValueError(message)
    return asked


def trainable(model: nn.Module, exclude: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return modules with trainable parameters of their own that are not excluded, by name.

    Raises:
        ValueError: a pattern matches nothing, or a module cannot be perturbed; the message names it.

    """
    named = dict(model.named_modules())
    for pattern in exclude:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in named):
            message = (
                f"exclude pattern {pattern!r} matches no module; there are: {', '.join(filter(None, named))}"
            )
            raise ValueError(message)
    modules = {
        name: module
        for name, module in named.items()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)
    }
    chosen = {id(p): name for name, module in modules.items() for p in module.parameters(recurse=False)}
    for name in (name for name in named if name not in modules):
        for parameter in named[name].parameters(recurse=False):
            if parameter.requires_grad and id(parameter) in chosen:
                message = (
                    f"{name} is excluded but shares a parameter with {chosen[id(parameter)]}, which is not: "
                    "exclude both or neither"
                )
                raise ValueError(message)
    refused = [
        f"{name or 'the model itself'} ({why})" for name, m in modules.items() if (why := _obstacle(m))
    ]
    if refused:
        message = (
            f"cannot perturb {', '.join(refused)}: exclude them by name (exclude=[...]) to leave "
            "them unperturbed"
        )
        raise ValueError(message)
    return modules


def _obstacle(module: nn.Module) -> str:
    """Say why a module with trainable parameters cannot be perturbed, or nothing."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return f"{kind}: scripted code cannot be perturbed"
    own = dict(module.named_parameters(recurse=False))
    if not isinstance(module, SUPPORTED) or set(own) - {"weight", "bias"}:
        return kind
    if isinstance(own.get("weight"), nn.UninitializedParameter):
        return f"{kind}, not initialised: run the model once"
    if "weight" not in own or len({parameter.requires_grad for parameter in own.values()}) > 1:
        return f"{kind} with only a part of weight and bias trainable"
    return ""


def perturbed(modules: Mapping[str, nn.Module], patterns: Mapping[str, AnyScheme]) -> list[PerturbedLayer]:
    """Give each module the scheme of the first pattern that matches its name.

    Raises:
        ValueError: a layer has no scheme, or a pattern no layer; the message names them.

    """
    chosen: dict[int, PerturbedLayer] = {}
    unmatched, used = [], set()
    for name, module in modules.items():
        pattern = next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)
        if pattern is None and not isinstance(module, NORMALISATIONS):
            unmatched.append(name)
            continue
        used.add(pattern)
        scheme = next(iter(patterns.values())) if pattern is None else patterns[pattern]
        layer = PerturbedLayer.of(name, module, scheme)
        # Layers that share weight and bias are one layer: the first name counts.
        first = chosen.setdefault(id(layer.weight), layer)
        if first.bias is not layer.bias:
            message = (
                f"{first.name} and {name} share a weight but not their bias, which no scheme can serve: "
                "share the bias too, do without, or exclude both"
            )
            raise ValueError(message)
    if unmatched:
        message = f"no scheme for {', '.join(unmatched)}: add a pattern ('*' for the rest) or exclude them"
        raise ValueError(message)
    if unused := [pattern for pattern in patterns if pattern not in used]:
        message = f"pattern {unused[0]!r} matches no layer; there are: {', '.join(modules)}"
        raise ValueError(message)
    return list(chosen.values())
