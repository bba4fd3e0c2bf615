"""Quality in edge cases: single weights, few members, noise that is zero."""

import math

import pytest
import torch
from torch import nn

from esbench.registry import Figure
from impls.benchmark import inputs
from impls.perturbation.scheme import AbstractScheme, AnyScheme
from impls.quality import kappa
from impls.quality.kappa import Subject, moments
from impls.quality.metrics import figures, on_digits
from impls.schemes import DropConnect, Permuted, Perturbed
from tests.test_quality_digits import CNN
from tests.workload_cases import NUMBERS

SCHEMES = list(dict.fromkeys(entry.scheme for entry in NUMBERS if isinstance(entry.scheme, AbstractScheme)))


def said(scheme: AnyScheme, shape: tuple[int, int], members: int, weight: float = 1.0) -> list[Figure]:
    """Return the figures of a layer without bias; nothing where the scheme refuses such a layer."""
    layer = nn.utils.skip_init(nn.Linear, shape[1], shape[0], bias=False)
    nn.init.constant_(layer.weight, weight)
    subject = Subject(layer, scheme, members)
    try:
        subject.population()
    except ValueError:
        return []
    return list(figures(subject))


@pytest.mark.parametrize(
    ("shape", "members", "weight"),
    [
        ((1, 1), 1, 1.0),
        ((1, 1), 2, 1.0),
        ((1, 1), 4, 1.0),
        ((1, 1), 8, 1.0),
        ((1, 3), 4, 1.0),
        ((3, 1), 4, 1.0),
        ((1, 3), 1, 0.0),
        ((3, 1), 4, 0.0),
    ],
)
def test_every_figure_is_numbers_or_a_reason(shape: tuple[int, int], members: int, weight: float) -> None:
    """Of one weight, one row or one column, and of weights that are 0, no scheme's quality raises."""
    for scheme in SCHEMES:
        for one in said(scheme, shape, members, weight):
            assert bool(one.samples) != bool(one.reason), (scheme, one)
            assert all(map(math.isfinite, one.samples)), (scheme, one)


def reason(found: list[Figure], metric: str) -> str:
    """Return why a metric has no number."""
    (words,) = {one.reason for one in found if one.metric == metric}
    return words


def test_members_that_are_equal_have_a_reason() -> None:
    """A core of one weight has no other order: nothing is left of it about the members' mean."""
    assert "its members are one and the same" in reason(said(Permuted(), (1, 1), 8), "kappa")
    equal = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).repeat(8, 1)
    with pytest.raises(ValueError, match="one and the same"):
        kappa.kappa(moments(equal), 50)
    kappa.kappa(moments(equal + 0.1 * torch.eye(8, 50)), 50)


def test_noise_of_weights_that_are_zero_has_a_reason() -> None:
    """Noise that is a multiple of a weight of 0 is said to be none, by each figure."""
    found = said(DropConnect(), (3, 4), 8, weight=0.0)
    assert "noise is zero" in reason(found, "kappa")
    assert "noise is zero" in reason(found, "dot_mean")
    assert "it has no directions" in reason(found, "stable_rank")


def test_one_pair_on_a_network_has_a_reason() -> None:
    """Its utility about its own mean is 0, and so is its step: no n_eff of 0, which none can average."""
    found = list(on_digits(Subject(inputs.layer(CNN, "cpu", 0), Perturbed(), 1)))
    assert "does not point along the gradient" in reason(found, "effective_members")
