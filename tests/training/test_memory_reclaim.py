"""Ways to reclaim memory between models: the same results in each, settings restored, no thread left."""

import contextlib
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from typing_extensions import override

from impls.benchmark.training.architecture_search import (
    Outcome,
    Search,
    architectures,
    batches,
    largest,
    population,
    run,
)
from impls.training.memory_reclaim import (
    MODES,
    Mode,
    Reclaimer,
    ReclaimingIterator,
    environment,
    isolated,
    reclaim,
    refusal,
)
from tests.training.models import report

CASE = population(3, 5, 4)
WIDTHS = architectures(CASE, 0)


def search(**options: Any) -> Outcome:
    """Train the small population."""
    return run(Search(CASE, "cpu", 0, **options), WIDTHS, batches(CASE, "cpu", 0)[0])


@pytest.fixture
def _no_collection() -> Iterator[None]:
    """Disable automatic garbage collection."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
def test_every_mode_trains_bitwise_the_same_and_frees_what_it_can() -> None:
    """Clean candidates are freed at once, linked ones by a collection, leaky ones with their hooks only."""
    search()  # what torch imports for a first training keeps references
    right = search()
    assert right.alive == 0
    assert len(set(right.digests)) == len(WIDTHS)
    for mode in ("collect", "collect_batch", "iterator"):
        found = search(mode=mode)
        assert torch.equal(found.losses, right.losses)
        assert found.digests == right.digests
    leaky, linked = search(leaky=True), search(linked=True)
    assert leaky.digests == linked.digests == right.digests
    everything = len(right.parameters)
    assert leaky.alive == linked.alive == everything == 2 * sum(len(widths) - 1 for widths in WIDTHS)
    gc.collect()
    assert (leaky.alive, linked.alive) == (everything, 0)
    leaky.release()
    assert leaky.alive == 0
    assert search(linked=True, mode="collect").alive == 0


def test_the_largest_candidate_does_not_depend_on_the_seed() -> None:
    """It has three hidden layers with the largest number of channels."""
    case = msgspec.structs.replace(CASE, members=9)
    drawn = {architectures(case, seed) for seed in range(5)}
    assert len(drawn) == 5
    assert {largest(widths) for widths in drawn} == {(5, 20, 20, 20, 3)}
    assert all(len(widths) == 9 and 3 <= len(one) <= 5 for widths in drawn for one in widths)


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("mode", MODES)
def test_modes_collect_when_they_say_and_restore_the_collector(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a candidate fails; ``collect`` disables automatic collections inside one."""
    counts: dict[Mode, tuple[int, int]] = {
        "collect": (1, 0),
        "collect_batch": (4, 0),
        "empty_cache": (0, 1),
        "empty_cache_batch": (0, 4),
        "pool": (0, 1),
    }
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda *_: calls.append("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("release"))
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _: contextlib.nullcontext())
    plan = reclaim(mode)

    def failing_candidate() -> None:
        with plan.candidate():
            assert gc.isenabled() == (enabled and mode != "collect")
            assert list(plan.batches([3, 1, 2, 3])) == [3, 1, 2, 3]
            raise ZeroDivisionError

    for enabled in (False, True):
        (gc.enable if enabled else gc.disable)()
        calls.clear()
        with pytest.raises(ZeroDivisionError):
            failing_candidate()
        assert gc.isenabled() == enabled
        if mode != "iterator":  # whose watchdog may have ticked
            assert (calls.count("collect"), calls.count("release")) == counts.get(mode, (0, 0))


def test_modes_state_what_they_need() -> None:
    """CUDA or environment variables; an unknown mode lists the known ones."""
    needing = {"empty_cache", "empty_cache_batch", "expandable", "pool"}
    assert {mode for mode in MODES if "CUDA" in refusal(mode, "cpu")} == needing
    assert not any(refusal(mode, "cuda:0") for mode in MODES)
    assert {mode for mode in MODES if environment(mode)} == {"expandable"}
    unknown: Any = "everything"
    with pytest.raises(ValueError, match="no mode 'everything'; there are: nothing, collect"):
        reclaim(unknown)


def test_an_isolated_call_runs_in_another_process() -> None:
    """With the environment that it is given; results and exceptions come back."""
    before = dict(os.environ)
    pid, planted, tensor = isolated(report, torch.arange(4), environment={"PLANTED": "yes"})
    assert pid != os.getpid()
    assert planted == "yes"
    assert tensor.tolist() == [0, 2, 4, 6]
    with pytest.raises(ZeroDivisionError):
        isolated(divmod, 1, 0)
    assert dict(os.environ) == before


