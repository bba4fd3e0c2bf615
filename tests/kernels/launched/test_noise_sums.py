"""Sums of drawn noise are those of the noise written out, with the bits that products are made with."""

import pytest
import torch
from torch import Tensor

from impls.kernels import dense_rng
from impls.kernels.dense_rng import noise_sum
from impls.kernels.philox import Draw, fill
from impls.verify.reference import compare
from tests.kernels.launched.canaries import DEVICE, canaries, generator

BOTH = pytest.mark.parametrize("signs", [False, True], ids=["normals", "signs"])
CALLS = 128


@pytest.fixture(autouse=True)
def few_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 20 members be two parts, and 45 two launches."""
    monkeypatch.setattr(dense_rng, "FEWEST_MEMBERS", 10)
    monkeypatch.setattr(dense_rng, "MOST_MEMBERS", 40)


def draw_of(members: range) -> Draw:
    """Return some place for members."""
    return Draw((0x80000001, 0xFFFFFFFF), 0x9ABCDEF0, 16, members)


def written(members: range, elements: int, *, signs: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw the members' noise and write it out, on the CPU."""
    return fill(
        torch.empty(len(members), elements, device=DEVICE, dtype=dtype), draw_of(members), signs=signs
    ).cpu()


def summed(members: range, utilities: Tensor, elements: int, *, signs: bool, calls: int = CALLS) -> Tensor:
    """Sum with the kernel, between canaries."""
    with canaries() as kept:
        read = kept.guard(utilities.to(DEVICE))
        return noise_sum(draw_of(members), read, elements, signs=signs, calls=calls).cpu()


@BOTH
@pytest.mark.parametrize("elements", [1, 130, 610])
@pytest.mark.parametrize(
    ("members", "dtype"),
    [
        (range(3), torch.float16),
        (range(2**31 - 1, 2**31 + 2), torch.float32),
        (range(5, 8), torch.float64),
    ],
    ids=str,
)
def test_a_sum_has_the_bits_of_the_noise(
    members: range, dtype: torch.dtype, elements: int, signs: bool
) -> None:
    """With one utility of 1 and else 0, the sum is that member's noise, and nothing else is touched."""
    for index in range(len(members)):
        utilities = torch.zeros(len(members), dtype=dtype)
        utilities[index] = 1
        found = summed(members, utilities, elements, signs=signs)
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        expected = written(members, elements, signs=signs, dtype=dtype)[index]
        assert torch.equal(found, expected.to(found.dtype))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_a_sum_is_that_of_the_noise_written_out(dtype: torch.dtype, signs: bool) -> None:
    """Of members in two parts and several launches, the error is at most twice that of the slow sum."""
    members, elements = range(9, 9 + 45), 333
    utilities = torch.randn(45, generator=generator(0), dtype=torch.float64).to(dtype)
    noise = written(members, elements, signs=signs, dtype=dtype)
    found = summed(members, utilities, elements, signs=signs)
    wide = torch.promote_types(dtype, torch.float32)
    slow = torch.zeros(elements, dtype=wide)
    for utility, one in zip(utilities, noise, strict=True):
        slow += utility.to(wide) * one.to(wide)
    compare("sum", found, utilities.double() @ noise.double(), slow)


@BOTH
def test_a_sum_has_the_same_bits_for_every_tile(signs: bool) -> None:
    """The order of a sum follows from the sizes alone: tiles of calls are free to be tuned."""
    utilities = torch.randn(21, generator=generator(1))
    one, two = (summed(range(21), utilities, 300, signs=signs, calls=calls) for calls in (32, 128))
    assert torch.equal(one, two)
    assert torch.equal(one, summed(range(21), utilities, 300, signs=signs, calls=32))


@BOTH
def test_shares_of_a_population_add_up(signs: bool) -> None:
    """Split at any member, the two sums add up to that of the whole but for rounding."""
    utilities = torch.randn(23, generator=generator(2))
    whole = summed(range(23), utilities, 200, signs=signs)
    for split in (1, 17):
        first = summed(range(split), utilities[:split], 200, signs=signs)
        second = summed(range(split, 23), utilities[split:], 200, signs=signs)
        assert torch.allclose(first + second, whole, rtol=0, atol=1e-5)


@BOTH
def test_a_default_launch_is_the_same_sum(signs: bool) -> None:
    """The tiles that a launch has by default give the bits of others."""
    utilities = torch.randn(2, generator=generator(3))
    found = noise_sum(draw_of(range(2)), utilities.to(DEVICE), 70, signs=signs).cpu()
    assert torch.equal(found, summed(range(2), utilities, 70, signs=signs))


def test_nothing_is_nothing() -> None:
    """Without members a sum is zeros, and without elements it is empty."""
    assert torch.equal(noise_sum(draw_of(range(0)), torch.zeros(0), 3), torch.zeros(3))
    assert noise_sum(draw_of(range(2)), torch.zeros(2), 0).shape == (0,)


def test_utilities_that_do_not_fit_are_refused() -> None:
    """Utilities are one floating number for each member, and every element has a counter."""
    for utilities in (torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="one floating utility for each of 2"):
            noise_sum(draw_of(range(2)), utilities, 5)
    with pytest.raises(ValueError, match="more calls than a counter"):
        noise_sum(draw_of(range(2)), torch.zeros(2), 4 * 2**32 + 1)
    with pytest.raises(ValueError, match="members must be"):
        noise_sum(draw_of(range(2**32 - 1, 2**32 + 1)), torch.zeros(2), 4)
