"""The reference implementation of a population's forward, update and step, computed from dense noise.

The forward runs the plain model on one row with its member's effective weight. The update is the sum over
members of utility times dense E_m; for schemes that learn from rows autograd computes it. Where the dense
noise of all members is too large, the update is compared with the forward instead, see
:func:`_check_product`. Members, utilities and step numbers are random, and drawn after the noise.
"""

import copy
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from esbench.workload import WrongResultError
from impls.perturbation.layer import PerturbedLayer
from impls.perturbation.noise import piece_bytes, pieces
from impls.perturbation.population import ActivationRecord, Population, PopulationNoise

REDRAWN_BYTES = {"cpu": 2**26, "cuda": 2**28}
"""Bytes of a piece of dense noise that is not stored, where a small piece may draw a whole block again."""

CONVERTED = 2**20
"""Numbers that are converted to float64 at a time, so that they stay in a cache."""

MAX_DENSE = {"cpu": 2**26, "cuda": 2**30}
"""The most numbers of dense noise of all members from which an update is computed."""

STEPS = 2**31
"""Step numbers that are checked are below this one."""

ROUNDINGS = 4
"""The least allowed error of a sum, in multiples of its rounding; see :func:`_roundings`."""

RARE = 1e6
"""Two of n members may be equal if a scheme has fewer different perturbations than n^2 times this."""

DRAWN_MEMBERS, DRAWN_STEPS = 64, 16
"""Noise has to differ within this many members and steps: few masks of dropout are often equal."""


@dataclass(frozen=True)
class _Update:
    """An update that is checked, or that of a step.

    Attributes:
        phase: the name in messages.
        population: the population.
        noise: the noise of its step.
        x: rows [repeats * members, ...].
        gradients: the result, by parameter name.
        utilities: [sides, members] in float64: those of the reference in float64, and of the one in the
            model's dtype.
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
    def spacing(self) -> float:
        """The machine epsilon of matrix products of the rows."""
        return torch.finfo(self.x.dtype).eps if self.eps is None else self.eps

    def check_complete(self) -> None:
        """Check that every parameter has a gradient."""
        for name, _ in self.population.model.named_parameters():
            if self.gradients.get(name) is None:
                raise WrongResultError(f"{self.phase} of {name}: the call returned nothing")


def random_members(count: int) -> Iterator[int]:
    """Yield the first member, the last and two random ones, which are drawn when the iteration begins."""
    yield from sorted({0, count - 1, *secrets.SystemRandom().sample(range(count), min(2, count))})


def random_step() -> int:
    """Return the number of a step after the first."""
    return 1 + secrets.randbelow(STEPS - 1)


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
        step: the step.

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
    """Check the outputs y of the rows x of some members."""
    model, model_float64 = population.model, to_float64(population.model)
    repeats = x.shape[0] // population.members
    expected, narrow, rows = [], [], []
    for member, repeat in itertools.product(members, range(repeats)):
        row = repeat * population.members + member
        sign = -1 if population.antithetic and repeat >= repeats // 2 else 1
        change = population.perturbation(noise, member)
        sigma, member_row = sign * population.sigma, x[row : row + 1]
        expected.append(_run(population, model_float64, change, sigma, rows_to_float64(member_row)))
        narrow.append(_run(population, model, change, sigma, member_row))
        rows.append(row)
    shape = torch.Size((x.shape[0], *expected[0].shape[1:]))
    if y.shape != shape:
        raise WrongResultError(f"{name} returned shape {tuple(y.shape)}, expected {tuple(shape)}")
    check_close(name, y[rows], torch.cat(expected), torch.cat(narrow), eps)


@torch.no_grad()
def check_all_outputs(population: Population, x: Tensor, eps: float | None, step: int = 0) -> None:
    """Check the outputs of all members of a layer together, by an update for random utilities.

    Networks, and schemes whose outputs are not affine in E_m, are left out.

    Args:
        population: the population.
        x: rows [repeats * members, ...], of which only shape, dtype and device are used.
        eps: see :func:`check_close`.
        step: the step.

    Raises:
        WrongResultError: forward and update disagree.
    """
    if population.layers[0].module is not population.model or not _is_affine(population):
        return
    noise, sides = population.sample(step), 2 if population.antithetic else 1
    utilities = torch.randn(sides, population.members, dtype=torch.float64, generator=random_generator())
    utilities = utilities.to(x.device)
    gradients = compute_update(population, noise, utilities)
    update = _Update("forward of all members", population, noise, x, gradients, (utilities, utilities), eps)
    _check_product(update)


def _run_without_side_effects(model: nn.Module, forward: Callable[[], object]) -> Tensor:
    """Return a forward's output; check that it changes neither the model nor the global generator."""
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
    if changed := [
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    ]:
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

    Members that are not checked have utility 0.

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
    members = members if isinstance(members, range) else [*members]  # random ones are drawn here
    device = population.layers[0].weight.device
    sides = 2 if population.antithetic else 1
    utilities = torch.zeros(sides, population.members, dtype=torch.float64)
    values = torch.randn(sides, len(members), dtype=torch.float64, generator=random_generator())
    utilities[:, list(members)] = values
    utilities = utilities.to(device)
    if update:
        utilities = utilities.float().double()  # a timed update reads float32
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
        take_step: the call to check. It takes the number of a step and the rows x, and returns the outputs.
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
    wide = torch.promote_types(torch.float32, y.dtype)
    utilities = _shape_utilities(population, y.double()), _shape_utilities(population, y.to(wide))
    result = _Update("step", population, noise, x, changes, utilities, eps)
    _check_gradients(result, range(population.members))


