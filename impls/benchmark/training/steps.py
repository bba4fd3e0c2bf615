"""Ways to take a training step: with the update inside the backward pass, and after it."""

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from esbench.registry import variant
from impls.benchmark.training import rules
from impls.benchmark.training.stacks import OPERATORS
from impls.training.gathering import Granularity
from impls.training.optimizer import OptimizerInBackward, Rule

MODELS = 30
"""So many models are made and let go of, to see how many stay."""


class Attached(NamedTuple):
    """What updates a model: what is called behind the backward pass, its optimizers, and how it lets go."""

    finish: Callable[[], object]
    optimizers: Sequence[Optimizer] = ()
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class AbstractStep(ABC):
    """A way to take a training step."""

    kernel: rules.Kernel = "foreach"

    @abstractmethod
    def attach(self, model: nn.Module, rule: Rule) -> Attached:
        """Make what updates a model."""


@variant(mode="base", baseline=True, operators=OPERATORS, source="torch.optim")
@variant(mode="naive", baseline=True, operators=OPERATORS, kernel="loop", source="torch.optim")
@variant(operators=OPERATORS, kernel="fused", source="torch.optim")
@dataclass(frozen=True)
class StandardStep(AbstractStep):
    """The ordinary optimizer behind the backward pass; ``loop`` takes one parameter after another."""

    @override
    def attach(self, model: nn.Module, rule: Rule) -> Attached:
        optimizer = rule(list(model.parameters()))

        def finish() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return Attached(finish, [optimizer])


@variant(operators=OPERATORS, source="the floor")
@dataclass(frozen=True)
class NoUpdate(AbstractStep):
    """Forward and backward only: no step takes less."""

    @override
    def attach(self, model: nn.Module, rule: Rule) -> Attached:
        return Attached(model.zero_grad)


@variant(operators=OPERATORS, source="torch.optim inside Tensor.register_post_accumulate_grad_hook")
@variant(operators=OPERATORS, kernel="fused", source="ours")
@variant(operators=OPERATORS, kernel="foreach", granularity=("bucket", "module"), source="ours")
@variant(operators=OPERATORS, kernel="fused", granularity="bucket", source="ours")
@variant(operators=OPERATORS, kernel="foreach", granularity="bucket", guarded=True, source="ours")
@dataclass(frozen=True)
class StepInBackward(AbstractStep):
    """Updates as soon as gradients are ready; ``guarded`` leaves out what is not finite."""

    kernel: rules.Kernel = "loop"
    granularity: Granularity = "parameter"
    guarded: bool = False

    @override
    def attach(self, model: nn.Module, rule: Rule) -> Attached:
        optimizer = OptimizerInBackward(model, rule, self.granularity, skip_nonfinite=self.guarded)
        return Attached(optimizer.step, [optimizer], optimizer.close)


@variant(operators=OPERATORS, source="PyTorch's tutorial on stepping in backward, as it is usually copied")
@dataclass(frozen=True)
class LeakingHook(AbstractStep):
    """A hook that reaches its own parameter: a cycle which no garbage collection sees. Models never go."""

    kernel: rules.Kernel = "loop"

    @override
    def attach(self, model: nn.Module, rule: Rule) -> Attached:
        optimizers: dict[Tensor, Optimizer] = {one: rule([one]) for one in model.parameters()}

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        return Attached(lambda: None, list(optimizers.values()))


def left_alive(scheme: AbstractStep) -> tuple[int, int]:
    """Return how many of some small models stay when nobody holds them: before and after a collection.

    Garbage collection is off meanwhile: what goes, goes by itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        models = [_let_go(scheme) for _ in range(MODELS)]
        without = sum(model() is not None for model in models)
        gc.collect()
        return without, sum(model() is not None for model in models)
    finally:
        if was_enabled:
            gc.enable()


def _let_go(scheme: AbstractStep) -> "weakref.ref[Tensor]":
    """Train a model for a step, let go of it, and return a weak reference to its weight."""
    model = nn.Linear(4, 4)
    attached = scheme.attach(model, rules.adamw(scheme.kernel, "cpu"))
    rules.loss_of(model(torch.ones(2, 4))).backward()
    attached.finish()
    attached.close()
    return weakref.ref(model.weight)
