"""A population of a whole model: its forward and update; the model is left unchanged."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

import impls
from impls.perturbation import compiled as compiled_call
from impls.perturbation import noise as streams
from impls.perturbation.layer import all_finite
from impls.perturbation.scheme import AnyScheme
from impls.schemes.dense import DenseNoise
from impls.verify.checks import Setting, check
from impls.verify.reference import check_forward, check_update, compute_update
from tests.scheme_cases import check_members, fill, normal


class Block(nn.Module):
    """A residual block that calls layers by module and by function."""

    def __init__(self) -> None:
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
    return fill(model.eval())


class Scaled(nn.Module):
    """An embedding, a parameter of the module itself and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.last = nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, tokens: Tensor) -> Tensor:
        """Run the model on [rows, positions]."""
        y: Tensor = self.last(self.head(self.table(tokens) * self.scale).tanh())
        return y


def square_layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Make a layer of 16 inputs and outputs with fixed weights."""
    return fill(nn.Linear(16, 16, bias=False), dtype)


def relative_error(values: Tensor, truth: Tensor) -> float:
    """Return the error relative to the truth's norm."""
    return float((values.double() - truth.double()).norm() / truth.double().norm())


SCHEMES: list[Any] = [
    impls.Perturbed(),
    impls.Perturbed(stored="weights"),
    impls.SparsePerturbed(2),
    impls.Permuted("both", in_sparsity=0.5),
    impls.Flipped("both"),
    impls.Loop(),
]
ROW_SCHEMES: list[AnyScheme] = [impls.DropoutMask(side="out"), impls.DropoutBlocks(side="both", groups=8)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_each_row_of_a_model_sees_its_members_weights(scheme: Any) -> None:
    """A row, of images or of tokens, has the output of the plain model with its member's weights."""
    tokens = fill(nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)))
    cases: list[tuple[nn.Module, Tensor]] = [(network(), normal(6, 4, 4, 4)), (tokens, normal(6, 2, 7, 4))]
    for (model, x), antithetic in itertools.product(cases, (False, True)):
        population = impls.perturb(model, scheme, members=3, sigma=0.1, antithetic=antithetic)
        check_members(population, population.sample(5), x)


def test_noise_of_normalizations_passes_every_check() -> None:
    """Scale and shift of a normalization have independent noise of variance 1 with any scheme."""
    check(Setting(impls.Flipped(), fill(nn.LayerNorm(6)), (6,)))
    check(Setting(impls.Flipped(), fill(nn.GroupNorm(2, 6)), (6, 3, 2)))


