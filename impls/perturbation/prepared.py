"""A population's forward for many calls with one noise, such as those of a policy in a rollout.

For small layers Python takes longer than the arithmetic. :func:`trace` therefore records the ATen operations
of one call. Those that depend on noise and weights alone are computed once per noise; the others become a
program without Python in between. Views in a row become a single view, and elementwise functions overwrite
what is not read again.
"""

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution
from torch.nn.modules import transformer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from esbench.errors import message_of
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.layer import LayerNoise
from impls.perturbation.noise import Noise, NoiseStream, is_overwritable
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
        ("sigmoid", "default"), ("baddbmm", "default"),
    )
}  # fmt: skip
"""Operations whose public function takes the same arguments: its call is faster by some microseconds."""

_IN_PLACE: dict[object, str] = {
    torch.add: "add_", torch.sub: "sub_", torch.mul: "mul_", torch.tanh: "tanh_", torch.relu: "relu_",
    torch.sigmoid: "sigmoid_",
}  # fmt: skip
"""Functions, and the methods that write their result into the first argument."""


class Signature(NamedTuple):
    """All that a trace depends on, except the numbers in tensors.

    Attributes:
        spec: the nesting of the arguments.
        inputs: shape, dtype and device of each tensor among them, and all other values.
        noise: the same of the noise's values.
        training: whether each module is in training mode.
        autocast: the dtype of autocast on each device where it is enabled.
        reuses_noise: whether many calls with one noise follow.
    """

    spec: TreeSpec
    inputs: tuple[object, ...]
    noise: tuple[object, ...]
    training: tuple[bool, ...]
    autocast: tuple[object, ...]
    reuses_noise: bool

    @classmethod
    def of(
        cls,
        noise: "PopulationNoise",
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        reuses_noise: bool,
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
        return cls(spec, *described, training, tuple(autocast), reuses_noise)


class Trace(NamedTuple):
    """The operations of a call.

    Attributes:
        signature: that of the call.
        recorded: all operations, with the tensors of the noise and of the inputs as placeholders.
        weights: the model's tensors that they read.
        constants: the operations that do not depend on the inputs: a function of the noise's tensors and the
            weights. It returns those of its results that the program reads.
        program: the other operations: a function of these results and of the inputs' tensors.
        inputs: the inputs' tensors of the traced call.
        outputs: the nesting of the model's output.
    """

    signature: Signature
    recorded: fx.GraphModule
    weights: tuple[Tensor, ...]
    constants: Callable[..., Sequence[Tensor]]
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
        self._weights = trace.weights
        with torch.no_grad():
            weights = (weight.detach() for weight in trace.weights)
            self._constants = trace.constants(*noise.tensors(), *weights)
        self._counted = [weight for weight in self._weights if not weight.is_inference()]
        self._state = self._state_of_weights()

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
        self._noise.check_not_overwritten()
        inputs = args if self._is_flat and not kwargs else self._flatten(args, kwargs)
        if len(inputs) != len(self._inputs):
            message = (
                f"got {len(inputs)} tensors, but prepare() got {len(self._inputs)}: call prepare() again"
            )
            raise ValueError(message)
        if self._state_of_weights() != self._state:
            message = "a weight has changed after prepare(): call sample() and prepare() again"
            raise ValueError(message)
        rows = [_like(x, expected) for x, expected in zip(inputs, self._inputs, strict=True)]
        outputs = self._program(*self._constants, *rows)
        return outputs[0] if self._is_one_tensor else tree_unflatten(list(outputs), self._outputs)

    def _state_of_weights(self) -> tuple[list[int], list[int]]:
        """Return the addresses of the weights and the numbers of their in-place changes, as torch counts."""
        addresses = [weight.data_ptr() for weight in self._weights]
        return addresses, [weight._version for weight in self._counted]  # noqa: SLF001  no public name

    def _flatten(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Tensor]:
        leaves, spec = tree_flatten((args, kwargs))
        described = tuple(map(_described, leaves))
        if spec != self._signature.spec or described != self._signature.inputs:
            message = (
                f"the arguments {described} differ from those of prepare(), {self._signature.inputs}: call "
                "prepare() again"
            )
            raise ValueError(message)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def record_trace(
    population: "Population",
    noise: "PopulationNoise",
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    reuses_noise: bool,
) -> Trace:
    """Return the trace of a call: the population's last one, if it is that of such a call.

    Args:
        population: the population.
        noise: the call's noise.
        args: its other arguments.
        kwargs: its keyword arguments.
        reuses_noise: whether many calls with one noise follow, for which work on the noise is worth its time.

    Raises:
        ValueError: as for :meth:`Population.prepare`.
        UnsupportedError: the same.
    """
    signature = Signature.of(noise, args, kwargs, reuses_noise=reuses_noise)
    if not population.traces or population.traces[0].signature != signature:
        population.traces[:] = [trace(population, noise, args, kwargs, reuses_noise=reuses_noise)]
    return population.traces[0]


def trace(
    population: "Population",
    noise: "PopulationNoise",
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    reuses_noise: bool,
) -> Trace:
    """Record the operations of a call; the arguments are those of :func:`record_trace`.

    Raises:
        ValueError: the operations depend on values in tensors, the model stores values in its attributes, or
            the recorded operations give other numbers than the call.
    """
    for name, _, value in _values(noise):
        if isinstance(value, NoiseStream):
            message = (
                f"the noise of layer {name!r} is drawn again in each call, which cannot be prepared: call "
                "population(x, noise=noise) instead"
            )
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
        traced_noise = _with_tensors(noise, noise_tensors)
        y = population.forward_traced(traced_noise, traced_args, traced_kwargs, reuses_noise=reuses_noise)
        results, output_spec = tree_flatten(y)
        outputs.append(output_spec)
        return results

    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415  it loads the compiler

    functional = torch.func.functionalize(forward, remove="mutations")
    try:
        with torch.no_grad(), restoring(population.model), _without_checks_of_values():
            traced = make_fx(functional)(noise.tensors(), inputs)
    except Exception as error:
        message = (
            f"the forward cannot be prepared: {message_of(error)}{_place(error)}. A usual cause is control "
            "flow that depends on values in tensors. Call population(x, noise=noise) instead"
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
    signature = Signature.of(noise, args, kwargs, reuses_noise=reuses_noise)
    result = _split(traced, noise.tensors(), signature, inputs, outputs[0])
    _check_outputs(traced, PreparedForward(result, noise)(*args, **kwargs), expected)
    return result


@contextmanager
def _without_checks_of_values() -> Iterator[None]:
    """Turn off checks in torch that read values, which no recorded operation can do.

    They are those of a distribution's arguments, unless validate_args is given, and whether a mask of a
    transformer is causal, which is only a hint for faster attention.
    """
    checks, detect = Distribution._validate_args, transformer._detect_is_causal_mask  # noqa: SLF001  no public names
    Distribution.set_default_validate_args(False)
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)  # noqa: ARG005, SLF001  torch's
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checks)
        transformer._detect_is_causal_mask = detect  # noqa: SLF001  the same


