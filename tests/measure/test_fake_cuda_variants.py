"""Every registered variant runs on fake CUDA tensors without mixing devices or waiting unexpectedly.

tests/fake_cuda_tensors.py describes the fake device. The code that checks and measures results runs on it as
well: the checks of a variant, the footprint, the quality metrics.
"""

import contextlib
import fnmatch
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

import impls
from esbench.measure import memory, validation
from esbench.measure.cuda import Streak
from esbench.measure.instruments import Instruments
from esbench.measure.plan import Plan
from esbench.measure.profiler import Trace
from esbench.measure.runner import run_cases
from esbench.measure.timers import CudaClock, HostClock
from esbench.registry import REGISTRY, Entry, load
from esbench.schema import PHASES, QUALITY, Case, Measurement, Phase, Record, Skipped
from esbench.workload import UnavailableError, Workload, WrongResultError, build
from impls.benchmark.inputs import is_packed, layer, rows
from impls.benchmark.training import backward, memory_reclaim, shared_compile
from impls.benchmark.training.architecture_search import Search, architectures
from impls.perturbation.layer import PerturbedLayer
from impls.perturbation.noise import NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.population import Population
from impls.perturbation.scheme import AbstractScheme, AbstractWrapper
from impls.quality import bias, kappa
from impls.schemes.dense import DenseNoise, Perturbed
from impls.verify import checks, reference
from tests.fake_cuda_tensors import CaptureError, DeviceMixError, FakeDevice, fake_cuda
from tests.workload_cases import on

load("impls")

GENERATIONS = ("Esbench*", "VmapByHand*", "BatchedProducts", "LoopOverMembers")
"""Whole generations of an evolution strategy."""

WAITS: dict[str, tuple[Phase, ...]] = {
    # Utilities and sigma become numbers for torch.add.
    "Loop": ("forward", "update", "step"),
    # The host selects which blocks are kept.
    "*DropoutBlocks*": ("sample", "step"),
    # A NaN among the probabilities raises, which reads them on the host.
    "*Binary*": ("sample", "step"),
    # Guards skip gradients that are not finite.
    "StepInBackward(*guarded=True)": ("step",),
    "RigL(by=backward)": ("step",),
    # FullSort counts weights; PartialSelection reads a sample.
    "FullSort": ("update",),
    "PartialSelection(narrowed=True)": ("update",),
    # The host creates candidates and hashes their weights.
    "*Search*": ("step",),
    "OneArchitecture": ("step",),
    # Ranks are taken of numbers only, which the host checks.
    **dict.fromkeys(GENERATIONS, ("step",)),
}
"""Variants and the phases in which they may wait for the device. No other phase may wait."""

CAPTURED = ("FusedBinary",)
"""Variants that wait for the device only where no graph is captured."""

CHECKS = REGISTRY.find_suite("check").cases
LINEAR, CONV, _, LINEAR_BITS, CONV_BITS = (case for case in CHECKS if case.operator not in REGISTRY.reserved)
CASES = (
    LINEAR,
    msgspec.structs.replace(LINEAR, repeats=2, dtype="bfloat16", antithetic=True),
    msgspec.structs.replace(CONV, dtype="float32"),
    LINEAR_BITS,
    msgspec.structs.replace(CONV_BITS, dtype="float32"),
)
"""float64 is checked exactly; other types by the effective weights of a few members.

The first case is only checked: the second runs the phases of the same operator.
"""
PRECHECKED = (CASES[1], CASES[4])
VERIFIED = (CASES[0], CASES[3])
"""The other cases have their precheck and postcheck, or are checked in the same way as these."""

LAYERS = [
    entry
    for entry in REGISTRY.select(("*",))
    if entry.operators is None or not set(entry.operators) <= REGISTRY.reserved
]
"""Variants of layers."""

PROCESSES = ("*reclaim=*", "SharedLayer*", "WholeModel*", "EagerModels")
"""They compile or measure the allocator in other processes: tests below run the same functions here."""

TRAINING = [
    entry
    for entry in REGISTRY.select(("*",))
    if entry not in LAYERS and not any(fnmatch.fnmatchcase(entry.variant.name, glob) for glob in PROCESSES)
]
"""Training steps."""


def parametrize_variants(entries: Sequence[Entry]) -> pytest.MarkDecorator:
    """Parametrize a test with variants."""
    return pytest.mark.parametrize("entry", entries, ids=lambda entry: entry.variant.name)


