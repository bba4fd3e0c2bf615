"""When a backward pass ends, and the one that it is inside of.

A reentrant checkpoint makes a backward pass inside another, whose end is not that of the whole: parameters of
one layer may be in both, and an error may come behind it. Torch calls back at the end of each for itself, so
what is to be done at the end of the whole is handed on when an inner one is over.
"""

from collections.abc import Callable
from threading import local
from typing import Any

import torch
from torch.autograd import Variable

Callback = Callable[[], None]


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


def watch() -> None:
    """Look at every backward pass from now on, whether it is inside another; once in a process."""
    # All passes go through this function of torch's own, where they have no public name.
    module: Any = torch.autograd
    plain = module._engine_run_backward  # noqa: SLF001  see above
    if not isinstance(plain, _Watched):
        module._engine_run_backward = _Watched(plain)  # noqa: SLF001  see above


class _Watched:
    """Torch's backward pass, which hands on what inner ones leave to do."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain

    def __call__(self, *args: object, **options: object) -> object:
        """Make a backward pass."""
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001  the only sign that another is under way
            return self._plain(*args, **options)
        outer, _INNER.callbacks = _INNER.callbacks, []
        try:
            found = self._plain(*args, **options)
        finally:
            left, _INNER.callbacks = _INNER.callbacks, outer
        for callback in left:
            at_end(callback)
        return found
