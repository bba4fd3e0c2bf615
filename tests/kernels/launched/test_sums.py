"""The weighted sum of packed bits is that of bits written out."""

import pytest
import torch

from impls.kernels.binary import centred_sum, weighted_sum
from tests.kernels.launched.canaries import DEVICE, canaries, generator, packed, random_signs

WORDS = (torch.int32, torch.int64)
SIZES = [(3, length, 5) for length in (1, 31, 32, 33, 63, 64, 65)] + [(5, 40, 150), (1, 70, 1), (150, 33, 3)]
"""(members, length, outputs): tails, several tiles, and members that are summed in two parts."""


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize(("members", "length", "outputs"), SIZES)
def test_a_sum_is_exact(dtype: torch.dtype, members: int, length: int, outputs: int) -> None:
    """With weights that float32 adds exactly, the sum is the sum, and nothing else is touched."""
    signs = random_signs(0, members, length, outputs)
    weights = torch.randint(-99, 99, (members,), generator=generator(1)) / 64
    with canaries() as kept:
        found = weighted_sum(kept.guard(packed(signs, 1, dtype)), kept.guard(weights.to(DEVICE)), length)
    expected = torch.einsum("m,mio->io", weights.double(), (signs > 0).double())
    assert found.dtype == torch.float32
    assert torch.equal(found.cpu().double(), expected)


@pytest.mark.parametrize("dtype", WORDS, ids=str)
def test_taps_have_words_of_their_own(dtype: torch.dtype) -> None:
    """Words [m, *taps, K, o] give [*taps, length, o]: bits behind the last one of each tap are left out."""
    signs, weights = random_signs(2, 3, 2, 2, 70, 6), torch.tensor([1.0, -0.5, 4.0])
    with canaries() as kept:
        found = weighted_sum(kept.guard(packed(signs, 3, dtype)), kept.guard(weights.to(DEVICE)), 70)
    assert torch.equal(found.cpu(), torch.einsum("m,m...->...", weights, (signs > 0).float()))


def test_a_sum_is_the_same_again() -> None:
    """Weights of any size give the same bits every time, close to the sum in float64."""
    signs, weights = random_signs(3, 130, 33, 4), torch.randn(130, generator=generator(4))
    words = packed(signs, 1, torch.int64)
    found = weighted_sum(words, weights.to(DEVICE), 33)
    assert torch.equal(found, weighted_sum(words, weights.to(DEVICE), 33))
    expected = torch.einsum("m,mio->io", weights.double(), (signs > 0).double())
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize(
    ("members", "lead", "length", "outputs"),
    [(3, (1,), 1, 5), (3, (1,), 33, 70), (2, (2, 2, 3), 65, 4), (130, (1,), 70, 3), (5, (1, 2), 64, 130)],
)
def test_a_centred_sum_is_exact_and_in_the_layout_of_a_weight(
    dtype: torch.dtype, members: int, lead: tuple[int, ...], length: int, outputs: int
) -> None:
    """Words [m, g, *taps, K, o] give sums of c (bit - P), [g, o, i, *taps], also of members in two parts."""
    signs = random_signs(5, members, *lead, length, outputs)
    weights = torch.randint(-99, 99, (members,), generator=generator(6)) / 64
    p = torch.randint(0, 257, (lead[0], outputs, length, *lead[1:]), generator=generator(7)) / 256
    with canaries() as kept:
        words = kept.guard(packed(signs, len(lead) + 1, dtype))
        found = centred_sum(words, kept.guard(weights.to(DEVICE)), kept.guard(p.to(DEVICE)))
    bits = (signs > 0).double().movedim((-2, -1), (3, 2))
    expected = torch.einsum("m,m...->...", weights.double(), bits - p.double())
    assert torch.equal(found.cpu().double(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_sum_is_of_the_type_of_its_weights(dtype: torch.dtype) -> None:
    """Weights of any size are summed in their own type, as near to float64 as its roundings let."""
    signs, p = random_signs(8, 150, 1, 33, 4), torch.rand(1, 4, 33, generator=generator(9)).half()
    weights = torch.randn(150, dtype=dtype, generator=generator(10))
    found = centred_sum(packed(signs, 2, torch.int64), weights.to(DEVICE), p.to(DEVICE))
    bits = (signs > 0).double().mT
    expected = torch.einsum("m,m...->...", weights.double(), bits - p.double())
    assert found.dtype == dtype
    error, size = (
        (found.cpu().double() - expected).norm(),
        weights.double().norm() * expected[0].numel() ** 0.5,
    )
    assert error < 4 * torch.finfo(dtype).eps * size


def test_means_that_do_not_fit_are_refused() -> None:
    """Means of other outputs, inputs or taps raise."""
    words, weights = torch.zeros(2, 1, 3, 2, 5, dtype=torch.int64), torch.zeros(2)
    for shape in ((1, 4, 70, 3), (1, 5, 70, 2), (1, 5, 70), (1, 5, 129, 3)):
        with pytest.raises(ValueError, match=r"means must be|have no 129 bits"):
            centred_sum(words, weights, torch.zeros(shape))


@pytest.mark.parametrize("sizes", [(0, 2, 3), (2, 2, 0)])
def test_nothing_sums_to_nothing(sizes: tuple[int, int, int]) -> None:
    """Without members the sum is 0, without outputs it is empty."""
    words = torch.zeros(sizes, dtype=torch.int64, device=DEVICE)
    found = weighted_sum(words, torch.zeros(sizes[0], device=DEVICE), 70)
    assert torch.equal(found, torch.zeros(70, sizes[2], device=DEVICE))


@pytest.mark.parametrize("weights", [torch.zeros(3), torch.zeros(2, dtype=torch.float16), torch.zeros(2, 1)])
def test_weights_that_do_not_fit_are_refused(weights: torch.Tensor) -> None:
    """Weights of another length or type raise."""
    with pytest.raises(ValueError, match="a weighted sum takes"):
        weighted_sum(torch.zeros(2, 1, 5, dtype=torch.int64), weights, 3)


def test_a_length_behind_the_words_is_refused() -> None:
    """More bits than the words have raise."""
    with pytest.raises(ValueError, match="have no 65 bits"):
        weighted_sum(torch.zeros(2, 1, 5, dtype=torch.int64), torch.zeros(2), 65)
