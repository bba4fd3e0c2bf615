"""Regenerated noise has the bits of stored noise, drawn again at each use."""

import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import WrongResultError
from impls.perturbation.noise import BLOCK, STREAMS, NoiseStream
from impls.perturbation.operators import AbstractOperator, Conv2d, Linear
from impls.perturbation.population import Population, perturb
from impls.perturbation.scheme import AnyScheme
from impls.schemes import Perturbed, Regenerated, RegeneratedSign, regenerated
from impls.schemes.regenerated import AbstractRegenerated, StreamNoise
from impls.verify.checks import Setting, check

EVERY_STREAM = pytest.mark.parametrize("stream", STREAMS)
BOTH = pytest.mark.parametrize("scheme", [Regenerated(), RegeneratedSign()], ids=str)


def stream_of(name: str, members: range, *, step: int = 0, dtype: torch.dtype = torch.float32) -> NoiseStream:
    """Make a stream on the CPU."""
    return STREAMS[name](0, step, "layer", members, torch.device("cpu"), dtype)


def populations(model: nn.Module, stream: str) -> tuple[Population, Population]:
    """Make an antithetic population of each kind, alike in all else."""
    made = [
        perturb(model, scheme, members=9, sigma=0.1, antithetic=True, seed=3, stream=stream)
        for scheme in (Perturbed(), Regenerated())
    ]
    return made[0], made[1]


@EVERY_STREAM
def test_regenerated_noise_has_the_bits_of_stored_noise(stream: str) -> None:
    """Every member's E_m is the one that Perturbed stores, bit for bit."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6, 5))
    stored, redrawn = populations(model, stream)
    noise, again = stored.sample(7), redrawn.sample(7)
    for name, values in stored.dense_noise(noise).items():
        assert torch.equal(redrawn.dense_noise(again)[name], values)
        assert torch.equal(redrawn.perturbation(again, 4)[name], values[4])


@EVERY_STREAM
@pytest.mark.parametrize(
    ("op", "weight", "space"),
    [(Linear(), torch.zeros(1, 5, 6), ()), (Conv2d(groups=2), torch.zeros(2, 3, 2, 3, 3), (5, 4))],
    ids=["linear", "convolution"],
)
def test_a_piece_is_computed_as_stored_noise_is(
    op: AbstractOperator, weight: Tensor, space: tuple[int, ...], stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a piece, and the sum of a single piece, have the bits that stored noise gives."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, weight.shape[0], weight.shape[2], *space, generator=generator)
    scale = torch.tensor([0.1, -0.1]).view(-1, *[1] * (x.dim() - 1))
    drawn = stream_of(stream, range(7))
    noise, stored = Regenerated().sample(weight, drawn), Perturbed().sample(weight, drawn)
    monkeypatch.setitem(regenerated.PIECE_BYTES, "cpu", 3 * weight.nbytes)
    pieces = list(drawn.pieces(weight.nbytes, 3 * weight.nbytes))
    assert len(pieces) == (3 if stream == "philox" else 1)
    for sigma in (0.1, scale):
        y = Regenerated().forward(op, weight, noise, x, sigma)
        for start, stop in pieces:
            part = Perturbed().forward(op, weight, stored.narrow(start, stop), x[:, start:stop], sigma)
            assert torch.equal(y[:, start:stop], part)
    utilities = torch.randn(7, generator=generator)
    monkeypatch.setitem(regenerated.PIECE_BYTES, "cpu", 7 * weight.nbytes)
    assert torch.equal(
        Regenerated().weighted_sum(noise, utilities), Perturbed().weighted_sum(stored, utilities)
    )


@EVERY_STREAM
@BOTH
def test_any_range_of_members_can_be_drawn_again(scheme: AbstractRegenerated, stream: str) -> None:
    """Narrowed noise, also across a block's end, is that of its members."""
    noise = scheme.sample(torch.zeros(1, 2, 3), stream_of(stream, range(BLOCK + 5)))
    whole = scheme.dense_noise(noise)
    for start, stop in ((0, 1), (BLOCK - 2, BLOCK + 3), (7, 9)):
        assert torch.equal(scheme.dense_noise(noise.narrow(start, stop)), whole[start:stop])


@BOTH
def test_noise_takes_no_memory(scheme: AnyScheme) -> None:
    """A population of a million members of a layer holds nothing but the noise of its bias."""
    layer = nn.Linear(1024, 1024)
    assert perturb(layer, scheme, members=2**20, sigma=0.1).noise_bytes == 4 * 2**30
    assert perturb(layer, scheme, members=2**20, sigma=0.1, stream="philox").noise_bytes == 4 * 2**30


