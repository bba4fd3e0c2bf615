"""Statistics of samples: medians, intervals, ratios and warnings."""

import itertools
import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import binom

from esbench.schema import Measurement
from esbench.stats import (
    Interval,
    Ratio,
    interval,
    invalid_reasons,
    median,
    median_clock,
    off_clock_share,
    outlier_share,
    ratio,
    round_medians,
    spread,
    throttled_share,
)
from tests import synthetic

CASE = synthetic.linear()
POSITIVE = st.floats(min_value=1e-6, max_value=1e6)


def row(*rounds: tuple[float, ...]) -> Measurement:
    """Return a measurement with these samples."""
    return msgspec.structs.replace(synthetic.time_row(synthetic.DENSE, CASE), samples=rounds)


def test_spread_is_over_all_samples() -> None:
    """Percentiles are over all samples of all rounds, the median over one number per round."""
    result = spread(row((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (9.0,)))
    assert result is not None
    assert [result.p20, result.median, result.p80] == pytest.approx([2.2, 5.0, 5.8])


@given(st.lists(st.lists(POSITIVE, min_size=1, max_size=9), min_size=6, max_size=20))
@example([[1.0] * 9, *[[2.0]] * 6])
def test_the_median_lies_in_its_interval(rounds: list[list[float]]) -> None:
    """Rounds of any size weigh the same, in the median and in its interval."""
    measured = row(*map(tuple, rounds))
    middle = median(measured)
    result = interval(round_medians(measured))
    assert middle is not None
    assert result is not None
    assert result.low <= middle == result.median <= result.high


def test_unusable_samples_have_no_median() -> None:
    """Without samples, or with one that is not finite, there is no median."""
    cases: list[tuple[tuple[float, ...], ...]] = [(), ((),), ((1.0, math.nan),), ((1.0,), (math.inf,))]
    for rounds in cases:
        assert median(row(*rounds)) is None
        assert spread(row(*rounds)) is None


def test_interval_of_few_values_is_their_range() -> None:
    """With six values, the fewest for a 95 % interval of the median, it is their range."""
    assert interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == Interval(1.0, 3.5, 6.0)
    for values in ([1.0, 2.0, 3.0, 4.0, 5.0], [], [1.0] * 9 + [math.nan], [1.0] * 9 + [math.inf]):
        assert interval(values) is None
    assert Interval(98.0, 100.0, 104.0).relative == pytest.approx(0.03)
    assert Interval(0.0, 0.0, 0.0).relative == 0
    assert Interval(0.0, 0.0, 1.0).relative == math.inf


def test_interval_has_its_confidence_exactly() -> None:
    """The order statistics reach the confidence by binomial arithmetic; narrower ones do not."""
    for confidence, count in itertools.product((0.9, 0.95, 0.99), (8, 9, 20, 101, 1000, 5000)):
        result = interval(range(1, count + 1), confidence)
        assert result is not None
        rank = round(result.low)
        assert result.high == count + 1 - rank
        outside, beyond = (2 * float(binom.cdf(k, count, 0.5)) for k in (rank - 1, rank))
        assert outside <= 1 - confidence < beyond


def test_ratio_inside_rounds_has_its_interval() -> None:
    """A drift of the machine cancels in the ratio and its interval; too few rounds have no interval."""
    a = row(*((2.0 * 10**k * (1 + k / 100),) for k in range(6)))
    b = row(*((10.0**k,) for k in range(6)))
    result = ratio(a, b)
    assert result is not None
    assert [result.low, result.high] == [pytest.approx(2.0), pytest.approx(2.1)]
    few = ratio(msgspec.structs.replace(a, samples=a.samples[:5]), b)
    assert few is not None
    assert (few.low, few.high) == (None, None)


def test_ratio_is_taken_inside_shared_rounds_if_there_are_two() -> None:
    """Rounds that only one side took part in are left out; a single shared round gives a ratio of medians."""
    a = row((3.0,), (30.0,))
    for above, below, expected in (
        (row((3.0,), (30.0,), (300.0,), (300.0,)), row((1.0,), (10.0,), (100.0,), (50.0,)), (3.0, 4)),
        (row((2.0,), (20.0,)), row((1.0,), (10.0,), (99.0,), (99.0,)), (2.0, 2)),
        (row((2.0,), (), (6.0,)), row((1.0,), (5.0,), (1.0,)), (4.0, 2)),
        (row((6.0,)), row((1.0,), (2.0,), (3.0,)), (3.0, 0)),
        (row((6.0,), (12.0,)), msgspec.structs.replace(row((2.0, 2.0), (4.0, 4.0)), group=1), (3.0, 0)),
        (a, msgspec.structs.replace(a, phase="update"), (1.0, 0)),
        (a, msgspec.structs.replace(a, case=synthetic.linear(512)), (1.0, 0)),
    ):
        value, rounds = expected
        assert ratio(above, below) == Ratio(value, "inside rounds" if rounds else "of medians", rounds)


def test_no_ratio() -> None:
    """Other methods and metrics, and a divisor that is missing, zero or not a number, have no ratio."""
    a = row((3.0,), (30.0,))
    divisors = [row((), ()), row((0.0,), (0.0,)), row((math.nan,), (math.nan,))]
    divisors += [msgspec.structs.replace(usable, group=1) for usable in divisors]
    divisors += [msgspec.structs.replace(a, method="graph"), msgspec.structs.replace(a, metric="peak_bytes")]
    for divisor in divisors:
        assert ratio(a, divisor) is None


def test_outliers_are_far_in_units_of_the_usual_distance() -> None:
    """Outliers are the share of samples far from the median; if most are equal there are none."""
    cases: list[tuple[tuple[float, ...], float]] = [
        ((10.0, 10.1, 9.9, 10.2, 9.8), 0.0),
        ((10.0, 10.1, 9.9, 10.2, 30.0), 0.2),
        ((10.0, 10.0, 10.0, 99.0), 0.0),
        ((), 0.0),
        ((1.0, math.nan), 0.0),
    ]
    for samples, share in cases:
        assert outlier_share(row(samples)) == share


def test_clock_of_a_run_and_visits_off_it() -> None:
    """The median clock is over all visits; a visit is off clock if it differs by more than 2 %."""
    steady = synthetic.clocks(row((1.0,)), 1000, 1020, 1000)
    slowed = synthetic.clocks(row((1.0,)), 1000, 900, throttled=("heat",))
    clock = median_clock(synthetic.run([steady, slowed]))
    assert clock == 1000e6
    assert (off_clock_share(steady, clock), off_clock_share(slowed, clock)) == (0, 0.5)
    assert (throttled_share(steady), throttled_share(slowed)) == (0, 1)
    assert median_clock(synthetic.run([row((1.0,))])) is None
    assert (off_clock_share(row((1.0,)), clock), throttled_share(row())) == (0, 0)


def test_a_clock_that_moves_is_a_label_and_leaves_a_run_valid() -> None:
    """The clock of a GPU varies if it is not locked or is at its power limit."""
    odd = synthetic.clocks(row((1.0,)), *[1000] * 5, *[900] * 4, throttled=("power cap",))
    run = synthetic.run([odd])
    assert invalid_reasons(run) == ()
    assert (off_clock_share(odd, median_clock(run)), throttled_share(odd)) == (4 / 9, 1)


def test_a_throttled_run_is_invalid() -> None:
    """More than a tenth of throttled visits makes a run invalid; exactly a tenth does not."""
    even = synthetic.clocks(row((1.0,)), *[1000] * 9)
    hot = synthetic.clocks(row((1.0,)), 1000, throttled=("thermal slowdown", "power cap", "board limit"))
    assert invalid_reasons(synthetic.run([even, hot])) == ()
    assert invalid_reasons(synthetic.run([even, hot, hot])) == (
        "the GPU was throttled in 18 % of the visits (board limit, thermal slowdown)",
    )
    host = [msgspec.structs.replace(hot, metric="host_latency_ns")] * 9
    assert invalid_reasons(synthetic.run([even, hot, *host])) == ()  # each visit counts once


def test_other_processes_make_a_run_invalid() -> None:
    """The reason names a process that was on the GPU at the start."""
    run = synthetic.run([])
    here = msgspec.structs.replace(run.header.environment, foreign=("python (17)",))
    shared = msgspec.structs.replace(run, header=msgspec.structs.replace(run.header, environment=here))
    assert invalid_reasons(shared) == ("other processes on the GPU at the start: python (17)",)


READABLE = st.one_of(st.floats(min_value=0), st.just(math.nan))
"""What a record of a time takes: a number below 0 is refused when it is read."""


@example([], [[1.7e308, 1.7e308]])
@given(
    st.lists(st.lists(READABLE, max_size=3), max_size=4), st.lists(st.lists(READABLE, max_size=3), max_size=4)
)
def test_statistics_never_raise(a: list[list[float]], b: list[list[float]]) -> None:
    """For any samples of a foreign file the statistics are a number or None."""
    above, below = row(*map(tuple, a)), row(*map(tuple, b))
    for result in (median(above), ratio(above, below)):
        assert result is None or isinstance(result, float | Ratio)
