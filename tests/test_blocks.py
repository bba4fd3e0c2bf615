"""Dropped blocks: a balanced design, unbiased contrasts of blocks, and half the arithmetic."""

import itertools
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from esbench.schema import Case
from impls import perturb
from impls.benchmark import minimum_work
from impls.perturbation.noise import BLOCK, BlockStream
from impls.perturbation.operators import Linear
from impls.perturbation.scheme import TensorRef
from impls.schemes import DropoutBlocks
from impls.schemes.blocks import BlocksNoise
from impls.verify.checks import Setting, check


def stream(step: int = 0, members: int = 8) -> BlockStream:
    """Make the stream of a layer's noise."""
    return BlockStream(0, step, "layer", range(members), torch.device("cpu"), torch.float64)


def drawn(scheme: DropoutBlocks, *shape: int, step: int = 0, members: int = 8) -> BlocksNoise:
    """Draw noise for a weight of ones, so that factors are all there is."""
    weight = torch.ones(1, *shape).double()
    return scheme.prepare(scheme.sample(weight, stream(step, members)), weight, 1.0)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Draw the same numbers every time, in float64."""
    return torch.randn(*shape, generator=Generator().manual_seed(seed)).double()


SCHEMES = (
    DropoutBlocks(groups=2, blocks=1),
    DropoutBlocks(groups=5, blocks=9),
    DropoutBlocks(0.25, groups=3, blocks=4),
    DropoutBlocks(0.34, "both", groups=3, blocks=3),
    DropoutBlocks(side="both", groups=2, blocks=2),
)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_any_number_of_groups_and_blocks_passes_the_oracle(scheme: DropoutBlocks, kind: str) -> None:
    """Blocks that divide no width, or are more than channels; groups of any number; other shares."""
    model, features = (
        (nn.Linear(7, 5), (7,)) if kind == "linear" else (nn.Conv2d(8, 6, 2, groups=2), (8, 3, 3))
    )
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(random(*parameter.shape))
    check(Setting(scheme, model, features))


@pytest.mark.parametrize(("side", "gates"), [("in", 7), ("both", 6)])
def test_every_block_is_on_in_half_of_the_groups_and_pairs_agree_in_half(side: Any, gates: int) -> None:
    """With eight groups and up to seven gates, at every step; the designs of steps differ."""
    designs = []
    for step in range(4):
        noise = drawn(
            DropoutBlocks(side=side, groups=8, blocks=gates if side == "in" else gates // 2),
            12,
            21,
            step=step,
        )
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


def test_with_few_groups_no_two_blocks_are_one_for_good() -> None:
    """Of four of the eight rows of a design, drawn at each step, two columns are rarely the same."""
    twins = 0
    for step in range(40):
        xi = drawn(DropoutBlocks(groups=4, blocks=7), 1, 7, step=step).factors[:, 0]
        twins += int((xi.T @ xi).abs().triu(1).eq(4).sum())
    # Rows at random make 21 * 2 / 70 such pairs a step, the first four rows make 3.
    assert twins / 40 < 1.5


def test_one_group_sees_independent_fair_gates() -> None:
    """Over many steps every mask of three blocks comes as often as any other, for each group."""
    steps = 800
    counts = torch.zeros(2, 8)
    for step in range(steps):
        noise = drawn(DropoutBlocks(groups=4, blocks=3), 1, 3, step=step)
        for row, group in enumerate((0, 3)):
            on = noise.factors[group, 0] > 0
            counts[row, int((on * 2 ** torch.arange(3)).sum())] += 1
    squares = ((counts - steps / 8).square() / (steps / 8)).sum(1)
    # The 0.9999 quantile of chi squared with seven degrees of freedom.
    assert bool((squares < 29.9).all())


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_the_mean_of_the_update_is_the_worth_of_each_block(p: float) -> None:
    """Over all masks, for any f: sum c_m E_m has the mean (E[f | on] - E[f | off]) p W, block by block."""
    masks = torch.tensor(list(itertools.product((False, True), repeat=4)))
    chance, f = torch.where(masks, 1 - p, p).double().prod(1), random(16)
    if p != 0.5:  # a fixed number of blocks is kept, and all such masks are equally likely
        chance = (masks.sum(1) == 3).double() / 4
    weight = random(1, 2, 4, seed=1)
    factors = (masks / (1 - p) - 1).double().unsqueeze(1)
    noise = BlocksNoise(range(16), factors, ((),) * 16, ((),) * 16, TensorRef(weight))
    update = DropoutBlocks(p, groups=16, blocks=4).weighted_sum(noise, chance * f)
    likely = (chance * f).unsqueeze(1)
    contrast = (likely * masks).sum(0) / (1 - p) - (likely * ~masks).sum(0) / p
    torch.testing.assert_close(update, weight * contrast * p)


def leak(design: str, groups: int = 64, blocks: int = 16) -> float:
    """Return the relative error of blocks' effects, estimated from a utility that is linear in the gates."""
    effects = random(blocks)
    if design == "Hadamard":
        xi = drawn(DropoutBlocks(groups=groups, blocks=blocks), 1, blocks).factors[:, 0]
    else:
        xi = torch.randint(0, 2, (groups, blocks), generator=Generator().manual_seed(1)).double() * 2 - 1
    f = xi @ effects
    estimate = xi.T @ (f - f.mean()) / groups
    return float((estimate - effects).norm() / effects.norm())


