"""The slow truth: what a population computes, held to every member's written-out weights.

The truth of a member is its weight W + sigma E_m, run through the plain model; the truth of an
update is the sum of utilities times written-out E_m. For schemes that learn from rows it is what autograd
says of one row after another, each run through the model with its member's written-out weights.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Generator, Tensor, nn

from esbench.registry import WrongResultError
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
    """Hold the rows of some members to the plain model with each member's own weights.

    The reference is computed in float64. The error may be at most twice that of the same slow
    computation in the model's own dtype, see :func:`compare`. ``forward`` is what is checked, by default
    the population itself: it evaluates x with the noise of step 0.

    Raises:
        WrongResultError: outputs are missing, not finite, changed the model or differ.

    """
    model, noise = population.model, population.sample(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.random.fork_rng():
        generator = torch.get_rng_state()
        y = forward() if forward else population(x, noise)
        moved = not torch.equal(torch.get_rng_state(), generator)
    if not isinstance(y, Tensor):
        message = f"forward returned {type(y).__name__} instead of a tensor"
        raise WrongResultError(message)
    if moved:
        message = "forward moved the global random generator"
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
        sigma, one = sign * population.sigma, x[row : row + 1]
        truths.append(_run(population, wide, change, sigma, widened(one)))
        slows.append(_run(population, model, change, sigma, one))
        rows.append(row)
    shape = torch.Size((x.shape[0], *truths[0].shape[1:]))
    if y.shape != shape:
        message = f"forward returned shape {tuple(y.shape)}, expected {tuple(shape)}"
        raise WrongResultError(message)
    compare("forward", y[rows], torch.cat(truths), torch.cat(slows), eps)


@torch.no_grad()
def check_update(
    population: Population,
    x: Tensor,
    members: Sequence[int],
    eps: float | None = None,
    update: Callable[[Tensor], Mapping[str, Tensor]] | None = None,
) -> None:
    """Hold the update to the sum of utilities times written-out noise, or to the rows' written-out credit.

    Utilities are 0 except for the given members. What may be off: see :func:`compare`. ``update`` is what is
    checked, by default the population's own: it turns utilities into gradients with the noise of step 0, and
    with what layers saw of x with that noise.

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
    by_rows = {
        f"{layer.name}.weight".removeprefix("."): layer
        for layer in population.layers
        if layer.learns_from_rows
    }
    truths: dict[str, Tensor] = {}
    slows: dict[str, Tensor] = {}
    for member in members:
        for name, change in population.dense_noise(noise, member, member + 1, update_directions=True).items():
            if name not in by_rows:
                weight = -signed[member].item() / (utilities.numel() * population.sigma)
                truths[name] = truths.get(name, 0) + weight * change[0].double()
                slows[name] = slows.get(name, 0) + weight * change[0]
    if by_rows:
        seen = (population, noise, x, members, utilities)
        truths |= _credits(double(population.model), by_rows, *seen)
        slows |= _credits(population.model, by_rows, *seen)
    utilities = utilities.to(next(iter(parameters.values())).device)
    if update:
        got = update(utilities)
    else:
        record = population.call_with_activations(x, noise)[1] if by_rows else None
        got = updated(population, noise, utilities, record)
    for name, truth in truths.items():
        compare(f"update of {name}", got.get(name), truth, slows[name], eps)


