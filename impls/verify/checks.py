"""Correctness checks for any scheme: forward, update and noise.

Forward and update are compared with :mod:`impls.verify.reference`. Noise must have mean 0 and the declared
variance, be reproducible, be independent between members, layers, steps and seeds, and be the same for any
split of the population.
"""

import copy
import itertools
import math
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esbench.workload import WrongResultError
from impls.binary import bits
from impls.perturbation.layer import PerturbedLayer
from impls.perturbation.noise import NoiseStream
from impls.perturbation.population import Population, PopulationNoise, perturb
from impls.perturbation.scheme import AnyScheme
from impls.verify.reference import (
    check_close,
    check_forward,
    check_update,
    compute_update,
    random_generator,
    random_step,
)

SIGMA = 0.1
"""Scale of the noise."""

STEPS = 48
"""Number of steps from which moments of the noise are estimated."""

COMPARED_PARTS = 4
"""Number of parts of a population whose noise is compared with that of the whole."""

MAX_DRAWN_NUMBERS = 2**18
"""The most numbers that a part of a population draws at each step to check the noise that was timed."""

STEP_DISTANCE = 2**16 * 3**2 * 5**5
"""Steps this far apart are compared: noise that repeats after a divisor of this number of steps is found.

Powers of two up to 65,536 and powers of ten up to 100,000 are divisors.
"""

DEVIATIONS = 6.0
"""Allowed error of a moment, in standard errors estimated from the same data."""


@dataclass(frozen=True)
class Setting:
    """A scheme and a model to check it on.

    Attributes:
        scheme: the scheme.
        model: a plain model in float64, with biases.
        features: shape of one input row.
        stream: name of the stream; None: the scheme's default.
        bits: number of bits packed into the last axis of a row; None: rows have float64 values.
    """

    scheme: AnyScheme
    model: nn.Module
    features: tuple[int, ...]
    stream: str | None = None
    bits: int | None = None

    def population(self, members: int, *, antithetic: bool = False, seed: int = 0) -> Population:
        """Return a population of the model."""
        return perturb(
            self.model,
            self.scheme,
            members=members,
            sigma=SIGMA,
            antithetic=antithetic,
            seed=seed,
            stream=self.stream,
            warn=False,
        )

    def rows(self, count: int) -> Tensor:
        """Return ``count`` random input rows."""
        device = next(self.model.parameters()).device
        shape = self.features if self.bits is None else (*self.features[:-1], self.bits)
        values = torch.randn(count, *shape, dtype=torch.float64, generator=random_generator())
        return (values if self.bits is None else bits.pack(values > 0)).to(device)


def check(setting: Setting) -> None:
    """Run every check of this module on a scheme.

    Raises:
        WrongResultError: a check failed; the message names it.
    """
    members, repeats = 5, 4
    x = setting.rows(members * repeats)
    x_before, weights_before = x.clone(), copy.deepcopy(setting.model.state_dict())
    for antithetic in (False, True) if setting.scheme.supports_antithetic else (False,):
        population = setting.population(members, antithetic=antithetic)
        step = random_step()
        check_forward(population, x, range(members), step=step)
        check_update(population, x, range(members), step=step)
    if not torch.equal(x, x_before):
        raise WrongResultError("forward or update changed its input rows: work on a copy")
    weights = setting.model.state_dict()
    if changed := [name for name, value in weights_before.items() if not torch.equal(value, weights[name])]:
        raise WrongResultError(f"sample(), forward or update changed {', '.join(changed)}: work on a copy")
    check_weight(setting)
    check_purity(setting)
    check_results_unchanged(setting)
    check_independence(setting)
    check_moments(setting)
    check_split(setting)


def check_weight(setting: Setting) -> None:
    """Check that a member's weight is W + sigma E_m, and that the update declares to sum E_m.

    Schemes that draw binary weights are left out: their weights and update directions may be others.

    Raises:
        WrongResultError: the weight or the directions differ.
    """
    scheme, population = setting.scheme, setting.population(4)
    if scheme.draws_binary_weights:
        return
    if scheme.update_directions_differ:
        raise WrongResultError(
            "the scheme sets update_directions_differ, but does not draw binary weights: leave it False"
        )
    noise = population.sample(random_step())
    for layer in population.layers:
        weight = layer.weight.detach()
        change = SIGMA * layer.dense_noise(noise.layers[layer.name])["weight"][0]
        expected = weight + change
        check_close("effective_weight()", layer.effective_weight(weight, change), expected, expected)


