"""Clocks, warm-up, visits and interleaved rounds, mostly on a fake clock that only calls advance."""

import gc
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from typing_extensions import override

from esbench.measure import timers
from esbench.measure.interleave import (
    LATENCY,
    MAX_CALLS,
    MAX_ROUNDS,
    MIN_ROUNDS,
    REFERENCE_ROUNDS,
    TimedCall,
    WarmUp,
    interleave,
    warm_up,
)
from esbench.measure.timers import Call, ClockError, HostClock, Visit, keep_inputs, quiet
from esbench.schema import Conditions
from tests.fakes import CASE, FEWEST_ROUNDS, FakeClock, FakeScheme, FakeWorkload, World, raising


def test_the_host_clock_times_each_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has a sample no shorter than its sleep; replacing the timer later has no effect."""
    call = time.perf_counter
    assert HostClock().prepare(call, 2) is call
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)  # the clock has bound the timer already
    samples = HostClock().visit(lambda: time.sleep(0.001), 3).samples["latency_ns"]
    assert len(samples) == 3
    assert min(samples) >= 1e6


def test_an_impossible_reading_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading of any metric that is zero, negative or not a number makes the row a reason, not a time."""
    times = iter([1000, 900])
    monkeypatch.setattr(timers, "_host_ns", lambda: next(times))
    with pytest.raises(ClockError, match=r"^the clock measured -100 ns for a call: "):
        HostClock().visit(lambda: None, 1)
    for value in (float("nan"), float("inf"), 0.0):
        with pytest.raises(ClockError, match=f"^the clock measured {value:g} ns for a call: "):
            Visit({"latency_ns": (1.0,), "warm_latency_ns": (2.0, value)})


def warmed(
    cost_s: Callable[[int], float], bounds_s: tuple[float, float], budget_s: float
) -> tuple[WarmUp, FakeClock, int]:
    """Warm up a call that takes ``cost_s(its number)``; return the result, the clock and the calls."""
    clock = FakeClock(warm_up_s=bounds_s)
    numbers: list[int] = []

    def call() -> None:
        numbers.append(len(numbers))
        clock.now_s += cost_s(numbers[-1])

    return warm_up(call, clock, budget_s), clock, len(numbers)


def test_warm_up_ends_when_block_medians_are_flat() -> None:
    """Calls that still get faster are warmed up further, and every call for the clock's minimum time."""
    warm, clock, calls = warmed(lambda number: max(0.01, 0.02 - 0.001 * number), (0.0, 10.0), 10.0)
    assert warm.call_ns == pytest.approx(1e7)
    assert not warm.slow
    assert 10 < calls < 20
    assert warm.state == f"flat after {calls} blocks, {clock.now_s:.2f} s"
    _, clock, _ = warmed(lambda _: 0.01, (0.3, 3.0), 1.0)
    assert 0.3 <= clock.now_s < 0.4


def test_warm_up_of_a_call_that_never_settles_is_bounded() -> None:
    """Warm-up ends at the clock's maximum or the cell's budget; a call longer than its budget runs once.

    A visit lasts two milliseconds within bounds, also if a single call of the warm-up is slow.
    """
    for budget_s, max_s in ((10.0, 3.0), (1.0, 1.0)):
        warm, clock, _ = warmed(lambda number: 0.01 * 1.05 ** min(number, 70), (0.3, 3.0), budget_s)
        assert max_s <= clock.now_s < max_s + 0.4  # the last block is completed
        assert warm.state == f"not flat after {clock.now_s:.2f} s"
    warm, _, calls = warmed(lambda _: 2.0, (0.3, 3.0), 1.0)
    assert warm == WarmUp(2e9, calls=1, slow=True, state="one call, longer than the budget")
    assert calls == 1
    warm, _, calls = warmed(lambda number: 0.015 if number == 600 else 1e-5, (0.02, 0.02), 1.0)
    assert 600 < calls <= 600 + MAX_CALLS  # the slow call is in the last block
    assert warm.calls == MAX_CALLS
    warm, _, _ = warmed(lambda _: 1e-4, (0.02, 0.02), 1.0)
    assert warm.calls in {20, 21}


