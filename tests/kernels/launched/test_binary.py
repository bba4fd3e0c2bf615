"""Kernels on packed bits and FusedBinary: products, samples, planes and sums equal those of +1 and -1."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impls import BinarizedConv2d, BinarizedLinear, Binary, FusedBinary, Population, perturb
from impls.binary import bits
from impls.kernels.binary import bit_planes, centered_sum, sample_bits
from impls.kernels.binary_matmul import bit_product, int8_product
from impls.perturbation import philox
from impls.perturbation.noise import PhiloxStream
from impls.schemes.binary import bit_planes as plain_planes
from tests.kernels.launched.canaries import DEVICE, canaries, generator, normal, packed, product, random_signs

EACH_PRODUCT = pytest.mark.parametrize("multiply", [bit_product, int8_product])
TAILS = (1, 31, 32, 33, 63, 64, 65)
"""Numbers of bits just below, at and just above a word boundary."""


# --- Products. ---


@EACH_PRODUCT
def test_a_product_is_exact(multiply: Callable[..., Tensor]) -> None:
    """A product is exact, also for sizes that are not multiples of a tile, and stays within its buffers."""
    larger = [(2, 3, 129, 64), (1, 5, 33, 65), (2, 2, 600, 20), (1, 1, 40, 530), (1, 17, 200, 70)]
    for sizes in [*((2, 1, length, 5) for length in TAILS), *larger]:
        members, p, length, outputs = sizes
        x, weights = random_signs(0, members, p, length), random_signs(1, members, length, outputs)
        with canaries() as buffers:
            y = multiply(buffers.guard(packed(x, 2)), buffers.guard(packed(weights, 1)), length)
        assert torch.equal(y.cpu(), product(x, weights)), sizes


@EACH_PRODUCT
def test_a_product_of_unit_size_is_rounded_as_by_torch(multiply: Callable[..., Tensor]) -> None:
    """In a floating dtype a product is the sum over the root of its length, with the same bits as torch."""
    for dtype in (torch.float16, torch.float32, torch.float64):
        for members, p, length, outputs in ((2, 1, 1, 5), (2, 3, 70, 37), (1, 17, 1000, 3)):
            x, weights = random_signs(12, members, p, length), random_signs(13, members, length, outputs)
            with canaries() as buffers:
                x_bits, w_bits = buffers.guard(packed(x, 2)), buffers.guard(packed(weights, 1))
                y = multiply(x_bits, w_bits, length, dtype)
            wide = torch.promote_types(torch.float32, dtype)
            assert torch.equal(y.cpu(), product(x, weights).to(wide).div_(math.sqrt(length)).to(dtype)), dtype


@EACH_PRODUCT
def test_operands_may_be_shared_and_end_within_words(multiply: Callable[..., Tensor]) -> None:
    """Products are exact for expanded operands, for taps padded to whole words, and for empty sizes."""
    x, weights = random_signs(2, 3, 2, 70), random_signs(3, 3, 70, 9)
    x_bits, w_bits = packed(x, 2), packed(weights, 1)
    y = multiply(x_bits[:1].expand(3, -1, -1), w_bits, 70)
    assert torch.equal(y.cpu(), product(x[:1].expand(3, -1, -1), weights))
    y = multiply(x_bits, w_bits[:1].expand(3, -1, -1), 70)
    assert torch.equal(y.cpu(), product(x, weights[:1].expand(3, -1, -1)))
    x, weights = random_signs(4, 2, 4, 3 * 40), random_signs(5, 2, 3 * 40, 7)
    x_bits = packed(x.unflatten(2, (3, 40)), 3).flatten(2)
    w_bits = packed(weights.unflatten(1, (3, 40)), 2).flatten(1, 2)
    assert torch.equal(multiply(x_bits, w_bits, 3 * 40).cpu(), product(x, weights))
    for members, p, outputs in ((0, 1, 5), (2, 0, 5), (2, 1, 0)):
        empty = torch.zeros(members, p, 3, dtype=torch.int64, device=DEVICE)
        columns = torch.zeros(members, 3, outputs, dtype=torch.int64, device=DEVICE)
        assert multiply(empty, columns, 70).shape == (members, p, outputs)


# --- Planes of probabilities, and members drawn from them. ---


def test_planes_are_the_bits_of_counts() -> None:
    """Plane b holds bit b of 256 P, padded with zeros; the kernel stays within its buffers."""
    for shape in [*((1, 5, length) for length in TAILS), (1, 70, 130), (2, 3, 66, 2, 2)]:
        counts = torch.randint(0, 257, shape, generator=generator(0))
        with canaries() as buffers:
            planes = bit_planes(buffers.guard((counts / 256).to(DEVICE)))
        inputs = counts.movedim((1, 2), (-1, -2))
        expected = [packed((inputs >> bit & 1) * 2 - 1, inputs.dim() - 2) for bit in range(9)]
        assert torch.equal(planes, torch.stack(expected)), shape
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


def expected_bits(planes: Tensor, random: Tensor) -> Tensor:
    """Combine eight random words per word, [m, 8, words], into bits with the planes' probabilities."""
    on = torch.zeros_like(random[:, 0])
    for plane in range(8):
        r = random[:, plane]
        on = (planes[plane] & (on | r)) | (~planes[plane] & on & r)
    return on | planes[8]


