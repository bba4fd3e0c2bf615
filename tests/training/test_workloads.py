"""Training workloads in the harness: checked against references, with planted bugs, and their metrics."""

import gc
import itertools
import re
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.measure import memory, validation
from esbench.registry import REGISTRY, Entry, entries_of_suite, load, with_references
from esbench.schema import Case
from esbench.workload import UnavailableError, Workload, WrongResultError, build
from impls.benchmark.training import (
    architecture_search,
    backward,
    memory_reclaim,
    rigl,
    shared_compile,
    sparse_digits,
    topology_update,
)
from impls.benchmark.training.architecture_search import COMPILED, Search, architectures, search_case
from impls.benchmark.training.backward import DEPTHS, MODELS, AbstractStep
from impls.benchmark.training.memory_reclaim import Trial
from impls.benchmark.training.rigl import cnn, mlp, update
from impls.benchmark.training.workload import Trainer
from impls.training import rigl as rigl_training
from impls.training import sparse_masks, sparse_products
from impls.training.memory_reclaim import refusal
from impls.training.optimizer_in_backward import Rule

load("impls")

CHECKS = (*backward.CHECKS, *rigl.CHECKS, *memory_reclaim.CHECKS)
PRODUCTS = ("Csr", "Condensed", "Blocks", "SemiStructured")


def runs_here(entry: Entry, case: Case) -> bool:
    """Return whether a CPU can run a variant in this process."""
    if not entry.supports(case) or getattr(entry.scheme, "reclaim", "") == "subprocess":
        return False
    if (
        refusal(getattr(entry.scheme, "reclaim", "nothing"), "cpu")
        or entry.variant.scheme == "SemiStructured"
    ):
        return False
    return case.operator != "SparseCNN" or entry.variant.scheme not in PRODUCTS


def built(name: str, case: Case) -> Workload:
    """Set a variant up."""
    return build(REGISTRY.entries[name].scheme, case, "cpu", 0)


