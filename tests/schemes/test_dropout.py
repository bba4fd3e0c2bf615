"""Dropout as the only noise, of units and of blocks: its updates have the means that enumeration gives."""

import itertools
from typing import Any, Literal

import pytest
import torch
from torch import Generator, Tensor, nn

from esbench.schema import Case
from impls import perturb
from impls.benchmark import minimum_work
from impls.perturbation.noise import BLOCK, BlockStream
from impls.perturbation.operators import AbstractOperator, Conv2d, Linear
from impls.perturbation.scheme import AnyScheme, TensorRef
from impls.schemes import DropConnect, DropoutBlocks, DropoutMask, dropout
from impls.schemes.blocks import BlocksNoise
from impls.schemes.dropout import DropoutNoise
from impls.training import networks
from impls.verify.checks import Setting, check
from tests.schemes.cases import filled, seeded

MASKS = torch.tensor(list(itertools.product((False, True), repeat=3)))


def layer(out: int = 3, inp: int = 4) -> nn.Module:
    """Make a small layer with fixed weights; one of them is zero."""
    module = filled(nn.Linear(inp, out))
    with torch.no_grad():
        module.get_parameter("weight")[1, 2] = 0
    return module


def gates(weight: Tensor, kept: Tensor) -> DropoutNoise:
    """Return the noise of given gates."""
    return DropoutNoise(TensorRef(weight), 1.0, kept)


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two tensors."""
    return float(torch.cosine_similarity(a.flatten(), b.flatten(), 0))


@pytest.mark.parametrize(
    "scheme",
    [
        *(DropoutMask(0.2), DropoutMask(0.7, "out"), DropConnect(0.8)),
        *(DropoutBlocks(groups=2, blocks=1), DropoutBlocks(groups=5, blocks=9)),
        *(DropoutBlocks(0.25, groups=3, blocks=4), DropoutBlocks(0.34, "both", groups=3, blocks=3)),
        DropoutBlocks(side="both", groups=2, blocks=2),
    ],
    ids=str,
)
def test_any_option_agrees_with_the_reference(scheme: AnyScheme) -> None:
    """Other probabilities than the registered ones, a weight of 0, and blocks that divide no width."""
    check(Setting(scheme, layer(5, 7), (7,)))
    check(Setting(scheme, filled(nn.Conv2d(8, 6, 2, groups=2)), (8, 3, 3)))


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
    weight, x = seeded(*weight_shape), seeded(1, 1, 1, weight_shape[2], *space, seed=1)
    f, chance = seeded(8, seed=2), torch.where(MASKS, 1 - p, p).double().prod(1)
    # Each mask is a member, and all of them see the same row.
    rows = x.expand(1, 8, *x.shape[2:])
    noise, scheme = gates(weight, MASKS.unsqueeze(1)), DropoutMask(p, "out")
    mean = scheme.node_gradient(op, weight, noise, (chance * f).unsqueeze(0), rows)
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
    weight, x, d = seeded(1, 3, 4), seeded(1, 1, 1, 4, seed=1), seeded(3, seed=2)
    y = (x @ weight[0].mT).flatten()
    f, noise = (MASKS * 2.0 * y * d).sum(1), gates(weight, MASKS.unsqueeze(1))
    rows, scheme = x.expand(1, 8, 1, 4), DropoutMask(side="out")
    mean = scheme.node_gradient(Linear(), weight, noise, f.unsqueeze(0) / 8, rows)
    torch.testing.assert_close(mean[0], (d * y**2).unsqueeze(1) * x.view(1, 4))


def test_multiplying_by_outputs_beats_dividing_by_them() -> None:
    """Dividing has the gradient as its mean and an infinite variance: it is nowhere near after 4096 rows."""
    members, weight, x = 4096, seeded(1, 8, 16), seeded(1, 4096, 1, 16, seed=1)
    noise = gates(weight, seeded(members, 1, 8, seed=2) > 0)
    y = x @ weight[0].mT
    slope = torch.tanh(y @ seeded(8, 8, seed=3))
    seen = y * noise.kept * 2
    f = (seen * slope).sum((0, 2, 3)) - (y * slope).sum((0, 2, 3))
    truth = torch.einsum("rmgo,rmgi->oi", slope, x)
    multiplied = DropoutMask(side="out").node_gradient(Linear(), weight, noise, f.unsqueeze(0), x)[0]
    xi = noise.kept * 2.0 - 1
    divided = torch.einsum("rmgo,rmgi->oi", f.view(1, -1, 1, 1) * xi / y, x)
    assert cosine(multiplied, truth) > 0.5 > 2 * abs(cosine(divided, truth))


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
    """Inputs only rescale columns: their loss is bounded by the best rescaling, by least squares."""
    model = layer(5, 4)
    population = perturb(model, DropoutMask(), members=300, sigma=0.1)
    population.update(population.sample(0), seeded(300))
    plain, gradient = model.get_parameter("weight"), model.get_parameter("weight").grad
    assert gradient is not None
    column = gradient[0] / plain[0]
    assert bool((column != 0).all())
    torch.testing.assert_close(gradient, plain * column)

    weight, target, x = seeded(4, 6), seeded(4, 6, seed=1), seeded(512, 6, seed=2)
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


def test_dropped_weights_do_not_depend_on_their_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members' weights are computed one member at a time, or all at once: outputs and updates agree."""
    results = []
    for piece_bytes in (1, dropout.PIECE_BYTES):
        monkeypatch.setattr(dropout, "PIECE_BYTES", piece_bytes)
        model = layer()
        population = perturb(model, DropConnect(0.3), members=7, sigma=0.1)
        noise = population.sample(0)
        y = population(seeded(14, 4), noise)
        population.update(noise, seeded(7))
        results.append((y, model.get_parameter("weight").grad))
    torch.testing.assert_close(*results)


