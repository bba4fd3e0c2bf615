"""Several shared cores: which member has which, in one product, in any part of a population."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import WrongResultError
from impls.perturbation.member_ops import apply_cores, group_by_core, member_cores, same_core_fraction
from impls.perturbation.noise import BLOCK
from impls.perturbation.operators import AbstractOperator, Conv2d, Linear
from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.schemes import Flipped, FlippedSign, Hadamard, Permuted
from impls.schemes.flipped import FlippedNoise
from impls.schemes.permuted import PermutedNoise
from impls.verify.checks import Setting, check_split
from tests.shared_core_cases import check_sums

SCHEMES: list[Callable[[int], AnyScheme]] = [
    lambda cores: Flipped("in", cores=cores),
    lambda cores: Flipped("both", cores=cores),
    lambda cores: FlippedSign(cores=cores),
    lambda cores: Permuted(in_sparsity=0.5, cores=cores),
    lambda cores: Permuted("out", out_sparsity=0.5, replace=True, cores=cores),
    lambda cores: Permuted("both", cores=cores),
    lambda cores: Hadamard(cores=cores),
]

OPERATORS = [
    (Linear(), (1, 3, 4), (4,)),
    (Conv2d(padding=1, groups=2), (2, 3, 2, 3, 3), (2, 5, 4)),
]


@settings(max_examples=40, deadline=None)
@given(
    start=st.integers(0, 600),
    total=st.integers(1, 12),
    count=st.integers(1, 7),
    repeats=st.integers(1, 2),
    which=st.sampled_from(OPERATORS),
)
def test_each_member_meets_its_own_core(
    start: int,
    total: int,
    count: int,
    repeats: int,
    which: tuple[AbstractOperator, tuple[int, ...], tuple[int, ...]],
) -> None:
    """In any part of a population, member j is multiplied by core j modulo their number."""
    op, shape, features = which
    generator = torch.Generator().manual_seed(start)
    cores = torch.randn(count, *shape, generator=generator).double()
    x = torch.randn(repeats, total, shape[0], *features, generator=generator).double()
    members = range(start, start + total)
    expected = torch.cat(
        [op.apply_shared(x[:, j : j + 1], cores[m % count]) for j, m in enumerate(members)], dim=1
    )
    torch.testing.assert_close(apply_cores(op, x, cores, members), expected)
    assert torch.equal(member_cores(cores, members), torch.stack([cores[m % count] for m in members]))


@given(start=st.integers(0, 600), total=st.integers(1, 20), count=st.integers(1, 9))
def test_values_laid_out_by_core_are_those_of_its_members(start: int, total: int, count: int) -> None:
    """A core's row holds the values of its members in their order, and zeros besides."""
    values = torch.arange(1, total + 1)
    rows = group_by_core(values, count, range(start, start + total))
    for core in range(count):
        own = [j + 1 for j in range(total) if (start + j) % count == core]
        assert [int(value) for value in rows[core] if value] == own


@given(members=st.integers(2, 40), cores=st.integers(1, 50))
def test_the_share_of_pairs_with_one_core_is_counted(members: int, cores: int) -> None:
    """It is the number of such pairs over the number of all: 1 for one core, 0 where all have their own."""
    pairs = [(a, b) for a in range(members) for b in range(members) if a != b]
    same = sum(a % cores == b % cores for a, b in pairs)
    assert same_core_fraction(members, cores) == pytest.approx(same / len(pairs))
    assert same_core_fraction(10**6, cores) == pytest.approx(1 / cores, rel=1e-3)


@pytest.mark.parametrize("make", SCHEMES, ids=lambda make: type(make(1)).__name__)
def test_any_number_of_cores_and_members_is_exact(make: Callable[[int], AnyScheme]) -> None:
    """Cores that do not divide the members, more cores than members, one member: all equal the reference."""
    for cores, members in ((3, 7), (5, 3), (4, 1), (2, 6)):
        check_sums(make(cores), members)


@pytest.mark.parametrize("make", SCHEMES, ids=lambda make: type(make(1)).__name__)
def test_parts_of_a_population_have_the_cores_of_the_whole(make: Callable[[int], AnyScheme]) -> None:
    """Cores that do not divide a block: a part has the same noise, outputs and share of the update."""
    check_split(Setting(make(3), nn.Linear(5, 4).double(), (5,)))


def test_members_take_cores_in_turn() -> None:
    """Members whose places differ by the number of cores share one, neighbours do not."""
    population = perturb(nn.Linear(8, 8, bias=False), Flipped("in", cores=3), members=BLOCK + 6, sigma=1.0)
    part = population.sample(0, range(BLOCK, BLOCK + 6))
    size = population.dense_noise(part)["weight"].abs()
    assert torch.equal(size[0], size[3])
    assert not torch.equal(size[0], size[1])
    whole = population.dense_noise(population.sample(0))["weight"].abs()
    assert torch.equal(whole[BLOCK % 3], size[0])


def test_an_invalid_number_of_cores_is_refused() -> None:
    """Only ints of at least 1 are; the message has the value."""
    invalid: list[Any] = [0, -1, True, 2.0, "2"]
    for cores, make in product(invalid, SCHEMES):
        with pytest.raises(ValueError, match=f"cores must be an int of at least 1, got {cores!r}"):
            make(cores)


class ShiftedFlips(Flipped):
    """Cores counted from another member in the update than in the forward."""

    @override
    def weighted_sum(self, noise: FlippedNoise, utilities: Tensor) -> Tensor:
        start = noise.members.start + 1
        return super().weighted_sum(
            replace(noise, members=range(start, start + len(noise.members))), utilities
        )


class ForgottenStart(Flipped):
    """A part of the population that counts its cores from its own first member."""

    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        return super().correction(op, replace(noise, members=range(len(noise.members))), x)


class ShiftedPicks(Permuted):
    """Picks summed for the wrong core."""

    @override
    def weighted_sum(self, noise: PermutedNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(replace(noise, core=noise.core.roll(1, 0)), utilities)


@pytest.mark.parametrize(
    "scheme", [ShiftedFlips("both", cores=2), ShiftedFlips("in", cores=3), ShiftedPicks(cores=2)]
)
def test_an_update_with_the_cores_of_others_is_found(scheme: AnyScheme) -> None:
    """The group of members that a core belongs to, mixed up between forward and update."""
    with pytest.raises(WrongResultError, match="update of weight"):
        check_sums(scheme)


def test_cores_counted_from_a_parts_own_start_are_found() -> None:
    """The check of splits finds it where the count does not divide a block."""
    with pytest.raises(WrongResultError, match="forward in parts"):
        check_split(Setting(ForgottenStart("in", cores=3), nn.Linear(5, 4).double(), (5,)))
