"""Compiled layers that a population shares. Graphs are captured here, and run as they are: no compiler."""

import itertools
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from impls.training import compile as compiling
from impls.training.compile import Graphs, SharedLayers, SilentlyEagerError, WholeModels, check_compiled
from impls.training.workloads.candidates import COMPILED, architectures, population, untrained
from impls.training.workloads.compile import figures
from impls.training.workloads.compile_trial import Plan, Trial, Way, trial

# torch hides this warning of its own in a way that warnings as errors do not know.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

CASE = population(12, 5, 4, operator=COMPILED)
WIDTHS = architectures(CASE, 0)
CAPTURE = "eager"
"""The backend that runs a captured graph as it is."""


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Begin, and end, without graphs of another test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def x() -> Tensor:
    """Rows for any candidate."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def model(place: int) -> nn.Sequential:
    """Make a candidate."""
    return untrained(WIDTHS[place], CASE, "cpu", place)


def settings() -> tuple[object, ...]:
    """Return torch's settings that this touches."""
    config = torch._dynamo.config  # noqa: SLF001  where torch keeps them
    return (
        config.force_parameter_static_shapes,
        config.recompile_limit,
        config.accumulated_recompile_limit,
        torch.fx.experimental._config.use_duck_shape,  # noqa: SLF001  the same
    )


def plan(way: Way, candidates: int, limit: int | None = None) -> Plan:
    """Plan a trial that captures graphs and measures nothing."""
    return Plan(CASE, "cpu", 0, way, WIDTHS[:candidates], 1, limit, CAPTURE, timed=False)


@pytest.mark.parametrize("candidates", [4, 12])
def test_a_dynamic_layer_is_two_graphs_whatever_the_number_of_architectures(candidates: int) -> None:
    """One for rows that need no gradient, which are the data, and one for those that do."""
    found = trial(plan("dynamic", candidates))
    assert (found.graphs, found.eager, found.wrong) == (2, "", "")


def test_sizes_that_happen_to_be_equal_are_no_other_graph() -> None:
    """Rows, inputs and channels of one size in the first call, and of three in the next, are one graph."""
    layers = SharedLayers(CAPTURE)
    for rows, inp, out in ((4, 4, 4), (4, 3, 5), (6, 3, 6), (2, 7, 7)):
        layers.replace(nn.Linear(inp, out))(torch.ones(rows, inp))
    assert layers.graphs.compiled == 1


@pytest.mark.parametrize("candidates", [4, 7])
def test_a_whole_model_is_a_graph_for_each_architecture(candidates: int) -> None:
    """Every new architecture is compiled anew, while the limit lasts."""
    found = trial(plan("whole", candidates))
    assert (found.graphs, found.eager, found.wrong) == (candidates, "", "")


def test_a_static_layer_is_a_graph_for_each_shape() -> None:
    """Of a layer, and of what needs a gradient: many more than of dynamic ones."""
    shapes = {(a, b, place > 0) for one in WIDTHS[:6] for place, (a, b) in enumerate(itertools.pairwise(one))}
    assert len(shapes) > 8
    found = trial(plan("static", 6, limit=100))
    assert (found.graphs, found.eager, found.wrong) == (len(shapes), "", "")


def test_behind_the_limit_that_all_models_share_nothing_is_reported() -> None:
    """Of ten architectures eight are compiled; the others run eager, and no figure pretends otherwise."""
    found = trial(plan("whole", 10))
    assert found.graphs == 8
    assert found.wrong == ""
    assert found.eager.startswith("2 of 10 models did not run compiled: only 0 of 1 graphs ran")
    said = list(figures(found, "whole"))
    assert {figure.metric for figure in said} > {"graphs_count", "compile_ns", "break_even_steps"}
    assert all(figure.reason == found.eager and not figure.samples for figure in said)
    torch.compiler.reset()
    assert trial(plan("whole", 9, limit=100)).graphs == 9


def test_the_limit_of_one_does_not_count_the_graphs_of_another(x: Tensor) -> None:
    """Shared layers that ran into their limit leave other shared layers their own."""
    static, other = SharedLayers(CAPTURE, dynamic=False), SharedLayers(CAPTURE, dynamic=False)
    for place in range(12):
        static.replace(model(place))(x)
    with pytest.raises(SilentlyEagerError, match=r"the rest is eager\. 8 graphs are compiled"):
        static.check(static.replace(model(11)), x)
    last = other.replace(model(11))
    other.check(last, x)


