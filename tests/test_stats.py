"""Statistics of samples: medians, intervals, ratios and warnings."""

import itertools
import math
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import binom

from esbench.schema import Measurement
from esbench.stats import (
    Interval,
    Ratio,
    interval,
    invalid,
    median,
    median_clock,
    off_clock,
    outliers,
    ratio,
    round_medians,
    spread,
    throttled,
)
from tests import synthetic

CASE = synthetic.linear()
POSITIVE = st.floats(min_value=1e-6, max_value=1e6)


def row(*rounds: tuple[float, ...]) -> Measurement:
    """Return a measurement with these samples."""
    return msgspec.structs.replace(synthetic.time_row(synthetic.DENSE, CASE), samples=rounds)


def test_spread_is_over_all_samples() -> None:
    """Percentiles are over all samples of all rounds, the median over one number per round."""
    found = spread(row((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (9.0,)))
    assert found is not None
    assert [found.p20, found.median, found.p80] == pytest.approx([2.2, 5.0, 5.8])


@given(st.lists(st.lists(POSITIVE, min_size=1, max_size=9), min_size=6, max_size=20))
@example([[1.0] * 9, *[[2.0]] * 6])
def test_the_median_lies_in_its_interval(rounds: list[list[float]]) -> None:
    """Rounds weigh the same whatever their size, in the median and in its interval."""
    measured = row(*map(tuple, rounds))
    middle = median(measured)
    found = interval([value for value in round_medians(measured) if value is not None])
    assert middle is not None
    assert found is not None
    assert found.low <= middle == found.median <= found.high


def test_unusable_samples_have_no_median() -> None:
    """Without samples, or with one that is not finite, there is no median."""
    cases: list[tuple[tuple[float, ...], ...]] = [
        (),
        ((),),
        ((1.0, math.nan),),
        ((1.0,), (math.inf,)),
    ]
    for rounds in cases:
        assert median(row(*rounds)) is None
        assert spread(row(*rounds)) is None


def test_round_medians_name_the_empty_round() -> None:
    """Each round has its own median, and a round without usable samples has none."""
    assert round_medians(row((1.0, 9.0, 2.0), (), (math.nan,))) == (2.0, None, None)


def test_interval_of_few_values_is_their_range() -> None:
    """With six values, the fewest for a 95 % interval of the median, it is their range."""
    assert interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == Interval(1.0, 3.5, 6.0)
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    assert interval([]) is None


def test_interval_covers_exactly_what_it_promises() -> None:
    """The order statistics reach the confidence by binomial arithmetic; narrower ones do not."""
    for confidence, count in itertools.product((0.9, 0.95, 0.99), (8, 9, 20, 101, 1000, 5000)):
        found = interval(range(1, count + 1), confidence)
        assert found is not None
        rank = round(found.low)
        assert found.high == count + 1 - rank
        outside, beyond = (2 * float(binom.cdf(k, count, 0.5)) for k in (rank - 1, rank))
        assert outside <= 1 - confidence < beyond


def test_interval_holds_the_median_as_often_as_it_says() -> None:
    """In many draws of a skewed distribution the true median is inside at least as often as stated."""
    draws = np.random.default_rng(0).exponential(size=(2000, 21))
    intervals = [interval(list(draw)) for draw in draws]
    inside = [found is not None and found.low <= math.log(2) <= found.high for found in intervals]
    assert 0.94 < np.mean(inside) < 0.985


def test_interval_of_what_is_no_number_is_none() -> None:
    """With a value that is not finite there is no interval."""
    cases: list[float] = [
        math.nan,
        math.inf,
    ]
    for odd in cases:
        assert interval([1.0] * 9 + [odd]) is None


def test_relative_width_of_an_interval() -> None:
    """The relative width is half the interval over its median; a median of zero is not an error."""
    assert Interval(98.0, 100.0, 104.0).relative == pytest.approx(0.03)
    assert Interval(0.0, 0.0, 0.0).relative == 0
    assert Interval(0.0, 0.0, 1.0).relative == math.inf


def test_ratio_inside_rounds_has_its_interval() -> None:
    """The interval of a ratio is that over its rounds, whatever drifts; too few rounds have none."""
    a = row(*((2.0 * 10**k * (1 + k / 100),) for k in range(6)))
    b = row(*((10.0**k,) for k in range(6)))
    found = ratio(a, b)
    assert found is not None
    assert [found.low, found.high] == [pytest.approx(2.0), pytest.approx(2.1)]
    few = ratio(msgspec.structs.replace(a, samples=a.samples[:5]), b)
    assert few is not None
    assert (few.low, few.high) == (None, None)


def test_ratio_inside_rounds_cancels_drift() -> None:
    """A machine that slows down does not change a ratio measured in shared rounds."""
    a, b = row((3.0,), (30.0,), (300.0,), (300.0,)), row((1.0,), (10.0,), (100.0,), (50.0,))
    assert ratio(a, b) == Ratio(3.0, "inside rounds", 4)


@dataclass(frozen=True)
class Odd:
    """A change to a measurement, and whether it still has a ratio."""

    field: str
    value: object
    exists: bool


def test_ratio_says_when_rounds_were_not_shared() -> None:
    """Without shared rounds the ratio is marked as one of medians; methods and metrics never mix."""
    cases: list[Odd] = [
        Odd("group", 1, exists=True),
        Odd("phase", "update", exists=True),
        Odd("case", synthetic.linear(512), exists=True),
        Odd("samples", ((1.0,),), exists=True),
        Odd("method", "graph", exists=False),
        Odd("metric", "peak_bytes", exists=False),
    ]
    for odd in cases:
        a, b = row((3.0,), (30.0,)), row((1.0,), (10.0,))
        found = ratio(a, msgspec.structs.replace(b, **{odd.field: odd.value}))
        assert (found is not None) == odd.exists
        assert found is None or found.method == "of medians"


def test_ratio_uses_the_rounds_that_both_took_part_in() -> None:
    """A call that left the rounds early is compared only with samples of the same rounds."""
    a, b = row((2.0,), (20.0,)), row((1.0,), (10.0,), (99.0,), (99.0,))
    assert ratio(a, b) == Ratio(2.0, "inside rounds", 2)


def test_a_single_round_gives_no_ratio() -> None:
    """One shared round makes a ratio of medians, as the only sample of a slow call is alone in its round."""
    a, b = row((6.0,)), row((1.0,), (2.0,), (3.0,))
    assert ratio(a, b) == Ratio(3.0, "of medians")


def test_ratio_of_medians() -> None:
    """A ratio of medians divides the medians of the rounds' medians."""
    b = msgspec.structs.replace(row((2.0, 2.0), (4.0, 4.0)), group=1)
    assert ratio(row((6.0,), (12.0,)), b) == Ratio(3.0, "of medians")


def test_ratio_to_nothing_is_none() -> None:
    """A divisor that is missing, zero, negative or not a number has no ratio."""
    group_cases: list[int] = [
        0,
        1,
    ]
    rounds_cases: list[tuple[tuple[float, ...], ...]] = [
        ((), ()),
        ((0.0,), (0.0,)),
        ((math.nan,), (math.nan,)),
    ]
    for group in group_cases:
        for rounds in rounds_cases:
            divisor = msgspec.structs.replace(row(*rounds), group=group)
            assert ratio(row((1.0,), (1.0,)), divisor) is None


def test_ratio_skips_rounds_that_one_side_lacks() -> None:
    """Rounds without samples on one side are left out, also from the number of rounds."""
    a, b = row((2.0,), (), (6.0,)), row((1.0,), (5.0,), (1.0,))
    assert ratio(a, b) == Ratio(4.0, "inside rounds", 2)


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
        assert outliers(row(samples)) == share


def test_clock_of_a_run_and_visits_off_it() -> None:
    """The median clock is over all visits; a visit is off clock if it differs by more than 2 %."""
    one = synthetic.clocks(row((1.0,)), 1000, 1020, 1000)
    other = synthetic.clocks(row((1.0,)), 1000, 900, throttled=("heat",))
    clock = median_clock(synthetic.run([one, other]))
    assert clock == 1000e6
    assert (off_clock(one, clock), off_clock(other, clock)) == (0, 0.5)
    assert (throttled(one), throttled(other)) == (0, 1)
    assert median_clock(synthetic.run([row((1.0,))])) is None
    assert (off_clock(row((1.0,)), clock), throttled(row())) == (0, 0)


def test_a_clock_that_moves_is_a_label_and_leaves_a_run_valid() -> None:
    """The clock of a GPU varies if it is not locked or is at its power limit."""
    odd = synthetic.clocks(row((1.0,)), *[1000] * 5, *[900] * 4, throttled=("power cap",))
    run = synthetic.run([odd])
    assert invalid(run) == ()
    assert (off_clock(odd, median_clock(run)), throttled(odd)) == (4 / 9, 1)


def test_a_throttled_run_is_invalid() -> None:
    """More than a tenth of throttled visits makes a run invalid; exactly a tenth does not."""
    even = synthetic.clocks(row((1.0,)), *[1000] * 9)
    hot = synthetic.clocks(row((1.0,)), 1000, throttled=("thermal slowdown", "power cap", "board limit"))
    assert invalid(synthetic.run([even, hot])) == ()
    assert invalid(synthetic.run([even, hot, hot])) == (
        "the GPU was throttled beside 18 % of the visits (board limit, thermal slowdown)",
    )


def test_a_visit_counts_once() -> None:
    """Other metrics of a visit repeat its conditions and do not change a share."""
    even = synthetic.clocks(row((1.0,)), *[1000] * 10)
    odd = synthetic.clocks(row((1.0,)), 1000, throttled=("heat",))
    host = [msgspec.structs.replace(odd, metric="host_latency_ns")] * 9
    assert invalid(synthetic.run([even, odd, *host])) == ()


def test_other_processes_make_a_run_invalid() -> None:
    """The reason names a process that was on the GPU at the start."""
    run = synthetic.run([])
    here = msgspec.structs.replace(run.header.environment, foreign=("python (17)",))
    shared = msgspec.structs.replace(run, header=msgspec.structs.replace(run.header, environment=here))
    assert invalid(shared) == ("other processes on the GPU at the start: python (17)",)


@given(st.lists(st.lists(POSITIVE, min_size=1, max_size=4), min_size=1, max_size=5), POSITIVE)
def test_ratio_to_a_multiple_of_itself(rounds: list[list[float]], factor: float) -> None:
    """If all samples are f times those of another measurement, the ratio is f."""
    b = row(*map(tuple, rounds))
    a = row(*(tuple(factor * sample for sample in visit) for visit in rounds))
    found = ratio(a, b)
    assert found is not None
    assert math.isclose(found.value, factor, rel_tol=1e-9)


READABLE = st.one_of(st.floats(min_value=0), st.just(math.nan))
"""What a record of a time takes: a number below 0 is refused when it is read."""


@example([], [[1.7e308, 1.7e308]])
@given(
    st.lists(st.lists(READABLE, max_size=3), max_size=4),
    st.lists(st.lists(READABLE, max_size=3), max_size=4),
)
def test_never_raises(a: list[list[float]], b: list[list[float]]) -> None:
    """Whatever samples a foreign file has, the statistics are a number or None."""
    one, other = row(*map(tuple, a)), row(*map(tuple, b))
    for found in (median(one), ratio(one, other)):
        assert found is None or isinstance(found, float | Ratio)
