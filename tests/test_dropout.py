"""Dropout as the only noise: its updates have the means that enumeration gives, and outputs learn by them."""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.registry import WrongResultError
from impls import perturb
from impls.perturbation.operators import AbstractOperator, Conv2d, Linear
from impls.perturbation.scheme import AnyScheme, TensorRef
from impls.schemes import DropConnect, DropoutMask, dropout
from impls.schemes.dropout import DropoutNoise
from impls.training import networks
from impls.verify.checks import Setting, check, check_moments
from impls.verify.reference import check_update

MASKS = torch.tensor(list(itertools.product((False, True), repeat=3)))


def layer(out: int = 3, inp: int = 4) -> nn.Module:
    """Make a small layer with fixed weights in float64; one of them is zero."""
    module = nn.Linear(inp, out).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 2, parameter.numel()).sin().view(parameter.shape))
        module.weight[1, 2] = 0
    return module


def random(*shape: int, seed: int = 0) -> Tensor:
    """Draw the same numbers every time, in float64."""
    return torch.randn(*shape, generator=Generator().manual_seed(seed)).double()


@pytest.mark.parametrize(
    "scheme", [DropoutMask(0.2), DropoutMask(0.7, "out"), DropoutMask(0.3, "out"), DropConnect(0.8)], ids=str
)
def test_any_probability_agrees_with_the_reference(scheme: AnyScheme) -> None:
    """Registered variants have p = 1/2; other p, and a weight of 0, agree with the reference too."""
    check(Setting(scheme, layer(), (4,)))


@pytest.mark.parametrize("p", [0.5, 0.3])
@pytest.mark.parametrize(
    ("op", "weight_shape", "space"),
    [(Linear(), (1, 3, 4), ()), (Conv2d(padding=1), (1, 3, 2, 2, 3), (3, 4))],
    ids=["linear", "convolution"],
)
def test_the_gradient_of_outputs_is_the_contrast_of_masks(
    op: AbstractOperator, weight_shape: tuple[int, ...], space: tuple[int, ...], p: float
) -> None:
    """Over all masks and for any utility f, the mean is q (E[f | on] - E[f | off]) Y^T X for each output."""
    weight, x = random(*weight_shape), random(1, 1, 1, weight_shape[2], *space, seed=1)
    f, chance = random(8, seed=2), torch.where(MASKS, 1 - p, p).double().prod(1)
    noise = DropoutNoise(MASKS.unsqueeze(1), TensorRef(weight))
    # Each mask is a member, and all of them see the same row.
    rows = x.expand(1, 8, *x.shape[2:])
    mean = DropoutMask(p, "out").node_gradient(op, weight, noise, (chance * f).unsqueeze(0), rows)
    worth = torch.stack(
        [
            (chance * f)[MASKS[:, gate]].sum() / (1 - p) - (chance * f)[~MASKS[:, gate]].sum() / p
            for gate in range(3)
        ]
    )
    with torch.enable_grad():
        w = weight.clone().requires_grad_()
        y = op.apply_shared(x, w)
        each = (y * y.detach()).flatten(4).sum(-1) if space else y * y.detach()
        (expected,) = torch.autograd.grad(((1 - p) * worth * each.flatten()).sum(), w)
    torch.testing.assert_close(mean, expected, rtol=1e-10, atol=1e-12)


def test_for_a_linear_utility_rows_count_by_their_outputs_squared() -> None:
    """With f = <d, y'> the mean over masks is d Y^2 X: the gradient d X of a row, times its Y^2."""
    weight, x, d = random(1, 3, 4), random(1, 1, 1, 4, seed=1), random(3, seed=2)
    y = (x @ weight[0].mT).flatten()
    f = (MASKS * 2.0 * y * d).sum(1)
    noise = DropoutNoise(MASKS.unsqueeze(1), TensorRef(weight))
    mean = DropoutMask(side="out").node_gradient(
        Linear(), weight, noise, f.unsqueeze(0) / 8, x.expand(1, 8, 1, 4)
    )
    torch.testing.assert_close(mean[0], (d * y**2).unsqueeze(1) * x.view(1, 4))


