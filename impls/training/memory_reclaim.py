"""Ways to keep memory flat while many models are trained one after another, as in an architecture search.

    for batch in ReclaimingIterator(batches):  # collects before every sixth batch and during long ones
        ...

    plan = reclaim("collect")
    for architecture in population:
        with plan.candidate():
            train(architecture, plan.batches(batches))  # a function: its model is freed when it returns

If nothing leaks none of this is needed, and all of it costs time: measure it with the suite
``memory_reclaim``. Do not release torch's cache while a CUDA graph is captured.
"""

import contextlib
import gc
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Generic, Literal, TypeVar, get_args

import torch

T = TypeVar("T")

EVERY = 6
"""The iterator collects before every sixth item."""
TICK_S = 0.1
"""Seconds between two ticks of the watchdog."""
FULL_FROM = 6
"""From this tick on the watchdog collects all generations and releases torch's cache."""
LAST_TICK = 41

Mode = Literal[
    "nothing",
    "collect",
    "collect_batch",
    "empty_cache",
    "empty_cache_batch",
    "iterator",
    "expandable",
    "pool",
    "subprocess",
]
MODES: tuple[Mode, ...] = get_args(Mode)

_NO_CACHE = "torch keeps no cache of CPU memory that could be released: this needs CUDA"
_NEEDS_CUDA: Mapping[Mode, str] = {
    "empty_cache": _NO_CACHE,
    "empty_cache_batch": _NO_CACHE,
    "expandable": "expandable segments are a setting of torch's CUDA allocator: this needs CUDA",
    "pool": "memory pools belong to torch's CUDA allocator: this needs CUDA",
}


class Reclaimer:
    """Reclaims memory: Python's garbage and torch's cache of device memory."""

    def collect_young(self) -> None:
        """Collect the youngest generation."""
        gc.collect(0)

    def collect_all(self) -> None:
        """Collect all generations and release the cache."""
        gc.collect()
        self.release_cache()

    def release_cache(self) -> None:
        """Return cached memory to the device; does nothing before CUDA is used."""
        torch.cuda.empty_cache()


@dataclass
class _ItemInUse:
    """An item in use, the time of its next tick, and the number of its ticks so far."""

    due_s: float
    ticks: int = 0


class Watchdog:
    """Collects garbage from a thread while an item is in use, after NaiveGAflux ("Performance Tips").

    Every tick collects the youngest generation; from tick 6 on also everything else. Tick 41 is the last.
    The thread starts with the first item and ends with :meth:`stop` or the last tick. Methods may be called
    from several threads, and from a finalizer that runs on the watchdog's own thread.

    Args:
        reclaimer: what collects.
        clock: returns seconds.
        tick_s: seconds between two ticks.

    """

    def __init__(
        self, reclaimer: Reclaimer, clock: Callable[[], float] = time.monotonic, tick_s: float = TICK_S
    ) -> None:
        """Start no thread yet."""
        self._reclaimer, self._clock, self._tick_s = reclaimer, clock, tick_s
        self._lock = threading.RLock()  # a finalizer may re-enter a method on the same thread
        self._item: _ItemInUse | None = None
        self._thread: threading.Thread | None = None
        self._end: queue.SimpleQueue[None] = (
            queue.SimpleQueue()
        )  # its put() is reentrant, unlike an Event's set()

    def watch(self) -> None:
        """Begin to count ticks for the next item, from 1."""
        with self._lock:
            self._item = _ItemInUse(self._clock() + self._tick_s)
            if self._thread is None:
                self._end = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=self._run, args=(self._end,), name="reclaiming watchdog", daemon=True
                )
                self._thread.start()

    def rest(self) -> None:
        """Pause until the next item."""
        with self._lock:
            self._item = None

    def stop(self) -> None:
        """End the thread and wait for it."""
        with self._lock:
            self._item = None
            thread, self._thread = self._thread, None
            self._end.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def advance(self) -> float | None:
        """Tick if one is due; return the seconds until the next, or None after the last."""
        with self._lock:
            item = self._item
            if item is None:
                return self._tick_s
            now_s = self._clock()
            if now_s < item.due_s:
                return item.due_s - now_s
            item.ticks += 1
            tick = item.ticks
        self._reclaimer.collect_young()
        if tick >= FULL_FROM:
            self._reclaimer.collect_all()
        if tick >= LAST_TICK:
            return None
        item.due_s = self._clock() + self._tick_s  # missed ticks are skipped: a collection may take longer
        return self._tick_s

    def _run(self, end: "queue.SimpleQueue[None]") -> None:
        wait_s: float | None = self._tick_s
        while wait_s is not None:
            try:
                end.get(timeout=wait_s)
            except queue.Empty:
                wait_s = self.advance()
                if wait_s is None and self._has_new_item(end):
                    wait_s = 0.0
            else:
                return

    def _has_new_item(self, end: "queue.SimpleQueue[None]") -> bool:
        """Return whether another item came since the last tick; if not, forget this thread, which ends."""
        with self._lock:
            if self._item is not None and self._item.ticks < LAST_TICK:
                return True
            if self._end is end:
                self._item = self._thread = None
            return False


