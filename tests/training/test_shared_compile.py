"""Compiled layers that a population shares. Graphs are captured and run without a compiler."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from impls.benchmark.training import shared_compile
from impls.benchmark.training.architecture_search import (
    COMPILED,
    Search,
    architectures,
    search_case,
    untrained,
)
from impls.benchmark.training.shared_compile import Plan, Trial, Way, quality_metrics, run_trial
from impls.training.shared_compile import Graphs, SharedLayers, SilentlyEagerError

pytestmark = [
    # torch ignores this warning itself, which does not work if warnings are errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated"),
]

CASE = search_case(12, 5, 4, operator=COMPILED)
WIDTHS = architectures(CASE, 0)
CAPTURE = "eager"
X = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Start and end without graphs of other tests."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def model(index: int) -> nn.Sequential:
    """Return a candidate."""
    return untrained(WIDTHS[index], CASE, "cpu", index)


def trial(way: Way, candidates: int, limit: int | None = None) -> Trial:
    """Train a population without measuring anything."""
    search = Search(CASE, "cpu", 0)
    return run_trial(Plan(search, way, WIDTHS[:candidates], limit, CAPTURE, timed=False))


def test_how_many_graphs_a_population_needs() -> None:
    """Shared dynamic layers need two graphs, with and without gradients; other ways more.

    The limit in a plan raises torch's own.
    """
    layers = SharedLayers(CAPTURE)
    # Sizes that happen to be equal in the first call are not assumed to be equal later.
    for rows, inp, out in ((4, 4, 4), (4, 3, 5), (6, 3, 6), (2, 7, 7)):
        layers.replace(nn.Linear(inp, out))(torch.ones(rows, inp))
    assert layers.graphs.compiled == 1
    shapes = {
        (a, b, index > 0) for widths in WIDTHS[:2] for index, (a, b) in enumerate(itertools.pairwise(widths))
    }
    assert len(shapes) > 2
    cases: list[tuple[Way, int, int | None, int]] = [
        ("dynamic", 12, None, 2),
        ("whole", 3, 100, 3),
        ("static", 2, 100, len(shapes)),
    ]
    with torch._dynamo.config.patch(recompile_limit=2):  # noqa: SLF001  where torch keeps its own limit
        for way, candidates, limit, graphs in cases:
            result = trial(way, candidates, limit)
            assert (result.graphs, result.eager, result.wrong) == (graphs, "", "")


def test_nothing_is_reported_beyond_the_recompile_limit() -> None:
    """Torch runs further models eagerly, and all quality metrics say so."""
    result = trial("whole", 4, limit=2)
    assert (result.graphs, result.wrong) == (2, "")
    assert result.eager.startswith("candidate 2 of 4: only 0 of 1 compiled graphs ran")
    reported = list(quality_metrics(result, "whole"))
    assert {metric.metric for metric in reported} > {"graphs_count", "compile_ns", "break_even_steps"}
    assert all(metric.reason == result.eager and not metric.samples for metric in reported)
    assert trial("static", 6).eager.startswith(
        "candidate 3 of 6: a layer with a shared compiled graph would run eagerly"
    )


def test_each_object_has_its_own_limit() -> None:
    """Shared layers that reach their recompile limit raise, and leave other objects alone."""
    static, separate = SharedLayers(CAPTURE, dynamic=False), SharedLayers(CAPTURE, dynamic=False)
    for index in range(3):
        static.replace(model(index))(X)
    with pytest.raises(SilentlyEagerError, match="8 graphs are compiled, one per combination"):
        static.replace(model(3))(X)
    separate.check(separate.replace(model(11)), X)
    layers = SharedLayers(CAPTURE)
    for sizes in ((2, 3, 4, 5), (6, 7, 8, 9)):
        for bias, axes, learns in itertools.product([True, False], [2, 3], [True, False]):
            rows = torch.ones(sizes[:axes]).requires_grad_(learns)
            layers.replace(nn.Linear(sizes[axes - 1], 5, bias=bias))(rows)
        assert layers.graphs.compiled == 8
    ninth = layers.replace(nn.Linear(6, 5))
    with pytest.raises(SilentlyEagerError, match=r"8 graphs are compiled, .* raise recompile_limit"):
        ninth(torch.ones(2, 3, 4, 6))
    ninth(torch.ones(4, 6))
    with pytest.raises(SilentlyEagerError, match=r"torch\.func \(vmap, grad"):
        torch.vmap(ninth)(torch.ones(5, 3, 6))


def test_layers_that_do_not_run_compiled_are_errors() -> None:
    """Layers compiled in place, calls that compile each time and plain or foreign layers raise errors."""
    graphs = Graphs(CAPTURE)
    in_place = nn.Linear(5, 3)
    in_place.compile(backend=graphs)
    in_place(X)
    assert (graphs.compiled, graphs.ran) == (0, 0)
    with pytest.raises(SilentlyEagerError, match=r"nn.Linear.compile\(\) compiles nothing"):
        graphs.check(in_place, [X], 1)
    fresh = [nn.Linear(5, size) for size in range(2, 6)]
    changing = nn.Module()
    changing.forward = lambda rows: torch.compile(fresh.pop(), backend=graphs)(rows)  # noqa: PLW0108  another layer in each call
    with pytest.raises(SilentlyEagerError, match="second call with the same inputs compiled 1 graphs"):
        graphs.check(changing, [X], 1)
    layers, theirs = SharedLayers(CAPTURE), SharedLayers(CAPTURE)
    mixed = layers.replace(nn.Sequential(nn.Linear(5, 5)))
    layers.check(mixed, X)
    mixed.add_module("late", nn.Linear(5, 5))
    with pytest.raises(SilentlyEagerError, match=r"late is a plain nn\.Linear"):
        layers.check(mixed, X)
    theirs.check(theirs.replace(mixed), X)
    with pytest.raises(SilentlyEagerError, match="0 of 2 compiled graphs ran"):
        layers.check(mixed, X)
    early = layers.replace(nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 5))))
    with pytest.raises(SilentlyEagerError, match=r"^0 is a plain nn\.Linear, which runs eagerly"):
        layers.check(early, X)
    late = nn.Sequential(parametrizations.weight_norm(layers.replace(nn.Linear(5, 5))))
    theirs.check(theirs.replace(late), X)


def spectral(layer: nn.Linear) -> nn.Module:
    """Compute the weight by a hook that has a state."""
    torch.manual_seed(1)
    return nn.utils.spectral_norm(layer)


def pruned(layer: nn.Linear) -> nn.Module:
    """Compute the weight by a hook with a mask."""
    result: nn.Module = prune.l1_unstructured(layer, "weight", 0.5)
    return result


def test_a_shared_model_is_the_same_model() -> None:
    """Outputs, gradients, names, parameters, hooks and classes stay; copies share graphs."""
    ways: list[tuple[Callable[[nn.Linear], nn.Module], bool]] = [
        (lambda layer: layer, False),
        (lambda layer: layer, True),
        (spectral, True),
        (pruned, False),
    ]
    for computed, dynamic in ways:
        layers = SharedLayers(CAPTURE, dynamic=dynamic)
        plain, shared = model(0), model(0)
        for network, index in itertools.product((plain, shared), (0, 2)):
            computed(network[index])  # type: ignore[arg-type]  # linear layers
        before = dict(shared.named_parameters())
        assert layers.replace(shared) is shared
        assert shared.state_dict().keys() == plain.state_dict().keys()
        assert all(parameter is before[name] for name, parameter in shared.named_parameters())
        for rows in (X, X.expand(2, 4, 5)):
            y, expected = shared(rows), plain(rows)
            assert torch.equal(y, expected)
            for output in (y, expected):
                output.square().sum().backward()
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, before[name].grad), name  # type: ignore[arg-type]  # it has one
    layers, calls = SharedLayers(CAPTURE), list[str]()
    layer = nn.Linear(5, 5)
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    both = layers.replace(nn.Sequential(layer.eval(), type("Derived", (nn.Linear,), {})(5, 5)))
    assert [type(child).__name__ for child in both.children()] == ["SharedLinear", "Derived"]
    assert not layer.training
    both(X.clone().requires_grad_()).sum().backward()
    assert calls == ["before", "backward"]
    compiled, copied = layers.graphs.compiled, copy.deepcopy(both)
    copied(X.clone().requires_grad_())
    assert next(copied.parameters()) is not next(both.parameters())
    assert layers.graphs.compiled == compiled


def test_torchs_settings_are_restored() -> None:
    """Torch's settings are restored after a call, also after one that raises."""
    dynamo, fx = torch._dynamo.config, torch.fx.experimental._config  # noqa: SLF001  where torch keeps them

    def settings() -> tuple[object, ...]:
        limits = dynamo.recompile_limit, dynamo.accumulated_recompile_limit
        return dynamo.force_parameter_static_shapes, *limits, fx.use_duck_shape

    before = settings()
    for limit in (None, 3):
        layers = SharedLayers(CAPTURE, recompile_limit=limit)
        layers.replace(model(0))(X)
        assert settings() == before
        with pytest.raises(RuntimeError):
            layers.replace(nn.Linear(5, 3))(X[:, :4])
        assert settings() == before


