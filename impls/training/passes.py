"""When a backward pass begins and ends, and the one that it is inside of.

A reentrant checkpoint makes a backward pass inside another, whose end is not that of the whole: parameters of
one layer may be in both, and an error may come behind it. Torch calls back at the end of each for itself, so
what is to be done at the end of the whole is handed on when an inner one is over.

Who is told of the beginning sees gradients that no pass is making: it is not told where another thread's pass
is under way already.
"""

from collections.abc import Callable
from threading import Lock, local
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.autograd import Variable

Callback = Callable[[], None]


class Watcher(Protocol):
    """Who looks at its parameters before a backward pass."""

    def look(self) -> None:
        """Take note of what is there."""


_WATCHERS = WeakSet[Watcher]()


class _Inner(local):
    """What is to be done when the pass is over that an inner one of this thread is inside of."""

    callbacks: list[Callback] | None = None
    """Nothing where there is no inner pass."""


_INNER = _Inner()


def at_end(callback: Callback) -> None:
    """Call something at the end of the whole backward pass that is under way, unless it ends in an error."""
    if _INNER.callbacks is not None:
        _INNER.callbacks.append(callback)
    else:
        # Torch has no public name for that.
        Variable._execution_engine.queue_callback(callback)  # noqa: SLF001  see above


def watch(watcher: Watcher) -> None:
    """Tell somebody, whom this does not keep alive, of every backward pass from now on."""
    # All passes go through this function of torch's own, where they have no public name.
    module: Any = torch.autograd
    plain = module._engine_run_backward  # noqa: SLF001  see above
    if not isinstance(plain, _Watched):
        module._engine_run_backward = _Watched(plain)  # noqa: SLF001  see above
    _WATCHERS.add(watcher)


def leave(watcher: Watcher) -> None:
    """Tell somebody of no more passes."""
    _WATCHERS.discard(watcher)


class _Watched:
    """Torch's backward pass, which says that it begins, and hands on what inner ones leave to do."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain
        self._lock = Lock()
        self._under_way = 0

    def __call__(self, *args: object, **options: object) -> object:
        """Make a backward pass."""
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001  the only sign that another is under way
            return self._outermost(*args, **options)
        outer, _INNER.callbacks = _INNER.callbacks, []
        try:
            found = self._plain(*args, **options)
        finally:
            left, _INNER.callbacks = _INNER.callbacks, outer
        for callback in left:
            at_end(callback)
        return found

    def _outermost(self, *args: object, **options: object) -> object:
        with self._lock:  # no other begins between the look and the count
            if not self._under_way:
                for watcher in list(_WATCHERS):
                    watcher.look()
            self._under_way += 1
        try:
            return self._plain(*args, **options)
        finally:
            with self._lock:
                self._under_way -= 1