def test_a_layer_compiled_in_place_compiles_nothing(x: Tensor) -> None:
    """Torch leaves its own layers' code alone: nn.Linear.compile() is eager, and is found out."""
    graphs = Graphs(CAPTURE)
    layer = nn.Linear(5, 3)
    layer.compile(backend=graphs)
    layer(x)
    assert (graphs.compiled, graphs.ran) == (0, 0)
    with pytest.raises(SilentlyEagerError, match=r"nn.Linear.compile\(\) compiles nothing"):
        check_compiled(layer, [x], graphs, 1)


def test_a_call_that_compiles_every_time_is_found_out(x: Tensor) -> None:
    """What pays for a graph at every call would never be warm."""
    graphs, layers = Graphs(CAPTURE), [nn.Linear(5, size) for size in range(2, 6)]

    def another(rows: Tensor) -> Tensor:
        layer = layers.pop()
        return torch.compile(layer, backend=graphs)(rows)

    stranger = nn.Module()
    stranger.forward = another
    with pytest.raises(SilentlyEagerError, match="the same call compiled 1 graphs again"):
        check_compiled(stranger, [x], graphs, 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_shared_layer_computes_the_same(x: Tensor, dynamic: bool) -> None:
    """Outputs and gradients, bit by bit, of rows with more axes too; parameters are the same objects."""
    layers = SharedLayers(CAPTURE, dynamic=dynamic)
    plain, shared = model(3), model(3)
    before = dict(shared.named_parameters())
    assert layers.replace(shared) is shared
    assert all(one is before[name] for name, one in shared.named_parameters())
    assert dict(shared.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    for rows in (x, x.expand(2, 4, 5)):
        y, right = shared(rows), plain(rows)
        assert torch.equal(y, right)
        y.sum().backward()
        right.sum().backward()
        for one, other in zip(shared.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)


def test_a_layer_itself_is_replaced_and_one_of_another_class_is_left_alone(x: Tensor) -> None:
    """A layer without bias works; what somebody derived may compute something else."""
    layers = SharedLayers(CAPTURE)
    layer = nn.Linear(5, 3, bias=False)
    shared = layers.replace(layer.eval())
    assert shared is not layer
    assert not shared.training
    assert torch.equal(shared(x), layer(x))
    derived = type("Derived", (nn.Linear,), {})(5, 3)
    assert layers.replace(derived) is derived
    assert layers.replace(nn.Sequential(derived))[0] is derived  # type: ignore[index]  # it is what came in


@pytest.mark.parametrize("limit", [None, 3])
def test_torchs_settings_are_put_back(x: Tensor, limit: int | None) -> None:
    """Behind a call, and behind one that raises; without them a parameter's shape is taken to be constant."""
    before = settings()
    layers = SharedLayers(CAPTURE, recompile_limit=limit)
    whole = WholeModels(CAPTURE, recompile_limit=limit)
    for place in range(3):
        layers.replace(model(place))(x)
        whole.compile(model(place))(x)
        assert settings() == before
    for broken in (layers.replace(nn.Linear(5, 3)), whole.compile(nn.Linear(5, 3))):
        with pytest.raises(RuntimeError):
            broken(x[:, :4])
        assert settings() == before


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """In words: of C++ on a CPU, which CXX may name, and of triton on CUDA."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert compiling.refusal("cpu") == (
        "torch.compile needs a C++ compiler on a CPU, and there is none on the path"
    )
    monkeypatch.setenv("CXX", "mine -std=c++20")
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "mine" else None)
    assert compiling.refusal("cpu") == ""
    monkeypatch.setattr(compiling, "_has_triton", lambda: False)
    assert "triton" in compiling.refusal("cuda")


def test_break_even_is_in_steps_of_all_candidates() -> None:
    """What compiling took in all, over what a step saves on average; never, where it saves nothing."""
    found = Trial(2, (9.0, 9.0), (600.0, 200.0), (10.0, 30.0), (20.0, 40.0))
    by_name = {figure.metric: figure for figure in figures(found, "dynamic")}
    assert by_name["compile_ns"].samples == (800.0,)
    assert by_name["break_even_steps"].samples == (80.0,)
    slower = Trial(2, (9.0,), (600.0,), (20.0,), (10.0,))
    *_, last = figures(slower, "dynamic")
    assert last.reason == "never: a warm step takes no less than an eager one"
    reasons = {figure.metric: figure.reason for figure in figures(slower, "eager")}
    assert reasons["compile_ns"] == reasons["break_even_steps"] == "nothing is compiled"