class Recorder(Reclaimer):
    """Records what it is asked to collect, and collects nothing."""

    def __init__(self) -> None:
        """Start empty."""
        self.calls: list[str] = []

    @override
    def collect_young(self) -> None:
        self.calls.append("young")

    @override
    def collect_all(self) -> None:
        self.calls.append("all")


def watchdogs() -> list[threading.Thread]:
    """Return the running threads of watchdogs."""
    return [thread for thread in threading.enumerate() if thread.name == "reclaiming watchdog"]


def eventually(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Wait for something that another thread does."""
    end_s = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < end_s:
        time.sleep(0.001)
    return found


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Check that no test leaves a watchdog."""
    assert watchdogs() == []
    yield
    assert watchdogs() == []


def test_the_iterator_yields_the_same_items_and_collects_before_every_sixth() -> None:
    """In order, as often as it is iterated over; also a stream without a length."""
    for count in (0, 1, 5, 6, 7, 40):
        items = [object() for _ in range(count)]
        wrapped = ReclaimingIterator(items, Recorder(), tick_s=60)
        assert len(wrapped) == count
        for _ in range(2):
            assert all(a is b for a, b in zip(wrapped, items, strict=True))
    recorder, before = Recorder(), {}
    for item in ReclaimingIterator(range(1, 24), recorder, tick_s=60):
        before[item] = len(recorder.calls)
    assert [item for item in before if before[item] > before.get(item - 1, 0)] == [6, 12, 18]
    assert recorder.calls == ["young"] * 3
    stream = ReclaimingIterator(iter("abc"), Recorder(), tick_s=60)
    with pytest.raises(TypeError, match="has no length"):
        len(stream)
    assert list(stream) == ["a", "b", "c"]


def test_iterations_end_their_threads_and_do_not_interfere() -> None:
    """If a loop breaks out or raises, if items fail, in several threads and nested."""
    wrapped = ReclaimingIterator(range(9), Recorder(), tick_s=60)
    for item in wrapped:
        assert len(watchdogs()) == 1
        if item == 2:
            break
    assert watchdogs() == []
    for items, error in ((wrapped, ZeroDivisionError), (map(math.sqrt, (1, -1)), ValueError)):
        with pytest.raises(error):
            sum(1 / item for item in ReclaimingIterator(items, Recorder(), tick_s=60))
        assert watchdogs() == []
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(list(wrapped))) for _ in range(4)]
    for thread in threads:
        thread.start()
    pairs = [(a, b) for a in ReclaimingIterator(range(3), Recorder(), tick_s=60) for b in wrapped if b < 2]
    for thread in threads:
        thread.join()
    assert found == [list(range(9))] * 4
    assert pairs == [(a, b) for a in range(3) for b in range(2)]


def test_garbage_is_collected_while_an_item_is_in_use() -> None:
    """Youngest generation at each tick, everything from the sixth, the last is 41; each item starts again."""
    recorder = Recorder()
    ticks = [*["young"] * 5, *["young", "all"] * 36]

    def items() -> Iterator[int]:
        yield from range(3)
        before = len(recorder.calls)
        time.sleep(0.01)  # a hundred ticks, if the last item were still in use
        assert len(recorder.calls) <= before + 2  # the tick that was under way

    def has_calls(count: int) -> bool:
        return len(recorder.calls) >= count

    for item in ReclaimingIterator(items(), recorder, tick_s=1e-4):
        expected = (item + 1) * len(ticks) if item < 2 else 2 * len(ticks) + 1
        assert eventually(partial(has_calls, expected))
        if item < 2:
            time.sleep(0.01)
            assert recorder.calls == (item + 1) * ticks


def test_an_iteration_that_its_own_watchdog_collects_ends() -> None:
    """A finalizer on the watchdog's thread must not wait for that thread."""

    class Cycle:
        """References itself."""

        iteration: Iterator[int]
        me: "Cycle"

    class Everything(Reclaimer):
        """Collects all generations at every tick."""

        @override
        def collect_young(self) -> None:
            gc.collect()

    cycle = Cycle()
    cycle.me = cycle
    cycle.iteration = iter(ReclaimingIterator(range(3), Everything(), tick_s=1e-3))
    next(cycle.iteration)
    gc.disable()
    try:
        del cycle
        assert eventually(lambda: watchdogs() == [])
    finally:
        gc.enable()


def test_a_reclaimer_collects_the_generations_that_it_names() -> None:
    """The youngest, or all."""
    generations: list[int] = []

    def listen(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.disable()
    gc.callbacks.append(listen)
    try:
        Reclaimer().collect_young()
        Reclaimer().collect_all()
    finally:
        gc.callbacks.remove(listen)
        gc.enable()
    assert generations == [0, 2]
