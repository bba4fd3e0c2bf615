"""torcheggroll: low-rank noise that is written out for each member, and ``torch.func.vmap``."""

import copy
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.utils import parameters_to_vector
from typing_extensions import override

from esbench.registry import variant
from impls.benchmark.peers.networks import OPERATORS
from impls.benchmark.peers.workload import (
    AbstractLibrary,
    AbstractSearch,
    Task,
    cross_entropy,
)


class TorchEggrollSearch(AbstractSearch):
    """The library's optimizer of a copy of the network."""

    def __init__(self, task: Task, rank: int, library: Any) -> None:  # noqa: ANN401  a module of the library
        self._y, self._model = task.y, copy.deepcopy(task.model).requires_grad_()
        # Its shaping has a deviation of 1, centered ranks have one of 1 / sqrt(12), and its gradient is
        # multiplied by sigma^2 sqrt(population).
        scale = task.sigma**2 * math.sqrt(12 * task.population)
        self._search = library.TorchEggrollES(
            self._model,
            pop_size=task.population,
            sigma=task.sigma,
            lr=task.learning_rate / scale,
            rank=rank,
        )

    @override
    def step(self, x: Tensor) -> Tensor:
        self._search.step(x, cross_entropy, self._y)
        return self.center()

    @override
    def center(self) -> Tensor:
        return parameters_to_vector(self._model.parameters()).detach()


@variant(
    operators=OPERATORS,
    version="0.2.0",
    rank=(1, 4),
    source="https://pypi.org/project/torcheggroll/0.2.0/",
)
@dataclass(frozen=True)
class TorchEggroll(AbstractLibrary):
    """TorchEggrollES with antithetic sampling and z-scores, its only shaping; rank 4 is its default."""

    NAME: ClassVar[str] = "torcheggroll"
    rank: int = 4

    @override
    def search(self, task: Task) -> AbstractSearch:
        return TorchEggrollSearch(task, self.rank, *self.modules("torcheggroll"))
