"""The numbers of the gate: what a replicate says, what replicates say together, what could be seen."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.gate.evidence import bounds, estimate, geometric_mean, holm, screened, screened_alone
from esbench.gate.protocol import ARMS, Arm
from esbench.gate.records import Bounds, Settings, Timed
from tests.gate.gate_cases import timed

TIMES = st.floats(1.0, 1e9)
VISIT = st.lists(TIMES, min_size=1, max_size=8).map(tuple)
ROUNDS = st.integers(1, 25)
LOGS = st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=13)
LEVELS = st.sampled_from([0.01, 0.05, 0.2])


@st.composite
def replicates(draw: st.DrawFn) -> Timed:
    """What two workers may have taken, in rounds of two visits each."""
    rounds = draw(ROUNDS)
    visits = st.lists(VISIT, min_size=2 * rounds, max_size=2 * rounds).map(tuple)
    return Timed(cell="A", first=(ARMS[0],) * rounds, base=draw(visits), head=draw(visits))


def of_visits(base: Sequence[float], head: Sequence[float]) -> Timed:
    """A replicate whose visits have one launch each."""
    count = len(base) // 2
    return Timed(
        cell="A", first=(ARMS[0],) * count, base=tuple((t,) for t in base), head=tuple((t,) for t in head)
    )


def logs_of_rounds(one: Timed) -> list[float]:
    """What each round says, written out: the log of head's geometric mean over base's."""
    found = []
    for place in range(0, len(one.base), 2):
        b1, b2, h1, h2 = (
            median(visit) for visit in (*one.base[place : place + 2], *one.head[place : place + 2])
        )
        found.append(math.log(math.sqrt(h1) * math.sqrt(h2) / (math.sqrt(b1) * math.sqrt(b2))))
    return found


@given(replicates(), st.sampled_from([0.0, 0.1, 0.25]))
def test_a_replicate_is_the_trimmed_mean_of_its_rounds(one: Timed, trim: float) -> None:
    """Sorted, the same number of rounds dropped at either end, the rest averaged."""
    rounds = sorted(logs_of_rounds(one))
    dropped = int(trim * len(rounds))
    expected = fmean(rounds[dropped : len(rounds) - dropped])
    assert estimate(one, trim) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.floats(1.0, 1e8), st.lists(st.sampled_from([1.0, 1e6]), min_size=20, max_size=20))
def test_rounds_at_either_end_do_not_move_a_replicate(level: float, bursts: list[float]) -> None:
    """Two rounds of twenty may be as wrong as they like."""
    bursts[2:] = [1.0] * 18
    head = [level * burst for burst in bursts for _ in range(2)]
    assert estimate(of_visits([level] * 40, head), 0.1) == pytest.approx(0.0, abs=1e-12)


@given(
    st.lists(st.sampled_from(ARMS), min_size=1, max_size=20),
    st.floats(-0.05, 0.05),
    st.floats(-0.2, 0.2),
    st.floats(0.0, 0.1),
)
def test_what_drifts_evenly_cancels(first: list[Arm], drift: float, effect: float, trim: float) -> None:
    """Inside a round, whoever is visited first and last: the effect comes out as it is."""
    visits: dict[Arm, list[float]] = {"base": [], "head": []}
    moment = itertools.count()
    for one in first:
        other: Arm = "head" if one == "base" else "base"
        for arm in (one, other, other, one):
            visits[arm].append(1e6 * math.exp(drift * next(moment) + effect * (arm == "head")))
    found = estimate(of_visits(visits["base"], visits["head"]), trim)
    assert found == pytest.approx(effect, abs=1e-10)


def test_what_drifts_does_not_cancel_where_arms_alternate() -> None:
    """In rounds of ABAB it would pass for an effect, which is why there are none."""
    times = [1e6 * math.exp(0.01 * moment) for moment in range(4)]
    assert estimate(of_visits(times[::2], times[1::2]), 0.0) == pytest.approx(0.01)


@given(replicates(), st.floats(0.01, 100.0))
def test_a_faster_machine_gives_the_same_replicate(one: Timed, factor: float) -> None:
    """All times may be multiplied; those of head alone move it by the log of the factor."""

    def scaled(visits: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(factor * value for value in visit) for visit in visits)

    both = Timed(cell="A", first=one.first, base=scaled(one.base), head=scaled(one.head))
    head = Timed(cell="A", first=one.first, base=one.base, head=scaled(one.head))
    swapped = Timed(cell="A", first=one.first, base=one.head, head=one.base)
    found = estimate(one, 0.1)
    assert estimate(both, 0.1) == pytest.approx(found, abs=1e-9)
    assert estimate(head, 0.1) == pytest.approx(found + math.log(factor), abs=1e-9)
    assert estimate(swapped, 0.1) == pytest.approx(-found, abs=1e-9)


def test_the_first_launch_of_a_visit_does_not_count() -> None:
    """It takes the caches back; where it is the only one it has to."""
    assert estimate(timed("A", math.log(1.25)), 0.1) == pytest.approx(math.log(1.25))
    assert estimate(of_visits([2.0, 2.0], [6.0, 6.0]), 0.1) == pytest.approx(math.log(3))


def t_of(p: float, freedom: int) -> float:
    """Student's t by its closed forms: who stays below it with probability p."""
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    assert freedom == 4
    alpha = 4 * p * (1 - p)
    q = math.cos(math.acos(math.sqrt(alpha)) / 3) / math.sqrt(alpha)
    return math.copysign(2 * math.sqrt(q - 1), p - 0.5)


