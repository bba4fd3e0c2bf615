"""Both methods of every operator agree with each other and with torch's own module."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from impls.perturbation.operators import ChannelAffine, Convolution, Linear, TransposedLinear


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_convolution_agrees_with_torch(data: st.DataObject) -> None:
    """Applying a shared weight, or the same weight to each member, gives the result of torch's conv2d."""
    draw = data.draw
    groups, inputs = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    outputs = draw(st.sampled_from([1, 1, 2, 3]))  # one output of a member has code of its own
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    stride, dilation = draw(st.integers(1, 2)), (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    padding: Any = draw(st.sampled_from([0, (1, 2), "valid"] + (["same"] if stride == 1 else [])))
    members, repeats = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    op = Convolution(stride, padding, dilation, groups)
    rows = torch.randn(repeats * members, groups * inputs, 7, 6, generator=generator).double()
    weight = torch.randn(groups * outputs, inputs, *kernel, generator=generator).double()
    x, grouped = op.from_batch(rows, members), weight.unflatten(0, (groups, -1))
    shared = op.apply_shared(x, grouped)
    batched = op.apply_per_member(x, grouped.expand(members, *grouped.shape))
    expected = nn.functional.conv2d(rows, weight, None, stride, padding, dilation, groups)
    torch.testing.assert_close(op.to_batch(shared, rows), expected)
    torch.testing.assert_close(batched, shared)
    # Rows that all members see, with a weight of each member.
    equal = x[:, :1].expand(-1, members, *x.shape[2:])
    weights = torch.randn(members, *grouped.shape, generator=generator).double()
    expected = op.apply_per_member(equal.contiguous(), weights)
    torch.testing.assert_close(op.apply_per_member(equal, weights), expected)


def test_linear_layers_and_scales_agree_with_torch() -> None:
    """Linear layers with any middle axes, and scales of channels or of trailing axes, agree with torch."""
    # Small products, and those with constant weights, are computed by other operations.
    small, wide = (((), 2, 64), ((3,), 1, 64)), (((), 16, 2), ((3,), 16, 2), ((3,), 16, 8))
    for between, o, i in (((), 5, 4), ((3,), 5, 4), ((3, 2), 5, 4), *small, *wide):
        rows, matrix = torch.randn(6, *between, i).double(), torch.randn(o, i).double()
        linear = Linear()
        x = linear.from_batch(rows, 3)
        shared = linear.apply_shared(x, matrix.unsqueeze(0))
        batched = linear.apply_per_member(x, matrix.unsqueeze(0).expand(3, 1, o, i))
        torch.testing.assert_close(linear.to_batch(shared, rows), nn.functional.linear(rows, matrix))
        torch.testing.assert_close(batched, shared)
        equal, weights = x[:, :1].expand(-1, 3, *x.shape[2:]), torch.randn(3, 1, o, i).double()
        expected = linear.apply_per_member(equal.contiguous(), weights)
        torch.testing.assert_close(linear.apply_per_member(equal, weights), expected)
        for output in (shared, linear.apply_per_member(x[:, :, :, :1], weights[..., :1])):  # the input layout
            assert linear.to_batch(output, rows).data_ptr() == output.data_ptr(), "outputs were copied"
        biases, transposed = torch.randn(3, o).double(), TransposedLinear()
        expected = linear.apply_per_member(x, weights)
        expected += linear.bias(biases, expected)
        for reuses in (False, True):
            y = linear.apply_with_biases(x, weights, biases, reuses_weights=reuses)
            torch.testing.assert_close(y, expected)
            y = transposed.apply_with_biases(x, weights.mT, biases, reuses_weights=reuses)
            torch.testing.assert_close(y, expected)
        assert (
            transposed.empty_output(x, weights[0].mT).stride() == linear.apply_shared(x, weights[0]).stride()
        )
    rows = torch.randn(6, 4, 2, 3).double()
    for op, shape in ((ChannelAffine(0, 2), (4,)), (ChannelAffine(1, 0), (2, 3))):
        weight = torch.randn(shape).double()
        x = op.from_batch(rows, 3)
        shared = op.apply_shared(x, weight)
        torch.testing.assert_close(op.apply_per_member(x, weight.expand(3, *shape)), shared)
        view = weight.view(4, 1, 1) if shape == (4,) else weight
        torch.testing.assert_close(op.to_batch(shared, rows), rows * view)


SCALES: tuple[Any, ...] = (0.0, 0.3, torch.tensor([0.5, -0.5]).double())


@pytest.mark.parametrize(
    ("operator", "space"),
    [
        *((operator, space) for operator in (Linear(), TransposedLinear()) for space in ((), (5,), (1,))),
        (Convolution(padding=1), (4, 5)),
    ],
    ids=str,
)
def test_a_product_adds_to_its_output(operator: Any, space: tuple[int, ...]) -> None:
    """The result is scale * output plus the product, also in a strided view; scale 0 overwrites NaN there."""
    taps = (3, 3) if isinstance(operator, Convolution) else ()
    generator = torch.Generator().manual_seed(0)
    for scale, repeats, every in itertools.product(SCALES, (1, 2), (1, 2)):
        factor = scale
        if isinstance(scale, torch.Tensor):
            factor = scale.view(2, *[1] * (3 + len(space)))[:repeats]
        x = torch.randn(repeats, 6, 1, 3, *space, generator=generator).double()
        weight = torch.randn(1, 4, 3, *taps, generator=generator).double()
        if isinstance(operator, TransposedLinear):
            weight = weight.mT
        product = operator.apply_shared(x, weight)
        y = torch.randn(repeats, 6 * every, 1, 4, *space, generator=generator).double()
        expected = y.clone()
        is_zero = isinstance(scale, float) and not scale
        expected[:, ::every] = product if is_zero else product + factor * y[:, ::every]
        if is_zero:
            y[:, ::every] = torch.nan
        result = operator.add_shared_to(y[:, ::every], factor, x, weight)
        torch.testing.assert_close(result, expected[:, ::every])
        if is_zero:
            torch.testing.assert_close(y, expected)
