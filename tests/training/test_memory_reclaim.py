"""Ways to reclaim memory between models: the same results in each, settings restored, no thread left."""

import contextlib
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from impls.benchmark.training.architecture_search import (
    Outcome,
    Search,
    architectures,
    batches,
    run,
    search_case,
)
from impls.training import memory_reclaim
from impls.training.memory_reclaim import (
    MODES,
    Mode,
    Reclaim,
    ReclaimingIterator,
    call_in_fresh_process,
    environment,
    refusal,
)

CASE = search_case(3, 5, 4)
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


@pytest.fixture
def generations() -> Iterator[list[int]]:
    """Record the generation of every garbage collection, which only happen on demand."""
    collected: list[int] = []

    def listen(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected.append(info["generation"])

    gc.disable()
    gc.callbacks.append(listen)
    yield collected
    gc.callbacks.remove(listen)
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
def test_every_mode_trains_bitwise_the_same_and_frees_what_it_can() -> None:
    """Clean candidates are freed at once, linked ones by a collection, leaky ones with their hooks only."""
    search()  # torch's imports for a first training keep references
    right = search()
    assert right.alive == 0
    for mode in ("collect", "collect_batch", "iterator"):
        assert torch.equal(search(mode=mode).losses, right.losses)
    leaky, linked = search(leaky=True), search(linked=True)
    assert torch.equal(leaky.losses, right.losses)
    assert torch.equal(linked.losses, right.losses)
    everything = len(right.parameters)
    assert leaky.alive == linked.alive == everything == 2 * sum(len(widths) - 1 for widths in WIDTHS)
    gc.collect()
    assert (leaky.alive, linked.alive) == (everything, 0)
    leaky.release()
    assert leaky.alive == 0
    assert search(linked=True, mode="collect").alive == 0


@pytest.mark.parametrize("mode", MODES)
def test_modes_collect_as_documented_and_restore_the_collector(
    mode: Mode, generations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collections are as documented also if a candidate fails; ``collect`` disables automatic ones inside."""
    counts: dict[Mode, tuple[int, int]] = {
        "collect": (1, 0),
        "collect_batch": (4, 0),
        "empty_cache": (0, 1),
        "empty_cache_batch": (0, 4),
        "pool": (0, 1),
    }
    releases: list[str] = []
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _: contextlib.nullcontext())
    plan = Reclaim(mode, lambda: releases.append("release"))

    def failing_candidate() -> None:
        with plan.candidate():
            assert gc.isenabled() == (enabled and mode != "collect")
            assert list(plan.batches([3, 1, 2, 3])) == [3, 1, 2, 3]
            raise ZeroDivisionError

    for enabled in (False, True):
        (gc.enable if enabled else gc.disable)()
        generations.clear()
        releases.clear()
        with pytest.raises(ZeroDivisionError):
            failing_candidate()
        assert gc.isenabled() == enabled
        if mode != "iterator":  # whose watchdog may have ticked
            assert (generations.count(2), len(releases)) == counts.get(mode, (0, 0))


def test_modes_state_their_requirements() -> None:
    """Modes state the device or variables they need; the error for an unknown mode lists all modes."""
    needing = {"empty_cache", "empty_cache_batch", "expandable", "pool"}
    assert {mode for mode in MODES if "CUDA" in refusal(mode, "cpu")} == needing
    assert not any(refusal(mode, "cuda:0") for mode in MODES)
    assert {mode for mode in MODES if environment(mode)} == {"expandable"}
    unknown: Any = "everything"
    with pytest.raises(ValueError, match="no mode 'everything'; available: nothing, collect"):
        Reclaim(unknown)


def test_an_isolated_call_that_fails_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception comes back, and environment variables are restored; a thread stands for the process.

    tests/training/test_rigl.py runs a rank in a process.
    """
    monkeypatch.setattr(memory_reclaim, "ProcessPoolExecutor", lambda **_: ThreadPoolExecutor())
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError):
        call_in_fresh_process(divmod, 1, 0, environment={"PLANTED": "yes"})
    assert dict(os.environ) == before


def watchdogs() -> list[threading.Thread]:
    """Return the running threads of watchdogs."""
    return [thread for thread in threading.enumerate() if thread.name == "reclaiming watchdog"]


def eventually(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Wait for something that another thread does."""
    end_s = time.monotonic() + limit_s
    while not (is_met := condition()) and time.monotonic() < end_s:
        time.sleep(0.001)
    return is_met


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Check that no test leaves a watchdog."""
    assert watchdogs() == []
    yield
    assert watchdogs() == []


def test_the_iterator_yields_the_same_items_and_collects_before_every_sixth(generations: list[int]) -> None:
    """Items come in order at each iteration, also from a stream without a length."""
    for count in (0, 1, 6, 40):
        items = [object() for _ in range(count)]
        wrapped = ReclaimingIterator(items, tick_s=60)
        assert len(wrapped) == count
        for _ in range(2):
            assert all(a is b for a, b in zip(wrapped, items, strict=True))
    generations.clear()
    before = [0]
    before += [len(generations) for _ in ReclaimingIterator(range(1, 24), tick_s=60)]
    assert [item for item in range(1, 24) if before[item] > before[item - 1]] == [6, 12, 18]
    assert generations == [0] * 3
    stream = ReclaimingIterator(iter("abc"), tick_s=60)
    with pytest.raises(TypeError, match="has no len"):
        len(stream)
    assert list(stream) == ["a", "b", "c"]


def test_iterations_end_their_threads_and_do_not_interfere() -> None:
    """Threads end if a loop breaks or raises or an item fails, also in several threads and nested loops."""
    wrapped = ReclaimingIterator(range(9), tick_s=60)
    for item in wrapped:
        assert len(watchdogs()) == 1
        if item == 2:
            break
    assert watchdogs() == []
    for items, error in ((wrapped, ZeroDivisionError), (map(math.sqrt, (1, -1)), ValueError)):
        with pytest.raises(error):
            sum(1 / item for item in ReclaimingIterator(items, tick_s=60))
        assert watchdogs() == []
    lists: list[list[int]] = []
    threads = [threading.Thread(target=lambda: lists.append(list(wrapped))) for _ in range(4)]
    for thread in threads:
        thread.start()
    pairs = [(a, b) for a in ReclaimingIterator(range(3), tick_s=60) for b in wrapped if b < 2]
    for thread in threads:
        thread.join()
    assert lists == [list(range(9))] * 4
    assert pairs == [(a, b) for a in range(3) for b in range(2)]


def test_garbage_is_collected_while_an_item_is_in_use(generations: list[int]) -> None:
    """Ticks collect the youngest generation, from the sixth on everything, up to 41; items start again."""
    ticks, releases = [*[0] * 5, *[0, 2] * 36], list[str]()

    def items() -> Iterator[int]:
        yield from range(3)
        before = len(generations)
        time.sleep(0.01)  # several ticks, if the last item were still in use
        assert len(generations) <= before + 2  # the tick that was under way

    def has_collections(count: int) -> bool:
        return len(generations) >= count

    wrapped = ReclaimingIterator(items(), release_cache=lambda: releases.append("release"), tick_s=1e-4)
    for item in wrapped:
        expected = (item + 1) * len(ticks) if item < 2 else 2 * len(ticks) + 1
        assert eventually(partial(has_collections, expected))
        if item < 2:
            time.sleep(0.01)
            assert generations == (item + 1) * ticks
            assert len(releases) == (item + 1) * 36


def test_an_iteration_that_its_own_watchdog_collects_ends() -> None:
    """A finalizer on the watchdog's thread must not wait for that thread."""

    class Cycle:
        """References itself."""

        iteration: Iterator[int]
        me: "Cycle"

    cycle = Cycle()
    cycle.me = cycle
    cycle.iteration = iter(ReclaimingIterator(range(3), tick_s=1e-3))
    next(cycle.iteration)
    gc.disable()
    try:
        del cycle
        assert eventually(lambda: watchdogs() == [])
    finally:
        gc.enable()