@pytest.mark.parametrize("case", CHECKS, ids=lambda case: case.label)
def test_every_variant_agrees_with_the_reference_and_passes_the_harness(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results agree in both dtypes, before and after calls and on other inputs, without global generators."""
    monkeypatch.setitem(DEPTHS, backward.MANY_SMALL, 5)
    before = torch.get_rng_state()
    for entry, dtype in itertools.product(REGISTRY.select(), ("float64", "float32")):
        if not runs_here(entry, case):
            continue
        if dtype == "float32" and case in memory_reclaim.CHECKS and entry.variant.name != "CleanSearch":
            continue  # how memory is reclaimed does not depend on the type
        work = build(entry.scheme, msgspec.structs.replace(case, dtype=dtype), "cpu", 0)
        work.verify()
        (phase,) = work.phases
        assert set(work.unavailable) == {"sample", "forward", "update", "step"} - {phase}
        work.enter(phase)
        first = work.phases[phase]()
        if phase == "step":
            second = work.phases[phase]()
            assert isinstance(first, Tensor)
            assert isinstance(second, Tensor)
            assert not torch.equal(first, second), entry.variant.name
        inputs = [values.clone() for values in work.inputs]
        work.confirm(phase)
        assert not any(map(torch.equal, work.inputs, inputs))
        if dtype == "float32" and case in rigl.CHECKS:
            work.enter(phase)
            validation.precheck(work, phase, lambda: None)
            validation.check_memory(memory.footprint(work.phases[phase], "cpu"), phase)
    assert torch.equal(torch.get_rng_state(), before)


def test_reserved_operators_have_only_their_own_variants() -> None:
    """Reserved operators have only their own variants, with one base and one naive, in every suite."""
    for suite in REGISTRY.suites.values():
        chosen = with_references(entries_of_suite(REGISTRY.select(), suite, ()))
        for case, entry in itertools.product(suite.cases, chosen):
            if case.operator in REGISTRY.reserved or {*(entry.operators or ())} & REGISTRY.reserved:
                assert entry.supports(case) == (case.operator in (entry.operators or ()))
    for case in (*CHECKS, rigl.DIGITS, *shared_compile.CHECKS):
        modes = [entry.variant.mode for entry in REGISTRY.select() if entry.supports(case)]
        assert modes.count("base") == 1
        if case.operator != rigl.DIGITS.operator:
            assert modes.count("naive") == 1
        assert modes.count("batched") > 1


def test_unsupported_cases_have_a_reason() -> None:
    """Shapes, dtypes and devices that a variant does not support are unavailable with a reason."""
    for name, case, reason in (
        ("Csr", cnn(8, 8, 2), "not of convolutions"),
        ("SemiStructured", mlp(64, 2), "need a CUDA GPU"),
        ("Blocks", mlp(48, 2), "48 x 48 channels are not divisible into 32 x 32 blocks"),
        ("Csr", mlp(64, 2, dtype="bfloat16"), "support float32 and float64, not torch.bfloat16"),
        ("CleanSearch(reclaim=pool)", memory_reclaim.CHECKS[0], "CUDA"),
    ):
        with pytest.raises(UnavailableError, match=re.escape(reason)):
            built(name, case)
    isolated = built("CleanSearch(reclaim=subprocess)", memory_reclaim.CHECKS[0])
    assert not isolated.phases
    assert "wall_ns" in isolated.unavailable["step"]


def assert_check_fails(work: Workload) -> None:
    """Check that a bug is found."""
    with pytest.raises(WrongResultError):
        work.verify()


STEPS = {
    "keeps gradients": 1,
    "skips the update": 0,
    "steps twice": 2,
    "misses a layer": 1,
    "forgets weight decay": 1,
    "changes weights": 0,
}
"""Planted bugs of a training step, and how many optimizer steps it takes with each."""


@dataclass(frozen=True)
class Planted(AbstractStep):
    """A step with a bug."""

    bug: str = ""

    @override
    def trainer(self, model: nn.Module, rule: Rule) -> Trainer:
        parameters = list(model.parameters())
        optimizer = rule(parameters[1:] if self.bug == "misses a layer" else parameters)
        if self.bug == "forgets weight decay":
            optimizer.param_groups[0]["weight_decay"] = 0.0

        @torch.no_grad()
        def finish() -> None:
            for _ in range(STEPS[self.bug]):
                optimizer.step()
            if self.bug == "changes weights":
                parameters[0].mul_(1.001)
            if self.bug != "keeps gradients":
                model.zero_grad()

        return Trainer(model, finish, [] if self.bug == "changes weights" else [optimizer])


@pytest.mark.parametrize("bug", STEPS)
def test_planted_bugs_of_a_step_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of a step fails for each bug, on every model."""
    monkeypatch.setitem(DEPTHS, backward.MANY_SMALL, 5)
    for case in backward.CHECKS:
        assert_check_fails(build(Planted(bug=bug), case, "cpu", 0))


def test_gradients_and_optimizer_state_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of one layer or all are alive; AdamW keeps two moments and a step count per parameter."""
    monkeypatch.setitem(DEPTHS, backward.MANY_SMALL, 5)
    layers: dict[str, int | None] = {
        "NoUpdate": None,
        "StandardStep": None,
        "StandardStep(kernel=loop)": None,
        "StepInBackward": 1,
        "StepInBackward(kernel=foreach, granularity=module)": 1,
        "LeakingHook": 1,
    }
    layer_bytes = 8 * 4 * 4
    for case, (name, alive) in itertools.product(backward.CHECKS, layers.items()):
        depth = DEPTHS[case.operator]
        metrics = {metric.metric: metric.samples[0] for metric in built(name, case).quality()}
        assert metrics["live_gradient_bytes"] == layer_bytes * (alive or depth)
        assert metrics["state_bytes"] == (0 if name == "NoUpdate" else depth * (2 * layer_bytes + 4))


def test_only_the_leaking_recipe_leaks() -> None:
    """Other models are freed by reference counting; those of the recipe not even by a collection.

    AdamW counts its steps on the device if it is a GPU, as a captured graph must.
    """
    for entry in REGISTRY.select(backward.VARIANTS):
        assert isinstance(entry.scheme, AbstractStep)
        expected = MODELS if entry.variant.name == "LeakingHook" else 0
        assert backward.count_leaked(entry.scheme) == (expected, expected), entry.variant.name
        for device in ("cpu", "cuda"):
            kernel = entry.scheme.kernel
            (group,) = backward.adamw(kernel, device)([nn.Parameter(torch.ones(1))]).param_groups
            assert group["capturable"] == (device == "cuda")
            assert (group["foreach"], group["fused"]) == (kernel == "foreach", kernel == "fused")


@pytest.mark.parametrize(
    "bug", ["threshold", "one too few", "five moves too many", "smallest gradient", "largest dropped"]
)
def test_planted_bugs_of_a_topology_update_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of an update fails for each bug, on small and large cases."""
    right = sparse_masks.drop_and_grow

    def drop_and_grow(w: Tensor, g: Tensor, m: Tensor, n: int, *, narrowed: bool) -> tuple[Tensor, Tensor]:
        if bug == "smallest gradient":
            return right(w, 1 / g, m, n, narrowed=narrowed)
        if bug == "largest dropped":
            return right(1 / w, g, m, n, narrowed=narrowed)
        if bug == "five moves too many":
            return right(w, g, m, n + 5, narrowed=narrowed)  # one entry may be dropped and grown again
        after, flag = right(w, g, m, n, narrowed=narrowed)
        if bug == "one too few":
            after.view(-1)[after.flatten().nonzero()[0]] = False
        else:
            after = (w.abs() > w.abs().median()) | after
        return after, flag

    monkeypatch.setattr(sparse_masks, "drop_and_grow", drop_and_grow)
    for case in (update(9, 8, dtype="float64"), update(200, 200)):
        work = build(topology_update.PartialSelection(), case, "cpu", 0)
        assert_check_fails(work)
        with pytest.raises(WrongResultError):
            work.confirm("update")


def test_planted_bugs_of_sparse_training_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks find unmasked gradients, another momentum, values in another order and wrong masks."""
    case = rigl.CHECKS[2]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_mul_", lambda *_: None)
        assert_check_fails(build(rigl.RigL(by="foreach"), case, "cpu", 0))
    with monkeypatch.context() as patch:
        patch.setattr(rigl, "sgd", lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.5))
        assert_check_fails(build(rigl.RigL(), case, "cpu", 0))
    pattern = sparse_products.Pattern
    right = pattern.value_gradient
    with monkeypatch.context() as patch:
        patch.setattr(pattern, "value_gradient", lambda self, g, x: right(self, g, x).roll(1, -1))
        assert_check_fails(build(rigl.Condensed(), case, "cpu", 0))
    zero_changed = sparse_masks.zero_changed
    with monkeypatch.context() as patch:
        patch.setattr(
            rigl_training,
            "zero_changed",
            lambda tensors, before, after: zero_changed(tensors, before, after.view(-1)[:1].fill_(1) | after),
        )
        assert_check_fails(build(sparse_digits.Trained("rigl", 0.1), rigl.DIGITS, "cpu", 0))
    monkeypatch.setattr(sparse_digits, "LEARNING_RATE", torch.inf)
    with pytest.raises(WrongResultError, match="not finite"):
        build(sparse_digits.DenseDigits(), rigl.DIGITS, "cpu", 0).verify()


def test_metrics_of_sparse_training() -> None:
    """Bytes of gradients: one layer's in backward, all with RigLScheduler, twice at updates; densities."""
    layer, all_layers, sparse = (4 * size for size in (64 * 64 + 64, 4 * (64 * 64 + 64), 4 * 64 * 64))
    for scheme, step, update_step in (
        (rigl.RigL(by="backward"), layer, layer),
        (rigl.RigL(by="foreach"), all_layers, all_layers),
        (rigl.RigL(by="scheduler"), all_layers, all_layers + sparse),
        (rigl.RigLTorch(), all_layers + sparse, None),
    ):
        metrics = list(build(scheme, mlp(64, 8), "cpu", 0).quality())
        by_method = {metric.method: metric.samples for metric in metrics}
        assert by_method["step"] == (step,), scheme
        assert update_step is None or by_method["topology step"] == (update_step,), scheme
    metrics = list(build(rigl.RigL(), mlp(64, 8), "cpu", 0).quality())
    of_masks = {metric.metric: metric.samples for metric in metrics if metric.method == "masks"}
    nonzero = 4 * (64 * 64 - int(0.9 * 64 * 64))
    assert of_masks["nonzero_count"] == (nonzero,)
    assert of_masks["density_percent"] == pytest.approx((100 * nonzero / (4 * 64 * 64),))


def test_masks_of_sparse_products() -> None:
    """Masks have equally many inputs per output, whole blocks, or two of every four inputs.

    A product of several blocks, more than a case of the suite has, is that of the dense weight.
    """
    generator, linear = Generator().manual_seed(0), nn.Linear(12, 8)
    weight = linear.weight.detach()
    assert sparse_products.constant_fan_in_mask(weight, 0.25, generator).sum(1).tolist() == [3] * 8
    assert (sparse_products.two_of_four_mask(weight, generator).unflatten(1, (3, 4)).sum(-1) == 2).all()
    mask = sparse_products.block_mask(weight, 0.7, 4, generator)
    block_sizes = mask.unflatten(1, (-1, 4)).unflatten(0, (-1, 4)).sum((1, 3))
    assert sorted(block_sizes.flatten().tolist()) == [0] * 2 + [16] * 4
    layer, x = sparse_products.BlockLinear(linear, mask, 4), torch.randn(5, 12, generator=generator)
    assert torch.equal(layer.dense(), weight * mask)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight * mask, linear.bias))