def test_garbage_is_not_collected_while_a_call_is_timed() -> None:
    """The collector is off in every call, and restored to its earlier state, also after an error."""
    states: list[bool] = []
    world = World()
    call = timed(FakeScheme("A", world, act=lambda *_: states.append(gc.isenabled())), world)
    interleave([call], order())
    assert states
    assert not any(states)
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), quiet():
            _ = 1 / 0
        assert not gc.isenabled()
    finally:
        gc.enable()


def timed(scheme: FakeScheme, world: World, budget_s: float = 1.0, **options: Any) -> TimedCall:
    """Return the warmed-up call of a scheme's forward."""
    call = TimedCall(FakeWorkload(scheme, CASE).phases["forward"], world.clock, budget_s, **options)
    call.warm_up()
    return call


def calls_of(world: World, *costs_s: float) -> list[TimedCall]:
    """Return warm calls of variants A, B, ... with these costs, and clear the log."""
    schemes = [FakeScheme(chr(ord("A") + i), world, cost_s=cost_s) for i, cost_s in enumerate(costs_s)]
    warm = [timed(scheme, world) for scheme in schemes]
    world.log.clear()
    return warm


def order(seed: int = 0) -> random.Random:
    """Return the generator that shuffles the rounds."""
    return random.Random(seed)  # noqa: S311  # an order, not a secret


def test_a_round_has_a_shuffled_order_and_then_its_reverse() -> None:
    """The seed determines the order, which differs between rounds and is stored."""
    logs = []
    for seed in (1, 1, 2):
        world = World()
        calls = calls_of(world, 0.03, 0.03, 0.03)
        interleave(calls, order(seed))
        rounds = [world.log[start : start + 6] for start in range(0, len(world.log), 6)]
        for places, visits in zip(zip(*(call.positions for call in calls), strict=True), rounds, strict=True):
            assert sorted(visits[:3]) == ["A", "B", "C"]
            assert visits[3:] == visits[2::-1]
            assert [visits[position] for position in places] == ["A", "B", "C"]
        assert len({tuple(visits) for visits in rounds}) > 1
        logs.append(world.log)
    assert logs[0] == logs[1] != logs[2]


@pytest.mark.parametrize(("cost_s", "untimed"), [(0.001, 1), (0.015, 1), (0.03, 0)])
def test_a_visit_of_short_calls_begins_with_one_that_is_not_timed(cost_s: float, untimed: int) -> None:
    """Its time is not a sample, and does not count as one of the visit's calls."""
    world = World(jitter=0.2)
    (call,) = calls_of(world, cost_s)
    call.visit()
    call.visit()
    call.end_round(0, may_stop=False)
    (samples,) = call.rounds[LATENCY]
    assert len(samples) == 2 * call.warmed.calls
    assert len(world.log) == 2 * (call.warmed.calls + untimed)


def test_sampling_ends_with_the_budget_of_a_call() -> None:
    """A slow variant leaves the rounds and the others continue; at most three rounds go beyond the budget.

    Calls of 0.11 s have four rounds in a second; calls that fill the budget have three, which take up to four
    times the budget.
    """
    for jitter, call_s, rounds in ((0.2, 0.11, 4), (0.05, 0.3, MIN_ROUNDS), (0.05, 0.55, 3), (0.05, 0.8, 1)):
        quick, slow = calls_of(World(jitter=jitter), 0.01, call_s)
        interleave([quick, slow], order())
        assert len(slow.rounds[LATENCY]) == rounds
        assert slow.stop == "budget of 1 s"
        if jitter == 0.2:
            assert len(quick.rounds[LATENCY]) == MAX_ROUNDS
    world = World()
    quick, slow = calls_of(world, 0.01, 3.0)
    interleave([quick, slow], order())
    assert slow.rounds[LATENCY] == [pytest.approx((3e9,))]
    assert slow.stop == "one sample: a call takes longer than the budget of 1 s"
    assert "B" not in world.log


def test_a_reference_has_six_rounds_whatever_the_budget() -> None:
    """With fewer rounds there is no interval; a call of more than two seconds has a single sample."""
    for call_s, rounds in ((0.8, REFERENCE_ROUNDS), (1.9, REFERENCE_ROUNDS), (2.1, 1)):
        world = World(jitter=0.05)
        reference = timed(FakeScheme("A", world, cost_s=call_s), world, is_reference=True)
        interleave([reference], order())
        assert len(reference.rounds[LATENCY]) == rounds


