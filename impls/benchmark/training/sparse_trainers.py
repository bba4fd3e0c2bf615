"""Training steps of sparse networks, each its own way: with masks on dense weights, and without zeros.

All take SGD with momentum on the mean square of the outputs, so that any two can be held to each other. No
gradient is left behind a step: memory is that of all gradients, where they are all there at once.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from impls.training import topology
from impls.training.rigl import RigLScheduler
from impls.training.rigl_backward import RigLInBackward
from impls.training.sparse_products import AbstractSparseLinear
from impls.training.sparsity import Sparse, sparsifiable, zeros

MOMENTUM = 0.9
SHARE = 0.3
"""Of the connections that move: RigL's own at the start."""
NEVER = 10**9
"""Steps between two topology updates where none is to be met: they are measured by themselves."""

Masks = Mapping[str, Tensor]


def loss_of(y: Tensor) -> Tensor:
    """Return what is minimised."""
    return y.square().mean()


class AbstractTrainer(ABC):
    """Takes training steps of ``model``, whose parameters it may have replaced."""

    model: nn.Sequential

    @abstractmethod
    def step(self, x: Tensor) -> Tensor:
        """Take a step on rows; return the outputs."""

    @property
    @abstractmethod
    def masks(self) -> Masks:
        """What is connected, by the name of the weight; all of those that are not named."""

    @property
    def held(self) -> list[Tensor]:
        """Dense gradients that are kept beside those of the parameters."""
        return []

    @property
    def written(self) -> dict[str, Tensor]:
        """Copies of all weights and biases, with their zeros, by the names of the plain network."""
        found: dict[str, Tensor] = {}
        for path, module in self.model.named_children():
            if isinstance(module, AbstractSparseLinear):
                found |= {f"{path}.weight": module.dense(), f"{path}.bias": module.bias}
            else:
                found |= {f"{path}.{name}": one for name, one in module.named_parameters()}
        return {name: one.detach().clone() for name, one in found.items()}


class DenseTrainer(AbstractTrainer):
    """Plain training, of a dense network or of one whose layers know their zeros."""

    def __init__(self, model: nn.Sequential, rate: float) -> None:
        """Make the optimizer."""
        self.model = model
        self._optimizer = torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM)

    @property
    @override
    def masks(self) -> Masks:
        named = self.model.named_children()
        return {f"{name}.weight": one.mask() for name, one in named if isinstance(one, AbstractSparseLinear)}

    @override
    def step(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        loss_of(y).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return y.detach()


class ScheduledTrainer(AbstractTrainer):
    """RigLScheduler's two lines, as a person has them."""

    def __init__(self, model: nn.Sequential, rate: float, **settings: Any) -> None:  # noqa: ANN401  # of RigLScheduler
        """Make the optimizer and the scheduler."""
        self.model = model
        self._optimizer = torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM)
        self._scheduler = RigLScheduler(model, self._optimizer, **settings)

    @property
    @override
    def masks(self) -> Masks:
        return {layer.name: layer.mask for layer in self._scheduler.layers}

    @property
    @override
    def held(self) -> list[Tensor]:
        held = ((layer.gathered, layer.coming) for layer in self._scheduler.layers)
        return [one for one in itertools.chain(*held) if one is not None]

    @override
    def step(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        loss_of(y).backward()
        if self._scheduler():
            self._optimizer.step()
        self._optimizer.zero_grad()
        return y.detach()


class BackwardTrainer(AbstractTrainer):
    """RigL inside the backward pass."""

    def __init__(self, model: nn.Sequential, rate: float, **settings: Any) -> None:  # noqa: ANN401  # of Schedule
        """Register with the parameters."""
        self.model = model
        rule = partial(torch.optim.SGD, lr=rate, momentum=MOMENTUM)
        self._training = RigLInBackward(model, rule, **settings)

    @property
    @override
    def masks(self) -> Masks:
        return {layer.name: layer.mask for layer in self._training.layers}

    @override
    def step(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x)
        loss_of(y).backward()
        self._training()
        return y.detach()


class AbstractMaskedTrainer(AbstractTrainer):
    """Masks on dense weights, without a scheduler; connections move after every ``delta`` steps."""

    def __init__(self, model: nn.Sequential, rate: float, density: float, delta: int) -> None:
        """Make the optimizer, and the weights sparse."""
        self.model, self._delta, self._steps = model, delta, 0
        self._optimizer = torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM)
        generator = Generator().manual_seed(0)
        parts = zeros(sparsifiable(model), density, "erk")
        self._parts: list[Sparse] = [one for one in parts if one.zeros]
        self._masks = {one.name: topology.scattered(one.weight, one.kept, generator) for one in self._parts}
        with torch.no_grad():
            for one in self._parts:
                one.weight.mul_(self._masks[one.name])

    @property
    @override
    def masks(self) -> Masks:
        return self._masks

    @property
    def is_due(self) -> bool:
        """Whether connections move instead of the optimizer's step."""
        return self._steps % self._delta == 0

    def _moved(self, one: Sparse) -> int:
        return int(SHARE * one.kept)

    def _momentum(self, one: Sparse) -> list[Tensor]:
        slot = self._optimizer.state.get(one.weight, {}).get("momentum_buffer")
        return [] if slot is None else [slot]


