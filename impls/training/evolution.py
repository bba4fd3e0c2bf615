"""Training by evolution strategies, as a person would write it: any model, any scheme.

It is what the digits study runs: the same steps for every variant.
"""

import glob
from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from esbench.digits import Outcome, Recipe, prepare, train
from esbench.registry import UnavailableError
from esbench.usage import learns_from_rows, refusal
from impls.benchmark import networks
from impls.perturbation.population import Population, perturb
from impls.perturbation.scheme import AbstractScheme, AnyScheme
from impls.perturbation.selection import perturbed, trainable


def centred_ranks(fitness: Tensor) -> Tensor:
    """Utilities by rank, from -1/2 for the least fit to 1/2 for the fittest (Wierstra et al. 2014, JMLR 15).

    They do not depend on the fitness's scale, and their mean is zero. The equally fit share a rank.

    Args:
        fitness: any shape, at least two numbers; the utilities have the same.

    """
    ordered, values = fitness.flatten().sort().values, fitness.contiguous()
    worse = torch.searchsorted(ordered, values)
    no_better = torch.searchsorted(ordered, values, right=True)
    return (worse + no_better - 1).double() / (2 * (fitness.numel() - 1)) - 0.5


def evolve(population: Population, recipe: Recipe, x: Tensor, y: Tensor, seed: int) -> None:
    """Train the population's model to name classes: fitness is minus the mean cross-entropy of a batch.

    Args:
        population: antithetic, of the recipe's members.
        recipe: how long, on how many rows, how fast.
        x: all rows to learn from, as the model reads them, on its device.
        y: [len(x)], their classes.
        seed: of the batches; the noise has the population's own.

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
        population.update(noise, centred_ranks(fitness), record)
        optimizer.step()
        schedule.step()


@prepare.register(AbstractScheme)
def find_digits(_: AnyScheme, recipe: Recipe) -> None:
    """Look for the network and for the digits.

    Raises:
        UserError: there is no such network, or scikit-learn is not installed.

    """
    networks.shape_of(recipe.network)
    networks.digits()


@train.register(AbstractScheme)
def learn_digits(scheme: AnyScheme, recipe: Recipe, seed: int, device: str) -> Outcome:
    """Train one of the networks of :mod:`impls.benchmark.networks` and test it.

    Raises:
        UnavailableError: an option of the scheme does not fit one of the layers.

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


@refusal.register(AbstractScheme)
def why_not(scheme: AnyScheme, model: nn.Module, exclude: Sequence[str]) -> str:
    """Say why :func:`perturb` refuses a model, or nothing; nothing is drawn to find out."""
    try:
        perturb(model, scheme, members=1, sigma=1.0, exclude=map(glob.escape, exclude))
    except ValueError as error:
        return str(error)
    return ""


@learns_from_rows.register(AbstractScheme)
def needs_record(scheme: AnyScheme) -> bool:
    """Whether the scheme learns from the rows of its layers."""
    return scheme.learns_from_rows


def is_unbiased(model: nn.Module, scheme: AnyScheme, sigma: float) -> bool:
    """Whether E_m has uncorrelated entries of variance 1, rather than noise of its own scale or rule."""
    if scheme.learns_from_rows:
        return False
    layers = perturbed(trainable(model, ()), {"*": scheme})
    deviations = [scheme.deviation(layer.grouped(layer.weight.detach()), sigma) for layer in layers]
    return all(not isinstance(deviation, Tensor) and deviation == 1 for deviation in deviations)


def effective_members(
    model: nn.Module, scheme: AnyScheme, members: int, x: Tensor, y: Tensor
) -> float | None:
    """Return what the quality law leaves of n members, n / (1 + kappa n / d), where closed forms are known.

    The network's kappa is the mean of its parameters', weighted by the squared length of their gradients
    at the model's present weights on these rows; noise of biases is dense, with a kappa of zero. All noise
    is taken to have variance 1.
    """
    parameters = list(model.parameters())
    with torch.enable_grad():
        loss = nn.functional.cross_entropy(model(x), y)
        squares = {
            id(parameter): float(gradient.square().sum())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True)
        }
    total = 0.0
    for layer in perturbed(trainable(model, ()), {"*": scheme}):
        kappa = layer.scheme.kappa_of(layer.grouped(layer.weight.detach()), members)
        if kappa is None:
            return None
        total += kappa * squares[id(layer.weight)]
    kappa = total / sum(squares.values())
    return members / (1 + kappa * members / sum(parameter.numel() for parameter in parameters))
