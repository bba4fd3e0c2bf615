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

import os
import shutil
from collections.abc import Callable
from types import FunctionType
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from typing_extensions import override

from impls.training.graphs import (
    DYNAMO,
    Graphs,
    Settings,
    SilentlyEagerError,
    applied,
    check_compiled,
    limits,
)

__all__ = ["Graphs", "SharedLayers", "SilentlyEagerError", "WholeModels", "check_compiled", "refusal"]

SHAPES: Settings = (
    (DYNAMO, "force_parameter_static_shapes", False),
    # Or sizes that happen to be equal when a graph is made, as rows and channels may, must be so ever after.
    ("torch.fx.experimental._config", "use_duck_shape", False),
)
"""What lets one graph serve parameters of all sizes."""

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class SharedLayers:
    """One compiled linear layer for all models.

    With ``dynamic`` shapes it is compiled once for rows that need a gradient and once for those that need
    none, whatever the sizes from 2 up; without, once for each shape. All else that torch tells apart is a
    graph of its own: with a bias or none, each number of axes of the rows, ``torch.no_grad()``, a weight that
    does not learn or is computed (``weight_norm``, pruning), each type, device and autocast, and a size of 1.
    These multiply, and each object counts against a recompile limit of its own, which torch sets to 8: a
    population of many kinds of layers needs a higher one. Behind it a call raises, and never runs eager.

    torch takes a parameter to have one shape for ever, unless ``force_parameter_static_shapes`` is false, and
    equal sizes to be equal for ever, unless ``use_duck_shape`` is. These and the recompile limit are settings
    of the whole process: they are set while a layer is called, and put back behind it. Another thread that
    compiles at that very moment would see them.

    A copy of it, or of a model, shares it. So does what is unpickled where the population is; in another
    process all models of one population share what is made there for the first of them.

    Args:
        backend: that of ``torch.compile``.
        dynamic: whether one graph serves all shapes.
        recompile_limit: how many graphs there may be; torch's own setting, where nothing is said.

    """

    def __init__(
        self, backend: str = "inductor", *, dynamic: bool = True, recompile_limit: int | None = None
    ) -> None:
        """Compile nothing yet."""
        self.graphs = Graphs(backend)
        self._settings = (*SHAPES, *limits(recompile_limit))
        # Graphs are kept, and limited, by code object: with its own nobody else's count.
        code = _linear.__code__.replace(co_name="shared_linear")
        linear: Linear = FunctionType(code, globals(), "shared_linear")
        self._compiled: Linear = torch.compile(linear, dynamic=dynamic, backend=self.graphs)
        self._made = backend, dynamic, recompile_limit
        self.name = uuid4().hex
        """What pickles know it by."""
        _KNOWN[self.name] = self

    def replace(self, model: nn.Module) -> nn.Module:
        """Let every ``nn.Linear`` of a model, of exactly this class, run through the shared function.

        The layers stay the same objects under the same names, with all that hangs on them: parameters, ties,
        hooks, masks and norms of their weights. Classes that somebody derived are left alone. The model is
        changed, and returned.

        Raises:
            ValueError: a layer cannot be shared, and what to do; nothing is changed then.

        """
        layers = {name: one for name, one in model.named_modules() if _plain(one) in {*EAGER, SharedLinear}}
        said = {name or "the layer": _obstacle(layer) for name, layer in layers.items()}
        if message := "; ".join(f"{name} {why}" for name, why in said.items() if why):
            raise ValueError(message)
        for layer in layers.values():
            if type(layer) is nn.Linear:
                layer.__class__ = SharedLinear
            vars(layer)["shared_layers"] = self
        return model

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [..., in] times weight [out, in] transposed, plus bias [out].

        Raises:
            SilentlyEagerError: torch did not run a graph.

        """
        ran = self.graphs.ran_here
        with applied(self._settings):
            y = self._compiled(x, weight, bias)
        if self.graphs.ran_here == ran:
            if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001  it has no public name
                message = (
                    "torch.func (vmap, grad, functional transforms) runs a shared layer eager: transform the "
                    "model of before replace(), or a plain one with its state"
                )
                raise SilentlyEagerError(message)
            message = (
                f"a shared layer would run eager from here on: {self.graphs.compiled} graphs are compiled, "
                "and no more may be, or compiling is switched off. Bias or none, axes, gradients or none and "
                "types are graphs of their own: raise recompile_limit"
            )
            raise SilentlyEagerError(message)
        return y

    def check(self, model: nn.Module, *inputs: Tensor) -> None:
        """Run a model twice, and see to it that its layers ran compiled and compiled nothing the second time.

        Raises:
            SilentlyEagerError: they did not, or there are plain layers among them.

        """
        if left := [name or "the layer" for name, one in model.named_modules() if _plain(one) in EAGER]:
            message = f"{', '.join(left)}: a plain nn.Linear, which runs eager: replace() what was built"
            raise SilentlyEagerError(message)
        layers = sum(isinstance(module, SharedLinear) for module in model.modules())
        check_compiled(model, inputs, self.graphs, max(1, layers))

    @override
    def __reduce__(self) -> tuple[Callable[..., "SharedLayers"], tuple[object, ...]]:
        """Say how a copy is made: it is this one, or in another process one for all that were copied."""
        return _known, (self.name, *self._made)


class SharedLinear(nn.Linear):
    """An ``nn.Linear`` whose product is somebody else's, made by :meth:`SharedLayers.replace`."""

    shared_layers: SharedLayers

    @override
    def forward(self, input: Tensor) -> Tensor:
        return self.shared_layers.linear(input, self.weight, self.bias)


