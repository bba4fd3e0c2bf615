"""Regenerated noise and noise tables: dense noise that is written out piece by piece."""

import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from impls.perturbation import noise as streams
from impls.perturbation.noise import BLOCK, STREAMS, NoiseStream
from impls.perturbation.operators import AbstractOperator, Conv2d, Linear
from impls.perturbation.population import perturb
from impls.quality.kappa import kappa, moments
from impls.schemes import NoiseTable, Perturbed, Regenerated, RegeneratedSign
from impls.schemes.noise_table import TableNoise
from impls.schemes.regenerated import AbstractRegenerated, StreamNoise
from tests.schemes.cases import closed, seeded

EVERY_STREAM = pytest.mark.parametrize("stream", STREAMS)
BOTH = pytest.mark.parametrize("scheme", [Regenerated(), RegeneratedSign()], ids=str)
OPERATORS: list[tuple[AbstractOperator, tuple[int, ...], tuple[int, ...]]] = [
    (Linear(), (1, 5, 6), ()),
    (Conv2d(groups=2), (2, 3, 2, 3, 1), (5, 4)),
]


def stream_of(name: str, members: range, *, step: int = 0) -> NoiseStream:
    """Make a stream on the CPU."""
    return STREAMS[name](0, step, "layer", members, torch.device("cpu"), torch.float32)


@EVERY_STREAM
def test_regenerated_noise_has_the_bits_of_stored_noise(stream: str) -> None:
    """Every member's E_m is the one that Perturbed stores, bit for bit."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6, 5))
    stored, redrawn = (
        perturb(model, scheme, members=9, sigma=0.1, antithetic=True, seed=3, stream=stream)
        for scheme in (Perturbed(), Regenerated())
    )
    noise, again = stored.sample(7), redrawn.sample(7)
    for name, values in stored.dense_noise(noise).items():
        assert torch.equal(redrawn.dense_noise(again)[name], values)
        assert torch.equal(redrawn.perturbation(again, 4)[name], values[4])


@EVERY_STREAM
@pytest.mark.parametrize(("op", "shape", "space"), OPERATORS, ids=["linear", "convolution"])
def test_a_piece_is_computed_as_stored_noise_is(
    op: AbstractOperator,
    shape: tuple[int, ...],
    space: tuple[int, ...],
    stream: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of a piece, and the sum of a single piece, have the bits that stored noise gives."""
    weight, x = torch.zeros(shape), seeded(2, 7, shape[0], shape[2], *space).float()
    scale = torch.tensor([0.1, -0.1]).view(-1, *[1] * (x.dim() - 1))
    drawn = stream_of(stream, range(7))
    noise, stored = Regenerated().sample(weight, drawn), Perturbed().sample(weight, drawn)
    monkeypatch.setitem(streams.PIECE_BYTES, "cpu", 3 * weight.nbytes)
    pieces = list(Regenerated().pieces(noise, 7))
    assert len(pieces) == (3 if stream == "philox" else 1)
    for sigma in (0.1, scale):
        y = Regenerated().forward(op, weight, noise, x, sigma)
        for start, stop in pieces:
            part = Perturbed().forward(op, weight, stored.narrow(start, stop), x[:, start:stop], sigma)
            assert torch.equal(y[:, start:stop], part)
    utilities = seeded(7).float()
    monkeypatch.setitem(streams.PIECE_BYTES, "cpu", 7 * weight.nbytes)
    found = Regenerated().weighted_sum(noise, utilities)
    assert torch.equal(found, Perturbed().weighted_sum(stored, utilities))


@EVERY_STREAM
@BOTH
def test_any_range_of_members_can_be_drawn_again(scheme: AbstractRegenerated, stream: str) -> None:
    """Narrowed noise, also across a block's end, is that of its members; none of it is stored."""
    noise = scheme.sample(torch.zeros(1, 2, 3), stream_of(stream, range(BLOCK + 5)))
    whole = scheme.dense_noise(noise)
    for start, stop in ((0, 1), (BLOCK - 2, BLOCK + 3), (7, 9)):
        assert torch.equal(scheme.dense_noise(noise.narrow(start, stop)), whole[start:stop])
    # The bias has dense noise.
    population = perturb(nn.Linear(1024, 1024), scheme, members=2**20, sigma=0.1, stream=stream)
    assert population.noise_bytes == 4 * 2**30


