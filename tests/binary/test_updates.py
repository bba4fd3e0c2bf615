"""Updates of binary schemes agree with enumeration and float64, and stay finite."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from impls import BinarizedLinear, Binary, BinaryMixture, perturb
from impls.binary import bits
from impls.schemes.binary import BinaryNoise
from tests.binary.test_layers import SCHEMES, coins, seeded


def test_the_update_is_the_score_function_gradient_exactly() -> None:
    """It is the gradient of the expected fitness over all 64 patterns of six bits."""
    layer = seeded(BinarizedLinear(3, 2, bias=False, dtype=torch.float64))
    scheme, weight = Binary(), layer.get_parameter("weight").detach().unsqueeze(0)
    p = bits.quantised(weight.float().sigmoid()).double() / 256
    patterns = torch.tensor(list(itertools.product([0.0, 1.0], repeat=6)), dtype=torch.float64)
    fitness = torch.randn(64, dtype=torch.float64, generator=Generator().manual_seed(1))

    def likelihood(p: Tensor) -> Tensor:
        return (patterns * p.flatten() + (1 - patterns) * (1 - p.flatten())).prod(1)

    words = bits.pack(patterns.view(64, 1, 2, 3)).mT.contiguous()
    got = scheme.weighted_sum(BinaryNoise(p, 1.0, words), likelihood(p) * fitness)
    _, pull = torch.func.vjp(lambda p: likelihood(p) @ fitness, p)  # type: ignore[misc]  # two without has_aux
    exact = pull(torch.ones((), dtype=torch.float64))[0] * p * (1 - p)
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-12)


def separable(e: Tensor) -> Tensor:
    """Return a fitness of each output's three bits [m, 1, outputs, 3]: [m, outputs]."""
    return (e * VALUES).sum((1, 3)) + 0.7 * (e[..., 0] * e[..., 1]).sum(1)


VALUES = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def test_the_contrast_is_unbiased_and_the_naive_sum_is_biased_by_half() -> None:
    """The means are over 1000 groups of four members and 64 independent outputs."""
    groups, size, outputs = 1000, 4, 64
    layer = seeded(BinarizedLinear(3, outputs, bias=False, dtype=torch.float64))
    scheme = BinaryMixture(group=size)
    population = perturb(layer, scheme, members=groups * size, sigma=1.0)
    noise: Any = population.sample(0).layers[""].weight
    p, e = noise.p[0], scheme.dense_noise(noise)
    fitness = separable(e)
    exact = VALUES * (p * (1 - p))

    def z_scores(estimates: Tensor, expected: Tensor) -> Tensor:
        """Return by how many standard errors mean estimates [groups, outputs, 3] miss the expected value."""
        errors = (estimates - expected).mean(1)
        return errors.mean(0) / (errors.std(0) / math.sqrt(groups))

    terms = scheme.update_directions(noise)[:, 0] * fitness[..., None]
    estimates = terms.unflatten(0, (groups, size)).mean(1)
    assert (z_scores(estimates, exact).abs() < 5).all()
    grouped = fitness.unflatten(0, (groups, size))
    centred = grouped - grouped.mean(1, keepdim=True)
    naive = (centred[..., None] * e[:, 0].unflatten(0, (groups, size))).sum(1) / (size - 1)
    assert (z_scores(naive, exact / 2).abs() < 5).all()
    assert (z_scores(naive, exact).abs() > 20).any()
    total = scheme.weighted_sum(noise, fitness[:, 0]) / (groups * size)
    torch.testing.assert_close(total[0, 0], terms[:, 0].mean(0))


def pair(dtype: torch.dtype) -> nn.Module:
    """Return two layers with seeded logits."""
    return nn.Sequential(
        seeded(BinarizedLinear(16, 8, dtype=dtype)),
        seeded(BinarizedLinear(8, 2, outputs="real", dtype=dtype)),
    )


def test_training_learns_and_stays_finite() -> None:
    """Training works for utilities of any size and logits of any dtype."""
    runs: list[tuple[Any, torch.dtype, float]] = [
        (Binary(), torch.float32, 1e6),
        (Binary(), torch.float16, 1e3),
        (BinaryMixture(group=4), torch.float32, 1.0),
    ]
    for scheme, dtype, scale in runs:
        model = pair(dtype)
        population = perturb(model, scheme, members=8, sigma=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0 / scale)
        x = bits.pack(coins(1, 16)).repeat(8, 1)
        for step in range(150):
            noise = population.sample(step)
            y = population(x, noise).double()
            fitness = scale * (y[:, 0] - y[:, 1])
            optimizer.zero_grad()
            population.update(noise, fitness - fitness.mean())
            optimizer.step()
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        y = model(x[:1])
        assert y[0, 0] - y[0, 1] > 2, (scheme, dtype)