def test_one_piece_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of noise is gone before the next one is drawn, in the forward and in the update."""
    drawn: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    @dataclass(frozen=True)
    class Watched(Regenerated):
        @override
        def draw(self, noise: StreamNoise) -> Tensor:
            alive.append(sum(piece() is not None for piece in drawn))
            values = super().draw(noise)
            drawn.append(weakref.ref(values))
            return values

    weight = torch.zeros(1, 8, 8)
    monkeypatch.setitem(regenerated.PIECE_BYTES, "cpu", 2 * weight.nbytes)
    scheme = Watched()
    noise = scheme.sample(weight, stream_of("philox", range(9)))
    scheme.forward(Linear(), weight, noise, torch.ones(1, 9, 1, 8), 0.1)
    scheme.weighted_sum(noise, torch.ones(9))
    assert len(alive) == 1 + 2 * 5
    assert set(alive) == {0}


def test_many_pieces_lose_no_digits_of_a_narrow_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 an update of 512 pieces is about as near to the truth as stored noise's one product."""
    weight, count = torch.zeros(1, 8, 8, dtype=torch.bfloat16), 512
    drawn = stream_of("philox", range(count), dtype=torch.bfloat16)
    stored, noise = Perturbed().sample(weight, drawn), Regenerated().sample(weight, drawn)
    utilities = torch.randn(count, generator=torch.Generator().manual_seed(0)).bfloat16()
    truth = torch.tensordot(utilities.double(), stored.values.double(), dims=1)
    monkeypatch.setitem(regenerated.PIECE_BYTES, "cpu", 1)
    error = (Regenerated().weighted_sum(noise, utilities).double() - truth).norm()
    assert float(error) < 2 * float((Perturbed().weighted_sum(stored, utilities).double() - truth).norm())


@BOTH
def test_members_of_a_population_above_two_to_the_31_numbers_differ(scheme: AbstractRegenerated) -> None:
    """Members far apart, 2^31 and 2^32 numbers of noise, have noise of their own."""
    weight = torch.zeros(1, 64, 64)
    near, middle, far = (
        scheme.dense_noise(scheme.sample(weight, stream_of("philox", range(first, first + 2))))
        for first in (5, 5 + 2**19, 5 + 2**20)
    )
    assert not torch.equal(near, middle)
    assert not torch.equal(near, far)
    assert not torch.equal(middle, far)


def test_a_weight_beyond_the_counters_is_refused_when_it_is_sampled() -> None:
    """Nothing is drawn to find out that a weight has more numbers than a member has counters."""
    weight = torch.empty(1, 2**18, 2**17, device="meta")
    with pytest.raises(ValueError, match="has no counter"):
        Regenerated().sample(weight, stream_of("philox", range(2)))


@dataclass(frozen=True)
class OtherDraw(Regenerated):
    """The update draws noise that the forward did not."""

    @override
    def weighted_sum(self, noise: StreamNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(
            replace(noise, stream=replace(noise.stream, step=noise.stream.step + 1)), utilities
        )


@dataclass(frozen=True)
class PieceByPosition(Regenerated):
    """A piece draws the noise of the first members, wherever it is."""

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: StreamNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        first = replace(noise, stream=replace(noise.stream, members=range(len(noise.stream.members))))
        return super().forward(op, weight, first, x, sigma)


@dataclass(frozen=True)
class FromTheGlobalGenerator(Regenerated):
    """Noise that torch's global generator draws."""

    @override
    def draw(self, noise: StreamNoise) -> Tensor:
        values = super().draw(noise)
        return values if values.is_meta else torch.randn_like(values)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (OtherDraw(), "update"),
        (PieceByPosition(), "in parts"),
        (FromTheGlobalGenerator(), "off|global|different"),
    ],
    ids=lambda value: type(value).__name__,
)
@EVERY_STREAM
def test_noise_that_is_drawn_differently_is_found(scheme: AnyScheme, words: str, stream: str) -> None:
    """Noise that is not the same wherever it is read is found, whatever the stream."""
    torch.manual_seed(0)
    with torch.random.fork_rng(), pytest.raises(WrongResultError, match=words):
        check(Setting(scheme, nn.Linear(6, 5).double(), (6,), stream=stream))
