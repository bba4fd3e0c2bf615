"""Compiled layers that a population shares. Graphs are captured here, and run as they are: no compiler."""

import copy
import io
import itertools
import pickle
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from impls.benchmark.training.candidates import COMPILED, architectures, population, untrained
from impls.benchmark.training.compile import figures
from impls.benchmark.training.compile_trial import Plan, Trial, Way, trial
from impls.training import compile as compiling
from impls.training.compile import Graphs, SharedLayers, SilentlyEagerError, WholeModels, check_compiled

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
    assert found.eager.startswith("candidate 8 of 10: a model, or what comes behind a graph break in it")
    said = list(figures(found, "whole"))
    assert {figure.metric for figure in said} > {"graphs_count", "compile_ns", "break_even_steps"}
    assert all(figure.reason == found.eager and not figure.samples for figure in said)
    torch.compiler.reset()
    assert trial(plan("whole", 9, limit=100)).graphs == 9


def test_the_limit_of_one_does_not_count_the_graphs_of_another(x: Tensor) -> None:
    """Shared layers that ran into their limit leave other shared layers their own."""
    static, other = SharedLayers(CAPTURE, dynamic=False), SharedLayers(CAPTURE, dynamic=False)
    for place in range(3):
        static.replace(model(place))(x)
    with pytest.raises(SilentlyEagerError, match="8 graphs are compiled, and no more may be"):
        static.replace(model(3))(x)
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


def test_a_layer_itself_is_shared_and_one_of_another_class_is_left_alone(x: Tensor) -> None:
    """A layer without bias works; what somebody derived may compute something else."""
    layers = SharedLayers(CAPTURE)
    layer = nn.Linear(5, 3, bias=False)
    right = layer(x)
    shared = layers.replace(layer.eval())
    assert not shared.training
    assert torch.equal(shared(x), right)
    assert layers.graphs.ran == 1
    derived = type("Derived", (nn.Linear,), {})(5, 3)
    assert layers.replace(derived) is derived
    derived(x)
    assert layers.graphs.ran == 1


def spectral(layer: nn.Linear) -> nn.Module:
    """Norm the weight by a vector that a hook improves at every call."""
    torch.manual_seed(1)
    return nn.utils.spectral_norm(layer)


def pruned(layer: nn.Linear) -> nn.Module:
    """Mask half of the weight."""
    return prune.l1_unstructured(layer, "weight", 0.5)


COMPUTED = [nn.utils.weight_norm, spectral, pruned]
"""What computes a weight of others in a hook before each call."""


@pytest.mark.parametrize("computed", COMPUTED, ids=["weight_norm", "spectral_norm", "prune"])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_weight_that_is_computed_stays_so(x: Tensor, computed: Callable[[nn.Linear], nn.Module]) -> None:
    """Its parts keep their names and learn, by the same gradients."""
    layers, plain, shared = SharedLayers(CAPTURE), model(0), model(0)
    for whole, place in itertools.product((plain, shared), (0, 2)):
        computed(whole[place])  # type: ignore[arg-type]  # linear layers, as the model is made
    layers.replace(shared)
    assert shared.state_dict().keys() == plain.state_dict().keys()
    layers.check(shared, x)
    plain(x)
    plain(x)
    for whole in (plain, shared):
        whole(x).square().sum().backward()
    for (name, one), other in zip(plain.named_parameters(), shared.parameters(), strict=True):
        assert one.grad is not None, name
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]  # it has one
    assert any(name.endswith(("_g", "_orig")) for name, _ in shared.named_parameters())


def test_parametrizations_come_behind_sharing(x: Tensor) -> None:
    """A layer that has one already is refused, and nothing is changed; one that gets it later is shared."""
    layers = SharedLayers(CAPTURE)
    early = nn.Sequential(nn.Linear(5, 5), parametrizations.weight_norm(nn.Linear(5, 5)))
    with pytest.raises(ValueError, match=r"^1 has parametrizations: replace\(\) the layers first"):
        layers.replace(early)
    assert type(early[0]) is nn.Linear
    with pytest.raises(SilentlyEagerError, match=r"^0, 1: a plain nn\.Linear, which runs eager"):
        layers.check(early, x)
    late = nn.Sequential(parametrizations.weight_norm(layers.replace(nn.Linear(5, 5))))
    layers.check(layers.replace(late), x)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_what_cannot_be_shared_is_refused() -> None:
    """A layer without a shape, one that is called otherwise, and one that was compiled in place."""
    layers = SharedLayers(CAPTURE)
    called, compiled = nn.Linear(2, 2), nn.Linear(2, 2)
    called.forward = torch.relu  # type: ignore[method-assign]  # what somebody does
    compiled.compile(backend=CAPTURE)
    for layer, message in (
        (nn.LazyLinear(3), "the layer has no shape yet: let the model see a batch first"),
        (called, "has a forward of its own"),
        (compiled, "or was compiled in place"),
    ):
        with pytest.raises(ValueError, match=message):
            layers.replace(layer)


