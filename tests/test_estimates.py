"""Means of replicates and their intervals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.report.estimates import estimate, students_t


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
