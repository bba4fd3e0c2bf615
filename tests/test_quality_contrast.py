"""Kappa of an update that sums something else than the noise."""

import math

import pytest
import torch
from torch import Generator, Tensor, nn

from impls import BinarizedLinear, Binary, BinaryMixture
from impls.quality import kappa
from impls.quality.kappa import Subject, moments


def layer(out: int, inp: int) -> nn.Module:
    """A layer of bits with seeded logits."""
    module = BinarizedLinear(inp, out, bias=False)
    with torch.no_grad():
        weight = module.get_parameter("weight")
        weight.copy_(torch.randn(out, inp, generator=Generator().manual_seed(0)))
    return module


def rows(count: int, size: int, seed: int = 0) -> Tensor:
    """Seeded standard normal rows."""
    return torch.randn(count, size, generator=Generator().manual_seed(seed), dtype=torch.float64)


def test_a_contrast_with_the_noise_itself_is_the_law() -> None:
    """Where directions are the noise, kappa is what the inner products say, but for the lengths' spread."""
    noise = rows(200, 300) + 0.3 * rows(1, 300, seed=1) * rows(200, 1, seed=2)
    assert kappa.contrast(noise, noise, 10**9) == pytest.approx(kappa.kappa(moments(noise), 300), rel=1e-2)


@pytest.mark.parametrize("group", [4, 16])
def test_kappa_of_a_mixture_is_what_gradients_lose(group: int) -> None:
    """The cosine is that of the update that is really made, over random linear fitness: exactly, of all.

    Of a part of the members it is so within its error, and the pairs of a group are met as often as they are.
    """
    members, size, steps = 256, 12 * 16, 16
    subject = Subject(layer(12, 16), BinaryMixture(group=group), members)
    along = across = 0.0
    whole, parts = [], []
    for step in range(steps):
        noise, directions = (subject.sample(step, members, update_directions=one) for one in (False, True))
        gradients = rows(size, 400, seed=step).float()
        c = noise @ gradients
        estimates = directions.T @ (c - c.mean(0))
        along += float((estimates * gradients).sum(0).mean()) / steps
        across += float(estimates.square().sum(0).mean()) / steps
        whole.append(kappa.contrast(noise, directions, members))
        chosen = torch.randperm(members, generator=Generator().manual_seed(step))[:128]
        parts.append(kappa.contrast(noise[chosen], directions[chosen], members))
    expected = size * across / along**2 - 1 - size / members
    assert sum(whole) / steps == pytest.approx(expected, rel=0.05)
    fitted = torch.tensor(parts)
    assert abs(fitted.mean() - expected) < 4 * fitted.std() / math.sqrt(steps) + 0.06 * (1 + expected)


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_bits_of_members_own_lose_what_their_variances_differ_by(scale: float) -> None:
    """Kappa of independent bits is 0 where they are fair, and more the more of them are decided."""
    module = layer(24, 20)
    with torch.no_grad():
        module.get_parameter("weight").mul_(scale)
    subject = Subject(module, Binary(), 128)
    values = torch.tensor(kappa.fitted(subject, [kappa.look(subject, step) for step in range(20)]))
    form = kappa.closed_form(subject)
    assert form is not None
    assert abs(values.mean() - form) < 4 * values.std() / math.sqrt(20)
    assert form == pytest.approx({0.0: 0.0, 1.0: 0.047, 4.0: 0.73}[scale], abs=0.15 * scale)
