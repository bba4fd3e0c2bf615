"""Errors of a population: each names the value, and nothing is changed before it is raised."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import impls
from impls.perturbation.population import Population


def simple(**changes: Any) -> Population:
    """Make a population of one layer."""
    settings: dict[str, Any] = {"members": 4, "sigma": 0.1, **changes}
    return impls.perturb(nn.Linear(6, 5), settings.pop("scheme", impls.Perturbed()), **settings)


def test_a_batch_that_is_no_multiple_of_the_population_is_refused() -> None:
    """The error names both numbers."""
    population = simple()
    for count in (6, 0):
        with pytest.raises(ValueError, match=rf"{count} rows is no multiple of 4 members"):
            population(torch.zeros(count, 6), population.sample(0))


def test_an_odd_number_of_repeats_is_refused_with_antithetic_sampling() -> None:
    """The error names the number of repeats."""
    population = simple(antithetic=True)
    with pytest.raises(ValueError, match=r"even number of repeats, got 3 \(12 rows, 4 members\)"):
        population(torch.zeros(12, 6), population.sample(0))


def test_utilities_of_another_length_are_refused() -> None:
    """The error names both lengths."""
    for antithetic in (False, True):
        population = simple(antithetic=antithetic)
        with pytest.raises(ValueError, match="5 utilities for 4 members"):
            population.update(population.sample(0), torch.zeros(5))


def test_utilities_that_are_not_finite_are_refused() -> None:
    """The error counts them, and .grad stays as it was."""
    for bad in (float("nan"), float("inf")):
        population = simple()
        with pytest.raises(ValueError, match="1 of 4 utilities"):
            population.update(population.sample(0), torch.tensor([0.0, 1.0, bad, 2.0]))
        assert all(parameter.grad is None for parameter in population.model.parameters())


def test_numbers_out_of_range_are_refused() -> None:
    """The error names the argument and has the value."""
    for sigma in (0, -0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"sigma must be a number above 0, got {sigma}"):
            simple(sigma=sigma)
    for members in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=f"members must be an int of at least 1, got {members}"):
            simple(members=members)
    steps: list[Any] = [-1, 1.5, "a", None, True]
    for step in steps:
        with pytest.raises(ValueError, match="step must be an integer of 0 or more, got"):
            simple().sample(step)
        with pytest.raises(ValueError, match="seed must be an integer of 0 or more, got"):
            simple(seed=step)
    for part in (range(1, 4), range(0), range(5), range(3), range(-256, 4), range(0, 4, 2)):
        with pytest.raises(ValueError, match="is no part of the population"):
            simple().sample(0, part)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: impls.Permuted(in_sparsity=0.0), "got 0.0"),
        (lambda: impls.Permuted(in_sparsity=1.5), "got 1.5"),
        (lambda: impls.Permuted(in_sparsity=float("nan")), "got nan"),
        (lambda: impls.Permuted(in_sparsity=-2), "got -2"),
        (lambda: impls.Permuted("out", out_sparsity=0), "got 0"),
        (lambda: impls.Permuted("in", out_sparsity=0.5), "out_sparsity=0.5 has no effect"),
        (lambda: impls.Permuted("out", in_sparsity=3), "in_sparsity=3 has no effect"),
        (lambda: impls.Permuted("up"), "got 'up'"),  # type: ignore[arg-type]  # what is being tested
        (lambda: impls.Flipped("up"), "got 'up'"),  # type: ignore[arg-type]  # what is being tested
        (lambda: impls.Perturbed("up"), "got 'up'"),  # type: ignore[arg-type]  # what is being tested
        (lambda: impls.SparsePerturbed(0), "got 0"),
        (lambda: simple(scheme=impls.Permuted(in_sparsity=7)), "in_sparsity = 7 is above the width.* 6"),
        (lambda: simple(scheme=impls.Permuted("out", out_sparsity=6)), "out_sparsity = 6 is above.* 5"),
        (lambda: simple(scheme=impls.SparsePerturbed(7)), "k = 7 is above the width.* 6"),
        (lambda: simple(scheme=impls.Perturbed), "must be an instance"),
        (lambda: simple(scheme={"up": impls.Perturbed(), "*": impls.Flipped()}), "'up' matches no layer"),
        (lambda: simple(scheme={"up": impls.Perturbed()}), "no scheme for"),
        (lambda: simple(exclude=["up"]), "'up' matches no module"),
    ],
)  # fmt: skip
def test_an_option_out_of_range_is_refused(make: Any, words: str) -> None:
    """The error is a ValueError with the numbers in it."""
    with pytest.raises(ValueError, match=words):
        make()


class Raw(nn.Module):
    """A layer with a parameter that no scheme knows."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))


def test_unsupported_layers_are_named_unless_excluded() -> None:
    """Embeddings, recurrent layers and raw parameters are named with their kind."""
    model = nn.ModuleDict(
        {"words": nn.Embedding(3, 2), "memory": nn.GRU(2, 2), "raw": Raw(), "head": nn.Linear(2, 2)}
    )
    with pytest.raises(ValueError, match=r"words \(Embedding\), memory \(GRU\), raw \(Raw\)"):
        impls.perturb(model, impls.Flipped(), members=2, sigma=0.1)
    population = impls.perturb(
        model, impls.Flipped(), members=2, sigma=0.1, exclude=["words", "memory", "raw"]
    )
    assert set(population.perturbation(population.sample(0), 0)) == {"head.weight", "head.bias"}