def waits_expected(entry: Entry) -> set[Phase]:
    """Return the phases in which a variant may wait for the device."""
    globs = (glob for glob in WAITS if fnmatch.fnmatchcase(entry.variant.name, glob))
    return {phase for glob in globs for phase in WAITS[glob]}


def draws_expected(entry: Entry) -> set[Phase]:
    """Return the phases in which a variant uses torch generators: whole generations, the stream ``block``."""
    if any(fnmatch.fnmatchcase(entry.variant.name, glob) for glob in GENERATIONS):
        return {"step"}
    if not isinstance(entry.scheme, AbstractScheme) or entry.scheme.stream != "block":
        return set()
    with fake_cuda():
        layer = (nn.Linear if entry.operators is None else impls.BinarizedLinear)(8, 8, device="cuda")
        noise = PerturbedLayer.of("", layer, entry.scheme).sample(0, 0, range(1), device="meta")
    draws_again = any(isinstance(value, NoiseStream) for value in vars(noise.weight).values())
    return {"sample", "step", *(("forward", "update") if draws_again else ())}


def is_wrapper(entry: Entry) -> bool:
    """Return whether a variant computes another scheme's results: compiled, or in kernels."""
    return isinstance(entry.scheme, AbstractWrapper) or entry.variant.scheme.startswith("Fused")


ONE_OF_A_SCHEME = [*{entry.variant.scheme: entry for entry in LAYERS if not is_wrapper(entry)}.values()]


def vmap_by_loop(function: Callable[..., Any], in_dims: tuple[int | None, ...] = ()) -> Callable[..., Any]:
    """Return a function that does what ``torch.vmap`` does, in which tensors lose their fake device."""

    def mapped(*arguments: Any) -> Any:
        dims = in_dims or (0,) * len(arguments)
        count = len(tree_leaves(arguments[dims.index(0)])[0])
        results = [
            function(
                *(
                    argument if dim is None else tree_map(lambda tensor, at=at: tensor[at], argument)
                    for argument, dim in zip(arguments, dims, strict=True)
                )
            )
            for at in range(count)
        ]
        return tree_map(lambda *tensors: torch.stack(tensors), *results)

    return mapped


@pytest.fixture
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the checks: one member's rows, moments of four steps that are not judged, no waiting."""
    check_mean = checks._check_mean  # noqa: SLF001  the same function as below

    def ignored_check_mean(*arguments: Any) -> None:
        with contextlib.suppress(WrongResultError):  # moments of four steps are too noisy for a decision
            check_mean(*arguments)

    def check_forward(population: Population, x: Tensor, members: Sequence[int], step: int) -> None:
        reference.check_forward(population, x, members[:1], step=step)

    def check_update(population: Population, x: Tensor, members: Sequence[int], step: int) -> None:
        reference.check_update(population, x, members[:2], step=step)

    monkeypatch.setattr("impls.benchmark.workload.REPEATED_CALLS", 2)
    monkeypatch.setattr(bias, "RUNS", 2)
    monkeypatch.setattr(bias, "REPEATED", math.inf)
    monkeypatch.setattr(bias, "TOLERANCE", math.inf)
    monkeypatch.setattr(kappa, "CHECKED_STEPS", 2)
    monkeypatch.setattr(kappa, "CHECKED_MEMBERS", (8, 8))
    monkeypatch.setattr(kappa, "TOLERANCE", math.inf)
    independence = checks.check_independence
    monkeypatch.setattr(checks, "check_independence", lambda setting, *_: independence(setting, 1))
    monkeypatch.setattr(checks, "COMPARED_PARTS", 1)
    monkeypatch.setattr(checks, "check_forward", check_forward)
    monkeypatch.setattr(checks, "check_update", check_update)
    monkeypatch.setattr(checks, "STEPS", 4)
    monkeypatch.setattr(checks, "_check_mean", ignored_check_mean)
    monkeypatch.setattr(kappa, "REPLICATES", 2)
    monkeypatch.setattr(kappa, "CHEAP_NUMBERS", 0)
    monkeypatch.setattr(kappa, "MIN_SAMPLED", 8)
    monkeypatch.setattr(validation, "PATIENCE_S", (0.0, 0.0))
    monkeypatch.setattr(torch, "vmap", vmap_by_loop)


