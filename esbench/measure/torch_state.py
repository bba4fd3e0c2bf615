"""What all variants share, guarded: the functions that tell time, and torch's settings.

The timers are remembered as they are when this module is imported, which is before any plugin.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch

from esbench.measure import cuda, interleave, timers, warming
from esbench.registry import WrongResultError


class TorchState:
    """What all variants share: the timers, and torch's settings of the whole process."""

    def __init__(self) -> None:
        """Remember the settings as they are now; the timers as they were when this module was imported."""
        self._settings = _settings()

    def check(self) -> None:
        """Look whether somebody changed something, and put it right.

        Raises:
            WrongResultError: somebody did.

        """
        patched = [timer for timer in _TIMERS if timer.now is not timer.right]
        for timer in patched:
            setattr(timer.owner, timer.name, timer.right)
        if patched:
            message = f"it replaced a timer: {', '.join(sorted({timer.label for timer in patched}))}"
            raise WrongResultError(message)
        changed = {name: value for name, value in _settings().items() if value != self._settings[name]}
        for name in changed:
            _SETTINGS[name][1](self._settings[name])
        if changed:
            words = ", ".join(f"{name} from {self._settings[name]} to {changed[name]}" for name in changed)
            message = f"it changed for all variants: {words}"
            raise WrongResultError(message)


class _Timer(NamedTuple):
    """A name under which the clocks, or a variant, find what tells the time or what looks after it."""

    owner: Any
    name: str
    right: object

    @property
    def now(self) -> object:
        return vars(self.owner)[self.name]

    @property
    def label(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


def _timers() -> Iterator[_Timer]:
    """Yield everything that tells time, as it was when this module was imported: before any plugin."""
    for name in ("perf_counter_ns", "perf_counter", "monotonic", "monotonic_ns", "time", "time_ns"):
        yield _Timer(time, name, vars(time)[name])
    yield _Timer(torch.cuda, "synchronize", torch.cuda.synchronize)
    for module in (timers, cuda, interleave, warming):
        for name, value in list(vars(module).items()):
            if callable(value):
                yield _Timer(module, name, value)
            if isinstance(value, type) and value.__module__ == module.__name__:
                for method, function in list(vars(value).items()):
                    if isinstance(function, FunctionType):
                        yield _Timer(value, method, function)


_TIMERS = tuple(_timers())

_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the precision of float32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
}
"""Setting -> how it is read, and how it is set."""


def _settings() -> dict[str, Any]:
    return {name: read() for name, (read, _) in _SETTINGS.items()}
