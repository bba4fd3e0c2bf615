"""A variant that slows others down is found when base is timed again after its set-up."""

import itertools
import math
import threading
import time
from unittest.mock import Mock

import pytest
import torch

from esbench.measure import neighbors
from esbench.measure.neighbors import SlowedDownError, slowdown
from esbench.measure.runner import run_cases
from esbench.registry import Entry
from esbench.schema import Phase, Record
from tests.fakes import CASE, FakeScheme, World
from tests.loop_cases import measure, measurements, plan_of

REASON = "it slows other variants down (base took 2x as long)"


class SlowedWorld(World):
    """A world in which each call of base takes 1 ms and, once something slows it down, 1 ms more."""

    extra_s = 0.0
    busy_s = math.inf
    """The time for which base was called since a pause; after 0.3 s the device's clock rates have settled."""
    slowed_phase: Phase = "forward"

    def slow_down(self, _: object = None) -> None:
        """Slow base down from now on."""
        self.extra_s = 0.001

    def recover(self, _: object = None) -> None:
        """Let base be fast again."""
        self.extra_s = 0.0

    def entries(self, **schemes: FakeScheme) -> list[Entry]:
        """Return base, and variants between two that do nothing wrong."""

        def act(phase: Phase, _: int, turn: int) -> object:
            self.clock.now_s += self.extra_s * (phase == self.slowed_phase)
            self.busy_s += self.extra_s
            if 0.15 < self.busy_s < math.inf:  # base takes 1 ms, and 1 ms more
                self.recover()
            return torch.full((2,), float(turn))

        base = FakeScheme("Base", self, cost_s=0.001, phases=("forward", "step"), act=act).entry("base")
        others = [FakeScheme("First", self), *schemes.values(), FakeScheme("Last", self)]
        return [base, *(scheme.entry() for scheme in others)]


def test_a_variant_that_slows_base_down_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant whose set-up made base slower is announced; a disturbance that passes does not count.

    Without a supervisor that starts a new process there is a note, and the variant is measured.
    """
    pauses = Mock()
    monkeypatch.setattr(time, "sleep", pauses)
    phases: tuple[Phase, ...] = ("forward", "step")
    for supervised, slowed_phase in itertools.product((True, False), phases):
        world, watch, lines = SlowedWorld(), Mock(return_value=supervised), list[Record]()
        world.slowed_phase = slowed_phase
        slow = FakeScheme("Slow", world, check=world.slow_down)
        plan = plan_of(*world.entries(Slow=slow), phases=("forward",))
        pauses.side_effect = None
        if supervised:
            with pytest.raises(SlowedDownError, match=r"^Slow on .*: it slows other variants down"):
                run_cases(plan, lines.extend, lambda *_: None, world.tools, watch=watch)
            assert lines == []
        else:
            summary = run_cases(plan, lines.extend, lambda *_: None, world.tools, watch=watch)
            assert summary.measured == 4
            assert summary.notes == (f"base took 2x as long after the set-up of Slow on {CASE.label}",)
        (blamed,) = [announcement.args for announcement in watch.mock_calls if len(announcement.args) == 4]
        assert blamed == (slow.entry().variant, CASE, "set-up", REASON)

    pauses.side_effect = world.recover
    for check in (world.slow_down, lambda _: None):
        world.recover()
        entries = world.entries(A=FakeScheme("A", world, check=check))
        summary, lines = measure(*entries, phases=("forward",))
        assert (summary.measured, summary.notes) == (4, ())


def test_a_device_whose_clock_rates_fell_in_a_pause_is_not_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause base is called until the clock rates settle, before its times are compared."""
    world, watch = SlowedWorld(), Mock(return_value=True)
    world.clock.warm_up_s = (0.3, 3.0)

    def idle(_: object = None) -> None:
        world.busy_s = 0.0
        world.slow_down()

    monkeypatch.setattr(time, "sleep", idle)
    plan = plan_of(*world.entries(Idle=FakeScheme("Idle", world, check=idle)), phases=("forward",))
    assert run_cases(plan, list[Record]().extend, lambda *_: None, world.tools, watch=watch).measured == 4


def test_a_phase_after_which_base_is_slower_has_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a phase in which something began to slow base down say so, and so do those of later phases."""
    monkeypatch.setattr(neighbors, "PAUSES_S", ())
    world = SlowedWorld()

    def act(_: Phase, number: int, turn: int) -> object:
        if number == 12:
            world.slow_down()
        return torch.full((2,), float(turn))

    _, lines = measure(*world.entries(Late=FakeScheme("Late", world, act=act)))
    labels = {row.phase: set[str]() for row in measurements(lines)}
    for row in measurements(lines):
        labels[row.phase] |= {*row.labels}
    first, second = labels.values()
    assert first == second == {"base took 2x as long after these rounds as after its set-up"}


def test_only_a_clear_slowdown_counts() -> None:
    """All visits must be slower by more than half than all before, by any metric that both have."""
    before = {"latency_ns": [100.0] * 5 + [110.0], "host_latency_ns": [10.0] * 6}
    for after, ratio in (
        ({"latency_ns": [165.0] * 5 + [300.0]}, 1.0),
        ({"latency_ns": [166.0] * 5 + [300.0]}, 1.66),
        ({"latency_ns": [200.0] * 5 + [109.0]}, 1.0),
        ({"latency_ns": [100.0] * 6, "host_latency_ns": [20.0]}, 2.0),
        ({}, 1.0),
    ):
        assert slowdown(before, after) == pytest.approx(ratio)


def test_a_thread_that_keeps_running_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that runs after a set-up is announced; one that a timed call starts gives its rows a label."""
    monkeypatch.setattr(neighbors, "THREAD_PAUSES_S", (0.1,))
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            sum(range(1000))

    def start(*_: object) -> None:
        ended.clear()
        threading.Thread(target=run).start()

    def act(_: Phase, number: int, turn: int) -> object:
        if number == 12:
            start()
        return torch.full((2,), float(turn))

    assert not neighbors.has_running_threads()
    try:
        world, watch = SlowedWorld(), Mock(return_value=True)
        plan = plan_of(*world.entries(Busy=FakeScheme("Busy", world, check=start)), phases=("forward",))
        with pytest.raises(SlowedDownError, match=r"^Busy on .*\(threads used the CPU\)$"):
            run_cases(plan, list[Record]().extend, lambda *_: None, world.tools, watch=watch)
        ended.set()
        world = SlowedWorld()
        late = world.entries(Late=FakeScheme("Late", world, act=act))
        _, lines = measure(*late, phases=("forward",))
        assert {row.labels for row in measurements(lines)} == {("threads used the CPU after these rounds",)}
    finally:
        ended.set()