def _place(error: Exception) -> str:
    """Return the line of the model where an error was raised, or ``""``."""
    ours = Path(torch.__file__).parent, Path(__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, ours))]
    return f" (in {places[-1].filename}, line {places[-1].lineno}: {places[-1].line})" if places else ""


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
    """Split recorded operations into those to repeat in each call, and the others.

    The former depend on the inputs or draw random numbers. All are run once: sizes, strides and addresses of
    the results decide which views become one, and what may be overwritten.
    """
    traced.graph.eliminate_dead_code()
    interpreter = fx.Interpreter(traced, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*noise_tensors, *inputs, enable_io_processing=False)
    varying = dict.fromkeys(traced.graph.find_nodes(op="placeholder")[len(noise_tensors) :])
    for node in traced.graph.nodes:
        if varying.keys() & node.all_input_nodes or _is_random(node):
            varying[node] = None
    constants_read = dict.fromkeys(
        source for node in varying for source in node.all_input_nodes if source not in varying
    )
    in_place = _in_place(traced.graph, [*varying], interpreter.env)
    program = fx.GraphModule(nn.Module(), _program([*varying], [*constants_read], interpreter.env, in_place))
    others = [node for node in traced.graph.nodes if node not in varying]
    weight_names, constants = _constants(others, [*constants_read])
    return Trace(
        signature=signature,
        recorded=traced,
        weights=tuple(getattr(traced, name) for name in weight_names),
        constants=fx.GraphModule(nn.Module(), constants).forward,
        program=program.forward,
        inputs=inputs,
        outputs=outputs,
    )


