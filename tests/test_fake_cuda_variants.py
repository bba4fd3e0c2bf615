"""Every registered variant on fake CUDA tensors: no tensor of another device, no wait that nobody expects.

See tests/fake_cuda_tensors.py for what that device does. The code that checks and measures results runs on it as
well: the exact check, the audit, the footprint, the quality figures.
"""

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import impls
from esbench.measure import audit, memory
from esbench.measure.cuda import Streak
from esbench.measure.quality import rows
from esbench.measure.stopwatch import Stopwatch
from esbench.measure.timing import CudaClock
from esbench.plugins import load
from esbench.records import Case, Phase
from esbench.registry import REGISTRY, Entry, UnavailableError, Workload, WrongResultError, build
from impls import oracle, truth
from impls.inputs import is_packed
from impls.layers import PerturbedLayer
from impls.noise import NoiseStream
from impls.operators import AbstractOperator
from impls.scheme import AbstractAdditiveScheme, AbstractScheme
from impls.schemes.dense import DenseNoise, Perturbed
from impls.wrapping import AbstractWrapper
from impls.training.workloads import stacks
from tests.fake_cuda_tensors import CudaTensor, DeviceMixError, FakeCuda, fake_cuda

load("impls")

WAITS: dict[str, tuple[Phase, ...]] = {
    # Utilities and sigma become numbers for torch.add.
    "Loop": ("forward", "update", "step"),
    # Which blocks are kept is decided on the host.
    "*DropoutBlocks*": ("sample", "step"),
    # Probabilities that are NaN raise.
    "*Binary*": ("sample", "step"),
    # The guard of OptimizerInBackward and RigL inside of the backward pass looks whether gradients are finite.
    "StepInBackward(*guarded=True)": ("step",),
    "RigL(by=backward)": ("step",),
    # Counts connections; looks through a sample.
    "FullSort": ("update",),
    "PartialSelection(narrowed=True)": ("update",),
    # Candidates are made on the host, and digests of their weights are taken there.
    "*Search*": ("step",),
    "OneArchitecture": ("step",),
}
"""Variants and the phases in which they wait for the device. Everything else must never wait."""

CHECKS = REGISTRY.find_suite("check").cases
LINEAR, CONV, _, LINEAR_BITS, CONV_BITS = (case for case in CHECKS if case.operator not in REGISTRY.reserved)
CASES = (
    LINEAR,
    msgspec.structs.replace(LINEAR, repeats=2, dtype="bfloat16", antithetic=True),
    msgspec.structs.replace(CONV, dtype="float32"),
    LINEAR_BITS,
    msgspec.structs.replace(CONV_BITS, dtype="float32"),
)
"""The exact check is of float64; other types are held to a few members' own weights, and audited."""

LAYERS = [
    entry
    for entry in REGISTRY.select(("*",))
    if entry.operators is None or not set(entry.operators) <= REGISTRY.reserved
]
"""Variants of layers."""

PROCESSES = ("*reclaim=*", "SharedLayer*", "WholeModel*", "EagerModels")
"""They compile, or ask the allocator, in processes of their own: tests below run what those do."""

TRAINING = [
    entry
    for entry in REGISTRY.select(("*",))
    if entry not in LAYERS and not any(fnmatch.fnmatchcase(entry.variant.name, glob) for glob in PROCESSES)
]
"""Training steps."""


def named(entries: Sequence[Entry]) -> pytest.MarkDecorator:
    """A test for each variant."""
    return pytest.mark.parametrize("entry", entries, ids=lambda entry: entry.variant.name)


def waits_expected(entry: Entry) -> set[Phase]:
    """Return the phases in which a variant may wait."""
    globs = (glob for glob in WAITS if fnmatch.fnmatchcase(entry.variant.name, glob))
    return {phase for glob in globs for phase in WAITS[glob]}


def draws_expected(entry: Entry) -> set[Phase]:
    """Return the phases in which a variant uses generators: all draws of the stream ``block``."""
    if not isinstance(entry.scheme, AbstractScheme) or entry.scheme.stream != "block":
        return set()
    with fake_cuda():
        layer = (nn.Linear if entry.operators is None else impls.BinarizedLinear)(8, 8, device="cuda")
        noise = PerturbedLayer.of("", layer, entry.scheme).sample(0, 0, range(1), device="meta")
    draws_again = any(isinstance(value, NoiseStream) for value in vars(noise.weight).values())
    return {"sample", "step", *(("forward", "update") if draws_again else ())}


def is_kernel(entry: Entry) -> bool:
    """Whether a Triton kernel computes, which does not run here: results are zeros."""
    return entry.variant.scheme.startswith("Fused")


@contextlib.contextmanager
def wrong_results(entry: Entry) -> Iterator[None]:
    """Let wrong results pass where kernels did not run."""
    with contextlib.suppress(*[WrongResultError] if is_kernel(entry) else []):
        yield


