"""Small models and training loops for these tests."""

import contextlib
import math
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any, get_args

import torch
from torch import Generator, Tensor, distributed, nn
from torch.optim import Optimizer

from impls.training.implicit_optimizer import AutoOptimizer
from impls.training.optimizer_in_backward import Granularity, Rule
from impls.training.rigl import RigLScheduler

SGD: Rule = partial(torch.optim.SGD, lr=0.1)
MOMENTUM: Rule = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM: Rule = partial(torch.optim.Adam, lr=0.01)
RULES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sgd": (SGD, ("foreach", "fused")),
    "nesterov": (
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        ("foreach", "fused"),
    ),
    "amsgrad": (partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True), ("foreach", "fused")),
    "adamw": (partial(torch.optim.AdamW, lr=0.01), ("foreach", "fused")),
    "rmsprop": (partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True), ("foreach",)),
}
"""Rules, and the kernels that they can have."""
SETTINGS: dict[str, Any] = {
    "dense_allocation": 0.2,
    "T_end": 25,
    "delta": 5,
    "sparsity_distribution": "erk",
    "ignore_linear_layers": False,
}
"""Settings of RigL under which entries move in steps 5, 10, 15 and 20."""
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)


def rows(seed: int = 0) -> Tensor:
    """Return rows [3, 4]."""
    return torch.randn(3, 4, generator=Generator().manual_seed(seed))


def mlp(seed: int = 0) -> nn.Sequential:
    """Return two seeded layers with biases."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    generator = Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def implicit(rule: Rule = ADAM) -> nn.Sequential:
    """Return the MLP with an optimizer in each layer."""
    first, middle, last = mlp()
    return nn.Sequential(AutoOptimizer(first, rule), middle, AutoOptimizer(last, rule))


def fails(_: Tensor) -> Any:
    """Raise an error, as a hook may."""
    raise ValueError("planted")


@contextlib.contextmanager
def spoilt(parameter: nn.Parameter, bad: float = math.nan) -> Iterator[None]:
    """Multiply a parameter's gradients by a number that is not finite."""
    handle = parameter.register_hook(lambda gradient: gradient * bad)
    yield
    handle.remove()


def has_no_gradient(model: nn.Module) -> bool:
    """Return whether no parameter has a gradient."""
    return all(parameter.grad is None for parameter in model.parameters())


def layer(model: nn.Sequential, index: int) -> nn.Linear:
    """Return a linear layer of a model."""
    linear = model[index]
    assert isinstance(linear, nn.Linear)
    return linear


def backward(model: nn.Module, seed: int = 0) -> None:
    """Run one backward pass."""
    model(rows(seed)).square().mean().backward()


def train(model: nn.Module, optimizer: Optimizer, steps: int = 1, first: int = 0) -> None:
    """Run ordinary training steps."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    """Return copies of all parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    """Return whether tensors are bitwise equal."""
    return len(first) == len(second) and all(map(torch.equal, first, second))


def alike(first: nn.Module, second: nn.Module) -> bool:
    """Return whether all parameters are bitwise equal."""
    return equal(weights(first), weights(second))


def same_entries(first: list[Tensor], second: list[Tensor]) -> list[bool]:
    """Return for each pair of tensors whether it is bitwise equal."""
    return [torch.equal(*pair) for pair in zip(first, second, strict=True)]


def text_model(seed: int = 0) -> nn.Module:
    """Return an embedding, three linear layers and a norm with seeded weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = (nn.Flatten(), nn.Linear(20, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh())
        return nn.Sequential(nn.Embedding(7, 5), *layers, nn.Linear(16, 6))


def words(step: int) -> Tensor:
    """Return words [8, 4]."""
    return torch.randint(7, (8, 4), generator=Generator().manual_seed(step))


class SparseTraining:
    """A text model that trains with RigL; settings of the optimizer begin with an underscore."""

    def __init__(
        self, optimizer: Any = torch.optim.SGD, seed: int = 0, mask_seed: Any = 0, **settings: Any
    ) -> None:
        options = {name[1:]: value for name, value in settings.items() if name.startswith("_")}
        rigl = {name: value for name, value in settings.items() if not name.startswith("_")}
        self.model = text_model(seed)
        self.optimizer = optimizer(self.model.parameters(), **({"lr": 0.05} | options))
        self.scheduler = RigLScheduler(self.model, self.optimizer, seed=mask_seed, **(SETTINGS | rigl))

    def backward(self, step: int, scale: float = 1.0) -> Tensor:
        """Run the backward pass of a step."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(words(step)).square().mean() * scale
        loss.backward()
        return loss

    def step(self, step: int) -> bool:
        """Run a step; return whether the optimizer took it."""
        self.backward(step)
        if taken := self.scheduler():
            self.optimizer.step()
        return taken

    def run(self, first: int = 0, last: int = 30) -> list[int]:
        """Run steps; return those in which entries moved, counted from 1."""
        return [step + 1 for step in range(first, last) if not self.step(step)]

    def dense_gradients(self, step: int) -> list[Tensor]:
        """Return the dense gradients of a step for each sparse weight, without side effects."""
        wanted = [layer.weight for layer in self.scheduler.layers]
        return list(torch.autograd.grad(self.model(words(step)).square().mean(), wanted))

    @property
    def has_masked_gradients(self) -> bool:
        """Whether gradients are zero where entries are inactive, and only there."""
        return all(
            layer.weight.grad is not None
            and not layer.weight.grad[~layer.mask].any()
            and bool(layer.weight.grad[layer.mask].any())
            for layer in self.scheduler.layers
        )

    @property
    def masks(self) -> list[Tensor]:
        """Copies of the masks."""
        return [layer.mask.clone() for layer in self.scheduler.layers]

    @property
    def weights(self) -> list[Tensor]:
        """Copies of all parameters."""
        return weights(self.model)

    @property
    def is_masked(self) -> bool:
        """Whether the inactive entries of all weights are zero, and their number is exact."""
        return all(
            not layer.weight[~layer.mask].any() and int(layer.mask.sum()) == layer.nonzero
            for layer in self.scheduler.layers
        )


RUNS = (("gradient", 100), ("gradient", 200), ("random", 100))
"""Growth, and where the second rank's rows begin."""


def train_rank(rank: int, folder: str) -> tuple[list[list[Tensor]], int, str | None]:
    """Train one of two ranks in each of the runs; return their masks, and facts about the process."""
    distributed.init_process_group(
        "gloo", f"file://{folder}/rendezvous", timeout=timedelta(minutes=2), rank=rank, world_size=2
    )
    masks = []
    for growth, rows_from in RUNS:
        # Weights and mask seeds differ: only the first rank's masks may count.
        training = SparseTraining(seed=rank, mask_seed=rank, growth=growth, _momentum=0.9)
        masks.append(training.masks)
        for step in range(21):
            training.step(rows_from * rank + step)
        masks.append(training.masks)
    distributed.destroy_process_group()
    return masks, os.getpid(), os.environ.get("PLANTED")