def _constants(nodes: Sequence[fx.Node], used: Sequence[fx.Node]) -> tuple[list[str], fx.Graph]:
    """Copy operations to a graph that returns the results of some of them.

    Returns:
        The names of the model's tensors among them, which are placeholders after the others, and the graph.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    weights = [node for node in nodes if node.op == "get_attr"]
    for node in [*(node for node in nodes if node.op == "placeholder"), *weights]:
        copies[node] = graph.placeholder(node.name)
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in used])
    graph.eliminate_dead_code()
    return [str(node.target) for node in weights], graph


def _in_place(graph: fx.Graph, varying: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """Return the nodes of elementwise functions that may write their result over their first argument.

    The argument is a whole tensor that the program has allocated, and neither reads later nor returns.
    Otherwise results of large layers are written to fresh memory, which can take half of a layer's time.

    Args:
        graph: all operations.
        varying: those of the program, in order.
        values: the result of each node in one call. All are alive: equal addresses mean shared memory.
    """
    addresses = {
        node: {x.untyped_storage().data_ptr() for x in tree_leaves(values.get(node)) if _has_storage(x)}
        for node in graph.nodes
    }
    computed = {node: None for node in varying if node.op != "placeholder"}
    # Memory of inputs, noise, weights and constants.
    foreign = set[int]().union(*(addresses[node] for node in graph.nodes if node not in computed))
    last_uses = {  # later nodes replace earlier ones
        address: node for node in varying for source in node.all_input_nodes for address in addresses[source]
    }
    result = set[fx.Node]()
    for node in computed:
        if _FAST.get(node.target) in _IN_PLACE:
            first, *others = node.all_input_nodes
            x, y, memory = values[first], values[node], addresses[first]
            fits = (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device) and y.is_contiguous()
            needed = foreign.union(*(addresses[other] for other in others))
            is_last = all(last_uses[address] is node for address in memory)
            if fits and is_overwritable(x) and is_last and not memory & needed:
                result.add(node)
    return result


def _has_storage(x: object) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided


def _program(
    nodes: Sequence[fx.Node],
    constants: Sequence[fx.Node],
    values: Mapping[fx.Node, Any],
    in_place: Collection[fx.Node],
) -> fx.Graph:
    """Copy operations to a graph with fewer views; its placeholders are the constants, then the inputs.

    A chain of views becomes one view of the first tensor. An elementwise function of a view, such as an
    activation between layers, is applied to the first tensor instead if the view has all elements of that
    tensor in the order of memory: the next views then join the chain.

    Args:
        nodes: the operations, inputs and output.
        constants: nodes whose results do not depend on the inputs.
        values: the result of each node in one call, of which no numbers are read.
        in_place: operations that overwrite their first argument.
    """
    program = fx.Graph()
    # A view -> the copy of the node whose memory it is, and a tensor of that node's sizes and strides.
    bases: dict[fx.Node, tuple[fx.Node, Tensor]] = {}
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
            bases[node] = bases.get(source, (copies[source], values[source]))
            copies[node] = _view(program, *bases[node], values[node])
        else:
            sources = node.all_input_nodes
            is_elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and len(sources) == 1
            view = sources[0] if is_elementwise and sources[0] in bases else None
            if view is not None and not _has_same_order(values[view], bases[view][1]):
                view = None
            inputs = copies if view is None else {view: bases[view][0]}
            copy = copies[node] = program.node_copy(node, inputs.__getitem__)
            copy.target = _FAST.get(node.target, node.target)
            if node in in_place:
                copy.op, copy.target = "call_method", _IN_PLACE[copy.target]
            if view is not None:
                bases[node] = copy, bases[view][1]
                copies[node] = _view(program, *bases[node], values[node])
    program.eliminate_dead_code()
    return program


def _view(program: fx.Graph, base: fx.Node, whole: Tensor, value: Tensor) -> fx.Node:
    """Return a view of a node with the sizes and strides of ``value``; those of the node are of ``whole``."""
    if _has_same_order(value, whole):
        return base if value.shape == whole.shape else program.call_method("view", (base, *value.shape))
    sizes = list(value.shape), list(value.stride()), value.storage_offset()
    return program.call_function(torch.as_strided, (base, *sizes))


def _has_same_order(view: Tensor, whole: Tensor) -> bool:
    """Return whether a view has all elements of a tensor, both in the order of their memory."""
    return view.numel() == whole.numel() and view.is_contiguous() and whole.is_contiguous()


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


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