def test_a_gradient_beyond_the_range_of_its_type_is_an_error() -> None:
    """Utilities of 1e6 are too large for a float16 model; their ranks are not."""
    population = perturb(pair(torch.float16), Binary(), members=8, sigma=0.01)
    noise, utilities = population.sample(0), 1e6 * torch.randn(8, generator=Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"gradient of layer '0' does not fit torch.float16: shape the util"):
        population.update(noise, utilities)
    population.update(noise, utilities.argsort().argsort() / 7 - 0.5)


def test_the_gradient_of_logits_does_not_depend_on_sigma() -> None:
    """Only the gradient of thresholds depends on sigma, as in any layer."""
    for scheme in SCHEMES:
        gradients: list[list[Any]] = []
        for sigma in (1.0, 0.1):
            layer = seeded(BinarizedLinear(20, 6, dtype=torch.float64))
            population = perturb(layer, scheme, members=10, sigma=sigma)
            population.update(population.sample(0), torch.arange(10).sin())
            gradients.append([parameter.grad for parameter in layer.parameters()])
        (weight, bias), (same, other) = gradients
        torch.testing.assert_close(weight, same)
        torch.testing.assert_close(10 * bias, other)


def test_the_gradient_of_narrow_logits_is_summed_in_float32() -> None:
    """The gradient is accurate even if the mean of the utilities is large."""
    cases: list[tuple[Any, float]] = [(Binary(), 20.0), (BinaryMixture(group=4), 0.0)]
    for scheme, shift in cases:
        wide, narrow = (
            perturb(seeded(BinarizedLinear(64, 32, bias=False, dtype=dtype)), scheme, members=512, sigma=1.0)
            for dtype in (torch.float64, torch.bfloat16)
        )
        with torch.no_grad():
            wide.model.get_parameter("weight").copy_(narrow.model.get_parameter("weight"))
        utilities = shift + torch.randint(-1, 2, (512,), generator=Generator().manual_seed(3))
        scaled = (utilities / utilities.norm()).bfloat16()
        # The error of a sum computed in bfloat16.
        assert shift == 0 or abs(float(scaled.float().sum() - scaled.sum().float())) > 0.05
        gradients = []
        for population in (wide, narrow):
            population.update(population.sample(0), utilities)
            gradients.append(population.model.get_parameter("weight").grad)
        exact, found = (one.double() for one in gradients if one is not None)
        assert (found - exact).norm() < 0.02 * exact.norm()


def test_parts_of_a_mixture_equal_the_whole_and_a_short_group_is_unbiased() -> None:
    """The population has 9 members in groups of 4; the last has one member."""
    layer, scheme = seeded(BinarizedLinear(3, 1, bias=False, dtype=torch.float64)), BinaryMixture(group=4)
    population = perturb(layer, scheme, members=9, sigma=1.0, stream="philox")
    whole = population.sample(0)
    parts = [population.sample(0, part) for part in (range(4), range(4, 9))]
    bits_of = [population.dense_noise(noise)["weight"] for noise in (whole, *parts)]
    assert torch.equal(bits_of[0], torch.cat(bits_of[1:]))
    directions = [
        population.dense_noise(noise, update_directions=True)["weight"] for noise in (whole, *parts)
    ]
    assert torch.equal(directions[0], torch.cat(directions[1:]))
    layer = seeded(BinarizedLinear(3, 64, bias=False, dtype=torch.float64))
    population = perturb(layer, scheme, members=9, sigma=1.0, stream="philox")
    errors = []
    for step in range(100):
        noise: Any = population.sample(step).layers[""].weight
        p, fitness = noise.p[0], (scheme.dense_noise(noise) * VALUES).sum((1, 3))
        terms = scheme.update_directions(noise)[:, 0] * fitness[..., None] - VALUES * p * (1 - p)
        # Members in groups of four, and the one in the last group.
        errors.append(torch.stack([terms[:8].mean((0, 1)), terms[8].mean(0)]))
    found = torch.stack(errors)
    assert (found.mean(0).abs() < 5 * found.std(0) / math.sqrt(len(errors))).all()
