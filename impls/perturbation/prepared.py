"""A population's forward for many calls with one noise, such as those of a policy in a rollout.

For small layers Python takes longer than the arithmetic. :func:`trace` therefore records the ATen operations
of one call. Those that depend on noise and weights alone are computed once per noise; the others become a
program without Python in between. Views in a row become a single view.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from esbench.errors import message_of
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.layer import LayerNoise, version_of
from impls.perturbation.noise import Noise, NoiseStream
from impls.perturbation.verification import restoring

if TYPE_CHECKING:
    from impls.perturbation.population import Population, PopulationNoise

_VIEWS = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("view", "default"), ("_unsafe_view", "default"), ("alias", "default"), ("detach", "default"),
        ("unsqueeze", "default"), ("squeeze", "dim"), ("squeeze", "dims"), ("select", "int"),
        ("slice", "Tensor"), ("t", "default"), ("transpose", "int"), ("permute", "default"),
        ("expand", "default"),
    )
)  # fmt: skip
"""Operations whose result is the memory of their first argument with other sizes and strides."""


_FAST = {
    getattr(getattr(torch.ops.aten, name), overload): getattr(torch, name)
    for name, overload in (
        ("add", "Tensor"), ("sub", "Tensor"), ("mul", "Tensor"), ("mm", "default"), ("bmm", "default"),
        ("addmm", "default"), ("cat", "default"), ("tanh", "default"), ("relu", "default"),
        ("sigmoid", "default"),
    )
}  # fmt: skip
"""Operations whose public function takes the same arguments: its call is faster by some microseconds."""


class Signature(NamedTuple):
    """All that a trace depends on, except the numbers in tensors.

    Attributes:
        spec: the nesting of the arguments.
        inputs: shape, dtype and device of each tensor among them, and all other values.
        noise: the same of the noise's values.
        training: whether each module is in training mode.
        autocast: the dtype of autocast on each device where it is enabled.
    """

    spec: TreeSpec
    inputs: tuple[object, ...]
    noise: tuple[object, ...]
    training: tuple[bool, ...]
    autocast: tuple[object, ...]

    @classmethod
    def of(
        cls, noise: "PopulationNoise", args: Sequence[object], kwargs: Mapping[str, object]
    ) -> "Signature":
        """Return the signature of a call."""
        leaves, spec = tree_flatten((args, kwargs))
        values = (noise.sigma, noise.members, *(value for _, _, value in _values(noise)))
        training = tuple(module.training for module in noise.owner.model.modules())
        devices = dict.fromkeys(layer.weight.device.type for layer in noise.owner.layers)
        autocast = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            for device in devices
        )
        described = tuple(map(_described, leaves)), tuple(map(_described, values))
        return cls(spec, *described, training, tuple(autocast))


class Trace(NamedTuple):
    """The operations of a call.

    Attributes:
        signature: that of the call.
        constants: the operations that do not depend on the inputs, with the noise's tensors as placeholders.
        used: those of their results that the program reads.
        program: the other operations: a function of these results and of the inputs' tensors.
        inputs: the inputs' tensors of the traced call.
        outputs: the nesting of the model's output.
    """

    signature: Signature
    constants: fx.GraphModule
    used: tuple[fx.Node, ...]
    program: Callable[..., Sequence[Tensor]]
    inputs: tuple[Tensor, ...]
    outputs: TreeSpec


class PreparedForward:
    """The forward of a population with one noise; see :meth:`Population.prepare`."""

    def __init__(self, trace: Trace, noise: "PopulationNoise") -> None:
        """Compute what depends on noise and weights alone."""
        self._program, self._inputs, self._outputs = trace.program, trace.inputs, trace.outputs
        self._signature, self._noise = trace.signature, noise
        # Without nesting, keywords or other values, the arguments need not be flattened.
        self._is_flat = trace.signature.spec == tree_flatten((trace.inputs, {}))[1]
        self._is_one_tensor = trace.outputs == tree_flatten(torch.empty(0))[1]
        results, self._weights = _evaluate(trace.constants, noise.tensors())
        self._constants = [results[node] for node in trace.used]
        self._versions = [(weight.data_ptr(), version_of(weight)) for weight in self._weights]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  the model's
        """Run the model on rows, as a call of the population with this noise does.

        Raises:
            ValueError: an argument differs from that of :meth:`Population.prepare` in more than its numbers,
                or a weight or the population's sigma has changed.
        """
        population = self._noise.owner
        if torch.compiler.is_dynamo_compiling():
            return population(*args, noise=self._noise, **kwargs)
        population.check_sigma_unchanged(self._noise.sigma)
        inputs = args if self._is_flat and not kwargs else self._flatten(args, kwargs)
        if len(inputs) != len(self._inputs):
            message = f"got {len(inputs)} tensors, but prepare() got {len(self._inputs)}"
            raise ValueError(message)
        if [(weight.data_ptr(), version_of(weight)) for weight in self._weights] != self._versions:
            message = "a weight has changed after prepare(): call sample() and prepare() again"
            raise ValueError(message)
        rows = [_like(x, expected) for x, expected in zip(inputs, self._inputs, strict=True)]
        outputs = self._program(*self._constants, *rows)
        return outputs[0] if self._is_one_tensor else tree_unflatten(list(outputs), self._outputs)

    def _flatten(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Tensor]:
        leaves, spec = tree_flatten((args, kwargs))
        described = tuple(map(_described, leaves))
        if spec != self._signature.spec or described != self._signature.inputs:
            message = f"the arguments {described} differ from those of prepare(), {self._signature.inputs}"
            raise ValueError(message)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def record_trace(
    population: "Population", noise: "PopulationNoise", args: Sequence[object], kwargs: Mapping[str, object]
) -> Trace:
    """Return the trace of a call: the population's last one, if it is that of such a call.

    Raises:
        ValueError: as for :meth:`Population.prepare`.
        UnsupportedError: the same.
    """
    signature = Signature.of(noise, args, kwargs)
    if not population.traces or population.traces[0].signature != signature:
        population.traces[:] = [trace(population, noise, args, kwargs)]
    return population.traces[0]


def trace(
    population: "Population", noise: "PopulationNoise", args: Sequence[object], kwargs: Mapping[str, object]
) -> Trace:
    """Record the operations of a call.

    Raises:
        ValueError: the operations depend on values in tensors, the model stores values in its attributes, or
            the recorded operations give other numbers than the call.
    """
    for name, _, value in _values(noise):
        if isinstance(value, NoiseStream):
            message = f"the noise of layer {name!r} is drawn again in each call: there is nothing to prepare"
            raise UnsupportedError(message)
    population(*args, noise=noise, **kwargs)  # the first call may fill caches
    with restoring(population.model) as changed:
        expected = tree_flatten(population(*args, noise=noise, **kwargs))[0]
    if changed:
        message = (
            f"the forward stores {', '.join(changed)} in its modules: return it, and pass it to the next call"
        )
        raise ValueError(message)
    leaves, spec = tree_flatten((args, kwargs))
    inputs = tuple(_packed(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    outputs: list[TreeSpec] = []

    def forward(noise_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor]) -> list[object]:
        rest = iter(input_tensors)
        values = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        traced_args, traced_kwargs = tree_unflatten(values, spec)
        y = population.forward_traced(_with_tensors(noise, noise_tensors), traced_args, traced_kwargs)
        results, output_spec = tree_flatten(y)
        outputs.append(output_spec)
        return results

    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415  it loads the compiler

    functional = torch.func.functionalize(forward, remove="mutations")
    try:
        with torch.no_grad(), restoring(population.model):
            traced = make_fx(functional)(noise.tensors(), inputs)
    except Exception as error:
        message = (
            f"the forward cannot be prepared: {message_of(error)}; its control flow must not depend on "
            "values in tensors: call population(x, noise=noise) instead"
        )
        raise ValueError(message) from error
    others = [
        type(leaf).__name__ for leaf in expected if not isinstance(leaf, Tensor | int | float | str | None)
    ]
    if others:
        message = (
            f"the forward cannot be prepared: the model returned {others[0]}: return tensors in tuples, "
            "lists and dictionaries, or call population(x, noise=noise) instead"
        )
        raise ValueError(message)
    result = _split(traced, noise.tensors(), Signature.of(noise, args, kwargs), inputs, outputs[0])
    _check_outputs(traced, PreparedForward(result, noise)(*args, **kwargs), expected)
    return result


def _check_outputs(traced: fx.GraphModule, y: object, expected: Sequence[object]) -> None:
    """Check that the program computes what the call did, unless it draws random numbers."""
    if any(_is_random(node) for node in traced.graph.nodes):
        return
    for value, reference in zip(tree_flatten(y)[0], expected, strict=True):
        if isinstance(reference, Tensor):
            try:
                torch.testing.assert_close(value, reference, equal_nan=True)
            except AssertionError as error:
                message = (
                    "the forward cannot be prepared: its recorded operations have another result, for "
                    "example because the model counts its calls or a kernel is not an ATen operation"
                )
                raise ValueError(message) from error


def _split(
    traced: fx.GraphModule,
    noise_tensors: Sequence[Tensor],
    signature: Signature,
    inputs: tuple[Tensor, ...],
    outputs: TreeSpec,
) -> Trace:
    """Split recorded operations into those that depend on the inputs, and the others."""
    traced.graph.eliminate_dead_code()
    values, _ = _evaluate(traced, [*noise_tensors, *inputs])
    varying = dict.fromkeys(traced.graph.find_nodes(op="placeholder")[len(noise_tensors) :])
    for node in traced.graph.nodes:
        if varying.keys() & node.all_input_nodes or _is_random(node):
            varying[node] = None
    used = dict.fromkeys(
        source for node in varying for source in node.all_input_nodes if source not in varying
    )
    program = fx.GraphModule(nn.Module(), _program([*varying], [*used], values))
    return Trace(signature, traced, tuple(used), program.forward, inputs, outputs)


def _program(
    nodes: Sequence[fx.Node], constants: Sequence[fx.Node], values: Mapping[fx.Node, Any]
) -> fx.Graph:
    """Copy operations to a graph whose placeholders are the constants, then the inputs; join views.

    ``values`` are the results of the operations in one call, of which sizes and strides are read.
    """
    program, roots = fx.Graph(), dict[fx.Node, fx.Node]()  # a view -> the tensor whose memory it is
    copies = {node: program.placeholder(node.name) for node in constants}
    for node in nodes:
        if node.op == "placeholder":
            copies[node] = program.placeholder(node.name)
        elif node.op == "output":
            (results,) = node.args
            program.output(fx.map_arg(results, copies.__getitem__))
        elif node.target in _VIEWS:
            source = node.args[0]
            assert isinstance(source, fx.Node)  # noqa: S101  views have one
            root = roots[node] = roots.get(source, source)
            value, copies[node] = values[node], copies[root]
            if _geometry(value) != _geometry(values[root]):
                view = (list(value.shape), list(value.stride()), value.storage_offset())
                copies[node] = program.call_function(torch.as_strided, (copies[root], *view))
        else:
            copies[node] = program.node_copy(node, copies.__getitem__)
            copies[node].target = _FAST.get(node.target, node.target)
    program.eliminate_dead_code()
    return program


def _evaluate(traced: fx.GraphModule, tensors: Sequence[Tensor]) -> tuple[dict[fx.Node, Any], list[Tensor]]:
    """Return the results of all operations that depend on these placeholders alone, and the model's tensors.

    ``tensors`` are those of the noise, for all results also those of the inputs. Results of operations that
    draw random numbers depend on no placeholder, but are only returned with all results.
    """
    placeholders = traced.graph.find_nodes(op="placeholder")
    results: dict[fx.Node, Any] = dict(zip(placeholders, tensors, strict=False))
    skips_random = len(results) < len(placeholders)
    weights: list[Tensor] = []
    for node in traced.graph.nodes:
        if node.op == "placeholder" or (skips_random and _is_random(node)):
            continue
        if node.op == "get_attr":
            weight = getattr(traced, node.target)
            weights.append(weight)
            results[node] = weight.detach()
        elif node.op == "call_function" and results.keys() >= {*node.all_input_nodes}:
            arguments, keywords = fx.map_arg((node.args, node.kwargs), results.__getitem__)
            results[node] = node.target(*arguments, **keywords)
    return results, weights


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _packed(x: Tensor) -> Tensor:
    """Return a tensor whose elements are in order from the start of its memory, as the views expect it."""
    x = x.detach()
    return (
        x if x.is_contiguous() and x.storage_offset() == 0 else x.clone(memory_format=torch.contiguous_format)
    )


def _like(x: object, expected: Tensor) -> Tensor:
    """Return an argument as rows for the program; it has to be a tensor like that of the traced call."""
    if (
        not isinstance(x, Tensor)
        or x.shape != expected.shape
        or x.dtype != expected.dtype
        or x.device != expected.device
    ):
        message = f"got {_described(x)}, but prepare() got {_described(expected)}: call prepare() again"
        raise ValueError(message)
    return x if not x.requires_grad and x.is_contiguous() and not x.storage_offset() else _packed(x)


def _described(value: object) -> object:
    """Return shape, dtype and device of a tensor; other values as they are."""
    return (tuple(value.shape), value.dtype, value.device) if isinstance(value, Tensor) else value


def _values(noise: "PopulationNoise") -> Iterator[tuple[str, str, object]]:
    """Yield layer, field and value of everything in a noise."""
    for name, layer in noise.layers.items():
        yield from ((name, field, value) for field, value in vars(layer.weight).items())
        yield name, "bias", layer.bias


def _with_tensors(noise: "PopulationNoise", tensors: Sequence[Tensor]) -> "PopulationNoise":
    """Return a noise with these tensors in place of its own."""
    rest = iter(tensors)

    def substituted(weight: Noise) -> Noise:
        fields = {name: next(rest) for name, value in vars(weight).items() if isinstance(value, Tensor)}
        return replace(weight, **fields)

    layers = {}
    for name, layer in noise.layers.items():
        weight = substituted(layer.weight)
        bias = None if layer.bias is None else next(rest)
        layers[name] = LayerNoise(weight, bias, layer.drawn_for)
    return replace(noise, layers=layers)
