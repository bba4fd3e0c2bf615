"""Training by evolution strategies, for any model and scheme; the digits study uses it."""

import glob
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.distributed import ProcessGroup

from esbench.schema import Outcome, Recipe
from esbench.workload import UnavailableError, trainer
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.layer import perturbed_layers, trainable_modules
from impls.perturbation.population import Population, PopulationNoise, perturb
from impls.perturbation.scheme import AbstractScheme, AnyScheme
from impls.perturbation.sharding import shard
from impls.shaping import centered_ranks
from impls.training import networks


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
        # Row = repeat * members + member: each member reads each image twice, with its noise and minus it.
        rows = batch.repeat(2).repeat_interleave(population.members)
        noise = population.sample(step)
        logits, record = population.call_with_activations(x[rows], noise=noise)
        loss = nn.functional.cross_entropy(logits.float(), y[rows], reduction="none")
        fitness = -loss.view(2, recipe.batch, population.members).mean(1)
        optimizer.zero_grad()
        population.update(noise, centered_ranks(fitness), record)
        optimizer.step()
        schedule.step()


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
        try:
            population = perturb(
                model,
                scheme,
                members=recipe.members,
                sigma=recipe.sigma,
                antithetic=True,
                seed=seed,
                warn=False,
            )
        except UnsupportedError as error:
            raise UnavailableError(str(error)) from error
        x = networks.rows_for(model, data.train_x).to(device)
        y = data.train_y.to(device)
        unbiased = is_unbiased(model, scheme, recipe.sigma)
        effective = effective_members(model, scheme, recipe.members, x, y) if unbiased else None
        evolve(population, recipe, x, y, seed)
        return Outcome(accuracy=networks.accuracy(model), unbiased=unbiased, effective_members=effective)

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
    model: nn.Module, scheme: AnyScheme, members: int, x: Tensor, y: Tensor
) -> float | None:
    """Return n_eff = n / (1 + kappa n / d) of a network, or None if a layer's kappa has no closed form.

    kappa = sum_l kappa_l |g_l|^2 / sum_l |g_l|^2, where g_l is the gradient of parameter l of the
    cross-entropy on rows ``x`` with classes ``y``. The noise of biases is dense, with a kappa of zero. The
    noise must have variance 1.
    """
    parameters = list(model.parameters())
    with torch.enable_grad():
        loss = nn.functional.cross_entropy(model(x), y)
        squares = {
            id(parameter): float(gradient.square().sum())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True)
        }
    total = 0.0
    for layer in perturbed_layers(trainable_modules(model, ()), {"*": scheme}):
        layer_kappa = layer.scheme.kappa(layer.split_groups(layer.weight.detach()), members)
        if layer_kappa is None:
            return None
        total += layer_kappa * squares[id(layer.weight)]
    kappa = total / sum(squares.values())
    return members / (1 + kappa * members / sum(parameter.numel() for parameter in parameters))
