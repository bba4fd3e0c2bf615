"""The correctness oracle: forward, update and noise of any scheme, held to the slow truth.

Nothing here names a scheme. The truth of a member is its written-out weight W + sigma E_m, run
through the plain model; the truth of an update is the sum of utilities times written-out E_m.
"""

import copy
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from esbench.registry import WrongResultError
from impls.noise import BLOCK
from impls.population import Population, PopulationNoise, perturb
from impls.scheme import AnyScheme

STEPS = 48
"""Steps over which the moments of the noise are taken."""

DEVIATIONS = 6.0
"""How many standard errors, estimated from the data, a moment may be off."""


@dataclass(frozen=True)
class Setting:
    """A scheme on a model: what the exact check needs to make populations of it.

    Attributes:
        scheme: the scheme.
        model: a plain model in float64, with biases.
        features: the shape of one input row.
        sigma: the scale of the noise.

    """

    scheme: AnyScheme
    model: nn.Module
    features: tuple[int, ...]
    sigma: float = 0.1

    def population(self, members: int, *, antithetic: bool = False, seed: int = 0) -> Population:
        """Make a population of the model."""
        return perturb(
            self.model, self.scheme, members=members, sigma=self.sigma, antithetic=antithetic, seed=seed
        )

    def rows(self, count: int) -> Tensor:
        """Make that many input rows, always the same ones."""
        device = next(self.model.parameters()).device
        return torch.randn(
            count, *self.features, dtype=torch.float64, generator=Generator().manual_seed(1)
        ).to(device)


def check(setting: Setting) -> None:
    """Run every exact check on a scheme: forward, update, moments, purity, splits.

    Raises:
        WrongResultError: the first check that fails, in words.

    """
    members, repeats = 5, 4
    x = setting.rows(members * repeats)
    for antithetic in (False, True):
        population = setting.population(members, antithetic=antithetic)
        check_forward(population, x, range(members))
        check_update(population, range(members))
    check_purity(setting)
    check_moments(setting)
    check_split(setting)