def test_the_model_stays_plain() -> None:
    """A population's calls and its errors leave parameters, state_dict keys and model(x) alone."""
    model = network()
    before, x = copy.deepcopy(model.state_dict()), normal(4, 4, 4, 4)
    plain = model(x)
    population = impls.perturb(model, impls.Permuted(), members=2, sigma=0.1)
    noise = population.sample(0)
    with pytest.raises(RuntimeError):
        population(x[:, :2], noise=noise)
    assert torch.equal(model(x), plain)
    assert not torch.equal(population(x, noise=noise), plain)
    assert torch.equal(model(x), plain)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_schemes_can_differ_by_layer_and_frozen_layers_stay() -> None:
    """The first pattern that matches a layer's name decides; a frozen layer is not perturbed."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    model[3].requires_grad_(requires_grad=False)
    schemes: dict[str, Any] = {"1": impls.SparsePerturbed(1), "*": impls.Flipped("both")}
    population = impls.perturb(model, schemes, members=2, sigma=0.1)
    noise = population.sample(0)
    changed = population.perturbation(noise, 0)
    assert not any(name.startswith("3.") for name in changed)
    assert int((changed["1.weight"] != 0).any(0).sum()) == 1
    assert bool((changed["0.weight"] != 0).all())
    signs = changed["0.weight"] / population.perturbation(noise, 1)["0.weight"]
    torch.testing.assert_close(signs.abs(), torch.ones_like(signs))


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize(
    "scheme", [*SCHEMES, impls.LowRank(1, regenerated=True), impls.DropoutBlocks(), *ROW_SCHEMES], ids=str
)
def test_layers_can_have_different_sigmas(scheme: AnyScheme, antithetic: bool) -> None:
    """The first pattern decides; weights and gradients are those of a population with the layer's sigma."""
    model = fill(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)))
    options: dict[str, Any] = {
        "members": 4,
        "antithetic": antithetic and scheme.supports_antithetic,
        "warn": False,
    }
    population = impls.perturb(model, scheme, sigma={"0": 0.3, "2.w*": 0.05, "*": 0.1}, **options)
    x, utilities = normal(16, 4), normal(8 if population.antithetic else 4)
    check_forward(population, x, range(4))
    check_update(population, x, range(4))
    for factor in (1.0, 0.5):
        population.sigma = 0.1 * factor  # as in a decay
        for name, sigma in (("0", 0.3), ("1", 0.1), ("2", 0.05)):
            of_layer = impls.perturb(model, scheme, sigma=sigma * factor, **options)
            results = []
            for each in (population, of_layer):
                noise = each.sample(3)
                _, record = each.call_with_activations(x, noise=noise)
                results.append((each.member(noise, 2), compute_update(each, noise, utilities, record)))
            for parameter in ("weight", "bias"):
                # Gradients of schemes that learn from rows depend on the noise of layers before.
                count = 1 if name == "2" and parameter == "weight" and scheme.learns_from_rows else 2
                for mine, expected in list(zip(*results, strict=True))[:count]:
                    torch.testing.assert_close(mine[f"{name}.{parameter}"], expected[f"{name}.{parameter}"])


def test_sigmas_of_other_parameters_and_forwards() -> None:
    """Embeddings, own parameters and prepared forwards have the layer's sigma, and so has a checkpoint."""
    model = fill(Scaled())
    population = impls.perturb(
        model,
        impls.Perturbed(),
        members=4,
        sigma={"scale": 0.5, "table": 0.2, "head": 0.3, "*": 0.1},
        antithetic=True,
    )
    tokens = torch.arange(16).view(8, 2) % 5
    population.verify(tokens)
    noise = population.sample(0)
    torch.testing.assert_close(population.prepare(noise, tokens)(tokens), population(tokens, noise=noise))
    uniform = impls.perturb(model, impls.Perturbed(), members=4, sigma=0.1, antithetic=True)
    own, other = population.perturbation(noise, 1), uniform.perturbation(uniform.sample(0), 1)
    for name, ratio in (("scale", 5.0), ("table.weight", 2.0), ("head.bias", 3.0), ("last.weight", 1.0)):
        torch.testing.assert_close(own[name], ratio * other[name])
    with pytest.raises(ValueError, match=r"layer 'scale': .* and 5 times sigma; this one has"):
        uniform.load_state_dict(population.state_dict(1))


