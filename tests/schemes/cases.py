"""Small layers for tests of schemes: noise written out, closed forms of kappa, checks of sums."""

import torch
from torch import Tensor, nn

from impls.perturbation.noise import BlockStream
from impls.perturbation.scheme import AnyScheme
from impls.verify.checks import Setting
from impls.verify.reference import check_forward, check_update


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


def closed(scheme: AnyScheme, shape: tuple[int, ...], members: int) -> float:
    """Return the scheme's closed form of kappa."""
    value = scheme.kappa(torch.empty(shape if len(shape) == 5 else (1, *shape), device="meta"), members)
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
