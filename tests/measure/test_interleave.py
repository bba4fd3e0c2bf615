"""Interleaved rounds, on a clock that only moves when a call is made."""

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
from typing_extensions import override

from esbench.measure.interleave import LATENCY, LEAST_ROUNDS, MOST_ROUNDS, TimedCall, interleave
from esbench.measure.timers import Visit
from esbench.schema import Conditions
from tests.fakes import CASE, FEWEST_ROUNDS, FakeClock, FakeScheme, FakeWorkload, World, raising


def tracks(world: World, *costs_s: float, budget_s: float = 1.0) -> list[TimedCall]:
    """Return warm tracks of variants A, B, ... of these costs, with nothing in the log."""
    schemes = [FakeScheme(chr(ord("A") + i), world, cost_s=cost_s) for i, cost_s in enumerate(costs_s)]
    warm = [track_of(scheme, world, budget_s=budget_s) for scheme in schemes]
    for track in warm:
        track.warm_up()
    world.log.clear()
    return warm


def order(seed: int = 0) -> random.Random:
    """Return what shuffles the rounds."""
    return random.Random(seed)  # noqa: S311  # an order, not a secret


def track_of(scheme: FakeScheme, world: World, **options: Any) -> TimedCall:
    """Return a track of a scheme's forward with a budget of a second."""
    workload = FakeWorkload(scheme, CASE)
    return TimedCall(workload.phases["forward"], world.clock, options.pop("budget_s", 1.0), **options)


def test_a_round_visits_every_variant_and_goes_back_in_the_reverse_order() -> None:
    """Each round is a permutation of the variants followed by its mirror image."""
    world = World()
    interleave(tracks(world, 0.01, 0.01, 0.01), order())
    for start in range(0, len(world.log), 6):
        there, back = world.log[start : start + 3], world.log[start + 3 : start + 6]
        assert sorted(there) == ["A", "B", "C"]
        assert back == there[::-1]


def test_rounds_are_shuffled_and_the_seed_decides_how() -> None:
    """Two runs with one seed have one order, which is not the same in all rounds."""
    orders = []
    for seed in (1, 1, 2):
        world = World()
        interleave(tracks(world, 0.01, 0.01, 0.01), order(seed))
        orders.append(world.log)
    assert orders[0] == orders[1] != orders[2]
    assert len({tuple(orders[0][i : i + 3]) for i in range(0, len(orders[0]), 6)}) > 1


def test_a_round_holds_the_samples_of_both_visits() -> None:
    """Two visits of one call each give two samples, until there are enough rounds."""
    (track,) = tracks(World(jitter=0.2), 0.01)
    interleave([track], order())
    assert [len(samples) for samples in track.rounds[LATENCY]] == [2] * MOST_ROUNDS
    assert track.rounds[LATENCY][0] == pytest.approx((1.1e7, 1.1e7), rel=0.1)
    assert track.stop == "20 rounds"


def test_a_slow_variant_leaves_the_rounds_and_the_others_go_on() -> None:
    """A budget of a second buys four rounds of two calls of 0.11 s; the quick ones get all rounds."""
    quick, slow = tracks(World(jitter=0.2), 0.01, 0.11)
    interleave([quick, slow], order())
    assert len(quick.rounds[LATENCY]) == MOST_ROUNDS
    assert len(slow.rounds[LATENCY]) == 4
    assert slow.stop == "budget of 1 s"


def test_a_budget_of_one_round_is_overdrawn_for_three_unless_that_is_far_beyond() -> None:
    """Calls that fill a budget of a second have three rounds, up to four times that budget."""
    cases: list[tuple[float, int]] = [
        (0.3, LEAST_ROUNDS),
        (0.55, LEAST_ROUNDS),
        (0.8, 1),
    ]
    for call_s, rounds in cases:
        _, slow = tracks(World(jitter=0.05), 0.01, call_s)
        interleave([_, slow], order())
        assert len(slow.rounds[LATENCY]) == rounds
        assert slow.stop == "budget of 1 s"


def test_a_variant_slower_than_its_budget_gives_one_sample() -> None:
    """It is called once to be timed, stays out of the rounds, and the row says so."""
    world = World()
    quick, slow = tracks(world, 0.01, 3.0)
    interleave([quick, slow], order())
    assert slow.rounds[LATENCY] == [pytest.approx((3e9,))]
    assert slow.stop == "one sample: a call takes longer than the budget of 1 s"
    assert "B" not in world.log


