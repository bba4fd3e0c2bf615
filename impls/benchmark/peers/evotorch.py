"""EvoTorch: functional PGPE, and ``torch.func.vmap`` over a network that takes flat parameters."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.benchmark.peers.networks import OPERATORS
from impls.benchmark.peers.torch_func import PART
from impls.benchmark.peers.workload import (
    AbstractLibrary,
    AbstractOpenSearch,
    AbstractSearch,
    Task,
    cross_entropy,
)


class EvoTorchSearch(AbstractOpenSearch):
    """The state of functional PGPE."""

    def __init__(self, task: Task, chunk_size: int, algorithms: Any, net: Any) -> None:  # noqa: ANN401  modules
        self._task, self._algorithms = task, algorithms
        self._chunk_size = chunk_size or None
        self._network = net.make_functional_module(task.model, disable_autograd_tracking=True)
        self._state = algorithms.pgpe(
            center_init=task.start,
            # Its gradient is ours times sigma^2.
            center_learning_rate=task.learning_rate / task.sigma**2,
            stdev_learning_rate=0.0,
            stdev_init=task.sigma,
            objective_sense="min",
            ranking_method="centered",
            optimizer="sgd",
        )
        torch.manual_seed(task.seed)

    @override
    def draw(self) -> Tensor:
        drawn: Tensor = self._algorithms.pgpe_ask(self._state, popsize=self._task.population)
        return drawn

    @override
    def evaluate(self, drawn: Tensor, x: Tensor) -> Tensor:
        def loss(parameters: Tensor) -> Tensor:
            return cross_entropy(self._network(parameters, x), self._task.y)

        losses: Tensor = torch.func.vmap(loss, chunk_size=self._chunk_size)(drawn)
        return losses

    @override
    def member(self, drawn: Tensor, index: int) -> Tensor:
        return drawn[index]

    @override
    def step(self, x: Tensor) -> Tensor:
        drawn = self.draw()
        losses = self.evaluate(drawn, x)
        self._state = self._algorithms.pgpe_tell(self._state, drawn, losses)
        return losses

    @override
    def center(self) -> Tensor:
        center: Tensor = self._state.optimizer_state.center
        return center


@variant(
    operators=OPERATORS,
    version="0.6.1",
    chunk_size=(0, PART),
    source="https://docs.evotorch.ai/latest/reference/evotorch/algorithms/functional/funcpgpe",
)
@dataclass(frozen=True)
class EvoTorch(AbstractLibrary):
    """Functional PGPE with symmetric sampling, centered ranks, SGD and a constant sigma.

    ``vmap`` evaluates ``chunk_size`` members at a time, 0 for all.
    """

    NAME: ClassVar[str] = "evotorch"
    chunk_size: int = 0

    @override
    def search(self, task: Task) -> AbstractSearch:
        return EvoTorchSearch(
            task,
            self.chunk_size,
            *self.modules("evotorch.algorithms.functional", "evotorch.neuroevolution.net"),
        )
