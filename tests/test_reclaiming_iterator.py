"""The reclaiming iterator: what passes through it, when it collects, and that it leaves nothing behind."""

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from typing_extensions import override

from impls.training.hygiene import ReclaimingIterator
from impls.training.watchdog import Reclaimer, Watchdog

TICK_S = 0.1
LAST = 41

PATIENCE_S = 60.0
"""What a busy machine is given to get to something that must happen."""


class Diary(Reclaimer):
    """Writes down what it is asked to collect, and collects nothing."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.lines: list[str] = []

    @override
    def young(self) -> None:
        self.lines.append("young")

    @override
    def full(self) -> None:
        self.lines.append("full")


class Hand:
    """A clock that stands still until it is moved."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return the seconds."""
        return self.now_s


class Still(Watchdog):
    """A watchdog whose clock never moves: it never ticks."""

    def __init__(self, reclaimer: Reclaimer) -> None:
        """Stop the clock."""
        super().__init__(reclaimer, Hand())


def watchdogs() -> list[threading.Thread]:
    """Return the threads of watchdogs that there are."""
    return [thread for thread in threading.enumerate() if thread.name == "reclaiming watchdog"]


def eventually(holds: Callable[[], bool]) -> bool:
    """Wait for something that another thread does."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := holds()) and time.monotonic() < end_s:
        time.sleep(0.001)
    return found


@pytest.fixture(autouse=True)
def _no_thread_before_or_after() -> Iterator[None]:
    """Hold every test to leave no watchdog."""
    assert watchdogs() == []
    yield
    assert watchdogs() == []


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 40])
def test_items_pass_through_unchanged(count: int) -> None:
    """The same objects in the same order, as many as there are, and as often as they are asked for."""
    items = [object() for _ in range(count)]
    wrapped = ReclaimingIterator(items, Diary(), Still)
    assert len(wrapped) == count
    for _ in range(2):
        assert all(a is b for a, b in zip(wrapped, items, strict=True))


def test_a_stream_without_a_length_has_none() -> None:
    """It says so by the kind of error that len() raises, and is iterated over all the same."""
    wrapped = ReclaimingIterator(iter("abc"), Diary(), Still)
    with pytest.raises(TypeError, match="has no length"):
        len(wrapped)
    assert list(wrapped) == ["a", "b", "c"]


def test_it_collects_before_every_sixth_item() -> None:
    """The young generation, before items 6, 12 and 18, and nothing else."""
    diary = Diary()
    before = {}
    for item in ReclaimingIterator(range(1, 24), diary, Still):
        before[item] = len(diary.lines)
    assert [item for item in before if before[item] > before.get(item - 1, 0)] == [6, 12, 18]
    assert diary.lines == ["young"] * 3


def test_ticks_come_each_tenth_of_a_second_while_an_item_is_held() -> None:
    """Nothing before the first is due; the young at each, everything from the sixth, the end at tick 41."""
    diary, hand = Diary(), Hand()
    watchdog = Watchdog(diary, hand)
    watchdog.watch()
    try:
        assert watchdog.advance() == pytest.approx(TICK_S)
        assert diary.lines == []
        for tick in range(1, LAST + 1):
            hand.now_s += TICK_S + 1e-9
            before = len(diary.lines)
            left_s = watchdog.advance()
            assert diary.lines[before:] == (["young"] if tick < 6 else ["young", "full"])
            assert left_s == (None if tick == LAST else pytest.approx(TICK_S))
    finally:
        watchdog.stop()


def test_ticks_count_from_the_item_that_is_held_now() -> None:
    """The next item begins anew, and between two items nothing ticks."""
    diary, hand = Diary(), Hand()
    watchdog = Watchdog(diary, hand)
    try:
        for _ in range(3):
            watchdog.watch()
            for _ in range(5):
                hand.now_s += 2 * TICK_S
                watchdog.advance()
            watchdog.rest()
            hand.now_s += 100 * TICK_S
            watchdog.advance()
        assert diary.lines == ["young"] * 15
    finally:
        watchdog.stop()


def test_a_late_tick_is_one_tick() -> None:
    """After a second in which nobody could tick there is one tick, and the next is a tenth later."""
    diary, hand = Diary(), Hand()
    watchdog = Watchdog(diary, hand)
    watchdog.watch()
    try:
        hand.now_s = 1.0
        assert watchdog.advance() == pytest.approx(TICK_S)
        assert watchdog.advance() == pytest.approx(TICK_S)
        assert diary.lines == ["young"]
    finally:
        watchdog.stop()


def test_the_thread_itself_ends_with_the_last_tick_and_comes_back() -> None:
    """Without anybody's help; the next item that is held starts another."""
    diary = Diary()
    watchdog = Watchdog(diary, tick_s=1e-5)
    for _ in range(2):
        watchdog.watch()
        assert eventually(lambda: watchdogs() == [])
        assert diary.lines == [*["young"] * 5, *["young", "full"] * 36]
        diary.lines.clear()
    watchdog.stop()


def test_an_early_break_leaves_no_thread() -> None:
    """Nor does a loop that raises, or one that comes to its end; while an item is held there is one."""
    wrapped = ReclaimingIterator(range(9), Diary(), Still)
    for item in wrapped:
        assert len(watchdogs()) == 1
        if item == 2:
            break
    assert watchdogs() == []
    with pytest.raises(ZeroDivisionError):
        sum(1 / item for item in wrapped)
    assert watchdogs() == []
    assert sum(wrapped) == 36


def test_items_that_fail_leave_no_thread() -> None:
    """The error of the wrapped iterable arrives as it is."""

    def failing() -> Iterator[int]:
        yield 1
        message = "no more"
        raise OSError(message)

    with pytest.raises(OSError, match="no more"):
        list(ReclaimingIterator(failing(), Diary(), Still))


def test_iterations_do_not_know_each_other() -> None:
    """Two of one iterator, in two threads and nested, each see all items."""
    wrapped = ReclaimingIterator(range(50), Diary(), Still)
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(list(wrapped))) for _ in range(4)]
    for thread in threads:
        thread.start()
    pairs = [(a, b) for a in ReclaimingIterator(range(3), Diary(), Still) for b in wrapped if b < 2]
    for thread in threads:
        thread.join()
    assert found == [list(range(50))] * 4
    assert pairs == [(a, b) for a in range(3) for b in range(2)]


def test_an_iteration_that_its_own_watchdog_collects_ends() -> None:
    """One that was lost in a cycle is finalised on the watchdog's thread, which must not wait for itself."""

    class Cycle:
        """What refers to itself."""

        iteration: Iterator[int]
        me: "Cycle"

    class Everything(Reclaimer):
        """Collects all generations at every tick."""

        @override
        def young(self) -> None:
            gc.collect()

    cycle = Cycle()
    cycle.me = cycle
    cycle.iteration = iter(ReclaimingIterator(range(3), Everything(), lambda one: Watchdog(one, tick_s=1e-3)))
    next(cycle.iteration)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        del cycle
        assert eventually(lambda: watchdogs() == [])
    finally:
        if was_enabled:
            gc.enable()


def test_a_reclaimer_collects_what_it_says() -> None:
    """The young generation by young(), all of them by full()."""
    heard: list[int] = []

    def hear(phase: str, told: dict[str, int]) -> None:
        if phase == "start":
            heard.append(told["generation"])

    gc.callbacks.append(hear)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        Reclaimer().young()
        Reclaimer().full()
    finally:
        gc.callbacks.remove(hear)
        if was_enabled:
            gc.enable()
    assert heard == [0, 2]
