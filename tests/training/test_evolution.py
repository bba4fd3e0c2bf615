"""Training by evolution strategies, and what its trainer reports about a scheme."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import impls
from esbench.registry import REGISTRY
from esbench.schema import Recipe
from esbench.studies.digits_run import train
from esbench.workload import UnavailableError, trainer
from impls import Perturbed, SparsePerturbed, perturb
from impls.training import networks
from impls.training.evolution import effective_members, evolve, is_unbiased, squares


@dataclass(frozen=True)
class WithKappa(Perturbed):
    """Dense noise that declares another kappa."""

    value: float | None = 2.0

    @override
    def kappa(self, weight: torch.Size, members: int) -> float | None:  # type: ignore[override]  # None is planted
        return self.value


@dataclass(frozen=True)
class Scaled(Perturbed):
    """Dense noise that declares to scale with the weight."""

    @override
    def noise_std(self, weight: Tensor, sigma: float) -> Tensor | float:
        return weight.abs()


def tiny(network: str = "DigitsMLP") -> Recipe:
    """Return a recipe of two steps."""
    return Recipe(network=network, members=4, steps=2, batch=3)


def test_evolution_learns_the_digits() -> None:
    """Sixty steps classify most test images; an untrained network classifies few."""
    recipe = Recipe(network="DigitsMLP", members=32, steps=60, batch=16, learning_rate=0.03)
    assert train(Perturbed(), recipe, 0, "cpu").accuracy > 0.5
    assert networks.accuracy(networks.untrained("DigitsMLP")) < 0.3


def test_training_is_a_function_of_its_seed() -> None:
    """Equal seeds give equal accuracies, other seeds others; no global generator is used."""
    state, recipe = torch.get_rng_state(), Recipe(network="DigitsMLP", members=8, steps=8, batch=8)
    first, again, second_seed = (train(Perturbed(), recipe, seed, "cpu") for seed in (0, 0, 1))
    assert first == again
    assert first.accuracy != second_seed.accuracy
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("network", list(networks.NETWORKS))
def test_every_scheme_trains_every_network(network: str) -> None:
    """Weights move and stay finite, or perturb() says which option does not fit."""
    data = networks.digits()
    trained = 0
    for entry in REGISTRY.select():
        if not isinstance(entry.scheme, impls.AbstractScheme) or entry.variant.mode != "batched":
            continue
        if entry.variant.scheme.startswith(("Fused", "Compiled")) or entry.operators is not None:
            continue
        model = networks.untrained(network)
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        try:
            population = perturb(model, entry.scheme, members=4, sigma=0.05, antithetic=True, warn=False)
        except ValueError as error:
            assert re.search("weight|input channels", str(error)), entry.variant.name  # noqa: PT017  either outcome is right
            continue
        evolve(population, tiny(network), networks.rows_for(model, data.train_x), data.train_y, 0)
        moved = nn.utils.parameters_to_vector(model.parameters()).detach() - before
        assert 0 < float(moved.abs().max()) < 1, entry.variant.name
        trained += 1
    assert trained > 20


def test_n_eff_of_a_network() -> None:
    """n_eff is n / (1 + kappa n / d), kappas weighted by squared gradients, for noise of variance 1."""
    model, x, y = nn.Linear(3, 2), torch.eye(3), torch.tensor([0, 1, 1])
    loss = nn.functional.cross_entropy(model(x), y)
    weight, bias = (
        float(gradient.square().sum()) for gradient in torch.autograd.grad(loss, tuple(model.parameters()))
    )
    kappa, d, n = 2.0 * weight / (weight + bias), 8, 16
    shares = squares(model, x, y)
    assert shares == pytest.approx({"weight": weight, "bias": bias})
    assert effective_members(model, WithKappa(), n, shares) == pytest.approx(n / (1 + kappa * n / d))
    assert effective_members(model, WithKappa(value=0.0), n, shares) == n
    assert effective_members(model, WithKappa(value=None), n, shares) is None
    digits = networks.untrained("DigitsMLP")
    assert is_unbiased(digits, Perturbed(), 0.1)
    assert not is_unbiased(digits, Scaled(), 0.1)
    outcomes = [train(scheme, tiny(), 0, "cpu") for scheme in (Perturbed(), Scaled())]
    assert [(outcome.unbiased, outcome.effective_members) for outcome in outcomes] == [
        (True, 4),
        (False, None),
    ]


def test_the_trainer_reports_refusals_and_learning_from_rows() -> None:
    """The trainer states why it refuses a model, and whether a scheme learns from rows."""
    with pytest.raises(UnavailableError, match="k = 2 exceeds the layer"):
        train(SparsePerturbed(k=2), tiny("DigitsCNN"), 0, "cpu")
    model = nn.Sequential(nn.Linear(2, 2), nn.Bilinear(2, 2, 2))
    population_trainer = trainer(Perturbed())
    assert population_trainer is not None
    assert "cannot perturb 1 (Bilinear)" in population_trainer.refusal(Perturbed(), model, ())
    assert population_trainer.refusal(Perturbed(), model, ("1",)) == ""
    model.add_module("a[0]", nn.PReLU())  # a name that reads as a pattern
    assert population_trainer.refusal(Perturbed(), model, ("1", "a[0]")) == ""
    assert population_trainer.learns_from_rows(impls.DropoutMask(0.5, "out"))
    assert not population_trainer.learns_from_rows(Perturbed())
    assert trainer(object()) is None
