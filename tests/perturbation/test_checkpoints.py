"""A population's state: exact resume, the states that are refused, and the best member."""

import io
from typing import Any

import pytest
import torch
from torch import nn

import impls
from impls.perturbation.scheme import AnyScheme
from tests.scheme_cases import fill, normal


def network(width: int = 6) -> nn.Sequential:
    """Return a small network with fixed weights."""
    layers = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 2))
    return fill(layers, torch.float32)


def population(model: nn.Module | None = None, **options: Any) -> impls.Population:
    """Return a population of four members; options replace those of ``perturb``."""
    settings: dict[str, Any] = {"scheme": impls.LowRankSign(), "members": 4, "sigma": 0.1, **options}
    return impls.perturb(model or network(), **settings)


@pytest.mark.parametrize("scheme", [impls.LowRankSign(), impls.Regenerated("uniform")], ids=str)
@pytest.mark.parametrize("stream", ["block", "philox"])
def test_after_loading_each_step_has_the_same_noise(stream: str, scheme: AnyScheme) -> None:
    """Seed, sigma and step survive a file that may hold no code; the bits of the noise are equal."""
    saved = population(stream=stream, scheme=scheme, seed=5)
    saved.sigma = 0.25
    file = io.BytesIO()
    torch.save(saved.state_dict(7), file)
    file.seek(0)
    resumed = population(stream=stream, scheme=scheme)
    assert resumed.load_state_dict(torch.load(file, weights_only=True)) == 7
    assert (resumed.seed, resumed.sigma) == (5, 0.25)
    noise, again = saved.sample(7), resumed.sample(7)
    assert again.sigma == 0.25
    for name, values in saved.dense_noise(noise).items():
        assert torch.equal(values, resumed.dense_noise(again)[name])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheme": impls.Flipped()}, r"layer '0': LowRankSign\(.*; this one has Flipped\("),
        ({"scheme": impls.Regenerated("uniform")}, r"layer '0': .*has Regenerated\(values='uniform'\)"),
        ({"model": network(8)}, r"layer '0': .* \[6, 4\] with bias; this one has .* \[8, 4\]"),
        ({"model": network()[:2]}, "layer '2': .*; this one has none"),
        ({"model": network().double()}, "layer '0': .* float32 .*; this one has .* float64"),
        ({"members": 8}, "members: 4; this one has 8"),
        ({"antithetic": True}, "antithetic: False; this one has True"),
        ({"stream": "philox"}, "stream: block; this one has philox"),
    ],
)
def test_the_state_of_another_population_is_refused(options: Any, words: str) -> None:
    """The error names the first difference, and nothing is loaded."""
    mine = population(**options)
    with pytest.raises(ValueError, match=f"state is that of a population with {words}"):
        mine.load_state_dict(population(seed=5, sigma=0.5).state_dict(3))
    assert (mine.seed, mine.sigma) == (0, 0.1)


def test_the_state_of_a_model_is_refused() -> None:
    """A dictionary without the keys of a population's state is no KeyError."""
    with pytest.raises(ValueError, match="not the state of a population, because it has no 'step'"):
        population().load_state_dict(network().state_dict())


@pytest.mark.parametrize("antithetic", [False, True])
def test_the_best_member_has_the_highest_fitness(antithetic: bool) -> None:
    """The weights are those of the member and side with the highest fitness; the model loads them."""
    model = network().double()
    mine = population(model, antithetic=antithetic)
    noise, x = mine.sample(2), mine.rows(normal(3, 4))
    fitness = mine.fitness(-mine(x, noise=noise).square().sum(1))
    if antithetic:
        assert int(fitness.argmax()) >= 4  # with the negated noise
    weights = mine.best(noise, fitness)
    alone = network().double()
    alone.load_state_dict(weights, strict=False)
    loss = alone(normal(3, 4)).square().sum(1).mean()
    torch.testing.assert_close(-loss, fitness.max(), rtol=1e-10, atol=0)


def test_a_fitness_of_another_shape_or_with_nan_has_no_best_member() -> None:
    """Rewards by row are no fitness, and a NaN is not the highest number."""
    mine = population()
    noise = mine.sample(0)
    with pytest.raises(ValueError, match=r"needs a fitness of shape \[4\], got \[12\]"):
        mine.best(noise, torch.zeros(12))
    with pytest.raises(ValueError, match="1 of 4 values of the fitness are not numbers"):
        mine.best(noise, torch.tensor([0.0, 1.0, float("nan"), 2.0]))
