"""Clocks, warm-up and visits."""

import gc
import time
from collections.abc import Callable

import pytest

from esbench.measure import timers
from esbench.measure.interleave import MOST_CALLS, Warm, calls_per_visit, warm_up
from esbench.measure.timers import ClockError, HostClock, Visit, quiet
from tests.fakes import FakeClock


def costing(clock: FakeClock, cost_s: Callable[[int], float]) -> tuple[Callable[[], None], list[int]]:
    """Return a call that takes ``cost_s(number of the call)`` by the clock, and those numbers."""
    numbers: list[int] = []

    def call() -> None:
        numbers.append(len(numbers))
        clock.now_s += cost_s(numbers[-1])

    return call, numbers


def test_the_host_clock_gives_one_sample_for_each_call() -> None:
    """Nanoseconds, as many as calls, none shorter than the sleep inside."""
    samples = HostClock().visit(lambda: time.sleep(0.001), 3).samples["latency_ns"]
    assert len(samples) == 3
    assert min(samples) >= 1e6


def test_a_variant_cannot_put_another_clock_under_its_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that read time were bound before any variant was loaded."""
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    (sample,) = HostClock().visit(lambda: time.sleep(0.001), 1).samples["latency_ns"]
    assert sample >= 1e6


def test_the_host_clock_times_the_call_itself() -> None:
    """There is nothing to prepare, and nothing is called."""
    call = time.perf_counter
    assert HostClock().prepare(call, 2) is call


def test_a_host_clock_that_goes_backwards_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row gets the reason, never a negative time."""
    times = iter([1000, 900])
    monkeypatch.setattr(timers, "_host_ns", lambda: next(times))
    with pytest.raises(ClockError, match=r"^the clock went backwards by 100 ns$"):
        HostClock().visit(lambda: None, 1)


def test_a_sample_that_is_no_number_is_an_error() -> None:
    """Whatever clock and metric it is of."""
    cases: list[float] = [
        float("nan"),
        float("inf"),
    ]
    for value in cases:
        with pytest.raises(ClockError, match=f"^the clock read {value}$"):
            Visit({"latency_ns": (1.0,), "warm_latency_ns": (2.0, value)})


def test_no_time_at_all_is_an_error() -> None:
    """A clock that read 0 ns has missed the call: its row gets the reason, and no time."""
    with pytest.raises(ClockError, match=r"^the clock read 0 ns: "):
        Visit({"latency_ns": (1.0, 0.0)})


def test_a_visit_lasts_two_milliseconds_within_bounds() -> None:
    """At least one call, at most the bound, else as many as fill it."""
    cases: list[tuple[float, int]] = [
        (5e9, 1),
        (2e6, 1),
        (1.9e6, 2),
        (1e5, 20),
        (1.0, MOST_CALLS),
        (0.0, MOST_CALLS),
    ]
    for call_ns, calls in cases:
        assert calls_per_visit(call_ns) == calls


def test_warm_up_ends_when_block_medians_are_flat() -> None:
    """Calls that get faster are called on until they no longer do, and not much longer."""
    clock = FakeClock(warm_up_s=(0.0, 10.0))
    call, numbers = costing(clock, lambda number: max(0.01, 0.02 - 0.001 * number))
    warm = warm_up(call, clock, budget_s=10.0)
    assert warm.call_ns == pytest.approx(1e7)
    assert not warm.slow
    assert 10 < len(numbers) < 20
    assert warm.state == f"flat after {len(numbers)} blocks, {clock.now_s:.2f} s"


def test_warm_up_lasts_as_long_as_the_clock_asks_for() -> None:
    """Flat from the start, a call is still warmed up for the least time."""
    clock = FakeClock(warm_up_s=(0.3, 3.0))
    call, _ = costing(clock, lambda _: 0.01)
    warm_up(call, clock, budget_s=1.0)
    assert 0.3 <= clock.now_s < 0.4


@pytest.mark.parametrize(("budget_s", "most_s"), [(10.0, 3.0), (1.0, 1.0)])
def test_warm_up_of_a_call_that_never_settles_is_bounded(budget_s: float, most_s: float) -> None:
    """By the clock's most seconds, and by the budget of the cell."""
    clock = FakeClock(warm_up_s=(0.3, 3.0))
    call, _ = costing(clock, lambda number: 0.01 * 1.05 ** min(number, 70))
    warm = warm_up(call, clock, budget_s=budget_s)
    assert most_s <= clock.now_s < most_s + 0.4  # a block is finished
    assert warm.state == f"not flat after {clock.now_s:.2f} s"


def test_a_call_slower_than_its_budget_is_called_once() -> None:
    """And what it took is kept."""
    clock = FakeClock(warm_up_s=(0.3, 3.0))
    call, numbers = costing(clock, lambda _: 2.0)
    assert warm_up(call, clock, budget_s=1.0) == Warm(
        2e9, calls=1, slow=True, state="one call, longer than the budget"
    )
    assert numbers == [0]


def test_one_slow_call_does_not_make_the_visits_short() -> None:
    """Even in the last block of the warm-up."""
    clock = FakeClock(warm_up_s=(0.02, 0.02))
    call, numbers = costing(clock, lambda number: 0.015 if number == 600 else 1e-5)
    warm = warm_up(call, clock, budget_s=1.0)
    assert numbers[-1] < 600 + MOST_CALLS
    assert warm.calls == MOST_CALLS


def test_the_collector_is_as_it_was_after_an_error() -> None:
    """Off inside; afterwards on only if it was on."""
    cases: list[bool] = [
        True,
        False,
    ]
    for enabled in cases:
        if not enabled:
            gc.disable()
        try:
            with pytest.raises(ZeroDivisionError), quiet():
                _ = 1 / int(gc.isenabled())
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