class Notes:
    """The phases in which a variant waits for the device or uses generators, with the responsible calls."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.waits: dict[Phase, set[str]] = {}
        self.draws: dict[Phase, set[str]] = {}

    def run(self, work: Workload, phase: Phase, cuda: FakeDevice) -> None:
        """Run a phase; if it neither waits nor draws, check that it can be captured and replayed."""
        work.enter(phase)
        call, turns = work.phases[phase], max(1, len(work.inputs))
        cuda.clear()
        for _ in range(turns):
            call()
        if cuda.waits:
            self.waits.setdefault(phase, set()).update(cuda.waits)
        if cuda.draws:
            self.draws.setdefault(phase, set()).update(cuda.draws)
        if not cuda.draws and (self._entry.variant.name in CAPTURED or not cuda.waits):
            device: Any = SimpleNamespace(capture=partial(cuda.capture, is_warm=True))
            replay = CudaClock("graph", device, Streak()).prepare(call, turns)
            validation.check_replay(work, phase, replay)

    def check(self) -> None:
        """Compare the phases with those expected of the variant."""
        assert self.waits.keys() == waits_expected(self._entry), self.waits
        assert self.draws.keys() == draws_expected(self._entry), self.draws


def build_if_supported(entry: Entry, case: Case) -> Workload | None:
    """Set a variant up on the device; return None if it does not support the case."""
    try:
        return build(entry.scheme, case, "cuda", 0)
    except UnavailableError:
        return None


def works_of(entry: Entry) -> dict[Case, Workload]:
    """Set a variant up on the device for small cases of every operator that it supports."""
    of_bits = entry.operators is not None
    cases = (case for case in CASES if entry.supports(case) and is_packed(case) is of_bits)
    return {case: work for case in cases if (work := build_if_supported(entry, case)) is not None}


@parametrize_variants(LAYERS)
@pytest.mark.usefixtures("short_checks")
def test_a_variant_of_layers_stays_on_the_device(entry: Entry) -> None:
    """Every operator and phase stays on the device, with both streams, and dense noise is there too."""
    notes = Notes(entry)
    with fake_cuda() as cuda:
        works = works_of(entry)
        assert works
        for case, work in works.items():
            for phase in work.phases if case != CASES[0] else ():
                with on(f"{case.label} {phase}"):
                    notes.run(work, phase, cuda)
        if isinstance(entry.scheme, AbstractScheme) and not is_wrapper(entry) and entry.operators is None:
            with on("philox"):
                check_philox(entry.scheme, cuda, waits_expected(entry))
    notes.check()


@parametrize_variants(ONE_OF_A_SCHEME)
@pytest.mark.usefixtures("short_checks")
def test_checks_and_quality_stay_on_the_device(entry: Entry) -> None:
    """All checks and quality metrics of each scheme stay on the device.

    One variant of each: options change only phases and dense noise, which are tested above. Wrappers are left
    out: they draw the noise of another scheme, and kernels compute nothing here.
    """
    with fake_cuda():
        works = works_of(entry)
        for case, work in works.items():
            with on(case.label):
                if case in VERIFIED:
                    work.verify()
                for phase in work.phases if case in PRECHECKED else ():
                    with on(phase):
                        work.enter(phase)
                        fingerprints = validation.precheck(work, phase, torch.cuda.synchronize)
                        validation.postcheck(work, phase, fingerprints)
        with on("quality"), contextlib.suppress(UnavailableError):
            list(next(iter(works.values())).quality())


def check_philox(scheme: AbstractScheme[Any], cuda: FakeDevice, waits: set[Phase]) -> None:
    """Sample, evaluate and update with the stream ``philox``, at a step that is a tensor on the device."""
    population = impls.perturb(nn.Linear(5, 6, device="cuda"), scheme, members=4, sigma=0.1, stream="philox")
    x, utilities = torch.randn(8, 5, device="cuda"), torch.randn(4, device="cuda")
    step = 1 if "sample" in waits else torch.ones((), dtype=torch.int64, device="cuda")
    cuda.clear()
    noise = population.sample(step)
    assert "sample" in waits or not cuda.waits, cuda.waits
    cuda.waits.clear()
    _, record = population.call_with_activations(x, noise=noise)
    assert not cuda.waits
    population.update(noise, utilities, record)
    assert "update" in waits or not cuda.waits, cuda.waits
    assert not cuda.draws
    assert population.dense_noise(noise)["weight"].is_cuda


@parametrize_variants(TRAINING)
def test_a_training_step_stays_on_the_device(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model stays on the device: its check in float64, its step in float32."""
    monkeypatch.setitem(backward.DEPTHS, backward.MANY_SMALL, 3)
    notes = Notes(entry)
    with fake_cuda() as cuda:
        for case in CHECKS:
            for dtype in ("float64", "float32"):
                typed = msgspec.structs.replace(case, dtype=dtype)
                if entry.supports(typed) and (work := build_if_supported(entry, typed)) is not None:
                    with on(typed.label):
                        if dtype == "float64":
                            work.verify()
                        for phase in work.phases if dtype == "float32" else ():
                            notes.run(work, phase, cuda)
    notes.check()


