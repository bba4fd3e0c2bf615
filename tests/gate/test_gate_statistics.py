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

from esbench.gate.decision import (
    MEAN,
    bounds,
    geometric_mean,
    holm,
    replicate_log_ratio,
    screen,
    suspects,
    variance_prior,
)
from esbench.gate.records import ARMS, Arm, Settings, Timed
from tests.gate.gate_cases import timed

LOGS = st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=13)
LEVELS = st.sampled_from([0.01, 0.05, 0.2])


@st.composite
def replicates(draw: st.DrawFn) -> Timed:
    """Return times of two workers, in rounds of two visits each."""
    rounds = draw(st.integers(1, 25))
    visit = st.lists(st.floats(1.0, 1e9), min_size=1, max_size=8).map(tuple)
    visits = st.lists(visit, min_size=2 * rounds, max_size=2 * rounds).map(tuple)
    return Timed(cell="A", first=(ARMS[0],) * rounds, base=draw(visits), head=draw(visits))


def of_visits(base: Sequence[float], head: Sequence[float]) -> Timed:
    """Return a replicate whose visits have one launch each."""
    count = len(base) // 2
    visits = (tuple((t,) for t in arm) for arm in (base, head))
    return Timed(cell="A", first=(ARMS[0],) * count, base=next(visits), head=next(visits))


@given(replicates(), st.sampled_from([0.0, 0.1, 0.25]), st.floats(0.01, 100.0))
def test_a_replicate_is_the_trimmed_mean_of_its_rounds(one: Timed, trim: float, factor: float) -> None:
    """A round is log(geometric mean of head / that of base); a factor on both arms cancels."""
    logs = []
    for place in range(0, len(one.base), 2):
        medians = [median(visit) for arm in (one.base, one.head) for visit in arm[place : place + 2]]
        b1, b2, h1, h2 = medians
        logs.append(math.log(math.sqrt(h1) * math.sqrt(h2) / (math.sqrt(b1) * math.sqrt(b2))))
    dropped = int(trim * len(logs))
    expected = fmean(sorted(logs)[dropped : len(logs) - dropped])
    found = replicate_log_ratio(one, trim)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    base, head = (
        tuple(tuple(factor * value for value in visit) for visit in arm) for arm in (one.base, one.head)
    )
    for other, moved in (
        (Timed(cell="A", first=one.first, base=base, head=head), found),
        (Timed(cell="A", first=one.first, base=one.base, head=head), found + math.log(factor)),
        (Timed(cell="A", first=one.first, base=one.head, head=one.base), -found),
    ):
        assert replicate_log_ratio(other, trim) == pytest.approx(moved, abs=1e-9)


def test_outliers_do_not_move_a_replicate() -> None:
    """Two rounds of twenty may take a million times as long, and the first launch of a visit may be slow."""
    for bursts in ((1e6, 1e6), (1.0, 1e6), (1e6, 1.0)):
        head = [burst for burst in (*bursts, *[1.0] * 18) for _ in range(2)]
        assert replicate_log_ratio(of_visits([1.0] * 40, head), 0.1) == pytest.approx(0.0, abs=1e-12)
    assert replicate_log_ratio(timed("A", math.log(1.25)), 0.1) == pytest.approx(math.log(1.25))


@given(st.lists(st.sampled_from(ARMS), min_size=1, max_size=20), st.floats(-0.05, 0.05), st.floats(-0.2, 0.2))
def test_linear_drift_cancels(first: list[Arm], drift: float, effect: float) -> None:
    """Drift cancels within a round of ABBA or BAAB; in a round of ABAB it would look like an effect."""
    visits: dict[Arm, list[float]] = {"base": [], "head": []}
    moment = itertools.count()
    for one in first:
        other: Arm = "head" if one == "base" else "base"
        for arm in (one, other, other, one):
            visits[arm].append(1e6 * math.exp(drift * next(moment) + effect * (arm == "head")))
    found = replicate_log_ratio(of_visits(visits["base"], visits["head"]), 0.1)
    assert found == pytest.approx(effect, abs=1e-10)
    times = [1e6 * math.exp(drift * moment) for moment in range(4)]
    assert replicate_log_ratio(of_visits(times[::2], times[1::2]), 0.0) == pytest.approx(drift)


@given(LOGS, LEVELS, st.sampled_from([0.0, 0.005, 0.02]))
def test_bounds_are_students(logs: list[float], alpha: float, null: float) -> None:
    """Effect, bounds, p-value and detectable effect follow from mean, standard error and Student's t."""
    error = stdev(logs) / math.sqrt(len(logs))
    if error < 1e-9:
        return
    found = bounds(logs, null=null, alpha=alpha, power=0.8)
    t = stats.t(len(logs) - 1)
    reach = t.ppf(1 - alpha) * error
    mde = (1 + null) * math.exp(reach + t.ppf(0.8) * error) - 1
    assert found.effect == pytest.approx(math.expm1(fmean(logs)), rel=1e-6, abs=1e-9)
    assert found.low == pytest.approx(math.expm1(fmean(logs) - reach), rel=1e-6, abs=1e-9)
    assert found.high == pytest.approx(math.expm1(min(fmean(logs) + reach, 100)), rel=1e-6, abs=1e-9)
    assert found.mde == pytest.approx(min(mde, math.expm1(100)), rel=1e-6, abs=1e-9)
    assert found.p == pytest.approx(t.sf((fmean(logs) - math.log1p(null)) / error), rel=1e-5, abs=1e-9)
    assert found.replicates == len(logs)
    if abs(found.p - alpha) > 1e-6:
        assert (found.low > null) == (found.p < alpha)
    assert found.low <= found.effect <= found.high


