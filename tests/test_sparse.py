"""Sparse noise: which columns members have, what is in them, and what they share."""

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import WrongResultError
from impls import BLOCK, SparsePerturbed, perturb
from impls.perturbation.noise import BlockStream, NoiseStream
from impls.schemes.sparse import FEW, SparseNoise
from impls.verify.checks import Setting, check
from impls.verify.reference import check_forward, check_update
from tests.gradient_cases import Largest, fitted_kappa

VALUES: tuple[Literal["normal", "sign"], ...] = ("normal", "sign")


def drawn(scheme: SparsePerturbed, shape: tuple[int, ...], members: int) -> SparseNoise:
    """Draw members' noise for a weight of that shape, in float64."""
    weight = torch.zeros(shape, dtype=torch.float64)
    return scheme.sample(weight, BlockStream(0, 0, "layer", range(members), weight.device, weight.dtype))


@pytest.mark.parametrize("k", [1, 2])
def test_kappa_is_what_a_simulated_linear_fitness_shows(k: int) -> None:
    """Members are independent, on a grouped convolution; Gaussian values have tails, signs have none."""
    shape = (2, 4, 3, 2, 2)
    for values in VALUES:
        scheme = SparsePerturbed(k, values)
        tails = 2 * shape[2] / k if values == "normal" else 0
        fitted, error = fitted_kappa(scheme, shape, 160, tails=tails)
        assert abs(fitted) < 4 * error, values


@pytest.mark.parametrize("k", [2, 3])
def test_every_choice_of_columns_in_every_order_is_equally_likely(k: int) -> None:
    """Columns are drawn without replacement, and none is preferred."""
    width, members = 4, 6000
    chosen = Counter(map(tuple, drawn(SparsePerturbed(k), (1, 1, width), members).columns[:, 0].tolist()))
    orders = list(itertools.permutations(range(width), k))
    assert set(chosen) == set(orders)
    expected = members / len(orders)
    surprise = sum((chosen[order] - expected) ** 2 / expected for order in orders)
    freedom = len(orders) - 1
    assert surprise < freedom + 4 * (2 * freedom) ** 0.5


def test_a_member_has_distinct_columns() -> None:
    """K of them, up to all that there are, in every group."""
    for k in (1, 2, FEW, FEW + 1, FEW + 2):
        columns = drawn(SparsePerturbed(k), (3, 2, FEW + 2), 300).columns
        ordered = columns.sort(-1).values
        assert columns.shape == (300, 3, k)
        assert 0 <= int(columns.min()) <= int(columns.max()) < FEW + 2
        assert bool((ordered.diff(dim=-1) > 0).all())


def test_signs_have_one_size() -> None:
    """Values are plus or minus sqrt(i / k), so that entries have unit variance over the draw of columns."""
    values = drawn(SparsePerturbed(2, "sign"), (1, 5, 8), 20).values
    torch.testing.assert_close(values.abs(), torch.full_like(values, 2.0))
    assert len(values.unique()) == 2


def test_several_columns_of_any_values_are_right() -> None:
    """Forward and update agree with the reference, with strides, taps and groups."""
    module = nn.Conv2d(2 * FEW + 2, 4, (2, 3), stride=2, groups=2).double()
    x = torch.randn(6, 2 * FEW + 2, 5, 6, generator=torch.Generator().manual_seed(0)).double()
    for k, values in itertools.product((3, FEW + 1), VALUES):
        population = perturb(module, SparsePerturbed(k, values), members=3, sigma=0.1, antithetic=True)
        check_forward(population, x, range(3))
        check_update(population, x, range(3))


@pytest.mark.parametrize("scheme", [SparsePerturbed(1), SparsePerturbed(3, "sign")], ids=str)
def test_no_tensor_has_a_number_for_each_member_and_weight(scheme: SparsePerturbed) -> None:
    """The largest tensor of draw, forward and update has as many numbers as columns, or twice in a stream."""
    members, width = 256, 48
    population = perturb(nn.Linear(width, width), scheme, members=members, sigma=0.1)
    with Largest() as seen:
        noise = population.sample(0)
        population(torch.ones(members, width), noise)
        population.update(noise, torch.ones(members))
    assert seen.numel <= 2 * members * width * scheme.k


@pytest.mark.parametrize("k", [2, FEW + 1])
def test_a_part_of_a_population_has_the_bits_of_the_whole(k: int) -> None:
    """Columns and values, wherever the part starts."""
    members = BLOCK + 40
    population = perturb(
        nn.Linear(FEW + 3, 4), SparsePerturbed(k, "sign"), members=members, sigma=0.1, stream="philox"
    )
    whole = population.dense_noise(population.sample(0))["weight"]
    part = population.dense_noise(population.sample(0, range(30, members - 3)))["weight"]
    assert torch.equal(part, whole[30 : members - 3])


def test_more_columns_than_there_are_is_refused() -> None:
    """The message has both numbers."""
    with pytest.raises(ValueError, match="k = 7 is above the width: the weight has 6 input columns"):
        perturb(nn.Linear(6, 5), SparsePerturbed(7), members=3, sigma=0.1)


def test_bad_options_are_refused() -> None:
    """The message has the value."""
    invalid: list[Any] = [0, -1, True, 1.0]
    for k in invalid:
        with pytest.raises(ValueError, match=f"k must be an int of at least 1, got {k!r}"):
            SparsePerturbed(k)
    with pytest.raises(ValueError, match="values must be 'normal' or 'sign', got 'signs'"):
        SparsePerturbed(1, "signs")  # type: ignore[arg-type]  # the mistake


@dataclass(frozen=True)
class WithReplacement(SparsePerturbed):
    """A member's columns may be the same one."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> SparseNoise:
        columns = stream.integers("columns", weight.shape[2], weight.shape[0], self.k)
        return replace(super().sample(weight, stream), columns=columns)


@dataclass(frozen=True)
class SignsOfOne(SparsePerturbed):
    """Signs without sqrt(i / k)."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> SparseNoise:
        noise = super().sample(weight, stream)
        return replace(noise, values=noise.values.sign())


@dataclass(frozen=True)
class SquaredUtilities(SparsePerturbed):
    """Utilities enter twice."""

    @override
    def weighted_sum(self, noise: SparseNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(noise, utilities * utilities.abs())


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (WithReplacement(4), "forward|update"),
        (SignsOfOne(2, "sign"), "variance"),
        (SquaredUtilities(2, "sign"), "update"),
    ],
    ids=["with replacement", "signs of one", "squared utilities"],
)
def test_the_oracle_finds_a_planted_bug(scheme: SparsePerturbed, words: str) -> None:
    """A sparse scheme with a mistake is refused, with words about what is wrong."""
    with pytest.raises(WrongResultError, match=words):
        check(Setting(scheme, nn.Linear(6, 5).double(), (6,)))
