"""Where the time of a run goes: seconds by activity, so that what is not measuring can be seen."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping


class Stopwatch:
    """Adds up the seconds of each activity; one inside another stops the outer one meanwhile."""

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, spent_s: Mapping[str, float] | None = None
    ) -> None:
        """Start with what an earlier part of the run has spent."""
        self.seconds = now_s
        self._spent_s = dict(spent_s or {})
        self._running: list[str] = []
        self._since_s = now_s()

    @contextlib.contextmanager
    def on(self, activity: str) -> Iterator[None]:
        """Charge the time inside the context to an activity."""
        self._settle()
        self._running.append(activity)
        try:
            yield
        finally:
            self._settle()
            self._running.pop()

    @property
    def spent_s(self) -> Mapping[str, float]:
        """Seconds by activity, so far; ``other`` is what nobody was charged for."""
        self._settle()
        return dict(self._spent_s)

    def _settle(self) -> None:
        now_s = self.seconds()
        activity = self._running[-1] if self._running else "other"
        self._spent_s[activity] = self._spent_s.get(activity, 0.0) + now_s - self._since_s
        self._since_s = now_s
