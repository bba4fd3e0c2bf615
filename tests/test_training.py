"""Training by evolution strategies, and what it says of a scheme."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import impls
from esbench.digits import Recipe, train
from esbench.registry import Entry, UnavailableError
from esbench.usage import learns_from_rows, refusal
from impls import Perturbed, SparsePerturbed, perturb
from impls.benchmark import networks
from impls.training.evolution import centred_ranks, effective_members, evolve, is_unbiased
from tests.workload_cases import NUMBERS

ENTRIES = [entry for entry in NUMBERS if entry.package == impls.__name__ and entry.variant.mode == "batched"]


def tiny(network: str = "DigitsMLP") -> Recipe:
    """Make a recipe that nobody learns anything with."""
    return Recipe(network=network, members=4, steps=2, batch=3)


@dataclass(frozen=True)
class Sharing(Perturbed):
    """Dense noise that says that its members share something."""

    value: float | None = 2.0

    @override
    def kappa(self, weight: torch.Size, members: int) -> float | None:  # type: ignore[override]  # None is what is planted
        return self.value


@dataclass(frozen=True)
class Scaling(Perturbed):
    """Dense noise that says that it scales with the weight."""

    @override
    def deviation(self, weight: Tensor, sigma: float) -> Tensor | float:
        return weight.abs()


def test_utilities_are_centred_ranks() -> None:
    """From -1/2 to 1/2 in the fitness's order and shape, whatever its scale, with mean zero."""
    fitness = torch.tensor([[3.0, -1.0, 100.0], [0.5, 2.0, 0.0]])
    expected = torch.tensor([[0.3, -0.5, 0.5], [-0.1, 0.1, -0.3]], dtype=torch.float64)
    torch.testing.assert_close(centred_ranks(fitness), expected)
    assert torch.equal(centred_ranks(fitness), centred_ranks(1e-3 * fitness - 7))


def test_the_equally_fit_are_equally_useful() -> None:
    """Ties share a rank, and the mean stays zero; where all are equally fit nobody pulls anywhere."""
    assert centred_ranks(torch.tensor([1.0, 0.0, 1.0, 2.0])).tolist() == pytest.approx([0.0, -0.5, 0.0, 0.5])
    assert centred_ranks(torch.ones(2, 3)).abs().max() == 0


@pytest.mark.parametrize("name", list(networks.NETWORKS))
def test_a_network_learns_the_digits_by_evolution(name: str) -> None:
    """Sixty steps with dense noise name most of the test images, untrained it names few."""
    recipe = Recipe(network=name, members=32, steps=60, batch=16, learning_rate=0.03)
    assert train(Perturbed(), recipe, 0, "cpu").accuracy > 0.5
    assert networks.accuracy(networks.untrained(name)) < 0.3


def test_a_training_is_a_function_of_its_seed() -> None:
    """The same seed gives the same accuracy, another one another; no global generator moves."""
    state, recipe = torch.get_rng_state(), Recipe(network="DigitsMLP", members=16, steps=20, batch=8)
    first, again, other = (train(Perturbed(), recipe, seed, "cpu") for seed in (0, 0, 1))
    assert first == again
    assert first.accuracy != other.accuracy
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("network", list(networks.NETWORKS))
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.variant.name)
def test_every_variant_trains_every_network(entry: Entry, network: str) -> None:
    """Its weights move and stay finite; or it says which of its options does not fit."""
    model = networks.untrained(network)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    try:
        population = perturb(model, entry.scheme, members=4, sigma=0.05, antithetic=True)  # type: ignore[arg-type]  # a scheme
    except ValueError as error:
        assert "weight has" in str(error)  # noqa: PT017  to be trained is as right as to say why not
        return
    data = networks.digits()
    evolve(population, tiny(network), networks.rows_for(model, data.train_x), data.train_y, 0)
    moved = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    assert 0 < float(moved.abs().max()) < 1


def test_an_option_that_does_not_fit_is_a_reason() -> None:
    """The convolution's one input channel is too few to choose two of."""
    with pytest.raises(UnavailableError, match="k = 2 is above the width"):
        train(SparsePerturbed(k=2), tiny("DigitsCNN"), 0, "cpu")


def test_effective_members_follow_the_quality_law() -> None:
    """N / (1 + kappa n / d), with the kappa of weights weighted by their share of the squared gradient."""
    model, x, y = nn.Linear(3, 2), torch.eye(3), torch.tensor([0, 1, 1])
    loss = nn.functional.cross_entropy(model(x), y)
    weight, bias = (float(one.square().sum()) for one in torch.autograd.grad(loss, tuple(model.parameters())))
    kappa, d, n = 2.0 * weight / (weight + bias), 8, 16
    assert effective_members(model, Sharing(), n, x, y) == pytest.approx(n / (1 + kappa * n / d))
    assert effective_members(model, Sharing(value=0.0), n, x, y) == n
    assert effective_members(model, Sharing(value=None), n, x, y) is None


def test_noise_of_a_scale_of_its_own_is_not_unbiased() -> None:
    """Noise of variance 1 is, noise that scales with the weight is not: the law does not know its length."""
    model = networks.untrained("DigitsMLP")
    assert is_unbiased(model, Perturbed(), 0.1)
    assert not is_unbiased(model, Scaling(), 0.1)
    outcomes = [train(scheme, tiny(), 0, "cpu") for scheme in (Perturbed(), Scaling())]
    assert [(one.unbiased, one.effective_members) for one in outcomes] == [(True, 4), (False, None)]


def test_what_perturb_says_of_a_model_is_known_before_it_is_trained() -> None:
    """Its own words where it refuses, nothing where it does not; names that read as patterns are names."""
    model = nn.Sequential(nn.Linear(2, 2), nn.PReLU())
    assert "cannot perturb 1 (PReLU)" in refusal(Perturbed(), model, ())
    assert refusal(Perturbed(), model, ("1",)) == ""
    model.add_module("a[0]", nn.PReLU())
    assert refusal(Perturbed(), model, ("1", "a[0]")) == ""
    assert refusal(object(), model, ()) == ""


def test_schemes_that_learn_from_rows_are_known() -> None:
    """Dropped outputs need the rows that layers saw, dense noise does not."""
    assert learns_from_rows(impls.DropoutMask(0.5, "out"))
    assert not learns_from_rows(Perturbed())
    assert not learns_from_rows(object())
