"""Means of replicates and their intervals."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import stdtrit

from esbench.report.analysis.quality import (
    LARGEST_GAIN,
    estimate,
    n_eff_by_law,
    n_eff_of_replicates,
    percent_of_members,
    size_of,
)


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_the_printed_tables(freedom: int, t: float) -> None:
    """Student's t for 95 % is that of the tables, for odd and for even degrees of freedom."""
    assert stdtrit(freedom, 0.975) == pytest.approx(t, abs=5e-4)


def test_interval_of_a_mean() -> None:
    """The interval is t times the standard error: of 1, 2, 3 with t = 4.303 and s = 1."""
    found = estimate([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.replicates) == (2.0, 3)
    assert found.half == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert found.reach == found.half


def test_one_replicate_has_no_interval() -> None:
    """A single value is its mean, and how far it may be off is unknown."""
    found = estimate([5.0])
    assert found is not None
    assert (found.mean, found.half, found.reach) == (5.0, None, 0.0)


def test_replicates_that_are_all_alike_have_no_interval() -> None:
    """No rounding of their mean is shown for one."""
    found = estimate([0.925] * 3)
    assert found is not None
    assert (found.mean, found.half) == (0.925, 0.0)


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_no_number_is_no_estimate(values: list[float]) -> None:
    """Without a value, or with one that is not finite, there is no estimate."""
    assert estimate(values) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_shifting_values_shifts_the_mean_only(values: list[float]) -> None:
    """The width of an interval does not depend on where the values lie."""
    here, there = estimate(values), estimate([value + 1000 for value in values])
    assert here is not None
    assert there is not None
    assert there.mean == pytest.approx(here.mean + 1000, abs=1e-6)
    assert there.reach == pytest.approx(here.reach, abs=1e-4, rel=1e-6)


SHARES = st.lists(st.floats(0.5, 2.0), min_size=2, max_size=20)


@given(SHARES)
def test_n_eff_is_averaged_by_its_reciprocals(shares: list[float]) -> None:
    """Its value is n over the mean of 1 + kappa n / d, and the ends are those of that mean."""
    found, here = n_eff_of_replicates([100 / share for share in shares], 100), estimate(shares)
    assert here is not None
    assert found.value == pytest.approx(100 / statistics.mean(shares))
    assert found.low == pytest.approx(100 / (here.mean + here.reach))
    if here.mean - here.reach > 0.01:
        assert found.high == pytest.approx(100 / (here.mean - here.reach))


def test_replicates_below_0_take_part() -> None:
    """One whose error left less than nothing counts with its sign, and the upper end may have no bound."""
    shares = [-0.1, 0.5, 0.3, 0.2, 0.1]
    found = n_eff_of_replicates([100 / share for share in shares], 100)
    assert found.value == pytest.approx(500)
    assert 100 < found.low < found.value
    assert found.high == math.inf


def test_one_replicate_of_n_eff_has_no_interval() -> None:
    """A single value stands for itself."""
    found = n_eff_of_replicates([50.0], 100)
    assert (found.value, found.low, found.high, found.replicates) == (50.0, 50.0, 50.0, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([-50.0, -60.0, -55.0], "below 0 by more than its error, which cannot be"),
        ([-50.0], "cannot be"),
        ([0.0, 1.0], "a replicate that is 0 or not finite"),
        ([math.nan, 1.0], "a replicate that is 0 or not finite"),
        ([], "no replicate"),
    ],
)
def test_n_eff_that_is_no_number_has_a_reason(values: list[float], words: str) -> None:
    """Below 0, or nothing at all: it is said in words."""
    with pytest.raises(ValueError, match=words):
        n_eff_of_replicates(values, 100)


@pytest.mark.parametrize(
    ("values", "least"),
    [
        ([100 / share for share in (0.2, -0.2, 0.1, -0.1)], 100 / (stdtrit(3, 0.975) * (1 / 120) ** 0.5)),
        ([1.01 * LARGEST_GAIN * 100] * 3, LARGEST_GAIN * 100),
    ],
)
def test_cosine_of_1_within_its_error_leaves_a_lower_end(values: list[float], least: float) -> None:
    """What cannot be told from the gradient itself is worth at least so much, and any number more."""
    found = n_eff_of_replicates(values, 100)
    assert (found.is_bound, found.is_exact, found.high) == (True, False, math.inf)
    assert found.value == found.low == pytest.approx(least)
    assert percent_of_members(found, 100).startswith("at least ")


def test_closed_form_has_no_interval() -> None:
    """n_eff is the law's own, and both of its ends are."""
    found = n_eff_by_law(3.0, 100, 1000)
    assert found is not None
    assert found.value == found.low == found.high == pytest.approx(100 / 1.3)
    assert found.replicates == 0


@pytest.mark.parametrize(("kappa", "members"), [(-1.0, 4096), (-4095 / 16383, 16384), (-4095 / 65535, 65536)])
def test_form_that_leaves_nothing_is_exact(kappa: float, members: int) -> None:
    """Members that are orthogonal in whole rounds give a linear fitness's gradient: no number equals it."""
    found = n_eff_by_law(kappa, members, 4096)
    assert found is not None
    assert found.is_exact
    assert percent_of_members(found, members) == "exact"


def test_form_that_leaves_less_than_nothing_is_none() -> None:
    """No scheme can have it, and a large number of members is a number still."""
    assert n_eff_by_law(-1.0, 8192, 4096) is None
    found = n_eff_by_law(-1.0, 4095, 4096)
    assert found is not None
    assert found.value == pytest.approx(4095 * 4096)


def test_size_is_what_the_law_says_of_replicates() -> None:
    """Of kappas and their n_eff there is one d; kappas that are all 0 do not tell it."""
    kappas = [0.5, -0.25, 0.01]
    worths = [100 / (1 + kappa * 100 / 4096) for kappa in kappas]
    assert size_of(kappas, worths, 100) == pytest.approx(4096)
    assert size_of([0.0, 0.0], [100.0, 100.0], 100) is None
    assert size_of([], [], 100) is None


def test_layer_in_a_network_loses_by_the_networks_size() -> None:
    """Of a replicate at a layer's own d, kappa n / d is as much smaller as the network is larger."""
    alone = [100 / (1 + kappa * 100 / 50) for kappa in (2.9, 3.1)]
    assert n_eff_of_replicates(alone, 100, share=0.1).value == pytest.approx(100 / (1 + 3 * 100 / 500))
