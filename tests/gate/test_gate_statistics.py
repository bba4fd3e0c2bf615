"""The statistics of the gate: log ratios, bounds, shrunk variances and Holm's levels."""

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from esbench.gate.decision import MEAN, bounds, holm, replicate_log_ratio, screen, suspects, variance_prior
from esbench.gate.records import ARMS, Arm, Settings, Timed

LOGS = st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=13)
LEVELS = st.sampled_from([0.01, 0.05, 0.2])


@st.composite
def replicates(draw: st.DrawFn) -> Timed:
    """Return times of two workers, in rounds of two visits each."""
    rounds = draw(st.integers(1, 12))
    visit = st.lists(st.floats(1.0, 1e9), min_size=1, max_size=3).map(tuple)
    visits = st.lists(visit, min_size=2 * rounds, max_size=2 * rounds).map(tuple)
    return Timed(cell="A", first=(ARMS[0],) * rounds, base=draw(visits), head=draw(visits))


def of_visits(base: Sequence[float], head: Sequence[float]) -> Timed:
    """Return a replicate whose visits have one launch each, which takes these times in ns."""
    rounds = len(base) // 2
    base_visits, head_visits = (tuple((time_ns,) for time_ns in times_ns) for times_ns in (base, head))
    return Timed(cell="A", first=(ARMS[0],) * rounds, base=base_visits, head=head_visits)


@given(replicates(), st.sampled_from([0.0, 0.1, 0.25]), st.floats(0.01, 100.0))
def test_a_replicate_is_the_trimmed_mean_of_its_rounds(timed: Timed, trim: float, factor: float) -> None:
    """A round is log(geometric mean of head / that of base); a factor on both arms cancels."""
    logs = []
    for index in range(0, len(timed.base), 2):
        medians = [median(visit) for arm in (timed.base, timed.head) for visit in arm[index : index + 2]]
        b1, b2, h1, h2 = medians
        logs.append(math.log(math.sqrt(h1) * math.sqrt(h2) / (math.sqrt(b1) * math.sqrt(b2))))
    dropped = int(trim * len(logs))
    expected = fmean(sorted(logs)[dropped : len(logs) - dropped])
    log_ratio = replicate_log_ratio(timed, trim)
    assert log_ratio == pytest.approx(expected, rel=1e-9, abs=1e-9)
    base, head = (
        tuple(tuple(factor * value for value in visit) for visit in arm) for arm in (timed.base, timed.head)
    )
    for changed, expected_log_ratio in (
        (Timed(cell="A", first=timed.first, base=base, head=head), log_ratio),
        (Timed(cell="A", first=timed.first, base=timed.base, head=head), log_ratio + math.log(factor)),
        (Timed(cell="A", first=timed.first, base=timed.head, head=timed.base), -log_ratio),
    ):
        assert replicate_log_ratio(changed, trim) == pytest.approx(expected_log_ratio, abs=1e-9)


@given(st.lists(st.sampled_from(ARMS), min_size=1, max_size=20), st.floats(-0.05, 0.05), st.floats(-0.2, 0.2))
def test_linear_drift_cancels(first: list[Arm], drift: float, effect: float) -> None:
    """Drift cancels within a round of ABBA or BAAB."""
    visits: dict[Arm, list[float]] = {"base": [], "head": []}
    moment = itertools.count()
    for arm_a in first:
        arm_b: Arm = "head" if arm_a == "base" else "base"
        for arm in (arm_a, arm_b, arm_b, arm_a):
            visits[arm].append(1e6 * math.exp(drift * next(moment) + effect * (arm == "head")))
    log_ratio = replicate_log_ratio(of_visits(visits["base"], visits["head"]), 0.1)
    assert log_ratio == pytest.approx(effect, abs=1e-10)


@given(LOGS, LEVELS, st.sampled_from([0.0, 0.005, 0.02]))
def test_bounds_follow_students_t(logs: list[float], alpha: float, null: float) -> None:
    """Effect, bounds, p-value and detectable effect follow from mean, standard error and Student's t."""
    error = stdev(logs) / math.sqrt(len(logs))
    if error < 1e-9:  # the t-statistic would be all rounding
        return
    tested = bounds(logs, null=null, alpha=alpha, power=0.8)
    t = stats.t(len(logs) - 1)
    reach = t.ppf(1 - alpha) * error
    mde = (1 + null) * math.exp(reach + t.ppf(0.8) * error) - 1
    assert tested.effect == pytest.approx(math.expm1(fmean(logs)), rel=1e-6, abs=1e-9)
    assert tested.low == pytest.approx(math.expm1(fmean(logs) - reach), rel=1e-6, abs=1e-9)
    assert tested.high == pytest.approx(math.expm1(min(fmean(logs) + reach, 100)), rel=1e-6, abs=1e-9)
    assert tested.mde == pytest.approx(min(mde, math.expm1(100)), rel=1e-6, abs=1e-9)
    assert tested.p == pytest.approx(t.sf((fmean(logs) - math.log1p(null)) / error), rel=1e-5, abs=1e-9)
    assert tested.replicates == len(logs)
    if abs(tested.p - alpha) > 1e-6:
        assert (tested.low > null) == (tested.p < alpha)
    assert tested.low <= tested.effect <= tested.high


