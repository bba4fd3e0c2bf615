"""A population's call inside of torch.compile: one graph for all steps, with the numbers of an eager call."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import Unsupported
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import impls
from impls.perturbation.compiled import IS_SUPPORTED
from tests.perturbation.test_models import MODELS, ROWS, SCHEMES, TwoInputs, tokens
from tests.perturbation.test_prepared import Branching, Remembering, check_equal, population_of
from tests.scheme_cases import normal

pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="needs the compiler of torch 2.13")

EAGER = ("stored weights", "regenerated", "low rank, regenerated")
"""Schemes that run eagerly in compiled code: they draw noise in the forward, or store weights."""
COMPILED = {name: scheme for name, scheme in SCHEMES.items() if name not in EAGER}


class Compiler:
    """Compiles functions to graphs that run eagerly, and counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def backend(self, graph: fx.GraphModule, _: object) -> Callable[..., Any]:
        """Count a graph."""
        self.graphs += 1
        return graph.forward

    def __call__(self, function: Callable[..., Any], *, fullgraph: bool = True) -> Any:
        """Compile a function, by default to one graph without breaks."""
        return torch.compile(function, backend=self.backend, fullgraph=fullgraph)


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    """Return a compiler without graphs of other tests."""
    torch.compiler.reset()
    yield Compiler()
    torch.compiler.reset()


def call(population: impls.Population, x: Any, noise: impls.PopulationNoise) -> Tensor:
    """Compute with the inputs and outputs of a population."""
    y: Tensor = tree_leaves(population(2 * x - x, noise=noise))[0]
    return y.sin()


def check_steps(compiled: Any, population: impls.Population, x: Tensor) -> None:
    """Compare a compiled call with the eager one over three steps with changed weights."""
    for step in range(3):
        noise = population.sample(step)
        check_equal(compiled(population, x, noise), call(population, x, noise))
        with torch.no_grad():
            for parameter in population.model.parameters():
                parameter.mul_(0.9)
        check_equal(compiled(population, x, noise), call(population, x, noise))


@pytest.mark.parametrize("name", ["Conv1d", "vision transformer", "tied language model", "own parameters"])
def test_one_graph_serves_all_steps(name: str, compiler: Compiler) -> None:
    """Neither new noise nor changed weights break the graph or compile another."""
    model, x = MODELS[name]()
    population = population_of(model, COMPILED["low rank"], antithetic=True)
    check_steps(compiler(call), population, x)
    assert compiler.graphs == 1


@pytest.mark.parametrize("scheme", COMPILED.values(), ids=COMPILED)
def test_each_scheme_that_stores_its_noise_is_one_graph(scheme: Any, compiler: Compiler) -> None:
    """A small network with each scheme, and with antithetic halves."""
    for antithetic in (False, True):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        population = population_of(model, scheme, antithetic=antithetic)
        check_steps(compiler(functools.partial(call)), population, normal(ROWS, 4))
    assert compiler.graphs == 2


def test_rollouts_fitness_nesting_and_prepared_forwards_are_part_of_a_graph(compiler: Compiler) -> None:
    """Several calls of a function, keyword arguments, dictionaries and a prepared forward."""
    population = population_of(nn.Sequential(nn.Linear(4, 3), nn.Tanh()))
    x = normal(2, 4)

    def rollout(policy: Any, x: Tensor, noise: impls.PopulationNoise) -> Tensor:
        states = population.rows(x, noise)
        for _ in range(3):
            states = states + functional.pad(policy(states), (0, 1))
        return population.fitness(population(states, noise=noise).square().sum(1), noise)

    compiled = compiler(rollout)
    for step in range(3):
        noise = population.sample(step)
        policy = population.prepare(noise, population.rows(x))
        check_equal(compiled(policy, x, noise), rollout(policy, x, noise))
    assert compiler.graphs == 1

    population = population_of(TwoInputs())
    inputs, memory = (
        {"tokens": tokens(), "padding": torch.zeros(ROWS, 3, dtype=torch.bool)},
        normal(ROWS, 3, 4),
    )
    noise = population.sample(0)
    y = compiler(population)(inputs, memory=memory, noise=noise)
    check_equal(y, population(inputs, memory=memory, noise=noise))
    assert compiler.graphs == 2