def test_one_piece_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of noise is freed before the next one is drawn, in the forward and in the update."""
    drawn: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    @dataclass(frozen=True)
    class Watched(Regenerated):
        @override
        def dense_noise(self, noise: StreamNoise) -> Tensor:
            alive.append(sum(piece() is not None for piece in drawn))
            values = super().dense_noise(noise)
            drawn.append(weakref.ref(values))
            return values

    weight = torch.zeros(1, 8, 8)
    monkeypatch.setitem(streams.PIECE_BYTES, "cpu", 2 * weight.nbytes)
    scheme = Watched()
    noise = scheme.sample(weight, stream_of("philox", range(9)))
    scheme.forward(Linear(), weight, noise, torch.ones(1, 9, 1, 8), 0.1)
    scheme.weighted_sum(noise, torch.ones(9))
    assert len(alive) == 1 + 2 * 5
    assert set(alive) == {0}


@BOTH
def test_large_populations_and_weights(scheme: AbstractRegenerated) -> None:
    """Members 2^31 and 2^32 numbers apart differ; a weight beyond the counters is refused undrawn."""
    weight = torch.zeros(1, 64, 64)
    near, middle, far = (
        scheme.dense_noise(scheme.sample(weight, stream_of("philox", range(first, first + 2))))
        for first in (5, 5 + 2**19, 5 + 2**20)
    )
    assert not torch.equal(near, middle)
    assert not torch.equal(near, far)
    assert not torch.equal(middle, far)
    shape = (1, 2**18, 2**17) if isinstance(scheme, Regenerated) else (1, 2**20, 2**20)
    with pytest.raises(ValueError, match="is outside the counter range"):
        scheme.sample(torch.empty(shape, device="meta"), stream_of("philox", range(2)))


# The noise table.


def sampled(shape: tuple[int, ...], members: range, *, step: int = 0, ratio: int = 16) -> TableNoise:
    """Draw a table and slices of it."""
    return NoiseTable(ratio).sample(torch.zeros(shape), stream_of("block", members, step=step))


def test_a_perturbation_is_a_slice_of_the_table() -> None:
    """Member m's E_m is the table from its offset on, in the weight's shape; slices begin everywhere."""
    for shape in ((1, 6, 5), (2, 3, 2, 3, 3)):
        noise, size = sampled(shape, range(20)), torch.Size(shape).numel()
        assert noise.table.shape == (16 * size,)
        for offset, written in zip(noise.offsets.tolist(), NoiseTable().dense_noise(noise), strict=True):
            assert torch.equal(written, noise.table[offset : offset + size].view(shape))
    noise = sampled((1, 2, 2), range(2048), ratio=3)
    assert NoiseTable(3).offsets(noise.shape) == 9
    assert sorted(set(noise.offsets.tolist())) == list(range(9))


def test_tables_of_steps_and_parts() -> None:
    """Tables of two steps share no number, parts of one step share the table; a member takes eight bytes."""
    first, later = sampled((1, 8, 8), range(4)), sampled((1, 8, 8), range(4), step=1)
    assert not bool(torch.isin(first.table, later.table).any())
    assert torch.equal(first.table, sampled((1, 8, 8), range(256, 260)).table)
    assert first.nbytes == first.table.nbytes + 8 * 4
    # A forward reads the slices, or the whole table if they are more than that.
    weight = torch.zeros(1, 8, 8)
    few, many = sampled((1, 8, 8), range(3)), sampled((1, 8, 8), range(300))
    assert NoiseTable().read_bytes(weight, few) == weight.nbytes * (1 + 3) + 24
    assert NoiseTable().read_bytes(weight, many) == weight.nbytes * (1 + 16) + 2400


@pytest.mark.parametrize(("op", "shape", "space"), OPERATORS, ids=["linear", "convolution"])
def test_pieces_do_not_change_the_result(
    op: AbstractOperator,
    shape: tuple[int, ...],
    space: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For any number of slices copied at a time, outputs and update are those of all of them written out."""
    noise, weight, x = (
        sampled(shape, range(7)),
        seeded(*shape).float(),
        seeded(2, 7, shape[0], shape[2], *space),
    )
    scheme, utilities, x = NoiseTable(), seeded(7).float(), x.float()
    written = scheme.dense_noise(noise)
    expected = op.apply_per_member(x, weight + 0.1 * written)
    for most in (1, 3 * weight.nbytes, 2**23):
        monkeypatch.setitem(streams.PIECE_BYTES, "cpu", most)
        torch.testing.assert_close(scheme.forward(op, weight, noise, x, 0.1), expected)
        total = scheme.weighted_sum(noise, utilities)
        torch.testing.assert_close(total, torch.tensordot(utilities, written, dims=1))


@pytest.mark.parametrize("ratio", [2, 3, 16])
@pytest.mark.parametrize("shape", [(1, 8, 12), (2, 3, 4, 2, 2)], ids=["linear", "convolution"])
def test_kappa_is_the_weights_over_the_offsets(shape: tuple[int, ...], ratio: int) -> None:
    """What members share, measured over many tables, is the closed form within its standard error."""
    size, count = torch.Size(shape).numel(), 96
    tables = [sampled(shape, range(count), step=step, ratio=ratio) for step in range(60)]
    found = torch.tensor(
        [kappa(moments(NoiseTable(ratio).dense_noise(one).flatten(1)), size) for one in tables]
    )
    form = closed(NoiseTable(ratio), shape[1:] if len(shape) == 3 else shape, count)
    assert form == size / ((ratio - 1) * size + 1)
    error = float(found.std()) / len(found) ** 0.5
    assert abs(float(found.mean()) - form) < 4 * error
    # The table matters: independent members differ from these.
    assert float(found.mean()) > 4 * error


def test_a_table_of_the_narrowest_layer() -> None:
    """A weight of one number and a population of one member work."""
    scheme = NoiseTable(2)
    noise = sampled((1, 1, 1), range(1), ratio=2)
    y = scheme.forward(Linear(), torch.ones(1, 1, 1), noise, torch.ones(1, 1, 1, 1), 0.5)
    torch.testing.assert_close(y.flatten(), 1 + 0.5 * scheme.dense_noise(noise).flatten())