def test_multiplying_by_outputs_beats_dividing_by_them() -> None:
    """Dividing has the gradient as its mean and an infinite variance: it is nowhere near after 4096 rows."""
    members, weight, x = 4096, random(1, 8, 16), random(1, 4096, 1, 16, seed=1)
    noise = DropoutNoise(random(members, 1, 8, seed=2) > 0, TensorRef(weight))
    y = x @ weight[0].mT
    slope = torch.tanh(y @ random(8, 8, seed=3))
    seen = y * noise.kept * 2
    f = (seen * slope).sum((0, 2, 3)) - (y * slope).sum((0, 2, 3))
    truth = torch.einsum("rmgo,rmgi->oi", slope, x)
    multiplied = DropoutMask(side="out").node_gradient(Linear(), weight, noise, f.unsqueeze(0), x)[0]
    xi = noise.kept * 2.0 - 1
    divided = torch.einsum("rmgo,rmgi->oi", f.view(1, -1, 1, 1) * xi / y, x)
    assert cosine(multiplied, truth) > 0.5 > 2 * abs(cosine(divided, truth))


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two tensors."""
    return float(torch.cosine_similarity(a.flatten(), b.flatten(), 0))


def test_dropped_inputs_can_only_rescale_columns() -> None:
    """Whatever the utilities, the update is W with each column times one number."""
    model = layer(5, 4)
    population = perturb(model, DropoutMask(), members=300, sigma=0.1)
    population.update(population.sample(0), random(300))
    weight, gradient = model.get_parameter("weight"), model.get_parameter("weight").grad
    assert gradient is not None
    column = gradient[0] / weight[0]
    assert bool((column != 0).all())
    torch.testing.assert_close(gradient, weight * column)


def trained_loss(side: Literal["in", "out"], weight: Tensor, target: Tensor, x: Tensor) -> float:
    """Train a layer towards a target's outputs by plain steps; return the mean squared error at the end."""
    model = nn.Linear(weight.shape[1], weight.shape[0], bias=False).double().requires_grad_()
    model.weight.data.copy_(weight)
    population = perturb(model, DropoutMask(0.2, side), members=len(x), sigma=1.0, antithetic=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rows = torch.cat([x, x])
    for step in range(300):
        noise = population.sample(step)
        y, record = population.call_with_activations(rows, noise)
        optimizer.zero_grad()
        population.update(noise, -(y - rows @ target.T).square().mean(1), record)
        optimizer.step()
    return float((x @ (model.weight.detach() - target).T).square().mean())


def test_dropped_outputs_learn_what_dropped_inputs_cannot() -> None:
    """A target that no rescaling of columns comes near is learned from outputs; from inputs it is not.

    The bound is the best that any rescaling reaches: least squares over the scales of all columns.
    """
    weight, target, x = random(4, 6), random(4, 6, seed=1), random(512, 6, seed=2)
    columns = torch.einsum("ni,oi->noi", x, weight).flatten(0, 1)
    wanted = (x @ target.T).flatten()
    scales = torch.linalg.lstsq(columns, wanted.unsqueeze(1)).solution
    bound = float((columns @ scales - wanted.unsqueeze(1)).square().mean())
    assert trained_loss("in", weight, target, x) > 0.999 * bound
    assert trained_loss("out", weight, target, x) < 0.5 * bound


def test_a_network_of_digits_learns_by_dropping_outputs_alone() -> None:
    """The digits MLP passes 60 %, from chance, with no noise on its weights but dropout of outputs."""
    data, members = networks.digits(), 512
    model = networks.untrained("DigitsMLP")
    population = perturb(model, DropoutMask(0.2, "out"), members=members, sigma=0.02, antithetic=True)
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    optimizer = torch.optim.Adam(weights, 0.003)
    for step in range(140):
        rows = torch.randint(len(data.train_y), (members,), generator=Generator().manual_seed(step)).repeat(2)
        noise = population.sample(step)
        logits, record = population.call_with_activations(data.train_x[rows], noise)
        loss = nn.functional.cross_entropy(logits, data.train_y[rows], reduction="none")
        optimizer.zero_grad()
        population.update(noise, -loss, record)
        optimizer.step()
    assert networks.accuracy(model) > 0.6


def test_at_one_half_the_negated_noise_is_the_complementary_mask() -> None:
    """What a member keeps with its noise it drops with the negated one, and the other way round."""
    model = layer()
    population = perturb(model, DropoutMask(), members=2, sigma=0.1, antithetic=True)
    noise = population.sample(0)
    there, back = (population.member(noise, 1, negated=negated)["weight"] for negated in (False, True))
    torch.testing.assert_close(there + back, 2 * model.get_parameter("weight"))
    assert float((there * back).abs().max()) < 1e-12


def test_dropped_weights_do_not_depend_on_the_pieces_they_are_made_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members' own weights are made one member at a time, or all at once: outputs and updates agree."""
    results = []
    for piece_bytes in (1, dropout.PIECE_BYTES):
        monkeypatch.setattr(dropout, "PIECE_BYTES", piece_bytes)
        model = layer()
        population = perturb(model, DropConnect(0.3), members=7, sigma=0.1)
        noise = population.sample(0)
        y = population(random(14, 4), noise)
        population.update(noise, random(7))
        results.append((y, model.get_parameter("weight").grad))
    torch.testing.assert_close(*results)


def test_a_mask_takes_a_byte_a_channel_and_a_byte_a_weight() -> None:
    """The weight that noise is a multiple of is the layer's own: no copy of it is held."""
    bias = 3 * 8
    for scheme, each in ((DropoutMask(), 4), (DropoutMask(side="out"), 3), (DropConnect(), 12)):
        model = layer()
        population = perturb(model, scheme, members=10, sigma=0.1)
        assert population.noise_bytes == 10 * (each + bias)
        noise = population.sample(0)
        x = random(10, 4)
        with torch.no_grad():
            y = population(x, noise) - model.get_parameter("bias")
            for parameter in model.parameters():
                parameter.mul_(2)
            moved = population(x, noise) - model.get_parameter("bias")
        change = noise.layers[""].bias
        assert change is not None
        torch.testing.assert_close(moved - 0.1 * change, 2 * (y - 0.1 * change))


@dataclass(frozen=True)
class AnotherMembers(DropoutMask):
    """The node gradient uses the gates of the next member."""

    @override
    def node_gradient(
        self, op: Any, weight: Any, noise: DropoutNoise, utilities: Tensor, x: Tensor
    ) -> Tensor:
        moved = DropoutNoise(noise.kept.roll(1, 0), noise.weight, noise.sigma)
        return super().node_gradient(op, weight, moved, utilities, x)


@dataclass(frozen=True)
class WithoutVariance(DropoutMask):
    """The 1 / v is missing."""

    @override
    def node_gradient(self, op: Any, weight: Any, noise: Any, utilities: Tensor, x: Tensor) -> Tensor:
        return super().node_gradient(op, weight, noise, utilities * dropout.variance(self.p), x)


@dataclass(frozen=True)
class SquaredUtilities(DropoutMask):
    """Utilities enter twice."""

    @override
    def node_gradient(self, op: Any, weight: Any, noise: Any, utilities: Tensor, x: Tensor) -> Tensor:
        return super().node_gradient(op, weight, noise, utilities * utilities.abs(), x)


@dataclass(frozen=True)
class HalvesAlike(DropoutMask):
    """The second half is negated once more: rows that saw -E are credited as if they had seen E."""

    @override
    def node_gradient(self, op: Any, weight: Any, noise: Any, utilities: Tensor, x: Tensor) -> Tensor:
        first, second = utilities.chunk(2)
        return super().node_gradient(op, weight, noise, torch.cat([first, -second]), x)


@pytest.mark.parametrize("bug", [AnotherMembers, WithoutVariance, SquaredUtilities, HalvesAlike])
def test_a_bug_in_the_node_gradient_is_found(bug: type[DropoutMask]) -> None:
    """Each planted mistake fails against autograd of single rows, which passes without it."""
    x = random(20, 4)
    for scheme, is_wrong in ((DropoutMask(0.3, "out"), False), (bug(0.3, "out"), True)):
        population = perturb(layer(), scheme, members=5, sigma=0.1, antithetic=True)
        with pytest.raises(WrongResultError, match="update of weight") if is_wrong else nullcontext():
            check_update(population, x, range(5))


@dataclass(frozen=True)
class OnesForDeviation(DropoutMask):
    """The size of the noise is said to be one, as if it were no multiple of the weight."""

    @override
    def noise_std(self, weight: Tensor, sigma: float) -> Tensor:
        return torch.ones_like(weight)


@dataclass(frozen=True)
class NoDeviation(DropoutMask):
    """The noise is said not to vary."""

    @override
    def noise_std(self, weight: Tensor, sigma: float) -> Tensor:
        return torch.zeros_like(weight)


@pytest.mark.parametrize(("bug", "words"), [(OnesForDeviation, "variance"), (NoDeviation, "varies")])
def test_noise_of_another_size_than_is_said_is_found(bug: type[DropoutMask], words: str) -> None:
    """Moments are compared with the standard deviation that the scheme declares."""
    with pytest.raises(WrongResultError, match=words):
        check_moments(Setting(bug(), layer(), (4,)))


def test_an_update_without_its_record_is_refused() -> None:
    """The error says what is missing; dropout of inputs needs no record."""
    inputs, outputs = (
        perturb(layer(), scheme, members=5, sigma=0.1) for scheme in (DropoutMask(), DropoutMask(side="out"))
    )
    inputs.update(inputs.sample(0), torch.ones(5))
    with pytest.raises(ValueError, match=r"call_with_activations\(x, noise\)"):
        outputs.update(outputs.sample(0), torch.ones(5))


@pytest.mark.parametrize("p", [0, 1, -0.1, 1.5, float("nan")])
def test_an_invalid_probability_is_refused(p: float) -> None:
    """The probability must be between 0 and 1, both excluded."""
    for scheme in (DropoutMask, DropConnect):
        with pytest.raises(ValueError, match="p must be a number between 0 and 1"):
            scheme(p)
    with pytest.raises(ValueError, match="side must be 'in' or 'out', got 'both'"):
        DropoutMask(side="both")  # type: ignore[arg-type]  # the mistake
