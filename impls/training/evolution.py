"""Training by evolution strategies, for any model and scheme; the digits study uses it."""

import glob
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import msgspec
import torch
from torch import Generator, Tensor, nn
from torch.distributed import ProcessGroup

from esbench.schema import Outcome, Recipe, Task
from esbench.workload import UnavailableError, trainer
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.layer import perturbed_layers, trainable_modules
from impls.perturbation.population import Population, PopulationNoise, perturb
from impls.perturbation.scheme import AbstractScheme, AnyScheme
from impls.perturbation.sharding import shard
from impls.schemes.dense import Perturbed
from impls.shaping import centered_ranks
from impls.training import networks
from impls.training.tasks import TASKS, AbstractTask, cross_entropy_fitness

MOST_STEPS = 10**6
"""Seeds of batches of two training runs differ if no run has more steps than this."""
MEASURED = 1024
"""Antithetic pairs of each of the two estimates by which the gradient of a task is measured."""


def evolve(population: Population, recipe: Recipe, x: Tensor, y: Tensor, seed: int) -> None:
    """Train the population's model to classify; the fitness is minus the mean cross-entropy of a batch.

    Args:
        population: antithetic, with the recipe's number of members.
        recipe: steps, batch size and learning rate.
        x: training rows in the shape that the model reads, on the model's device.
        y: classes of the rows, int64 [len(x)].
        seed: seed of the batches; the seed of the noise is the population's.
    """
    optimizer = torch.optim.Adam(population.model.parameters(), recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    generator = Generator().manual_seed(seed)
    for step in range(recipe.steps):
        batch = torch.randint(len(y), (recipe.batch,), generator=generator).to(y.device)
        noise = population.sample(step)
        fitness, record = cross_entropy_fitness(population, noise, x[batch], y[batch])
        optimizer.zero_grad()
        population.update(noise, centered_ranks(fitness), record)
        optimizer.step()
        schedule.step()


class Evolution:
    """A training run of a task, step by step."""

    def __init__(self, task: AbstractTask, scheme: AnyScheme, settings: Task, seed: int, device: str) -> None:
        """Make the network of a seed, and a population of it.

        Raises:
            UnavailableError: an option of the scheme does not fit a layer, or rollouts cannot train it.
        """
        if scheme.learns_from_rows and not task.learns_from_rows:
            raise UnavailableError("its update needs the inputs of the layers, which a rollout does not keep")
        self._task, self._settings, self._seed = task, settings, seed
        self.model = task.model(seed).to(device)
        self._population = _population(self.model, scheme, settings, seed)
        self._optimizer = torch.optim.Adam(self.model.parameters(), settings.learning_rate)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, settings.steps)

    def estimate(self, number: int) -> dict[str, Tensor]:
        """Return the gradient estimate of a step by parameter name; the number decides noise and batch."""
        noise = self._population.sample(number)
        batch_seed = self._seed * MOST_STEPS + number
        try:
            fitness, record = self._task.fitness(self._population, noise, self._settings.batch, batch_seed)
        except UnsupportedError as error:
            raise UnavailableError(str(error)) from error
        self._optimizer.zero_grad()
        self._population.update(noise, centered_ranks(fitness), record)
        return {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    def step(self, number: int) -> None:
        """Do a training step."""
        self.estimate(number)
        self._optimizer.step()
        self._schedule.step()

    def score(self) -> float:
        """Return the score of the network."""
        return self._task.score(self.model)


class PopulationTrainer:
    """The trainer of schemes that perturb a population, for recommendations and studies."""

    def learns_from_rows(self, scheme: AnyScheme) -> bool:
        """Return whether the scheme's update needs the inputs of its layers."""
        return scheme.learns_from_rows

    def refusal(self, scheme: AnyScheme, model: nn.Module, exclude: Sequence[str]) -> str:
        """Return the reason why :func:`perturb` refuses a model, or an empty string."""
        try:
            perturb(model, scheme, members=1, sigma=1.0, exclude=map(glob.escape, exclude))
        except ValueError as error:
            return str(error)
        return ""

    def prepare(self, recipe: Recipe) -> None:
        """Raise UserError if the network is unknown or scikit-learn is not installed."""
        networks.shape_of(recipe.network)
        networks.digits()

    def train(self, scheme: AnyScheme, recipe: Recipe, seed: int, device: str) -> Outcome:
        """Train a network of :mod:`impls.training.networks` and test it.

        Raises:
            UnavailableError: an option of the scheme does not fit a layer.
        """
        data = networks.digits()
        model = networks.untrained(recipe.network, seed).to(device)
        population = _population(model, scheme, recipe, seed)
        x = networks.rows_for(model, data.train_x).to(device)
        y = data.train_y.to(device)
        unbiased = is_unbiased(model, scheme, recipe.sigma)
        effective = (
            effective_members(model, scheme, recipe.members, squares(model, x, y)) if unbiased else None
        )
        evolve(population, recipe, x, y, seed)
        return Outcome(accuracy=networks.accuracy(model), unbiased=unbiased, effective_members=effective)

    def tasks(self) -> tuple[Task, ...]:
        """Return the tasks that can be learned."""
        return tuple(task.task for task in TASKS.values())

    def prepare_task(self, task: Task) -> None:
        """Raise UserError if the task needs a package that is not installed."""
        TASKS[task.name].prepare()

    def begin(self, scheme: AnyScheme, task: Task, seed: int, device: str) -> Evolution:
        """Return a training run of a task that has not begun.

        Raises:
            UnavailableError: the scheme cannot be trained on this task.
        """
        return Evolution(TASKS[task.name], scheme, task, seed, device)

    def effective_members(self, scheme: AnyScheme, task: Task, device: str) -> float | None:
        """Return n_eff of a task's population, None without a variance of 1 or a closed form of kappa.

        It is that of :func:`effective_members` at the initial weights of seed 0, with measured gradients.
        """
        model = TASKS[task.name].model(0).to(device)
        if not is_unbiased(model, scheme, task.sigma):
            return None
        return effective_members(model, scheme, task.members, _measured_squares(task, device))

    def sharded_step(
        self, scheme: AnyScheme, recipe: Recipe, device: str, group: ProcessGroup
    ) -> tuple[Callable[[int], None], int]:
        """Return a training step on the same batch whose population is split over the ranks of a group.

        Raises:
            ValueError: the population cannot be split over these ranks, or as for :func:`perturb`.
        """
        data, model = networks.digits(), networks.untrained(recipe.network, 0).to(device)
        population = perturb(
            model, scheme, members=recipe.members, sigma=recipe.sigma, antithetic=True, warn=False
        )
        ranks = shard(population, group)
        optimizer = torch.optim.Adam(model.parameters(), recipe.learning_rate)
        x = networks.rows_for(model, data.train_x[: recipe.batch]).to(device)
        y = data.train_y[: recipe.batch].to(device)

        def evaluate(noise: PopulationNoise) -> Tensor:
            logits = population(population.rows(x, noise), noise=noise)
            loss = nn.functional.cross_entropy(logits.float(), population.rows(y, noise), reduction="none")
            return population.fitness(-loss, noise)

        def step(number: int) -> None:
            fitness = ranks.evaluate(number, evaluate)
            optimizer.zero_grad()
            ranks.update(centered_ranks(fitness))
            optimizer.step()

        return step, sum(parameter.numel() for parameter in model.parameters())


@trainer.register(AbstractScheme)
def _trainer(_: AnyScheme) -> PopulationTrainer:
    return PopulationTrainer()


def is_unbiased(model: nn.Module, scheme: AnyScheme, sigma: float) -> bool:
    """Return whether a scheme's noise has variance 1 in every layer, as the formula of n_eff assumes."""
    if scheme.learns_from_rows:
        return False
    layers = perturbed_layers(trainable_modules(model, ()), {"*": scheme})
    deviations = [scheme.noise_std(layer.split_groups(layer.weight.detach()), sigma) for layer in layers]
    return all(not isinstance(deviation, Tensor) and deviation == 1 for deviation in deviations)


def effective_members(
    model: nn.Module, scheme: AnyScheme, members: int, squares: Mapping[str, float]
) -> float | None:
    """Return n_eff = n / (1 + kappa n / d) of a network, or None if a layer's kappa has no closed form.

    kappa = sum_l kappa_l |g_l|^2 / sum_l |g_l|^2, where g_l is the gradient of parameter l, and ``squares``
    has |g_l|^2 by name. The noise of biases is dense, with a kappa of zero. The noise must have variance 1.
    """
    total = 0.0
    for layer in perturbed_layers(trainable_modules(model, ()), {"*": scheme}):
        layer_kappa = layer.scheme.kappa(layer.split_groups(layer.weight.detach()), members)
        if layer_kappa is None:
            return None
        total += layer_kappa * squares[layer.weight_path]
    kappa = total / sum(squares.values())
    return members / (1 + kappa * members / sum(parameter.numel() for parameter in model.parameters()))


def squares(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return |g_l|^2 of each parameter, by name, for the cross-entropy on rows ``x`` with classes ``y``."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    with torch.enable_grad():
        gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), parameters)
    return {name: float(gradient.square().sum()) for name, gradient in zip(names, gradients, strict=True)}


@cache
def _measured_squares(task: Task, device: str) -> dict[str, float]:
    """Return |g_l|^2 of each parameter of a task's network, by name, at the initial weights of seed 0.

    g is the gradient that training follows: of the mean utility over Gaussian perturbations. The dot product
    of two independent estimates has the mean |g_l|^2; a negative one is set to 0.
    """
    settings = msgspec.structs.replace(task, members=MEASURED)
    evolution = Evolution(TASKS[task.name], Perturbed(), settings, 0, device)
    one, other = evolution.estimate(0), evolution.estimate(1)
    return {name: max(0.0, float((gradient * other[name]).sum())) for name, gradient in one.items()}


def _population(model: nn.Module, scheme: AnyScheme, settings: Recipe | Task, seed: int) -> Population:
    """Return a population of a network; raise an UnavailableError if the scheme does not fit it."""
    try:
        return perturb(
            model,
            scheme,
            members=settings.members,
            sigma=settings.sigma,
            antithetic=True,
            seed=seed,
            warn=False,
        )
    except UnsupportedError as error:
        raise UnavailableError(str(error)) from error
