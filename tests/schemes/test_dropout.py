"""Dropout as the only noise, of units and of blocks: updates by enumeration, designs, dropped channels."""

import itertools
from typing import Any, Literal

import pytest
import torch
from torch import nn

from esbench.schema import Case
from impls.benchmark import minimum_work
from impls.perturbation.operators import AbstractOperator, Convolution, Linear
from impls.perturbation.scheme import AnyScheme, TensorRef
from impls.schemes import DropConnect, DropoutBlocks, DropoutMask
from impls.schemes.blocks import BlocksNoise
from impls.schemes.dropout import DropoutNoise
from impls.verify.checks import Setting, check
from tests.scheme_cases import fill, make_stream, normal

MASKS = torch.tensor(list(itertools.product((False, True), repeat=3)))


@pytest.mark.parametrize(
    "scheme",
    [
        *(DropoutMask(0.2), DropoutMask(0.7, "out"), DropConnect(0.8)),
        *(DropoutBlocks(groups=5, blocks=9), DropoutBlocks(0.34, "both", groups=3, blocks=3)),
        DropoutBlocks(side="both", groups=2, blocks=2),
    ],
    ids=str,
)
def test_unregistered_options_agree_with_the_reference(scheme: AnyScheme) -> None:
    """Other probabilities, a weight of 0, blocks that divide no width, and blocks with aligned borders."""
    linear = fill(nn.Linear(7, 5))
    with torch.no_grad():
        linear.weight[1, 2] = 0
    check(Setting(scheme, linear, (7,)))
    check(Setting(scheme, fill(nn.Conv2d(8, 6, 2, groups=2)), (8, 3, 3)))
    if isinstance(scheme, DropoutBlocks):
        check(Setting(scheme, fill(nn.Linear(100, 3)), (100,)))


@pytest.mark.parametrize("p", [0.5, 0.3])
@pytest.mark.parametrize(
    ("op", "weight_shape", "space"),
    [(Linear(), (1, 3, 4), ()), (Convolution(padding=1), (1, 3, 2, 2, 3), (3, 4))],
    ids=["linear", "convolution"],
)
def test_the_gradient_of_outputs_is_the_contrast_of_masks(
    op: AbstractOperator, weight_shape: tuple[int, ...], space: tuple[int, ...], p: float
) -> None:
    """Over all masks and for any utility f, the mean is q (E[f | on] - E[f | off]) Y^T X for each output."""
    weight, x = normal(*weight_shape), normal(1, 1, 1, weight_shape[2], *space, seed=1)
    f, probability = normal(8, seed=2), torch.where(MASKS, 1 - p, p).double().prod(1)
    # Each mask is a member, and all of them see the same row.
    rows = x.expand(1, 8, *x.shape[2:])
    noise, scheme = DropoutNoise(TensorRef(weight), 1.0, MASKS.unsqueeze(1)), DropoutMask(p, "out")
    mean = scheme.node_gradient(op, weight, noise, (probability * f).unsqueeze(0), rows)
    contrasts = torch.stack(
        [
            (probability * f)[MASKS[:, gate]].sum() / (1 - p) - (probability * f)[~MASKS[:, gate]].sum() / p
            for gate in range(3)
        ]
    )
    with torch.enable_grad():
        w = weight.clone().requires_grad_()
        y = op.apply_shared(x, w)
        squares = (y * y.detach()).reshape(3, -1).sum(1)  # their gradient is Y^T X
        (expected,) = torch.autograd.grad(((1 - p) * contrasts * squares).sum(), w)
    torch.testing.assert_close(mean, expected, rtol=1e-10, atol=1e-12)


# Blocks.


def draw(scheme: DropoutBlocks, *shape: int, step: int = 0, members: int = 8) -> BlocksNoise:
    """Draw noise for a weight of ones, which has the factors as its entries."""
    weight = torch.ones(1, *shape).double()
    return scheme.prepare(scheme.sample(weight, make_stream(range(members), step=step)), weight, 1.0)


@pytest.mark.parametrize(("side", "gates"), [("in", 7), ("both", 6)])
def test_every_block_is_on_in_half_of_the_groups_and_pairs_agree_in_half(side: Any, gates: int) -> None:
    """Eight groups and up to seven gates have an orthogonal design at every step; designs of steps differ."""
    designs = []
    for step in range(4):
        blocks = gates if side == "in" else gates // 2
        noise = draw(DropoutBlocks(side=side, groups=8, blocks=blocks), 12, 21, step=step)
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
    assert any(not torch.equal(designs[0], design) for design in designs[1:])


def test_gates_of_a_group_are_independent_and_rows_random() -> None:
    """Every mask of three blocks is equally frequent in each group; two blocks are rarely the same."""
    steps = 800
    counts, equal_pairs = torch.zeros(2, 8), 0
    for step in range(steps):
        noise = draw(DropoutBlocks(groups=4, blocks=3), 1, 3, step=step)
        for row, group in enumerate((0, 3)):
            kept = noise.factors[group, 0] > 0
            counts[row, int((kept * 2 ** torch.arange(3)).sum())] += 1
    # The 0.9999 quantile of chi squared with seven degrees of freedom.
    assert bool(((counts - steps / 8).square() / (steps / 8)).sum(1).lt(29.9).all())
    for step in range(40):
        xi = draw(DropoutBlocks(groups=4, blocks=7), 1, 7, step=step).factors[:, 0]
        equal_pairs += int((xi.T @ xi).abs().triu(1).eq(4).sum())
    # Of the eight rows of a design, four random ones make 21 * 2 / 70 such pairs a step, the first four 3.
    assert equal_pairs / 40 < 1.5


def test_members_of_a_group_are_equal() -> None:
    """Members whose numbers differ by the number of groups have the same noise, others do not."""
    noise = DropoutBlocks(groups=3).dense_noise(draw(DropoutBlocks(groups=3), 2, 6))
    assert torch.equal(noise[:-3], noise[3:])
    assert not torch.equal(noise[:-1], noise[1:])


def test_dropped_channels_are_not_read() -> None:
    """NaN in dropped inputs reaches no output; half of the arithmetic is left, with outputs a quarter."""
    scheme = DropoutBlocks(groups=2, blocks=2, side="both")
    weight = normal(1, 4, 6)
    noise = draw(scheme, 4, 6, members=2)
    x = torch.full((1, 2, 1, 6), torch.nan).double()
    for group, spans in enumerate(noise.inputs):
        for start, length in spans:
            x[:, group, :, start : start + length] = 1.0
    assert bool(x.isnan().any())
    assert not bool(scheme.forward(Linear(), weight, noise, x, 1.0).isnan().any())

    case = Case(operator="Linear", out_channels=8, in_channels=12, members=16)
    module, rows = nn.Linear(12, 8, bias=False), torch.zeros(16, 12)
    sides: tuple[tuple[Literal["in", "both"], float], ...] = (("in", 0.5), ("both", 0.25))
    for side, share in sides:
        blocks = DropoutBlocks(side=side, groups=8)
        minimum = minimum_work.perturbed(blocks, case, module, rows, "forward")
        assert minimum is not None
        assert minimum.flops == share * minimum_work.Extent.of(module, rows).forward.flops