@pytest.fixture
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take moments over a few steps, too few to judge them; wait for nothing in the audit."""
    expect = oracle._expect

    def expected(*arguments: Any) -> None:
        with contextlib.suppress(WrongResultError):
            expect(*arguments)

    monkeypatch.setattr(oracle, "STEPS", 2)
    monkeypatch.setattr(oracle, "_expect", expected)
    monkeypatch.setattr(audit, "PATIENCE_S", (0.0, 0.0))


@pytest.fixture
def kernels_pass(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare what kernels should have computed, and accept it."""
    compare = truth.compare

    def compared(what: str, got: Tensor | None, *arguments: Any) -> None:
        with contextlib.suppress(WrongResultError):
            compare(what, got, *arguments)

    if is_kernel(request.getfixturevalue("entry")):
        monkeypatch.setattr(truth, "compare", compared)
        monkeypatch.setattr(oracle, "compare", compared)


@dataclass
class Device:
    """As much of a device as a clock needs to capture calls."""

    cuda: FakeCuda

    def capture(self, call: Callable[[], object], turns: int) -> Sequence[Callable[[], object]]:
        """Call as often as there are turns, and capture as many calls."""
        for _ in range(turns):
            call()
        return [self.cuda.capture(call) for _ in range(turns)]


class Notes:
    """The phases of a variant that wait for the device, and those that use generators, with what did it."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.waits: dict[Phase, set[str]] = {}
        self.draws: dict[Phase, set[str]] = {}

    def run(self, work: Workload, phase: Phase, cuda: FakeCuda) -> None:
        """Run a phase; where it neither waits nor draws it must be possible to capture and replay it."""
        work.enter(phase)
        call, turns = work.phases[phase], max(1, len(work.inputs))
        cuda.clear()
        for _ in range(turns):
            call()
        if cuda.waits:
            self.waits.setdefault(phase, set()).update(cuda.waits)
        if cuda.draws:
            self.draws.setdefault(phase, set()).update(cuda.draws)
        if not cuda.waits and not cuda.draws:
            work.enter(phase)
            replay = CudaClock("graph", Device(cuda), Streak()).prepare(call, turns)
            audit.check_replay(work, phase, replay)

    def check(self, entry: Entry) -> None:
        """Hold them to what is expected of the variant."""
        assert self.waits.keys() == waits_expected(entry), self.waits
        assert self.draws.keys() == draws_expected(entry), self.draws


def cases_of(entry: Entry) -> Iterator[Case]:
    """Yield small cases of every operator that a variant of layers is for."""
    of_bits = entry.operators is not None
    return (case for case in CASES if entry.supports(case) and is_packed(case) is of_bits)


@named(LAYERS)
def test_a_variant_of_layers_stays_on_the_device(
    entry: Entry, short_checks: None, kernels_pass: None
) -> None:
    """On every operator and in every phase, with its exact check, its audit and its quality figures."""
    notes, built = Notes(), 0
    with fake_cuda() as cuda:
        for case in cases_of(entry):
            with on(case.label):
                try:
                    work = build(entry.scheme, case, "cuda", 0)
                except UnavailableError:
                    continue
                built += 1
                with wrong_results(entry):
                    work.verify()
                for phase in work.phases:
                    with on(phase):
                        notes.run(work, phase, cuda)
                        if case.dtype != "float64":  # which is checked, and not measured
                            audited(entry, work, phase)
        with on("quality"), contextlib.suppress(UnavailableError), wrong_results(entry):
            list(work.quality())
        if isinstance(entry.scheme, AbstractScheme) and entry.operators is None and not is_kernel(entry):
            with on("philox"):
                check_philox(entry.scheme, cuda, waits_expected(entry))
    assert built
    notes.check(entry)


def audited(entry: Entry, work: Workload, phase: Phase) -> None:
    """Audit a phase, before and after it is timed."""
    work.enter(phase)
    with wrong_results(entry):
        seen = audit.rehearse(work, phase, torch.cuda.synchronize, Stopwatch())
        audit.confirm(work, phase, seen)


def check_philox(scheme: AbstractScheme[Any], cuda: FakeCuda, waits: set[Phase]) -> None:
    """Sample, evaluate and update with the stream that a graph can capture."""
    population = impls.perturb(nn.Linear(5, 6, device="cuda"), scheme, members=4, sigma=0.1, stream="philox")
    x, utilities = torch.randn(8, 5, device="cuda"), torch.randn(4, device="cuda")
    for phase in ("sample", "forward", "update"):
        cuda.clear()
        if phase == "sample":
            noise = population.sample(1)
        elif phase == "forward":
            _, record = population.recorded(x, noise)
        else:
            population.update(noise, utilities, record, validate=False)
        assert not cuda.draws
        assert phase in waits or not cuda.waits, f"{phase}: {cuda.waits}"


@contextlib.contextmanager
def on(name: str) -> Iterator[None]:
    """Name what is looked at where it raises."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"on {name}")
        raise


@named(TRAINING)
def test_a_training_step_stays_on_the_device(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every model; what the reference of a step computes too."""
    monkeypatch.setitem(stacks.DEPTHS, stacks.MANY_SMALL, 3)
    notes = Notes()
    with fake_cuda() as cuda:
        for case in CHECKS:
            if not entry.supports(case):
                continue
            with on(case.label), contextlib.suppress(UnavailableError):
                work = build(entry.scheme, case, "cuda", 0)
                for phase in work.phases:
                    notes.run(work, phase, cuda)
                work.verify()
    notes.check(entry)
