"""A small network that trains sparsely, for tests of RigL."""

from typing import Any

import torch
from torch import Tensor, nn

from impls.training.rigl import RigLScheduler

STEPS = 30


class Training:
    """A network of three linear layers, a norm and an embedding, its optimizer and its scheduler."""

    def __init__(
        self, optimizer: Any = torch.optim.SGD, seed: int = 0, drawn: int = 0, **settings: Any
    ) -> None:
        """Make it, with masks drawn by a seed; ``settings`` of the optimizer begin with an underscore."""
        own = {name[1:]: value for name, value in settings.items() if name.startswith("_")}
        rest = {name: value for name, value in settings.items() if not name.startswith("_")}
        self.model = network(seed)
        self.optimizer = optimizer(self.model.parameters(), **({"lr": 0.05} | own))
        asked: dict[str, Any] = {
            "dense_allocation": 0.2,
            "T_end": 25,
            "delta": 5,
            "sparsity_distribution": "erk",
        } | rest
        self.scheduler = RigLScheduler(self.model, self.optimizer, seed=drawn, **asked)

    def backward(self, step: int) -> Tensor:
        """Do the backward pass of a step."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(rows(step)).square().mean()
        loss.backward()
        return loss

    def step(self, step: int) -> bool:
        """Take a step; return whether the optimizer took it."""
        self.backward(step)
        if taken := self.scheduler():
            self.optimizer.step()
        return taken

    def run(self, first: int = 0, last: int = STEPS) -> list[int]:
        """Take steps; return those at which connections moved, counted from 1."""
        return [step + 1 for step in range(first, last) if not self.step(step)]


def network(seed: int = 0) -> nn.Module:
    """Make an embedding, linear layers and a norm with seeded weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = (nn.Flatten(), nn.Linear(20, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh())
        return nn.Sequential(nn.Embedding(7, 5), *layers, nn.Linear(16, 6))


def rows(step: int) -> Tensor:
    """Return the words of a step: [8, 4]."""
    return torch.randint(7, (8, 4), generator=torch.Generator().manual_seed(step))


def masks(scheduler: RigLScheduler) -> list[Tensor]:
    """Return copies of the masks."""
    return [layer.mask.clone() for layer in scheduler.layers]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether tensors are bitwise the same."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


def weights(training: Training) -> list[Tensor]:
    """Return copies of all parameters."""
    return [one.detach().clone() for one in training.model.parameters()]