class RigLTorchTrainer(AbstractMaskedTrainer):
    """As rigl-torch: every step's dense gradients are kept, and masks multiply one tensor at a time."""

    def __init__(self, model: nn.Sequential, rate: float, density: float, delta: int) -> None:
        """Watch the gradients."""
        super().__init__(model, rate, density, delta)
        self._dense: dict[str, Tensor] = {}
        for one in self._parts:
            one.weight.register_hook(self._hook(one.name))

    @property
    @override
    def held(self) -> list[Tensor]:
        return list(self._dense.values())

    @override
    def step(self, x: Tensor) -> Tensor:
        self._steps += 1
        y: Tensor = self.model(x)
        loss_of(y).backward()
        if self.is_due:
            self._move()
        else:
            self._optimizer.step()
            self._mask()
        self._optimizer.zero_grad()
        return y.detach()

    def _hook(self, name: str) -> Callable[[Tensor], Tensor]:
        masks, dense = self._masks, self._dense

        def keep(gradient: Tensor) -> Tensor:
            dense[name] = gradient.clone()
            return gradient * masks[name]

        return keep

    @torch.no_grad()
    def _mask(self) -> None:
        for one in self._parts:
            for slot in self._momentum(one):
                slot *= self._masks[one.name]  # noqa: PLW2901  # in place
            one.weight.mul_(self._masks[one.name])

    def _move(self) -> None:
        for one in self._parts:
            before = self._masks[one.name]
            after = topology.by_sorting(one.weight, self._dense[one.name], before, self._moved(one))
            topology.restart(one.weight, self._momentum(one), before, after)
            before.copy_(after)


class ForeachTrainer(AbstractMaskedTrainer):
    """No hooks: gradients stay dense, for growth to read, until a few calls multiply all of them by masks."""

    def __init__(self, model: nn.Sequential, rate: float, density: float, delta: int) -> None:
        """Keep masks as numbers: bools would be multiplied one tensor at a time."""
        super().__init__(model, rate, density, delta)
        self._numbers = [self._masks[one.name].to(one.weight.dtype) for one in self._parts]

    @override
    def step(self, x: Tensor) -> Tensor:
        self._steps += 1
        y: Tensor = self.model(x)
        loss_of(y).backward()
        gradients = [one.weight.grad for one in self._parts if one.weight.grad is not None]
        if self.is_due:
            self._move(gradients)
        else:
            torch._foreach_mul_(gradients, self._numbers)  # as torch's own optimizers call it
            self._optimizer.step()
        self._optimizer.zero_grad()
        return y.detach()

    def _move(self, gradients: list[Tensor]) -> None:
        for one, gradient, numbers in zip(self._parts, gradients, self._numbers, strict=True):
            before = self._masks[one.name]
            after, _ = topology.by_selection(
                one.weight, gradient, before, self._moved(one), narrowed=one.weight.device.type == "cpu"
            )
            topology.restart(one.weight, self._momentum(one), before, after)
            before.copy_(after)
            numbers.copy_(after)