def stream_of(members: range, seed: int = 3, layer: str = "0") -> PhiloxStream:
    """Return a philox stream of some members."""
    return PhiloxStream(seed, 5, layer, members, torch.device(DEVICE), torch.float32)


def place_of(stream: PhiloxStream) -> philox.DrawKey:
    """Return the place at which the stream draws bits."""
    return philox.DrawKey.of(stream.seed, stream.step, stream.layer, "bits")


def test_members_have_the_bits_of_the_stream() -> None:
    """Any range of members has the stream's bits for any number of words; the kernel stays in its buffers."""
    for words, members in ((1, range(7, 9)), (3, range(7, 9)), (130, range(7, 9)), (4, range(7, 17))):
        counts, stream = torch.randint(0, 257, (words, 64), generator=generator(words)), stream_of(members)
        planes = planes_of(counts)
        with canaries() as buffers:
            drawn = sample_bits(buffers.guard(planes), *place_of(stream), members)
        assert torch.equal(drawn, expected_bits(planes, stream.words("bits", 8, words))), words
    planes = planes_of(torch.full((5, 64), 100))
    key = place_of(stream_of(range(1)))
    all_bits = sample_bits(planes, *key, range(10))
    assert torch.equal(sample_bits(planes, *key, range(7, 9)), all_bits[7:9])
    last = sample_bits(planes, *key, range(philox.SHARED, philox.SHARED + 1))
    assert torch.equal(last, expected_bits(planes, stream_of(range(1)).shared().words("bits", 8, 5)))
    for changed in (stream_of(range(2), seed=4), stream_of(range(2), layer="1")):
        drawn = sample_bits(planes, *place_of(changed), range(2))
        assert torch.equal(drawn, expected_bits(planes, changed.words("bits", 8, 5)))
        assert not torch.equal(drawn, all_bits[:2])


# --- Sums. ---


def test_centered_sums_are_exact_and_laid_out_as_a_weight() -> None:
    """Words [m, g, *taps, K, o] give exact sums of c (bit - P), laid out as a weight [g, o, i, *taps]."""
    for members, lead, length, outputs in (
        *((3, (1,), length, 5) for length in TAILS),
        (3, (1,), 33, 70),
        (2, (2, 2, 3), 65, 4),
        (130, (1,), 70, 3),
        (5, (1, 2), 64, 130),
        (0, (1,), 70, 3),
        (2, (1,), 70, 0),
    ):
        signs = random_signs(5, members, *lead, length, outputs)
        weights = torch.randint(-99, 99, (members,), generator=generator(1)) / 64  # float32 holds their sums
        p = torch.randint(0, 257, (lead[0], outputs, length, *lead[1:]), generator=generator(7)) / 256
        with canaries() as buffers:
            words = buffers.guard(packed(signs, len(lead) + 1))
            total = centered_sum(words, buffers.guard(weights.to(DEVICE)), buffers.guard(p.to(DEVICE)))
        ones = (signs > 0).double().movedim((-2, -1), (3, 2))
        exact = torch.einsum("m,m...->...", weights.double(), ones - p.double())
        assert torch.equal(total.cpu().double(), exact), (members, lead, length, outputs)
    for dtype in (torch.float32, torch.float64):
        signs, p = random_signs(8, 150, 1, 33, 4), torch.rand(1, 4, 33, generator=generator(9)).half()
        weights = torch.randn(150, dtype=dtype, generator=generator(10))
        total = centered_sum(packed(signs, 2), weights.to(DEVICE), p.to(DEVICE)).cpu()
        exact = torch.einsum("m,m...->...", weights.double(), (signs > 0).double().mT - p.double())
        assert total.dtype == dtype
        size = weights.double().norm() * exact.numel() ** 0.5
        assert (total.double() - exact).norm() < 4 * torch.finfo(dtype).eps * size
        for power in (2.0**-50, 2.0**55):  # of weights far from 1
            far = centered_sum(packed(signs, 2), weights.to(DEVICE) * power, p.to(DEVICE)).cpu()
            assert torch.equal(far, total * power)