def _credits(  # noqa: PLR0913, PLR0917  what a population saw, row by row
    model: nn.Module,
    layers: Mapping[str, PerturbedLayer],
    population: Population,
    noise: PopulationNoise,
    x: Tensor,
    members: Sequence[int],
    utilities: Tensor,
) -> dict[str, Tensor]:
    """Sum, for these layers, each row's node perturbation, in the model's own type and one row at a time."""
    dtype, repeats = next(model.parameters()).dtype, x.shape[0] // population.members
    totals: dict[str, Tensor] = {}
    for member, repeat in itertools.product(members, range(repeats)):
        side = int(population.antithetic and repeat >= repeats // 2)
        sigma = -population.sigma if side else population.sigma
        change = population.perturbation(noise, member)
        row = repeat * population.members + member
        saw: dict[str, list[Tensor]] = {name: [] for name in layers}
        modules = {name: model.get_submodule(layer.name) for name, layer in layers.items()}
        hooks = [
            module.register_forward_pre_hook(lambda _, args, calls=saw[name]: calls.append(args[0]))
            for name, module in modules.items()
        ]
        _run(population, model, change, sigma, x[row : row + 1].to(dtype))
        for hook in hooks:
            hook.remove()
        # Antithetic halves are credited with what their utilities differ by, each with its half of it.
        common = utilities[:, member].mean() if population.antithetic else 0.0
        share = -(utilities[side, member] - common).item() / utilities.numel()
        for name, layer in layers.items():
            step = change[name].to(dtype) * sigma
            for inputs in saw[name]:
                pulled = _pulled_back(modules[name], step, inputs) * (
                    share / _variance(layer, population.sigma)
                )
                totals[name] = totals.get(name, 0) + pulled
    return totals


@torch.enable_grad()
def _pulled_back(module: nn.Module, step: Tensor, inputs: Tensor) -> Tensor:
    """Return the gradient of <u, W x> with respect to W, where u is what a step from W does to W x."""
    weight = module.get_parameter("weight").detach().clone().requires_grad_()
    y = torch.func.functional_call(module, {"weight": weight}, (inputs,))
    moved = torch.func.functional_call(module, {"weight": weight + step}, (inputs,))
    return torch.autograd.grad(((moved - y).detach() * y).sum(), weight)[0]


def _variance(layer: PerturbedLayer, sigma: float) -> float:
    """Return v, the variance of sigma E relative to W, as the scheme's deviation has it."""
    weight = layer.grouped(layer.weight.detach().double())
    deviation = torch.as_tensor(layer.scheme.noise_std(weight, sigma)).expand_as(weight)
    return float((sigma * deviation).square().sum() / weight.square().sum())


def updated(
    population: Population, noise: PopulationNoise, utilities: Tensor, record: ActivationRecord | None = None
) -> dict[str, Tensor]:
    """Return the gradients that an update accumulates, and leave ``.grad`` as it was."""
    parameters = dict(population.model.named_parameters())
    kept = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    population.update(noise, utilities, record)
    got = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for name, parameter in parameters.items():
        parameter.grad = kept[name]
    return got


def widened(rows: Tensor) -> Tensor:
    """Return rows in float64; packed bits stay what they are."""
    return rows.double() if rows.is_floating_point() else rows


def double(model: nn.Module) -> nn.Module:
    """Copy a model in float64."""
    return copy.deepcopy(model).double()


def _run(
    population: Population, model: nn.Module, change: Mapping[str, Tensor], sigma: float, x: Tensor
) -> Tensor:
    plain = {name: value.detach() for name, value in model.named_parameters()}
    changes = {name: sigma * value.to(plain[name].dtype) for name, value in change.items()}
    seen = {**plain, **population.effective_weights(plain, changes)}
    result: Tensor = torch.func.functional_call(model, seen, (x,))
    return result


def compare(what: str, got: Tensor | None, truth: Tensor, slow: Tensor, eps: float | None = None) -> None:
    """Allow twice the error of the slow computation in the same dtype, and a few roundings.

    ``eps`` is the spacing of the numbers that products are computed in, where it is not the dtype's own: in
    TF32 a device rounds a large product, and may leave the slow computation's single rows as they are.

    Raises:
        WrongResultError: the result is missing, not finite, of another dtype or further off.

    """
    if got is None:
        message = f"{what}: nothing came back"
        raise WrongResultError(message)
    if not bool(got.isfinite().all()):
        message = f"{what}: {int((~got.isfinite()).sum())} of {got.numel()} values are not finite"
        raise WrongResultError(message)
    if got.dtype is not slow.dtype:
        message = f"{what}: values are {got.dtype}, expected {slow.dtype}"
        raise WrongResultError(message)
    norm = truth.double().norm().item()
    # In float64 the slow computation is the truth itself; a real mistake is 1e9 times larger.
    roundings = 1024 if got.dtype is torch.float64 else 4
    spacing = torch.finfo(got.dtype).eps if eps is None else eps
    allowed = 2 * (slow.double() - truth).norm().item() + roundings * spacing * norm
    error = (got.double() - truth).norm().item()
    if not error <= allowed:
        message = f"{what} is off by {error:.2g}, allowed {allowed:.2g}; its norm is {norm:.2g}"
        raise WrongResultError(message)
