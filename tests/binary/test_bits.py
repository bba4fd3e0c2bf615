"""Packed bits for +1 and -1, with zeros in the unused bits of the last word."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from impls.binary import bits

LENGTHS = (0, 1, 31, 33, 63, 64, 65, 128, 1000)


def fair_bits(*shape: int, seed: int = 0) -> Tensor:
    """Draw fair bits."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def tails(packed: Tensor, length: int) -> Tensor:
    """Return the bits after the first ``length``, by shifts of a word."""
    return (packed.unsqueeze(-1) >> torch.arange(64) & 1).flatten(-2)[..., length:]


def test_bits_are_packed_lowest_first_with_zeros_after_the_last() -> None:
    """Bit e is bit e % 64 of word e // 64, in any layout; numbers above 0 set bits; unpacking undoes it."""
    for length in LENGTHS:
        rows = fair_bits(3, length)
        packed = bits.pack(rows)
        assert packed.shape == (3, -(-length // 64)) == (3, bits.word_count(length))
        for words, values in zip(packed.tolist(), rows.tolist(), strict=True):
            assert [words[e // 64] >> e % 64 & 1 for e in range(length)] == values
        assert not tails(packed, length).any()
        assert torch.equal(bits.pack(2 * rows.to(torch.int8) - 1), packed)
        strided = torch.stack([packed, ~packed], -1)[..., 0]
        assert torch.equal(bits.unpack(strided, length), rows)
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            assert torch.equal(
                bits.unpack_as_signs(packed, length, dtype), torch.where(rows, 1, -1).to(dtype)
            )
    for lead in ((), (0,), (2, 0), (3, 1, 2)):
        rows = fair_bits(70, *lead).movedim(0, -1)
        assert torch.equal(bits.unpack(bits.pack(rows), 70), rows)
    values = torch.tensor([-1.0, -0.0, 0.0, 1e-30, 1.0, float("nan"), float("inf"), -float("inf")])
    expected = [False, False, False, True, True, False, True, False]
    assert bits.unpack(bits.pack(values), 8).tolist() == expected
    assert torch.equal(
        bits.unpack(bits.pack(fair_bits(73)[9:]), 64), fair_bits(73)[9:]
    )  # not aligned to 8 bytes
    with pytest.raises(ValueError, match="64 bits take 1 words, got 2"):
        bits.unpack(torch.zeros(2, dtype=torch.int64), 64)


def test_expand_makes_every_bit_of_a_byte_a_channel() -> None:
    """Bit 8 j + b is bit b of value j, including the sign of an int8, and the tail is zero."""
    for length in LENGTHS:
        values = torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(0))
        values = values.to(torch.uint8)
        expected = (values.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2).bool()
        for layout in (values, values.view(torch.int8), torch.stack([values, ~values], -1)[..., 0]):
            expanded = bits.expand(layout)
            assert torch.equal(bits.unpack(expanded, 8 * length), expected)
            assert not tails(expanded, 8 * length).any()
    with pytest.raises(ValueError, match=r"uint8 or int8, got torch\.float32"):
        bits.expand(torch.zeros(3))


def test_probabilities_are_rounded_to_256ths() -> None:
    """Rounding is to nearest, 0 and 1 are exact, and an error counts NaN and values outside [0, 1]."""
    p = torch.tensor([0.0, 1.0, 0.5, 1 / 256, 0.0019, 0.002, 0.9979, 0.9981])
    for dtype in (torch.float32, torch.float64):
        assert bits.round_probabilities(p.to(dtype)).tolist() == [0, 256, 128, 1, 0, 1, 255, 256]
    with pytest.raises(ValueError, match="3 of 6 probabilities are NaN or outside"):
        bits.round_probabilities(torch.tensor([0.5, float("nan"), -1e-6, 1.00001, 0.0, 1.0]))


def test_a_sampled_bit_is_on_if_eight_fair_bits_are_below_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight fair bits, the highest last, are compared with a count of 256ths.

    The result does not depend on how many members are drawn at a time; the fair words are not overwritten.
    """
    for length in LENGTHS:
        counts = torch.randint(0, 257, (2, length), generator=torch.Generator().manual_seed(0)).short()
        counts[:, :1] = 256
        planes = bits.pack_planes(counts)
        assert not tails(planes, length).any()
        places = 2 ** torch.arange(9).view(9, 1, 1)
        assert torch.equal((bits.unpack(planes, length) * places).sum(0), counts.long())
        fair = bits.pack(fair_bits(5, 8, 2, planes.shape[-1] * 64))
        before, drawn = fair.clone(), bits.sample(planes, fair)
        number = (~bits.unpack(fair, length) * 2 ** torch.arange(8).view(8, 1, 1)).sum(1)
        assert torch.equal(bits.unpack(drawn, length), number < counts)
        assert not tails(drawn, length).any()
        assert torch.equal(bits.sample(planes.mT, fair.mT).mT, drawn)
        with monkeypatch.context() as patch:
            patch.setitem(bits.CHUNK_WORDS, "cpu", 4)
            assert torch.equal(bits.sample(planes, fair), drawn)
        assert torch.equal(fair, before)


PAIRS = st.tuples(st.integers(1, 4), st.integers(1, 4))


@settings(max_examples=60)
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    window=st.tuples(PAIRS, PAIRS, st.tuples(st.integers(0, 5), st.integers(0, 5))),
    channels=st.sampled_from([1, 8, 32, 33, 65]),
)
def test_patches_and_pools_equal_those_of_torch(
    size: tuple[int, int], window: tuple[Any, Any, Any], channels: int
) -> None:
    """Patches and pools equal torch's on signs padded with -1, in any memory layout.

    Kernels that do not fit are refused, and images are not changed.
    """
    kernel, stride, (vertical, horizontal) = window
    image = fair_bits(2, *size, channels)
    packed = bits.pack(image)
    before, transposed = packed.clone(), packed.transpose(1, 2).contiguous().transpose(1, 2)
    signs = torch.where(image, 1.0, -1.0).movedim(-1, 1)
    signs = functional.pad(signs, (horizontal, horizontal, vertical, vertical), value=-1)
    if signs.shape[2] < kernel[0] or signs.shape[3] < kernel[1]:
        for call in (bits.patches, bits.max_pool):
            with pytest.raises(ValueError, match="does not fit in an image"):
                call(packed, *window)
        return
    pooled = functional.max_pool2d(signs, kernel, stride).movedim(1, -1)
    assert torch.equal(
        bits.unpack_as_signs(bits.max_pool(transposed, *window), channels, torch.float32), pooled
    )
    columns = functional.unfold(signs, kernel, stride=stride)
    rows = bits.patches(transposed, *window)
    values = bits.unpack_as_signs(rows.unflatten(-1, (kernel[0] * kernel[1], -1)), channels, torch.float32)
    assert torch.equal(values.flatten(1, 2).permute(0, 3, 2, 1).flatten(1, 2), columns)
    joined = bits.patches(packed, *window, channels)
    fits = packed.shape[-1] == 1
    assert torch.equal(joined, bits.join_words(rows.unbind(-1), channels).movedim(0, -1) if fits else rows)
    assert torch.equal(packed, before)


def test_short_words_are_joined_in_order() -> None:
    """The bits of joined words follow each other, with zeros after the last."""
    for length, count in itertools.product((1, 3, 8, 32, 63, 64), (1, 2, 7, 20)):
        on = fair_bits(count, 3, length)
        joined = bits.join_words(bits.pack(on).unbind(), length)
        expected = [bits.pack(torch.cat(list(signs), -1)) for signs in on.split(64 // length)]
        assert torch.equal(joined, torch.stack(expected)), (length, count)
