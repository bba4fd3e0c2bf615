"""What keeps memory flat while many models are trained one after another, as an architecture search does.

    for batch in ReclaimingIterator(batches):  # collects before every sixth, and while one is held
        ...

    plan = reclaim("collect")
    for architecture in population:
        with plan.candidate():
            train(architecture, plan.batches(batches))  # a function: its model is gone when it returns

None of it is needed where nothing leaks, and all of it costs time: measure it with the suite ``hygiene``.
A cache must not be released while a CUDA graph is captured.
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

import torch

from impls.training.isolation import isolated
from impls.training.watchdog import Reclaimer, Watchdog

__all__ = [
    "EVERY",
    "MODES",
    "Mode",
    "Reclaim",
    "Reclaimer",
    "ReclaimingIterator",
    "environment",
    "isolated",
    "kept_settings",
    "memory_pool",
    "reclaim",
    "refusal",
]

T = TypeVar("T")

EVERY = 6
"""The iterator collects before every sixth item."""

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

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Read once, by the first allocation on a device: for a fresh process."""

NO_CACHE = "torch keeps no cache of a CPU's memory that could be released: this needs CUDA"
_NEEDS_CUDA: Mapping[Mode, str] = {
    "empty_cache": NO_CACHE,
    "empty_cache_batch": NO_CACHE,
    "expandable": "expandable segments are a setting of torch's CUDA allocator: this needs CUDA",
    "pool": "memory pools are of torch's CUDA allocator: this needs CUDA",
}


class ReclaimingIterator(Generic[T]):
    """Passes items through unchanged, and collects garbage before items 6, 12, 18, ... and while one is held.

    Before those items the youngest generation is collected. While the consumer holds an item a watchdog does
    so every 0.1 s; from its tick 6 on it collects everything and releases torch's cache, and tick 41 is its
    last. A consumer that breaks out, or raises, leaves no thread. Each iteration has a watchdog of its own.

    Args:
        items: what is iterated over, as often as it can be.
        reclaimer: what collects.
        watchdog: makes one for each iteration.

    """

    def __init__(
        self,
        items: Iterable[T],
        reclaimer: Reclaimer | None = None,
        watchdog: Callable[[Reclaimer], Watchdog] = Watchdog,
    ) -> None:
        """Wrap the items; nothing runs before they are asked for."""
        self._items, self._watchdog = items, watchdog
        self._reclaimer = reclaimer or Reclaimer()

    def __len__(self) -> int:
        """Return how many items there are.

        Raises:
            TypeError: nobody knows.

        """
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
                    self._reclaimer.young()
                watchdog.watch()
                yield item
                watchdog.rest()
        finally:  # also of a generator that is dropped, as a loop does that is left early
            watchdog.stop()


@contextlib.contextmanager
def kept_settings(*, automatic: bool | None = None) -> Iterator[None]:
    """Put the collector's settings back behind a block, also one that raises.

    Args:
        automatic: whether it collects by itself inside; as it did before, where nothing is said.

    """
    enabled, thresholds, debug = gc.isenabled(), gc.get_threshold(), gc.get_debug()
    if automatic is not None:
        _set_automatic(automatic)
    try:
        yield
    finally:
        _set_automatic(enabled)
        gc.set_threshold(*thresholds)
        gc.set_debug(debug)


@contextlib.contextmanager
def memory_pool(release: Callable[[], object] = torch.cuda.empty_cache) -> Iterator[None]:
    """Let this thread's allocations on the CUDA device come from a pool of their own, which goes back behind.

    What other threads allocate, those of the backward pass among them, comes from where it always does.
    """
    pool = torch.cuda.MemPool()
    try:
        with kept_settings(), torch.cuda.use_mem_pool(pool):
            yield
    finally:
        del pool
        release()


@dataclass(frozen=True)
class Reclaim:
    """How memory is reclaimed: a context manager around each candidate, and what passes batches through."""

    candidate: Callable[[], AbstractContextManager[object]]
    batches: Callable[[Iterable[Any]], Iterable[Any]]


def reclaim(mode: Mode, reclaimer: Reclaimer | None = None) -> Reclaim:
    """Return what a mode does between candidates and batches; nothing for those that are another process.

    Args:
        mode: see :data:`MODES`.
        reclaimer: what collects and releases.

    Raises:
        ValueError: no such mode.

    """
    if mode not in MODES:
        message = f"no mode {mode!r}; there are: {', '.join(MODES)}"
        raise ValueError(message)
    reclaimer = reclaimer or Reclaimer()

    def behind(action: Callable[[], object]) -> Callable[[Iterable[Any]], Iterator[Any]]:
        def passed(batches: Iterable[Any]) -> Iterator[Any]:
            for batch in batches:
                yield batch
                action()

        return passed

    candidates: Mapping[Mode, Callable[[], AbstractContextManager[object]]] = {
        "collect": _collected,
        "empty_cache": lambda: _then(reclaimer.release),
        "pool": lambda: memory_pool(reclaimer.release),
    }
    batches: Mapping[Mode, Callable[[Iterable[Any]], Iterable[Any]]] = {
        "collect_batch": behind(gc.collect),
        "empty_cache_batch": behind(reclaimer.release),
        "iterator": lambda items: ReclaimingIterator(items, reclaimer),
    }
    return Reclaim(candidates.get(mode, kept_settings), batches.get(mode, iter))


def environment(mode: Mode) -> Mapping[str, str]:
    """Return the variables that a mode's process has to start with."""
    return EXPANDABLE if mode == "expandable" else {}


def refusal(mode: Mode, device: str) -> str:
    """Say why a mode cannot be had on a device, or nothing."""
    return "" if device.startswith("cuda") else _NEEDS_CUDA.get(mode, "")


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """Collect behind a candidate, and not while it is trained."""
    with kept_settings(automatic=False):
        try:
            yield
        finally:
            gc.collect()


@contextlib.contextmanager
def _then(action: Callable[[], object]) -> Iterator[None]:
    """Do something behind a candidate."""
    try:
        with kept_settings():
            yield
    finally:
        action()


def _set_automatic(automatic: bool) -> None:  # noqa: FBT001  the setting itself
    if automatic:
        gc.enable()
    else:
        gc.disable()