def test_sparse_networks_classify_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few steps sparse networks are far better than chance, and their density is as chosen."""
    monkeypatch.setattr(sparse_digits, "SEEDS", (0,))
    monkeypatch.setattr(sparse_digits, "STEPS", 120)
    for rule in ("dense", "static", "set", "rigl"):
        scheme = sparse_digits.DenseDigits() if rule == "dense" else sparse_digits.Trained(rule, 0.1)
        work = build(scheme, rigl.DIGITS, "cpu", 0)
        assert not work.phases
        metrics = {metric.metric: metric.samples for metric in work.quality()}
        assert metrics["accuracy"][0] > 0.5, rule
        (density,) = metrics["density_percent"]
        assert density == 100 if rule == "dense" else 9 < density < 10.1
        assert metrics["nonzero_count"][0] == pytest.approx(density / 100 * 25856)


def test_a_missing_update_of_a_search_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds a batch that is not trained on, and compiled candidates with another learning rate."""
    with monkeypatch.context() as patch:
        loss_of, calls = architecture_search.loss_of, itertools.count()

        def loss_without_a_gradient(*arguments: Any) -> Tensor:
            loss = loss_of(*arguments)
            return loss.detach() + 0 * loss if next(calls) == architecture_search.STEPS - 2 else loss

        patch.setattr(architecture_search, "loss_of", loss_without_a_gradient)
        with pytest.raises(WrongResultError, match=r"candidate 0: losses is off"):
            built("CleanSearch", memory_reclaim.CHECKS[0]).verify()
    monkeypatch.setattr(shared_compile, "LEARNING_RATE", 0.051)
    case = search_case(2, 5, 4, operator=COMPILED)
    plan = shared_compile.Plan(Search(case, "cpu", 0), "eager", architectures(case, 0), timed=False)
    trial = shared_compile.run_trial(plan)
    assert trial.wrong.startswith("candidate 0: losses is off")
    assert trial.candidate_ns == ()


