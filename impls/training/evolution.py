"""Training by evolution strategies, for any model and scheme; the digits study uses it."""

import glob
from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from esbench.schema import Outcome, Recipe
from esbench.workload import UnavailableError, trainer
from impls.perturbation.layer import perturbed_layers, trainable_modules
from impls.perturbation.population import Population, perturb
from impls.perturbation.scheme import AbstractScheme, AnyScheme
from impls.training import networks


def centered_ranks(fitness: Tensor) -> Tensor:
    """Return utilities by rank, from -1/2 for the lowest fitness to 1/2 (Wierstra et al. 2014, JMLR 15).

    They have mean zero and do not depend on the scale of the fitness; equal fitness gives equal utilities.

    Args:
        fitness: any shape, at least two numbers.

    """
    ordered, values = fitness.flatten().sort().values, fitness.contiguous()
    worse = torch.searchsorted(ordered, values)
    no_better = torch.searchsorted(ordered, values, right=True)
    return (worse + no_better - 1).double() / (2 * (fitness.numel() - 1)) - 0.5


def evolve(population: Population, recipe: Recipe, x: Tensor, y: Tensor, seed: int) -> None:
    """Train the population's model to classify; the fitness is minus the mean cross-entropy of a batch.

    Args:
        population: antithetic, with the recipe's number of members.
        recipe: steps, batch size and learning rate.
        x: training rows in the shape that the model reads, on its device.
        y: [len(x)], their classes.
        seed: for the batches; the noise has the population's seed.

    """
    optimizer = torch.optim.Adam(population.model.parameters(), recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    generator = Generator().manual_seed(seed)
    for step in range(recipe.steps):
        batch = torch.randint(len(y), (recipe.batch,), generator=generator).to(y.device)
        # Row = repeat * members + member: every member sees each image twice, once with the negated noise.
        repeats = batch.repeat(2).repeat_interleave(population.members)
        noise = population.sample(step)
        logits, record = population.call_with_activations(x[repeats], noise)
        loss = nn.functional.cross_entropy(logits.float(), y[repeats], reduction="none")
        fitness = -loss.view(2, recipe.batch, population.members).mean(1)
        optimizer.zero_grad()
        population.update(noise, centered_ranks(fitness), record)
        optimizer.step()
        schedule.step()


class PopulationTrainer:
    """The trainer of schemes that perturb a population, for recommendations and studies."""

    def learns_from_rows(self, scheme: AnyScheme) -> bool:
        """Return whether the scheme's update needs the rows that its layers saw."""
        return scheme.learns_from_rows

    def refusal(self, scheme: AnyScheme, model: nn.Module, exclude: Sequence[str]) -> str:
        """Return why :func:`perturb` refuses a model, or an empty string; no noise is drawn."""
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
        """Train one of the networks of :mod:`impls.training.networks` and test it.

        Raises:
            UnavailableError: an option of the scheme does not fit a layer.

        """
        data = networks.digits()
        model = networks.untrained(recipe.network, seed).to(device)
        try:
            population = perturb(
                model, scheme, members=recipe.members, sigma=recipe.sigma, antithetic=True, seed=seed
            )
        except ValueError as error:
            raise UnavailableError(str(error)) from error
        x = networks.rows_for(model, data.train_x).to(device)
        y = data.train_y.to(device)
        unbiased = is_unbiased(model, scheme, recipe.sigma)
        effective = effective_members(model, scheme, recipe.members, x, y) if unbiased else None
        evolve(population, recipe, x, y, seed)
        return Outcome(accuracy=networks.accuracy(model), unbiased=unbiased, effective_members=effective)


@trainer.register(AbstractScheme)
def _trainer(_: AnyScheme) -> PopulationTrainer:
    return PopulationTrainer()


def is_unbiased(model: nn.Module, scheme: AnyScheme, sigma: float) -> bool:
    """Return whether E_m has uncorrelated entries of variance 1, which the law of n_eff assumes."""
    if scheme.learns_from_rows:
        return False
    layers = perturbed_layers(trainable_modules(model, ()), {"*": scheme})
    deviations = [scheme.noise_std(layer.split_groups(layer.weight.detach()), sigma) for layer in layers]
    return all(not isinstance(deviation, Tensor) and deviation == 1 for deviation in deviations)


def effective_members(
    model: nn.Module, scheme: AnyScheme, members: int, x: Tensor, y: Tensor
) -> float | None:
    """Return n_eff = n / (1 + kappa n / d) of a network, or None if a kappa has no closed form.

    The network's kappa is the mean of its layers', weighted by their squared gradient on these rows at the
    current weights. Biases have dense noise, with a kappa of zero. The noise must have variance 1.
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
        kappa = layer.scheme.kappa(layer.split_groups(layer.weight.detach()), members)
        if kappa is None:
            return None
        total += kappa * squares[id(layer.weight)]
    kappa = total / sum(squares.values())
    return members / (1 + kappa * members / sum(parameter.numel() for parameter in parameters))
