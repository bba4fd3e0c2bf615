"""The reference implementation of a population's forward, update and step, computed from dense noise.

The forward runs the plain model on one row with its member's effective weight. The update is the sum over
members of utility times dense E_m; for schemes that learn from rows autograd computes it. Where the dense
noise of all members is too large, the update is compared with the forward instead, see
:func:`_check_product_with_row`. Members, utilities and step numbers are random, and drawn after the noise, so
that no call can know which of its results are checked.
"""

import copy
import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Generator, Tensor, nn

from esbench.workload import WrongResultError
from impls.perturbation.layer import PerturbedLayer
from impls.perturbation.noise import piece_bytes, pieces
from impls.perturbation.population import ActivationRecord, Population, PopulationNoise

REDRAWN_PIECE_BYTES = {"cpu": 2**26, "cuda": 2**28}
"""Bytes of a piece of dense noise that is drawn again: large, as each may draw a whole block of members."""

FLOAT64_PIECE = 2**20
"""How many numbers are converted to float64 at a time, so that they stay in a CPU's cache."""

MAX_DENSE_NUMBERS = {"cpu": 2**26, "cuda": 2**30}
"""If the dense noise of all members is larger than this, it is not computed."""

MAX_STEP = 2**31
"""Steps with random numbers below this one are checked."""

MIN_ROUNDINGS = 4
"""The allowed error of a short sum, in multiples of its rounding; see :func:`_roundings`."""

COLLISION_MARGIN = 1e6
"""Two equal members of n are an error if a scheme has at least n^2 times this many different perturbations.

They are then equal by chance in less than one step of a million.
"""

ROWS_TOGETHER = 4
"""How many rows are compared by one norm: in that of many, an error of one row is smaller than rounding."""

MEMBERS_TOGETHER, MAX_SUMS = 4, 256
"""How many members have their outputs summed: in a sum of many, the error of one is smaller than rounding.

More are in a sum if there were more than MAX_SUMS of them.
"""

NARROW_ROWS = 3
"""How many random rows are compared in a narrow dtype: the rounding of one in fifty hides a wrong sum."""

COMPARED_MEMBERS, COMPARED_STEPS = 64, 16
"""How many members and steps are compared to see that noise varies: small masks are often equal."""


@dataclass(frozen=True)
class _Update:
    """The gradients of an update that is checked, and the arguments from which they were computed.

    Attributes:
        phase: name of the call that computed the gradients, for messages.
        population: the population.
        noise: the noise of the step.
        x: rows [repeats * members, ...].
        gradients: the gradients to check, by parameter name.
        utilities: two tensors [sides, members] in float64: for the reference in float64, and for that in the
            model's dtype, whose utilities come from rounded outputs.
        eps: see :func:`check_close`.
    """

    phase: str
    population: Population
    noise: PopulationNoise
    x: Tensor
    gradients: Mapping[str, Tensor]
    utilities: tuple[Tensor, Tensor]
    eps: float | None

    @property
    def product_eps(self) -> float:
        """The machine epsilon of matrix products: ``eps``, by default that of the rows' dtype."""
        return torch.finfo(self.x.dtype).eps if self.eps is None else self.eps

    def check_complete(self) -> None:
        """Check that every parameter has a gradient."""
        for name, _ in self.population.model.named_parameters():
            if self.gradients.get(name) is None:
                raise WrongResultError(f"{self.phase} of {name}: the call returned nothing")


def random_members(count: int, most: int = 2) -> Iterator[int]:
    """Yield the first, the last and random members, ``most`` or all, drawn only when the iteration begins."""
    drawn = secrets.SystemRandom().sample(range(count), min(most, count))
    yield from sorted({0, count - 1, *drawn})


def random_step() -> int:
    """Return a random step number above 0."""
    return 1 + secrets.randbelow(MAX_STEP - 1)


def random_generator(device: torch.device | str = "cpu") -> Generator:
    """Return a generator with a random seed."""
    return Generator(device).manual_seed(secrets.randbits(63))