def test_a_variant_that_raises_leaves_the_rounds_of_the_others_aligned() -> None:
    """Half a round of a variant that raised is dropped; the others have all of theirs."""
    world = World(jitter=0.2)
    good, bad = (
        track_of(scheme, world)
        for scheme in (FakeScheme("A", world), FakeScheme("B", world, act=raising(ValueError("no"), after=4)))
    )
    for track in (good, bad):
        track.warm_up()
    interleave([good, bad], order())
    assert len(good.rounds[LATENCY]) == MOST_ROUNDS
    assert len(bad.rounds[LATENCY]) == 1
    assert bad.failure == ("failed", "ValueError: no")


def test_garbage_is_not_collected_while_a_call_is_timed() -> None:
    """Off in every call of the rounds, on again afterwards."""
    world = World()
    states = []
    scheme = FakeScheme("A", world, act=lambda *_: states.append(gc.isenabled()))
    track = track_of(scheme, world)
    track.warm_up()
    interleave([track], order())
    assert states
    assert not any(states)
    assert gc.isenabled()


def test_a_call_whose_median_is_known_well_enough_leaves_the_rounds() -> None:
    """As soon as there is an interval if it is narrow; not at all where the samples vary."""
    cases: list[tuple[float, int]] = [
        (0.0, FEWEST_ROUNDS),
        (0.2, MOST_ROUNDS),
    ]
    for jitter, rounds in cases:
        (track,) = tracks(World(jitter=jitter), 0.01)
        interleave([track], order())
        assert len(track.rounds[LATENCY]) == rounds
        assert ("interval" in track.stop) == (rounds == FEWEST_ROUNDS)


def test_one_that_stays_is_there_as_long_as_another_is_compared_with_it() -> None:
    """Base leaves with the last variant, though its own median has long been known."""
    world = World(jitter=0.0)
    noisy = World(jitter=0.2)
    base, variant = FakeScheme("Base", world), FakeScheme("A", noisy)
    tracks_ = [track_of(base, world, is_baseline=True), track_of(variant, noisy)]
    for track in tracks_:
        track.warm_up()
    interleave(tracks_, order())
    assert [len(track.rounds[LATENCY]) for track in tracks_] == [MOST_ROUNDS, MOST_ROUNDS]


def test_the_order_of_each_round_is_stored() -> None:
    """Places are a permutation in each round, not the same in all."""
    found = tracks(World(jitter=0.2), 0.01, 0.01, 0.01)
    interleave(found, order())
    rounds = list(zip(*(track.positions for track in found), strict=True))
    assert all(sorted(places) == [0, 1, 2] for places in rounds)
    assert len(set(rounds)) > 1


def test_conditions_are_read_beside_every_visit() -> None:
    """Two in each round, that of the warm-up is not kept; where the device says nothing there are none."""
    world = World()
    readings = iter(Conditions(clock_hz=1e9 + number) for number in range(1000))
    telling = track_of(FakeScheme("A", world), world, conditions=lambda: next(readings))
    silent = track_of(FakeScheme("B", world), world)
    for track in (telling, silent):
        track.warm_up()
    interleave([telling, silent], order())
    assert [len(beside) for beside in telling.conditions] == [2] * FEWEST_ROUNDS
    assert telling.conditions[0][0].clock_hz == 1e9 + 1
    assert silent.conditions == []


class LabellingClock(FakeClock):
    """Says of every visit that the device waited in one sample, and that memory was taken."""

    @override
    def visit(self, call: Callable[[], object], calls: int) -> Visit:
        taken = super().visit(call, calls)
        return Visit({**taken.samples, "warm_latency_ns": (1.0,) * calls}, dispatch_bound=1, grown=True)


def test_what_a_clock_says_of_its_samples_is_counted() -> None:
    """Labels say in how many of all; nothing is dropped, and other metrics have their own rounds."""
    world = World()
    world.clock = LabellingClock()
    (track,) = tracks(world, 0.01)
    interleave([track], order())
    assert track.labels == (
        "dispatch-bound: in 12 of 12 samples the device waited",
        "allocated device memory while timed, in 12 visits",
    )
    assert [len(samples) for samples in track.rounds["warm_latency_ns"]] == [2] * FEWEST_ROUNDS


class BackwardsClock(FakeClock):
    """Goes backwards once."""

    @override
    def visit(self, call: Callable[[], object], calls: int) -> Visit:
        return Visit({LATENCY: (-5.0,) * calls})


def test_a_clock_that_goes_backwards_is_a_fault() -> None:
    """No negative time gets into a row."""
    world = World()
    world.clock = BackwardsClock()
    (track,) = tracks(world, 0.01)
    interleave([track], order())
    assert track.failure is not None
    assert track.failure.status == "failed"
    assert "backwards" in track.failure.reason
    assert track.rounds == {}