class ReclaimingIterator(Generic[T]):
    """Passes items through unchanged; collects garbage before items 6, 12, 18, ... and during long ones.

    Each iteration has its own watchdog, which ends with it, also if the consumer breaks out or raises.

    Args:
        items: what is iterated over, as often as it allows.
        reclaimer: what collects.
        watchdog: creates one for each iteration.

    """

    def __init__(
        self,
        items: Iterable[T],
        reclaimer: Reclaimer | None = None,
        watchdog: Callable[[Reclaimer], Watchdog] = Watchdog,
    ) -> None:
        """Wrap the items."""
        self._items, self._watchdog = items, watchdog
        self._reclaimer = reclaimer or Reclaimer()

    def __len__(self) -> int:
        """Return the number of items, if they have a length."""
        if not isinstance(self._items, Sized):
            message = f"{type(self._items).__name__} has no length"
            raise TypeError(message)
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """Yield the items."""
        watchdog = self._watchdog(self._reclaimer)
        try:
            for number, item in enumerate(self._items, 1):
                if number % EVERY == 0:
                    self._reclaimer.collect_young()
                watchdog.watch()
                yield item
                watchdog.rest()
        finally:  # also when a loop breaks out and drops the generator
            watchdog.stop()


@contextlib.contextmanager
def collector_settings(*, automatic: bool | None = None) -> Iterator[None]:
    """Restore the garbage collector's settings after a block.

    Args:
        automatic: whether it collects by itself inside the block; None changes nothing.

    """
    enabled, thresholds, debug = gc.isenabled(), gc.get_threshold(), gc.get_debug()
    if automatic is not None:
        (gc.enable if automatic else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if enabled else gc.disable)()
        gc.set_threshold(*thresholds)
        gc.set_debug(debug)


@dataclass(frozen=True)
class Reclaim:
    """How memory is reclaimed: a context manager around each candidate, and a wrapper of its batches."""

    candidate: Callable[[], AbstractContextManager[object]]
    batches: Callable[[Iterable[Any]], Iterable[Any]]


def reclaim(mode: Mode, reclaimer: Reclaimer | None = None) -> Reclaim:
    """Return what a mode does around candidates and between batches.

    Modes: ``nothing``; ``collect`` garbage after each candidate, and only then; ``collect_batch`` after each
    batch; ``empty_cache`` and ``empty_cache_batch`` release torch's cache then; ``iterator`` is
    :class:`ReclaimingIterator`; ``pool`` gives each candidate a CUDA memory pool. ``expandable`` needs the
    variables of :func:`environment`, ``subprocess`` is :func:`isolated`: here they do nothing.
    """
    if mode not in MODES:
        message = f"no mode {mode!r}; there are: {', '.join(MODES)}"
        raise ValueError(message)
    reclaimer = reclaimer or Reclaimer()

    after_candidate: dict[Mode, Callable[[], object]] = {
        "collect": gc.collect,
        "empty_cache": reclaimer.release_cache,
        "pool": reclaimer.release_cache,
    }
    after_batch: dict[Mode, Callable[[], object]] = {
        "collect_batch": gc.collect,
        "empty_cache_batch": reclaimer.release_cache,
    }

    @contextlib.contextmanager
    def candidate() -> Iterator[None]:
        # Only this thread's allocations come from the pool, not those of autograd's threads.
        pool = torch.cuda.MemPool() if mode == "pool" else None
        try:
            with (
                collector_settings(automatic=False if mode == "collect" else None),
                torch.cuda.use_mem_pool(pool) if pool is not None else contextlib.nullcontext(),
            ):
                yield
        finally:
            del pool
            after_candidate.get(mode, _nothing)()

    def batches(items: Iterable[Any]) -> Iterator[Any]:
        for item in ReclaimingIterator(items, reclaimer) if mode == "iterator" else items:
            yield item
            after_batch.get(mode, _nothing)()

    return Reclaim(candidate, batches)


def _nothing() -> None:
    pass


def environment(mode: Mode) -> Mapping[str, str]:
    """Return the environment variables that a mode's process must start with."""
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if mode == "expandable" else {}


def refusal(mode: Mode, device: str) -> str:
    """Return why a mode is not available on a device, or an empty string."""
    return "" if device.startswith("cuda") else _NEEDS_CUDA.get(mode, "")


def isolated(
    function: Callable[..., T],
    *args: Any,  # noqa: ANN401  the function's own
    environment: Mapping[str, str] | None = None,
) -> T:
    """Call a function in a fresh process, whose memory is freed when it ends.

    Args:
        function: a function of a module; what it raises is raised here.
        args: picklable; tensors arrive as copies.
        environment: additional environment variables of the process.

    """
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        # A forked process shares locks with the parent's threads, and cannot use CUDA after the parent has.
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            result: T = pickle.loads(pool.submit(_call, pickle.dumps((function, args))).result())  # noqa: S301  from our own child
            return result
    finally:
        os.environ.clear()
        os.environ.update(before)


def _call(call: bytes) -> bytes:
    # As bytes: torch's own pickling shares memory, which would need the child to stay alive.
    function, args = pickle.loads(call)  # noqa: S301  written by isolated()
    return pickle.dumps(function(*args))
