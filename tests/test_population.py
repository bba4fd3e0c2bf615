"""A population of a whole model: forward, update, and the model unchanged before, during and after."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import impls


class Block(nn.Module):
    """A residual block that calls layers the way models do: by module and by function."""

    def __init__(self) -> None:
        """Make its layers."""
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")
        self.norm = nn.GroupNorm(2, 6, eps=0.1)
        self.mix = nn.Conv2d(6, 6, 1, groups=3, bias=False)
        self.batch = nn.BatchNorm2d(6, eps=0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        y = functional.relu(self.norm(self.conv(x)))
        return y.add(self.batch(functional.conv2d(y, self.mix.weight, groups=3)))


def network() -> nn.Module:
    """Make a small network of every supported kind of layer, in float64 and with fixed weights."""
    model = nn.Sequential(
        Block(),
        nn.InstanceNorm2d(6, eps=0.2, affine=True, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(6 * 16, 7),
        nn.LayerNorm(7, eps=0.3),
        nn.RMSNorm(7),
        nn.Linear(7, 3),
    )
    generator = torch.Generator().manual_seed(0)
    model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return model


def rows(count: int) -> Tensor:
    """Make input rows."""
    return torch.randn(count, 4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


SCHEMES: list[Any] = [
    impls.Perturbed(),
    impls.Perturbed(stored="weights"),
    impls.SparsePerturbed(2),
    impls.Permuted(),
    impls.Permuted("out", out_sparsity=2),
    impls.Permuted("both", in_sparsity=0.5, replace=True),
    impls.Flipped("both"),
    impls.Loop(),
    impls.Vmap(),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_each_row_of_a_network_sees_its_members_weights(scheme: Any) -> None:
    """A row's output is that of the plain network with the member's effective weights."""
    model = network()
    for antithetic in (False, True):
        population = impls.perturb(model, scheme, members=3, sigma=0.1, antithetic=antithetic)
        noise, x = population.sample(5), rows(6)
        y = population(x, noise)
        for row in range(6):
            own = copy.deepcopy(model)
            weights = population.member(noise, row % 3, negated=antithetic and row >= 3)
            assert not own.load_state_dict(weights, strict=False).unexpected_keys
            torch.testing.assert_close(own(x[row : row + 1])[0], y[row], rtol=1e-10, atol=1e-12)


def test_the_model_stays_plain() -> None:
    """Parameters, state_dict keys and model(x) are the same before, during and after."""
    model = network()
    before, x = copy.deepcopy(model.state_dict()), rows(4)
    plain = model(x)
    population = impls.perturb(model, impls.Permuted(), members=2, sigma=0.1)
    population(x, population.sample(0))
    assert torch.equal(model(x), plain)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert population.restore() is model
    assert torch.equal(model(x), plain)
    with pytest.raises(RuntimeError, match="perturb"):
        population.sample(0)


def test_an_exception_in_the_model_leaves_nothing_on() -> None:
    """After an error inside the model, model(x) is the plain forward and the population still works."""
    model = network()
    population = impls.perturb(model, impls.Flipped(), members=2, sigma=0.1)
    noise, plain = population.sample(0), model(rows(2))
    with pytest.raises(RuntimeError):
        population(rows(2)[:, :2], noise)
    assert torch.equal(model(rows(2)), plain)
    assert not torch.equal(population(rows(2), noise), plain)


def test_schemes_can_differ_by_layer() -> None:
    """The first pattern that matches a layer's name decides its scheme."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    schemes: dict[str, Any] = {"1": impls.SparsePerturbed(1), "*": impls.Flipped("both")}
    population = impls.perturb(model, schemes, members=2, sigma=0.1)
    noise = population.sample(0)
    changed = population.perturbation(noise, 0)
    assert int((changed["1.weight"] != 0).any(0).sum()) == 1
    assert bool((changed["0.weight"] != 0).all())
    signs = changed["0.weight"] / population.perturbation(noise, 1)["0.weight"]
    torch.testing.assert_close(signs.abs(), torch.ones_like(signs))


