"""How sparse each layer is to be: which weights may lose connections, and how many each keeps.

A density is the share of weights that are kept. ``uniform`` gives each layer the same, but leaves the first
dense where there are others; ``erk`` gives a layer the more the smaller it is, in proportion to the sum of
its dimensions by their product (Evci et al., Rigging the Lottery, 2020, section 3).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from torch import nn
from torch.nn.modules.conv import _ConvNd

Distribution = Literal["uniform", "erk"]
FINEST = 10**9
"""A density is the fraction nearest to it whose denominator is at most that: 0.1, and 1 - 0.9, are 1/10."""


@dataclass(frozen=True)
class Sparse:
    """A weight that may lose connections: its name, the parameter, and how many of its entries are zero."""

    name: str
    weight: nn.Parameter
    zeros: int

    @property
    def kept(self) -> int:
        """How many of its entries are not."""
        return self.weight.numel() - self.zeros


def unwrapped(model: nn.Module) -> nn.Module:
    """Return what DistributedDataParallel or torch.compile was put around: its names are the model's own."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    plain = getattr(inner, "_orig_mod", inner)
    return plain if isinstance(plain, nn.Module) else inner


def sparsifiable(
    model: nn.Module, *, ignore_linear_layers: bool = False, ignore: Collection[str] = ()
) -> dict[str, nn.Parameter]:
    """Return the weights of linear and convolutional layers by name, each once, in the model's order.

    A weight that another kind of layer shares, such as an embedding, is none of them; nor is one that does
    not learn, that is computed from others, or that has no entries.

    Args:
        model: the model.
        ignore_linear_layers: leave the linear ones dense.
        ignore: names of layers, or of weights, that stay dense, with all that is below them; or one name.

    Raises:
        ValueError: it is no model, a name in ``ignore`` is none of its, or a layer has no shape yet.

    """
    if not isinstance(model, nn.Module):
        message = f"model {model!r}: expected a torch.nn.Module"
        raise ValueError(message)  # noqa: TRY004  # as for every argument that cannot be
    if isinstance(ignore, str):
        ignore = [ignore]
    if not isinstance(ignore, Collection) or not all(isinstance(one, str) for one in ignore):
        message = f"ignore {ignore!r}: expected names of layers"
        raise ValueError(message)
    modules = dict(model.named_modules())
    names = {*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))}
    if unknown := sorted({*ignore} - names):
        message = f"ignore: the model has no {', '.join(unknown)}; it has {', '.join(sorted(names - {''}))}"
        raise ValueError(message)
    elsewhere = {
        id(parameter)
        for module in modules.values()
        if not isinstance(module, nn.Linear | _ConvNd)
        for parameter in module.parameters(recurse=False)
    }
    found: dict[str, nn.Parameter] = {}
    for path, module in modules.items():
        name = f"{path}.weight".lstrip(".")
        if not isinstance(module, nn.Linear | _ConvNd) or _is_below(name, ignore):
            continue
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if (
            weight is None
            or not weight.requires_grad
            or (ignore_linear_layers and isinstance(module, nn.Linear))
        ):
            continue
        if isinstance(weight, nn.parameter.UninitializedParameter):
            message = f"{name} has no shape yet: run the model once first"
            raise ValueError(message)  # noqa: TRY004  # the model is at fault, and not its type
        if (
            weight.numel()
            and id(weight) not in elsewhere
            and all(weight is not one for one in found.values())
        ):
            found[name] = weight
    return found


def zeros(
    weights: Mapping[str, nn.Parameter], density: float, distribution: Distribution = "uniform"
) -> list[Sparse]:
    """Return how many entries of each weight are zero: floor((1 - its density) entries), without rounding.

    Args:
        weights: by name, the model's first layer first.
        density: the share that is kept of all their entries, with ``uniform`` of each but the first.
        distribution: how that is shared out.

    Raises:
        ValueError: there are no weights, or no such distribution.

    """
    if not weights:
        message = "the model has no linear or convolutional layer that could be made sparse"
        raise ValueError(message)
    if distribution == "erk":
        densities = erk([tuple(weight.shape) for weight in weights.values()], density)
    elif distribution == "uniform":
        share = _fraction(density)
        densities = [Fraction(1), *[share] * (len(weights) - 1)] if len(weights) > 1 else [share]
    else:
        message = f"sparsity_distribution {distribution!r}: there are uniform and erk"
        raise ValueError(message)
    return [
        Sparse(name, weight, math.floor((1 - each) * weight.numel()))
        for (name, weight), each in zip(weights.items(), densities, strict=True)
    ]


def erk(shapes: Sequence[tuple[int, ...]], density: float) -> list[Fraction]:
    """Return the density of each layer that keeps this share of all entries, exactly.

    A layer's density is proportional to the sum of its dimensions by their product; one that would have
    more than all of its entries is dense, and the others share what is left.
    """
    sizes = [math.prod(shape) for shape in shapes]
    raw = [Fraction(sum(shape), size) for shape, size in zip(shapes, sizes, strict=True)]
    share = _fraction(density)
    dense: set[int] = set()
    while len(dense) < len(shapes) and share < 1:
        rest = [place for place in range(len(shapes)) if place not in dense]
        wanted = share * sum(sizes) - sum(sizes[place] for place in dense)
        scale = wanted / sum(raw[place] * sizes[place] for place in rest)
        most = max(raw[place] for place in rest)
        if scale * most <= 1:
            return [Fraction(1) if place in dense else scale * raw[place] for place in range(len(shapes))]
        dense |= {place for place in rest if raw[place] == most}
    return [Fraction(1)] * len(shapes)


def table(weights: Mapping[str, nn.Parameter], model: nn.Module) -> str:
    """Return how sparse each of a model's weights really is, and all of them together, as text."""
    from tabulate import tabulate  # noqa: PLC0415  measuring does without this package

    counts = {name: (int(one.count_nonzero()), one.numel()) for name, one in weights.items()}
    rows = [
        (name, tuple(weights[name].shape), f"{kept}/{size}", f"{1 - kept / size:.2%}")
        for name, (kept, size) in counts.items()
    ]
    kept, size = (sum(one) for one in zip(*counts.values(), strict=True))
    every = list(model.parameters())
    nonzero, total = sum(int(one.count_nonzero()) for one in every), sum(one.numel() for one in every)
    lines = tabulate(rows, ("weight", "shape", "nonzero/total", "sparsity"), disable_numparse=True)
    return (
        f"{lines}\nin all {kept}/{size} of these weights are not zero, a sparsity of {1 - kept / size:.2%}; "
        f"of all parameters of the model {nonzero}/{total}"
    )


def _fraction(density: float) -> Fraction:
    """Return what a number of the computer's stands for."""
    return Fraction(density).limit_denominator(FINEST)


def _is_below(name: str, ignore: Collection[str]) -> bool:
    return any(not one or name == one or name.startswith(f"{one}.") for one in ignore)