def test_functions_of_subprocesses_stay_on_the_device() -> None:
    """Functions that a search runs in a subprocess stay on the device; here they are called directly."""
    population, compiled = (
        next(case for case in CHECKS if case.operator == name)
        for name in ("Architectures", "CompiledArchitectures")
    )
    with fake_cuda():
        search = Search(population, "cuda", 0)
        assert len(memory_reclaim.run_trial(search, architectures(population, 0)[:2]).losses) == 24
        widths = tuple(architectures(compiled, 0)[:2])
        plan = shared_compile.Plan(Search(compiled, "cuda", 0), "eager", widths, timed=False)
        assert not shared_compile.run_trial(plan).wrong


def test_a_run_on_the_device_measures_every_phase() -> None:
    """A run completes its check, precheck, times, footprint, postcheck and quality on the device."""
    plan = Plan(
        entries=[REGISTRY.entries[name] for name in ("Base", "Naive", "LowRank(rank=1)")],
        cases=(CASES[1],),
        phases=(*PHASES, QUALITY),
        cell_s=0.01,
        checks=(LINEAR,),
        device="cuda",
    )
    rows: list[Record] = []
    with fake_cuda():
        tools = Instruments(
            clocks=(HostClock(),),
            # Fake tensors allocate nothing, and a call that returns memory it did not allocate fails.
            footprint=lambda call: memory.footprint(call, "cuda")._replace(peak_bytes=2**40),
            trace=lambda _: Trace(launches=1, waits=(), other_streams=()),
            synchronize=torch.cuda.synchronize,
        )
        run_cases(plan, rows.extend, lambda *_: None, tools)
    assert not [row for row in rows if isinstance(row, Skipped) and row.status == "failed"]
    phases = {row.phase for row in rows if isinstance(row, Measurement) and row.variant.scheme == "LowRank"}
    assert phases == set(plan.phases)


class Planted(Perturbed):
    """A scheme whose forward applies a planted action to its output."""

    act: ClassVar[Callable[[Tensor], object]]

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: DenseNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y = super().forward(op, weight, noise, x, sigma)
        type(self).act(y)
        return y


def run_planted(act: Callable[[Tensor], object], cuda: FakeDevice, phases: Sequence[Phase] = PHASES) -> Notes:
    """Run the phases of a scheme with an action planted in its forward."""
    notes = Notes(REGISTRY.entries["Perturbed"])
    work = build(type("Planted", (Planted,), {"act": staticmethod(act)})(), LINEAR, "cuda", 0)
    for phase in phases:
        notes.run(work, phase, cuda)
    return notes


WAITING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda y: y.sum().item(),
    "tolist": lambda y: y.tolist(),
    "if": lambda y: bool((y > 0).any()),
    "format": lambda y: f"{y.sum():.2f}",
    "numpy": np.asarray,
    "boolean index": lambda y: y[y > 0],
    "histogram": lambda y: torch.histc(y, 4),
    "index on the CPU": lambda y: y[torch.zeros(1, dtype=torch.long)],
    "copy to the host": lambda y: y.cpu(),
    "copy from the host": lambda y: y + torch.zeros(y.shape[-1]).to(y.device),
    "number to the device": lambda y: y * torch.tensor(2.0, device=y.device),
    "synchronize": lambda _: torch.cuda.synchronize(),
}


def test_a_planted_wait_is_found() -> None:
    """A planted wait is found in the phases that run the forward, and capturing it raises."""
    with fake_cuda() as cuda:
        run_planted(lambda y: y.abs(), cuda).check()
        notes = run_planted(lambda y: y.sum().item(), cuda)
        assert notes.waits.keys() == {"forward", "step"}
        with pytest.raises(AssertionError, match=r"^\{'forward': \{'_local_scalar_dense"):
            notes.check()
        for name, act in WAITING.items():
            assert run_planted(act, cuda, ["forward"]).waits.keys() == {"forward"}, name
            y = torch.ones(3, 2, device="cuda")
            with on(name), pytest.raises(CaptureError, match="not permitted when stream is capturing"):
                cuda.capture(partial(act, y), 1)


def number(y: Tensor) -> Tensor:
    """Return a CPU tensor without dimensions."""
    return torch.zeros((), dtype=y.dtype)