def test_a_gate_takes_a_byte() -> None:
    """One for each channel or weight, and none for blocks; no copy of the weight is held."""
    bias = 3 * 8
    for scheme, each in ((DropoutMask(), 4), (DropoutMask(side="out"), 3), (DropConnect(), 12)):
        assert perturb(layer(), scheme, members=10, sigma=0.1).noise_bytes == 10 * (each + bias)


# Blocks.


def stream(step: int = 0, members: int = 8) -> BlockStream:
    """Make the stream of a layer's noise."""
    return BlockStream(0, step, "layer", range(members), torch.device("cpu"), torch.float64)


def drawn(scheme: DropoutBlocks, *shape: int, step: int = 0, members: int = 8) -> BlocksNoise:
    """Draw noise for a weight of ones, which has the factors as its entries."""
    weight = torch.ones(1, *shape).double()
    return scheme.prepare(scheme.sample(weight, stream(step, members)), weight, 1.0)


@pytest.mark.parametrize(("side", "gates"), [("in", 7), ("both", 6)])
def test_every_block_is_on_in_half_of_the_groups_and_pairs_agree_in_half(side: Any, gates: int) -> None:
    """With eight groups and up to seven gates, at every step; the designs of steps differ."""
    designs = []
    for step in range(4):
        blocks = gates if side == "in" else gates // 2
        noise = drawn(DropoutBlocks(side=side, groups=8, blocks=blocks), 12, 21, step=step)
        kept = [
            torch.tensor([[any(a <= c < a + n for a, n in spans) for c in range(width)] for spans in groups])
            for groups, width in ((noise.inputs, 21), (noise.outputs, 12))
        ]
        signs = torch.cat(kept if side == "both" else kept[:1], 1) * 2.0 - 1
        signs = torch.unique(signs, dim=1)
        assert signs.shape == (8, gates)
        assert torch.equal(signs.T @ signs, 8 * torch.eye(gates))
        assert not bool(signs.sum(0).any())
        designs.append(signs)
    assert any(not torch.equal(designs[0], other) for other in designs[1:])


def test_gates_of_a_group_are_independent_and_rows_random() -> None:
    """Every mask of three blocks is equally frequent in each group; two blocks are rarely the same."""
    steps = 800
    counts, twins = torch.zeros(2, 8), 0
    for step in range(steps):
        noise = drawn(DropoutBlocks(groups=4, blocks=3), 1, 3, step=step)
        for row, group in enumerate((0, 3)):
            on = noise.factors[group, 0] > 0
            counts[row, int((on * 2 ** torch.arange(3)).sum())] += 1
    # The 0.9999 quantile of chi squared with seven degrees of freedom.
    assert bool(((counts - steps / 8).square() / (steps / 8)).sum(1).lt(29.9).all())
    for step in range(40):
        xi = drawn(DropoutBlocks(groups=4, blocks=7), 1, 7, step=step).factors[:, 0]
        twins += int((xi.T @ xi).abs().triu(1).eq(4).sum())
    # Of the eight rows of a design, four random ones make 21 * 2 / 70 such pairs a step, the first four 3.
    assert twins / 40 < 1.5


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_the_mean_of_the_update_is_the_contrast_of_each_block(p: float) -> None:
    """Over all masks, for any f: sum c_m E_m has the mean (E[f | on] - E[f | off]) p W, block by block."""
    masks = torch.tensor(list(itertools.product((False, True), repeat=4)))
    chance, f = torch.where(masks, 1 - p, p).double().prod(1), seeded(16)
    if p != 0.5:  # a fixed number of blocks is kept, and all such masks are equally likely
        chance = (masks.sum(1) == 3).double() / 4
    weight = seeded(1, 2, 4, seed=1)
    factors = (masks / (1 - p) - 1).double().unsqueeze(1)
    noise = BlocksNoise(TensorRef(weight), 1.0, range(16), factors, ((),) * 16, ((),) * 16)
    update = DropoutBlocks(p, groups=16, blocks=4).weighted_sum(noise, chance * f)
    likely = (chance * f).unsqueeze(1)
    contrast = (likely * masks).sum(0) / (1 - p) - (likely * ~masks).sum(0) / p
    torch.testing.assert_close(update, weight * contrast * p)


