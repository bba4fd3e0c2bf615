"""Collecting garbage beside somebody who is busy: a thread that ticks while a batch is held.

After DrChainsaw's NaiveGAflux ("Garbage Collect Between Batches" of its performance tips), where a timer
does it.
"""

import gc
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

TICK_S = 0.1
"""So often it ticks."""
FULL_FROM = 6
"""From this tick on all generations are collected and the cache is released."""
LAST = 41
"""The last tick: whoever holds a batch for longer does not wait for memory."""


class Reclaimer:
    """What reclaims memory: Python's collector, and torch's cache of device memory."""

    def young(self) -> None:
        """Collect the youngest generation."""
        gc.collect(0)

    def full(self) -> None:
        """Collect all generations and release the cache."""
        gc.collect()
        self.release()

    def release(self) -> None:
        """Give back to the device what torch keeps of it; on a CPU, or before CUDA is used, nothing."""
        torch.cuda.empty_cache()


@dataclass
class _Hold:
    """A batch that is held: when the next tick is due, and how many there were."""

    due_s: float
    ticks: int = 0


class Watchdog:
    """Ticks while a batch is held: collects the young at each tick, everything from tick 6, ends at tick 41.

    Its thread is started with the first batch, and ends at :meth:`stop` or with the last tick; the next batch
    starts another. It can be used from several threads, and from a finaliser that a collection runs, its
    own included.

    Args:
        reclaimer: what a tick does.
        clock: seconds since some moment.
        tick_s: seconds between two ticks.

    """

    def __init__(
        self, reclaimer: Reclaimer, clock: Callable[[], float] = time.monotonic, tick_s: float = TICK_S
    ) -> None:
        """Watch nothing yet."""
        self._reclaimer, self._clock, self._tick_s = reclaimer, clock, tick_s
        # A finaliser may come back in the middle of a method, on the same thread.
        self._lock = threading.RLock()
        self._hold: _Hold | None = None
        self._thread: threading.Thread | None = None
        # The one queue whose put() may interrupt anything, its own get() included.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def watch(self) -> None:
        """A batch is held from now on: count its ticks from 1, and see to it that somebody does."""
        with self._lock:
            self._hold = _Hold(self._clock() + self._tick_s)
            if self._thread is None:
                self._bell = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=self._run, args=(self._bell,), name="reclaiming watchdog", daemon=True
                )
                self._thread.start()

    def rest(self) -> None:
        """The batch is done with: no tick until the next one is held."""
        with self._lock:
            self._hold = None

    def stop(self) -> None:
        """End the thread and wait for it; a collection that it has begun is finished first."""
        with self._lock:
            self._hold = None
            thread, self._thread = self._thread, None
            self._bell.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def advance(self) -> float | None:
        """Tick if a tick is due; return the seconds until one may be, or None behind the last."""
        with self._lock:
            hold = self._hold
            if hold is None:
                return self._tick_s
            now_s = self._clock()
            if now_s < hold.due_s:
                return hold.due_s - now_s
            hold.ticks += 1
            tick = hold.ticks
        self._reclaimer.young()
        if tick >= FULL_FROM:
            self._reclaimer.full()
        if tick >= LAST:
            return None
        # Late ticks are not made up for: collecting may take longer than the time between two.
        hold.due_s = self._clock() + self._tick_s
        return self._tick_s

    def _run(self, bell: "queue.SimpleQueue[None]") -> None:
        wait_s: float | None = self._tick_s
        while wait_s is not None:
            try:
                bell.get(timeout=wait_s)
            except queue.Empty:
                wait_s = self.advance()
                if wait_s is None and self._is_taken_up(bell):
                    wait_s = 0.0
            else:
                return

    def _is_taken_up(self, bell: "queue.SimpleQueue[None]") -> bool:
        """Say whether another batch is held since the last tick; if not, the thread with this bell ends."""
        with self._lock:
            if self._hold is not None and self._hold.ticks < LAST:
                return True
            if self._bell is bell:
                self._hold = self._thread = None
            return False