def test_sigmas_that_fit_no_layer_are_refused() -> None:
    """Each layer has a sigma above 0, and each pattern a layer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for sigma, words in (
        ({"0": 0.1}, "no pattern of sigma matches layer '1': add"),
        ({}, "no pattern of sigma matches layer '0'"),
        ({"0": 0.1, "first": 0.2, "*": 0.1}, "the pattern 'first' of sigma matches no layer: closest are"),
        ({"0": 0.0, "*": 0.1}, "sigma must be a number above 0, got 0.0"),
    ):
        with pytest.raises(ValueError, match=words):
            impls.perturb(model, impls.Perturbed(), members=4, sigma=sigma)


def test_update_accumulates_like_backward() -> None:
    """Updates add up in .grad, parts of a population add up to the whole, and zero utilities give 0."""
    model = nn.Linear(3, 2).double()
    members = impls.BLOCK + 5
    population = impls.perturb(model, impls.Perturbed(), members=members, sigma=0.1)
    utilities = normal(members)
    population.update(population.sample(0), torch.zeros(members))
    assert model.weight.grad is not None
    assert not bool(model.weight.grad.any())
    steps: list[Any] = [np.int64(0), torch.tensor(0)]  # a step of any type of integer
    expected = population.perturbation(population.sample(0), 5)["weight"]
    for step in steps:
        assert torch.equal(population.perturbation(population.sample(step), 5)["weight"], expected)
    population.update(population.sample(0), utilities)
    full_gradient = model.weight.grad.clone()
    population.update(population.sample(0), utilities)
    torch.testing.assert_close(model.weight.grad, 2 * full_gradient)
    model.zero_grad()
    for half in (range(impls.BLOCK), range(impls.BLOCK, members)):
        population.update(population.sample(0, half), utilities[half.start : half.stop])
    torch.testing.assert_close(model.weight.grad, full_gradient)


def test_a_penalty_may_follow_an_update() -> None:
    """Gradients have the strides of their parameters, else the penalty's backward() would warn."""
    model = nn.Linear(3, 2)
    population = impls.perturb(model, impls.SparsePerturbed(1), members=4, sigma=0.1)
    population.update(population.sample(0), normal(4))
    assert model.weight.grad is not None
    assert model.weight.grad.stride() == model.weight.stride()
    expected = model.weight.grad + model.weight.sign()
    model.weight.abs().sum().backward()
    torch.testing.assert_close(model.weight.grad, expected)


def test_huge_utilities_stay_finite() -> None:
    """Utilities whose squares are beyond float64 give a finite and right update."""
    population = impls.perturb(square_layer(torch.float64), impls.Perturbed(), members=4, sigma=0.1)
    noise, utilities = population.sample(0), torch.tensor([1.0, -1.0, 2.0, 0.0], dtype=torch.float64)
    plain, huge = (compute_update(population, noise, utilities * size)["weight"] for size in (1.0, 1e200))
    assert relative_error(huge / 1e200, plain) < 1e-12
    with pytest.raises(ValueError, match=r"the gradient of layer '' is not finite in torch.float64"):
        population.update(noise, utilities * 5e307)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_numbers_are_told_from_others(dtype: torch.dtype) -> None:
    """Large numbers are finite although their sum overflows; an infinite number or a NaN is found."""
    values = torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(values)
    for number in (math.inf, -math.inf, math.nan):
        values[3, 5] = number
        assert not all_finite(values)
        assert not all_finite(values.neg().abs())


