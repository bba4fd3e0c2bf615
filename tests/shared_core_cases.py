"""Schemes with shared cores, and kappa fitted to what they write out."""

import torch
from torch import nn

from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.quality.kappa import kappa, moments
from impls.verify.checks import Setting
from impls.verify.reference import check_forward, check_update

LINEAR = (16, 24)
CONV = (12, 10, 3, 3)
GROUPED = (2, 10, 8, 3, 3)


def layer(shape: tuple[int, ...]) -> nn.Module:
    """Make a layer with a weight of this shape; five axes are a grouped convolution's."""
    if len(shape) == 2:
        return nn.Linear(shape[1], shape[0], bias=False)
    groups, outputs, inputs, *taps = shape if len(shape) == 5 else (1, *shape)
    return nn.Conv2d(groups * inputs, groups * outputs, (taps[0], taps[1]), groups=groups, bias=False)


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


def closed(scheme: AnyScheme, shape: tuple[int, ...], members: int) -> float:
    """Return the scheme's own closed form."""
    grouped = shape if len(shape) == 5 else (1, *shape)
    value = scheme.kappa(torch.Size(grouped), members)
    assert value is not None
    return value


def agrees(scheme: AnyScheme, shape: tuple[int, ...], members: int = 96) -> None:
    """Compare the closed form with the fit: within 5 % or 0.02, for a standard error of a quarter of that."""
    expected = closed(scheme, shape, members)
    allowed = max(0.02, 0.05 * expected)
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
