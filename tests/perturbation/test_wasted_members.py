"""Layers where most members are wasted are named by a warning."""

import re
import warnings
from collections.abc import Mapping

import pytest
from torch import nn

from impls import DropoutBlocks, Permuted, Perturbed, perturb
from impls.perturbation.scheme import AnyScheme


def warned(model: nn.Module, scheme: AnyScheme | Mapping[str, AnyScheme], members: int) -> list[str]:
    """Return the warnings of a population of a model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        perturb(model, scheme, members=members, sigma=0.1)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_each_layer_with_repeated_perturbations_is_named() -> None:
    """The line has the layer's path, both counts, and a scheme that helps; other layers have none."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(288, 10))
    (line,) = warned(model, Permuted(), 16)
    loss = "has at most 1 different perturbation for 16 members: use another scheme"
    assert re.fullmatch(rf"layer '0': Permuted\(.*\) {loss} .*, such as {{'0': Perturbed\(\), .*}}", line)
    assert not warned(model, Perturbed(), 16)
    (bare,) = warned(nn.Conv2d(1, 8, 3), DropoutBlocks(groups=4), 5)
    assert bare.startswith("Conv2d: DropoutBlocks(")
    assert not warned(nn.Conv2d(1, 8, 3), DropoutBlocks(groups=4), 4)


@pytest.mark.parametrize(("members", "lines"), [(1960, 0), (1970, 1)])
def test_a_layer_that_keeps_less_than_a_tenth_of_its_members_is_named(members: int, lines: int) -> None:
    """The share is 1 / (1 + kappa n / d), with d of the whole network; here it is a tenth at 1965 members."""
    thin = nn.Linear(16, 64, bias=False)
    caught = warned(thin, Permuted(), members)
    assert len(caught) == lines
    schemes: dict[str, AnyScheme] = {"0": Permuted(), "*": Perturbed()}
    assert not warned(nn.ModuleList([thin, nn.LayerNorm(16), nn.Linear(512, 512)]), schemes, members)
