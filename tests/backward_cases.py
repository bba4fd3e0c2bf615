"""Small models and rules, for tests of what is updated inside the backward pass."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from impls.training.backward import OptimizerInBackward, Rule

SGD: Rule = partial(torch.optim.SGD, lr=0.1)
MOMENTUM: Rule = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM: Rule = partial(torch.optim.Adam, lr=0.01)

KERNELS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
"""Torch's ways to compute a step, by name."""

_MAKERS: dict[str, Rule] = {
    "sgd": SGD,
    "momentum": MOMENTUM,
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "decay": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "adam": ADAM,
    "amsgrad": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
}

RULES: dict[str, Rule] = {
    f"{name}-{kernel}": partial(make, **options)
    for name, make in _MAKERS.items()
    for kernel, options in KERNELS.items()
    if (name, kernel) != ("rmsprop", "fused")  # there is none
}
"""Rules by name and kernel."""


def rows(seed: int = 0) -> Tensor:
    """Three rows of four numbers."""
    return torch.randn(3, 4, generator=Generator().manual_seed(seed))


def mlp(seed: int = 0) -> nn.Sequential:
    """Make two layers with biases, the same for a seed."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    generator = Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def layer(model: nn.Sequential, place: int) -> nn.Linear:
    """Return a linear layer of a model."""
    found = model[place]
    assert isinstance(found, nn.Linear)
    return found


def backward(model: nn.Module, seed: int = 0) -> None:
    """Make one backward pass."""
    model(rows(seed)).square().mean().backward()


def train(model: nn.Module, optimizer: Optimizer, steps: int, first: int = 0) -> None:
    """Take training steps as any loop does."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def twins(
    rule: Rule, make: Callable[[nn.Module, Rule], Optimizer] = OptimizerInBackward
) -> tuple[nn.Sequential, Optimizer, nn.Sequential, Optimizer]:
    """Make a model with an ordinary optimizer, and the same with one in backward."""
    plain = mlp()
    model = copy.deepcopy(plain)
    return plain, rule(list(plain.parameters())), model, make(model, rule)


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of a model's parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def alike(model: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters are equal, bit for bit."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(one, another) for one, another in pairs)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    return all(map(torch.equal, one, other))
