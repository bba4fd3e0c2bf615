"""Products of packed bits are products of +1 and -1."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from impls.kernels.binary_matmul import bit_product, bit_product_threshold, int8_product
from tests.kernels.launched.canaries import DEVICE, canaries, generator, packed, product, random_signs

Product = Callable[[Tensor, Tensor, int], Tensor]
WORDS = (torch.int32, torch.int64)
LENGTHS = (1, 31, 32, 33, 63, 64, 65)
SIZES = [(2, 1, length, 5) for length in LENGTHS] + [
    (3, 1, 70, 37),
    (2, 3, 129, 64),
    (1, 5, 33, 65),
    (2, 2, 600, 20),
    (1, 1, 40, 530),
    (1, 17, 200, 70),
]
"""(members, rows, length, outputs): no multiples of a tile, several tiles of each, and every kind of tail."""


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize(("members", "p", "length", "outputs"), SIZES)
@pytest.mark.parametrize("multiply", [bit_product, int8_product])
def test_a_product_is_exact(  # noqa: PLR0913, PLR0917  a case's sizes are passed by name
    multiply: Product, dtype: torch.dtype, members: int, p: int, length: int, outputs: int
) -> None:
    """A product of packed bits is that of +1 and -1, and touches nothing but its buffers."""
    x, weights = random_signs(0, members, p, length), random_signs(1, members, length, outputs)
    with canaries() as kept:
        y = multiply(kept.guard(packed(x, 2, dtype)), kept.guard(packed(weights, 1, dtype)), length)
    assert torch.equal(y.cpu(), product(x, weights))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("members", "p", "length", "outputs"), [(2, 1, 1, 5), (2, 3, 70, 37), (1, 17, 1000, 3)]
)
@pytest.mark.parametrize("multiply", [bit_product, int8_product])
def test_a_product_of_unit_size_is_rounded_as_by_torch(  # noqa: PLR0913, PLR0917  a case's sizes are passed by name
    multiply: Callable[..., Tensor], dtype: torch.dtype, members: int, p: int, length: int, outputs: int
) -> None:
    """In a floating type it is the sum by the root of its length, bit for bit, so that equal bits follow."""
    x, weights = random_signs(12, members, p, length), random_signs(13, members, length, outputs)
    with canaries() as kept:
        left, right = kept.guard(packed(x, 2, torch.int64)), kept.guard(packed(weights, 1, torch.int64))
        y = multiply(left, right, length, dtype)
    wide = torch.promote_types(torch.float32, dtype)
    assert torch.equal(y.cpu(), product(x, weights).to(wide).div_(math.sqrt(length)).to(dtype))


def test_a_product_of_another_type_is_refused() -> None:
    """A product is of int32 or of a floating type."""
    x, weights = torch.zeros(2, 1, 3, dtype=torch.int64), torch.zeros(2, 3, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"int32 or a floating type, got torch\.int64"):
        bit_product(x, weights, 3, torch.int64)


@pytest.mark.parametrize("multiply", [bit_product, int8_product])
@pytest.mark.parametrize("shared", ["x", "weights"])
def test_members_may_share_an_operand(multiply: Product, shared: str) -> None:
    """An operand that is expanded over members is read in place, as if each had its own."""
    x, weights = random_signs(2, 3, 2, 70), random_signs(3, 3, 70, 9)
    if shared == "x":
        x = x[:1].expand(3, -1, -1)
    else:
        weights = weights[:1].expand(3, -1, -1)
    left, right = packed(x[: 1 if shared == "x" else 3], 2, torch.int64), packed(weights, 1, torch.int64)
    if shared == "weights":
        right = right[:1]
    y = multiply(left.expand(3, -1, -1), right.expand(3, -1, -1), 70)
    assert torch.equal(y.cpu(), product(x, weights))


@pytest.mark.parametrize("multiply", [bit_product, int8_product])
def test_bits_may_end_within_the_words(multiply: Product) -> None:
    """Words of several taps end in zeros each: a length that is their sum gives the product."""
    x, weights = random_signs(4, 2, 4, 3 * 40), random_signs(5, 2, 3 * 40, 7)
    left = packed(x.unflatten(2, (3, 40)), 3, torch.int64).flatten(2)
    right = packed(weights.unflatten(1, (3, 40)), 2, torch.int64).flatten(1, 2)
    assert torch.equal(multiply(left, right, 120).cpu(), product(x, weights))


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 63, 64, 65, 300, 520])
@pytest.mark.parametrize("limit", [torch.int32, torch.float32], ids=str)
def test_thresholds_are_compared_and_packed(dtype: torch.dtype, outputs: int, limit: torch.dtype) -> None:
    """Bits of y > threshold come packed, equal values are 0, and bits behind the last output are 0."""
    x, weights = random_signs(6, 2, 3, 70), random_signs(7, 2, 70, outputs)
    limits = torch.randint(-6, 6, (outputs,), generator=generator(8)).to(limit)
    with canaries() as kept:
        left, right = kept.guard(packed(x, 2, dtype)), kept.guard(packed(weights, 1, dtype))
        bits = bit_product_threshold(left, right, 70, kept.guard(limits.to(DEVICE)))
    assert torch.equal(bits, packed((product(x, weights) > limits) * 2 - 1, 2, dtype))


def test_thresholds_may_be_members_own() -> None:
    """Thresholds [m, o] are each member's own; a NaN is below nothing and nothing above it."""
    x, weights = random_signs(9, 3, 1, 33), random_signs(10, 3, 33, 40)
    limits = torch.randint(-6, 6, (3, 40), generator=generator(11)) + 0.5
    limits[1, 3] = torch.nan
    with canaries() as kept:
        left, right = kept.guard(packed(x, 2, torch.int64)), kept.guard(packed(weights, 1, torch.int64))
        bits = bit_product_threshold(left, right, 33, kept.guard(limits.to(DEVICE)))
    assert torch.equal(bits, packed((product(x, weights) > limits[:, None]) * 2 - 1, 2, torch.int64))