def test_bounds_of_extreme_replicates_are_finite() -> None:
    """Equal replicates are certain, without division by zero; the widest ones do not overflow."""
    for log, p in ((0.1, 0.0), (0.006, 0.0), (0.005, 0.0), (math.log1p(0.005), 1.0), (0.0, 1.0), (-1.0, 1.0)):
        tested = bounds([log] * 3, null=0.005, alpha=0.01, power=0.8)
        assert (tested.p, tested.low, tested.high) == (p, tested.effect, tested.effect), log
        assert tested.mde == pytest.approx(0.005)
    widest = math.log(1e18)
    for logs in ([-widest, widest, -widest], [-widest, widest] * 5):
        tested = bounds(logs, null=0.005, alpha=0.01 / 60, power=0.8)
        assert all(math.isfinite(value) for value in (tested.low, tested.high, tested.mde, tested.p))


def test_the_prior_is_the_distribution_of_the_variances() -> None:
    """20,000 cells of two degrees of freedom recover the prior; shrunk t-statistics are t-distributed."""
    rng, cells = np.random.default_rng(3), 20_000
    for variance in (1e-6, 4.0):
        for freedom in (2.0, 4.0, 10.0):
            true = variance * freedom / rng.chisquare(freedom, cells)
            prior = variance_prior((true * rng.chisquare(2, cells) / 2).tolist(), 2)
            assert prior is not None
            assert prior.variance == pytest.approx(variance, rel=0.1)
            assert prior.freedom == pytest.approx(freedom, rel=0.25)
            assert prior.pooled == 2 * cells
    samples = rng.normal(0, np.sqrt(4.0 / rng.chisquare(4.0, cells))[:, None], (cells, 3))
    variances = samples.var(axis=1, ddof=1).tolist()
    prior = variance_prior(variances, 2)
    assert prior is not None
    shrunk = [prior.shrink(variance, 2) for variance in variances]
    t = samples.mean(axis=1) / np.sqrt(np.array([variance for variance, _ in shrunk]) / 3)
    assert stats.kstest(t, stats.t(shrunk[0][1]).cdf).pvalue > 0.01


def test_variances_that_scatter_by_chance_alone_are_pooled() -> None:
    """Their prior has infinite degrees of freedom; too few or equal replicates have no prior."""
    prior = variance_prior([1.0, 1.1, 0.9, 1.0], 2)
    assert prior is not None
    assert (prior.freedom, prior.pooled) == (math.inf, 8.0)
    assert prior.variance == pytest.approx(math.exp(np.euler_gamma) * 0.99**0.25)
    assert prior.shrink(100.0, 2) == (prior.variance, 8.0)
    assert variance_prior([1.0, 2.0], 2) is None
    assert variance_prior([0.0] * 50 + [1.0, 2.0], 2) is None
    assert variance_prior([0.0] * 50 + [1.0, 2.0, 3.0], 2) is not None


def test_the_screen_learns_from_all_cells() -> None:
    """Three replicates that agree by chance do not make a cell precise; the false-alarm rate is nominal."""
    settings = Settings()
    alone = bounds([0.0, 0.1], null=0.0, alpha=0.05, power=0.8)
    assert screen({"a": [0.0, 0.1], "b": [0.2, 0.4]}, settings)["a"] == alone  # too few cells for a prior
    rng = np.random.default_rng(0)
    others = {str(index): logs for index, logs in enumerate(rng.normal(0, 0.01, (200, 3)).tolist())}
    lucky = [0.0, 0.0001, 0.0002]
    screened, alone = (
        screen({"lucky": lucky, **others}, settings),
        screen({"lucky": lucky}, settings)["lucky"],
    )
    assert screened["lucky"].mde > 5 * alone.mde
    assert screened["lucky"].effect == alone.effect
    unshrunk = sorted(bounds(logs, null=0.0, alpha=0.05, power=0.8).mde for logs in others.values())
    assert max(cell.mde for cell in screened.values()) < unshrunk[-20]  # nor does chance make a cell noisy
    for scatter in (0.0, 0.5):  # one in twenty cells without an effect is confirmed
        count = 0
        for _ in range(20):
            noise = 0.01 * np.exp(rng.normal(0, scatter, (200, 1)))
            cells = dict(enumerate(rng.normal(0, noise, (200, 3)).tolist()))
            screened = screen({str(name): logs for name, logs in cells.items()}, settings)
            count += len(suspects(screened, settings) - {MEAN})
        assert abs(count - 200) < 4 * math.sqrt(4000 * 0.05 * 0.95)


P_VALUES = st.dictionaries(
    st.sampled_from("ABCDEF"),
    st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.01, 0.01 / 2, 0.01 / 3, 0.01 / 4, 0.02])),
    min_size=1,
)


def rejected_by_closure(p_values: Mapping[str, float], alpha: float) -> set[str]:
    """Return Holm's rejections by definition: Bonferroni rejects every family with the member."""
    families = [
        family for size in range(1, len(p_values) + 1) for family in itertools.combinations(p_values, size)
    ]
    rejected = {family: min(p_values[name] for name in family) <= alpha / len(family) for family in families}
    return {name for name in p_values if all(rejected[family] for family in families if name in family)}


@given(P_VALUES, st.sampled_from([0.01, 0.05]))
def test_levels_are_those_of_holms_method(p_values: dict[str, float], alpha: float) -> None:
    """The levels reject the same members as the closed test."""
    levels = holm(p_values, alpha)
    assert {name for name, p in p_values.items() if p <= levels[name]} == rejected_by_closure(p_values, alpha)
    assert all(alpha / len(p_values) <= level <= alpha for level in levels.values())