class WholeModels:
    """Each architecture compiled as a whole, by ``torch.compile(model)``.

    Behind the recompile limit a call raises :class:`SilentlyEagerError`: no part of it runs eager.

    Args:
        backend: that of ``torch.compile``.
        recompile_limit: torch's own setting, where nothing is said. It counts for all models of the process.

    """

    def __init__(self, backend: str = "inductor", *, recompile_limit: int | None = None) -> None:
        """Compile nothing yet."""
        self.graphs = Graphs(backend)
        self._settings = (*limits(recompile_limit), *STRICT)

    def compile(self, model: nn.Module) -> nn.Module:
        """Return the model compiled, with the same parameters."""
        return _Whole(torch.compile(model, backend=self.graphs), self._settings)

    def check(self, model: nn.Module, *inputs: Tensor) -> None:
        """Run a model twice, and see to it that it ran compiled and compiled nothing the second time.

        Raises:
            SilentlyEagerError: it did not.

        """
        check_compiled(model, inputs, self.graphs, 1)


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
        with applied(self._settings):
            try:
                return self.model(*inputs)
            except torch._dynamo.exc.FailOnRecompileLimitHit as error:  # noqa: SLF001  torch raises it
                message = (
                    "a model, or what comes behind a graph break in it, would run eager from here on: the "
                    "recompile limit, which all models share, is reached; raise recompile_limit"
                )
                raise SilentlyEagerError(message) from error


STRICT: Settings = ((DYNAMO, "fail_on_recompile_limit_hit", True),)
"""What lets torch say that it reached a recompile limit: else it runs eager without a word."""

EAGER = (nn.Linear, nn.LazyLinear)
"""Layers that are to be shared, and are not yet."""

_KNOWN: WeakValueDictionary[str, SharedLayers] = WeakValueDictionary()
"""What layers share in this process: name -> it, as long as somebody holds it."""


def _known(name: str, backend: str, dynamic: bool, recompile_limit: int | None) -> SharedLayers:  # noqa: FBT001  what a pickle holds comes by place
    """Return what a pickle means, made anew where nobody has it."""
    found = _KNOWN.get(name)
    if found is None:
        found = SharedLayers(backend, dynamic=dynamic, recompile_limit=recompile_limit)
        found.name, _KNOWN[name] = name, found
    return found


def _plain(module: nn.Module) -> type[nn.Module]:
    """Return a module's class as it was before it had parametrizations."""
    return parametrize.type_before_parametrizations(module)


def _obstacle(layer: nn.Module) -> str:
    """Say why a layer cannot be shared, or nothing."""
    if parametrize.is_parametrized(layer) and not isinstance(layer, SharedLinear):
        return "has parametrizations: replace() the layers first, and parametrize them then"
    if isinstance(layer.weight, UninitializedParameter):
        return "has no shape yet: let the model see a batch first"
    if "forward" in vars(layer) or vars(layer).get("_compiled_call_impl") is not None:
        return "has a forward of its own, or was compiled in place: leave it as it was made"
    return ""


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(x, weight, bias)


def _has_triton() -> bool:
    from torch.utils._triton import has_triton  # noqa: PLC0415  beside what it asks for

    return bool(has_triton())
