"""Steps of sparse training and topology updates as the harness sees them."""

import itertools
import re
from typing import Any

import msgspec
import pytest
import torch
from torch import Generator, Tensor, nn

from esbench.measure import memory, validation
from esbench.measure.stopwatch import Stopwatch
from esbench.plugins import load
from esbench.registry import REGISTRY, Entry, UnavailableError, Workload, WrongResultError, build
from esbench.schema import Case
from impls.benchmark.training import sparse_digits, topology_update
from impls.benchmark.training.rigl import CHECKS, DIGITS, VARIANTS, cnn, mlp, update
from impls.benchmark.training.sparse_schemes import RigL, RigLTorch
from impls.training import sparse_products, topology

load("impls")

ENTRIES = REGISTRY.select(VARIANTS)
PRODUCTS = ("Csr", "Condensed", "Blocks")
PAIRS = [
    (entry, case)
    for case in CHECKS
    for entry in ENTRIES
    if entry.supports(case)
    and (case.operator != "SparseCNN" or entry.variant.scheme not in PRODUCTS)
    and entry.variant.scheme != "SemiStructured"
]
"""What runs on a CPU; what does not has a test of its own."""
pairs = pytest.mark.parametrize(
    ("entry", "case"), PAIRS, ids=[f"{entry.variant.name}-{case.label}" for entry, case in PAIRS]
)


def made(entry: Entry, case: Case) -> Workload:
    """Set a variant up."""
    return build(entry.scheme, case, "cpu", 0)


@pairs
def test_every_variant_agrees_with_the_written_out_step(entry: Entry, case: Case) -> None:
    """In float64 and in float32, before and after it was timed, on numbers that it has not seen."""
    for dtype in ("float64", "float32"):
        work = made(entry, msgspec.structs.replace(case, dtype=dtype))
        work.verify()
        (phase,) = work.phases
        work.enter(phase)
        work.phases[phase]()
        before = [one.clone() for one in work.inputs]
        work.confirm(phase)
        assert not any(map(torch.equal, work.inputs, before))


@pairs
def test_every_variant_passes_the_audit(entry: Entry, case: Case) -> None:
    """Results are finite, differ with their inputs and stay as they are; no call keeps more memory."""
    work = made(entry, msgspec.structs.replace(case, dtype="float32"))
    (phase,) = work.phases
    work.enter(phase)
    validation.rehearse(work, phase, lambda: None, Stopwatch())
    validation.check_memory(memory.footprint(work.phases[phase], "cpu"), phase)
    assert set(work.unavailable) == {"sample", "forward", "update", "step"} - {phase}


def test_families_never_meet() -> None:
    """No variant for layers meets these cases, and none of these meets a layer."""
    ours = {entry.variant for entry in ENTRIES}
    for suite in REGISTRY.suites.values():
        for case, entry in itertools.product(suite.cases, REGISTRY.select()):
            if entry.supports(case):
                assert (case.operator in REGISTRY.reserved) == (
                    entry.operators is not None and bool({*entry.operators} & REGISTRY.reserved)
                )
    assert {entry.variant.mode for entry in ENTRIES} == {"base", "naive", "batched"}
    layers = REGISTRY.select(["Perturbed", "Base", "Naive"])
    assert not any(entry.supports(case) for entry in layers for case in CHECKS)
    assert not ours & {entry.variant for entry in layers}


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("Csr", cnn(8, 8, 2), "none of convolutions"),
        ("Condensed", cnn(8, 8, 2), "none of convolutions"),
        ("SemiStructured", mlp(64, 2), "need a CUDA GPU"),
        ("Blocks", mlp(48, 2), "48 x 48 channels are no blocks of 32 x 32"),
        ("Csr", mlp(64, 2, dtype="bfloat16"), "takes float32 and float64, not torch.bfloat16"),
        ("DenseTraining", msgspec.structs.replace(mlp(64, 2), in_channels=32), "one width, not 32 and 64"),
    ],
)
def test_what_cannot_run_here_says_why(name: str, case: Case, reason: str) -> None:
    """The row has the reason, and no number."""
    (entry,) = REGISTRY.select([name])
    with pytest.raises(UnavailableError, match=re.escape(reason)):
        build(entry.scheme, case, "cpu", 0)


