"""Means of replicates and their intervals."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.report.estimates import LARGEST_GAIN, estimate, students_t, worth


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_the_printed_tables(freedom: int, t: float) -> None:
    """Student's t for 95 % is that of the tables, for odd and for even degrees of freedom."""
    assert students_t(freedom) == pytest.approx(t, abs=5e-4)


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
    found, here = worth([100 / share for share in shares], 100), estimate(shares)
    assert here is not None
    assert found.value == pytest.approx(100 / statistics.mean(shares))
    assert found.low == pytest.approx(100 / (here.mean + here.reach))
    if here.mean - here.reach > 0.01:
        assert found.high == pytest.approx(100 / (here.mean - here.reach))


def test_replicates_below_0_take_part() -> None:
    """One whose error left less than nothing counts with its sign, and the upper end may have no bound."""
    shares = [-0.1, 0.5, 0.3, 0.2, 0.1]
    found = worth([100 / share for share in shares], 100)
    assert found.value == pytest.approx(500)
    assert 100 < found.low < found.value
    assert found.high == math.inf


def test_one_replicate_of_n_eff_has_no_interval() -> None:
    """A single value stands for itself."""
    found = worth([50.0], 100)
    assert (found.value, found.low, found.high, found.replicates) == (50.0, 50.0, 50.0, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([100 / share for share in (0.2, -0.2, 0.1, -0.1)], "cosine is 1 within its error.*at least"),
        ([1.01 * LARGEST_GAIN * 100] * 3, "cosine is 1 within its error.*any number is as good"),
        ([-50.0, -60.0, -55.0], "below 0 by more than its error, which cannot be"),
        ([-50.0], "cannot be"),
        ([0.0, 1.0], "a replicate that is no number"),
        ([math.nan, 1.0], "a replicate that is no number"),
        ([], "no replicate"),
    ],
)
def test_n_eff_that_is_no_number_has_a_reason(values: list[float], words: str) -> None:
    """Beyond what can be told from the gradient itself, below 0, or nothing at all: it is said in words."""
    with pytest.raises(ValueError, match=words):
        worth(values, 100)
