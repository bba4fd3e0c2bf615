"""The reference implementation of a population's forward and update, computed from dense noise.

The forward runs the plain model on one row with its member's effective weight. The update is the sum over
members of utility times dense E_m; for schemes that learn from rows autograd computes it, row by row.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Generator, Tensor, nn

from esbench.workload import WrongResultError
from impls.perturbation.layer import PerturbedLayer
from impls.perturbation.population import ActivationRecord, Population, PopulationNoise


@torch.no_grad()
def check_forward(
    population: Population,
    x: Tensor,
    members: Iterable[int],
    eps: float | None = None,
    forward: Callable[[], object] | None = None,
) -> None:
    """Check the rows of some members against the plain model with each member's effective weights.

    The reference is computed in float64. The error may be at most twice that of the reference implementation
    in the model's dtype, see :func:`compare`.

    Args:
        population: the population.
        x: rows [repeats * members, ...].
        members: the members to check.
        eps: see :func:`compare`.
        forward: the call to check, which evaluates x with the noise of step 0; by default the population's.

    Raises:
        WrongResultError: outputs are missing, not finite or wrong, or the call changed the model.

    """
    model, noise = population.model, population.sample(0)
    y = _run_without_side_effects(model, forward or (lambda: population(x, noise)))
    repeats = x.shape[0] // population.members
    expected, narrow, rows = [], [], []
    model_float64 = to_float64(model)
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
        message = f"forward returned shape {tuple(y.shape)}, expected {tuple(shape)}"
        raise WrongResultError(message)
    check_close("forward", y[rows], torch.cat(expected), torch.cat(narrow), eps)


def _run_without_side_effects(model: nn.Module, forward: Callable[[], object]) -> Tensor:
    """Return a forward's output; check that it changes neither the model nor the global generator."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.random.fork_rng():
        generator_state = torch.get_rng_state()
        y = forward()
        has_drawn = not torch.equal(torch.get_rng_state(), generator_state)
    if not isinstance(y, Tensor):
        message = f"forward returned {type(y).__name__} instead of a tensor"
        raise WrongResultError(message)
    if has_drawn:
        message = "forward advanced torch's global random generator: draw from the noise's stream only"
        raise WrongResultError(message)
    if changed := [
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    ]:
        message = f"forward changed {', '.join(changed)} of the model: restore it, or work on a copy"
        raise WrongResultError(message)
    return y


@torch.no_grad()
def check_update(
    population: Population,
    x: Tensor,
    members: Sequence[int],
    eps: float | None = None,
    update: Callable[[Tensor], Mapping[str, Tensor]] | None = None,
) -> None:
    """Check the gradient of an update against that computed from dense noise.

    Members that are not checked have utility 0.

    Args:
        population: the population.
        x: rows [repeats * members, ...]; only schemes that learn from rows read them.
        members: the members to check.
        eps: see :func:`compare`.
        update: the function to check. It takes utilities and returns gradients by parameter name, for the
            noise of step 0. By default it is the population's update.

    Raises:
        WrongResultError: the update is missing, not finite or wrong.

    """
    noise = population.sample(0)
    sides = 2 if population.antithetic else 1
    utilities = torch.zeros(sides, population.members, dtype=torch.float64)
    utilities[:, list(members)] = torch.randn(
        sides, len(members), dtype=torch.float64, generator=Generator().manual_seed(2)
    )
    signed = utilities[0] - utilities[1] if population.antithetic else utilities[0]
    parameters = dict(population.model.named_parameters())
    row_layers = {
        f"{layer.name}.weight".removeprefix("."): layer
        for layer in population.layers
        if layer.learns_from_rows
    }
    expected: dict[str, Tensor] = {}
    narrow: dict[str, Tensor] = {}
    for member in members:
        for name, change in population.dense_noise(noise, member, member + 1, update_directions=True).items():
            if name not in row_layers:
                weight = -signed[member].item() / (utilities.numel() * population.sigma)
                expected[name] = expected.get(name, 0) + weight * change[0].double()
                narrow[name] = narrow.get(name, 0) + weight * change[0]
    if row_layers:
        evaluation = (population, noise, x, members, utilities)
        expected |= _node_gradients(to_float64(population.model), row_layers, *evaluation)
        narrow |= _node_gradients(population.model, row_layers, *evaluation)
    utilities = utilities.to(next(iter(parameters.values())).device)
    if update:
        gradients = update(utilities)
    else:
        record = population.call_with_activations(x, noise)[1] if row_layers else None
        gradients = compute_update(population, noise, utilities, record)
    for name, value in expected.items():
        check_close(f"update of {name}", gradients.get(name), value, narrow[name], eps)