def tail_of(t: float, freedom: int) -> float:
    """The probability of more than t, by closed forms."""
    if freedom == 1:
        return 0.5 - math.atan(t) / math.pi
    if freedom == 2:
        return 0.5 - t / (2 * math.sqrt(2 + t * t))
    assert freedom == 4
    half = 1 + t * t / 4
    return 0.5 - 3 / 8 * t / math.sqrt(half) * (1 - t * t / (12 * half))


@given(
    st.sampled_from([2, 3, 5]).flatmap(
        lambda count: st.lists(st.floats(-0.5, 0.5), min_size=count, max_size=count)
    ),
    LEVELS,
    st.sampled_from([0.0, 0.005, 0.02]),
)
def test_bounds_are_students(logs: list[float], alpha: float, null: float) -> None:
    """Mean and standard error, t from its closed forms: effect, bounds, probability, what could be seen."""
    error = stdev(logs) / math.sqrt(len(logs))
    if error < 1e-9:
        return
    found = bounds(logs, null=null, alpha=alpha, power=0.8)
    freedom = len(logs) - 1
    reach, seen = t_of(1 - alpha, freedom) * error, t_of(0.8, freedom) * error
    assert found.effect == pytest.approx(math.expm1(fmean(logs)), rel=1e-6, abs=1e-9)
    assert found.low == pytest.approx(math.expm1(fmean(logs) - reach), rel=1e-6, abs=1e-9)
    assert found.high == pytest.approx(math.expm1(fmean(logs) + reach), rel=1e-6, abs=1e-9)
    assert found.mde == pytest.approx((1 + null) * math.exp(reach + seen) - 1, rel=1e-6, abs=1e-9)
    assert found.p == pytest.approx(
        tail_of((fmean(logs) - math.log1p(null)) / error, freedom), rel=1e-5, abs=1e-9
    )
    assert found.replicates == len(logs)


@given(LOGS, LEVELS, st.sampled_from([0.0, 0.005]))
def test_the_lower_bound_is_above_the_margin_where_the_probability_is_below_the_level(
    logs: list[float], alpha: float, null: float
) -> None:
    """Two ways to say the same."""
    found = bounds(logs, null=null, alpha=alpha, power=0.8)
    if abs(found.p - alpha) > 1e-6 and stdev(logs) > 1e-9:
        assert (found.low > null) == (found.p < alpha)
    assert found.low <= found.effect <= found.high
    assert found.mde >= null - 1e-12


@pytest.mark.parametrize(
    ("log", "p"), [(0.006, 0.0), (0.005, 0.0), (math.log1p(0.005), 1.0), (0.0, 1.0), (-1.0, 1.0)]
)
def test_replicates_that_agree_to_the_last_digit_are_no_division_by_zero(log: float, p: float) -> None:
    """Their effect is certain, on the one side of the margin or on the other."""
    found = bounds([log] * 3, null=0.005, alpha=0.01, power=0.8)
    assert (found.p, found.low, found.high) == (p, found.effect, found.effect)
    assert found.mde == pytest.approx(0.005)


def test_the_widest_times_have_bounds_of_finite_numbers() -> None:
    """As wide apart as a clock's reading may be: nothing overflows that must be written down."""
    widest = math.log(1e18)
    for logs in ([-widest, widest, -widest], [-widest, widest] * 5):
        found = bounds(logs, null=0.005, alpha=0.01 / 60, power=0.8)
        assert all(math.isfinite(value) for value in (found.low, found.high, found.mde, found.p))


def test_the_screen_asks_for_any_slowdown() -> None:
    """Not for one beyond the margin, and at a level of its own."""
    settings, logs = Settings(screen_alpha=0.05, power=0.8), [0.001, 0.002, 0.003]
    alone = bounds(logs, null=0.0, alpha=0.05, power=0.8)
    assert screened_alone(logs, settings) == alone
    assert screened({"a": logs, "b": [0.0, 0.1, 0.4]}, settings)["a"] == alone