@torch.no_grad()
def check_forward(  # noqa: PLR0913, PLR0917  the call, and what is checked
    population: Population,
    x: Tensor,
    members: Iterable[int],
    eps: float | None = None,
    forward: Callable[[], object] | None = None,
    step: int = 0,
) -> None:
    """Check the rows of some members against the plain model with each member's effective weights.

    The reference is computed in float64. The error may be at most twice that of the reference implementation
    in the model's dtype, see :func:`check_close`.

    Args:
        population: the population.
        x: rows [repeats * members, ...].
        members: the members to check; an iterator is read after the call.
        eps: see :func:`check_close`.
        forward: the call to check, which evaluates x with the noise of the step; by default the population's.
        step: the step number.

    Raises:
        WrongResultError: outputs are missing, not finite or wrong, or the call changed the model.
    """
    model, noise = population.model, population.sample(step)
    y = _run_without_side_effects(model, forward or (lambda: population(x, noise=noise)))
    _check_outputs("forward", population, noise, x, y, members, eps)


def _check_outputs(  # noqa: PLR0913, PLR0917  the arguments of an evaluation and its result
    name: str,
    population: Population,
    noise: PopulationNoise,
    x: Tensor,
    y: Tensor,
    members: Iterable[int],
    eps: float | None,
) -> None:
    """Check the outputs y of some members' rows x against the plain model with their effective weights."""
    model, model_float64 = population.model, to_float64(population.model)
    repeats = x.shape[0] // population.members
    expected, rounded, rows = [], [], []
    for member, repeat in itertools.product(members, range(repeats)):
        row = repeat * population.members + member
        sign = -1 if population.antithetic and repeat >= repeats // 2 else 1
        change = population.perturbation(noise, member)
        sigma, member_row = sign * population.sigma, x[row : row + 1]
        expected.append(_run_member(population, model_float64, change, sigma, rows_to_float64(member_row)))
        rounded.append(_run_member(population, model, change, sigma, member_row))
        rows.append(row)
    shape = torch.Size((x.shape[0], *expected[0].shape[1:]))
    if y.shape != shape:
        raise WrongResultError(f"{name} returned shape {tuple(y.shape)}, expected {tuple(shape)}")
    for first in range(0, len(rows), ROWS_TOGETHER):
        part = slice(first, first + ROWS_TOGETHER)
        check_close(name, y[rows[part]], torch.cat(expected[part]), torch.cat(rounded[part]), eps)


def is_affine_layer(population: Population) -> bool:
    """Return whether a population perturbs a single layer whose outputs are affine in E_m."""
    return population.layers[0].module is population.model and _is_affine(population)


