"""What a person trains with: any model, plain before, during and after."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import impls
from impls.population import Population


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


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_each_row_of_a_network_sees_its_members_own_weights(scheme: Any, antithetic: bool) -> None:
    """A row's output is that of the plain network loaded with the member's written-out weights."""
    model = network()
    population = impls.perturb(model, scheme, members=3, sigma=0.1, antithetic=antithetic)
    noise, x = population.sample(5), rows(6)
    y = population(x, noise)
    for row in range(6):
        own = copy.deepcopy(model)
        seen = population.member(noise, row % 3, negated=antithetic and row >= 3)
        assert not own.load_state_dict(seen, strict=False).unexpected_keys
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


@pytest.mark.parametrize("antithetic", [False, True])
def test_utilities_of_another_length_are_refused(antithetic: bool) -> None:
    """The error names both lengths."""
    population = simple(antithetic=antithetic)
    with pytest.raises(ValueError, match="5 utilities for 4 members"):
        population.update(population.sample(0), torch.zeros(5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_utilities_that_are_not_finite_are_refused(bad: float) -> None:
    """The error counts them, and .grad stays as it was."""
    population = simple()
    with pytest.raises(ValueError, match="1 of 4 utilities"):
        population.update(population.sample(0), torch.tensor([0.0, 1.0, bad, 2.0]))
    assert all(parameter.grad is None for parameter in population.model.parameters())


@pytest.mark.parametrize("sigma", [0, -0.1, float("nan"), float("inf")])
def test_a_sigma_that_is_not_above_zero_is_refused(sigma: float) -> None:
    """The error shows it."""
    with pytest.raises(ValueError, match=f"sigma must be a number above 0, got {sigma}"):
        simple(sigma=sigma)


@pytest.mark.parametrize("members", [0, -1, 2.5, True])
def test_a_population_needs_members(members: Any) -> None:
    """The error shows what was given."""
    with pytest.raises(ValueError, match=f"members must be an int of at least 1, got {members}"):
        simple(members=members)


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
    """A model that uses a layer's weight behind the layer's back."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Use the weight twice, once without its layer."""
        assert self.layer.weight.shape == (3, 3)
        y: Tensor = self.layer(x)
        return y @ self.layer.weight.T


def test_a_weight_used_behind_its_layers_back_is_refused() -> None:
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
    """A parameter that was replaced behind the population's back is not left unperturbed."""
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


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)])
def test_a_step_is_a_number_whatever_its_type(step: Any) -> None:
    """A counter of numpy's or torch's gives the noise of Python's."""
    population = simple()
    one, other = population.sample(3), population.sample(step)
    assert torch.equal(population.perturbation(one, 0)["weight"], population.perturbation(other, 0)["weight"])


@pytest.mark.parametrize("step", [-1, 1.5, "a", None, True])
def test_a_step_that_is_no_whole_number_is_refused(step: Any) -> None:
    """The error shows it, for steps and for seeds."""
    with pytest.raises(ValueError, match="step must be an integer of 0 or more, got"):
        simple().sample(step)
    with pytest.raises(ValueError, match="seed must be an integer of 0 or more, got"):
        simple(seed=step)


class Unused(nn.Module):
    """A model that never calls its layer."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Do nothing."""
        return x


def test_a_model_that_comes_past_no_layer_is_refused() -> None:
    """An output that no member's weights went into is an error, not a result."""
    population = impls.perturb(Unused(), impls.Flipped(), members=2, sigma=0.1)
    with pytest.raises(ValueError, match="ran without coming past any of its 1 perturbed layers"):
        population(torch.zeros(2, 3), population.sample(0))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_layers_are_named() -> None:
    """TorchScript would run past the members' weights."""
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


@pytest.mark.parametrize("part", [range(1, 4), range(0), range(5), range(3), range(-256, 4), range(0, 4, 2)])
def test_a_part_that_is_not_whole_blocks_is_refused(part: range) -> None:
    """Parts start and end at block boundaries or at the population's end."""
    with pytest.raises(ValueError, match="is no part of the population"):
        simple().sample(0, part)


def test_noise_bytes_are_known_before_anything_is_drawn() -> None:
    """The count equals the bytes of the noise that is drawn."""
    for scheme in SCHEMES:
        population = impls.perturb(network(), scheme, members=5, sigma=0.1)
        if not isinstance(scheme, impls.Vmap) and getattr(scheme, "stored", "noise") == "noise":
            assert population.noise_bytes == population.sample(0).nbytes
