"""Ways to keep memory flat while many models are trained one after another, as in an architecture search.

    for batch in ReclaimingIterator(batches):  # collects before every sixth batch and during long ones
        ...

    plan = Reclaim("collect")
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Generic, Literal, TypeVar, get_args

import torch
from typing_extensions import override

T = TypeVar("T")

COLLECT_EVERY = 6
"""The iterator collects before every item whose number is a multiple of this."""
TICK_S = 0.1
"""Seconds between two ticks of the watchdog."""
FIRST_FULL_TICK = 6
"""From this tick on the watchdog collects all generations and releases torch's cache."""
LAST_TICK = 41
"""After this tick the watchdog waits for the end of the item."""

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

ReleaseCache = Callable[[], object]
"""Returns cached memory to the device; ``torch.cuda.empty_cache`` does nothing before CUDA is used."""


class _Watchdog(threading.Thread):
    """Collects garbage while an item is in use, after NaiveGAflux ("Performance Tips").

    Every tick collects the youngest generation; from tick 6 on also everything else. Tick 41 is the last.
    """

    def __init__(self, release_cache: ReleaseCache, tick_s: float) -> None:
        super().__init__(name="reclaiming watchdog", daemon=True)
        self._release_cache, self._tick_s = release_cache, tick_s
        # True: an item is in use from now on. False: no item is in use. None: end. Unlike an Event's set(),
        # put() may be called by a finalizer that a collection runs on this very thread.
        self.messages: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        self.start()

    @override
    def run(self) -> None:
        """Collect garbage while an item is in use, until the message to end."""
        is_in_use = self.messages.get()
        while is_in_use is not None:
            is_in_use = self._next_message_after_ticks() if is_in_use else self.messages.get()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self.messages.put(None)
        if self is not threading.current_thread():
            self.join()

    def _next_message_after_ticks(self) -> bool | None:
        """Collect garbage at each tick until there is a message, and return the message."""
        for tick in range(1, LAST_TICK + 1):
            with contextlib.suppress(queue.Empty):
                return self.messages.get(timeout=self._tick_s)
            gc.collect(0)
            if tick >= FIRST_FULL_TICK:
                gc.collect()
                self._release_cache()
        return self.messages.get()


class ReclaimingIterator(Generic[T]):
    """Passes items through unchanged; collects garbage before items 6, 12, 18, ... and during long ones.

    While an item is in use a thread collects the youngest generation every ``tick_s`` seconds, up to tick 41,
    and from tick 6 on everything. Each iteration has its own thread, which ends with it, also if the consumer
    breaks out or raises.

    Args:
        items: the items; they can be iterated over as often as this iterable allows.
        release_cache: called by the thread from tick 6 on.
        tick_s: seconds between two ticks.
    """

    def __init__(
        self,
        items: Iterable[T],
        *,
        release_cache: ReleaseCache = torch.cuda.empty_cache,
        tick_s: float = TICK_S,
    ) -> None:
        self._items, self._release_cache, self._tick_s = items, release_cache, tick_s

    def __len__(self) -> int:
        """Return the number of items; raise TypeError if they have no length."""
        return len(self._items)  # type: ignore[arg-type]  # which raises it

    def __iter__(self) -> Iterator[T]:
        """Yield the items."""
        watchdog = _Watchdog(self._release_cache, self._tick_s)
        try:
            for number, item in enumerate(self._items, 1):
                if number % COLLECT_EVERY == 0:
                    gc.collect(0)
                watchdog.messages.put(True)  # noqa: FBT003  a message
                yield item
                watchdog.messages.put(False)  # noqa: FBT003  a message
        finally:  # also when a loop breaks out and drops the generator
            watchdog.stop()


class Reclaim:
    """Reclaims memory after each candidate model and after each of its training batches.

    Modes: ``nothing``; ``collect`` garbage after each candidate, and only then; ``collect_batch`` after each
    batch; ``empty_cache`` and ``empty_cache_batch`` release torch's cache then; ``iterator`` is
    :class:`ReclaimingIterator`; ``pool`` gives each candidate a CUDA memory pool. ``expandable`` needs the
    variables of :func:`environment`, ``subprocess`` is :func:`call_in_fresh_process`: here they do nothing.

    Args:
        mode: one of these.
        release_cache: releases torch's cache.
    """

    def __init__(self, mode: Mode, release_cache: ReleaseCache = torch.cuda.empty_cache) -> None:
        if mode not in MODES:
            raise ValueError(f"no mode {mode!r}; available: {', '.join(MODES)}")
        self._mode, self._release_cache = mode, release_cache

    @contextlib.contextmanager
    def candidate(self) -> Iterator[None]:
        """Reclaim memory at the end of a block; the garbage collector's settings are restored."""
        was_enabled = gc.isenabled()
        if self._mode == "collect":
            gc.disable()
        # Only this thread's allocations come from the pool, not those of autograd's threads.
        pool = torch.cuda.MemPool() if self._mode == "pool" else None
        try:
            with torch.cuda.use_mem_pool(pool) if pool is not None else contextlib.nullcontext():
                yield
        finally:
            del pool
            if self._mode == "collect":
                (gc.enable if was_enabled else gc.disable)()
                gc.collect()
            elif self._mode in {"empty_cache", "pool"}:
                self._release_cache()

    def batches(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a candidate, and reclaim memory after each."""
        if self._mode == "iterator":
            items = ReclaimingIterator(items, release_cache=self._release_cache)
        for item in items:
            yield item
            if self._mode == "collect_batch":
                gc.collect()
            elif self._mode == "empty_cache_batch":
                self._release_cache()


def environment(mode: Mode) -> Mapping[str, str]:
    """Return the environment variables that a mode's process must start with."""
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if mode == "expandable" else {}


def refusal(mode: Mode, device: str) -> str:
    """Return why a mode is not available on a device, or an empty string."""
    return "" if device.startswith("cuda") else _NEEDS_CUDA.get(mode, "")


def call_in_fresh_process(
    function: Callable[..., T],
    *args: Any,  # noqa: ANN401  the function's own
    environment: Mapping[str, str] | None = None,
) -> T:
    """Call a function in a fresh process with as many torch threads as this one, and free its memory.

    Args:
        function: a function of a module; an exception in it is raised here.
        args: picklable; tensors arrive as copies.
        environment: additional environment variables of the process.
    """
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        # A forked process shares locks with the parent's threads, and cannot use CUDA after the parent has.
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            call = pickle.dumps((function, args, torch.get_num_threads()))
            result: T = pickle.loads(pool.submit(_run_pickled, call).result())  # noqa: S301  from our own child
            return result
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_pickled(call: bytes) -> bytes:
    # The result is bytes, because tensors would be sent as shared memory, which ends with this process.
    function, args, threads = pickle.loads(call)  # noqa: S301  written by call_in_fresh_process()
    torch.set_num_threads(threads)  # the order of sums depends on it
    return pickle.dumps(function(*args))