def leak(xi: Tensor) -> float:
    """Return the relative error of blocks' effects, estimated from a utility that is linear in the gates."""
    effects = seeded(xi.shape[1])
    f = xi @ effects
    estimate = xi.T @ (f - f.mean()) / len(xi)
    return float((estimate - effects).norm() / effects.norm())


def test_blocks_do_not_leak_into_each_other() -> None:
    """Of 16 blocks, from 64 groups: independent masks are off by about sqrt(16 / 64), the design is exact."""
    assert leak(drawn(DropoutBlocks(groups=64, blocks=16), 1, 16).factors[:, 0]) < 1e-12
    assert (
        0.35
        < leak(torch.randint(0, 2, (64, 16), generator=Generator().manual_seed(1)).double() * 2 - 1)
        < 0.7
    )


def test_a_member_has_the_group_of_its_place_in_the_population() -> None:
    """Member j is in group j modulo their number, in any part, so a part's noise is the whole's."""
    members = BLOCK + 7
    population = perturb(nn.Linear(6, 2).double(), DropoutBlocks(groups=3), members=members, sigma=0.1)
    whole = population.dense_noise(population.sample(0))["weight"]
    part = population.dense_noise(population.sample(0, range(BLOCK, members)))["weight"]
    assert torch.equal(whole[BLOCK:], part)
    assert torch.equal(whole[:-3], whole[3:])
    assert not torch.equal(whole[:-1], whole[1:])


@pytest.mark.parametrize("width", [1, 3, 5, 96, 100, 1024])
def test_the_channels_that_are_read_are_those_of_the_noise(width: int) -> None:
    """The channels that a forward takes are those that E_m says; wide blocks begin at multiples of 16."""
    scheme = DropoutBlocks(groups=4, blocks=3)
    noise = drawn(scheme, 2, width, members=4)
    for change, spans in zip(scheme.dense_noise(noise), noise.inputs, strict=True):
        kept = torch.zeros(width, dtype=torch.bool)
        for start, length in spans:
            kept[start : start + length] = True
            assert width < 96 or start % 16 == 0
        assert torch.equal(change[0, 0] > 0, kept)


def test_what_is_dropped_is_not_read() -> None:
    """NaN in dropped inputs reaches no output; half of the arithmetic is left, with outputs a quarter."""
    scheme = DropoutBlocks(groups=2, blocks=2, side="both")
    weight = seeded(1, 4, 6)
    noise = scheme.prepare(scheme.sample(weight, stream(members=2)), weight, 0.1)
    x = torch.full((1, 2, 1, 6), torch.nan).double()
    for group, spans in enumerate(noise.inputs):
        for start, length in spans:
            x[:, group, :, start : start + length] = 1.0
    assert bool(x.isnan().any())
    assert not bool(scheme.forward(Linear(), weight, noise, x, 0.1).isnan().any())

    case = Case(operator="Linear", out_channels=8, in_channels=12, members=16)
    module, rows = nn.Linear(12, 8, bias=False), torch.zeros(16, 12)
    sides: tuple[tuple[Literal["in", "both"], float], ...] = (("in", 0.5), ("both", 0.25))
    for side, share in sides:
        blocks = DropoutBlocks(side=side, groups=8)
        least = minimum_work.perturbed(blocks, case, module, rows, "forward")
        assert least is not None
        assert least.flops == share * minimum_work.Extent.of(module, rows).forward.flops


def test_rows_distinguish_weights_of_a_block() -> None:
    """A gradient orthogonal to every rescaling of columns is found with outputs, and only with them."""
    members, model = 4096, nn.Linear(12, 8, bias=False).double()
    weight, gradient, x = seeded(8, 12), seeded(8, 12, seed=2), seeded(members, 12, seed=1)
    gradient -= weight * (weight * gradient).sum(0) / weight.square().sum(0)
    with torch.no_grad():
        model.weight.copy_(weight)
    cosines = {}
    for scheme in (DropoutBlocks(groups=16, blocks=6), DropoutBlocks(side="both", groups=16, blocks=6)):
        population = perturb(model, scheme, members=members, sigma=0.1, antithetic=True)
        noise = population.sample(0)
        rows = torch.cat([x, x])
        y, record = population.call_with_activations(rows, noise)
        model.zero_grad()
        population.update(noise, -(y - rows @ (weight - gradient).T).square().mean(1), record)
        assert model.weight.grad is not None
        cosines[scheme.side] = cosine(model.weight.grad, gradient)
    assert cosines["both"] > 0.5
    assert abs(cosines["in"]) < 1e-9
