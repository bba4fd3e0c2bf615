"""Generations without a library: ``torch.func.vmap`` by hand, a plain loop, and backpropagation."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from esbench.registry import variant
from impls.benchmark.peers.networks import MLP, OPERATORS
from impls.benchmark.peers.workload import (
    AbstractOpenSearch,
    AbstractPeer,
    AbstractSearch,
    Task,
    cross_entropy,
    mean_loss,
)
from impls.benchmark.training.workload import check_supported
from impls.shaping import centered_ranks

PART = 128
"""Members that are evaluated at a time, so that their activations stay in the cache."""
LOOPED_MEMBERS = 2048
"""The most evaluations of a loop."""


class Drawn(NamedTuple):
    """Noise of the pairs [pairs, d], and the center [d]."""

    noise: Tensor
    center: Tensor


class AbstractDenseSearch(AbstractOpenSearch):
    """Dense noise for each pair, a matrix product as the update, and SGD."""

    def __init__(self, task: Task) -> None:
        self._task, self._center = task, task.start
        self._generator = torch.Generator(self._center.device).manual_seed(task.seed)

    @override
    def draw(self) -> Drawn:
        center = self._center
        size = (self._task.pairs, len(center))
        noise = torch.randn(size, generator=self._generator, dtype=center.dtype, device=center.device)
        return Drawn(noise, center)

    @override
    def member(self, drawn: Drawn, index: int) -> Tensor:
        side, pair = divmod(index, self._task.pairs)
        return drawn.center + (1 - 2 * side) * self._task.sigma * drawn.noise[pair]

    @override
    def step(self, x: Tensor) -> Tensor:
        task, drawn = self._task, self.draw()
        losses = self.evaluate(drawn, x)
        plus, minus = centered_ranks(losses).to(losses.dtype).view(2, -1)
        slope = (plus - minus) @ drawn.noise / (task.population * task.sigma)
        self._center = self._center - task.learning_rate * slope
        return losses

    @override
    def center(self) -> Tensor:
        return self._center


class VmapSearch(AbstractDenseSearch):
    """All members at once."""

    def __init__(self, task: Task, chunk_size: int) -> None:
        super().__init__(task)
        self._chunk_size = chunk_size or None

    @override
    @torch.no_grad()
    def evaluate(self, drawn: Drawn, x: Tensor) -> Tensor:
        task = self._task

        def loss(parameters: Tensor) -> Tensor:
            return mean_loss(task.model, parameters, x, task.y)

        scaled = task.sigma * drawn.noise
        members = torch.cat([drawn.center + scaled, drawn.center - scaled])
        losses: Tensor = torch.func.vmap(loss, chunk_size=self._chunk_size)(members)
        return losses


@variant(operators=OPERATORS, source="https://docs.pytorch.org/docs/stable/generated/torch.func.vmap.html")
@variant(
    operators=OPERATORS,
    chunk_size=PART,
    source="https://docs.pytorch.org/docs/stable/generated/torch.func.vmap.html",
)
@dataclass(frozen=True)
class VmapByHand(AbstractPeer):
    """``torch.func.vmap`` over the members' parameters; ``chunk_size`` members at a time, 0 for all."""

    chunk_size: int = 0

    @override
    def search(self, task: Task) -> AbstractSearch:
        return VmapSearch(task, self.chunk_size)


class BatchedProductsSearch(AbstractDenseSearch):
    """The MLP's layers as batched products of the members' weights, 128 members at a time.

    Activations have the rows of a member last: [members, units, rows].
    """

    @override
    @torch.no_grad()
    def evaluate(self, drawn: Drawn, x: Tensor) -> Tensor:
        task = self._task
        shapes = [parameter.shape for parameter in task.model.parameters()]
        sizes = [shape.numel() for shape in shapes]
        losses = []
        for side, noise in itertools.product((1, -1), drawn.noise.split(PART)):
            parts = torch.add(drawn.center, noise, alpha=side * task.sigma).split(sizes, dim=1)
            weight, bias, last_weight, last_bias = map(_view_as, parts, shapes)
            hidden = torch.baddbmm(bias, weight, x.T.expand(len(noise), -1, -1)).relu_()
            logits = torch.baddbmm(last_bias, last_weight, hidden)
            y = task.y.expand(len(noise), -1)
            losses.append(functional.cross_entropy(logits, y, reduction="none").mean(1))
        return torch.cat(losses)


def _view_as(part: Tensor, shape: torch.Size) -> Tensor:
    """View the members' values of a parameter [members, numbers] as matrices; a bias is a column."""
    return part.unflatten(1, shape if len(shape) > 1 else (*shape, 1))


@variant(operators=(MLP,))
@dataclass(frozen=True)
class BatchedProducts(AbstractPeer):
    """Dense noise and the MLP's two layers as batched products, written by hand for this network."""

    @override
    def search(self, task: Task) -> AbstractSearch:
        return BatchedProductsSearch(task)


def _write(values: Tensor, parameters: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Copy values [d] into parameters of these sizes."""
    for parameter, part in zip(parameters, values.split(sizes), strict=True):
        parameter.copy_(part.view_as(parameter))


class LoopSearch(AbstractDenseSearch):
    """One member after another."""

    @override
    @torch.no_grad()
    def evaluate(self, drawn: Drawn, x: Tensor) -> Tensor:
        task, model = self._task, self._task.model
        parameters = [*model.parameters()]
        sizes, before = [parameter.numel() for parameter in parameters], task.start
        losses = []
        for sign in (1, -1):
            for noise in drawn.noise:
                _write(drawn.center + sign * task.sigma * noise, parameters, sizes)
                losses.append(cross_entropy(model(x), task.y))
        _write(before, parameters, sizes)
        return torch.stack(losses)


@variant(mode="naive", baseline=True, operators=OPERATORS)
@dataclass(frozen=True)
class LoopOverMembers(AbstractPeer):
    """The plain network, into which one member after another is copied."""

    @override
    def search(self, task: Task) -> AbstractSearch:
        check_supported(
            task.population <= LOOPED_MEMBERS,
            f"a loop takes seconds: measured up to {LOOPED_MEMBERS} evaluations",
        )
        return LoopSearch(task)


class BackpropagationSearch(AbstractSearch):
    """SGD on the gradient of as many rows as a population sees."""

    def __init__(self, task: Task) -> None:
        self._task, self._center = task, task.start

    @override
    def step(self, x: Tensor) -> Tensor:
        task = self._task
        leaf = self._center.detach().requires_grad_()
        with torch.enable_grad():
            rows = x.expand(task.population, *x.shape).flatten(0, 1)
            y = task.y.repeat(task.population)
            loss = mean_loss(task.model, leaf, rows, y)
            (slope,) = torch.autograd.grad(loss, leaf)
        self._center = leaf.detach() - task.learning_rate * slope
        return loss.detach()

    @override
    def center(self) -> Tensor:
        return self._center


@variant(mode="base", baseline=True, operators=OPERATORS)
@dataclass(frozen=True)
class Backpropagation(AbstractPeer):
    """The plain network with backpropagation, on as many rows as the population sees."""

    SHAPES_LOSSES: ClassVar[bool] = False

    @override
    def search(self, task: Task) -> AbstractSearch:
        return BackpropagationSearch(task)

    @override
    def effective_members(self, task: Task, x: Tensor) -> None:
        return None  # it has the gradient