def check_moments(setting: Setting) -> None:
    """Check that entries of E_m have mean 0 and the scheme's standard deviation, over members and steps.

    Entries whose declared standard deviation is 0 must be 0.

    Raises:
        WrongResultError: a moment is off by more than its standard error allows.
    """
    population = setting.population(4)
    steps = [*range(STEPS // 2), *(random_step() for _ in range(STEPS // 2))]
    _check_draws(population, [population.dense_noise(population.sample(step)) for step in steps])


def check_timed_moments(population: Population) -> None:
    """Check the moments of the noise that was timed: in its dtype, of random members, at random steps.

    The members are drawn in small parts, of which some are compared with the whole population. If a part has
    more than MAX_DRAWN_NUMBERS numbers, a population of one member is drawn instead; if that has too, none.

    Raises:
        WrongResultError: as for :func:`check_moments`, or a part has other noise than the whole population.
    """
    if _drawn_numbers(population) > MAX_DRAWN_NUMBERS:
        scheme = population.layers[0].scheme
        population = perturb(population.model, scheme, members=1, sigma=population.sigma, warn=False)
        if _drawn_numbers(population) > MAX_DRAWN_NUMBERS:
            return
    step = random_step()
    whole = population.sample(step)

    def draw_member(step: int) -> tuple[int, dict[str, Tensor]]:
        """Return the number and the dense noise of a random member, drawn with few others."""
        start = secrets.choice(range(0, population.members, population.shard_multiple))
        part = range(start, min(start + population.shard_multiple, population.members))
        number = secrets.randbelow(len(part))
        noise = population.dense_noise(population.sample(step, part), number, number + 1)
        return start + number, noise

    for _ in range(COMPARED_PARTS):
        member, noise = draw_member(step)
        for name, expected in population.dense_noise(whole, member, member + 1).items():
            check_close(f"noise of {name} of a part of the population", noise[name], expected, expected)
    _check_draws(population, [draw_member(random_step())[1] for _ in range(STEPS)])


def _drawn_numbers(population: Population) -> int:
    """Return how many numbers the noise of the smallest part of a population has, or draws in each use."""
    members = min(population.shard_multiple, population.members)

    def count(layer: PerturbedLayer) -> int:
        noise = layer.sample(0, 0, range(members), device="meta")
        if any(isinstance(value, NoiseStream) for value in vars(noise.weight).values()):
            return layer.weight.numel() * members
        return noise.nbytes // layer.weight.element_size()

    return sum(map(count, population.layers))


def _check_draws(population: Population, draws: Sequence[Mapping[str, Tensor]]) -> None:
    """Check mean and variance of dense noise [m, *shape] by parameter name, a draw for each step."""
    expected = _declared_deviations(population)
    for name in draws[0]:
        values = torch.stack([draw[name] for draw in draws])
        # Biases have a standard deviation of 1.
        deviation = expected.get(name, values.new_ones(())).expand_as(values[0, 0])
        if not bool(deviation.isfinite().all()):
            raise WrongResultError(
                f"noise_std() is not finite for {name}: return the standard deviation of E_m"
            )
        varying = deviation > 0
        if bool(values[:, :, ~varying].any()):
            raise WrongResultError(
                f"the noise of {name} is not 0 where noise_std() is 0: correct noise_std() or sample()"
            )
        scaled = (values[:, :, varying].double() / deviation[varying].double()).flatten(1)
        if scaled.numel():
            slack = 8 * torch.finfo(values.dtype).eps  # values such as sqrt(i / k) are rounded
            _check_mean(f"mean of the noise of {name}", scaled.mean(1), 0.0, slack)
            _check_mean(f"variance of the noise of {name}", scaled.square().mean(1), 1.0, slack)


def _declared_deviations(population: Population) -> dict[str, Tensor]:
    """Return the weights' declared standard deviations by parameter name, each in the weight's shape."""
    deviations = {}
    for layer in population.layers:
        weight = layer.split_groups(layer.weight.detach())
        deviation = torch.as_tensor(layer.scheme.noise_std(weight, population.sigma)).to(weight)
        deviations[layer.weight_path] = deviation.expand_as(weight).reshape(layer.weight.shape)
    return deviations


def check_purity(setting: Setting) -> None:
    """Check that the same seed and step give the same noise, and that no global generator is used.

    Raises:
        WrongResultError: the noise differs, or the global generator's state changed.
    """
    population = setting.population(4)
    x, utilities = setting.rows(4), _random_utilities(population)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = population.dense_noise(population.sample(0))
        state = torch.manual_seed(1).get_state()
        noise = population.sample(0)
        compute_update(population, noise, utilities, population.call_with_activations(x, noise=noise)[1])
        has_drawn = not torch.equal(torch.get_rng_state(), state)
    if has_drawn:
        raise WrongResultError(
            "sample(), forward or update advanced torch's global random generator: draw from the noise's "
            "stream only"
        )
    if not _are_equal(first, population.dense_noise(noise)):
        raise WrongResultError(
            "two calls of sample() with the same seed and step gave different noise: draw from the noise's "
            "stream only"
        )


def check_results_unchanged(setting: Setting) -> None:
    """Check that later calls do not change the noise, outputs and gradients that earlier ones returned.

    Raises:
        WrongResultError: a later call changed them, or a forward or update stored tensors in the noise.
    """
    population = setting.population(4)
    noise = population.sample(0)
    dense, stored_bytes = _copy(population.dense_noise(noise)), _stored_bytes(noise)

    def evaluate() -> dict[str, Tensor]:
        y, record = population.call_with_activations(setting.rows(4), noise=noise)
        update = compute_update(population, noise, _random_utilities(population), record)
        return {"outputs": y} | {f"gradient of {name}": value for name, value in update.items()}

    results = evaluate()
    copies = _copy(results)
    evaluate()
    population.sample(random_step())
    if changed := [name for name, value in copies.items() if not torch.equal(value, results[name])]:
        raise WrongResultError(
            f"a later call changed {', '.join(changed)}, which an earlier call returned: return new tensors"
        )
    if not _are_equal(dense, population.dense_noise(noise)):
        raise WrongResultError(
            "a later call changed the noise that sample() had returned: return new tensors"
        )
    if _stored_bytes(noise) > stored_bytes:
        raise WrongResultError("forward or update stored tensors in the noise: compute them in sample()")


def _random_utilities(population: Population) -> Tensor:
    device = population.layers[0].weight.device
    return torch.randn(population.members, dtype=torch.float64, generator=random_generator()).to(device)


def _copy(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}


def _are_equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def _stored_bytes(noise: PopulationNoise) -> int:
    """Return the bytes of all tensors in the attributes of the noise, and in their dictionaries and lists."""
    leaves = pytree.tree_leaves([vars(layer.weight) for layer in noise.layers.values()])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def check_independence(setting: Setting, steps: int = STEPS // 2) -> None:
    """Check that noise of different steps, seeds, layers and members, and of weight and bias, is independent.

    Raises:
        WrongResultError: noise is equal or correlated.
    """
    twins = nn.ModuleDict({"first": setting.model, "second": copy.deepcopy(setting.model)})
    population, other_seed = (replace(setting, model=twins).population(4, seed=seed) for seed in (0, 1))
    products: defaultdict[str, list[Tensor]] = defaultdict(list)
    distinct: set[str] = set()

    def draw(population: Population, step: int) -> dict[str, Tensor]:
        dense = population.dense_noise(population.sample(step))
        return {name: value.double() for name, value in dense.items()}

    for step in range(steps):  # two values for each correlation: of two layers, or of two steps
        noise, later = draw(population, step), draw(population, step + STEP_DISTANCE)
        reseeded = draw(other_seed, step)
        for name, value in noise.items():
            products["steps"].append((value * later[name]).mean())
            products["seeds"].append((value * reseeded[name]).mean())
        names = [name for name in noise if name.startswith("first")]
        for drawn, name in itertools.product((noise, later), names):
            value, twin = drawn[name], drawn[name.replace("first", "second", 1)]
            if not torch.equal(value[0], value[1]):
                distinct.add(name)
            products["layers"].append((value * twin).mean())
            if name.endswith("bias"):
                # If both were drawn from the same stream, the bias would be equal to the first numbers of the
                # weight: to those of all members together, or of each member.
                weight = drawn[name.removesuffix("bias") + "weight"]
                of_all_members = weight.flatten()[: value.numel()]
                of_each_member = weight.flatten(1)[:, : value.shape[1]]
                products["weight and bias"].append((value.flatten() * of_all_members).mean())
                products["weight and bias of a member"].append((value * of_each_member).mean())
    if equal := [name for name in names if name not in distinct]:
        raise WrongResultError(f"two members have the same noise at every step: {', '.join(equal)}")
    for pair, values in products.items():
        _check_mean(f"correlation of noise between {pair}", torch.stack(values), 0.0)


def check_split(setting: Setting) -> None:
    """Check that noise, outputs and update of a population are the same if it is evaluated in two parts.

    Raises:
        WrongResultError: noise, outputs or the sum of the parts' updates depend on the split.
    """
    multiple = setting.population(1).shard_multiple
    members = multiple + 3
    population = setting.population(members)
    x = setting.rows(members)
    utilities = torch.arange(members, dtype=torch.float64, device=x.device).sin()
    noise = population.sample(0)
    dense, (y, record) = population.dense_noise(noise), population.call_with_activations(x, noise=noise)
    update = compute_update(population, noise, utilities, record)
    parts = [population.sample(0, part) for part in (range(multiple), range(multiple, members))]
    first, last = (population.dense_noise(part) for part in parts)
    for name, value in dense.items():
        if not torch.equal(value, torch.cat([first[name], last[name]])):
            raise WrongResultError(f"the noise of {name} depends on how the population is split")
    outputs, updates = [], []
    for part in parts:
        members_of_part = slice(part.members.start, part.members.stop)
        part_y, part_record = population.call_with_activations(x[members_of_part], noise=part)
        outputs.append(part_y)
        updates.append(compute_update(population, part, utilities[members_of_part], part_record))
    check_close("forward in parts", torch.cat(outputs), y, y)
    for name, value in update.items():
        check_close(f"update of {name} in parts", updates[0][name] + updates[1][name], value, value)


def _check_mean(name: str, values: Tensor, expected: float, slack: float = 1e-9) -> None:
    """Check that the mean of values of independent steps is about ``expected``, see :data:`DEVIATIONS`."""
    mean = values.mean().item()
    standard_error = values.std().item() / math.sqrt(values.numel())
    if not abs(mean - expected) <= DEVIATIONS * standard_error + slack:
        raise WrongResultError(
            f"{name} is {mean:.3g}, expected {expected:g}: the difference is {mean - expected:.2g}, its "
            f"standard error {standard_error:.2g}"
        )