def test_bounds_of_extreme_replicates_are_finite() -> None:
    """Equal replicates are certain, without division by zero; the widest ones do not overflow."""
    for log, p in ((0.1, 0.0), (0.006, 0.0), (0.005, 0.0), (math.log1p(0.005), 1.0), (0.0, 1.0), (-1.0, 1.0)):
        found = bounds([log] * 3, null=0.005, alpha=0.01, power=0.8)
        assert (found.p, found.low, found.high) == (p, found.effect, found.effect), log
        assert found.mde == pytest.approx(0.005)
    widest = math.log(1e18)
    for logs in ([-widest, widest, -widest], [-widest, widest] * 5):
        found = bounds(logs, null=0.005, alpha=0.01 / 60, power=0.8)
        assert all(math.isfinite(value) for value in (found.low, found.high, found.mde, found.p))


def test_the_prior_is_that_which_the_variances_were_drawn_from() -> None:
    """Twenty thousand cells of two degrees of freedom recover it; shrunk t-statistics are t-distributed."""
    rng, cells = np.random.default_rng(3), 20_000
    for variance in (1e-6, 4.0):
        for freedom in (2.0, 4.0, 10.0):
            true = variance * freedom / rng.chisquare(freedom, cells)
            found = variance_prior((true * rng.chisquare(2, cells) / 2).tolist(), 2)
            assert found is not None
            assert found.variance == pytest.approx(variance, rel=0.1)
            assert found.freedom == pytest.approx(freedom, rel=0.25)
            assert found.pooled == 2 * cells
    samples = rng.normal(0, np.sqrt(4.0 / rng.chisquare(4.0, cells))[:, None], (cells, 3))
    variances = samples.var(axis=1, ddof=1).tolist()
    prior = variance_prior(variances, 2)
    assert prior is not None
    shrunk = [prior.shrink(one, 2) for one in variances]
    t = samples.mean(axis=1) / np.sqrt(np.array([one for one, _ in shrunk]) / 3)
    assert stats.kstest(t, stats.t(shrunk[0][1]).cdf).pvalue > 0.01


def test_variances_that_scatter_by_chance_alone_are_pooled() -> None:
    """The prior then has infinite degrees of freedom; too few or equal replicates have no prior."""
    found = variance_prior([1.0, 1.1, 0.9, 1.0], 2)
    assert found is not None
    assert (found.freedom, found.pooled) == (math.inf, 8.0)
    assert found.variance == pytest.approx(math.exp(np.euler_gamma) * 0.99**0.25)
    assert found.shrink(100.0, 2) == (found.variance, 8.0)
    assert variance_prior([1.0, 2.0], 2) is None
    assert variance_prior([0.0] * 50 + [1.0, 2.0], 2) is None
    assert variance_prior([0.0] * 50 + [1.0, 2.0, 3.0], 2) is not None


def test_the_screen_learns_from_all_cells() -> None:
    """Three replicates that agree by chance do not make a cell precise; the false-alarm rate is nominal."""
    settings = Settings()
    alone = bounds([0.0, 0.1], null=0.0, alpha=0.05, power=0.8)
    assert screen({"a": [0.0, 0.1], "b": [0.2, 0.4]}, settings)["a"] == alone  # too few cells for a prior
    rng = np.random.default_rng(0)
    others = {str(place): logs for place, logs in enumerate(rng.normal(0, 0.01, (200, 3)).tolist())}
    lucky = [0.0, 0.0001, 0.0002]
    found, alone = screen({"lucky": lucky, **others}, settings), screen({"lucky": lucky}, settings)["lucky"]
    assert found["lucky"].mde > 5 * alone.mde
    assert found["lucky"].effect == alone.effect
    unshrunk = sorted(bounds(one, null=0.0, alpha=0.05, power=0.8).mde for one in others.values())
    assert max(one.mde for one in found.values()) < unshrunk[-20]  # nor does chance make a cell noisy
    for scatter in (0.0, 0.5):  # one in twenty cells without an effect is confirmed
        count = 0
        for _ in range(20):
            noise = 0.01 * np.exp(rng.normal(0, scatter, (200, 1)))
            cells = dict(enumerate(rng.normal(0, noise, (200, 3)).tolist()))
            found = screen({str(name): logs for name, logs in cells.items()}, settings)
            count += len(suspects(found, settings) - {MEAN})
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
def test_levels_are_holms(p_values: dict[str, float], alpha: float) -> None:
    """The levels reject the same members as the closed test."""
    levels = holm(p_values, alpha)
    assert {name for name, p in p_values.items() if p <= levels[name]} == rejected_by_closure(p_values, alpha)
    assert all(alpha / len(p_values) <= level <= alpha for level in levels.values())


@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_mean_over_cells_is_geometric(ratios: list[list[float]]) -> None:
    """Each replicate has its own mean."""
    cells = {str(place): list(map(math.log, of_cell)) for place, of_cell in enumerate(ratios)}
    expected = [math.prod(column) ** (1 / len(ratios)) for column in zip(*ratios, strict=True)]
    assert [math.exp(log) for log in geometric_mean(cells)] == pytest.approx(expected)
