"""Compiled layers that all models of a population share, so that a new architecture compiles nothing.

    layers = SharedLayers()
    for architecture in population:
        model = layers.replace(architecture())   # every nn.Linear in it calls the same compiled function
        layers.check(model, x)                   # raises unless it runs compiled
        train(model)

``torch.compile(model)`` compiles every architecture separately, and only 8 of them: torch's recompile limit
counts all models together, and later ones silently run eagerly. ``nn.Linear.compile()`` compiles nothing.
:class:`Graphs` counts the graphs that are compiled and run, so that both are detected.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import override

Settings = Sequence[tuple[str, str, object]]
"""Module, name and value of settings of torch."""

_DYNAMO = "torch._dynamo.config"
_ALL_SHAPES: Settings = (
    (_DYNAMO, "force_parameter_static_shapes", False),
    # Otherwise sizes that are equal when a graph is compiled, e.g. rows and channels, must always be equal.
    ("torch.fx.experimental._config", "use_duck_shape", False),
)

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class SilentlyEagerError(RuntimeError):
    """A model that should run compiled runs eagerly, at least in part."""


class Graphs:
    """A backend of ``torch.compile`` that counts graphs that were ``compiled``, and how often one ``ran``."""

    def __init__(self, backend: str = "inductor") -> None:
        self.compiled = self.ran = 0
        self._backend = backend

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph and count its runs."""
        self.compiled += 1
        dynamo: Any = import_module("torch._dynamo")  # takes seconds, and most programs never compile
        run = dynamo.lookup_backend(self._backend)(graph, example_inputs)

        def count_and_run(*values: object) -> object:
            self.ran += 1
            return run(*values)

        return count_and_run

    def check(self, model: nn.Module, inputs: Sequence[Tensor], expected: int) -> None:
        """Run a model twice, the second time with at least ``expected`` graphs and without compiling.

        Otherwise raise SilentlyEagerError.
        """
        model(*inputs)
        compiled, ran = self.compiled, self.ran
        model(*inputs)
        if self.ran - ran < expected:
            raise SilentlyEagerError(
                f"only {self.ran - ran} of {expected} compiled graphs ran, so the rest of the model is "
                f"eager: either torch's recompile limit, which all models share, is reached with {compiled} "
                "graphs (raise torch._dynamo.config.recompile_limit), or a layer was never compiled "
                "(nn.Linear.compile() compiles nothing: use torch.compile)"
            )
        if self.compiled > compiled:
            raise SilentlyEagerError(
                f"the second call with the same inputs compiled {self.compiled - compiled} graphs again: "
                "a value that torch compiles in as a constant changes between calls; run with "
                "TORCH_LOGS=recompiles to see which"
            )


class SharedLayers:
    """One compiled linear layer for all models.

    With ``dynamic`` shapes, two graphs serve all sizes from 2 up: one for rows with gradients and one for
    rows without. Otherwise each shape needs two. Each further property that torch specializes on multiplies
    the number of graphs: bias, number of axes, ``torch.no_grad()``, weights that are frozen or computed
    (``weight_norm``, pruning), dtype, device, autocast, and sizes of 1. Each ``SharedLayers`` has its own
    recompile limit, 8 by default; a call that exceeds it raises an error instead of running eagerly.

    A call of a layer changes settings of torch for the whole process, and restores them afterwards. Use one
    thread: another thread that compiles or runs a layer during the call would see these settings.

    Copies of a model share the layers too. A compiled function cannot be pickled: save ``state_dict()``.

    Args:
        backend: name of the backend of ``torch.compile``.
        dynamic: whether one graph serves all shapes.
        recompile_limit: maximum number of graphs, or None for torch's own setting.
    """

    def __init__(
        self, backend: str = "inductor", *, dynamic: bool = True, recompile_limit: int | None = None
    ) -> None:
        self.graphs = Graphs(backend)
        self._settings = (*_ALL_SHAPES, *recompile_limit_settings(recompile_limit))
        # Graphs are cached and limited per code object, so each instance needs its own.
        code = _linear.__code__.replace(co_name="shared_linear")
        linear: Linear = FunctionType(code, globals(), "shared_linear")
        self._compiled: Linear = torch.compile(linear, dynamic=dynamic, backend=self.graphs)

    def replace(self, model: nn.Module) -> nn.Module:
        """Make every ``nn.Linear`` of a model call the shared function, except instances of subclasses.

        Return the model, which is changed in place: layers keep their identity, names, parameters and hooks.
        Parametrize layers afterwards.
        """
        for layer in model.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = SharedLinear
            if isinstance(layer, SharedLinear):
                layer.shared_layers = self
        return model

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [..., in] @ weight [out, in].T + bias [out]; raise SilentlyEagerError if no graph ran."""
        ran = self.graphs.ran
        with change_settings(self._settings):
            y = self._compiled(x, weight, bias)
        if self.graphs.ran == ran:
            raise SilentlyEagerError(
                "a layer with a shared compiled graph would run eagerly. Perhaps the limit is reached: "
                f"{self.graphs.compiled} graphs are compiled, one per combination of bias, number of input "
                "axes, gradients and dtypes; raise recompile_limit. Or it is called inside torch.func (vmap, "
                "grad), where nothing is compiled: use the model as it was before replace() there"
            )
        return y

    def check(self, model: nn.Module, *inputs: Tensor) -> None:
        """Run a model twice and check that its layers run compiled, the second time without compiling.

        Raises:
            SilentlyEagerError: a linear layer runs eagerly, or compiles in every run.
        """
        kinds = {nn.Linear, nn.LazyLinear}
        for name, module in model.named_modules():
            if parametrize.type_before_parametrizations(module) in kinds:
                raise SilentlyEagerError(
                    f"{name or 'the layer'} is a plain nn.Linear, which runs eagerly: call replace() before "
                    "it is parametrized and, if it is lazy, after its first forward pass"
                )
        layers = sum(isinstance(module, SharedLinear) for module in model.modules())
        self.graphs.check(model, inputs, max(1, layers))

    def __deepcopy__(self, _: dict[int, object]) -> "SharedLayers":
        """Return the object itself, so that copies of a model share its compiled layers."""
        return self


class SharedLinear(nn.Linear):
    """A linear layer whose product is computed by :class:`SharedLayers`."""

    shared_layers: SharedLayers

    @override
    def forward(self, input: Tensor) -> Tensor:
        return self.shared_layers.linear(input, self.weight, self.bias)


def recompile_limit_settings(recompile_limit: int | None) -> Settings:
    """Return the settings of torch that allow this many graphs; no settings for None."""
    if recompile_limit is None:
        return ()
    return (
        (_DYNAMO, "recompile_limit", recompile_limit),
        (_DYNAMO, "accumulated_recompile_limit", 8 * recompile_limit),
    )


@contextlib.contextmanager
def change_settings(settings: Settings) -> Iterator[None]:
    """Change settings of torch inside a block, faster than its own ``config.patch``."""
    before = [(module, name, getattr(import_module(module), name)) for module, name, _ in settings]
    try:
        for module, name, value in settings:
            setattr(import_module(module), name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(import_module(module), name, value)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(x, weight, bias)