def test_shared_parameters_share_noise() -> None:
    """Tied weights share noise, a shared bias has both names, and its layers are only excluded together."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False)).double()
    model[2].weight = model[0].weight
    population = impls.perturb(model, impls.Perturbed(), members=2, sigma=0.1)
    noise, x = population.sample(0), torch.eye(2, 3).double()
    weight = population.member(noise, 1)["0.weight"]
    expected = functional.linear(functional.linear(x[1], weight).tanh(), weight)
    torch.testing.assert_close(population(x, noise=noise)[1], expected)

    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.bias = first.bias
    population = impls.perturb(nn.Sequential(first, second), impls.Perturbed(), members=3, sigma=0.1)
    assert set(population.member(population.sample(0), 1)) == {"0.weight", "0.bias", "1.weight", "1.bias"}

    second.weight = first.weight
    model, options = nn.Sequential(first, second, nn.Linear(4, 4)), {"members": 3, "sigma": 0.1}
    with pytest.raises(ValueError, match="0 is excluded, but 1 has the same parameter"):
        impls.perturb(model, impls.Perturbed(), exclude=["0"], **options)  # type: ignore[arg-type]  # by name
    impls.perturb(model, impls.Perturbed(), exclude=["0", "1"], **options)  # type: ignore[arg-type]  # by name


def test_autocast_reaches_the_members() -> None:
    """Under autocast outputs have the narrow dtype and are close to the outputs in float32."""
    linear = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    convolutions = nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 2, 1))
    for model, scheme in (
        (linear, impls.AddmmLowRank(2)),
        *((model, scheme) for model in (linear, convolutions) for scheme in (*SCHEMES, impls.Vmap())),
    ):
        population = impls.perturb(model, scheme, members=3, sigma=0.3, antithetic=True)
        noise, x = population.sample(0), torch.linspace(-1, 1, 48).view(6, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = population(x, noise=noise)
        assert narrow.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.float(), population(x, noise=noise), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("scheme", [*ROW_SCHEMES, impls.LowRank(1), impls.DropoutMask()], ids=str)
def test_a_constant_in_antithetic_utilities_changes_nothing(scheme: AnyScheme) -> None:
    """Adding a million to every utility does not change an antithetic update in bfloat16."""
    population = impls.perturb(square_layer(torch.bfloat16), scheme, members=64, sigma=0.1, antithetic=True)
    noise, utilities = population.sample(0), normal(128)
    _, record = population.call_with_activations(normal(128, 16).bfloat16(), noise=noise)
    plain, shifted = (
        compute_update(population, noise, utilities + shift, record)["weight"] for shift in (0.0, 1e6)
    )
    assert relative_error(shifted, plain) < 1e-6


@pytest.mark.parametrize(
    ("scheme", "members"),
    [
        (impls.LowRank(1, regenerated=True), 2**14),
        (impls.Permuted("both"), 2048),
        (impls.Perturbed("weights"), 2048),
        (impls.NoiseTable(), 2048),
    ],
    ids=str,
)
def test_a_sum_of_many_pieces_keeps_its_digits(
    scheme: AnyScheme, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update in bfloat16 that is summed in many pieces is accurate to about one rounding."""
    monkeypatch.setitem(streams.PIECE_BYTES, "cpu", 2048)
    population = impls.perturb(square_layer(torch.bfloat16), scheme, members=members, sigma=0.1)
    noise, utilities = population.sample(0), normal(members)
    scale = (utilities / utilities.norm()).bfloat16().double()
    written = population.dense_noise(noise)["weight"].double()
    truth = -torch.tensordot(scale, written, dims=1) * utilities.norm() / (members * 0.1)
    update = compute_update(population, noise, utilities)["weight"]
    assert relative_error(update, truth) < 2 * torch.finfo(torch.bfloat16).eps


def test_dense_noise_of_a_range_is_that_of_a_slice() -> None:
    """As in Python, negative ends count from the last member, for stored, shared and regenerated noise."""
    for scheme in (impls.Perturbed(), impls.Regenerated(), impls.Permuted(), impls.Flipped(cores=2)):
        population = impls.perturb(square_layer(), scheme, members=6, sigma=0.1, warn=False)
        noise = population.sample(0)
        whole = population.dense_noise(noise)["weight"]
        for start, stop in ((1, -1), (-3, -2), (2, 6)):
            assert torch.equal(population.dense_noise(noise, start, stop)["weight"], whole[start:stop])


@pytest.mark.parametrize("scheme", [impls.DropoutMask(), impls.DropConnect(), impls.DropoutBlocks()], ids=str)
def test_noise_that_scales_with_the_weight_follows_it(scheme: AnyScheme) -> None:
    """Noise that scales with the weight follows in-place changes of it; a replaced weight is refused."""
    layer = square_layer()
    population = impls.perturb(layer, scheme, members=8, sigma=1.0, warn=False)
    noise, x = population.sample(0), normal(8, 16).float()
    with torch.no_grad():
        layer.weight.mul_(2)
    written = population.member(noise, 3)["weight"]
    torch.testing.assert_close(population(x, noise=noise)[3], written @ x[3])
    nn.utils.vector_to_parameters(torch.randn(256), layer.parameters())
    with pytest.raises(ValueError, match="was replaced after sample"):
        population(x, noise=noise)


