"""Noise table: slices of one table that is drawn again at every step, and their kappa."""

import pytest
import torch
from torch import Tensor

from impls.perturbation.noise import STREAMS, NoiseStream
from impls.perturbation.operators import AbstractOperator, Conv2d, Linear
from impls.quality import kappa
from impls.quality.kappa import moments
from impls.schemes import NoiseTable, noise_table
from impls.schemes.noise_table import TableNoise

SHAPES = {"linear": (1, 6, 5), "convolution": (2, 3, 2, 3, 3)}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def stream_of(members: range, *, step: int = 0, name: str = "block") -> NoiseStream:
    """Make a stream on the CPU."""
    return STREAMS[name](0, step, "layer", members, torch.device("cpu"), torch.float32)


def sampled(shape: tuple[int, ...], members: range, *, step: int = 0, ratio: int = 16) -> TableNoise:
    """Draw a table and slices of it."""
    return NoiseTable(ratio).sample(torch.zeros(shape), stream_of(members, step=step))


@EVERY_SHAPE
def test_a_perturbation_is_a_slice_of_the_table(shape: tuple[int, ...]) -> None:
    """Member m's E_m is the table from its offset on, in the weight's shape."""
    noise, size = sampled(shape, range(20)), torch.Size(shape).numel()
    assert noise.table.shape == (16 * size,)
    for offset, written in zip(noise.offsets.tolist(), NoiseTable().dense_noise(noise), strict=True):
        assert torch.equal(written, noise.table[offset : offset + size].view(shape))


def test_slices_begin_everywhere_in_the_table() -> None:
    """The first place and the last that has room for a slice are drawn, and none beyond it."""
    noise = sampled((1, 2, 2), range(2048), ratio=3)
    assert NoiseTable(3).offsets(noise.shape) == 9
    assert sorted(set(noise.offsets.tolist())) == list(range(9))


def test_a_member_takes_eight_bytes() -> None:
    """Beside the shared table a member holds its offset and nothing else."""
    few, many = sampled((1, 8, 8), range(10)), sampled((1, 8, 8), range(110))
    assert many.nbytes - few.nbytes == 8 * 100
    assert few.nbytes == few.table.nbytes + 80


def test_every_step_has_a_table_of_its_own() -> None:
    """Tables of two steps share no number, so that steps are not correlated; parts of one step share it."""
    first, later = sampled((1, 8, 8), range(4)), sampled((1, 8, 8), range(4), step=1)
    assert not bool(torch.isin(first.table, later.table).any())
    assert torch.equal(first.table, sampled((1, 8, 8), range(256, 260)).table)


@pytest.mark.parametrize("most", [1, 3 * 4 * 36, 2**23])
@pytest.mark.parametrize(
    ("op", "shape", "space"),
    [(Linear(), (1, 6, 6), ()), (Conv2d(groups=2), (2, 3, 2, 3, 1), (5, 4))],
    ids=["linear", "convolution"],
)
def test_pieces_do_not_change_the_result(
    op: AbstractOperator,
    shape: tuple[int, ...],
    space: tuple[int, ...],
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However few slices are copied at a time, outputs and update are those of all of them written out."""
    monkeypatch.setitem(noise_table.PIECE_BYTES, "cpu", most)
    generator, scheme, noise = torch.Generator().manual_seed(0), NoiseTable(), sampled(shape, range(7))
    weight = torch.randn(shape, generator=generator)
    x = torch.randn(2, 7, shape[0], shape[2], *space, generator=generator)
    written = scheme.dense_noise(noise)
    expected = op.apply_per_member(x, weight + 0.1 * written)
    torch.testing.assert_close(scheme.forward(op, weight, noise, x, 0.1), expected)
    utilities = torch.randn(7, generator=generator)
    total = torch.tensordot(utilities, written, dims=1)
    torch.testing.assert_close(scheme.weighted_sum(noise, utilities), total)


def test_many_pieces_lose_no_digits_of_a_narrow_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 an update of 512 pieces is about as near to the truth as one of a single piece."""
    weight, scheme = torch.zeros(1, 8, 8, dtype=torch.bfloat16), NoiseTable()
    noise = scheme.sample(weight, stream_of(range(512)))
    noise = TableNoise(noise.table.bfloat16(), noise.offsets, noise.shape)
    utilities = torch.randn(512, generator=torch.Generator().manual_seed(0)).bfloat16()
    truth = torch.tensordot(utilities.double(), scheme.dense_noise(noise).double(), dims=1)

    def error() -> float:
        total = scheme.weighted_sum(noise, utilities)
        assert total.dtype is torch.bfloat16
        return float((total.double() - truth).norm())

    whole = error()
    monkeypatch.setitem(noise_table.PIECE_BYTES, "cpu", 1)
    assert error() < 2 * whole


@pytest.mark.parametrize("ratio", [2, 3, 16])
@pytest.mark.parametrize("shape", [(1, 8, 12), (2, 3, 4, 2, 2)], ids=["linear", "convolution"])
def test_kappa_is_the_weights_over_the_offsets(shape: tuple[int, ...], ratio: int) -> None:
    """What members share, measured over many tables, is the closed form within its standard error."""
    size, count = torch.Size(shape).numel(), 96
    fitted = torch.tensor([kappa_of(shape, ratio, step, count) for step in range(60)])
    form = NoiseTable(ratio).kappa(torch.Size(shape), count)
    assert form == size / ((ratio - 1) * size + 1)
    assert abs(float(fitted.mean()) - form) < 4 * float(fitted.std()) / len(fitted) ** 0.5
    # The table matters: independent members are told apart from these.
    assert float(fitted.mean()) > 4 * float(fitted.std()) / len(fitted) ** 0.5


def kappa_of(shape: tuple[int, ...], ratio: int, step: int, count: int) -> float:
    """Estimate kappa from the members of one step."""
    written: Tensor = NoiseTable(ratio).dense_noise(sampled(shape, range(count), step=step, ratio=ratio))
    return kappa.kappa(moments(written.flatten(1)), torch.Size(shape).numel())


def test_the_table_is_read_once_at_most() -> None:
    """What a forward cannot do without is the slices, and the whole table where they are more than that."""
    weight = torch.zeros(1, 8, 8)
    few, many = sampled((1, 8, 8), range(3)), sampled((1, 8, 8), range(300))
    assert NoiseTable().read_bytes(weight, few) == weight.nbytes * (1 + 3) + 24
    assert NoiseTable().read_bytes(weight, many) == weight.nbytes * (1 + 16) + 2400


@pytest.mark.parametrize("ratio", [1, 0, -3, True, 2.5, "16"])
def test_a_table_without_room_is_refused(ratio: int) -> None:
    """A ratio is an integer of at least 2: with one slice all members would have the same noise."""
    with pytest.raises(ValueError, match="ratio must be an int of at least 2"):
        NoiseTable(ratio)


def test_a_weight_of_one_number_has_a_table_too() -> None:
    """The narrowest layer, and a population of one member, work."""
    noise = sampled((1, 1, 1), range(1), ratio=2)
    y = NoiseTable(2).forward(Linear(), torch.ones(1, 1, 1), noise, torch.ones(1, 1, 1, 1), 0.5)
    torch.testing.assert_close(y.flatten(), 1 + 0.5 * NoiseTable(2).dense_noise(noise).flatten())