def test_one_dense_gradient_is_alive_inside_the_backward_pass() -> None:
    """The largest layer's, to the byte, in any step; of RigLScheduler all are, and at updates twice."""
    case = mlp(64, 8)
    one, every, sparse = (4 * size for size in (64 * 64 + 64, 4 * (64 * 64 + 64), 4 * 64 * 64))
    expected = {"backward": (one, one), "foreach": (every, every), "scheduler": (every, every + sparse)}
    for by, (step, update_step) in expected.items():
        work = build(RigL(by=by), case, "cpu", 0)
        found = {figure.method: figure.samples for figure in work.quality() if "live" in figure.metric}
        assert found == {"step": (step,), "topology step": (update_step,)}, by
    naive = {figure.method: figure.samples for figure in build(RigLTorch(), case, "cpu", 0).quality()}
    assert naive["step"] == (every + sparse,)


def test_the_real_density_is_said() -> None:
    """Of all weights, the dense first one of a CNN by ERK included."""
    work = build(RigL(), mlp(64, 8), "cpu", 0)
    found = {figure.metric: figure.samples[0] for figure in work.quality() if figure.method == "masks"}
    kept = 4 * (64 * 64 - int(0.9 * 64 * 64))
    assert found["nonzero_count"] == kept
    assert found["density_percent"] == pytest.approx(100 * kept / (4 * 64 * 64))


def wrong(work: Workload) -> None:
    """The oracle sees it."""
    with pytest.raises(WrongResultError):
        work.verify()


@pytest.mark.parametrize("bug", ["threshold", "one too few", "smallest gradient", "largest dropped"])
def test_planted_bugs_of_an_update_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On small cases by sorted lists, on large ones by the rule."""
    right = topology.by_selection

    def by_selection(w: Tensor, g: Tensor, m: Tensor, n: int, *, narrowed: bool) -> tuple[Tensor, Tensor]:
        if bug == "smallest gradient":
            return right(w, 1 / g, m, n, narrowed=narrowed)
        if bug == "largest dropped":
            return right(1 / w, g, m, n, narrowed=narrowed)
        after, flag = right(w, g, m, n, narrowed=narrowed)
        if bug == "one too few":
            after.view(-1)[after.flatten().nonzero()[0]] = False
        else:
            after = (w.abs() > w.abs().median()) | after
        return after, flag

    monkeypatch.setattr(topology, "by_selection", by_selection)
    for case in (update(9, 8, dtype="float64"), update(200, 200)):
        work = build(topology_update.PartialSelection(), case, "cpu", 0)
        wrong(work)
        with pytest.raises(WrongResultError):
            work.confirm("update")


@pytest.mark.parametrize("bug", ["no mask", "no momentum", "other values"])
def test_planted_bugs_of_a_step_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is not masked, a momentum that is not kept, values in another order."""
    if bug == "no mask":
        monkeypatch.setattr(torch, "_foreach_mul_", lambda *_: None)
        wrong(build(RigL(by="foreach"), CHECKS[2], "cpu", 0))
    elif bug == "no momentum":
        monkeypatch.setattr("impls.benchmark.training.sparse_trainers.MOMENTUM", 0.5)
        wrong(build(RigL(), CHECKS[2], "cpu", 0))
    else:
        (entry,) = REGISTRY.select(["Condensed"])
        right = sparse_products.Pattern.sampled
        monkeypatch.setattr(
            sparse_products.Pattern, "sampled", lambda self, g, x: right(self, g, x).roll(1, -1)
        )
        wrong(build(entry.scheme, CHECKS[2], "cpu", 0))


