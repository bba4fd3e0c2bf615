"""Graphs that ``torch.compile`` makes: counted, missed where they do not run; and settings for them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from threading import Lock, local
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

DYNAMO = "torch._dynamo.config"

Settings = Sequence[tuple[str, str, object]]
"""Modules of settings, loaded when something is compiled; names in them, and values."""


class SilentlyEagerError(RuntimeError):
    """A model that was to run compiled does not; the message says how much of it, and why that may be."""


class Graphs:
    """A backend of ``torch.compile`` that counts: graphs ``compiled``, and how often one of them ``ran``.

    ``ran_here`` counts those of this thread alone, beside which others may run.

    Args:
        backend: the name of the one that compiles.

    """

    def __init__(self, backend: str = "inductor") -> None:
        """Count from 0."""
        self.compiled = self.ran = 0
        self._backend = backend
        self._here = local()
        self._lock = Lock()  # or a count may be lost between threads

    @property
    def ran_here(self) -> int:
        """How often a graph ran in this thread."""
        return int(getattr(self._here, "ran", 0))

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph, and count its runs."""
        self.compiled += 1
        run = _dynamo().lookup_backend(self._backend)(graph, example_inputs)

        def counted(*values: object) -> object:
            with self._lock:
                self.ran += 1
            self._here.ran = self.ran_here + 1
            return run(*values)

        return counted


def check_compiled(model: nn.Module, inputs: Sequence[Tensor], graphs: Graphs, least: int) -> None:
    """Run a model twice: the second run must go through so many graphs at least, and compile none.

    With gradients or without, as they are now: each is compiled for itself.

    Raises:
        SilentlyEagerError: it runs eager, in part or all of it, or compiles in every run.

    """
    model(*inputs)
    compiled, ran = graphs.compiled, graphs.ran
    model(*inputs)
    if graphs.ran - ran < least:
        message = (
            f"only {graphs.ran - ran} of {least} graphs ran: the rest is eager. {compiled} graphs are "
            f"compiled; behind the recompile limit, which all models share, torch runs eager without a word, "
            "and nn.Linear.compile() compiles nothing"
        )
        raise SilentlyEagerError(message)
    if graphs.compiled > compiled:
        message = f"the same call compiled {graphs.compiled - compiled} graphs again"
        raise SilentlyEagerError(message)


def limits(recompile_limit: int | None) -> Settings:
    """Return the settings of a recompile limit; none, where torch's own is to hold."""
    if recompile_limit is None:
        return ()
    return (
        (DYNAMO, "recompile_limit", recompile_limit),
        (DYNAMO, "accumulated_recompile_limit", 8 * recompile_limit),
    )


@contextlib.contextmanager
def applied(settings: Settings) -> Iterator[None]:
    """Set torch's own settings inside, and put them back; what torch has for it takes as long as a layer."""
    before = [(module, name, getattr(import_module(module), name)) for module, name, _ in settings]
    try:
        for module, name, value in settings:
            setattr(import_module(module), name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(import_module(module), name, value)


def _dynamo() -> ModuleType:
    from torch import _dynamo  # noqa: PLC0415  it takes seconds, and most never compile

    return _dynamo
