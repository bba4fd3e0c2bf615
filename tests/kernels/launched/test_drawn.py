"""Numbers that kernels draw are those of the stream philox: signs bit by bit, normals but for rounding."""

import pytest
import torch
from torch import Tensor

from impls.kernels.philox import Draw, fill
from impls.perturbation import philox
from impls.perturbation.noise import PhiloxStream
from tests.kernels.launched.canaries import DEVICE, canaries

PLACE = philox.Place.of(3, 5, "0.weight", "dense")
FAR = (range(7, 12), range(2**31 - 2, 2**31 + 3), range(2**32 - 3, 2**32 - 1))
"""Members at the start, at the sign of an int32, and the last ones there are."""


def draw_of(members: range, place: philox.Place = PLACE) -> Draw:
    """Return what a kernel has to know of a place."""
    return Draw(place.key, place.layer, place.draw, members)


def filled(
    members: range, start: int, size: int, *, signs: bool, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw with the kernel, between canaries."""
    with canaries() as kept:
        values = kept.empty(len(members), size, dtype=dtype)
        return fill(values, draw_of(members), start, signs=signs).cpu()


def at(members: range, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Return members and elements as indices that broadcast."""
    return torch.tensor(list(members)).unsqueeze(1), torch.arange(start, start + size).unsqueeze(0)


def expected_signs(members: range, start: int, size: int) -> Tensor:
    """Look signs up in the stream's words, one by one."""
    member, element = at(members, start, size)
    words = philox.drawn_at(philox.BITS, PLACE, member, element // 64)
    return ((words >> element % 64 & 1) * 2 - 1).float()


def expected_normals(members: range, start: int, size: int) -> Tensor:
    """Look normals up in the stream, one by one."""
    return philox.drawn_at(philox.NORMAL, PLACE, *at(members, start, size))


@pytest.mark.parametrize("members", FAR, ids=str)
@pytest.mark.parametrize(
    ("start", "size"), [(0, 700), (128, 1), (3, 130), (37, 33), (2**31 - 70, 200), (128 * 2**32 - 165, 165)]
)
def test_signs_are_those_of_the_stream(members: range, start: int, size: int) -> None:
    """Every bit of every word is the stream's: at any element, up to the last counter of 32 bits."""
    assert torch.equal(filled(members, start, size, signs=True), expected_signs(members, start, size))


@pytest.mark.parametrize("members", FAR, ids=str)
@pytest.mark.parametrize(
    ("start", "size"), [(0, 700), (4, 1), (3, 130), (6, 5), (2**32 - 70, 200), (4 * 2**32 - 165, 165)]
)
def test_normals_are_those_of_the_stream_but_for_rounding(members: range, start: int, size: int) -> None:
    """They differ from the stream's by a few roundings of float32, at any element up to the last."""
    found, expected = filled(members, start, size, signs=False), expected_normals(members, start, size)
    eps = torch.finfo(torch.float32).eps
    assert ((found - expected).abs() <= 8 * eps * expected.abs().clamp_min(1)).all()


def test_normals_are_right_in_the_tails_and_in_the_middle() -> None:
    """Among many normals no logarithm, sine or cosine is off where its argument is at an end."""
    found, expected = (
        filled(range(8), 0, 40_000, signs=False),
        expected_normals(range(8), 0, 40_000),
    )
    eps, error = torch.finfo(torch.float32).eps, (found - expected).abs()
    assert (error <= 8 * eps * expected.abs().clamp_min(1)).all()
    assert float(error.square().mean().sqrt()) < eps
    assert float(expected.abs().max()) > 4
    assert float(expected.abs().min()) < 1e-4


@pytest.mark.parametrize("signs", [False, True])
def test_a_number_is_the_same_wherever_drawing_begins(signs: bool) -> None:
    """Bits depend neither on the range of elements nor on that of members, nor on where a call begins."""
    whole = filled(range(4, 14), 0, 900, signs=signs)
    for start, stop in ((0, 128), (128, 900), (1, 300), (66, 67), (259, 513)):
        part = filled(range(6, 9), start, stop - start, signs=signs)
        assert torch.equal(part, whole[2:5, start:stop])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_values_are_rounded_to_their_type(dtype: torch.dtype) -> None:
    """A narrow type has the float32 values rounded, as the stream does; a wide one has them as they are."""
    found = filled(range(3), 0, 200, signs=False, dtype=dtype)
    assert torch.equal(found, filled(range(3), 0, 200, signs=False).to(dtype))


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"step": 1}, {"layer": "1.weight"}, {"draw": "down"}],
    ids=lambda change: next(iter(change)),
)
def test_other_names_draw_other_numbers(change: dict[str, int | str]) -> None:
    """Seed, step, layer and draw are told apart, and each place has its stream's signs."""
    names = {"seed": 3, "step": 5, "layer": "0.weight", "draw": "dense", **change}
    place = philox.Place.of(**names)  # type: ignore[arg-type]  # each has its type
    draw = names.pop("draw")
    stream = PhiloxStream(**names, members=range(3), device=torch.device("cpu"), dtype=torch.float32)  # type: ignore[arg-type]  # each has its type
    values = torch.empty(3, 256, device=DEVICE)
    found = fill(values, draw_of(range(3), place), signs=True).cpu()
    assert torch.equal(found, stream.signs(str(draw), 256))
    assert not torch.equal(found, filled(range(3), 0, 256, signs=True))


@pytest.mark.parametrize("members", [range(0, 4, 2), range(-1, 1), range(2**32 - 1, 2**32 + 1)])
def test_members_without_a_counter_are_refused(members: range) -> None:
    """A member that has no counter of 32 bits raises: it would repeat another."""
    with pytest.raises(ValueError, match="members must be"):
        fill(torch.empty(2, 4), draw_of(members))


@pytest.mark.parametrize(("signs", "width"), [(False, 4), (True, 128)])
def test_elements_without_a_counter_are_refused(signs: bool, width: int) -> None:
    """A call that has no counter of 32 bits raises; the last that has one does not."""
    draw_of(range(2**20)).arguments(width * 2**32, width)
    with pytest.raises(ValueError, match="more calls than a counter"):
        fill(torch.empty(1, 2), draw_of(range(1)), width * 2**32 - 1, signs=signs)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 4, 1)])
def test_values_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    """Values are one row for each member."""
    with pytest.raises(ValueError, match="values must be"):
        fill(torch.empty(shape), draw_of(range(2)))
