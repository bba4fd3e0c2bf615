"""Change points: false alarms in pure noise, and the steps that are found."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.report.analysis.history import MIN_LEVEL_RUNS, change_points

Numbers = npt.NDArray[np.float64]
WIDTH = 0.005
"""The standard deviation of the noise: 0.5 % of a time."""


def normal(generator: np.random.Generator, count: int) -> Numbers:
    """Return normal noise."""
    return generator.standard_normal(count)


def with_outliers(generator: np.random.Generator, count: int) -> Numbers:
    """Return normal noise in which one run in twelve is up to tens of standard deviations slower."""
    usual = generator.standard_normal(count)
    return np.where(generator.random(count) < 1 / 12, 10 * np.abs(usual), usual)


def correlated(generator: np.random.Generator, count: int) -> Numbers:
    """Return normal noise in which neighbors correlate by 0.5."""
    values = generator.standard_normal(count)
    for index in range(1, count):
        values[index] = 0.5 * values[index - 1] + np.sqrt(0.75) * values[index]
    return values


def change_positions(logarithms: Numbers) -> list[int]:
    """Return the places of the change points in a series with these logarithms."""
    return [point.position for point in change_points([float(value) for value in np.exp(logarithms)])]


def test_a_series_without_a_change_is_hardly_ever_marked() -> None:
    """At most 2 % of constant noisy series have a change point; 10 % if neighbors correlate."""
    for shape, share, repeated in ((normal, 0.02, 1), (with_outliers, 0.02, 1), (correlated, 0.1, 2)):
        alarms = []
        for count, repeats in {6: 150, 10: 150, 20: 50, 50: 15}.items():
            generator = np.random.default_rng(count)
            alarms += [
                bool(change_positions(WIDTH * shape(generator, count))) for _ in range(repeated * repeats)
            ]
        assert np.mean(alarms) <= share, shape


@pytest.mark.parametrize(
    ("count", "step_at", "share", "step"),
    [(6, 3, 0.6, 0.02), (10, 5, 0.75, -0.02), (20, 10, 0.98, -0.02), (50, 45, 0.9, -0.02)],
)
def test_a_step_of_two_percent_is_found(count: int, step_at: int, share: float, step: float) -> None:
    """A step of 2 % in noise of 0.5 % is found within one run; in short series, most times."""
    generator = np.random.default_rng(count)
    levels = np.log1p(step) * (np.arange(count) >= step_at)
    marks = [change_positions(WIDTH * normal(generator, count) + levels) for _ in range(40)]
    near = [places for places in marks if any(abs(position - step_at) <= 1 for position in places)]
    assert len(near) >= share * len(marks)


def test_a_regression_and_its_repair_are_two_steps() -> None:
    """A change to another level and back is marked at both ends, also among disturbed runs."""
    noise = WIDTH * normal(np.random.default_rng(0), 24)
    noise[4] += np.log(10)
    noise[13] -= np.log(3)
    levels = np.repeat([1.0, 1.05, 1.0], 8)
    up, down = change_points([float(value) for value in levels * np.exp(noise)])
    assert (up.position, down.position) == (8, 16)
    assert up.after / up.before == pytest.approx(1.05, rel=0.01)
    assert down.after / down.before == pytest.approx(1 / 1.05, rel=0.01)


@given(
    st.integers(MIN_LEVEL_RUNS, 20),
    st.integers(MIN_LEVEL_RUNS, 20),
    st.floats(1e-9, 1e9),
    st.floats(1.02, 100) | st.floats(0.01, 0.98),
)
def test_a_clean_step_is_exactly_one(before: int, after: int, level: float, factor: float) -> None:
    """Two levels without noise have one change between them, with the right size, if above 2 %."""
    (step,) = change_points([level] * before + [level * factor] * after)
    assert step == (before, level, level * factor)


@given(st.integers(1, 40), st.floats(1e-300, 1e24), st.integers(0, 39), st.floats(0.01, 100))
def test_one_odd_run_is_not_a_change(count: int, level: float, index: int, factor: float) -> None:
    """A constant series has no change, even if a single value differs."""
    values = [level] * count
    values[index % count] *= factor
    assert change_points(values) == ()