def test_calls_of_a_search_are_reproducible_and_free_leaky_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls read two buffers in turn, from the same initial weights; leaky candidates are freed."""
    case = search_case(3, 5, 4)
    work = built("CleanSearch", case)
    work.enter("step")
    first, second, third = (torch.as_tensor(work.phases["step"]()) for _ in range(3))
    assert first.shape == (3, architecture_search.STEPS)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)
    run, outcomes = architecture_search.run, list[architecture_search.Outcome]()

    def recorded(*args: Any) -> architecture_search.Outcome:
        outcomes.append(run(*args))
        assert outcomes[-1].alive > 0
        return outcomes[-1]

    monkeypatch.setattr(architecture_search, "run", recorded)
    gc.disable()
    try:
        for name in ("LeakySearch", "CleanSearch(linked=True)"):
            built(name, case).phases["step"]()
        assert [outcome.alive for outcome in outcomes] == [0, 0]
    finally:
        gc.enable()


def test_metrics_of_a_search_come_from_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks are relative to the largest candidate alone; numbers that the device lacks have a reason."""
    search_trial = Trial(
        5.0, 2.0, 7, 6, (0.5,), resident_bytes=300, reserved_bytes=90, allocated_bytes=60, retries=4
    )
    alone = Trial(1.0, 0.0, 0, 0, (0.5,), resident_bytes=100, reserved_bytes=40, allocated_bytes=30)
    expected = {
        ("wall_ns", "fresh process"): 5,
        ("pause_ns", "fresh process"): 2,
        ("alive_count", "after del"): 7,
        ("alive_count", "after collection"): 6,
        ("process_over_largest", "resident set"): 3,
        ("reserved_over_largest", "allocator"): 3,
        ("fragmentation_percent", "allocator"): pytest.approx(100 / 3),
        ("retries_count", "allocator"): 4,
    }
    assert search_trial.metrics(alone) == expected
    calls = []

    def call_in_fresh_process(_: object, search: Search, widths: Any, environment: Any = None) -> Trial:
        calls.append((search.mode, len(widths), environment))
        return search_trial if len(widths) > 1 else alone

    monkeypatch.setattr(memory_reclaim, "call_in_fresh_process", call_in_fresh_process)
    memory_reclaim.largest_alone.cache_clear()
    metrics = list(built("CleanSearch(reclaim=collect)", search_case(3, 5, 4)).quality())
    memory_reclaim.largest_alone.cache_clear()
    assert calls == [("collect", 3, {})] * 3 + [("nothing", 1, None)]
    for metric, number in zip(metrics, expected.values(), strict=True):
        assert metric.samples == ((number,) * 3 if metric.method != "allocator" else ())
        assert ("CUDA" in metric.reason) == (metric.method == "allocator")


def test_a_trial_measures_pauses_and_leaks() -> None:
    """A trial reports the pauses of its collections, and the parameters that a leaky search leaves."""
    case = search_case(3, 5, 4)
    widths = architectures(case, 0)
    collected = memory_reclaim.run_trial(Search(case, "cpu", 0, mode="collect_batch"), widths)
    assert 0 < collected.pause_ns < collected.wall_ns
    assert (collected.alive, collected.alive_collected) == (0, 0)
    leaky = memory_reclaim.run_trial(Search(case, "cpu", 0, leaky=True), widths)
    assert leaky.losses == collected.losses
    assert leaky.alive == leaky.alive_collected == sum(2 * (len(candidate) - 1) for candidate in widths)
