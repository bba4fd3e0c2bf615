"""Kernels on packed bits: products, sampling, planes of probabilities and sums equal those of +1 and -1."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from impls.kernels.binary import bit_planes, centred_sum, sample_bits
from impls.kernels.binary_matmul import bit_product, int8_product
from impls.perturbation import philox
from impls.perturbation.noise import PhiloxStream
from impls.schemes.binary import planes_of as plain_planes
from tests.kernels.launched.canaries import DEVICE, canaries, generator, packed, product, random_signs

EITHER = pytest.mark.parametrize("multiply", [bit_product, int8_product])
TAILS = (1, 31, 32, 33, 63, 64, 65)
"""Numbers of bits just below, at and just above a word boundary."""


# --- Products. ---


@EITHER
def test_a_product_is_exact(multiply: Callable[..., Tensor]) -> None:
    """A product is exact, also for sizes that are not multiples of a tile, and stays within its buffers."""
    larger = [(2, 3, 129, 64), (1, 5, 33, 65), (2, 2, 600, 20), (1, 1, 40, 530), (1, 17, 200, 70)]
    for sizes in [*((2, 1, length, 5) for length in TAILS), *larger]:
        members, p, length, outputs = sizes
        x, weights = random_signs(0, members, p, length), random_signs(1, members, length, outputs)
        with canaries() as kept:
            y = multiply(kept.guard(packed(x, 2)), kept.guard(packed(weights, 1)), length)
        assert torch.equal(y.cpu(), product(x, weights)), sizes


@EITHER
def test_a_product_of_unit_size_is_rounded_as_by_torch(multiply: Callable[..., Tensor]) -> None:
    """In a floating dtype a product is the sum over the root of its length, with the same bits as torch."""
    for dtype in (torch.float16, torch.float32, torch.float64):
        for members, p, length, outputs in ((2, 1, 1, 5), (2, 3, 70, 37), (1, 17, 1000, 3)):
            x, weights = random_signs(12, members, p, length), random_signs(13, members, length, outputs)
            with canaries() as kept:
                left, right = (
                    kept.guard(packed(x, 2)),
                    kept.guard(packed(weights, 1)),
                )
                y = multiply(left, right, length, dtype)
            wide = torch.promote_types(torch.float32, dtype)
            assert torch.equal(y.cpu(), product(x, weights).to(wide).div_(math.sqrt(length)).to(dtype)), dtype


@EITHER
def test_operands_may_be_shared_and_end_within_words(multiply: Callable[..., Tensor]) -> None:
    """Products are exact for expanded operands, for taps padded to whole words, and for empty sizes."""
    x, weights = random_signs(2, 3, 2, 70), random_signs(3, 3, 70, 9)
    left, right = packed(x, 2), packed(weights, 1)
    y = multiply(left[:1].expand(3, -1, -1), right, 70)
    assert torch.equal(y.cpu(), product(x[:1].expand(3, -1, -1), weights))
    y = multiply(left, right[:1].expand(3, -1, -1), 70)
    assert torch.equal(y.cpu(), product(x, weights[:1].expand(3, -1, -1)))
    x, weights = random_signs(4, 2, 4, 3 * 40), random_signs(5, 2, 3 * 40, 7)
    left = packed(x.unflatten(2, (3, 40)), 3).flatten(2)
    right = packed(weights.unflatten(1, (3, 40)), 2).flatten(1, 2)
    assert torch.equal(multiply(left, right, 3 * 40).cpu(), product(x, weights))
    for members, p, outputs in ((0, 1, 5), (2, 0, 5), (2, 1, 0)):
        empty = torch.zeros(members, p, 3, dtype=torch.int64, device=DEVICE)
        none = torch.zeros(members, 3, outputs, dtype=torch.int64, device=DEVICE)
        assert multiply(empty, none, 70).shape == (members, p, outputs)


def long(*shape: int) -> Tensor:
    """Return zeros of int64."""
    return torch.zeros(shape, dtype=torch.int64)


def test_operands_that_do_not_match_are_refused() -> None:
    """Operands with mismatched shapes or dtypes raise an error, and no kernel is launched."""
    x, weights = long(2, 1, 3), long(2, 3, 5)
    for one, other in ((x, long(2, 4, 5)), (x, long(1, 3, 5)), (x, weights.int()), (x.int(), weights.int())):
        with pytest.raises(ValueError, match="a product takes words of int64"):
            bit_product(one, other, 3)


# --- Planes of probabilities, and members drawn from them. ---


def test_planes_are_the_bits_of_counts() -> None:
    """Plane b holds bit b of 256 P, padded with zeros; the kernel stays within its buffers."""
    for shape in [*((1, 5, length) for length in TAILS), (1, 70, 130), (2, 3, 66, 2, 2)]:
        counts = torch.randint(0, 257, shape, generator=generator(0))
        with canaries() as kept:
            found = bit_planes(kept.guard((counts / 256).to(DEVICE)))
        inputs = counts.movedim((1, 2), (-1, -2))
        planes = [packed((inputs >> bit & 1) * 2 - 1, inputs.dim() - 2) for bit in range(9)]
        assert torch.equal(found, torch.stack(planes)), shape
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        p = (torch.arange(257 * 3).view(1, 257, 3) // 3 / 256).to(DEVICE, dtype)
        for values in (p, p.mT):
            assert torch.equal(bit_planes(values), plain_planes(values)), dtype
    assert bit_planes(torch.zeros(1, 0, 3, device=DEVICE)).shape == (9, 1, 1, 0)


def planes_of(counts: Tensor) -> Tensor:
    """Return the nine planes of counts from 0 to 256, [words, 64]."""
    shifts = torch.arange(counts.shape[-1])
    planes = [((counts >> plane & 1) << shifts).sum(-1) for plane in range(9)]
    return torch.stack(planes).to(DEVICE)


def selected(planes: Tensor, random: Tensor) -> Tensor:
    """Combine eight random words per word, [m, 8, words], into bits with the planes' probabilities."""
    on = torch.zeros_like(random[:, 0])
    for plane in range(8):
        r = random[:, plane]
        on = (planes[plane] & (on | r)) | (~planes[plane] & on & r)
    return on | planes[8]