def test_compile_time_is_the_excess_over_warm_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose first step takes 90 ns longer than its warm steps has 90 ns of compiling."""
    step = shared_compile._TrainingStep  # noqa: SLF001  its clock is replaced
    take = step.measure

    def measure(self: Any, rows: torch.Tensor) -> float:
        is_first = not self.losses
        take(self, rows)
        return 100.0 if is_first else 10.0

    monkeypatch.setattr(step, "measure", measure)
    measured = run_trial(Plan(Search(CASE, "cpu", 0), "eager", WIDTHS[:1]))
    assert (measured.compile_ns, measured.step_ns) == ((90.0,), (10.0,))


def test_break_even_counts_steps_of_all_candidates() -> None:
    """Break-even is total compile time over the mean time that a step saves; never, if it saves nothing."""
    faster = Trial(2, (9.0, 9.0), (600.0, 200.0), (10.0, 30.0), (20.0, 40.0))
    by_name = {metric.metric: metric for metric in quality_metrics(faster, "dynamic")}
    assert by_name["compile_ns"].samples == (800.0,)
    assert by_name["break_even_steps"].samples == (80.0,)
    slower = Trial(2, (9.0,), (600.0,), (20.0,), (10.0,))
    *_, last = quality_metrics(slower, "dynamic")
    assert last.reason == "never: a warm step is not faster than an eager one"
    reasons = {metric.metric: metric.reason for metric in quality_metrics(slower, "eager")}
    assert reasons["compile_ns"] == reasons["break_even_steps"] == "nothing is compiled"
