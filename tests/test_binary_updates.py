"""Updates of members that draw bits: held to enumeration, to float64 and to a thousand steps."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from impls import BinarizedLinear, Binary, BinaryMixture, perturb
from impls.binary import bits
from impls.perturbation.scheme import AnyScheme
from impls.schemes.binary import BinaryNoise
from tests.test_binary import SCHEMES, coins, seeded


def test_the_update_is_the_score_function_gradient_exactly() -> None:
    """Over all 64 patterns of six bits, weighted by how likely they are: the mean fitness's gradient."""
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


def test_the_contrast_is_unbiased_and_the_naive_sum_is_biased_by_half() -> None:
    """Over 20,000 groups of four members the contrast's mean is the gradient; the naive sum's is half."""
    groups, size = 20_000, 4
    layer = seeded(BinarizedLinear(3, 1, bias=False, dtype=torch.float64))
    scheme = BinaryMixture(group=size)
    population = perturb(layer, scheme, members=groups * size, sigma=1.0)
    noise: Any = population.sample(0).layers[""].weight
    p, e = noise.p, scheme.dense_noise(noise)
    values = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    fitness = (e * values).sum((1, 2, 3)) + 0.7 * (e[..., 0] * e[..., 1]).sum((1, 2))
    exact = values * (p * (1 - p)).flatten()
    mine = (
        (scheme.update_directions(noise) * fitness.view(-1, 1, 1, 1))
        .flatten(1)
        .unflatten(0, (groups, size))
        .mean(1)
    )
    error = mine.std(0) / math.sqrt(groups)
    assert ((mine.mean(0) - exact).abs() < 5 * error).all()
    centred = fitness.view(groups, size) - fitness.view(groups, size).mean(1, keepdim=True)
    naive = (centred[..., None] * e.flatten(1).unflatten(0, (groups, size))).sum(1) / (size - 1)
    error = naive.std(0) / math.sqrt(groups)
    assert ((naive.mean(0) - exact / 2).abs() < 5 * error).all()
    assert ((naive.mean(0) - exact).abs() > 20 * error).any()
    total = scheme.weighted_sum(noise, fitness) / (groups * size)
    torch.testing.assert_close(total.flatten(), mine.mean(0))


THOUSANDS = [
    *((Binary(), torch.float32, scale) for scale in (1.0, 1e3, 1e6)),
    *((Binary(), torch.float16, scale) for scale in (1.0, 1e3)),
    *((BinaryMixture(group=4), torch.float32, scale) for scale in (1.0, 1e6)),
]


def pair(dtype: torch.dtype) -> nn.Module:
    """Two layers with seeded logits."""
    return nn.Sequential(
        seeded(BinarizedLinear(16, 8, dtype=dtype)),
        seeded(BinarizedLinear(8, 2, outputs="real", dtype=dtype)),
    )


@pytest.mark.parametrize(("scheme", "dtype", "scale"), THOUSANDS)
def test_a_thousand_steps_stay_finite(scheme: AnyScheme, dtype: torch.dtype, scale: float) -> None:
    """Whatever the utilities' size and the logits' type: the fitness that is asked for is learned too."""
    model = pair(dtype)
    population = perturb(model, scheme, members=8, sigma=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 / scale)
    x = bits.pack(coins(1, 16)).repeat(8, 1)
    for step in range(1000):
        noise = population.sample(step)
        y = population(x, noise).double()
        fitness = scale * (y[:, 0] - y[:, 1])
        optimizer.zero_grad()
        population.update(noise, fitness - fitness.mean())
        optimizer.step()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    y = model(x[:1])
    assert y[0, 0] - y[0, 1] > 2


def test_a_gradient_that_its_type_cannot_hold_is_an_error() -> None:
    """Utilities of 1e6 in a float16 model give no infinity but words; shaped by their ranks they are fine."""
    population = perturb(pair(torch.float16), Binary(), members=8, sigma=0.01)
    noise, utilities = population.sample(0), 1e6 * torch.randn(8, generator=Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"gradient of layer '0' does not fit torch.float16: shape the util"):
        population.update(noise, utilities)
    population.update(noise, utilities.argsort().argsort() / 7 - 0.5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_sigma_is_no_size_of_bits(scheme: AnyScheme) -> None:
    """The logits' gradient is the same whatever sigma is, and that of thresholds is not."""
    gradients: list[list[Any]] = []
    for sigma in (1.0, 0.1):
        layer = seeded(BinarizedLinear(20, 6, dtype=torch.float64))
        population = perturb(layer, scheme, members=10, sigma=sigma)
        population.update(population.sample(0), torch.arange(10).sin())
        gradients.append([parameter.grad for parameter in layer.parameters()])
    (weight, bias), (same, other) = gradients
    torch.testing.assert_close(weight, same)
    torch.testing.assert_close(10 * bias, other)


@pytest.mark.parametrize(("scheme", "shift"), [(Binary(), 20.0), (BinaryMixture(group=4), 0.0)], ids=str)
def test_narrow_logits_have_a_gradient_that_is_summed_in_float32(scheme: AnyScheme, shift: float) -> None:
    """Utilities that are not about their mean leave what they leave in a wide type."""
    wanted, found = (
        perturb(seeded(BinarizedLinear(64, 32, bias=False, dtype=dtype)), scheme, members=512, sigma=1.0)
        for dtype in (torch.float64, torch.bfloat16)
    )
    with torch.no_grad():
        wanted.model.get_parameter("weight").copy_(found.model.get_parameter("weight"))
    utilities = shift + torch.randint(-1, 2, (512,), generator=Generator().manual_seed(3))
    scaled = (utilities / utilities.norm()).bfloat16()
    # What a narrow sum of utilities that are not about their mean would lose.
    assert shift == 0 or abs(float(scaled.float().sum() - scaled.sum().float())) > 0.05
    gradients = []
    for population in (wanted, found):
        population.update(population.sample(0), utilities)
        gradients.append(population.model.get_parameter("weight").grad)
    exact, narrow = (one.double() for one in gradients if one is not None)
    assert (narrow - exact).norm() < 0.02 * exact.norm()


def test_parts_of_mixtures_are_the_whole_and_short_groups_unbiased() -> None:
    """A population of 9 in groups of 4: parts have the bits and the update of the whole, and one is alone."""
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
    values = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    sums = []
    for step in range(4000):
        noise: Any = population.sample(step).layers[""].weight
        fitness = (scheme.dense_noise(noise) * values).sum((1, 2, 3))
        # Members of the groups of four, and the one that is alone.
        mine = (scheme.update_directions(noise) * fitness.view(-1, 1, 1, 1)).flatten(1)
        sums.append(torch.stack([mine[:8].mean(0), mine[8]]))
    p = noise.p.flatten()
    found = torch.stack(sums)
    assert ((found.mean(0) - values * p * (1 - p)).abs() < 5 * found.std(0) / math.sqrt(len(sums))).all()


def test_updates_add_up_until_gradients_are_zeroed() -> None:
    """Two updates without zero_grad between them leave the sum of both, as torch's backward does."""
    layer = seeded(BinarizedLinear(10, 4))
    population = perturb(layer, Binary(), members=8, sigma=1.0)
    noise, utilities = population.sample(0), torch.randn(8)
    population.update(noise, utilities)
    first = layer.get_parameter("weight").grad
    assert first is not None
    first = first.clone()
    population.update(noise, utilities)
    torch.testing.assert_close(layer.get_parameter("weight").grad, 2 * first)