def stream_of(members: range, seed: int = 3, layer: str = "0") -> PhiloxStream:
    """Return a philox stream of some members."""
    return PhiloxStream(seed, 5, layer, members, torch.device(DEVICE), torch.float32)


def place_of(stream: PhiloxStream) -> philox.Place:
    """Return the place at which the stream draws bits."""
    return philox.Place.of(stream.seed, stream.step, stream.layer, "bits")


def test_members_have_the_bits_of_the_stream() -> None:
    """Any range of members has the stream's bits for any number of words; the kernel stays in its buffers."""
    for words, members in ((1, range(7, 9)), (3, range(7, 9)), (130, range(7, 9)), (4, range(7, 17))):
        counts, stream = torch.randint(0, 257, (words, 64), generator=generator(words)), stream_of(members)
        planes = planes_of(counts)
        with canaries() as kept:
            found = sample_bits(kept.guard(planes), *place_of(stream), members)
        assert torch.equal(found, selected(planes, stream.words("bits", 8, words))), words
    planes = planes_of(torch.full((5, 64), 100))
    place = place_of(stream_of(range(1)))
    whole = sample_bits(planes, *place, range(10))
    assert torch.equal(sample_bits(planes, *place, range(7, 9)), whole[7:9])
    last = sample_bits(planes, *place, range(philox.SHARED, philox.SHARED + 1))
    assert torch.equal(last, selected(planes, stream_of(range(1)).shared().words("bits", 8, 5)))
    for changed in (stream_of(range(2), seed=4), stream_of(range(2), layer="1")):
        found = sample_bits(planes, *place_of(changed), range(2))
        assert torch.equal(found, selected(planes, changed.words("bits", 8, 5)))
        assert not torch.equal(found, whole[:2])


def test_members_and_planes_out_of_range_are_refused() -> None:
    """Members outside the 32-bit counters, eight planes, and planes that are not int64 are refused."""
    for members in (range(0, 4, 2), range(-1, 3), range(2**32 - 1, 2**32 + 1)):
        with pytest.raises(ValueError, match="members must be"):
            sample_bits(long(9, 2), (0, 0), 0, 0, members)
    with pytest.raises(ValueError, match="planes must be"):
        sample_bits(long(8, 2), (0, 0), 0, 0, range(1))


# --- Sums. ---


def weights_of(members: int) -> Tensor:
    """Draw weights whose sums float32 holds exactly."""
    return torch.randint(-99, 99, (members,), generator=generator(1)) / 64


def test_centred_sums_are_exact_and_laid_out_as_a_weight() -> None:
    """Words [m, g, *taps, K, o] give exact sums of c (bit - P), laid out as a weight [g, o, i, *taps]."""
    for members, lead, length, outputs in (
        *((3, (1,), length, 5) for length in TAILS),
        (3, (1,), 33, 70),
        (2, (2, 2, 3), 65, 4),
        (130, (1,), 70, 3),
        (5, (1, 2), 64, 130),
    ):
        signs, weights = random_signs(5, members, *lead, length, outputs), weights_of(members)
        p = torch.randint(0, 257, (lead[0], outputs, length, *lead[1:]), generator=generator(7)) / 256
        with canaries() as kept:
            words = kept.guard(packed(signs, len(lead) + 1))
            found = centred_sum(words, kept.guard(weights.to(DEVICE)), kept.guard(p.to(DEVICE)))
        ones = (signs > 0).double().movedim((-2, -1), (3, 2))
        exact = torch.einsum("m,m...->...", weights.double(), ones - p.double())
        assert torch.equal(found.cpu().double(), exact), (members, lead, length, outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_sum_has_the_dtype_of_its_weights(dtype: torch.dtype) -> None:
    """A sum has its weights' dtype, errs by a few roundings, and has the same bits every time."""
    signs, p = random_signs(8, 150, 1, 33, 4), torch.rand(1, 4, 33, generator=generator(9)).half().to(DEVICE)
    weights, words = torch.randn(150, dtype=dtype, generator=generator(10)), packed(signs, 2)
    found = centred_sum(words, weights.to(DEVICE), p)
    exact = torch.einsum("m,m...->...", weights.double(), (signs > 0).double().mT - p.double().cpu())
    assert found.dtype == dtype
    error, size = (found.cpu().double() - exact).norm(), weights.double().norm() * exact[0].numel() ** 0.5
    assert error < 4 * torch.finfo(dtype).eps * size
    assert torch.equal(found, centred_sum(words, weights.to(DEVICE), p))


def test_sums_of_nothing_and_refused_operands() -> None:
    """Without members a sum is 0, without outputs it is empty; mismatched shapes and dtypes are refused."""
    for members, outputs in ((0, 3), (2, 0)):
        words, p = long(members, 1, 2, outputs).to(DEVICE), torch.ones(1, outputs, 70, device=DEVICE)
        found = centred_sum(words, torch.zeros(members, device=DEVICE), p)
        assert torch.equal(found, torch.zeros_like(p))
    for shape in ((1, 4, 70, 3), (1, 5, 70, 2), (1, 5, 129, 3)):
        with pytest.raises(ValueError, match="words must be"):
            centred_sum(long(2, 1, 3, 2, 5), torch.zeros(2), torch.zeros(shape))
