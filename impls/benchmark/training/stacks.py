"""The models that an update inside the backward pass is measured on."""

import math

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.registry import REGISTRY, UnavailableError
from esbench.schema import Case
from impls.benchmark import inputs

MANY_SMALL, FEW_LARGE, ACTIVATION_HEAVY, TIED = OPERATORS = REGISTRY.reserve(
    "ManySmall", "FewLarge", "ActivationHeavy", "Tied"
)
DEPTHS = {MANY_SMALL: 100, FEW_LARGE: 8, ACTIVATION_HEAVY: 4, TIED: 4}
"""How many layers each has, all of the case's shape."""


class TiedPair(nn.Module):
    """A layer and its transpose, which have one weight: x -> GELU(x W^T) W."""

    def __init__(self, out_channels: int, in_channels: int, *, dtype: torch.dtype) -> None:
        """Make the weight, [out, in]."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, dtype=dtype))

    @override
    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.gelu(nn.functional.linear(x, self.weight))
        return nn.functional.linear(inner, self.weight.T)


def stack(case: Case, device: str, seed: int) -> nn.Sequential:
    """Make a case's model with seeded weights that keep the size of what passes through.

    Raises:
        UnavailableError: there is no such model.

    """
    if case.members != 1 or (case.operator != TIED and case.out_channels != case.in_channels):
        message = f"{case.operator} has square layers and one member: this is no population"
        raise UnavailableError(message)
    dtype = inputs.dtype_of(case)
    layers: list[nn.Module] = []
    for _ in range(DEPTHS[case.operator]):
        if case.operator == TIED:
            layers.append(TiedPair(case.out_channels, case.in_channels, dtype=dtype))
        else:
            layers.append(
                nn.utils.skip_init(
                    nn.Linear, case.in_channels, case.out_channels, bias=case.bias, dtype=dtype
                )
            )
        if case.operator == ACTIVATION_HEAVY:
            layers.append(nn.GELU())
    model = nn.Sequential(*layers)
    generator = Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_values(parameter.shape, case, generator))
    return model.to(device)


def _values(shape: torch.Size, case: Case, generator: Generator) -> Tensor:
    """Return float32 values: rotations where there are many layers, which would shrink what passes."""
    values = torch.randn(shape, generator=generator)
    if case.operator == MANY_SMALL and values.ndim > 1:
        return nn.init.orthogonal_(values, generator=generator)
    return values / math.sqrt(case.in_channels)
