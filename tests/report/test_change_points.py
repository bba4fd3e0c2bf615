"""Change points: false alarms in pure noise, and the steps that are found."""

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.report.analysis import history
from esbench.report.analysis.history import MIN_LEVEL_RUNS, MIN_RUNS, change_points, penalty

Numbers = npt.NDArray[np.float64]
Noise = Callable[[np.random.Generator, int], Numbers]

WIDTH = 0.005
"""The standard deviation of the noise: 0.5 % of a time."""


def correlated(share: float) -> Noise:
    """Return noise in which neighbours correlate, without drift."""

    def draw(generator: np.random.Generator, count: int) -> Numbers:
        fresh, last = generator.standard_normal(count), 0.0
        found = np.empty(count)
        for place, value in enumerate(fresh):
            last = value if place == 0 else share * last + np.sqrt(1 - share**2) * value
            found[place] = last
        return found

    return draw


def with_outliers(generator: np.random.Generator, count: int) -> Numbers:
    """Return normal noise in which one run in twelve is up to tens of standard deviations slower."""
    usual = generator.standard_normal(count)
    return np.where(generator.random(count) < 1 / 12, 10 * np.abs(usual), usual)


SHAPES: dict[str, tuple[Noise, float]] = {
    "normal": (lambda generator, count: generator.standard_normal(count), 0.01),
    "Laplace": (lambda generator, count: generator.laplace(size=count) / np.sqrt(2), 0.01),
    "Student, 3 degrees": (lambda generator, count: generator.standard_t(3, count) / np.sqrt(3), 0.01),
    "Student, 2 degrees": (lambda generator, count: generator.standard_t(2, count), 0.01),
    "outliers": (with_outliers, 0.01),
    "log-normal": (lambda generator, count: np.exp(generator.standard_normal(count)) / 2, 0.01),
    "neighbours correlate by 0.3": (correlated(0.3), 0.02),
    "neighbours correlate by 0.5": (correlated(0.5), 0.05),
}
"""Shapes of noise -> its draws, in standard deviations, and the share of series that may be marked."""

REPEATS = {6: 300, 10: 300, 20: 100, 50: 30}
"""Lengths of series -> the number of series drawn of each shape."""


def marked(
    shape: Noise, count: int, repeats: int, step: float = 0.0, place: int = 0
) -> list[tuple[int, ...]]:
    """Return the places where each series, which has a step of this size at a place, is marked."""
    generator = np.random.default_rng(count)
    found = []
    for _ in range(repeats):
        logarithms = WIDTH * shape(generator, count)
        logarithms[place:] += np.log1p(step)
        found.append(
            tuple(one.place for one in change_points([float(value) for value in np.exp(logarithms)]))
        )
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_what_does_not_change_is_hardly_ever_marked(name: str) -> None:
    """At most 1 % of constant noisy series are marked; 2 % and 5 % if neighbours correlate.

    Results of larger simulations are in a comment at the penalty.
    """
    shape, share = SHAPES[name]
    alarms = {count: sum(map(bool, marked(shape, count, repeats))) for count, repeats in REPEATS.items()}
    assert sum(alarms.values()) <= share * sum(REPEATS.values())


def test_a_penalty_that_is_too_low_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a penalty that is too low, the false-alarm bound of the test above is exceeded."""
    monkeypatch.setattr(history, "penalty", lambda count: 0.3 * penalty(count))
    assert sum(map(bool, marked(SHAPES["normal"][0], 20, 100))) > 5


@pytest.mark.parametrize(
    ("count", "place", "share", "step"),
    [
        (6, 3, 0.6, 0.02),
        (10, 5, 0.75, -0.02),
        (12, 6, 0.9, 0.02),
        (20, 10, 0.98, -0.02),
        (20, 15, 0.9, 0.02),
        (50, 45, 0.9, -0.02),
    ],
)
def test_a_step_of_two_percent_is_found(count: int, place: int, share: float, step: float) -> None:
    """A step of 2 % in noise of 0.5 % is found within one run; in short series, most times."""
    found = marked(SHAPES["normal"][0], count, 60, step, place)
    near = [places for places in found if any(abs(one - place) <= 1 for one in places)]
    assert len(near) >= share * len(found)


def test_one_disturbed_run_hides_no_step() -> None:
    """A run ten times as slow as the others is not a step and does not hide one."""
    generator = np.random.default_rng(0)
    values = list(np.exp(WIDTH * generator.standard_normal(20)) * np.where(np.arange(20) < 10, 1, 1.02))
    values[4] *= 10
    values[13] /= 3
    assert [one.place for one in change_points([float(value) for value in values])] == [10]


def test_a_regression_and_its_repair_are_two_steps() -> None:
    """A change to another level and back is marked at both ends, with opposite signs."""
    generator = np.random.default_rng(0)
    levels = np.repeat([1.0, 1.05, 1.0], 8)
    up, down = change_points(
        [float(value) for value in levels * np.exp(WIDTH * generator.standard_normal(24))]
    )
    assert (up.place, down.place) == (8, 16)
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
def test_one_odd_run_is_no_change(count: int, level: float, place: int, factor: float) -> None:
    """A constant series has no change, even if a single value differs."""
    values = [level] * count
    assert change_points(values) == ()
    values[place % count] *= factor
    assert change_points(values) == ()


@given(st.lists(st.floats(1e-3, 1e3), max_size=15))
def test_levels_are_long_enough_and_their_medians(values: list[float]) -> None:
    """Each level has at least three values, and a step has the medians of both its levels."""
    found = change_points(values)
    edges = [0, *(step.place for step in found), len(values)]
    levels = [values[begin:end] for begin, end in pairwise(edges)]
    assert not found or min(map(len, levels)) >= MIN_LEVEL_RUNS
    for step, (before, after) in zip(found, pairwise(levels), strict=True):
        assert (step.before, step.after) == (median(before), median(after))
    assert found == () or len(values) >= MIN_RUNS