def _shape_utilities(population: Population, y: Tensor) -> Tensor:
    """Return the mean output of each member, less the mean over all members, [sides, members] in float64."""
    sides = 2 if population.antithetic else 1
    scores = y.flatten(1).mean(1).view(sides, -1, population.members).mean(1)
    return (scores - scores.mean()).double()


def _check_noise_varies(population: Population) -> None:
    """Check that noise of later steps differs between steps, and between members if that of step 0 does."""
    count = population.shard_multiple * -(-DRAWN_MEMBERS // population.shard_multiple)
    start = secrets.choice(range(0, population.members, count))
    part = range(start, min(start + count, population.members))
    weights = {layer.weight_path: layer.weight for layer in population.layers}
    directions = {
        name: torch.randn(
            weight.shape, device=weight.device, dtype=torch.float64, generator=random_generator(weight.device)
        )
        for name, weight in weights.items()
    }

    def products(step: int) -> dict[str, list[float]]:
        """Return products of members' noise with a random direction, until one differs from the first."""
        noise = population.sample(step, part)
        sums: dict[str, list[float]] = {name: [] for name in weights}
        for member in range(len(part)):
            change = population.perturbation(noise, member)
            for name, values in sums.items():
                values.append(float((change[name].double() * directions[name]).sum()))
            if all(len({*values}) > 1 for values in sums.values()):
                break
        return sums

    first = products(0)
    names = [name for name, values in first.items() if len({*values}) > 1]
    later = [products(random_step()) for _ in range(2)]
    are_members_equal = are_steps_equal = names
    for _ in range(DRAWN_STEPS):
        are_members_equal = [name for name in names if all(len({*noise[name]}) == 1 for noise in later)]
        are_steps_equal = [name for name in names if all(noise[name] == later[0][name] for noise in later)]
        if not are_members_equal and not are_steps_equal:
            return
        later.append(products(random_step()))
    if are_members_equal:
        raise WrongResultError(
            f"step: after step 0 all members have the same noise of {are_members_equal[0]}"
        )
    raise WrongResultError(f"step: all steps after step 0 have the same noise of {are_steps_equal[0]}")


def _check_members_differ(population: Population, step: int) -> None:
    """Check that no two members have the same noise of a layer, unless its scheme declares few values."""
    if _has_large_noise(population):
        return
    noise, members = population.sample(step), range(population.members)
    directions: dict[str, Tensor] = {}
    products: dict[str, list[Tensor]] = {}
    for start, stop in _pieces(noise, members):
        for name, dense in population.dense_noise(noise, start, stop).items():
            rows = dense.flatten(1)
            if name not in directions:
                generator = random_generator(rows.device)
                directions[name] = torch.randn(rows.shape[1], device=rows.device, generator=generator).to(
                    rows
                )
            products.setdefault(name, []).append(rows @ directions[name])
    for layer in population.layers:
        weight = layer.split_groups(layer.weight.detach().to("meta"))
        if layer.scheme.distinct_perturbations(weight.shape) < RARE * len(members) ** 2:
            continue
        name = f"{layer.name}.weight".removeprefix(".")
        values, order = torch.cat(products[name]).sort()
        for index in (values[1:] == values[:-1]).nonzero().flatten().tolist():
            first, second = sorted(order[index : index + 2].tolist())
            pair = [population.perturbation(noise, member)[name] for member in (first, second)]
            if torch.equal(*pair):
                raise WrongResultError(
                    f"step: members {first} and {second} have the same noise of {name}: draw independent "
                    "noise, or declare distinct_perturbations()"
                )


def _check_gradients(update: _Update, members: Sequence[int]) -> None:
    """Check the gradients of an update of which only these members have utilities."""
    population, noise, utilities = update.population, update.noise, update.utilities
    layer, model = population.layers[0], population.model
    if _has_large_noise(population) and len(members) == population.members and layer.module is model:
        if _is_affine(population):
            _check_product(update)
            return
        if layer.learns_from_rows:
            _check_node_gradient(update)
            return
    row_layers = {layer.weight_path: layer for layer in population.layers if layer.learns_from_rows}
    expected, narrow = _weighted_sums(population, noise, members, utilities, row_layers)
    if row_layers:
        evaluation = (population, noise, update.x, members)
        expected |= _node_gradients(to_float64(model), row_layers, *evaluation, utilities[0])
        narrow |= _node_gradients(model, row_layers, *evaluation, utilities[1])
    for name, value in expected.items():
        result, terms = (
            update.gradients.get(name),
            len(update.x) if name in row_layers else population.members,
        )
        check_close(f"{update.phase} of {name}", result, value, narrow[name], update.eps, terms)


def _has_large_noise(population: Population) -> bool:
    """Return whether the dense noise of all members is too large to be computed."""
    numbers = population.members * sum(parameter.numel() for parameter in population.model.parameters())
    return numbers > MAX_DENSE.get(population.layers[0].weight.device.type, MAX_DENSE["cpu"])


def _weighted_sums(
    population: Population,
    noise: PopulationNoise,
    members: Sequence[int],
    utilities: tuple[Tensor, Tensor],
    row_layers: Iterable[str],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return -1 / (n sigma) sum_m c_m E_m by parameter name, in float64 and in the parameter's dtype."""
    signed = [c[0] - c[1] if population.antithetic else c[0] for c in utilities]
    factor = -1 / (utilities[0].numel() * population.sigma)
    norm = float(signed[1].norm()) or 1.0
    expected: dict[str, Tensor] = {}
    narrow: dict[str, Tensor] = {}
    for start, stop in _pieces(noise, members):
        changes = population.dense_noise(noise, start, stop, update_directions=True)
        for name in changes.keys() - set(row_layers):
            dense = changes[name]
            wide = torch.promote_types(torch.float32, dense.dtype)
            weights = (signed[1][start:stop] / norm).to(dense.dtype)
            total = torch.tensordot(weights, dense, dims=1).to(wide) * (factor * norm)
            narrow[name] = narrow.get(name, 0) + total
            # Few members at a time are converted to float64.
            count = max(1, CONVERTED // dense[0].numel())
            for weights, part in zip(signed[0][start:stop].split(count), dense.split(count), strict=True):
                total = torch.tensordot(weights, part.double(), dims=1) * factor
                expected[name] = expected.get(name, 0) + total
    return expected, {name: value.to(population.layers[0].weight.dtype) for name, value in narrow.items()}


def _pieces(noise: PopulationNoise, members: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Return (start, stop) of members whose dense noise is written out together."""
    if not isinstance(members, range) or members.step != 1:
        return [(member, member + 1) for member in members]
    weights = [layer.weight for layer in noise.owner.layers]
    device = weights[0].device
    is_stored = all(layer.weight.nbytes for layer in noise.layers.values())
    max_bytes = piece_bytes(device) if is_stored else REDRAWN_BYTES.get(device.type, REDRAWN_BYTES["cpu"])
    return (
        (members.start + start, members.start + stop)
        for start, stop in pieces(len(members), sum(weight.nbytes for weight in weights), max_bytes)
    )


def _is_affine(population: Population) -> bool:
    """Return whether the outputs of a layer are affine in E_m, which the update sums."""
    scheme = population.layers[0].scheme
    return not (scheme.learns_from_rows or scheme.draws_binary_weights or scheme.update_directions_differ)


def _check_product(update: _Update) -> None:
    """Check a layer's gradient without dense noise, by its product with a random row.

    A layer f(v; W) is linear in its parameters: sum_m c_m (f(v; W + sigma E_m) - f(v; W)) / sigma is
    f(v; sum_m c_m E_m). The population's forward computes the left side; the gradient gives the right one.
    """
    update.check_complete()
    population, x, utilities = update.population, update.x, update.utilities[0]
    model, sides = population.model, len(utilities)
    row = torch.randn(x.shape[1:], device=x.device, dtype=torch.float64, generator=random_generator(x.device))
    rows = row.to(x.dtype).expand(sides * population.members, *row.shape)
    outputs = population(rows, noise=update.noise).unflatten(0, (sides, population.members))
    wide_row = rows[:1].double()
    plain = to_float64(model)(wide_row)[0]
    factor = -1 / (utilities.numel() * population.sigma**2)
    expected, squares = torch.zeros_like(plain), 0.0
    count = max(1, CONVERTED // plain.numel())
    for weights, side in zip(utilities, outputs, strict=True):
        for c, y in zip(weights.split(count), side.split(count), strict=True):
            # The second side of an antithetic population sees -E_m, and its utilities count negative.
            values = y.double()
            # E_m may cancel W, as dropout does.
            squares += float((c.square() @ (values.flatten(1).square() + plain.flatten().square())).sum())
            expected += factor * torch.tensordot(c, values - plain, dims=1)
    doubles = {name: update.gradients[name].double() for name, _ in model.named_parameters()}
    result = torch.func.functional_call(to_float64(model), doubles, (wide_row,))[0]
    rounding = update.spacing * (abs(factor) * squares**0.5 + float(expected.norm()))
    allowed = _roundings(population.members) * rounding
    _check_error(f"{update.phase}: the gradient's product with a row", result, expected, allowed)


def _check_node_gradient(update: _Update) -> None:
    """Check a layer's node-perturbation gradient without dense noise, by the outputs of the forward.

    An output differs by u = sigma E_m x from that of the plain layer, apart from the noise of the bias.
    """
    update.check_complete()
    population, noise, x, utilities = update.population, update.noise, update.x, update.utilities[0]
    layer, model, members = population.layers[0], to_float64(population.model), population.members
    outputs, bias = population(x, noise=noise), noise.layers[layer.name].bias
    centered = utilities - utilities.mean(0) if population.antithetic else utilities
    scales = -centered / (utilities.numel() * _variance(layer, population.sigma))
    weight = model.get_parameter("weight").detach().clone().requires_grad_()
    expected, squares = torch.zeros_like(weight), 0.0
    count = max(1, CONVERTED // max(x[0].numel(), outputs[0].numel()))
    for index in torch.arange(len(x), device=x.device).split(count):
        side = index // members * len(utilities) // (len(x) // members)
        c, rows, y = scales[side, index % members], x[index].double(), outputs[index].double()
        with torch.enable_grad():
            plain = torch.func.functional_call(model, {"weight": weight}, (rows,))
            change = y - plain.detach()
            if bias is not None:
                signed = (
                    population.sigma
                    * (1.0 - 2.0 * side.double()).unsqueeze(1)
                    * bias[index % members].double()
                )
                change -= signed.view(*signed.shape, *[1] * (y.dim() - 2))
            products = (change * plain).flatten(1).sum(1)
            expected += torch.autograd.grad(products @ c, weight)[0]
        norms = c * y.flatten(1).norm(dim=1) * rows.flatten(1).norm(dim=1)
        squares += float(norms.square().sum())
    taps = weight[0, 0].numel()
    allowed = _roundings(members) * update.spacing * ((taps * squares) ** 0.5 + float(expected.norm()))
    _check_error(f"{update.phase} of weight", update.gradients["weight"].double(), expected, allowed)


def _roundings(terms: int) -> float:
    """Return the allowed error of a sum of random terms, in multiples of its rounding.

    If they are added one after another, the rounding of the partial sums grows with the root of their number.
    """
    return max(ROUNDINGS, terms**0.5 / 2)


def _check_error(name: str, result: Tensor, expected: Tensor, allowed: float) -> None:
    """Check that |result - expected| is at most ``allowed``."""
    error = float((result - expected).norm())
    if not error <= allowed:
        norm = float(expected.norm())
        raise WrongResultError(f"{name} is off by {error:.2g}, allowed {allowed:.2g}; its norm is {norm:.2g}")


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
    for (start, stop), repeat in itertools.product(_pieces(noise, members), range(repeats)):
        side = int(population.antithetic and repeat >= repeats // 2)
        sigma = -population.sigma if side else population.sigma
        changes = population.dense_noise(noise, start, stop)
        first = repeat * population.members
        member_rows = x[first + start : first + stop].unsqueeze(1).to(dtype)

        def inputs_of(
            change: Mapping[str, Tensor], row: Tensor, sigma: float = sigma
        ) -> dict[str, list[Tensor]]:
            inputs: dict[str, list[Tensor]] = {name: [] for name in modules}
            hooks = [
                module.register_forward_pre_hook(lambda _, args, seen=inputs[name]: seen.append(args[0]))
                for name, module in modules.items()
            ]
            _run(population, model, change, sigma, row)
            for hook in hooks:
                hook.remove()
            return inputs

        inputs = torch.vmap(inputs_of)(changes, member_rows)
        # With antithetic sampling the utility of a row is half the difference of its member's two.
        centered = utilities[side, start:stop]
        if population.antithetic:
            centered = centered - utilities[:, start:stop].mean(0)
        shares = -centered / utilities.numel()
        for name, layer in layers.items():
            steps = changes[name].to(dtype) * sigma
            scales = (shares / _variance(layer, population.sigma)).to(dtype)
            for rows in inputs[name]:
                totals[name] = totals.get(name, 0) + _row_gradient(modules[name], steps, rows, scales)
    return totals


@torch.enable_grad()
def _row_gradient(module: nn.Module, steps: Tensor, inputs: Tensor, scales: Tensor) -> Tensor:
    """Return the gradient of sum_m scales[m] <u_m, W x_m> with respect to W.

    u_m = (W + steps[m]) x_m - W x_m is a constant; ``inputs`` are x_m, [m, 1, ...].
    """
    weight = module.get_parameter("weight").detach().clone().requires_grad_()

    def output(weight: Tensor, x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(module, {"weight": weight}, (x,))
        return y

    y = torch.vmap(output, in_dims=(None, 0))(weight, inputs)
    perturbed = torch.vmap(output)(weight.detach() + steps, inputs)
    products = ((perturbed - y).detach() * y).flatten(1).sum(1)
    return torch.autograd.grad(products @ scales, weight)[0]


def _variance(layer: PerturbedLayer, sigma: float) -> float:
    """Return v = |sigma std(E)|^2 / |W|^2, the relative variance of a layer's noise."""
    weight = layer.split_groups(layer.weight.detach().double())
    deviation = torch.as_tensor(layer.scheme.noise_std(weight, sigma)).expand_as(weight)
    return float((sigma * deviation).square().sum() / weight.square().sum())


def compute_update(
    population: Population, noise: PopulationNoise, utilities: Tensor, record: ActivationRecord | None = None
) -> dict[str, Tensor]:
    """Return the gradients of an update by parameter name; ``.grad`` is as before."""
    parameters = dict(population.model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    population.update(noise, utilities, record)
    update = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    return update


def rows_to_float64(rows: Tensor) -> Tensor:
    """Return rows in float64; packed bits are returned as is."""
    return rows.double() if rows.is_floating_point() else rows


def to_float64(model: nn.Module) -> nn.Module:
    """Return a copy of a model in float64."""
    return copy.deepcopy(model).double()


def _run(
    population: Population, model: nn.Module, change: Mapping[str, Tensor], sigma: float, x: Tensor
) -> Tensor:
    """Run the plain model on rows x with the weights of a member with E_m = ``change``."""
    plain = {name: value.detach() for name, value in model.named_parameters()}
    changes = {name: sigma * value.to(plain[name].dtype) for name, value in change.items()}
    parameters = {**plain, **population.effective_weights(plain, changes)}
    result: Tensor = torch.func.functional_call(model, parameters, (x,))
    return result


def check_close(  # noqa: PLR0913, PLR0917  the numbers compared, and how they may be rounded
    name: str,
    result: Tensor | None,
    expected: Tensor,
    narrow: Tensor,
    eps: float | None = None,
    terms: int = 1,
) -> None:
    """Check that |result - expected| <= 2 |narrow - expected| + c eps |expected|, in Euclidean norms.

    c is 4, or half the root of the number of terms if that is larger, and 1024 in float64.

    Args:
        name: name of the result, for messages.
        result: the result to check; None is an error.
        expected: the reference computed in float64.
        narrow: the reference computed in the result's dtype.
        eps: machine epsilon of matrix products, by default that of the dtype. Pass that of TF32 where it is
            enabled: a GPU rounds large products to it, but not the reference's products of single rows.
        terms: the number of terms of each sum; ``narrow`` adds them in pieces.

    Raises:
        WrongResultError: the result is missing, not finite, of another dtype or too far off.
    """
    if result is None:
        raise WrongResultError(f"{name}: the call returned nothing")
    if not bool(result.isfinite().all()):
        raise WrongResultError(
            f"{name}: {int((~result.isfinite()).sum())} of {result.numel()} values are not finite"
        )
    if result.dtype is not narrow.dtype:
        raise WrongResultError(f"{name}: values are {result.dtype}, expected {narrow.dtype}")
    norm = expected.double().norm().item()
    # In float64 |narrow - expected| is 0; a bug causes an error about 1e9 times larger than this bound.
    roundings = 1024.0 if result.dtype is torch.float64 else _roundings(terms)
    spacing = torch.finfo(result.dtype).eps if eps is None else eps
    allowed = 2 * (narrow.double() - expected).norm().item() + roundings * spacing * norm
    _check_error(name, result.double(), expected, allowed)