def test_a_population_learns() -> None:
    """Following update() with an optimizer raises the rewards it was given."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    x = torch.randn(16, 4, generator=generator)
    target = x[:, :1] * x[:, 1:2]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    population = impls.perturb(model, impls.Flipped("both"), members=64, sigma=0.05, antithetic=True)
    first = functional.mse_loss(model(x), target).item()
    batch = x.repeat_interleave(64, 0).repeat(2, 1)
    for step in range(120):
        noise = population.sample(step)
        errors = (population(batch, noise).view(2, 16, 64) - target.view(1, 16, 1)).square()
        rewards = -errors.mean(1).flatten()
        optimizer.zero_grad()
        population.update(noise, (rewards - rewards.mean()) / rewards.std())
        optimizer.step()
    assert functional.mse_loss(model(x), target).item() < first / 3


def test_update_accumulates_like_backward() -> None:
    """Two updates add up in .grad, and parts of a population add up to the whole."""
    model = nn.Linear(3, 2).double()
    members = impls.BLOCK + 5
    population = impls.perturb(model, impls.Perturbed(), members=members, sigma=0.1)
    utilities = torch.randn(members, generator=torch.Generator().manual_seed(0)).double()
    population.update(population.sample(0), utilities)
    assert model.weight.grad is not None
    whole = model.weight.grad.clone()
    population.update(population.sample(0), utilities)
    torch.testing.assert_close(model.weight.grad, 2 * whole)
    model.zero_grad()
    for part in (range(impls.BLOCK), range(impls.BLOCK, members)):
        population.update(population.sample(0, part), utilities[part.start : part.stop])
    torch.testing.assert_close(model.weight.grad, whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_huge_utilities_stay_finite_in_narrow_types(dtype: torch.dtype) -> None:
    """Utilities of 1e6 in a half-precision model give a finite gradient in the right direction."""
    model = nn.Linear(8, 8).to(dtype)
    population = impls.perturb(model, impls.Perturbed(), members=16, sigma=0.5)
    noise, utilities = population.sample(0), torch.full((16,), 1e6)
    utilities[::2] = -1e6
    population.update(noise, utilities / 1e4)
    small = model.weight.grad
    model.zero_grad()
    population.update(noise, utilities * 1e-2)
    assert small is not None
    assert model.weight.grad is not None
    assert bool(model.weight.grad.isfinite().all())
    torch.testing.assert_close(small * 100, model.weight.grad, rtol=0.02, atol=1.0)


def test_zero_utilities_give_a_zero_gradient() -> None:
    """Equal members teach nothing, and nothing is divided by zero."""
    model = nn.Linear(2, 2)
    population = impls.perturb(model, impls.Flipped(), members=4, sigma=0.1)
    population.update(population.sample(0), torch.zeros(4))
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.zeros(2, 2))


def test_frozen_parameters_stay_as_they_are() -> None:
    """A layer with requires_grad=False is left unperturbed and without a gradient."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(requires_grad=False)
    population = impls.perturb(model, impls.Flipped(), members=2, sigma=0.1)
    assert set(population.perturbation(population.sample(0), 0)) == {"1.weight", "1.bias"}


def test_tied_weights_are_one_layer() -> None:
    """Two layers that share a weight share its noise and its gradient."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False)).double()
    model[2].weight = model[0].weight
    population = impls.perturb(model, impls.Perturbed(), members=2, sigma=0.1)
    noise, x = population.sample(0), torch.eye(2, 3).double()
    seen = population.member(noise, 1)
    expected = functional.linear(functional.linear(x[1], seen["0.weight"]).tanh(), seen["0.weight"])
    torch.testing.assert_close(population(x, noise)[1], expected)


def test_rows_may_have_axes_before_the_features() -> None:
    """Tokens of a row all see their row's member."""
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    population = impls.perturb(model, impls.Permuted("both"), members=3, sigma=0.1, antithetic=True)
    noise = population.sample(0)
    x = torch.randn(6, 2, 7, 4, generator=torch.Generator().manual_seed(0)).double()
    y = population(x, noise)
    for row in range(6):
        seen = population.member(noise, row % 3, negated=row >= 3)
        expected = torch.func.functional_call(model, seen, (x[row],))
        torch.testing.assert_close(y[row], expected)


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)])
def test_a_step_is_a_number_whatever_its_type(step: Any) -> None:
    """A counter of numpy's or torch's gives the noise of Python's."""
    population = impls.perturb(nn.Linear(6, 5), impls.Perturbed(), members=4, sigma=0.1)
    one, other = population.sample(3), population.sample(step)
    assert torch.equal(population.perturbation(one, 0)["weight"], population.perturbation(other, 0)["weight"])


def test_noise_bytes_are_known_before_anything_is_drawn() -> None:
    """The count equals the bytes of the noise that is drawn."""
    for scheme in SCHEMES:
        population = impls.perturb(network(), scheme, members=5, sigma=0.1)
        if not isinstance(scheme, impls.Vmap) and getattr(scheme, "stored", "noise") == "noise":
            assert population.noise_bytes == population.sample(0).nbytes


def test_autocast_reaches_the_members() -> None:
    """Under autocast outputs have the narrow type and are close to those of the wide one."""
    for scheme in SCHEMES:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        population = impls.perturb(model, scheme, members=3, sigma=0.3, antithetic=True)
        noise, x = population.sample(0), torch.linspace(-1, 1, 48).view(6, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = population(x, noise)
        assert narrow.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.float(), population(x, noise), rtol=0.1, atol=0.1)
