"""The networks of suite ``peers``: classifiers of small images."""

import math

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.registry import REGISTRY
from esbench.schema import Case
from impls.benchmark import inputs
from impls.training.networks import CLASSES

MLP, CNN, TRANSFORMER = OPERATORS = REGISTRY.reserve(
    "GenerationMLP", "GenerationCNN", "GenerationTransformer"
)
"""A case has ``in_channels`` pixels and ``out_channels`` hidden units, channels or features. As in each case
with antithetic sampling, ``members`` are pairs, and a batch has half of ``repeats`` rows."""

HEADS = 2


class Attention(nn.Module):
    """Self-attention over tokens [rows, tokens, features]."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(features, 3 * features), nn.Linear(features, features)

    @override
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inputs(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        # Torch's fused attention has no batching rule for vmap, which would call it for each member.
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        values = torch.softmax(scores, dim=-1) @ value
        y: Tensor = self.outputs(values.transpose(1, 2).flatten(2))
        return y


class Residual(nn.Sequential):
    """Adds its input to the output of its layers."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = super().forward(input)  # type: ignore[no-untyped-call]  # torch has no hints
        return input + y


class MeanOfTokens(nn.Module):
    """The mean over tokens: [rows, tokens, features] -> [rows, features]."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def input_shape(case: Case) -> tuple[int, ...]:
    """Return the shape of an image: pixels, one channel of a square, or a token for each of its lines."""
    side = math.isqrt(case.in_channels)
    return {MLP: (case.in_channels,), CNN: (1, side, side), TRANSFORMER: (side, side)}[case.operator]


def network(case: Case, seed: int) -> nn.Sequential:
    """Return a network with seeded weights N(0, 1 / fan in) and biases of zero.

    It is an MLP of two layers, a CNN of two convolutions and a linear layer, or a transformer block with
    linear layers before and after it; all have ReLU.
    """
    width, side = case.out_channels, math.isqrt(case.in_channels)
    if case.operator == MLP:
        layers: list[nn.Module] = [
            nn.Linear(case.in_channels, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        ]
    elif case.operator == CNN:
        halved = (side + 1) // 2
        layers = [
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(width * halved**2, CLASSES),
        ]
    else:
        wide = 2 * width
        layers = [
            nn.Linear(side, width),
            Residual(nn.LayerNorm(width), Attention(width)),
            Residual(nn.LayerNorm(width), nn.Linear(width, wide), nn.ReLU(), nn.Linear(wide, width)),
            MeanOfTokens(),
            nn.Linear(width, CLASSES),
        ]
    model, generator = nn.Sequential(*layers), Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                assert module.bias is not None  # noqa: S101  all of them have one
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator))
                module.weight.div_(math.sqrt(module.weight[0].numel()))
                module.bias.zero_()
    return model.to(inputs.dtype_of(case))