@pytest.mark.parametrize(
    ("x", "weights"),
    [
        (torch.zeros(2, 1, 3, dtype=torch.int64), torch.zeros(2, 4, 5, dtype=torch.int64)),
        (torch.zeros(2, 1, 3, dtype=torch.int64), torch.zeros(1, 3, 5, dtype=torch.int64)),
        (torch.zeros(2, 1, 3, dtype=torch.int64), torch.zeros(2, 3, 5, dtype=torch.int32)),
        (torch.zeros(2, 1, 3), torch.zeros(2, 3, 5)),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 5, dtype=torch.int64)),
    ],
)
def test_operands_that_do_not_fit_are_refused(x: Tensor, weights: Tensor) -> None:
    """Other shapes and types raise, and nothing is launched."""
    with pytest.raises(ValueError, match=r"words of int32|a product takes"):
        bit_product(x, weights, 3)


@pytest.mark.parametrize("limits", [torch.zeros(4), torch.zeros(3, 5), torch.zeros(5, dtype=torch.float64)])
def test_thresholds_that_do_not_fit_are_refused(limits: Tensor) -> None:
    """Thresholds of another shape or type raise."""
    x, weights = torch.zeros(2, 1, 3, dtype=torch.int64), torch.zeros(2, 3, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="thresholds must be"):
        bit_product_threshold(x, weights, 3, limits)


@pytest.mark.parametrize("multiply", [bit_product, int8_product])
@pytest.mark.parametrize("sizes", [(0, 1, 5), (2, 0, 5), (2, 1, 0)])
def test_nothing_is_nothing(multiply: Product, sizes: tuple[int, int, int]) -> None:
    """Without members, rows or outputs a product is empty."""
    members, p, outputs = sizes
    x = torch.zeros(members, p, 3, dtype=torch.int64, device=DEVICE)
    weights = torch.zeros(members, 3, outputs, dtype=torch.int64, device=DEVICE)
    assert multiply(x, weights, 70).shape == (members, p, outputs)
