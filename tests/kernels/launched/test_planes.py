"""Planes of probabilities are their bits, in the layout of a product."""

import pytest
import torch

from impls.kernels.binary import bit_planes
from impls.schemes.binary import planes_of
from tests.kernels.launched.canaries import DEVICE, canaries, generator, packed

SHAPES = [(1, 5, length) for length in (1, 31, 32, 33, 63, 64, 65)] + [(1, 70, 130), (2, 3, 66, 2, 2)]
"""Weights [g, o, i, *taps]: every kind of tail, several tiles, groups and taps."""


@pytest.mark.parametrize("word", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_planes_are_bits_of_counts(word: torch.dtype, shape: tuple[int, ...]) -> None:
    """Plane b has bit b of 256 P for every weight, 0 behind the last input, and nothing else is touched."""
    counts = torch.randint(0, 257, shape, generator=generator(0))
    with canaries() as kept:
        found = bit_planes(kept.guard((counts / 256).to(DEVICE)), word)
    inputs = counts.movedim((1, 2), (-1, -2))
    expected = [packed((inputs >> bit & 1) * 2 - 1, inputs.dim() - 2, word) for bit in range(9)]
    assert torch.equal(found, torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_planes_are_those_of_plain_torch_in_every_type(dtype: torch.dtype) -> None:
    """All 257 probabilities are read exactly, whatever type they are in, also out of a view."""
    p = (torch.arange(257 * 3).view(1, 257, 3) // 3 / 256).to(DEVICE, dtype)
    for values in (p, p.mT):
        assert torch.equal(bit_planes(values), planes_of(values))


def test_other_words_are_refused_and_nothing_has_no_planes() -> None:
    """Words are int32 or int64; a weight without outputs has planes without words."""
    with pytest.raises(ValueError, match="words of int32 or int64"):
        bit_planes(torch.zeros(1, 2, 3), torch.int16)
    assert bit_planes(torch.zeros(1, 0, 3, device=DEVICE)).shape == (9, 1, 1, 0)
