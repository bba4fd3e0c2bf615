"""Updates of binary schemes agree with enumeration and float64, and stay finite."""

import itertools
import math
from typing import Any

import torch
from torch import Generator, Tensor, nn

from impls import BinarizedLinear, Binary, BinaryMixture, perturb
from impls.binary import bits
from impls.schemes.binary import BinaryNoise
from tests.binary.test_layers import SCHEMES, coins, seeded


def test_the_update_is_the_score_function_gradient_exactly() -> None:
    """The update is the gradient of the expected fitness over all 64 patterns of six bits."""
    layer = seeded(BinarizedLinear(3, 2, bias=False, dtype=torch.float64))
    scheme, weight = Binary(), layer.get_parameter("weight").detach().unsqueeze(0)
    p = bits.round_probabilities(weight.float().sigmoid()).double() / 256
    patterns = torch.tensor(list(itertools.product([0.0, 1.0], repeat=6)), dtype=torch.float64)
    fitness = torch.randn(64, dtype=torch.float64, generator=Generator().manual_seed(1))

    def likelihood(p: Tensor) -> Tensor:
        return (patterns * p.flatten() + (1 - patterns) * (1 - p.flatten())).prod(1)

    words = bits.pack(patterns.view(64, 1, 2, 3)).mT.contiguous()
    update = scheme.weighted_sum(BinaryNoise(p, 1.0, words), likelihood(p) * fitness)
    _, pull = torch.func.vjp(lambda p: likelihood(p) @ fitness, p)  # type: ignore[misc]  # two without has_aux
    exact = pull(torch.ones((), dtype=torch.float64))[0] * p * (1 - p)
    torch.testing.assert_close(update, exact, rtol=0, atol=1e-12)


VALUES = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def test_a_mixture_is_unbiased_also_for_a_short_group() -> None:
    """Mean updates, over 1000 groups of four members or 100 of one, miss by less than 5 standard errors."""
    layer, scheme = seeded(BinarizedLinear(3, 64, bias=False, dtype=torch.float64)), BinaryMixture(group=4)
    for members, groups, steps in ((4000, slice(0, 1000), 1), (9, slice(2, 3), 100)):
        population = perturb(layer, scheme, members=members, sigma=1.0, stream="philox")
        errors = []
        for step in range(steps):
            noise: Any = population.sample(step).layers[""].weight
            e, p = scheme.dense_noise(noise), noise.p[0]
            fitness = (e * VALUES).sum((1, 3)) + 0.7 * (e[..., 0] * e[..., 1]).sum(1)  # [m, outputs]
            terms = scheme.update_directions(noise)[:, 0] * fitness[..., None]
            errors += [group.mean((0, 1)) for group in (terms - VALUES * p * (1 - p)).split(4)][groups]
        means = torch.stack(errors)
        assert (means.mean(0).abs() < 5 * means.std(0) / math.sqrt(len(means))).all()
    total = scheme.weighted_sum(noise, fitness[:, 0])
    torch.testing.assert_close(total[0, 0], terms[:, 0].sum(0))


def pair(dtype: torch.dtype) -> nn.Module:
    """Return two layers with seeded logits."""
    return nn.Sequential(
        seeded(BinarizedLinear(16, 8, dtype=dtype)),
        seeded(BinarizedLinear(8, 2, outputs="real", dtype=dtype)),
    )


def test_training_learns_and_stays_finite() -> None:
    """Training works for utilities of any size and logits of any dtype."""
    runs: list[tuple[Any, torch.dtype, float]] = [
        (Binary(), torch.float16, 1e3),
        (BinaryMixture(group=4), torch.float32, 1.0),
    ]
    for scheme, dtype, scale in runs:
        model = pair(dtype)
        population = perturb(model, scheme, members=8, sigma=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=25.0 / scale)
        x = bits.pack(coins(1, 16)).repeat(8, 1)
        for step in range(30):
            noise = population.sample(step)
            y = population(x, noise=noise).double()
            fitness = scale * (y[:, 0] - y[:, 1])
            optimizer.zero_grad()
            population.update(noise, fitness - fitness.mean())
            optimizer.step()
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        y = model(x[:1])
        assert y[0, 0] - y[0, 1] > 2, (scheme, dtype)


def test_the_gradient_of_logits_does_not_depend_on_sigma() -> None:
    """Only the gradient of thresholds depends on sigma, as in any layer."""
    for scheme in SCHEMES:
        gradients: list[list[Any]] = []
        for sigma in (1.0, 0.1):
            layer = seeded(BinarizedLinear(20, 6, dtype=torch.float64))
            population = perturb(layer, scheme, members=10, sigma=sigma)
            population.update(population.sample(0), torch.arange(10).sin())
            gradients.append([parameter.grad for parameter in layer.parameters()])
        (weight, bias), (small_sigma_weight, small_sigma_bias) = gradients
        torch.testing.assert_close(weight, small_sigma_weight)
        torch.testing.assert_close(10 * bias, small_sigma_bias)


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
        exact, rounded = (gradient.double() for gradient in gradients if gradient is not None)
        assert (rounded - exact).norm() < 0.02 * exact.norm()
