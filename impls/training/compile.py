"""Compiled layers that all models of a population share, so that a new architecture compiles nothing.

    layers = SharedLayers()
    for architecture in population:
        model = layers.replace(architecture())   # every nn.Linear in it calls the same compiled function
        layers.check(model, x)                    # it really runs compiled
        train(model)

``torch.compile(model)`` compiles every architecture anew, and only so many of them: the recompile limit of 8
counts for all models together, and behind it they run eager without a word. ``nn.Linear.compile()`` compiles
nothing at all. :class:`Graphs` counts what is compiled and what runs, and :func:`check_compiled` refuses.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["Graphs", "SharedLayers", "SilentlyEagerError", "WholeModels", "check_compiled", "refusal"]

DYNAMO = "torch._dynamo.config"

Settings = Sequence[tuple[str, str, object]]
"""Modules of settings, loaded when something is compiled; names in them, and values."""

SHAPES: Settings = (
    (DYNAMO, "force_parameter_static_shapes", False),
    # Or sizes that happen to be equal when a graph is made, as rows and channels may, must be so ever after.
    ("torch.fx.experimental._config", "use_duck_shape", False),
)
"""What lets one graph serve parameters of all sizes."""

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class SilentlyEagerError(RuntimeError):
    """A model that was to run compiled does not; the message says how much of it, and why that may be."""


class Compiler(Protocol):
    """What torch calls to compile a graph."""

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs instead of the graph."""
        ...


class Graphs:
    """A backend of ``torch.compile`` that counts: graphs ``compiled``, and how often one of them ``ran``.

    Args:
        backend: the name of the one that compiles.

    """

    def __init__(self, backend: str = "inductor") -> None:
        """Count from 0."""
        self.compiled = self.ran = 0
        self._backend = backend

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph, and count its runs."""
        self.compiled += 1
        run = _dynamo().lookup_backend(self._backend)(graph, example_inputs)

        def counted(*values: object) -> object:
            self.ran += 1
            return run(*values)

        return counted


class SharedLayers:
    """One compiled linear layer for all models.

    With ``dynamic`` shapes it is compiled once for rows that need a gradient and once for those that need
    none, whatever the sizes from 2 up; a size of 1 is a graph of its own. Without, once for each shape. Each
    object counts against a recompile limit of its own.

    torch takes a parameter to have one shape for ever, unless ``force_parameter_static_shapes`` is false, and
    equal sizes to be equal for ever, unless ``use_duck_shape`` is. These and the recompile limit are settings
    of the whole process: they are set while a layer is called, and put back behind it. Another thread that
    compiles at that very moment would see them.

    Args:
        backend: that of ``torch.compile``.
        dynamic: whether one graph serves all shapes.
        recompile_limit: how many graphs there may be before torch runs eager; torch's own setting, where
            nothing is said.

    """

    def __init__(
        self, backend: str = "inductor", *, dynamic: bool = True, recompile_limit: int | None = None
    ) -> None:
        """Compile nothing yet."""
        self.graphs = Graphs(backend)
        self._settings = (*SHAPES, *_limits(recompile_limit))
        # Graphs are kept, and limited, by code object: with its own nobody else's count.
        code = _linear.__code__.replace(co_name="shared_linear")
        linear: Linear = FunctionType(code, globals(), "shared_linear")
        self._compiled: Linear = torch.compile(linear, dynamic=dynamic, backend=self.graphs)

    def replace(self, model: nn.Module) -> nn.Module:
        """Let every ``nn.Linear`` of a model, of exactly this class, run through the shared function.

        Parameters stay the same objects under the same names, so that optimizers and states keep their
        meaning. The model is changed, and returned; if it is a layer itself, another is.
        """
        if type(model) is nn.Linear:
            return SharedLinear(model, self.linear)
        for name, child in model.named_children():
            setattr(model, name, self.replace(child))
        return model

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [..., in] times weight [out, in] transposed, plus bias [out]."""
        with _set(self._settings):
            return self._compiled(x, weight, bias)

    def check(self, model: nn.Module, *inputs: Tensor) -> None:
        """Run a model twice, and see to it that its layers ran compiled and compiled nothing the second time.

        Raises:
            SilentlyEagerError: they did not.

        """
        layers = sum(isinstance(module, SharedLinear) for module in model.modules())
        check_compiled(model, inputs, self.graphs, max(1, layers))


class SharedLinear(nn.Module):
    """An ``nn.Linear`` whose product is somebody else's, made by :meth:`SharedLayers.replace`."""

    def __init__(self, layer: nn.Linear, linear: Linear) -> None:
        """Take over the parameters."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self._linear = linear
        self.train(layer.training)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)


class WholeModels:
    """Each architecture compiled as a whole, by ``torch.compile(model)``.

    Args:
        backend: that of ``torch.compile``.
        recompile_limit: torch's own setting, where nothing is said. It counts for all models of the process.

    """

    def __init__(self, backend: str = "inductor", *, recompile_limit: int | None = None) -> None:
        """Compile nothing yet."""
        self.graphs = Graphs(backend)
        self._settings = _limits(recompile_limit)

    def compile(self, model: nn.Module) -> nn.Module:
        """Return the model compiled, with the same parameters."""
        return _Whole(torch.compile(model, backend=self.graphs), self._settings)

    def check(self, model: nn.Module, *inputs: Tensor) -> None:
        """Run a model twice, and see to it that it ran compiled and compiled nothing the second time.

        Raises:
            SilentlyEagerError: it did not.

        """
        check_compiled(model, inputs, self.graphs, 1)


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


def refusal(device: str) -> str:
    """Say what is missing to compile for a device, or nothing."""
    if device.startswith("cuda"):
        return "" if _has_triton() else "torch.compile needs triton on CUDA, which is not installed"
    known = ("cl",) if os.name == "nt" else ("g++", "clang++", "c++")
    named = os.environ.get("CXX", "").split()
    if any(shutil.which(name) for name in (*named[:1], *known)):
        return ""
    return "torch.compile needs a C++ compiler on a CPU, and there is none on the path"


class _Whole(nn.Module):
    """A compiled model that is called with settings of its own."""

    def __init__(self, model: Callable[..., object], settings: Settings) -> None:
        super().__init__()
        self.model = model
        self._settings = settings

    @override
    def forward(self, *inputs: Tensor) -> object:
        with _set(self._settings):
            return self.model(*inputs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(x, weight, bias)


def _limits(recompile_limit: int | None) -> Settings:
    if recompile_limit is None:
        return ()
    return (
        (DYNAMO, "recompile_limit", recompile_limit),
        (DYNAMO, "accumulated_recompile_limit", 8 * recompile_limit),
    )


@contextlib.contextmanager
def _set(settings: Settings) -> Iterator[None]:
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


def _has_triton() -> bool:
    from torch.utils._triton import has_triton  # noqa: PLC0415  beside what it asks for

    return bool(has_triton())
