"""Generations of esbench's populations, as docs/training.md has them."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from typing_extensions import override

from esbench.registry import variant
from impls.benchmark.peers.networks import OPERATORS
from impls.benchmark.peers.workload import (
    AbstractOpenSearch,
    AbstractPeer,
    AbstractSearch,
    Task,
    cross_entropy,
)
from impls.perturbation.noise import BLOCK
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
    """A population and its optimizer; ``part`` pairs see ``rows`` rows at a time, 0 for all."""

    def __init__(self, task: Task, scheme: str, part: int = 0, rows: int = 0) -> None:
        self._task, self._number, self._part = task, 0, part or task.pairs
        self._rows = rows or len(task.y)
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
    def draw(self) -> list[PopulationNoise]:
        pairs, part = self._task.pairs, self._part
        parts = [range(start, min(start + part, pairs)) for start in range(0, pairs, part)]
        noises = [self._population.sample(self._number, members) for members in parts]
        self._number += 1
        return noises

    @override
    def evaluate(self, drawn: list[PopulationNoise], x: Tensor) -> Tensor:
        return torch.cat([self._losses(noise, x) for noise in drawn], dim=1).flatten()

    def _losses(self, noise: PopulationNoise, x: Tensor) -> Tensor:
        """Return the losses of a part of the members [2, members]."""
        population, total = self._population, torch.zeros(())
        for some_x, some_y in zip(x.split(self._rows), self._task.y.split(self._rows), strict=True):
            logits = population(population.rows(some_x, noise), noise=noise)
            per_row = cross_entropy(logits, population.rows(some_y, noise), reduction="none")
            total = total + population.fitness(per_row, noise) * (len(some_x) / len(x))
        return total

    @override
    def member(self, drawn: list[PopulationNoise], index: int) -> Tensor:
        side, pair = divmod(index, self._task.pairs)
        number, pair_of_part = divmod(pair, self._part)
        weights = self._population.member(drawn[number], pair_of_part, negated=side == 1)
        return torch.cat([weights[name].flatten() for name, _ in self._model.named_parameters()])

    @override
    def step(self, x: Tensor) -> Tensor:
        noises = self.draw()
        losses = self.evaluate(noises, x)
        utilities = centered_ranks(-losses).view(2, -1).split(self._part, dim=1)
        self._optimizer.zero_grad()
        for noise, utilities_of_part in zip(noises, utilities, strict=True):
            self._population.update(noise, utilities_of_part)
        self._optimizer.step()
        return losses

    @override
    def center(self) -> Tensor:
        return parameters_to_vector(self._model.parameters()).detach()


@variant(operators=OPERATORS, scheme="SparsePerturbed", part=BLOCK, rows=16, source="ours: docs/training.md")
@variant(operators=OPERATORS, scheme="LowRank", part=BLOCK, source="ours: docs/training.md")
@variant(operators=OPERATORS, scheme=tuple(SCHEMES), source="ours: docs/training.md")
@dataclass(frozen=True)
class Esbench(AbstractPeer):
    """``impls.perturb`` with one of esbench's schemes for the weights; biases have dense noise.

    ``part`` pairs see ``rows`` rows at a time, so that their activations stay in the cache; 0 for all.
    """

    scheme: str
    part: int = 0
    rows: int = 0

    @override
    def search(self, task: Task) -> AbstractSearch:
        return PopulationSearch(task, self.scheme, self.part, self.rows)

    @override
    def effective_members(self, task: Task, x: Tensor) -> float | None:
        model = copy.deepcopy(task.model).requires_grad_()
        return effective_members(model, SCHEMES[self.scheme], task.pairs, squares(model, x, task.y))