MIXED: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda y: y + torch.zeros(y.shape[-1], dtype=y.dtype),
    "in place": lambda y: torch.zeros(y.shape[-1], dtype=y.dtype).add_(y[0, 0, 0]),
    "number in place": lambda y: number(y).add_(y.sum()),
    "number in a list": lambda y: torch.stack([y.sum(), number(y)]),
    "gradient": lambda y: setattr(y.detach(), "grad", torch.zeros(y.shape, dtype=y.dtype)),
    "index on the device": lambda y: torch.zeros(9)[y.argmax().view(1)],
    "generator of the CPU": lambda y: y.normal_(generator=torch.Generator()),
}


def test_a_planted_tensor_of_the_cpu_is_found() -> None:
    """An operator that mixes CPU and CUDA tensors raises, as on a GPU."""
    with fake_cuda() as cuda:
        for name, act in MIXED.items():
            with on(name), pytest.raises(DeviceMixError):
                run_planted(act, cuda, ["forward"])


def test_a_kernel_that_is_given_a_cpu_tensor_raises() -> None:
    """A launch raises if any argument is a CPU tensor."""
    pytest.importorskip("triton")
    from impls.kernels.dropout import dropout_product  # noqa: PLC0415  it needs triton

    with fake_cuda() as cuda:
        x, weight, y = (torch.ones(*shape, device="cuda") for shape in ((1, 4, 1, 8), (6, 8), (1, 4, 1, 6)))
        kept = torch.ones(4, 6, dtype=torch.bool)
        dropout_product(x, weight, kept.to("cuda"), 2.0, 0.0, y, "out")
        assert cuda.launches == ["product_kernel"]
        with pytest.raises(DeviceMixError, match="product_kernel"):
            dropout_product(x, weight, kept, 2.0, 0.0, y, "out")


def test_the_fake_device_allows_what_a_gpu_allows() -> None:
    """Zero-dimensional CPU tensors, masked writes of numbers and moves within a device are allowed."""
    with fake_cuda() as cuda:
        y, number = torch.ones(3, 2, device="cuda"), torch.tensor(2.0)
        y.mul_(number).fill_(number).masked_fill_(y > 0, number)
        y[0], y[y > 1] = 3.0, 4.0
        assert y.to("cuda") is y
        nn.Linear(2, 3, device="cuda")(y).sum().backward()
        assert not cuda.waits
        assert y.tolist() == [[4.0, 4.0]] * 3
        # A replay reads the present values of its inputs and writes into the memory of its results.
        x, total = torch.ones(3, device="cuda"), torch.zeros(2, device="cuda")
        (replay,) = cuda.capture(lambda: total.add_((2 * x).cumsum(0)[1:]), 1)
        x.fill_(5.0)
        total.zero_()
        assert replay() is total
        assert total.tolist() == [20.0, 30.0]


def test_an_update_takes_utilities_from_the_cpu() -> None:
    """Utilities may be on the CPU, where fitness is often computed; the gradient is the same."""
    schemes: list[AbstractScheme[Any]] = [Perturbed(), impls.DropoutMask(), impls.LowRank(1)]
    for scheme, antithetic in itertools.product(schemes, (False, True)):
        gradients = []
        with fake_cuda() as cuda, on(str(scheme)):
            for device in ("cpu", "cuda"):
                model = nn.Linear(3, 2, device="cuda")
                nn.init.constant_(model.weight, 0.5)
                population = impls.perturb(model, scheme, members=4, sigma=0.1, antithetic=antithetic)
                utilities = torch.arange(8.0 if antithetic else 4.0, device=device)
                noise = population.sample(0)
                y, record = population.call_with_activations(torch.ones(8, 3, device="cuda"), noise=noise)
                cuda.clear()
                population.update(noise, utilities, record)
                # They are copied to the device once, not for each layer and use.
                assert len(cuda.waits) == (device == "cpu")
                assert y.device.type == "cuda"
                assert model.weight.grad is not None
                gradients.append(model.weight.grad.tolist())
        assert gradients[0] == gradients[1]


def test_weights_and_rows_of_a_case_are_drawn_on_its_device() -> None:
    """Inputs are drawn on the device because large ones take seconds on a CPU."""
    for case in (LINEAR, CONV, LINEAR_BITS, CONV_BITS):
        with fake_cuda() as cuda:
            assert {tensor.device.type for tensor in layer(case, "cuda", 0).parameters()} == {"cuda"}
            assert {tensor.device.type for tensor in rows(case, "cuda", 0)} == {"cuda"}
            assert not cuda.waits