@torch.no_grad()
def check_forward(population: Population, x: Tensor, members: Iterable[int]) -> None:
    """Hold the rows of some members to the plain model with each member's own weights.

    The reference is computed in float64. The error may be at most twice that of the same slow
    computation in the model's own dtype.

    Raises:
        WrongResultError: outputs are missing, not finite, changed the model or differ.

    """
    model, noise = population.model, population.sample(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    y = population(x, noise)
    if not isinstance(y, Tensor):
        message = f"forward returned {type(y).__name__} instead of a tensor"
        raise WrongResultError(message)
    if any(not torch.equal(value, before[name]) for name, value in model.state_dict().items()):
        message = "forward left the model's parameters changed"
        raise WrongResultError(message)
    repeats = x.shape[0] // population.members
    truths, slows, rows = [], [], []
    wide = double(model)
    for member, repeat in itertools.product(members, range(repeats)):
        row = repeat * population.members + member
        sign = -1 if population.antithetic and repeat >= repeats // 2 else 1
        change = population.perturbation(noise, member)
        truths.append(_run(wide, change, sign * population.sigma, x[row : row + 1].double()))
        slows.append(_run(model, change, sign * population.sigma, x[row : row + 1]))
        rows.append(row)
    shape = torch.Size((x.shape[0], *truths[0].shape[1:]))
    if y.shape != shape:
        message = f"forward returned shape {tuple(y.shape)}, expected {tuple(shape)}"
        raise WrongResultError(message)
    compare("forward", y[rows], torch.cat(truths), torch.cat(slows))


@torch.no_grad()
def check_update(population: Population, members: Sequence[int]) -> None:
    """Hold the update to the sum of utilities times written-out noise.

    Utilities are 0 except for the given members.

    Raises:
        WrongResultError: the update is missing, not finite or differs.

    """
    noise = population.sample(0)
    sides = 2 if population.antithetic else 1
    utilities = torch.zeros(sides, population.members, dtype=torch.float64)
    utilities[:, list(members)] = torch.randn(
        sides, len(members), dtype=torch.float64, generator=Generator().manual_seed(2)
    )
    signed = utilities[0] - utilities[1] if population.antithetic else utilities[0]
    parameters = dict(population.model.named_parameters())
    truths: dict[str, Tensor] = {}
    slows: dict[str, Tensor] = {}
    for member in members:
        for name, change in population.perturbation(noise, member).items():
            weight = -signed[member].item() / (utilities.numel() * population.sigma)
            truths[name] = truths.get(name, 0) + weight * change.double()
            slows[name] = slows.get(name, 0) + weight * change
    got = updated(population, noise, utilities.to(next(iter(parameters.values())).device))
    for name, truth in truths.items():
        compare(f"update of {name}", got[name], truth, slows[name])


def updated(population: Population, noise: PopulationNoise, utilities: Tensor) -> dict[str, Tensor]:
    """Return the gradients that an update accumulates, and leave ``.grad`` as it was."""
    parameters = dict(population.model.named_parameters())
    kept = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    population.update(noise, utilities)
    got = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for name, parameter in parameters.items():
        parameter.grad = kept[name]
    return got


def check_moments(setting: Setting) -> None:
    """Hold entries of E_m to mean 0 and variance 1, over members and steps.

    Raises:
        WrongResultError: a moment is further off than its standard error allows.

    """
    population = setting.population(4)
    draws = [_written(population, population.sample(step)) for step in range(STEPS)]
    for name in draws[0]:
        values = torch.stack([draw[name] for draw in draws]).flatten(1)
        _expect(f"mean of the noise of {name}", values.mean(1), 0.0)
        _expect(f"variance of the noise of {name}", values.square().mean(1), 1.0)


def check_purity(setting: Setting) -> None:
    """Noise is a function of seed, step, layer and block, and touches no global generator.

    Raises:
        WrongResultError: the same key gives other bits, or different keys give related ones.

    """
    twins = nn.ModuleDict({"first": setting.model, "second": double(setting.model)})
    population = perturb(twins, setting.scheme, members=4, sigma=setting.sigma, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        here = _written(population, population.sample(0))
        state = torch.manual_seed(1).get_state()
        again = _written(population, population.sample(0))
        moved = not torch.equal(torch.get_rng_state(), state)
    if moved:
        message = "sampling moved the global random generator"
        raise WrongResultError(message)
    if any(not torch.equal(here[name], again[name]) for name in here):
        message = "the same seed and step gave different noise"
        raise WrongResultError(message)
    other = perturb(twins, setting.scheme, members=4, sigma=setting.sigma, seed=1)
    products: dict[str, list[Tensor]] = {"steps": [], "seeds": [], "layers": []}
    for step in range(STEPS):
        draw = _written(population, population.sample(step))
        later = _written(population, population.sample(step + STEPS))
        reseeded = _written(other, other.sample(step))
        for name, value in draw.items():
            if not name.startswith("first"):
                continue
            twin = draw[name.replace("first", "second", 1)]
            for key, partner in (("steps", later[name]), ("seeds", reseeded[name]), ("layers", twin)):
                products[key].append((value * partner).mean())
    for key, values in products.items():
        _expect(f"correlation of noise between {key}", torch.stack(values), 0.0)


def check_split(setting: Setting) -> None:
    """A population in parts, split at a block boundary, has the noise and update of the whole.

    Raises:
        WrongResultError: a member's noise, output or share of the update depends on the split.

    """
    members = BLOCK + 3
    population = setting.population(members)
    x, utilities = setting.rows(members), setting.rows(members).flatten(1).sum(1)
    whole = population.sample(0)
    bits, y = _written(population, whole), population(x, whole)
    update = updated(population, whole, utilities)
    parts = [population.sample(0, part) for part in (range(BLOCK), range(BLOCK, members))]
    for name, value in bits.items():
        if not torch.equal(value, torch.cat([_written(population, part)[name] for part in parts])):
            message = f"the noise of {name} depends on how the population is split"
            raise WrongResultError(message)
    rows = [slice(part.members.start, part.members.stop) for part in parts]
    split = torch.cat([population(x[row], part) for row, part in zip(rows, parts, strict=True)])
    compare("forward in parts", split, y, y)
    shares = [updated(population, part, utilities[row]) for row, part in zip(rows, parts, strict=True)]
    for name, value in update.items():
        compare(f"update of {name} in parts", shares[0][name] + shares[1][name], value, value)


def _written(population: Population, noise: PopulationNoise) -> dict[str, Tensor]:
    each = [population.perturbation(noise, member) for member in range(len(noise.members))]
    return {name: torch.stack([change[name] for change in each]) for name in each[0]}


def double(model: nn.Module) -> nn.Module:
    """Copy a model in float64."""
    return copy.deepcopy(model).double()


def _run(model: nn.Module, change: Mapping[str, Tensor], sigma: float, x: Tensor) -> Tensor:
    seen = {
        name: value.detach() + sigma * change[name].to(value.dtype) if name in change else value
        for name, value in model.named_parameters()
    }
    result: Tensor = torch.func.functional_call(model, seen, (x,))
    return result


def compare(what: str, got: Tensor | None, truth: Tensor, slow: Tensor) -> None:
    """Allow twice the error of the slow computation in the same dtype, and a few roundings."""
    if got is None:
        message = f"{what}: nothing came back"
        raise WrongResultError(message)
    if not bool(got.isfinite().all()):
        message = f"{what}: {int((~got.isfinite()).sum())} of {got.numel()} values are not finite"
        raise WrongResultError(message)
    norm = truth.double().norm().item()
    # In float64 the slow computation is the truth itself; a real mistake is 1e9 times larger.
    roundings = 1024 if got.dtype is torch.float64 else 4
    allowed = 2 * (slow.double() - truth).norm().item() + roundings * torch.finfo(got.dtype).eps * norm
    error = (got.double() - truth).norm().item()
    if not error <= allowed:
        message = f"{what} is off by {error:.2g}, allowed {allowed:.2g}; its norm is {norm:.2g}"
        raise WrongResultError(message)


def _expect(what: str, values: Tensor, expected: float) -> None:
    """Hold a mean over independent steps to a value, with a standard error from the same data."""
    mean = values.mean().item()
    error = values.std().item() / math.sqrt(values.numel())
    if not abs(mean - expected) <= DEVIATIONS * error + 1e-9:
        message = f"{what} is {mean:.3g} +- {error:.2g}, expected {expected:g}"
        raise WrongResultError(message)