class Transposed(nn.Module):
    """A model that uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Use the weight twice, once without its layer."""
        assert self.layer.weight.shape == (3, 3)
        y: Tensor = self.layer(x)
        return y @ self.layer.weight.T


def test_a_weight_used_without_its_layer_is_refused() -> None:
    """Nothing is silently left unperturbed: the error names the layer and the function."""
    population = impls.perturb(Transposed(), impls.Flipped(), members=2, sigma=0.1)
    with pytest.raises(ValueError, match="layer 'layer' is used by"):
        population(torch.zeros(2, 3), population.sample(0))


def test_a_model_that_reshapes_its_rows_is_refused() -> None:
    """A layer that sees another number of rows would mix members up."""
    model = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Flatten(0, 1), nn.Linear(3, 2))
    population = impls.perturb(model, impls.Flipped(), members=2, sigma=0.1)
    with pytest.raises(ValueError, match="layer '2' got 4 rows where the population has 2"):
        population(torch.zeros(2, 6), population.sample(0))


class Clipped(Transposed):
    """A model that clips its weight in place, as Wasserstein critics do."""

    def forward(self, x: Tensor) -> Tensor:
        """Clip, then use the layer."""
        self.layer.weight.clamp_(-0.01, 0.01)
        return self.layer(x)


class Joined(Transposed):
    """A model that hands its weight on in a list."""

    def forward(self, x: Tensor) -> Tensor:
        """Use the layer and a copy of its weight."""
        return self.layer(x) @ torch.cat([self.layer.weight])


def test_a_refused_use_in_place_has_changed_nothing() -> None:
    """A weight that the model clips in its forward is as it was when the error comes."""
    model = Clipped()
    before = model.layer.weight.detach().clone()
    population = impls.perturb(model, impls.Flipped(), members=2, sigma=0.1)
    with pytest.raises(ValueError, match="is used by"):
        population(torch.zeros(2, 3), population.sample(0))
    assert torch.equal(model.layer.weight, before)


def test_a_weight_used_inside_a_list_is_refused() -> None:
    """The search for parameters goes into lists."""
    population = impls.perturb(Joined(), impls.Flipped(), members=2, sigma=0.1)
    with pytest.raises(ValueError, match=r"is used by torch\.cat"):
        population(torch.zeros(2, 3), population.sample(0))


class OtherBias(Transposed):
    """A model that uses its layer's weight without the layer's bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Call the function instead of the layer."""
        return functional.linear(x, self.layer.weight)


def test_a_weight_with_another_bias_is_refused() -> None:
    """The bias that a member would see is the layer's own or an error."""
    population = impls.perturb(OtherBias(), impls.Flipped(), members=2, sigma=0.1)
    with pytest.raises(ValueError, match="with another bias than the layer's own"):
        population(torch.zeros(2, 3), population.sample(0))


def test_tied_weights_with_biases_of_their_own_are_refused() -> None:
    """The error names both layers."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match="0 and 1 share a weight but not their bias"):
        impls.perturb(model, impls.Flipped(), members=2, sigma=0.1)


def test_a_replaced_parameter_is_refused() -> None:
    """A parameter that was replaced since is not silently left unperturbed."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    population = impls.perturb(model, impls.Flipped(), members=2, sigma=0.1)
    noise = population.sample(0)
    model[1].weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match="of layer '1' was replaced"):
        population(torch.zeros(2, 3), noise)


def test_noise_of_another_population_is_refused() -> None:
    """Neither the forward nor the update takes noise that is not the population's own."""
    here, there = simple(), simple()
    with pytest.raises(ValueError, match="drawn by another population"):
        here(torch.zeros(4, 6), there.sample(0))
    with pytest.raises(ValueError, match="drawn by another population"):
        here.update(there.sample(0), torch.zeros(4))


class Unused(nn.Module):
    """A model that never calls its layer."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Do nothing."""
        return x


def test_a_model_that_uses_no_layer_is_refused() -> None:
    """An output that does not depend on any perturbed weight is an error."""
    population = impls.perturb(Unused(), impls.Flipped(), members=2, sigma=0.1)
    with pytest.raises(ValueError, match="ran without using any of its 1 perturbed layers"):
        population(torch.zeros(2, 3), population.sample(0))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_layers_are_named() -> None:
    """TorchScript calls layer functions that torch's function mode does not see."""
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="scripted code cannot be perturbed"):
        impls.perturb(nn.Sequential(scripted), impls.Flipped(), members=2, sigma=0.1)


def test_batch_statistics_across_the_population_are_refused() -> None:
    """BatchNorm in training mode would let members see each other."""
    for affine in (True, False):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=affine))
        population = impls.perturb(model, impls.Flipped(), members=2, sigma=0.1)
        with pytest.raises(ValueError, match="across the population"):
            population(torch.zeros(2, 3), population.sample(0))
