"""Low-rank noise: what members share, what is stored, and what is never written out."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import WrongResultError
from impls import BLOCK, LowRank, LowRankSign, Orthogonal, perturb
from impls.perturbation.noise import NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import AnyScheme
from impls.schemes.lowrank import FEW, AbstractLowRank, Factors, RedrawnFactors
from impls.verify.checks import Setting, check
from impls.verify.reference import check_forward, check_update, compare, updated
from tests.gradient_cases import Largest, fitted_kappa

STORED: dict[str, AbstractLowRank] = {
    "normal": LowRank(2),
    "signs": LowRankSign(),
    "orthogonal": Orthogonal(2),
}
AGAIN: dict[str, AbstractLowRank] = {
    "normal": LowRank(2, regenerated=True),
    "signs": LowRankSign(regenerated=True),
    "orthogonal": Orthogonal(2, regenerated=True),
}
each_kind = pytest.mark.parametrize("kind", STORED)


def seeded(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Fill a module's parameters with the same numbers every time."""
    generator = torch.Generator().manual_seed(0)
    module.to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def rows(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Make rows, the same ones every time."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("scheme", "loss"),
    [(LowRank(1), 1), (LowRank(4), 1), (LowRankSign(), 0), (LowRankSign(3), 0)],
    ids=["one", "four", "sign", "three signs"],
)
def test_kappa_is_what_a_simulated_linear_fitness_shows(scheme: AbstractLowRank, loss: int) -> None:
    """Members are independent, on Linear and a grouped convolution; normals have tails, signs have none."""
    cases: list[tuple[tuple[int, ...], int]] = [((1, 6, 8), 24), ((2, 4, 3, 2, 2), 160)]
    for shape, members in cases:
        _, outputs, *inner = shape
        tails = 2 * (loss * (outputs + math.prod(inner) + 2) + scheme.rank - 1) / scheme.rank
        fitted, error = fitted_kappa(scheme, shape, members, tails)
        assert scheme.kappa(torch.Size(shape), members) == 0
        assert abs(fitted) < 4 * error, shape


@each_kind
@pytest.mark.parametrize("stream", ["block", "philox"])
def test_drawing_again_gives_the_bits_of_what_is_stored(kind: str, stream: str) -> None:
    """Noise, outputs and updates of both forms are equal, over several blocks and with any stream."""
    members, model = 2 * BLOCK + 3, seeded(nn.Linear(5, 4))
    x, utilities = rows(members, 5), rows(members)
    whole, again = (
        perturb(model, scheme, members=members, sigma=0.1, stream=stream)
        for scheme in (STORED[kind], AGAIN[kind])
    )
    kept, redrawn = whole.sample(3), again.sample(3)
    assert redrawn.layers[""].weight.nbytes == 0
    bits, same = whole.dense_noise(kept), again.dense_noise(redrawn)
    assert all(torch.equal(bits[name], same[name]) for name in bits)
    assert torch.equal(whole(x, kept), again(x, redrawn))
    expected, got = updated(whole, kept, utilities), updated(again, redrawn, utilities)
    compare("update", got["weight"], expected["weight"], expected["weight"])


@each_kind
def test_a_part_of_a_population_draws_again_as_the_whole_does(kind: str) -> None:
    """A part that starts and ends inside blocks has the bits of the whole, also when its noise is cut."""
    population = perturb(seeded(nn.Linear(5, 4)), AGAIN[kind], members=BLOCK + 40, sigma=0.1, stream="philox")
    whole = population.dense_noise(population.sample(0))["weight"]
    part = population.sample(0, range(30, BLOCK + 7))
    assert torch.equal(population.dense_noise(part)["weight"], whole[30 : BLOCK + 7])
    inner = population.dense_noise(population.sample(0), 100, 120)["weight"]
    assert torch.equal(inner, whole[100:120])


@pytest.mark.parametrize("members", [1, BLOCK + 3])
@each_kind
def test_what_is_drawn_again_is_right(kind: str, members: int) -> None:
    """Forward and update of regenerated noise are those of the members' own weights."""
    population = perturb(seeded(nn.Conv2d(4, 6, 2, groups=2)), AGAIN[kind], members=members, sigma=0.1)
    witnesses = sorted({0, members - 1})
    x = rows(members, 4, 4, 3)
    check_forward(population, x, witnesses)
    check_update(population, x, witnesses)


MANY = 256
WIDTH = 48


def largest(scheme: AnyScheme) -> int:
    """Return the size of the largest tensor in a draw, a forward and an update of square layers."""
    population = perturb(nn.Linear(WIDTH, WIDTH), scheme, members=MANY, sigma=0.1)
    with Largest() as seen:
        noise = population.sample(0)
        population(torch.ones(MANY, WIDTH), noise)
        population.update(noise, torch.ones(MANY))
    return seen.numel


@pytest.mark.parametrize(
    "scheme",
    [LowRank(1), LowRank(4), LowRank(FEW + 1), LowRank(1, regenerated=True), LowRankSign(), Orthogonal(2)],
    ids=str,
)
def test_no_tensor_has_a_number_for_each_member_and_weight(scheme: AbstractLowRank) -> None:
    """The largest tensor of draw, forward and update has a factor's numbers, or twice as many in a stream."""
    assert largest(scheme) <= 2 * MANY * WIDTH * scheme.rank


@dataclass(frozen=True)
class WrittenOut(LowRank):
    """Low-rank noise that is materialised, as found in the wild."""

    @override
    def weighted_sum(self, noise: Factors | RedrawnFactors, utilities: Tensor) -> Tensor:
        return torch.tensordot(utilities, self.dense_noise(noise), dims=1)