class Residual(nn.Module):
    """A layer with a residual connection, added by a given function."""

    def __init__(self, inner: nn.Module, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.add = inner, add

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, self.inner(x))


@pytest.mark.parametrize("scheme", ROW_SCHEMES, ids=str)
def test_an_activation_record_is_checked(scheme: AnyScheme) -> None:
    """An update refuses a record of another step's noise, a missing record, and rows changed in place."""
    functions: tuple[Any, ...] = (torch.add, Tensor.add_)
    for add in functions:
        population = impls.perturb(Residual(square_layer(), add), scheme, members=8, sigma=0.1)
        noise, later, utilities = population.sample(0), population.sample(1), torch.arange(8.0)
        _, record = population.call_with_activations(normal(8, 16).float(), noise=noise)
        with pytest.raises(ValueError, match="other noise"):
            population.update(later, utilities, record)
        with pytest.raises(ValueError, match=r"call_with_activations\(x, noise\)"):
            population.update(noise, utilities)
        if add is torch.add:
            population.update(noise, utilities, record)
        else:
            with pytest.raises(ValueError, match=r"inputs of layer 'inner' were changed in place"):
                population.update(noise, utilities, record)


@pytest.mark.parametrize("is_supported", [True, False], ids=["this torch", "an older torch"])
@pytest.mark.parametrize("scheme", [impls.Perturbed(), impls.DropoutMask()], ids=str)
def test_a_compiled_population_agrees_with_the_eager_one(
    scheme: AnyScheme, is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A population of a model with several layers gives the same outputs with torch.compile as without.

    Before torch 2.13 its call runs eagerly.
    """
    recorded = Mock(wraps=compiled_call.record_graph)
    if not is_supported:
        monkeypatch.setattr(compiled_call, "IS_SUPPORTED", False)
        monkeypatch.setattr(compiled_call, "record_graph", recorded)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    population = impls.perturb(model, scheme, members=5, sigma=0.1, warn=False)
    noise, x = population.sample(0), torch.randn(5, 2, 4, 4)
    torch.compiler.reset()

    def doubled(x: Tensor) -> Tensor:
        y: Tensor = population(x, noise=noise)
        return 2 * y

    compiled: Any = torch.compile(doubled, backend="eager")
    torch.testing.assert_close(compiled(x), doubled(x))
    assert not recorded.called


def draw_from_own_generator(_: impls.Perturbed, weight: Tensor, stream: streams.NoiseStream) -> DenseNoise:
    """Seed a generator on the stream's device, as users of torch do."""
    generator = torch.Generator(stream.device).manual_seed(stream.seed)
    return DenseNoise(torch.randn(len(stream.members), *weight.shape, generator=generator))


def read_weight(_: impls.Perturbed, weight: Tensor, stream: streams.NoiseStream) -> DenseNoise:
    """Scale the noise by a number computed from the weight's values."""
    return DenseNoise(stream.normal("dense", *weight.shape) * float(weight.std()))


def fail_anywhere(*_: object) -> DenseNoise:
    """Raise an error that has nothing to do with the device."""
    raise ValueError("seven is not even")


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (
            draw_from_own_generator,
            r"^Own\(.*\): sample\(\) fails on the meta device, .*not from a torch\.Generator",
        ),
        (read_weight, r"fails on the meta device, .* read no values of the weight$"),
        (fail_anywhere, r"^seven is not even$"),
    ],
)
def test_a_scheme_that_needs_values_to_find_shapes_is_told_so(sample: Callable[..., Any], words: str) -> None:
    """The error of a scheme that fails only without values says what was tried; others stay as they are."""
    scheme = type("Own", (impls.Perturbed,), {"sample": sample})()
    with pytest.raises((RuntimeError, ValueError), match=words):
        impls.perturb(nn.Linear(3, 2), scheme, members=4, sigma=0.1)