def test_many_cells_tell_the_screen_more_of_one_than_its_three_replicates() -> None:
    """By chance three agree: among cells that scatter that is less certain."""
    rng, settings = random.Random(0), Settings()  # noqa: S311  # noise, not a secret
    others = {str(place): [rng.gauss(0, 0.01) for _ in range(3)] for place in range(200)}
    lucky = [0.0, 0.0001, 0.0002]
    found = screened({"lucky": lucky, **others}, settings)
    assert found["lucky"].mde > 5 * screened_alone(lucky, settings).mde
    assert found["lucky"].effect == screened_alone(lucky, settings).effect
    mdes = sorted(one.mde for one in found.values())
    plain = sorted(screened_alone(one, settings).mde for one in others.values())
    assert mdes[-1] < plain[-20]  # none is condemned by a chance that hits one in ten of three replicates


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_a_moderated_screen_keeps_as_many_as_it_says(spread: float) -> None:
    """Of cells that do not differ one in twenty, also where some are noisier than others."""
    rng, settings, kept = random.Random(1), Settings(), 0  # noqa: S311  # noise, not a secret
    for _ in range(20):
        cells = {}
        for place in range(200):
            noise = 0.01 * math.exp(rng.gauss(0, spread))
            cells[str(place)] = [rng.gauss(0, noise) for _ in range(3)]
        kept += sum(one.p < settings.screen_alpha for one in screened(cells, settings).values())
    assert abs(kept - 200) < 4 * math.sqrt(4000 * 0.05 * 0.95)


def repeated(effect: float, noise: float, count: int, alpha: float) -> list[Bounds]:
    """The bounds of many gates' replicates, drawn from a seed."""
    rng = random.Random(0)  # noqa: S311  # noise, not a secret
    return [
        bounds([rng.gauss(effect, noise) for _ in range(count)], null=0.005, alpha=alpha, power=0.8)
        for _ in range(2000)
    ]


@pytest.mark.parametrize(("count", "alpha"), [(3, 0.05), (10, 0.01)])
def test_bounds_cover_what_is_true_as_often_as_they_say(count: int, alpha: float) -> None:
    """In a seeded simulation of 2000 gates, within three standard errors; so an alarm is false as rarely."""
    found = repeated(math.log1p(0.005), 0.003, count, alpha)
    expected, error = 2000 * alpha, math.sqrt(2000 * alpha * (1 - alpha))
    for missed in (
        sum(one.low > 0.005 for one in found),
        sum(one.high < 0.005 for one in found),
        sum(one.p < alpha for one in found),
    ):
        assert abs(missed - expected) < 3 * error


def test_what_could_be_seen_is_seen_four_times_in_five() -> None:
    """Who is slower by the middle of what gates say that they could see is found by some 80 % of them."""
    seen = median(one.mde for one in repeated(0.0, 0.003, 10, 0.01))
    found = repeated(math.log1p(seen), 0.003, 10, 0.01)
    assert sum(one.p < 0.01 for one in found) / len(found) == pytest.approx(0.8, abs=0.05)


P_VALUES = st.dictionaries(
    st.sampled_from("ABCDEF"),
    st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.01, 0.01 / 2, 0.01 / 3, 0.01 / 4, 0.02])),
    min_size=1,
)


def rejected_by_closure(p_values: Mapping[str, float], alpha: float) -> set[str]:
    """Holm's rejections by what they are: of whom every family that holds them is, by Bonferroni."""

    def is_rejected(family: Sequence[str]) -> bool:
        return min(p_values[name] for name in family) <= alpha / len(family)

    families = [
        family for size in range(1, len(p_values) + 1) for family in itertools.combinations(p_values, size)
    ]
    return {name for name in p_values if all(is_rejected(one) for one in families if name in one)}


@given(P_VALUES, st.sampled_from([0.01, 0.05]))
def test_levels_are_holms(p_values: dict[str, float], alpha: float) -> None:
    """Whose p is at most its level is whom the closed test rejects, ties among them."""
    levels = holm(p_values, alpha)
    assert {name for name, p in p_values.items() if p <= levels[name]} == rejected_by_closure(p_values, alpha)
    assert all(alpha / len(p_values) <= level <= alpha for level in levels.values())


@given(P_VALUES, st.randoms(use_true_random=False))
def test_levels_do_not_depend_on_the_order_of_a_family(
    p_values: dict[str, float], rng: random.Random
) -> None:
    """Nor are they other ones for a member that stands elsewhere, but among equals."""
    names = list(p_values)
    rng.shuffle(names)
    one, other = holm(p_values, 0.05), holm({name: p_values[name] for name in names}, 0.05)
    assert sorted(one.values()) == sorted(other.values())
    assert {n for n, p in p_values.items() if p <= one[n]} == {
        n for n, p in p_values.items() if p <= other[n]
    }


def test_nobody_has_no_level() -> None:
    """A family without members has no levels."""
    assert holm({}, 0.01) == {}


@given(st.lists(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_mean_over_cells_is_geometric(ratios: list[list[float]]) -> None:
    """Of each replicate by itself: the root of the product of the cells' ratios."""
    by_cell = {str(place): [math.log(one) for one in found] for place, found in enumerate(ratios)}
    expected = [math.prod(column) ** (1 / len(ratios)) for column in zip(*ratios, strict=True)]
    assert [math.exp(one) for one in geometric_mean(by_cell)] == pytest.approx(expected)


def test_the_mean_is_not_taken_over_other_replicates_for_other_cells() -> None:
    """A cell that lacks one has no place in it."""
    with pytest.raises(ValueError, match="shorter"):
        geometric_mean({"A": [0.0, 0.0], "B": [0.0]})
