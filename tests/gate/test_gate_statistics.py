"""The statistics of the gate: log ratios, trimmed means, bounds and the sequential test."""

import itertools
import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from esbench.gate.decision import (
    ROUND_TRIM,
    Estimate,
    bounds,
    independent_log_ratios,
    mean_over_cells,
    mean_verdict,
    replicate_log_ratio,
    sequential_test,
    time_verdicts,
    trimmed,
)
from esbench.gate.records import ARMS, Arm, Replicate, Settings, Visits

SETTINGS = Settings()


def replicate(base: Visits, head: Visits) -> Replicate:
    """Return a replicate of these visits, two of each arm in a round."""
    return Replicate(0, 0, "A", (ARMS[0],) * (len(base) // 2), base, head)


@st.composite
def visits(draw: st.DrawFn) -> tuple[Visits, Visits]:
    """Return the times of both arms, in rounds of two visits each."""
    rounds = draw(st.integers(1, 12))
    visit = st.lists(st.floats(1.0, 1e9), min_size=1, max_size=3).map(tuple)
    arm = st.lists(visit, min_size=2 * rounds, max_size=2 * rounds).map(tuple)
    return draw(arm), draw(arm)


@given(visits(), st.floats(0.01, 100.0))
def test_a_replicate_is_the_trimmed_mean_of_its_rounds(arms: tuple[Visits, Visits], factor: float) -> None:
    """A round is log(head / base) without the slowest call of a visit; a factor on both arms cancels."""
    base, head = arms
    logs = []
    for index in range(0, len(base), 2):
        two_fastest = (
            sorted(visit)[:2] if len(visit) == 3 else [min(visit)]
            for arm in arms
            for visit in arm[index : index + 2]
        )
        b1, b2, h1, h2 = map(stats.gmean, two_fastest)
        logs.append(math.log(math.sqrt(h1) * math.sqrt(h2) / (math.sqrt(b1) * math.sqrt(b2))))
    dropped = int(ROUND_TRIM * len(logs))
    expected = fmean(sorted(logs)[dropped : len(logs) - dropped])
    scaled_base, scaled_head = (
        tuple(tuple(factor * value for value in visit) for visit in arm) for arm in arms
    )
    for changed, expected_log_ratio in (
        (replicate(base, head), expected),
        (replicate(scaled_base, scaled_head), expected),
        (replicate(base, scaled_head), expected + math.log(factor)),
        (replicate(head, base), -expected),
    ):
        assert replicate_log_ratio(changed) == pytest.approx(expected_log_ratio, abs=1e-8)


def test_a_slowdown_of_some_calls_is_seen_and_a_single_slow_call_is_not() -> None:
    """Two of three calls are slower by 3 %; or the slowest call of each visit takes ten times as long."""
    fast: Visits = ((1e6,) * 3,) * 20
    assert replicate_log_ratio(replicate(fast, ((1e6, 1.03e6, 1.03e6),) * 20)) == pytest.approx(
        0.0148, abs=1e-4
    )
    assert replicate_log_ratio(replicate(fast, ((1e6, 1e7, 1e6),) * 20)) == 0


@given(st.lists(st.sampled_from(ARMS), min_size=1, max_size=20), st.floats(-0.05, 0.05), st.floats(-0.2, 0.2))
def test_linear_drift_cancels(first: list[Arm], drift: float, effect: float) -> None:
    """Drift cancels within a round of ABBA or BAAB."""
    times: dict[Arm, list[tuple[float, ...]]] = {"base": [], "head": []}
    moment = itertools.count()
    for arm_a in first:
        arm_b: Arm = "head" if arm_a == "base" else "base"
        for arm in (arm_a, arm_b, arm_b, arm_a):
            times[arm].append((1e6 * math.exp(drift * next(moment) + effect * (arm == "head")),))
    log_ratio = replicate_log_ratio(replicate(tuple(times["base"]), tuple(times["head"])))
    assert log_ratio == pytest.approx(effect, abs=1e-10)


@given(
    st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=40),
    st.sampled_from([0.0, 0.1, 0.2]),
    st.sampled_from([0.01, 0.2]),
)
def test_bounds_follow_yuens_t(logs: list[float], trim: float, level: float) -> None:
    """Mean, error and p-value are those of scipy's trimmed t-test; bounds follow from Student's t."""
    settings = Settings(margin=0.005, trim=trim)
    estimate = trimmed(logs, trim)
    assert estimate.mean == pytest.approx(stats.trim_mean(logs, trim), abs=1e-12)
    error = math.sqrt(estimate.variance)
    if error < 1e-9 or estimate.freedom == 0:  # the t-statistic would be all rounding
        return
    if trim == 0:
        assert error == pytest.approx(stats.sem(logs))
    # Both samples have the same variance and number, so that Yuen's test has twice the variance.
    tested = bounds(estimate, len(logs), level, settings)
    yuen = stats.ttest_ind(
        logs, [math.log1p(0.005) * 2 - value for value in logs], trim=trim, equal_var=False
    )
    difference = 2 * (estimate.mean - math.log1p(0.005))
    assert difference / (math.sqrt(2) * error) == pytest.approx(yuen.statistic, rel=1e-6, abs=1e-6)
    t = stats.t(estimate.freedom)
    assert tested.p == pytest.approx(t.sf((estimate.mean - math.log1p(0.005)) / error), rel=1e-5, abs=1e-9)
    for bound, log in (
        (tested.effect, estimate.mean),
        (tested.low, estimate.mean - t.ppf(1 - level) * error),
        (tested.high, estimate.mean + t.ppf(1 - settings.beta) * error),
    ):
        assert bound == pytest.approx(math.expm1(min(log, 100)), rel=1e-6, abs=1e-9)


def test_bounds_of_extreme_replicates_are_finite() -> None:
    """Equal replicates are certain, without division by zero; the widest ones do not overflow."""
    for log, p in ((0.1, 0.0), (0.006, 0.0), (0.005, 0.0), (math.log1p(0.005), 1.0), (0.0, 1.0), (-1.0, 1.0)):
        tested = bounds(trimmed([log] * 3, 0.2), 3, 0.01, SETTINGS)
        assert (tested.p, tested.low, tested.high) == (p, tested.effect, tested.effect), log
    widest = math.log(1e18)
    for logs in ([-widest, widest, -widest], [-widest, widest] * 5):
        tested = bounds(trimmed(logs, 0.2), len(logs), 0.01 / 60, SETTINGS)
        assert all(math.isfinite(value) for value in (tested.low, tested.high, tested.p))


def test_the_mean_over_cells_adds_their_variances() -> None:
    """Its freedom is between that of one cell and of all, by Welch and Satterthwaite."""
    alike = mean_over_cells([Estimate(0.01, 4.0, 9)] * 10)
    assert alike == pytest.approx(Estimate(0.01, 0.4, 90))
    assert mean_over_cells([Estimate(0.0, 4.0, 9), Estimate(0.0, 0.0, 9)]) == Estimate(0.0, 1.0, 9)
    assert mean_over_cells([Estimate(0.0, 0.0, 9)] * 2) == Estimate(0.0, 0.0, 2)


def test_a_cell_at_the_margin_fails_at_the_level_of_its_test() -> None:
    """Over all looks together, also if set-ups have heavy tails; a much slower cell is always found."""
    rng = np.random.default_rng(0)
    level, suites = 0.2, 400

    def failures(slower: float, *, heavy: bool) -> int:
        found = 0
        for _ in range(suites):
            noise = rng.standard_t(3, SETTINGS.looks[-1]) if heavy else rng.normal(0, 1, SETTINGS.looks[-1])
            logs = math.log1p(slower) + 0.03 * noise
            looks = [new.tolist() for new in np.split(logs, SETTINGS.looks[:-1])]
            found += sequential_test(looks, level, SETTINGS)[0] == "FAIL"
        return found

    for heavy in (False, True):
        assert failures(SETTINGS.margin, heavy=heavy) <= level * suites + 3 * math.sqrt(level * suites)
        assert failures(0.03, heavy=heavy) == suites
        assert failures(0.0, heavy=heavy) < level * suites / 2


def test_pairs_of_processes_that_differ_are_no_slowdown() -> None:
    """What differs between the processes of a pair shifts all of its cells, and is not taken for a slowdown.

    With every set-up as a replicate, although those in a pair are alike, many of these gates would fail.
    """
    rng, pairs = np.random.default_rng(0), Settings.of(SETTINGS.margin, separate=True)
    failed = dict.fromkeys((4, 12), 0)
    for _, processes in itertools.product(range(50), failed):
        settings = pairs if processes == 12 else SETTINGS
        shifts = rng.normal(0.0, 0.05, processes)
        look: dict[str, list[Replicate]] = {name: [] for name in "ABCDEF"}
        for name, number in itertools.product(look, range(36)):
            process = number % processes
            head = math.exp(shifts[process] + rng.normal(0.0, 0.02))
            look[name].append(Replicate(0, process, name, ARMS[:1], ((1.0,),) * 2, ((head,),) * 2))
        looks = {name: [independent_log_ratios(set_ups, settings)] for name, set_ups in look.items()}
        verdicts = [*time_verdicts(looks, settings), mean_verdict(looks, settings)]
        failed[processes] += any(verdict.status == "FAIL" for verdict in verdicts)
    assert failed[12] <= 1
    assert failed[4] >= 12
