"""Errors raised by populations and by options of schemes; their messages name the refused value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import impls
from impls.perturbation.population import Population


def perturb_layer(**changes: Any) -> Population:
    """Make a population of one layer."""
    settings: dict[str, Any] = {"members": 4, "sigma": 0.1, **changes}
    return impls.perturb(nn.Linear(6, 5), settings.pop("scheme", impls.Perturbed()), **settings)


def perturb_model(model: nn.Module, **options: Any) -> Population:
    """Make a population of two members of a model."""
    return impls.perturb(model, impls.Flipped(), members=2, sigma=0.1, **options)


def test_rows_and_utilities_of_another_length_are_refused() -> None:
    """Wrong numbers of rows or utilities, and utilities that are not finite, raise and leave .grad alone."""
    population, antithetic = perturb_layer(), perturb_layer(antithetic=True)
    noise = population.sample(0)
    for count in (6, 0):
        with pytest.raises(ValueError, match=rf"{count} rows is not a multiple of 4 members"):
            population(torch.zeros(count, 6), noise)
    with pytest.raises(ValueError, match=r"even number of repeats, got 3 \(12 rows, 4 members\)"):
        antithetic(torch.zeros(12, 6), antithetic.sample(0))
    for each in (population, antithetic):
        with pytest.raises(ValueError, match="5 utilities for 4 members"):
            each.update(each.sample(0), torch.zeros(5))
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="1 of 4 utilities"):
            population.update(noise, torch.tensor([0.0, 1.0, value, 2.0]))
    assert all(parameter.grad is None for parameter in population.model.parameters())


def test_numbers_out_of_range_are_refused() -> None:
    """An error for a number out of range names the argument and shows the value."""
    for sigma in (0, -0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"sigma must be a number above 0, got {sigma}"):
            perturb_layer(sigma=sigma)
    for members in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=f"members must be an int of at least 1, got {members}"):
            perturb_layer(members=members)
    steps: list[Any] = [-1, 1.5, "a", None, True]
    for step in steps:
        with pytest.raises(ValueError, match="step must be an integer of 0 or more, got"):
            perturb_layer().sample(step)
        with pytest.raises(ValueError, match="seed must be an integer of 0 or more, got"):
            perturb_layer(seed=step)
    for sampled in (range(1, 4), range(0), range(5), range(3), range(-256, 4), range(0, 4, 2)):
        with pytest.raises(ValueError, match="is not a valid part of a population of 4"):
            perturb_layer().sample(0, sampled)


OPTIONS: list[tuple[Any, dict[str, Any], str]] = [
    *((impls.Permuted, {"in_sparsity": bad}, f"in_sparsity must be a number above 0 .*got {bad!r}")
      for bad in (0.0, 1.5, float("nan"), True, "0.5")),
    (impls.Permuted, {"out_sparsity": 0.5}, "out_sparsity=0.5 has no effect with side='in'"),
    (impls.Flipped, {"side": "up"}, "side must be 'in', 'out' or 'both', got 'up'"),
    (impls.Flipped, {"cores": 0}, "cores must be an int of at least 1, got 0"),
    (impls.Perturbed, {"stored": "up"}, "got 'up'"),
    (impls.SparsePerturbed, {"k": 0}, "k must be an int of at least 1, got 0"),
    (impls.SparsePerturbed, {"k": 1, "values": "signs"}, "values must be 'normal' or 'sign', got 'signs'"),
    *((impls.LowRank, {"rank": bad}, f"rank must be an int of at least 1, got {bad!r}")
      for bad in (0, True, 1.0, "1")),
    (impls.NoiseTable, {"ratio": 1}, "ratio must be an int of at least 2, got 1"),
    *((scheme, {"p": bad}, "p must be a number between 0 and 1")
      for scheme in (impls.DropoutMask, impls.DropConnect, impls.DropoutBlocks)
      for bad in (0, 1, float("nan"))),
    (impls.DropoutMask, {"side": "both"}, "side must be 'in' or 'out', got 'both'"),
    (impls.DropoutBlocks, {"groups": 1}, "groups must be an int of at least 2, got 1"),
    *((perturb_layer, {"scheme": scheme}, words) for scheme, words in (
        (impls.SparsePerturbed(7), "k = 7 is above the weight's 6 input columns"),
        (impls.DropoutBlocks(0.1, blocks=1), "p = 0.1 keeps none or all of 1 blocks, for 6 channels"),
        (impls.Perturbed, "must be an instance"),
        ({"up": impls.Perturbed(), "*": impls.Flipped()}, "'up' matches no layer"),
        ({"up": impls.Perturbed()}, "no pattern matches the layers"),
    )),
    (perturb_layer, {"exclude": ["up"]}, "'up' matches no module"),
]  # fmt: skip
"""What is created, its options, and a pattern of the error message."""


def test_options_out_of_range_are_refused() -> None:
    """An option out of range raises when the scheme is created, or, for a layer's width, its population."""
    for make, options, words in OPTIONS:
        with pytest.raises(ValueError, match=words):
            make(**options)