def test_a_variant_that_raises_leaves_the_rounds_of_the_others_aligned() -> None:
    """Half a round of the failed variant is dropped; other variants keep all their rounds."""
    world = World(jitter=0.2)
    good = timed(FakeScheme("A", world), world)
    bad = timed(FakeScheme("B", world, cost_s=0.03, act=raising(ValueError("no"), after=4)), world)
    interleave([good, bad], order())
    assert len(good.rounds[LATENCY]) == MAX_ROUNDS
    assert len(bad.rounds[LATENCY]) == 1
    assert bad.failure == ("failed", "ValueError: no")


def test_sampling_ends_when_the_interval_is_narrow() -> None:
    """A narrow interval ends sampling; base goes on until the last variant has ended."""
    for jitter, rounds, stop in ((0.0, FEWEST_ROUNDS, "interval"), (0.2, MAX_ROUNDS, "20 rounds")):
        (call,) = calls_of(World(jitter=jitter), 0.01)
        interleave([call], order())
        assert [len(samples) for samples in call.rounds[LATENCY]] == [2] * rounds  # one per visit
        assert call.rounds[LATENCY][0] == pytest.approx((1.1e7, 1.1e7), rel=0.1)
        assert call.stop.startswith(stop)
    short = World()
    short.clock = FakeClock(warm_up_s=(0.01, 0.1))
    (call,) = calls_of(short, 0.0005)
    interleave([call], order())
    counts = [len(samples) for samples in call.rounds[LATENCY]]
    assert len(short.log) == sum(counts) + 2 * len(counts)  # each visit begins with an untimed call
    exact, noisy = World(jitter=0.0), World(jitter=0.2)
    calls = [timed(FakeScheme("Base", exact), exact, is_baseline=True), timed(FakeScheme("A", noisy), noisy)]
    interleave(calls, order())
    assert [len(call.rounds[LATENCY]) for call in calls] == [MAX_ROUNDS, MAX_ROUNDS]


def test_conditions_are_read_after_every_visit() -> None:
    """Each round has two readings, none from the warm-up; a device without readings has none."""
    world = World()
    readings = iter(Conditions(clock_hz=1e9 + number) for number in range(1000))
    monitored = timed(FakeScheme("A", world), world, conditions=lambda: next(readings))
    unmonitored = timed(FakeScheme("B", world), world)
    interleave([monitored, unmonitored], order())
    assert [len(in_round) for in_round in monitored.conditions] == [2] * FEWEST_ROUNDS
    assert monitored.conditions[0][0].clock_hz == 1e9 + 1
    assert unmonitored.conditions == []


class LabellingClock(FakeClock):
    """A clock that reports for every visit one sample in which the device waited, and reserved memory."""

    @override
    def visit(self, call: Call, calls: int, renew: Call = keep_inputs) -> Visit:
        taken = super().visit(call, calls, renew)
        return Visit({**taken.samples, "warm_latency_ns": (1.0,) * calls}, dispatch_bound=1, grown=True)


class BackwardsClock(FakeClock):
    """A clock that runs backwards."""

    @override
    def visit(self, call: Call, calls: int, renew: Call = keep_inputs) -> Visit:
        return Visit({LATENCY: (-5.0,) * calls})


def test_labels_count_the_affected_samples() -> None:
    """A label counts the affected samples; none are dropped, and other metrics have their own rounds."""
    world = World()
    world.clock = LabellingClock()
    (call,) = calls_of(world, 0.01)
    interleave([call], order())
    assert call.labels == (
        "dispatch-bound: in 12 of 12 samples the device waited",
        "allocated device memory while timed, in 12 visits",
    )
    assert [len(samples) for samples in call.rounds["warm_latency_ns"]] == [2] * FEWEST_ROUNDS
    world.clock = BackwardsClock()
    (call,) = calls_of(world, 0.01)
    interleave([call], order())
    assert call.failure is not None
    assert (call.failure.status, "measured -5 ns" in call.failure.reason, call.rounds) == ("failed", True, {})