def test_sample_with_older_noise_runs_in_compiled_code(compiler: Compiler) -> None:
    """A step that draws its noise from the last one's has the numbers of an eager step."""
    population, x = population_of(nn.Linear(4, 3)), normal(ROWS, 4)

    def step(number: int, noise: impls.PopulationNoise) -> tuple[Tensor, impls.PopulationNoise]:
        noise = population.sample(number, out=noise)
        return population(x, noise=noise), noise

    compiled, noise = compiler(step, fullgraph=False), population.sample(0)
    for number in range(1, 4):
        older = noise
        y, noise = compiled(number, older)
        check_equal(y, population(x, noise=population.sample(number)))
        with pytest.raises(ValueError, match="has overwritten this noise"):
            population(x, noise=older)


def test_a_change_compiles_another_graph_or_is_refused(compiler: Compiler) -> None:
    """Other rows, modes, dtypes of autocast and sigmas are noticed, and replaced parameters and layers."""
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    population, x = population_of(model), normal(ROWS, 4)
    compiled = compiler(call)
    noise = population.sample(0)

    def check(graphs: int, x: Tensor = x) -> None:
        check_equal(compiled(population, x, noise), call(population, x, noise))
        assert compiler.graphs == graphs

    check(1)
    check(2, normal(2 * ROWS, 4))
    with torch.autocast("cpu", torch.bfloat16):
        check(3)
    check(3)
    model.train()
    zeros = [compiled(population, x, noise) for _ in range(2)]
    assert not torch.equal(*zeros)
    model.eval()
    population.sigma *= 2
    for fullgraph, kind, words in (
        (True, Unsupported, "runs eagerly"),
        (False, ValueError, "sigma was changed"),
    ):
        with pytest.raises(kind, match=words):
            compiler(call, fullgraph=fullgraph)(population, x, noise)
    noise = population.sample(0)
    check(5)
    model[0].weight.data = 2 * model[0].weight.data
    check(5)


def test_a_replaced_parameter_or_layer_is_refused(compiler: Compiler) -> None:
    """A graph does not go on with the parameters that the model had."""
    changes: dict[str, Callable[[Any], None]] = {
        "a parameter of layer '0' was replaced": lambda model: setattr(
            model[0], "weight", nn.Parameter(model[0].weight.data)
        ),
        "outside of compiled code to see why": lambda model: setattr(model, "0", nn.Linear(4, 6).double()),
    }
    for words, change in changes.items():
        population, x = population_of(nn.Sequential(nn.Linear(4, 6), nn.Tanh())), normal(ROWS, 4)
        noise = population.sample(0)
        compiled = compiler(functools.partial(call, population))
        compiled(x, noise)
        change(population.model)
        with pytest.raises((ValueError, Unsupported), match=words):
            compiled(x, noise)


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        *((nn.Linear(4, 3), SCHEMES[name]) for name in EAGER),
        (nn.Linear(4, 3), impls.DropoutMask()),
        (Branching(4, 3), SCHEMES["dense"]),
        (Remembering(4, 3), SCHEMES["dense"]),
        (nn.LSTM(4, 3), SCHEMES["dense"]),
    ],
    ids=[*EAGER, "noise that scales with the weight", "branches", "stored values", "recurrent"],
)
def test_other_calls_run_eagerly_between_two_graphs(
    model: nn.Module, scheme: Any, compiler: Compiler
) -> None:
    """The number of graphs does not grow with steps; without breaks, the compiler says what to do."""
    x = normal(5, ROWS, 4) if isinstance(model, nn.LSTM) else normal(ROWS, 4)
    population = population_of(model, scheme, rows_axis=int(isinstance(model, nn.LSTM)))
    compiled, graphs = compiler(call, fullgraph=False), []
    for step in range(3):
        noise = population.sample(step)
        model.last = None  # type: ignore[assignment]  # what one of them stores
        y = compiled(population, x, noise)
        model.last = None  # type: ignore[assignment]  # as above
        check_equal(y, call(population, x, noise))
        graphs.append(compiler.graphs)
    assert graphs == [2, 2, 2]
    with pytest.raises(Unsupported, match="outside of compiled code to see why"):
        compiler(lambda x, noise: call(population, x, noise))(x, noise)
