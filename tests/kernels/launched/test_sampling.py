"""Packed bits are drawn with the words of the stream philox, and with the probabilities of their planes."""

import pytest
import torch
from torch import Tensor

from impls.kernels.binary import sample_bits
from impls.perturbation import philox
from impls.perturbation.noise import PhiloxStream
from tests.kernels.launched.canaries import DEVICE, canaries, generator

WORDS = (torch.int32, torch.int64)


def planes_of(eighths: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nine planes of probabilities in steps of 1/256, [words, bits of a word] of 0 to 256."""
    shifts = torch.arange(eighths.shape[-1])
    planes = [((eighths >> plane & 1) << shifts).sum(-1) for plane in range(9)]
    return torch.stack(planes).to(dtype).to(DEVICE)


def drawn(stream: PhiloxStream, planes: Tensor) -> Tensor:
    """Draw bits as the planes say, from what the stream makes of words: int64 [m, words]."""
    words = stream.words("bits", 8, planes.shape[1])
    on = torch.zeros_like(words[:, 0])
    for plane in range(8):
        r = words[:, plane]
        on = (planes[plane] & (on | r)) | (~planes[plane] & on & r)
    return on | planes[8]


def place_of(stream: PhiloxStream) -> philox.Place:
    """Find where the stream draws bits."""
    return philox.Place.of(stream.seed, stream.step, stream.layer, "bits")


def stream_of(members: range, seed: int = 3, layer: str = "0") -> PhiloxStream:
    """Return a stream of members."""
    return PhiloxStream(seed, 5, layer, members, torch.device(DEVICE), torch.float32)


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize(
    ("words", "members"),
    [(words, range(7, 9)) for words in (1, 2, 3, 6, 8, 130)] + [(258, range(1)), (4, range(7, 17))],
)
def test_a_kernel_draws_the_bits_of_the_stream(dtype: torch.dtype, words: int, members: range) -> None:
    """Bits are those made of the stream's own words, for every member, and nothing else is touched."""
    eighths = torch.randint(0, 257, (words, 64), generator=generator(words))
    planes, stream = planes_of(eighths, torch.int64), stream_of(members)
    key, layer, draw = place_of(stream)
    with canaries() as kept:
        read = kept.guard(planes).view(dtype)
        bits = sample_bits(read, key, layer, draw, members)
    assert torch.equal(bits.view(torch.int64), drawn(stream, planes))


@pytest.mark.parametrize("words", [1, 2, 3, 5, 513])
def test_an_odd_number_of_words_is_drawn_in_order(words: int) -> None:
    """Word j of plane b is word b * words + j of the draw, also where planes begin within a call."""
    eighths = torch.randint(0, 257, (words, 32), generator=generator(words))
    planes, (key, layer, draw) = planes_of(eighths, torch.int32), place_of(stream_of(range(2)))
    raw = torch.empty(2, 4 * words, dtype=torch.int64)
    philox.fill(raw, philox.BITS, philox.Place(key, layer, draw), range(2), range(4 * words))
    random = raw.view(torch.int32).view(2, 8, words).to(DEVICE)
    on = torch.zeros(2, words, dtype=torch.int32, device=DEVICE)
    for plane in range(8):
        r = random[:, plane]
        on = (planes[plane] & (on | r)) | (~planes[plane] & on & r)
    with canaries() as kept:
        bits = sample_bits(kept.guard(planes), key, layer, draw, range(2))
    assert torch.equal(bits, on | planes[8])


def test_a_member_is_the_same_in_any_range() -> None:
    """A member's bits are a function of its own counter: also the last one, which all members share."""
    planes = planes_of(torch.full((5, 64), 100), torch.int64)
    key, layer, draw = place_of(stream_of(range(1)))
    whole = sample_bits(planes, key, layer, draw, range(10))
    assert torch.equal(sample_bits(planes, key, layer, draw, range(7, 9)), whole[7:9])
    last = sample_bits(planes, key, layer, draw, range(philox.SHARED, philox.SHARED + 1))
    assert torch.equal(last, drawn(stream_of(range(1)).shared(), planes))


@pytest.mark.parametrize("change", [{"seed": 4}, {"layer": "1"}])
def test_other_names_draw_other_bits(change: dict[str, int | str]) -> None:
    """Another seed and another layer have bits of their own, those of their stream."""
    planes = planes_of(torch.full((5, 64), 128), torch.int64)
    stream = stream_of(range(2), **change)  # type: ignore[arg-type]  # one of the two
    bits = sample_bits(planes, *place_of(stream), range(2))
    assert torch.equal(bits, drawn(stream, planes))
    assert not torch.equal(bits, drawn(stream_of(range(2)), planes))


def test_probabilities_are_those_of_the_planes() -> None:
    """0 is never on, 256 always, and what lies between as often as it says, within five deviations."""
    steps = torch.tensor([0, 1, 64, 100, 128, 255, 256])
    eighths = steps.repeat_interleave(64)[:, None].expand(-1, 64)
    planes = planes_of(eighths, torch.int64)
    bits = sample_bits(planes, *place_of(stream_of(range(1))), range(8)).cpu()
    on = (bits[..., None] >> torch.arange(64) & 1).view(8, len(steps), -1).double().mean((0, 2))
    p = steps.double() / 256
    assert ((on - p).abs() <= 5 * (p * (1 - p) / (8 * 64 * 64)).sqrt()).all()


@pytest.mark.parametrize("members", [range(0, 4, 2), range(-1, 3), range(2**32 - 1, 2**32 + 1)])
def test_members_without_a_counter_are_refused(members: range) -> None:
    """A member that has no counter of 32 bits raises: it would repeat another."""
    with pytest.raises(ValueError, match="members must be"):
        sample_bits(torch.zeros(9, 2, dtype=torch.int64), (0, 0), 0, 0, members)


def test_planes_that_are_none_are_refused() -> None:
    """Eight planes are no probability, and floats are no words."""
    with pytest.raises(ValueError, match="9 planes"):
        sample_bits(torch.zeros(8, 2, dtype=torch.int64), (0, 0), 0, 0, range(1))
    with pytest.raises(ValueError, match="words of int32 or int64"):
        sample_bits(torch.zeros(9, 2), (0, 0), 0, 0, range(1))
