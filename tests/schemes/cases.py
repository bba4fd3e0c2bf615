"""Small layers for tests of schemes: noise written out, kappa fitted to it, checks against the reference."""

import torch
from torch import Tensor, nn

from impls.perturbation.noise import BlockStream
from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.quality.kappa import kappa, moments
from impls.verify.checks import Setting
from impls.verify.reference import check_forward, check_update

LINEAR = (16, 24)
CONV = (12, 10, 3, 3)
GROUPED = (2, 10, 8, 3, 3)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    """Return the same standard normal numbers at every call, in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def filled(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Fill a module's parameters with the same numbers every time."""
    generator = torch.Generator().manual_seed(0)
    module.to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def members_of(scheme: AnyScheme, shape: tuple[int, ...], members: range, step: int = 0) -> Tensor:
    """Write out members of a scheme for a weight [g, o, i, *taps] as rows [m, d], in float64."""
    weight = torch.zeros(shape, dtype=torch.float64)
    stream = BlockStream(0, step, "layer", members, weight.device, weight.dtype)
    return scheme.dense_noise(scheme.sample(weight, stream)).flatten(1)


def layer(shape: tuple[int, ...]) -> nn.Module:
    """Make a layer with a weight of this shape; five axes are a grouped convolution's."""
    if len(shape) == 2:
        return nn.Linear(shape[1], shape[0], bias=False)
    groups, outputs, inputs, *taps = shape if len(shape) == 5 else (1, *shape)
    return nn.Conv2d(groups * inputs, groups * outputs, (taps[0], taps[1]), groups=groups, bias=False)


def closed(scheme: AnyScheme, shape: tuple[int, ...], members: int) -> float:
    """Return the scheme's closed form of kappa."""
    value = scheme.kappa(torch.empty(shape if len(shape) == 5 else (1, *shape), device="meta"), members)
    assert value is not None
    return value


def fitted(scheme: AnyScheme, shape: tuple[int, ...], members: int, steps: int) -> tuple[float, float]:
    """Return kappa of all members over steps, and its standard error.

    It is a ratio of means over cores. The mean of ratios is lower, by the variance of a core's square: which
    is 1 % of 1 + kappa for cores of a few hundred numbers.
    """
    population = perturb(layer(shape), scheme, members=members, sigma=1.0, seed=0)
    shared, traces = torch.empty(2, steps, dtype=torch.float64)
    for step in range(steps):
        rows = population.dense_noise(population.sample(step))["weight"].flatten(1)
        found = moments(rows)
        traces[step] = found.trace / members - found.total / (members * (members - 1))
        shared[step] = (1 + kappa(found, rows.shape[1])) * traces[step] ** 2
    value = float(shared.mean() / traces.mean() ** 2)
    spread = shared / shared.mean() - 2 * traces / traces.mean()
    return value - 1, value * float(spread.std()) / steps**0.5


def agrees(scheme: AnyScheme, shape: tuple[int, ...], members: int = 96) -> None:
    """Compare the closed form with the fit: within 5 % or 0.02, for a standard error of a quarter of that."""
    expected = closed(scheme, shape, members)
    allowed = max(0.02, 0.05 * abs(expected))
    for steps in (30, 120, 480):
        mean, error = fitted(scheme, shape, members, steps)
        if error <= allowed / 4:
            break
    assert error <= allowed / 3, f"kappa is {mean:.3f} +- {error:.3f}: take more steps"
    assert abs(mean - expected) <= allowed, f"kappa is {mean:.3f} +- {error:.3f}, closed form {expected:.3f}"


def check_sums(scheme: AnyScheme, members: int = 7) -> None:
    """Check forward and update on a small Linear and a grouped convolution against the reference.

    Raises:
        WrongResultError: one differs.

    """
    modules = [(nn.Linear(6, 5), (6,)), (nn.Conv2d(4, 6, (2, 3), groups=2, padding=1), (4, 5, 5))]
    for module, features in modules:
        setting = Setting(scheme, module.double(), features)
        for antithetic in (False, True):
            population = setting.population(members, antithetic=antithetic)
            x = setting.rows(members * 2)
            check_forward(population, x, range(members))
            check_update(population, x, range(members))
