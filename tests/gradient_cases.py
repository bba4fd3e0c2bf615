"""What a scheme's noise makes of a gradient, by simulation; and the largest tensor that a call makes."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from impls.perturbation.noise import BlockStream
from impls.perturbation.scheme import AnyScheme


def members_of(scheme: AnyScheme, shape: tuple[int, ...], members: range, step: int = 0) -> Tensor:
    """Write out members of a scheme for a weight [g, o, i, *taps] as rows [m, d], in float64."""
    weight = torch.zeros(shape, dtype=torch.float64)
    stream = BlockStream(0, step, "layer", members, weight.device, weight.dtype)
    return scheme.dense_noise(scheme.sample(weight, stream)).flatten(1)


def fitted_kappa(
    scheme: AnyScheme, shape: tuple[int, ...], members: int, tails: float, steps: int = 200
) -> tuple[float, float]:
    """Fit kappa to a linear fitness of an isotropic gradient, and return it with its standard error.

    With c_m = <G, E_m>, n members and E[c^2 |E|^2] = (d + tails) |G|^2,

        E|g|^2 |G|^2 / E<g, G>^2 = 1 + (d + tails - 1) / n + kappa (n - 1) / n

    where kappa is what two members share. Tails are 2 for Gaussian entries and 0 for signs.
    """
    generator, along, length = torch.Generator().manual_seed(0), [], []
    for step in range(steps):
        rows = members_of(scheme, shape, range(members), step)
        gradient = torch.randn(rows.shape[1], dtype=torch.float64, generator=generator)
        estimate = rows.mT @ (rows @ gradient)
        along.append(estimate @ gradient / gradient.square().sum())
        length.append(estimate.square().sum() / gradient.square().sum())
    a, b = torch.stack(along), torch.stack(length)
    ratio = b.mean() / a.mean().square()
    # To first order, a ratio of means strays as these terms do.
    terms = b / a.mean().square() - 2 * ratio * a / a.mean()
    share = (members - 1) / members
    size = math.prod(shape)
    kappa = (float(ratio) - 1 - (size + tails - 1) / members) / share
    return kappa, float(terms.std()) / math.sqrt(steps) / share


class Largest(TorchDispatchMode):
    """Notes the numbers of the largest tensor that any operation makes, views that repeat one left out."""

    def __init__(self) -> None:
        """Start at nothing."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without hints
        self.numel = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                stored = tensor.untyped_storage().nbytes() // tensor.itemsize
                self.numel = max(self.numel, min(tensor.numel(), stored))
        return result