@torch.no_grad()
def check_all_outputs(population: Population, x: Tensor, eps: float | None) -> None:
    """Check the outputs of all members of an affine layer for a random row, by sums with random signs.

    Sums of few members are compared with the layer of their summed noise. If the dense noise of all members
    is too large, the sum of all is compared with the layer of an update.

    Args:
        population: the population, see :func:`is_affine_layer`.
        x: rows [repeats * members, ...], of which only shape, dtype and device are used.
        eps: see :func:`check_close`.

    Raises:
        WrongResultError: the outputs disagree with the noise or with the update.
    """
    noise, members = population.sample(0), population.members
    # Neither the sum nor the difference of a member's two utilities is 0.
    sizes = torch.tensor([1.0, 0.5] if population.antithetic else [1.0], dtype=torch.float64).unsqueeze(1)
    signs = 2 * torch.randint(2, (len(sizes), members), generator=random_generator()) - 1
    utilities = (signs * sizes).to(x.device)
    update = _Update("forward of all members", population, noise, x, {}, (utilities, utilities), eps)
    if _has_large_noise(population):
        gradients = compute_update(population, noise, utilities)
        _check_product_with_row(replace(update, gradients=gradients))
        return
    outputs = _RowOutputs.of(update)
    signed = utilities[0] - utilities[1] if population.antithetic else utilities[0]
    signed = signed * (outputs.factor * population.sigma)
    count = max(MEMBERS_TOGETHER, members // MAX_SUMS)
    for start, stop in _dense_pieces(noise, range(members)):
        dense = population.dense_noise(noise, start, stop)
        for first in range(start, stop, count):
            group = slice(first, min(first + count, stop))
            part = slice(group.start - start, group.stop - start)
            gradients = {
                name: torch.tensordot(signed[group], noises[part].double(), dims=1)
                for name, noises in dense.items()
            }
            outputs.check(replace(update, gradients=gradients), group)


def _run_without_side_effects(model: nn.Module, forward: Callable[[], object]) -> Tensor:
    """Return a forward's output; check that the call changes neither the model nor the global generator."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.random.fork_rng():
        generator_state = torch.get_rng_state()
        y = forward()
        has_drawn = not torch.equal(torch.get_rng_state(), generator_state)
    if not isinstance(y, Tensor):
        raise WrongResultError(f"forward returned {type(y).__name__} instead of a tensor")
    if has_drawn:
        raise WrongResultError(
            "forward advanced torch's global random generator: draw from the noise's stream only"
        )
    after = model.state_dict()
    if changed := [name for name, value in before.items() if not torch.equal(after[name], value)]:
        raise WrongResultError(
            f"forward changed {', '.join(changed)} of the model: restore it, or work on a copy"
        )
    return y


@torch.no_grad()
def check_update(  # noqa: PLR0913, PLR0917  the call, and what is checked
    population: Population,
    x: Tensor,
    members: Iterable[int],
    eps: float | None = None,
    update: Callable[[Tensor], Mapping[str, Tensor]] | None = None,
    step: int = 0,
) -> None:
    """Check the gradient of an update against that computed from dense noise, for random utilities.

    Members that are not checked get the utility 0.

    Args:
        population: the population.
        x: rows [repeats * members, ...]; only schemes that learn from rows read them.
        members: the members to check, a range or an iterator that is read after the noise is drawn.
        eps: see :func:`check_close`.
        update: the function to check. It takes utilities and returns gradients by parameter name, for the
            noise of the step. By default it is the population's update.
        step: the step.

    Raises:
        WrongResultError: the update is missing, not finite or wrong.
    """
    noise = population.sample(step)
    members = members if isinstance(members, range) else [*members]  # draws random members
    sides = 2 if population.antithetic else 1
    values = torch.randn(sides, len(members), dtype=torch.float64, generator=random_generator())
    utilities = torch.zeros(sides, population.members, dtype=torch.float64)
    utilities[:, list(members)] = values
    utilities = utilities.to(population.layers[0].weight.device)
    if update:
        utilities = utilities.float().double()  # rounded as the timed update reads them
        gradients = update(utilities)
    else:
        learns_from_rows = any(layer.learns_from_rows for layer in population.layers)
        record = population.call_with_activations(x, noise=noise)[1] if learns_from_rows else None
        gradients = compute_update(population, noise, utilities, record)
    result = _Update("update", population, noise, x, gradients, (utilities, utilities), eps)
    _check_gradients(result, members)


@torch.no_grad()
def check_step(  # noqa: PLR0913, PLR0917  the call, and what is checked
    population: Population,
    x: Tensor,
    members: Iterable[int],
    eps: float | None,
    take_step: Callable[[int], object],
    learning_rate: float,
) -> None:
    """Check a step of training: noise, forward, utilities, update and gradient descent.

    A utility is the mean output of a member's rows, less the mean over all members. Weights are restored.

    Args:
        population: the population.
        x: rows [repeats * members, ...].
        members: the members whose outputs are checked; an iterator is read after the call. The update is
            checked for all members.
        eps: see :func:`check_close`.
        take_step: the call to check, a function of the step number. It evaluates x and returns the outputs.
        learning_rate: that of the step. If it is large, rounding of low-precision weights hides no error.

    Raises:
        WrongResultError: the noise does not vary, or outputs or weights are wrong.
    """
    parameters = {name: p.detach() for name, p in population.model.named_parameters()}
    before = {name: value.clone() for name, value in parameters.items()}
    step = random_step()
    y = take_step(step)
    changes = {}
    for name, value in parameters.items():
        changes[name] = ((before[name].double() - value.double()) / learning_rate).to(value.dtype)
        value.copy_(before[name])
    if not isinstance(y, Tensor):
        raise WrongResultError(f"step returned {type(y).__name__} instead of a tensor")
    _check_noise_varies(population)
    _check_members_differ(population, step)
    noise = population.sample(step)
    _check_outputs("step", population, noise, x, y, members, eps)
    at_least_float32 = y.to(torch.promote_types(torch.float32, y.dtype))  # as a step computes utilities
    utilities = _shape_utilities(population, y.double()), _shape_utilities(population, at_least_float32)
    result = _Update("step", population, noise, x, changes, utilities, eps)
    _check_gradients(result, range(population.members))


def _shape_utilities(population: Population, y: Tensor) -> Tensor:
    """Return the mean output of each member, less the mean over all members, [sides, members] in float64."""
    sides = 2 if population.antithetic else 1
    row_means = y.flatten(1).mean(1)
    member_means = row_means.view(sides, -1, population.members).mean(1)
    return (member_means - member_means.mean()).double()


def _check_noise_varies(population: Population) -> None:
    """Check that after step 0 noise differs between steps, and between members if that of step 0 does."""
    shards = math.ceil(COMPARED_MEMBERS / population.shard_multiple)
    count = shards * population.shard_multiple
    start = secrets.choice(range(0, population.members, count))
    part = range(start, min(start + count, population.members))
    weights = {layer.weight_path: layer.weight for layer in population.layers}
    directions = {
        name: torch.randn(
            weight.shape, device=weight.device, dtype=torch.float64, generator=random_generator(weight.device)
        )
        for name, weight in weights.items()
    }

    def project(step: int) -> dict[str, list[float]]:
        """Return each member's noise times a random direction, by weight; stop when two members differ."""
        noise = population.sample(step, part)
        projections: dict[str, list[float]] = {name: [] for name in weights}
        for member in range(len(part)):
            change = population.perturbation(noise, member)
            for name, values in projections.items():
                values.append(float((change[name].double() * directions[name]).sum()))
            if all(map(differ, projections.values())):
                break
        return projections

    def differ(projections: list[float]) -> bool:
        return len(set(projections)) > 1

    names = [name for name, values in project(0).items() if differ(values)]
    later = [project(random_step()) for _ in range(2)]
    equal_in_members = equal_in_steps = names
    for _ in range(COMPARED_STEPS):
        equal_in_members = [name for name in names if not any(differ(noise[name]) for noise in later)]
        equal_in_steps = [name for name in names if all(noise[name] == later[0][name] for noise in later)]
        if not equal_in_members and not equal_in_steps:
            return
        later.append(project(random_step()))
    if equal_in_members:
        raise WrongResultError(f"step: after step 0 all members have the same noise of {equal_in_members[0]}")
    raise WrongResultError(f"step: all steps after step 0 have the same noise of {equal_in_steps[0]}")


def _check_members_differ(population: Population, step: int) -> None:
    """Check that no two members have the same noise of a layer, or opposite noise.

    Schemes with so few different perturbations that two members may be equal by chance are left out.
    """
    if _has_large_noise(population):
        return
    noise, members = population.sample(step), range(population.members)
    directions: dict[str, Tensor] = {}
    projections: dict[str, list[Tensor]] = {}
    for start, stop in _dense_pieces(noise, members):
        for name, dense in population.dense_noise(noise, start, stop).items():
            member_noise = dense.flatten(1)
            if name not in directions:
                device = dense.device
                direction = torch.randn(
                    member_noise.shape[1], device=device, generator=random_generator(device)
                )
                directions[name] = direction.to(dense.dtype)
            projections.setdefault(name, []).append(member_noise @ directions[name])
    for layer in population.layers:
        weight = layer.split_groups(layer.weight.detach().to("meta"))
        if layer.scheme.distinct_perturbations(weight.shape) < COLLISION_MARGIN * len(members) ** 2:
            continue
        name = layer.weight_path
        values, order = torch.cat(projections[name]).abs().sort()
        for index in (values[1:] == values[:-1]).nonzero().flatten().tolist():
            first, second = sorted(order[index : index + 2].tolist())
            # Different noise can have equal projections.
            a, b = (population.perturbation(noise, member)[name] for member in (first, second))
            if torch.equal(a, b) or torch.equal(a, -b):
                relation = "the same" if torch.equal(a, b) else "opposite"
                raise WrongResultError(
                    f"step: members {first} and {second} have {relation} noise of {name}: draw independent "
                    "noise, or declare distinct_perturbations()"
                )


def _check_gradients(update: _Update, members: Sequence[int]) -> None:
    """Check the gradients of an update in which only these members have utilities other than 0."""
    population, noise, utilities = update.population, update.noise, update.utilities
    layer, model = population.layers[0], population.model
    is_single_layer = layer.module is model
    if is_single_layer and len(members) == population.members and _has_large_noise(population):
        if _is_affine(population):
            _check_product_with_row(update)
            return
        if layer.learns_from_rows:
            _check_node_gradient(update)
            return
    row_layers = {layer.weight_path: layer for layer in population.layers if layer.learns_from_rows}
    expected, rounded = _weighted_sums(population, noise, members, utilities, row_layers)
    if row_layers:
        evaluation = (population, noise, update.x, members)
        expected |= _node_gradients(to_float64(model), row_layers, *evaluation, utilities[0])
        rounded |= _node_gradients(model, row_layers, *evaluation, utilities[1])
    for name, value in expected.items():
        # A gradient that is computed from rows sums them and, in a convolution, their positions.
        terms = len(update.x) * update.x[0, 0].numel() if name in row_layers else population.members
        gradient = update.gradients.get(name)
        check_close(f"{update.phase} of {name}", gradient, value, rounded[name], update.eps, terms)


def _has_large_noise(population: Population) -> bool:
    """Return whether the dense noise of all members is too large to be computed."""
    numbers = population.members * sum(parameter.numel() for parameter in population.model.parameters())
    return numbers > MAX_DENSE_NUMBERS[population.layers[0].weight.device.type]


def _weighted_sums(
    population: Population,
    noise: PopulationNoise,
    members: Sequence[int],
    utilities: tuple[Tensor, Tensor],
    row_layers: Iterable[str],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return -1 / (n sigma) sum_m c_m E_m by parameter name, in float64 and in the parameter's dtype.

    n is the number of all utilities; c_m is that of member m, or the difference of its two with antithetic
    sampling. Parameters in ``row_layers`` are left out.
    """
    signed = [c[0] - c[1] if population.antithetic else c[0] for c in utilities]
    factor = -1 / (utilities[0].numel() * population.sigma)
    norm = float(signed[1].norm()) or 1.0  # scaled to norm 1, utilities of any size fit a low-precision dtype
    expected: dict[str, Tensor] = {}
    rounded: dict[str, Tensor] = {}
    for start, stop in _dense_pieces(noise, members):
        changes = population.dense_noise(noise, start, stop, update_directions=True)
        for name in changes.keys() - set(row_layers):
            dense = changes[name]
            at_least_float32 = torch.promote_types(torch.float32, dense.dtype)
            scaled = (signed[1][start:stop] / norm).to(dense.dtype)
            total = torch.tensordot(scaled, dense, dims=1).to(at_least_float32) * (factor * norm)
            rounded[name] = rounded.get(name, 0) + total
            count = max(1, FLOAT64_PIECE // dense[0].numel())
            for c, part in zip(signed[0][start:stop].split(count), dense.split(count), strict=True):
                expected[name] = expected.get(name, 0) + torch.tensordot(c, part.double(), dims=1) * factor
    return expected, {name: value.to(population.layers[0].weight.dtype) for name, value in rounded.items()}


def _dense_pieces(noise: PopulationNoise, members: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Return the ranges (start, stop) of members whose dense noise is in memory at the same time."""
    if not isinstance(members, range):
        return [(member, member + 1) for member in members]
    weights = [layer.weight for layer in noise.owner.layers]
    device = weights[0].device
    is_stored = all(layer.weight.nbytes for layer in noise.layers.values())
    max_bytes = piece_bytes(device) if is_stored else REDRAWN_PIECE_BYTES[device.type]
    return (
        (members.start + start, members.start + stop)
        for start, stop in pieces(len(members), sum(weight.nbytes for weight in weights), max_bytes)
    )


def _is_affine(population: Population) -> bool:
    """Return whether a layer's outputs are affine in the E_m that its update sums."""
    scheme = population.layers[0].scheme
    return not (scheme.learns_from_rows or scheme.draws_binary_weights or scheme.update_directions_differ)


@dataclass(frozen=True)
class _RowOutputs:
    """The outputs of a layer and of its population for a random row v.

    A layer f(v; W) is linear in its parameters: sum_m c_m (f(v; W + sigma E_m) - f(v; W)) / sigma is
    f(v; sum_m c_m E_m). The population's forward computes the left side; the right one is the layer with a
    gradient as its parameters.

    Attributes:
        model: the plain layer in float64.
        row: v, [1, ...] in float64.
        plain: f(v; W) in float64.
        squares: the sums of the squares of the products that f(v; W) sums.
        outputs: f(v; W + sigma E_m), [sides, members, ...].
        factor: the gradient is sigma * factor * sum_m c_m E_m.
    """

    model: nn.Module
    row: Tensor
    plain: Tensor
    squares: Tensor
    outputs: Tensor
    factor: float

    @classmethod
    def of(cls, update: _Update) -> Self:
        """Run the layer and the population."""
        population, x, sides = update.population, update.x, len(update.utilities[0])
        generator, count = random_generator(x.device), sides * population.members
        row = torch.randn(x.shape[1:], device=x.device, dtype=torch.float64, generator=generator)
        rows = row.to(x.dtype).expand(count, *row.shape)
        outputs = population(rows, noise=update.noise).unflatten(0, (sides, population.members))
        model, rounded_row = to_float64(population.model), rows[:1].double()
        squared_weights = {name: parameter.square() for name, parameter in model.named_parameters()}
        squares = torch.func.functional_call(model, squared_weights, (rounded_row.square(),))[0]
        factor = -1 / (count * population.sigma**2)
        return cls(model, rounded_row, model(rounded_row)[0], squares, outputs, factor)

    def check(self, update: _Update, members: slice, gradient_roundings: float = 0.0) -> None:
        """Check the gradient of some members; the last argument is its error in multiples of its rounding."""
        expected, squares = torch.zeros_like(self.plain), 0.0
        count = max(1, FLOAT64_PIECE // self.plain.numel())
        # The second side of an antithetic population sees -E_m: the sign of its utilities needs no change.
        for utilities, outputs in zip(update.utilities[0][:, members], self.outputs[:, members], strict=True):
            for c, y in zip(utilities.split(count), outputs.split(count), strict=True):
                y_float64 = y.double()
                expected += self.factor * torch.tensordot(c, y_float64 - self.plain, dims=1)
                # Both terms of the difference are rounded. They count apart, as dropout's E_m cancels W.
                sizes = y_float64.flatten(1).square() + self.squares.flatten()
                squares += float((c.square() @ sizes).sum())
        gradients = {name: update.gradients[name].double() for name, _ in self.model.named_parameters()}
        result = torch.func.functional_call(self.model, gradients, (self.row,))[0]
        # Outputs are rounded to their dtype, and sums of terms to float32.
        weight = next(self.model.parameters())
        eps = update.product_eps + torch.finfo(torch.float32).eps * weight[0].numel() ** 0.5
        allowed = MIN_ROUNDINGS * eps * abs(self.factor) * squares**0.5
        allowed += gradient_roundings * update.product_eps * float(expected.norm())
        _check_error(f"{update.phase}: the gradient's product with a row", result, expected, allowed)


def _check_product_with_row(update: _Update) -> None:
    """Check a layer's gradient without dense noise, by the layer's outputs for a random row."""
    update.check_complete()
    members, is_narrow = update.population.members, update.product_eps > torch.finfo(torch.float32).eps
    for _ in range(NARROW_ROWS if is_narrow else 1):
        _RowOutputs.of(update).check(update, slice(members), _roundings(members))


def _check_node_gradient(update: _Update) -> None:
    """Check a layer's node-perturbation gradient without dense noise, by the outputs of the forward.

    The formula's u = sigma E_m x is the difference of the population's output and that of the plain layer,
    less the noise of the bias. See :class:`~impls.perturbation.scheme.AbstractRowScheme`.
    """
    update.check_complete()
    population, noise, x, utilities = update.population, update.noise, update.x, update.utilities[0]
    layer, model, members = population.layers[0], to_float64(population.model), population.members
    outputs, bias = population(x, noise=noise), noise.layers[layer.name].bias
    sides, repeats = len(utilities), len(x) // members
    # With antithetic sampling the utility of a row is half the difference of its member's two.
    centered = utilities - utilities.mean(0) if population.antithetic else utilities
    scales = -centered / (utilities.numel() * _relative_variance(layer, population.sigma))
    weight = model.get_parameter("weight").detach().clone().requires_grad_()
    expected, squares = torch.zeros_like(weight), 0.0
    count = max(1, FLOAT64_PIECE // max(x[0].numel(), outputs[0].numel()))
    for row in torch.arange(len(x), device=x.device).split(count):
        member, repeat = row % members, row // members
        side = repeat * sides // repeats
        c, rows, y = scales[side, member], x[row].double(), outputs[row].double()
        with torch.enable_grad():
            plain = torch.func.functional_call(model, {"weight": weight}, (rows,))
            u = y - plain.detach()
            if bias is not None:
                sigma = population.sigma * (1.0 - 2.0 * side.double())  # negative on the second side
                bias_noise = sigma.unsqueeze(1) * bias[member].double()
                u -= bias_noise.view(*bias_noise.shape, *[1] * (y.dim() - 2))
            products = (u * plain).flatten(1).sum(1)
            expected += torch.autograd.grad(products @ c, weight)[0]
        norms = c * y.flatten(1).norm(dim=1) * rows.flatten(1).norm(dim=1)
        squares += float(norms.square().sum())
    taps = weight[0, 0].numel()
    allowed = _roundings(members) * update.product_eps * ((taps * squares) ** 0.5 + float(expected.norm()))
    _check_error(f"{update.phase} of weight", update.gradients["weight"].double(), expected, allowed)


def _roundings(terms: int) -> float:
    """Return the allowed error of a sum of random terms, in multiples of the rounding of the result.

    If terms are added one after another, the error grows with the square root of their number.
    """
    return max(MIN_ROUNDINGS, terms**0.5 / 2)


def _check_error(name: str, result: Tensor, expected: Tensor, allowed: float) -> None:
    """Check that |result - expected| is at most ``allowed``."""
    error = float((result - expected).norm())
    if not error <= allowed:
        norm = float(expected.norm())
        message = (
            f"{name} is off by {error:.2g}, allowed {allowed:.2g}; the expected result has norm {norm:.2g}"
        )
        factor = float((result * expected).sum()) / max(norm**2, torch.finfo(expected.dtype).tiny)
        if float((result - factor * expected).norm()) <= max(1.0, abs(factor)) * allowed:
            message += f", and the result is about {factor:.3g} times that"
        raise WrongResultError(message)


def _node_gradients(  # noqa: PLR0913, PLR0917  the arguments of an evaluation
    model: nn.Module,
    layers: Mapping[str, PerturbedLayer],
    population: Population,
    noise: PopulationNoise,
    x: Tensor,
    members: Sequence[int],
    utilities: Tensor,
) -> dict[str, Tensor]:
    """Return the node-perturbation gradients of these layers by parameter name.

    Members are evaluated in pieces by :func:`torch.vmap` over dense weights, one repeat at a time. See
    :class:`~impls.perturbation.scheme.AbstractRowScheme` for the formula.
    """
    dtype, repeats = next(model.parameters()).dtype, x.shape[0] // population.members
    modules = {name: model.get_submodule(layer.name) for name, layer in layers.items()}
    totals: dict[str, Tensor] = {}
    for (start, stop), repeat in itertools.product(_dense_pieces(noise, members), range(repeats)):
        side = int(population.antithetic and repeat >= repeats // 2)
        sigma = -population.sigma if side else population.sigma
        changes = population.dense_noise(noise, start, stop)
        first = repeat * population.members
        member_rows = x[first + start : first + stop].unsqueeze(1).to(dtype)

        def layer_inputs(
            change: Mapping[str, Tensor], row: Tensor, sigma: float = sigma
        ) -> dict[str, list[Tensor]]:
            """Return the input of each call of these layers, for one member and row."""
            inputs: dict[str, list[Tensor]] = {name: [] for name in modules}
            hooks = [
                module.register_forward_pre_hook(lambda _, args, calls=inputs[name]: calls.append(args[0]))
                for name, module in modules.items()
            ]
            _run_member(population, model, change, sigma, row)
            for hook in hooks:
                hook.remove()
            return inputs

        inputs = torch.vmap(layer_inputs)(changes, member_rows)
        # With antithetic sampling the utility of a row is half the difference of its member's two.
        centered = utilities[side, start:stop]
        if population.antithetic:
            centered = centered - utilities[:, start:stop].mean(0)
        for name, layer in layers.items():
            scaled_noise = changes[name].to(dtype) * sigma
            variance = _relative_variance(layer, population.sigma)
            scales = (-centered / utilities.numel() / variance).to(dtype)
            for rows in inputs[name]:
                gradient = _row_gradient(modules[name], scaled_noise, rows, scales)
                totals[name] = totals.get(name, 0) + gradient
    return totals


@torch.enable_grad()
def _row_gradient(module: nn.Module, scaled_noise: Tensor, inputs: Tensor, scales: Tensor) -> Tensor:
    """Return the gradient of sum_m scales[m] <u_m, W x_m> with respect to W, with u_m held constant.

    u_m = (W + scaled_noise[m]) x_m - W x_m, and x_m is inputs[m], [1, ...].
    """
    weight = module.get_parameter("weight").detach().clone().requires_grad_()

    def output(weight: Tensor, x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(module, {"weight": weight}, (x,))
        return y

    y = torch.vmap(output, in_dims=(None, 0))(weight, inputs)
    perturbed = torch.vmap(output)(weight.detach() + scaled_noise, inputs)
    products = ((perturbed - y).detach() * y).flatten(1).sum(1)
    return torch.autograd.grad(products @ scales, weight)[0]


def _relative_variance(layer: PerturbedLayer, sigma: float) -> float:
    """Return |sigma std(E)|^2 / |W|^2, the variance of a layer's noise relative to its weight."""
    weight = layer.split_groups(layer.weight.detach().double())
    deviation = torch.as_tensor(layer.scheme.noise_std(weight, sigma)).expand_as(weight)
    return float((sigma * deviation).square().sum() / weight.square().sum())


def compute_update(
    population: Population, noise: PopulationNoise, utilities: Tensor, record: ActivationRecord | None = None
) -> dict[str, Tensor]:
    """Return the gradients of an update by parameter name, and leave each ``.grad`` as it is."""
    parameters = dict(population.model.named_parameters())
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    population.update(noise, utilities, record)
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    for name, parameter in parameters.items():
        parameter.grad = before[name]
    return gradients


def rows_to_float64(rows: Tensor) -> Tensor:
    """Return rows in float64; rows of packed bits are returned unchanged."""
    return rows.double() if rows.is_floating_point() else rows


def to_float64(model: nn.Module) -> nn.Module:
    """Return a copy of a model in float64."""
    return copy.deepcopy(model).double()


def _run_member(
    population: Population, model: nn.Module, change: Mapping[str, Tensor], sigma: float, x: Tensor
) -> Tensor:
    """Run the plain model on rows x with the effective weights of a member, whose E_m is ``change``."""
    plain = {name: value.detach() for name, value in model.named_parameters()}
    changes = {name: sigma * value.to(plain[name].dtype) for name, value in change.items()}
    parameters = {**plain, **population.effective_weights(plain, changes)}
    y: Tensor = torch.func.functional_call(model, parameters, (x,))
    return y


def check_close(  # noqa: PLR0913, PLR0917  the numbers compared, and how they may be rounded
    name: str,
    result: Tensor | None,
    expected: Tensor,
    rounded: Tensor,
    eps: float | None = None,
    terms: int = 1,
) -> None:
    """Check that |result - expected| <= 2 |rounded - expected| + c eps |expected|, in Euclidean norms.

    c is the larger of 4 and half the square root of the number of terms; in float64 it is 1024.

    Args:
        name: name of the result, for messages.
        result: the result to check; None is an error.
        expected: the reference computed in float64.
        rounded: the reference computed in the result's dtype.
        eps: machine epsilon of matrix products, by default that of the dtype. Pass that of TF32 where it is
            enabled: a GPU rounds large products to it, but not the reference's products of single rows.
        terms: the number of terms that each entry of the result sums.

    Raises:
        WrongResultError: the result is missing, not finite, of another dtype or too far off.
    """
    if result is None:
        raise WrongResultError(f"{name}: the call returned nothing")
    if not_finite := int((~result.isfinite()).sum()):
        raise WrongResultError(f"{name}: {not_finite} of {result.numel()} values are not finite")
    if result.dtype is not rounded.dtype:
        raise WrongResultError(f"{name}: values are {result.dtype}, expected {rounded.dtype}")
    norm = expected.double().norm().item()
    # In float64 |rounded - expected| is 0, and a bug causes an error about 1e9 times larger than this bound.
    roundings = 1024.0 if result.dtype is torch.float64 else _roundings(terms)
    product_eps = torch.finfo(result.dtype).eps if eps is None else eps
    allowed = 2 * (rounded.double() - expected).norm().item() + roundings * product_eps * norm
    _check_error(name, result.double(), expected, allowed)
