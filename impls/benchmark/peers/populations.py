"""Generations of esbench's populations, as docs/training.md has them."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parameters_to_vector
from typing_extensions import override

from esbench.registry import variant
from impls.benchmark.peers.workload import OPERATORS, AbstractOpenSearch, AbstractPeer, AbstractSearch, Task
from impls.perturbation.population import PopulationNoise, perturb
from impls.schemes.dense import Perturbed
from impls.schemes.hadamard import Hadamard
from impls.schemes.lowrank import LowRank
from impls.schemes.sparse import SparsePerturbed
from impls.shaping import centered_ranks
from impls.training.evolution import effective_members, squares

SCHEMES = {
    type(scheme).__name__: scheme
    for scheme in (LowRank(rank=1), SparsePerturbed(k=1), Hadamard(), Perturbed())
}


class PopulationSearch(AbstractOpenSearch):
    """A population and its optimizer."""

    def __init__(self, task: Task, scheme: str) -> None:
        self._task, self._number = task, 0
        self._model = copy.deepcopy(task.model).requires_grad_()
        self._population = perturb(
            self._model,
            SCHEMES[scheme],
            members=task.pairs,
            sigma=task.sigma,
            antithetic=True,
            seed=task.seed,
            warn=False,
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=task.learning_rate)

    @override
    def draw(self) -> PopulationNoise:
        noise = self._population.sample(self._number)
        self._number += 1
        return noise

    @override
    def evaluate(self, drawn: PopulationNoise, x: Tensor) -> Tensor:
        population = self._population
        logits = population(population.rows(x), noise=drawn)
        per_row = functional.cross_entropy(logits, population.rows(self._task.y), reduction="none")
        return population.fitness(per_row).flatten()

    @override
    def member(self, drawn: PopulationNoise, index: int) -> Tensor:
        side, pair = divmod(index, self._task.pairs)
        weights = self._population.member(drawn, pair, negated=side == 1)
        return torch.cat([weights[name].flatten() for name, _ in self._model.named_parameters()])

    @override
    def step(self, x: Tensor) -> Tensor:
        noise = self.draw()
        losses = self.evaluate(noise, x)
        self._optimizer.zero_grad()
        self._population.update(noise, centered_ranks(-losses))
        self._optimizer.step()
        return losses

    @override
    def center(self) -> Tensor:
        return parameters_to_vector(self._model.parameters()).detach()


@variant(operators=OPERATORS, scheme=tuple(SCHEMES), source="ours: docs/training.md")
@dataclass(frozen=True)
class Esbench(AbstractPeer):
    """``impls.perturb`` with one of esbench's schemes for the weights; biases have dense noise."""

    scheme: str

    @override
    def search(self, task: Task) -> AbstractSearch:
        return PopulationSearch(task, self.scheme)

    @override
    def effective_members(self, task: Task, x: Tensor) -> float | None:
        model = copy.deepcopy(task.model).requires_grad_()
        return effective_members(model, SCHEMES[self.scheme], task.pairs, squares(model, x, task.y))