def test_hooks_go_on_being_called(x: Tensor) -> None:
    """Those before and after the layer, and that of its backward pass."""
    layer, seen = nn.Linear(5, 3), []
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    SharedLayers(CAPTURE).replace(nn.Sequential(layer))(x.requires_grad_()).sum().backward()
    assert seen == ["before", "after", "backward"]


def test_what_is_tied_stays_tied(x: Tensor) -> None:
    """One layer under two names, in one place or in several, and one weight in two layers."""
    layer, other = nn.Linear(5, 5), nn.Linear(5, 5)
    other.weight = layer.weight
    tied = nn.ModuleDict({"one": layer, "two": layer, "deep": nn.Sequential(layer, other)})
    SharedLayers(CAPTURE).replace(tied)
    deep = tied["deep"]
    assert isinstance(deep, nn.Sequential)
    assert tied["one"] is tied["two"] is deep[0]
    assert deep[1].weight is deep[0].weight
    assert type(deep[0]) is type(deep[1]) is not nn.Linear
    deep(x).sum().backward()


def test_a_plain_layer_in_a_shared_model_is_found(x: Tensor) -> None:
    """One that came later runs eager, and a model that is shared by others is not taken for ours."""
    layers = SharedLayers(CAPTURE)
    mixed = layers.replace(nn.Sequential(nn.Linear(5, 5)))
    layers.check(mixed, x)
    mixed.add_module("late", nn.Linear(5, 5))
    with pytest.raises(SilentlyEagerError, match=r"late: a plain nn\.Linear"):
        layers.check(mixed, x)
    theirs = SharedLayers(CAPTURE)
    theirs.replace(mixed)
    theirs.check(mixed, x)
    with pytest.raises(SilentlyEagerError, match="0 of 2 graphs ran"):
        layers.check(mixed, x)


def test_what_differs_besides_sizes_is_a_graph_and_too_many_are_refused() -> None:
    """With bias and without, of rows with two axes and three, that learn or not: eight. No ninth is eager."""
    layers = SharedLayers(CAPTURE)
    for sizes in ((2, 3, 4, 5), (6, 7, 8, 9)):
        for bias, axes, learns in itertools.product([True, False], [2, 3], [True, False]):
            rows = torch.ones(sizes[:axes]).requires_grad_(learns)
            layers.replace(nn.Linear(sizes[axes - 1], 5, bias=bias))(rows)
        assert layers.graphs.compiled == 8
    fifth = layers.replace(nn.Linear(6, 5))
    with pytest.raises(SilentlyEagerError, match=r"8 graphs are compiled, .* raise recompile_limit"):
        fifth(torch.ones(2, 3, 4, 6))
    fifth(torch.ones(4, 6))
    assert trial(plan("static", 6)).eager.startswith("candidate 3 of 6: a shared layer would run eager")


def test_copies_and_pickles_of_a_model_share(x: Tensor) -> None:
    """They compute the same and compile nothing; a state goes to a plain model and back."""
    layers = SharedLayers(CAPTURE)
    shared, plain = layers.replace(model(0)), model(1)
    layers.check(shared, x)
    compiled, file = layers.graphs.compiled, io.BytesIO()
    torch.save(shared, file)
    file.seek(0)
    for other in (
        copy.deepcopy(shared),
        pickle.loads(pickle.dumps(shared)),  # noqa: S301  it was made here
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(other(x), shared(x))
        assert next(other.parameters()) is not next(shared.parameters())
        layers.check(other, x)
    assert layers.graphs.compiled == compiled
    plain = copy.deepcopy(model(0))
    plain.load_state_dict(shared.state_dict())
    shared.load_state_dict(plain.state_dict())


def test_elsewhere_a_population_shares_what_is_made_there(x: Tensor) -> None:
    """Unpickled where nobody holds the first ones, models compile anew, once for all of them."""
    layers = SharedLayers(CAPTURE, recompile_limit=5)
    pickles = [pickle.dumps(layers.replace(model(place))) for place in range(3)]
    del layers
    found = [pickle.loads(one) for one in pickles]  # noqa: S301  they were made here
    for one in found:
        one(x)
    (shared,) = {layer.shared_layers for one in found for layer in one if hasattr(layer, "shared_layers")}
    assert shared.graphs.compiled == 2


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