def test_noise_that_is_written_out_would_be_seen() -> None:
    """A scheme that multiplies its factors out before it sums makes a tensor of all members' weights."""
    assert largest(WrittenOut(1)) == MANY * WIDTH * WIDTH


@pytest.mark.parametrize("rank", [FEW, FEW + 1])
@pytest.mark.parametrize(
    ("module", "features"),
    [(nn.Linear(3, 2), (3,)), (nn.Linear(3, 2), (4, 3)), (nn.Conv2d(4, 6, (2, 3), 2, groups=2), (4, 5, 6))],
    ids=["rows", "tokens", "images"],
)
def test_few_and_many_ranks_agree_with_the_members_weights(
    rank: int, module: nn.Module, features: tuple[int, ...]
) -> None:
    """One pass for each rank and one product for all of them are both right, for ranks above a width too."""
    population = perturb(seeded(module), LowRank(rank), members=3, sigma=0.1, antithetic=True)
    x = rows(12, *features)
    check_forward(population, x, range(3))
    check_update(population, x, range(3))


@pytest.mark.parametrize("rank", [1, FEW + 1])
def test_any_layout_of_memory_is_right(rank: int) -> None:
    """Images with their channels last have the outputs of those with their channels first."""
    population = perturb(seeded(nn.Conv2d(4, 6, 2, groups=2)), LowRank(rank), members=5, sigma=0.1)
    x, noise = rows(10, 4, 5, 3), population.sample(0)
    last = population(x.to(memory_format=torch.channels_last), noise)
    torch.testing.assert_close(last, population(x, noise))


def test_signs_make_every_entry_a_sign() -> None:
    """At rank one a perturbation of sign factors is a matrix of signs, of either kind."""
    population = perturb(seeded(nn.Linear(6, 5)), LowRankSign(), members=8, sigma=0.1)
    entries = population.dense_noise(population.sample(0))["weight"]
    assert set(entries.unique().tolist()) == {-1.0, 1.0}


def test_stored_factors_take_their_own_size_and_no_more() -> None:
    """Rank times (outputs + inputs) numbers for each member."""
    population = perturb(nn.Linear(6, 5, bias=False), LowRank(3), members=7, sigma=0.1)
    assert population.sample(0).nbytes == 7 * 3 * (6 + 5) * 4


@pytest.mark.parametrize("kind", [LowRank, LowRankSign, Orthogonal])
def test_an_invalid_rank_is_refused(kind: type) -> None:
    """The message has the value."""
    for rank in (0, -1, True, 1.0, "1"):
        with pytest.raises(ValueError, match=f"rank must be an int of at least 1, got {rank!r}"):
            kind(rank)


@dataclass(frozen=True)
class SquaredUtilities(LowRank):
    """Utilities enter with each of the two factors."""

    @override
    def weighted_sum(self, noise: Factors | RedrawnFactors, utilities: Tensor) -> Tensor:
        return super().weighted_sum(noise, utilities * utilities.abs())


@dataclass(frozen=True)
class WrongPairs(LowRank):
    """The update pairs a member's factor with its neighbour's."""

    @override
    def weighted_sum(self, noise: Factors | RedrawnFactors, utilities: Tensor) -> Tensor:
        assert isinstance(noise, Factors)
        return super().weighted_sum(Factors(noise.down, noise.up.roll(1, 0)), utilities)


@dataclass(frozen=True)
class WrongRanks(LowRank):
    """The forward pairs the first factor of one side with the last of the other."""

    @override
    def forward(
        self,
        op: AbstractOperator,
        weight: Tensor,
        noise: Factors | RedrawnFactors,
        x: Tensor,
        sigma: float | Tensor,
    ) -> Tensor:
        assert isinstance(noise, Factors)
        return super().forward(op, weight, Factors(noise.down, noise.up.flip(2)), x, sigma)


@dataclass(frozen=True)
class MissingScale(LowRank):
    """Factors without 1 / sqrt(rank): the noise is stronger than it says."""

    @override
    def factors(self, weight: torch.Size, stream: NoiseStream) -> Factors:
        drawn = super().factors(weight, stream)
        return Factors(drawn.down, drawn.up * math.sqrt(self.rank))


@dataclass(frozen=True)
class OtherDraw(LowRank):
    """Every reading of regenerated factors draws others."""

    @override
    def _pieces(self, noise: Factors | RedrawnFactors) -> Iterator[tuple[slice, Factors]]:
        for members, factors in super()._pieces(noise):
            counter.append(members)
            yield members, Factors(factors.down, factors.up.roll(len(counter), -1))


counter: list[slice] = []

BUGS: dict[str, tuple[AnyScheme, str]] = {
    "squared utilities": (SquaredUtilities(1), "update"),
    "factors of other members": (WrongPairs(1), "update"),
    "factors of other ranks": (WrongRanks(2), "forward"),
    "a missing scale": (MissingScale(2), "variance"),
    "other factors every time": (OtherDraw(1, regenerated=True), "forward|different noise"),
}


@pytest.mark.parametrize("name", BUGS)
def test_the_oracle_finds_a_planted_bug(name: str) -> None:
    """A low-rank scheme with a mistake is refused, with words about what is wrong."""
    scheme, words = BUGS[name]
    with pytest.raises(WrongResultError, match=words):
        check(Setting(scheme, seeded(nn.Linear(6, 5)), (6,)))
