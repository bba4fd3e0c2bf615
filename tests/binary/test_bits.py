"""Packed bits for +1 and -1, in words of either size, with zeros in the unused bits of the last word."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from impls.binary import bits

LENGTHS = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 1000)
SIZES = {torch.int64: 64, torch.int32: 32}
DTYPES = st.sampled_from(list(SIZES))


def lengths() -> Iterator[tuple[torch.dtype, int]]:
    """Yield every word type with every length."""
    return itertools.product(SIZES, LENGTHS)


def some(*shape: int, seed: int = 0) -> Tensor:
    """Draw fair bits."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def some_words(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Draw words whose bits are fair."""
    return bits.pack(some(*shape[:-1], shape[-1] * SIZES[dtype], seed=seed), dtype)


def some_counts(length: int) -> Tensor:
    """Draw counts of 256ths [2, length]; the first are 256."""
    counts = torch.randint(0, 257, (2, length), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    counts[:, :1] = 256
    return counts


def tails(packed: Tensor, length: int) -> Tensor:
    """Return the bits after the first ``length``, by shifts of a word."""
    size = SIZES[packed.dtype]
    places = torch.arange(size, dtype=packed.dtype)
    return (packed.unsqueeze(-1) >> places & 1).flatten(-2)[..., length:]


def test_bits_are_packed_lowest_first_with_zeros_after_the_last() -> None:
    """Bit e of a row is bit e % size of word e // size; packed numbers set bits above 0."""
    for dtype, length in lengths():
        size, row = SIZES[dtype], some(3, length)
        packed = bits.pack(row, dtype)
        assert packed.dtype == dtype
        assert packed.shape == (3, -(-length // size)) == (3, bits.word_count(length, dtype))
        for line, values in zip(packed.tolist(), row.tolist(), strict=True):
            assert [line[e // size] >> e % size & 1 for e in range(length)] == values
        assert not tails(packed, length).any()
        assert torch.equal(bits.pack(2 * row.to(torch.int8) - 1, dtype), packed)
    values = torch.tensor([-1.0, -0.0, 0.0, 1e-30, 1.0, float("nan"), float("inf"), -float("inf")])
    expected = [False, False, False, True, True, False, True, False]
    assert bits.unpack(bits.pack(values), 8).tolist() == expected
    assert bits.unpack(bits.pack(torch.tensor([-5, 0, 1, 300])), 4).tolist() == [False, False, True, True]
    assert torch.equal(bits.unpack(bits.pack(some(73)[9:]), 64), some(73)[9:])  # not at a multiple of 8 bytes


@settings(max_examples=30)
@given(dtype=DTYPES, lead=st.lists(st.integers(0, 4), max_size=3), length=st.integers(0, 140))
def test_packing_is_undone_by_unpacking(dtype: torch.dtype, lead: list[int], length: int) -> None:
    """Any shape and memory layout round-trips, as bool and as signs of any dtype."""
    row = some(length, *lead).movedim(0, -1)
    packed = bits.pack(row, dtype)
    assert torch.equal(bits.unpack(packed, length), row)
    spread = torch.stack([packed, ~packed], -1)[..., 0]
    assert torch.equal(bits.unpack(spread, length), row)
    for kind in (torch.float32, torch.bfloat16, torch.int8):
        signs = bits.signed(packed, length, kind)
        assert signs.dtype == kind
        assert torch.equal(signs, torch.where(row, 1, -1).to(kind))


def test_expand_makes_every_bit_of_a_byte_a_channel() -> None:
    """Bit 8 j + b is bit b of value j, including the sign of an int8, and the tail is zero."""
    for dtype, length in lengths():
        values = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(0))
        values = values.to(torch.uint8)
        expected = (values.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2).bool()
        for layout in (values, values.view(torch.int8), torch.stack([values, ~values], -1)[..., 0]):
            expanded = bits.expand(layout, dtype)
            assert expanded.dtype == dtype
            assert torch.equal(bits.unpack(expanded, 8 * length), expected)
            assert not tails(expanded, 8 * length).any()


def test_probabilities_are_rounded_to_256ths() -> None:
    """Rounding is to nearest, 0 and 1 are exact, and an error counts NaN and values outside [0, 1]."""
    p = torch.tensor([0.0, 1.0, 0.5, 1 / 256, 0.0019, 0.002, 0.9979, 0.9981])
    for dtype in (torch.float32, torch.float64):
        assert bits.quantised(p.to(dtype)).tolist() == [0, 256, 128, 1, 0, 1, 255, 256]
    assert bits.quantised(p).dtype == torch.int16
    p = torch.tensor([0.5, float("nan"), -1e-6, 1.00001, 0.0, 1.0])
    with pytest.raises(ValueError, match="3 of 6 probabilities are NaN or outside"):
        bits.quantised(p)


def test_planes_are_the_bits_of_counts_and_sampling_compares_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sampled bit is on if the number of eight fair bits, highest last, is below the count.

    The result does not depend on how many members are drawn at a time; the fair words are not overwritten.
    """
    for dtype, length in lengths():
        counts = some_counts(length)
        planes = bits.planes(counts, dtype)
        assert planes.shape == (9, 2, bits.word_count(length, dtype))
        assert not tails(planes, length).any()
        places = 2 ** torch.arange(9).view(9, 1, 1)
        assert torch.equal((bits.unpack(planes, length) * places).sum(0), counts.long())
        fair = some_words(dtype, 5, 8, 2, planes.shape[-1])
        drawn = bits.sample(planes, fair)
        number = (~bits.unpack(fair, length) * 2 ** torch.arange(8).view(8, 1, 1)).sum(1)
        assert torch.equal(bits.unpack(drawn, length), number < counts)
        assert not tails(drawn, length).any()
        assert torch.equal(bits.sample(planes.mT, fair.mT).mT, drawn)
        before = fair.clone()
        with monkeypatch.context() as patch:
            patch.setitem(bits.CHUNK_WORDS, "cpu", 4)
            assert torch.equal(bits.sample(planes, fair), drawn)
        assert torch.equal(fair, before)


def test_set_bits_are_counted() -> None:
    """The counts equal Python's, also for negative words."""
    for dtype, size in SIZES.items():
        few = [0, 1, -1, -2, 2 ** (size - 1) - 1, -(2 ** (size - 1))]
        sample = torch.cat([torch.tensor(few, dtype=dtype), some_words(dtype, 500)])
        expected = [(word % 2**size).bit_count() for word in sample.tolist()]
        assert bits.popcount_swar(sample).tolist() == expected
        assert bits.popcount_swar(sample[::2]).tolist() == expected[::2]


PAIRS = st.integers(1, 4) | st.tuples(st.integers(1, 4), st.integers(1, 4))
PADDINGS = st.integers(0, 3) | st.tuples(st.integers(0, 5), st.integers(0, 5))


def both(pair: Any) -> tuple[int, int]:
    """Return the sizes of both axes."""
    return pair if isinstance(pair, tuple) else (pair, pair)


def padded(image: Tensor, padding: Any) -> Tensor:
    """Pad signs [n, h, w, c] with -1, and move the channels to the front."""
    down, across = both(padding)
    return functional.pad(image.movedim(-1, 1), (across, across, down, down), value=-1)


@settings(max_examples=60)
@given(
    dtype=DTYPES,
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    window=st.tuples(PAIRS, PAIRS, PADDINGS),
    channels=st.sampled_from([1, 8, 32, 33, 65]),
)
def test_patches_and_pools_are_torchs(
    dtype: torch.dtype, size: tuple[int, int], window: tuple[Any, Any, Any], channels: int
) -> None:
    """Patches and pools equal torch's on signs padded with -1; kernels that do not fit are refused."""
    kernel, stride, padding = window
    image = some(2, *size, channels)
    packed = bits.pack(image, dtype)
    signs = padded(torch.where(image, 1.0, -1.0), padding)
    if min(n - k for n, k in zip(signs.shape[2:], both(kernel), strict=True)) < 0:
        for call in (bits.patches, bits.max_pool):
            with pytest.raises(ValueError, match="does not fit in an image"):
                call(packed, kernel, stride, padding)
        return
    pooled = functional.max_pool2d(signs, kernel, stride).movedim(1, -1)
    pool = bits.max_pool(packed, kernel, stride, padding)
    assert torch.equal(bits.signed(pool, channels, torch.float32), pooled)
    columns = functional.unfold(signs, kernel, stride=stride)
    seen = bits.patches(packed, kernel, stride, padding)
    assert seen.shape[:3] == pooled.shape[:3]
    taps = both(kernel)[0] * both(kernel)[1]
    found = bits.signed(seen.unflatten(-1, (taps, -1)), channels, torch.float32)
    assert torch.equal(found.flatten(1, 2).permute(0, 3, 2, 1).flatten(1, 2), columns)
    joined = bits.patches(packed, kernel, stride, padding, channels)
    whole = packed.shape[-1] == 1
    fit = SIZES[dtype] // channels if whole else 1
    assert joined.shape == (*seen.shape[:3], -(-seen.shape[3] // fit))
    assert torch.equal(joined, bits.joined(seen.unbind(-1), channels).movedim(0, -1) if whole else seen)


def test_short_words_are_joined_in_order() -> None:
    """The bits of joined words follow each other, with zeros after the last."""
    for dtype, size in SIZES.items():
        for length, many in itertools.product((1, 3, 8, size // 2, size - 1, size), (1, 2, 7, 20)):
            on = some(many, 3, length)
            found = bits.joined(bits.pack(on, dtype).unbind(), length)
            expected = [bits.pack(torch.cat(list(part), -1), dtype) for part in on.split(size // length)]
            assert torch.equal(found, torch.stack(expected)), (dtype, length, many)


def test_windows_of_a_pool_do_not_overlap_by_default() -> None:
    """Images may lack a batch axis and have any memory layout, and are not changed."""
    packed = bits.pack(some(7, 6, 40))
    before, turned = packed.clone(), packed.transpose(0, 1)
    assert torch.equal(bits.max_pool(packed, (2, 3)), bits.max_pool(packed, (2, 3), (2, 3)))
    assert torch.equal(bits.max_pool(turned, (3, 2)), bits.max_pool(packed, (2, 3)).transpose(0, 1))
    assert torch.equal(bits.patches(turned, 2), bits.patches(turned.contiguous(), 2))
    assert torch.equal(packed, before)


def test_bad_arguments_are_refused() -> None:
    """Wrong dtypes, too few words for the bits, and window sizes out of range are refused."""
    image, wide = torch.zeros(4, 4, 1, dtype=torch.int64), torch.zeros(9, 2, dtype=torch.int64)
    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (bits.word_count, (5, torch.int16), "words are int64 or int32, got torch.int16"),
        (bits.pack, (some(3), torch.uint8), "words are int64 or int32"),
        (bits.unpack, (torch.zeros(2, dtype=torch.int64), 64), "64 bits take 1 words, got 2"),
        (bits.signed, (torch.zeros(2, dtype=torch.int32), 65, torch.int8), "65 bits take 3 words, got 2"),
        (bits.expand, (torch.zeros(3),), "uint8 or int8, got torch.float32"),
        (bits.max_pool, (image, 0), "kernel_size must be one or two"),
        (bits.patches, (image, 2, (1, 0)), "stride must be one or two"),
        (bits.patches, (image, 2, 1, -1), "padding must be one or two"),
        (bits.patches, (torch.zeros(4, 4, 1), 2), "words are int64 or int32"),
        (bits.sample, (wide, torch.zeros(3, 8, 2, dtype=torch.int32)), r"got torch\.int32 and torch\.int64"),
        (bits.sample, (wide, torch.zeros(3, 2, 8, dtype=torch.int64)), "take words"),
    ]
    for call, arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            call(*arguments)


def test_shapes_beyond_memory_work_on_the_meta_device() -> None:
    """Shapes of more than 2^31 bits or words are right, without computing anything."""
    meta = torch.device("meta")
    many = torch.empty(2**20, 2**13 + 1, device=meta)
    for dtype, size in SIZES.items():
        packed = bits.pack(many, dtype)
        assert packed.shape == (2**20, 2**13 // size + 1)
        assert bits.unpack(packed, 2**13 + 1).shape == many.shape
        assert bits.signed(packed, 2**13 + 1, torch.int8).shape == many.shape
        planes = bits.planes(bits.quantised(many), dtype)
        assert planes.shape == (9, *packed.shape)
        fair = torch.empty(2**10, 8, *packed.shape, dtype=dtype, device=meta)
        assert bits.sample(planes, fair).shape == (2**10, *packed.shape)
        assert bits.expand(many.to(torch.uint8), dtype).shape == (2**20, 2**16 // size + 1)
        images = torch.empty(2**20, 64, 64, 2, dtype=dtype, device=meta)
        assert bits.patches(images, 3, 1, 1).shape == (2**20, 64, 64, 18)
        assert bits.max_pool(images, 3, 2, 1).shape == (2**20, 32, 32, 2)
