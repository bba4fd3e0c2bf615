"""Fixed numbers, filled layers and checks for tests of populations, schemes and quality."""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from impls.perturbation.noise import STREAMS, NoiseStream
from impls.perturbation.population import Population, PopulationNoise
from impls.perturbation.scheme import AnyScheme
from impls.verify.checks import Setting
from impls.verify.reference import check_forward, check_update

M = TypeVar("M", bound=nn.Module)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers in float64, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fill(module: M, dtype: torch.dtype = torch.float64) -> M:
    """Fill a module's parameters with the same normal numbers every time."""
    generator = torch.Generator().manual_seed(0)
    module.to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def make_stream(
    members: range, *, step: int = 0, name: str = "block", dtype: torch.dtype = torch.float64
) -> NoiseStream:
    """Make a stream of one layer on the CPU."""
    return STREAMS[name](0, step, "layer", members, torch.device("cpu"), dtype)


def check_members(
    population: Population, noise: PopulationNoise, x: Tensor, label: str | None = None
) -> Tensor:
    """Check that each row is that of the model with its member's written-out weights; return the rows.

    Of several outputs the first is compared. A second call, which has fewer checks, gives the same.
    """

    def first(outputs: Any) -> Tensor:
        y: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return y

    y = first(population(x, noise=noise))
    assert torch.equal(first(population(x, noise=noise)), y)
    for row in range(len(x)):
        negated = population.antithetic and row >= len(x) // 2
        alone = copy.deepcopy(population.model)
        member = population.member(noise, row % population.members, negated=negated)
        alone.load_state_dict(member, strict=False)
        expected = first(alone(x[row : row + 1]))[0].detach()
        torch.testing.assert_close(y[row], expected, rtol=1e-12, atol=1e-12, msg=label)
    return y


def dense_rows(scheme: AnyScheme, shape: tuple[int, ...], members: range, step: int = 0) -> Tensor:
    """Return members' dense noise for a weight [g, o, i, *taps] as rows [m, d], in float64."""
    weight = torch.zeros(shape, dtype=torch.float64)
    return scheme.dense_noise(scheme.sample(weight, make_stream(members, step=step))).flatten(1)


def closed_form(scheme: AnyScheme, shape: tuple[int, ...], members: int) -> float:
    """Return the scheme's closed form of kappa for a weight [o, i, *taps]."""
    value = scheme.kappa(torch.empty(1, *shape, device="meta"), members)
    assert value is not None
    return value


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
