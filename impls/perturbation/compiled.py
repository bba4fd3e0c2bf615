"""A population's call inside code that ``torch.compile`` compiles.

The compiler cannot follow a function mode. While it compiles, :func:`record_graph` therefore records the
operations of one call, as :meth:`Population.prepare` does. They become part of the compiled graph, whose
inputs are the noise's tensors and the parameters.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from impls.perturbation.prepared import Trace, record_trace
from impls.perturbation.scheme import TensorRef
from impls.perturbation.verification import restoring

if TYPE_CHECKING:
    from impls.perturbation.population import Population, PopulationNoise

IS_SUPPORTED = TorchVersion(torch.__version__) >= "2.13"
"""Whether torch's compiler can call :func:`record_graph` with a population, which is no constant."""
REASON = (
    "the operations of this population's call cannot be part of a graph, so it runs eagerly: call "
    "population.prepare() outside of compiled code to see why"
    if IS_SUPPORTED
    else "before torch 2.13 a population's call cannot be part of a graph, so it runs eagerly"
)


def call(
    population: "Population", noise: "PopulationNoise", args: Sequence[object], kwargs: dict[str, object]
) -> Any:  # noqa: ANN401  the model's output
    """Run the model; only the compiler calls this function.

    Where the operations cannot be recorded, the population runs eagerly, which breaks the graph.
    """
    if not IS_SUPPORTED:
        return _run_eagerly(population, noise, args, kwargs)
    leaves = tree_leaves((args, kwargs))
    numbers = iter(range(len(leaves)))
    nesting = tree_map(lambda _: next(numbers), (args, kwargs))
    name = record_graph(population, noise.members, nesting, *leaves)
    if not name or noise.sigma != population.sigma:  # the eager call raises an error that shows both
        return _run_eagerly(population, noise, args, kwargs)
    population.check_noise(noise)
    # The compiler calls record_graph() again where anything that it has read is different.
    for module in population.model.modules():
        _ = id(module), bool(module.training)  # an attribute alone would not be read
    graph = getattr(population, name)
    return graph(*noise.tensors(), *(leaf for leaf in leaves if isinstance(leaf, Tensor)))


@torch.compiler.disable(reason=REASON)  # type: ignore[untyped-decorator]  # torch's
def _run_eagerly(
    population: "Population", noise: "PopulationNoise", args: Sequence[object], kwargs: dict[str, object]
) -> Any:  # noqa: ANN401  the model's output
    return population(*args, noise=noise, **kwargs)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def record_graph(
    population: "Population",
    members: range,
    nesting: Any,  # noqa: ANN401  a pair of arguments and keyword arguments
    *leaves: object,
) -> str:
    """Record the operations of a call as a graph; the compiler runs this function, and not its graph.

    Args:
        population: the population, which gets the graph as an attribute.
        members: the range of members.
        nesting: the arguments and keyword arguments, with the number of its leaf in place of each.
        leaves: the leaves.

    Returns:
        The name of the attribute, or ``""`` if the operations cannot be recorded, or if a graph would not
        notice that weights have changed which the noise was drawn for.
    """
    return _record_graph(population, members, tree_map(leaves.__getitem__, nesting))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def _record_graph(
    population: "Population", members: range, arguments: tuple[Sequence[object], dict[str, object]]
) -> str:
    # The compiler cannot read recurrent modules. It may also have given up, and run this as any other code.
    has_recurrent = any(isinstance(module, nn.RNNBase) for module in population.model.modules())
    if has_recurrent or not torch.compiler.is_compiling():
        return ""
    noise = population.sample(0, members)
    values = [value for layer in noise.layers.values() for value in vars(layer.weight).values()]
    stores_weight = any(layer.scheme.stores_weight for layer in population.layers)
    if stores_weight or any(isinstance(value, TensorRef) for value in values):
        return ""
    try:
        with restoring(population.model):
            trace = record_trace(population, noise, *arguments, reuses_noise=False)
        graph = _with_nested_output(trace)
    except Exception:  # noqa: BLE001  if it is an error of the model, the eager call raises it again
        return ""
    name = f"{population.GRAPH}{sum(name.startswith(population.GRAPH) for name in vars(population))}"
    vars(population)[name] = graph
    return name


def _with_nested_output(trace: Trace) -> fx.GraphModule:
    """Return the operations as a function of the noise's and the inputs' tensors, with the model's output."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in trace.recorded.graph.nodes:
        if node.op == "output":
            (results,) = node.args
            graph.output(tree_unflatten(list(fx.map_arg(results, copies.__getitem__)), trace.outputs))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(trace.recorded, graph)