# --- The scheme FusedBinary. ---

SHAPES = [(1, 5, 70), (1, 1, 1), (1, 3, 64), (1, 70, 33), (1, 4, 6, 3, 2), (1, 3, 65, 2, 1)]
"""Shapes of weights [g, o, i, *taps]; most widths are not multiples of a word."""


def fused_and_plain(
    layer: nn.Module, members: int, scheme: FusedBinary | None = None
) -> tuple[Population, Population]:
    """Seed a layer; return its population with kernels, and one in plain torch with the same stream."""
    with torch.no_grad():
        for parameter in layer.to(DEVICE).parameters():
            parameter.copy_(normal(0, *parameter.shape))
    fused = perturb(layer, scheme or FusedBinary(), members=members, sigma=0.3)
    return fused, perturb(layer, Binary(), members=members, sigma=0.3, stream="philox")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_fused_scheme_draws_the_bits_of_plain_torch(shape: tuple[int, ...]) -> None:
    """Members have the bits that the plain scheme draws from the stream philox, and P is the same."""
    for members, dtype in (
        (range(3), torch.float32),
        (range(250, 260), torch.float16),
        (range(1), torch.float64),
    ):
        weight = normal(len(members), *shape, dtype=dtype)
        stream = PhiloxStream(3, 5, "0.weight", members, torch.device(DEVICE), dtype)
        plain, fused = Binary().sample(weight, stream), FusedBinary().sample(weight, stream)
        assert torch.equal(fused.words, plain.words), members
        assert torch.equal(fused.p, plain.p), members


@pytest.mark.parametrize(
    ("make", "row", "repeats"),
    [
        (lambda **options: BinarizedLinear(70, 37, **options), (70,), 1),
        (lambda **options: BinarizedLinear(129, 5, **options), (129,), 17),
        (lambda **options: BinarizedConv2d(6, 5, (3, 2), padding=(1, 2), stride=2, **options), (5, 4, 6), 2),
    ],
)
def test_outputs_are_those_of_plain_torch(make: Any, row: tuple[int, ...], repeats: int) -> None:
    """With either product kernel, outputs equal the plain scheme's, both as real numbers and as bits.

    A GPU divides by multiplying with the reciprocal, so real outputs may be off by a rounding there.
    """
    for few, options in itertools.product((0, 1000), ({}, {"outputs": "real"})):
        fused, plain = fused_and_plain(make(**options), 3, FusedBinary(few))
        x = bits.pack(normal(1, 3 * repeats, *row))
        y, expected = fused(x, noise=fused.sample(2)), plain(x, noise=plain.sample(2))
        if options:
            torch.testing.assert_close(y, expected, rtol=0 if DEVICE == "cpu" else 1e-6, atol=0)
        else:
            assert torch.equal(y, expected), few


@pytest.mark.parametrize("rows", [1, 9])
def test_a_convolution_reads_the_weights_of_members_in_place(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution copies patches of its input but reads the members' weights in place."""
    fused, _ = fused_and_plain(BinarizedConv2d(6, 5, (2, 3)), 3)
    noise: Any = fused.sample(0)
    words, calls = noise.layers[""].weight.words, []
    multiply = FusedBinary._multiply  # noqa: SLF001  the method to watch

    def watched(self: FusedBinary, x: Tensor, columns: Tensor, *others: Any) -> Tensor:
        calls.append((columns.data_ptr(), columns.is_contiguous(), x.shape[1]))
        return multiply(self, x, columns, *others)

    monkeypatch.setattr(FusedBinary, "_multiply", watched)
    fused(bits.pack(normal(0, 3, 2, 2 + rows, 6)), noise=noise)
    assert calls == [(words.data_ptr(), True, rows)]


def test_a_device_or_stream_without_the_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream, another layer and a CPU are refused with the reason, without any fallback."""
    layer = BinarizedLinear(4, 4).to(DEVICE)
    with pytest.raises(ValueError, match="use stream='philox', not stream='block'"):
        perturb(layer, FusedBinary(), members=2, sigma=1.0, stream="block")
    with pytest.raises(ValueError, match="does not support Linear"):
        perturb(nn.Linear(4, 4), FusedBinary(), members=2, sigma=1.0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a CUDA device, the layer is on cpu"):
        perturb(layer.cpu(), FusedBinary(), members=2, sigma=1.0)
