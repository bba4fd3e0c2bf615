"""Packed bits are the +1 and -1 that they stand for, in words of either size, with zeros behind them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from impls.binary import bits, words
from impls.perturbation.noise import STREAMS

LENGTHS = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 1000)
SIZES = {torch.int64: 64, torch.int32: 32}
BOTH = pytest.mark.parametrize("dtype", SIZES, ids=str)
EVERY_LENGTH = pytest.mark.parametrize("length", LENGTHS)
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def some(*shape: int, seed: int = 0) -> Tensor:
    """Draw fair bits."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def some_words(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Draw fair words: all bits of each."""
    return bits.pack(some(*shape[:-1], shape[-1] * SIZES[dtype], seed=seed), dtype)


def tails(packed: Tensor, length: int) -> Tensor:
    """Return the bits behind the last one, by shifts of a word."""
    size = SIZES[packed.dtype]
    places = torch.arange(size, dtype=packed.dtype)
    return (packed.unsqueeze(-1) >> places & 1).flatten(-2)[..., length:]


@BOTH
@EVERY_LENGTH
def test_bits_are_packed_lowest_first_with_zeros_behind_them(length: int, dtype: torch.dtype) -> None:
    """Bit e of a row is bit e % size of word e // size, and the tail is zero."""
    size, row = SIZES[dtype], some(3, length)
    packed = bits.pack(row, dtype)
    assert packed.dtype == dtype
    assert packed.shape == (3, -(-length // size)) == (3, bits.count(length, dtype))
    for line, values in zip(packed.tolist(), row.tolist(), strict=True):
        assert [line[e // size] >> e % size & 1 for e in range(length)] == values
    assert not tails(packed, length).any()
    assert torch.equal(bits.unpack(packed, length), row)
    assert torch.equal(bits.pack(2 * row.to(torch.int8) - 1, dtype), packed)


@BOTH
@settings(max_examples=30)
@given(lead=SHAPES, length=st.integers(0, 140), seed=st.integers(0, 99))
def test_packing_is_undone_by_unpacking(dtype: torch.dtype, lead: list[int], length: int, seed: int) -> None:
    """Bits of any shape come back, as bool and as signs of any type, wherever they lie in memory."""
    row = some(length, *lead, seed=seed).movedim(0, -1)
    packed = bits.pack(row, dtype)
    assert torch.equal(bits.unpack(packed, length), row)
    spread = torch.stack([packed, ~packed], -1)[..., 0]
    assert torch.equal(bits.unpack(spread, length), row)
    for kind in (torch.float32, torch.bfloat16, torch.int8):
        signs = bits.signed(packed, length, kind)
        assert signs.dtype == kind
        assert torch.equal(signs, torch.where(row, 1, -1).to(kind))


def test_numbers_above_zero_are_bits() -> None:
    """Zero, what is below it and NaN are bit 0, in every type; a slice of bytes may begin anywhere."""
    values = torch.tensor([-1.0, -0.0, 0.0, 1e-30, 1.0, float("nan"), float("inf"), -float("inf")])
    expected = [False, False, False, True, True, False, True, False]
    for pack in (bits.pack, bits.thresholded):
        assert bits.unpack(pack(values), 8).tolist() == expected
        assert bits.unpack(pack(torch.tensor([-5, 0, 1, 300])), 4).tolist() == [False, False, True, True]
    assert torch.equal(bits.unpack(bits.pack(some(73)[9:]), 64), some(73)[9:])


@BOTH
@EVERY_LENGTH
def test_every_bit_of_a_byte_is_a_bit(length: int, dtype: torch.dtype) -> None:
    """Bit 8 j + b is bit b of value j, the sign of an int8 too, and the tail is zero."""
    values = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    expected = (values.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2).bool()
    for given_ in (values, values.view(torch.int8), torch.stack([values, ~values], -1)[..., 0]):
        expanded = bits.expand(given_, dtype)
        assert expanded.dtype == dtype
        assert torch.equal(bits.unpack(expanded, 8 * length), expected)
        assert not tails(expanded, 8 * length).any()


def test_probabilities_are_rounded_to_256ths() -> None:
    """Counts are the nearest ones, and exactly 0 and 1 stay what they are."""
    p = torch.tensor([0.0, 1.0, 0.5, 1 / 256, 0.0019, 0.002, 0.9979, 0.9981])
    for dtype in (torch.float32, torch.float64):
        assert bits.quantised(p.to(dtype)).tolist() == [0, 256, 128, 1, 0, 1, 255, 256]
    assert bits.quantised(p).dtype == torch.int16


def test_what_is_no_probability_is_counted() -> None:
    """NaN and what lies outside [0, 1] are refused, with how many there are."""
    p = torch.tensor([0.5, float("nan"), -1e-6, 1.00001, 0.0, 1.0])
    with pytest.raises(ValueError, match="3 of 6 probabilities are NaN or outside"):
        bits.quantised(p)


@BOTH
@EVERY_LENGTH
def test_planes_are_the_bits_of_counts(length: int, dtype: torch.dtype) -> None:
    """Plane b is bit b of every count, 256 is plane 8 alone, and tails are zero."""
    counts = torch.randint(0, 257, (2, length), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    counts[:, :1] = 256
    planes = bits.planes(counts, dtype)
    assert planes.shape == (9, 2, bits.count(length, dtype))
    assert not tails(planes, length).any()
    places = 2 ** torch.arange(9).view(9, 1, 1)
    assert torch.equal((bits.unpack(planes, length) * places).sum(0), counts.long())


@BOTH
@EVERY_LENGTH
def test_sampled_bits_are_those_of_a_comparison(length: int, dtype: torch.dtype) -> None:
    """A bit is on where the number that its eight fair bits spell, highest last, is below the count."""
    counts = torch.randint(0, 257, (2, length), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    planes = bits.planes(counts, dtype)
    fair = some_words(dtype, 5, 8, 2, planes.shape[-1])
    drawn = bits.sample(planes, fair)
    spelt = (~bits.unpack(fair, length) * 2 ** torch.arange(8).view(8, 1, 1)).sum(1)
    assert torch.equal(bits.unpack(drawn, length), spelt < counts)
    assert not tails(drawn, length).any()
    turned = bits.sample(planes.mT, fair.mT)
    assert torch.equal(turned.mT, drawn)


def test_drawing_in_pieces_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many members are drawn at a time changes no bit, and the words given stay as they are."""
    planes = bits.planes(bits.quantised(torch.linspace(0, 1, 100)))
    fair = some_words(torch.int64, 7, 8, 2)
    before, whole = fair.clone(), bits.sample(planes, fair)
    assert torch.equal(fair, before)
    monkeypatch.setitem(words.ROOM, "cpu", 4)
    assert torch.equal(bits.sample(planes, fair), whole)


@pytest.mark.parametrize("stream", STREAMS)
def test_bits_have_their_probability(stream: str) -> None:
    """Frequencies are within five standard errors of the count, for both streams; 0 and 1 never miss."""
    p = torch.tensor([0.0, 1.0, 0.5, 1 / 256, 255 / 256, 0.25, 0.7, 0.1])
    counts = bits.quantised(p).repeat_interleave(64)
    noise = STREAMS[stream](0, 0, "layer", range(512), torch.device("cpu"), torch.float32)
    drawn = bits.unpack(bits.sample(bits.planes(counts), noise.words("w", 8, 8)), 512).double()
    rate = counts[::64] / 256
    seen = drawn.view(512, 8, 64).mean((0, 2))
    assert seen[:2].tolist() == [0, 1]
    errors = (rate * (1 - rate) / (512 * 64)).sqrt()
    assert bool(((seen - rate).abs() <= 5 * errors).all())
    # Neighbouring bits and neighbouring members are unrelated.
    centred = drawn - rate.repeat_interleave(64)
    variance = (rate * (1 - rate)).repeat_interleave(64)
    for product, expected in (
        (centred[:, 1:] * centred[:, :-1], variance[1:] * variance[:-1] * 512),
        (centred[1:] * centred[:-1], variance**2 * 511),
    ):
        assert abs(float(product.sum() / expected.sum().sqrt())) < 5


@BOTH
def test_set_bits_are_counted(dtype: torch.dtype) -> None:
    """Every word has as many as Python counts, negative ones too, by numpy and by arithmetic within words."""
    size = SIZES[dtype]
    few = [0, 1, -1, -2, 2 ** (size - 1) - 1, -(2 ** (size - 1))]
    sample = torch.cat([torch.tensor(few, dtype=dtype), some_words(dtype, 500)])
    expected = [(word % 2**size).bit_count() for word in sample.tolist()]
    for counted in (bits.popcount(sample), words.swar(sample)):
        assert counted.tolist() == expected
    assert bits.popcount(sample).dtype == torch.int32
    assert bits.popcount(sample[::2]).tolist() == expected[::2]
    assert bits.popcount(sample[2]).item() == size


PAIRS = st.integers(1, 4) | st.tuples(st.integers(1, 4), st.integers(1, 4))
PADDINGS = st.integers(0, 3) | st.tuples(st.integers(0, 5), st.integers(0, 5))


def both(pair: Any) -> tuple[int, int]:
    """Return one number twice, and two as they are."""
    return pair if isinstance(pair, tuple) else (pair, pair)


def bordered(image: Tensor, padding: Any) -> Tensor:
    """Put -1 around signs [n, h, w, c], and channels first."""
    down, across = both(padding)
    return functional.pad(image.movedim(-1, 1), (across, across, down, down), value=-1)


@BOTH
@settings(max_examples=40)
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    window=st.tuples(PAIRS, PAIRS, PADDINGS),
    channels=st.sampled_from([1, 8, 32, 33, 65]),
)
def test_windows_are_those_of_torch(
    dtype: torch.dtype, size: tuple[int, int], window: tuple[Any, Any, Any], channels: int
) -> None:
    """Patches and pools of packed images are torch's own of signs, with -1 outside the image."""
    kernel, stride, padding = window
    image = some(2, *size, channels)
    packed = bits.pack(image, dtype)
    signs = bordered(torch.where(image, 1.0, -1.0), padding)
    if min(n - k for n, k in zip(signs.shape[2:], both(kernel), strict=True)) < 0:
        for call in (bits.patches, bits.max_pool):
            with pytest.raises(ValueError, match="does not fit in an image"):
                call(packed, kernel, stride, padding)
        return
    pooled = functional.max_pool2d(signs, kernel, stride).movedim(1, -1)
    assert torch.equal(
        bits.signed(bits.max_pool(packed, kernel, stride, padding), channels, torch.float32), pooled
    )
    columns = functional.unfold(signs, kernel, stride=stride)
    seen = bits.patches(packed, kernel, stride, padding)
    assert seen.shape[:3] == pooled.shape[:3]
    taps = both(kernel)[0] * both(kernel)[1]
    found = bits.signed(seen.unflatten(-1, (taps, -1)), channels, torch.float32)
    assert torch.equal(found.flatten(1, 2).permute(0, 3, 2, 1).flatten(1, 2), columns)
    joined = bits.patches(packed, kernel, stride, padding, channels)
    whole = packed.shape[-1] == 1
    fit = words.SIZES[dtype] // channels if whole else 1
    assert joined.shape == (*seen.shape[:3], -(-seen.shape[3] // fit))
    assert torch.equal(joined, bits.joined(seen.unbind(-1), channels).movedim(0, -1) if whole else seen)


@BOTH
@given(length=st.integers(1, 64), many=st.integers(1, 20))
def test_short_words_are_joined_in_order(dtype: torch.dtype, length: int, many: int) -> None:
    """Bits of words that share one follow each other, and behind them is nothing."""
    length = min(length, words.SIZES[dtype])
    on = some(many, 3, length)
    found = bits.joined(bits.pack(on, dtype).unbind(), length)
    fit = words.SIZES[dtype] // length
    expected = [bits.pack(torch.cat(list(part), -1), dtype) for part in on.split(fit)]
    assert torch.equal(found, torch.stack(expected))


def test_windows_of_a_pool_stand_side_by_side() -> None:
    """Without a stride a pool moves by its kernel; images may have no batch, or lie anywhere in memory."""
    packed = bits.pack(some(7, 6, 40))
    assert torch.equal(bits.max_pool(packed, (2, 3)), bits.max_pool(packed, (2, 3), (2, 3)))
    turned = packed.transpose(0, 1)
    assert torch.equal(bits.max_pool(turned, (3, 2)), bits.max_pool(packed, (2, 3)).transpose(0, 1))
    assert torch.equal(bits.patches(turned, 2), bits.patches(turned.contiguous(), 2))
    before = packed.clone()
    bits.max_pool(packed, 1)
    bits.max_pool(packed, 3)
    assert torch.equal(packed, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bits.count(5, torch.int16), "words are int64 or int32, got torch.int16"),
        (lambda: bits.pack(some(3), torch.uint8), "words are int64 or int32"),
        (lambda: bits.popcount(torch.zeros(3)), "words are int64 or int32"),
        (lambda: bits.unpack(torch.zeros(2, dtype=torch.int64), 64), "64 bits take 1 words, got 2"),
        (
            lambda: bits.signed(torch.zeros(2, dtype=torch.int32), 65, torch.int8),
            "65 bits take 3 words, got 2",
        ),
        (lambda: bits.expand(torch.zeros(3)), "uint8 or int8, got torch.float32"),
        (lambda: bits.max_pool(torch.zeros(4, 4, 1, dtype=torch.int64), 0), "kernel_size is one or two"),
        (lambda: bits.patches(torch.zeros(4, 4, 1, dtype=torch.int64), 2, (1, 0)), "stride is one or two"),
        (lambda: bits.patches(torch.zeros(4, 4, 1, dtype=torch.int64), 2, 1, -1), "padding is one or two"),
        (lambda: bits.patches(torch.zeros(4, 4, 1), 2), "words are int64 or int32"),
        (
            lambda: bits.sample(
                torch.zeros(9, 2, dtype=torch.int64), torch.zeros(3, 8, 2, dtype=torch.int32)
            ),
            r"one size in one call, got torch\.int32 and torch\.int64",
        ),
        (
            lambda: bits.sample(
                torch.zeros(9, 2, dtype=torch.int64), torch.zeros(3, 2, 8, dtype=torch.int64)
            ),
            "take words",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, message: str) -> None:
    """Other types, words that do not hold the bits, and windows of no size are refused in words."""
    with pytest.raises(ValueError, match=message):
        call()


@BOTH
def test_shapes_beyond_memory_are_made_on_the_meta_device(dtype: torch.dtype) -> None:
    """More than 2^31 bits and words have their shapes, and nothing is computed."""
    size, meta = SIZES[dtype], torch.device("meta")
    many = torch.empty(2**20, 2**13 + 1, device=meta)
    packed = bits.pack(many, dtype)
    assert packed.shape == (2**20, 2**13 // size + 1)
    assert bits.unpack(packed, 2**13 + 1).shape == many.shape
    assert bits.signed(packed, 2**13 + 1, torch.int8).shape == many.shape
    assert bits.thresholded(many, dtype).shape == packed.shape
    assert bits.popcount(packed).shape == packed.shape
    planes = bits.planes(bits.quantised(many), dtype)
    assert planes.shape == (9, *packed.shape)
    fair = torch.empty(2**10, 8, *packed.shape, dtype=dtype, device=meta)
    assert bits.sample(planes, fair).shape == (2**10, *packed.shape)
    assert bits.expand(many.to(torch.uint8), dtype).shape == (2**20, 2**16 // size + 1)
    images = torch.empty(2**20, 64, 64, 2, dtype=dtype, device=meta)
    assert bits.patches(images, 3, 1, 1).shape == (2**20, 64, 64, 18)
    assert bits.max_pool(images, 3, 2, 1).shape == (2**20, 32, 32, 2)