class Model(nn.Module):
    """A model of one layer with a forward of the test's choice."""

    def __init__(self, run: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(3, 3), run

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        return self.run(self.layer, x)


def clip(layer: nn.Linear, x: Tensor) -> Tensor:
    """Clip the weight in place, as Wasserstein critics do."""
    layer.weight.clamp_(-0.01, 0.01)
    y: Tensor = layer(x)
    return y


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda layer, x: layer(x) @ layer.weight.T, "layer 'layer' is used by"),
        (lambda layer, x: layer(x) @ torch.cat([layer.weight]), r"is used by torch\.cat"),
        (clip, "is used by"),
        (lambda layer, x: functional.linear(x, layer.weight), "is used without its own bias"),
        (lambda layer, x: layer(x.repeat(2, 1)), "layer 'layer' got 4 rows, but the model 2"),
        (lambda layer, x: x, "used none of its 1 perturbed layers"),  # noqa: ARG005  left unused
    ],
    ids=["another function", "in a list", "in place", "another bias", "more rows", "unused"],
)
def test_an_unsupported_use_of_a_weight_is_refused(run: Any, words: str) -> None:
    """A model that uses a perturbed weight in an unsupported way is refused, and its weight is unchanged."""
    model = Model(run)
    before = model.layer.weight.detach().clone()
    population = perturb_model(model)
    with pytest.raises(ValueError, match=words):
        population(torch.zeros(2, 3), population.sample(0))
    assert torch.equal(model.layer.weight, before)


class Raw(nn.Module):
    """A layer with a parameter that no scheme supports."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_unsupported_layers_are_named_unless_excluded() -> None:
    """Embeddings, recurrent layers and raw parameters are refused by name unless they are excluded.

    Scripted code, and layers that share a weight but not a bias, are refused too.
    """
    layers = {"words": nn.Embedding(3, 2), "memory": nn.GRU(2, 2), "raw": Raw(), "head": nn.Linear(2, 2)}
    model = nn.ModuleDict(layers)
    with pytest.raises(ValueError, match=r"words \(Embedding\), memory \(GRU\), raw \(Raw\)"):
        perturb_model(model)
    population = perturb_model(model, exclude=["words", "memory", "raw"])
    assert set(population.perturbation(population.sample(0), 0)) == {"head.weight", "head.bias"}
    # TorchScript calls layer functions that torch's function mode does not see.
    with pytest.raises(ValueError, match="scripted code cannot be perturbed"):
        perturb_model(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="0 and 1 share a weight but not their bias"):
        perturb_model(tied)


def test_noise_of_another_population_or_parameter_is_refused() -> None:
    """Noise of another population, or from before a parameter was replaced, is refused."""
    population, noise = perturb_layer(), perturb_layer().sample(0)
    for call in (
        lambda: population(torch.zeros(4, 6), noise),
        lambda: population.update(noise, torch.zeros(4)),
    ):
        with pytest.raises(ValueError, match="drawn by another population"):
            call()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    replaced = perturb_model(model)
    earlier = replaced.sample(0)
    model[1].weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match="of layer '1' was replaced"):
        replaced(torch.zeros(2, 3), earlier)


def test_batch_statistics_across_the_population_are_refused() -> None:
    """BatchNorm in training mode is refused, because its statistics would mix members."""
    for affine in (True, False):
        population = perturb_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=affine)))
        with pytest.raises(ValueError, match="across the population"):
            population(torch.zeros(2, 3), population.sample(0))
