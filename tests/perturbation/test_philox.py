"""Philox gives the published words, values depend on their own counters only, and counters never wrap."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impls.perturbation import philox
from impls.perturbation.philox import (
    BITS,
    MASK,
    NORMAL,
    SHARED,
    UNIFORM,
    Distribution,
    DrawKey,
    integers_below,
)

KEY = (0x1234, 0x5678)
DRAW = DrawKey(KEY, 3, 7)
DISTRIBUTIONS = {"normal": NORMAL, "uniform": UNIFORM, "bits": BITS, "integers_below": integers_below(1000)}
every_distribution = pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)


def fill(distribution: Distribution, members: range, elements: range, key: DrawKey = DRAW) -> Tensor:
    """Draw a rectangle of members and elements: words as int64, others in float64, which is exact."""
    dtype = torch.int64 if distribution is BITS else torch.float64
    values = torch.empty(len(members), len(elements), dtype=dtype)
    return philox.fill(values, distribution, key, members, elements)


def words_of(key: tuple[int, int], counters: tuple[int, int, int, int]) -> list[int]:
    """Return the four words of one call."""
    c0, c1, c2, c3 = (torch.tensor([counter]) for counter in counters)
    return [int(word) for word in philox.philox(key, c0, c1, c2, c3)]


def reference_words(key: tuple[int, int], counters: tuple[int, ...]) -> tuple[int, ...]:
    """Compute the words of a call with Python integers, from the paper's description."""
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = product1 >> 32 ^ c1 ^ k0, product1 & MASK
        c2, c3 = product0 >> 32 ^ c3 ^ k1, product0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def test_words_equal_the_published_answers() -> None:
    """Words equal the known answers of Random123 for zeros, ones and the digits of pi."""
    for key, counters, expected in (
        ((0, 0), (0, 0, 0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            (MASK, MASK),
            (MASK, MASK, MASK, MASK),
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ):
        assert words_of(key, counters) == expected


WORDS = st.integers(0, MASK)


@settings(max_examples=50)
@given(key=st.tuples(WORDS, WORDS), counters=st.tuples(WORDS, WORDS, WORDS, WORDS))
def test_words_equal_those_of_unbounded_integers(
    key: tuple[int, int], counters: tuple[int, int, int, int]
) -> None:
    """Wrapping 64-bit arithmetic gives the words of unbounded integers, for counters of any shape."""
    expected = list(reference_words(key, counters))
    assert words_of(key, counters) == expected
    c0, c1 = torch.tensor([counters[0], 0]), torch.tensor([[1], [counters[1]]])
    grid = philox.philox(key, c0, c1, counters[2], counters[3])
    assert [int(word[1, 0]) for word in grid] == expected


def test_values_are_computed_from_the_words_of_their_element() -> None:
    """Each value is computed from the words that belong to its element, for every distribution."""
    words = [reference_words(KEY, (call, 5, DRAW.layer, DRAW.draw)) for call in range(3)]
    flat = [word for call in words for word in call]
    uniforms = fill(UNIFORM, range(5, 6), range(12))[0]
    assert uniforms.tolist() == [(word >> 8) / 2**24 for word in flat]
    bits = fill(BITS, range(5, 6), range(6))
    assert [word % 2**64 for word in bits[0].tolist()] == [
        flat[index] + (flat[index + 1] << 32) for index in range(0, 12, 2)
    ]
    signs = philox.fill_signs(torch.empty(1, 300), bits)[0]
    assert signs.tolist() == [1.0 if flat[e // 32] >> e % 32 & 1 else -1.0 for e in range(300)]
    levels = philox.fill_levels(torch.empty(1, 48), bits)[0]
    exact = [((flat[e // 4] >> 8 * (e % 4) & 255) - 127.5) * 14189 / 2**20 for e in range(48)]
    assert levels.tolist() == exact
    pairs = [(high << 32) + low for high, low in zip(flat[::2], flat[1::2], strict=True)]
    for high in (1, 10, 2**31 + 11, 2**32):
        drawn = fill(integers_below(high), range(5, 6), range(6))[0]
        assert drawn.tolist() == [high * pair >> 64 for pair in pairs]
    normals = fill(NORMAL, range(5, 6), range(12))[0]
    for index in range(0, 12, 2):
        radius = math.sqrt(-2 * math.log((flat[index] + 0.5) / 2**32))
        angle = 2 * math.pi * flat[index + 1] / 2**32
        expected = torch.tensor([radius * math.cos(angle), radius * math.sin(angle)], dtype=torch.float64)
        # Angles and logarithms are rounded to float32 on the way.
        assert (
            float((normals[index : index + 2] - expected).abs().max()) < 16 * torch.finfo(torch.float32).eps
        )


@every_distribution
def test_any_range_has_the_same_bits(distribution: Distribution, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of members and elements, computed in tiles of any size, have the same bits."""
    rectangle = fill(distribution, range(9), range(300))
    for tile in (philox.TILE["cpu"], 1, 7, 300):
        monkeypatch.setitem(philox.TILE, "cpu", tile)
        for members, elements in (
            (range(9), range(300)),
            (range(2, 5), range(1, 299)),
            (range(8, 9), range(7, 8)),
        ):
            piece = fill(distribution, members, elements)
            assert torch.equal(piece, rectangle[members.start : members.stop, elements.start : elements.stop])


@every_distribution
def test_noise_does_not_repeat_at_two_to_the_32(distribution: Distribution) -> None:
    """Values 2^31 or 2^32 places apart have different bits, across a population and within a member."""
    weight, count = 2**22, 256
    far = fill(distribution, range(1536, 1537), range(weight - count, weight))
    for wrap in (2**31, 2**32):
        members, element = divmod((1536 * weight + weight - count) % wrap, weight)
        assert members != 1536
        assert not torch.equal(
            fill(distribution, range(members, members + 1), range(element, element + count)), far
        )
    near = [fill(distribution, range(1), range(start, start + count)) for start in (0, 2**31)]
    for start in (2**32, 2**32 * distribution.values_per_call - count):
        far = fill(distribution, range(1), range(start, start + count))
        assert not any(torch.equal(values, far) for values in near)


@every_distribution
def test_a_counter_that_does_not_fit_is_refused(distribution: Distribution) -> None:
    """The first element and the first member beyond 2^32 counters are refused and do not wrap around to 0."""
    end = 2**32 * distribution.values_per_call
    with pytest.raises(ValueError, match=r"element / \d = \d+ is outside the counter range"):
        fill(distribution, range(1), range(end - 1, end + 1))
    with pytest.raises(ValueError, match="member = 4294967296 is outside the counter range"):
        fill(distribution, range(MASK, MASK + 2), range(1))
    assert fill(distribution, range(SHARED, SHARED + 1), range(end - 1, end)).isfinite().all()
    with pytest.raises(ValueError, match="is outside the counter range"):  # before anything is drawn
        philox.fill(torch.empty(1, end + 1, device="meta"), distribution, DRAW, range(1), range(end + 1))
    for high in (0, 2**32 + 1):
        with pytest.raises(ValueError, match="high must be 1 to"):
            integers_below(high)


def test_extreme_words_give_finite_normals() -> None:
    """The smallest and largest words give finite normals, of which the largest is above 6."""
    for word in (0, 1, MASK):
        words = tuple(torch.tensor([value]) for value in (word, 0, word, 0))
        extreme = NORMAL.convert(words)  # type: ignore[arg-type]  # a tuple of four
        assert bool(extreme.isfinite().all())
        assert (extreme.max().item() > 6) == (word < 2)