def test_blocks_do_not_leak_into_each_other() -> None:
    """Of 16 blocks, from 64 groups: independent masks are off by about sqrt(16 / 64), the design is exact."""
    assert leak("Hadamard") < 1e-12
    assert 0.35 < leak("independent") < 0.7


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
def test_what_is_read_is_what_is_written_out(width: int) -> None:
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
    """NaN in the inputs and weights of dropped blocks reaches no output: the product is really smaller."""
    scheme = DropoutBlocks(groups=2, blocks=2, side="both")
    weight = random(1, 4, 6)
    noise = scheme.prepare(scheme.sample(weight, stream(members=2)), weight, 0.1)
    x = torch.full((1, 2, 1, 6), torch.nan).double()
    for group, spans in enumerate(noise.inputs):
        for start, length in spans:
            x[:, group, :, start : start + length] = 1.0
    assert bool(x.isnan().any())
    y = scheme.forward(Linear(), weight, noise, x, 0.1)
    assert not bool(y.isnan().any())


@pytest.mark.parametrize(("side", "share"), [("in", 0.5), ("both", 0.25)])
def test_the_least_work_is_less_than_that_of_the_plain_layer(side: Any, share: float) -> None:
    """Of the plain product's arithmetic a half is left, with outputs a quarter."""
    case = Case(operator="Linear", out_channels=8, in_channels=12, members=16)
    module, x = nn.Linear(12, 8, bias=False), torch.zeros(16, 12)
    least = minimum_work.perturbed(DropoutBlocks(side=side, groups=8), case, module, x, "forward")
    assert least is not None
    assert least.flops == share * minimum_work.Extent.of(module, x).forward.flops


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"p": 0.0}, "p must be a number between 0 and 1"),
        ({"p": "x"}, "p must be a number between 0 and 1, got 'x'"),
        ({"side": "out"}, "side must be 'in' or 'both'"),
        ({"groups": 1}, "groups must be an int of at least 2, got 1"),
        ({"blocks": 2.5}, "blocks must be an int of at least 1, got 2.5"),
    ],
)
def test_options_that_are_none_are_refused(options: Any, words: str) -> None:
    """The error is raised when the scheme is made."""
    with pytest.raises(ValueError, match=words):
        DropoutBlocks(**options)


def test_a_share_that_keeps_all_blocks_is_refused() -> None:
    """One channel is one block: 0.9 of it cannot be kept, a half is kept every other time."""
    with pytest.raises(ValueError, match=r"p = 0.1 keeps none or all of 1 blocks, for 1 channels"):
        perturb(nn.Linear(1, 3), DropoutBlocks(0.1), members=4, sigma=0.1)
    perturb(nn.Linear(1, 3), DropoutBlocks(0.5), members=4, sigma=0.1)


def test_rows_tell_weights_of_a_block_apart() -> None:
    """A gradient at right angles to every rescaling of columns is found with outputs, and only with them."""
    members, model = 4096, nn.Linear(12, 8, bias=False).double()
    weight, gradient, x = random(8, 12), random(8, 12, seed=2), random(members, 12, seed=1)
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
        found = model.weight.grad
        assert found is not None
        cosines[scheme.side] = float(torch.cosine_similarity(found.flatten(), gradient.flatten(), 0))
    assert cosines["both"] > 0.5
    assert abs(cosines["in"]) < 1e-9
