"""The two verbs of every operator agree, and both agree with torch's own module."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import impls
from impls.perturbation.member_ops import take_channels
from impls.perturbation.operators import ChannelAffine, Conv2d, Linear


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_convolutions_two_verbs_agree_with_torch(data: st.DataObject) -> None:
    """Shared weights, repeated for every member, give the shared result; both are nn.Conv2d's."""
    draw = data.draw
    groups, outputs, inputs = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    stride, dilation = draw(st.integers(1, 2)), (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    padding: Any = draw(st.sampled_from([0, (1, 2), "valid"] + (["same"] if stride == 1 else [])))
    members, repeats = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    op = Conv2d(stride, padding, dilation, groups)
    rows = torch.randn(repeats * members, groups * inputs, 7, 6, generator=generator).double()
    weight = torch.randn(groups * outputs, inputs, *kernel, generator=generator).double()
    x, grouped = op.split(rows, members), weight.unflatten(0, (groups, -1))
    shared = op.apply_shared(x, grouped)
    batched = op.apply_per_member(x, grouped.expand(members, *grouped.shape))
    expected = nn.functional.conv2d(rows, weight, None, stride, padding, dilation, groups)
    torch.testing.assert_close(op.join(shared, rows), expected)
    torch.testing.assert_close(batched, shared)


@pytest.mark.parametrize("between", [(), (3,), (3, 2)])
def test_a_linear_layers_two_verbs_agree_with_torch(between: tuple[int, ...]) -> None:
    """Axes between rows and features are kept, and the verbs agree."""
    rows, weight = torch.randn(6, *between, 4).double(), torch.randn(5, 4).double()
    op = Linear()
    x = op.split(rows, 3)
    shared = op.apply_shared(x, weight.unsqueeze(0))
    batched = op.apply_per_member(x, weight.unsqueeze(0).expand(3, 1, 5, 4))
    torch.testing.assert_close(op.join(shared, rows), nn.functional.linear(rows, weight))
    torch.testing.assert_close(batched, shared)


def test_scales_two_verbs_agree() -> None:
    """A scale over channels or over trailing axes multiplies what it names."""
    x = torch.randn(6, 4, 2, 3).double()
    for op, shape in ((ChannelAffine(0, 2), (4,)), (ChannelAffine(1, 0), (2, 3))):
        weight = torch.randn(shape).double()
        parts = op.split(x, 3)
        shared = op.apply_shared(parts, weight)
        torch.testing.assert_close(op.apply_per_member(parts, weight.expand(3, *shape)), shared)
        view = weight.view(4, 1, 1) if shape == (4,) else weight
        torch.testing.assert_close(op.join(shared, x), x * view)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
def test_every_padding_mode_of_torch_is_a_members_own(padding_mode: Any) -> None:
    """With each padding mode a row's output is nn.Conv2d's with the member's weight."""
    paddings: tuple[Any, ...] = (1, (2, 0), "same")
    for padding, antithetic in itertools.product(paddings, (False, True)):
        check_padding(padding_mode, padding, antithetic=antithetic)


def check_padding(padding_mode: Any, padding: Any, *, antithetic: bool) -> None:
    """Compare each row of a convolution with nn.Conv2d's with the member's weight."""
    model = nn.Conv2d(4, 4, (3, 2), padding=padding, padding_mode=padding_mode, groups=2).double()
    population = impls.perturb(model, impls.Permuted("both"), members=2, sigma=0.2, antithetic=antithetic)
    noise, x = population.sample(0), torch.randn(4, 4, 5, 6).double()
    y = population(x, noise)
    for row in range(4):
        seen = population.member(noise, row % 2, negated=antithetic and row >= 2)
        expected = torch.func.functional_call(model, seen, (x[row : row + 1],))[0]
        torch.testing.assert_close(y[row], expected)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(1, 5),
    st.sampled_from([(), (1, 1), (2, 3)]),
)  # fmt: skip
def test_take_picks_each_members_own_channels(  # noqa: PLR0913, PLR0917  one for each axis
    repeats: int, members: int, groups: int, channels: int, size: int, space: tuple[int, ...]
) -> None:
    """Taking by index equals indexing row by row, with and without space."""
    x = torch.randn(repeats, members, groups, channels, *space)
    index = torch.randint(channels, (members, groups, size))
    taken = take_channels(x, index)
    for r, m, g in itertools.product(range(repeats), range(members), range(groups)):
        assert torch.equal(taken[r, m, g], x[r, m, g, index[m, g]])


@pytest.mark.parametrize("scale", [0.0, 0.3, torch.tensor([0.5, -0.5]).double().view(2, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("operator", [Linear(), Conv2d(padding=1)], ids=str)
def test_a_product_adds_to_what_is_there(operator: Any, every: int, repeats: int, scale: Any) -> None:
    """Whatever lies between members, y becomes scale * y plus the product; at 0 NaN is overwritten."""
    if isinstance(scale, torch.Tensor):
        scale = scale.view(2, *[1] * (5 if isinstance(operator, Conv2d) else 3))[:repeats]
    space, taps = ((4, 5), (3, 3)) if isinstance(operator, Conv2d) else ((), ())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(repeats, 6, 1, 3, *space, generator=generator).double()
    weight = torch.randn(1, 4, 3, *taps, generator=generator).double()
    product = operator.apply_shared(x, weight)
    y = torch.randn(repeats, 6 * every, 1, 4, *space, generator=generator).double()
    expected = y.clone()
    expected[:, ::every] = (
        product if isinstance(scale, float) and not scale else product + scale * y[:, ::every]
    )
    if isinstance(scale, float) and not scale:
        y[:, ::every] = torch.nan
    operator.add_shared_to(y[:, ::every], scale, x, weight)
    torch.testing.assert_close(y, expected)