@pytest.mark.parametrize("kind", ["csr", "condensed", "block"])
def test_sparse_products_are_those_of_the_written_out_weight(kind: str) -> None:
    """Outputs, and the gradients of rows, values and bias; also where an input is read by nobody."""
    generator = Generator().manual_seed(0)
    linear = nn.Linear(12, 8).double()
    makers: Any = {
        "csr": lambda: sparse_products.CsrLinear(linear, topology.scattered(linear.weight, 11, generator)),
        "condensed": lambda: sparse_products.CondensedLinear(
            linear, sparse_products.constant_fan_in((8, 12), 0.1, generator)
        ),
        "block": lambda: sparse_products.BlockLinear(
            linear, sparse_products.blocks((8, 12), 0.2, 4, generator), 4
        ),
    }
    layer: sparse_products.AbstractSparseLinear = makers[kind]()
    mask, weight = layer.mask(), layer.dense().requires_grad_()
    assert not mask.any(0).all()
    assert torch.equal(weight.detach(), linear.weight.detach() * mask)
    x = torch.randn(5, 12, dtype=torch.float64, generator=generator, requires_grad=True)
    y, expected = layer(x), nn.functional.linear(x, weight, layer.bias)
    torch.testing.assert_close(y, expected)
    towards = torch.randn(5, 8, dtype=torch.float64, generator=generator)
    values = layer.get_parameter("values")
    of_x, of_values, of_bias = torch.autograd.grad(y, (x, values, layer.bias), towards)
    true_x, true_weight, true_bias = torch.autograd.grad(expected, (x, weight, layer.bias), towards)
    torch.testing.assert_close(of_x, true_x)
    torch.testing.assert_close(of_bias, true_bias)
    values.data = of_values
    torch.testing.assert_close(layer.dense(), true_weight * mask)


def test_masks_have_the_structure_that_they_are_named_for() -> None:
    """As many inputs for every output, whole blocks, and two of every four."""
    generator = Generator().manual_seed(0)
    assert sparse_products.constant_fan_in((6, 50), 0.1, generator).sum(1).tolist() == [5] * 6
    blocks = sparse_products.blocks((16, 32), 0.25, 8, generator).unflatten(1, (-1, 8)).unflatten(0, (-1, 8))
    assert sorted(blocks.sum((1, 3)).flatten().tolist()) == [0] * 6 + [64] * 2
    assert (sparse_products.two_of_four((6, 8), generator).unflatten(1, (2, 4)).sum(-1) == 2).all()


def test_a_workload_draws_nothing_from_the_global_generator() -> None:
    """Neither when it is made nor in its steps."""
    before = torch.get_rng_state()
    for entry, case in PAIRS:
        work = made(entry, case)
        (phase,) = work.phases
        work.enter(phase)
        work.phases[phase]()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rule", ["dense", "static", "set", "rigl"])
def test_sparse_networks_read_digits(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After few steps far better than by chance, with as many weights as were asked for; nothing is timed."""
    monkeypatch.setattr(sparse_digits, "SEEDS", (0,))
    monkeypatch.setattr(sparse_digits, "STEPS", 120)
    scheme = sparse_digits.DenseDigits() if rule == "dense" else sparse_digits.Trained(rule, 0.1)
    work = build(scheme, DIGITS, "cpu", 0)
    assert not work.phases
    found = {figure.metric: figure.samples for figure in work.quality()}
    assert found["accuracy"][0] > 0.5
    (density,) = found["density_percent"]
    assert density == 100 if rule == "dense" else 9 < density < 10.1
    assert found["nonzero_count"][0] == pytest.approx(density / 100 * 25856)


def test_digits_of_a_broken_scheduler_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection more than there may be, and weights that are not finite."""
    work = build(sparse_digits.Trained("rigl", 0.1), DIGITS, "cpu", 0)
    right = topology.restart
    monkeypatch.setattr(topology, "restart", lambda w, s, b, a: right(w, s, b, a.view(-1)[:1].fill_(1) | a))
    wrong(work)
    monkeypatch.setattr(topology, "restart", right)
    monkeypatch.setattr(sparse_digits, "LEARNING_RATE", torch.inf)
    with pytest.raises(WrongResultError, match="not finite"):
        build(sparse_digits.DenseDigits(), DIGITS, "cpu", 0).verify()