def _node_gradients(  # noqa: PLR0913, PLR0917  the arguments of an evaluation
    model: nn.Module,
    layers: Mapping[str, PerturbedLayer],
    population: Population,
    noise: PopulationNoise,
    x: Tensor,
    members: Sequence[int],
    utilities: Tensor,
) -> dict[str, Tensor]:
    """Return the node-perturbation gradients of these layers by parameter name, computed one row at a time.

    See :class:`~impls.perturbation.scheme.AbstractRowScheme` for the formula.
    """
    dtype, repeats = next(model.parameters()).dtype, x.shape[0] // population.members
    totals: dict[str, Tensor] = {}
    for member, repeat in itertools.product(members, range(repeats)):
        side = int(population.antithetic and repeat >= repeats // 2)
        sigma = -population.sigma if side else population.sigma
        change = population.perturbation(noise, member)
        row = repeat * population.members + member
        inputs: dict[str, list[Tensor]] = {name: [] for name in layers}
        modules = {name: model.get_submodule(layer.name) for name, layer in layers.items()}
        hooks = [
            module.register_forward_pre_hook(lambda _, args, calls=inputs[name]: calls.append(args[0]))
            for name, module in modules.items()
        ]
        _run(population, model, change, sigma, x[row : row + 1].to(dtype))
        for hook in hooks:
            hook.remove()
        # With antithetic sampling the utility of a row is half the difference of its member's two.
        mean_of_halves = utilities[:, member].mean() if population.antithetic else 0.0
        share = -(utilities[side, member] - mean_of_halves).item() / utilities.numel()
        for name, layer in layers.items():
            step = change[name].to(dtype) * sigma
            scale = share / _variance(layer, population.sigma)
            for rows in inputs[name]:
                totals[name] = totals.get(name, 0) + scale * _row_gradient(modules[name], step, rows)
    return totals


@torch.enable_grad()
def _row_gradient(module: nn.Module, step: Tensor, inputs: Tensor) -> Tensor:
    """Return the gradient of <u, W x> with respect to W, where u = (W + step) x - W x is a constant."""
    weight = module.get_parameter("weight").detach().clone().requires_grad_()
    y = torch.func.functional_call(module, {"weight": weight}, (inputs,))
    perturbed = torch.func.functional_call(module, {"weight": weight + step}, (inputs,))
    return torch.autograd.grad(((perturbed - y).detach() * y).sum(), weight)[0]


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


def check_close(
    name: str, result: Tensor | None, expected: Tensor, narrow: Tensor, eps: float | None = None
) -> None:
    """Check that |result - expected| <= 2 |narrow - expected| + c eps |expected|, in Euclidean norms.

    c is 4, and 1024 in float64.

    Args:
        name: name of the result, for messages.
        result: the result to check; None is an error.
        expected: the reference computed in float64.
        narrow: the reference computed in the result's dtype.
        eps: machine epsilon of matrix products, by default that of the dtype. Pass that of TF32 where it is
            enabled: a GPU rounds large products to it, but not the reference's products of single rows.

    Raises:
        WrongResultError: the result is missing, not finite, of another dtype or too far off.

    """
    if result is None:
        message = f"{name}: the call returned nothing"
        raise WrongResultError(message)
    if not bool(result.isfinite().all()):
        message = f"{name}: {int((~result.isfinite()).sum())} of {result.numel()} values are not finite"
        raise WrongResultError(message)
    if result.dtype is not narrow.dtype:
        message = f"{name}: values are {result.dtype}, expected {narrow.dtype}"
        raise WrongResultError(message)
    norm = expected.double().norm().item()
    # In float64 |narrow - expected| is 0; a bug causes an error about 1e9 times larger than this bound.
    roundings = 1024 if result.dtype is torch.float64 else 4
    spacing = torch.finfo(result.dtype).eps if eps is None else eps
    allowed = 2 * (narrow.double() - expected).norm().item() + roundings * spacing * norm
    error = (result.double() - expected).norm().item()
    if not error <= allowed:
        message = f"{name} is off by {error:.2g}, allowed {allowed:.2g}; its norm is {norm:.2g}"
        raise WrongResultError(message)
