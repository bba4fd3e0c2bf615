"""Variants that cheat are caught, and their rows say how they cheated."""

import dataclasses
import gc
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn.modules import module
from torch.optim import optimizer
from torch.overrides import BaseTorchFunctionMode
from typing_extensions import override

import impls
from esbench.measure import memory
from esbench.measure.instruments import Instruments, instruments
from esbench.measure.profiler import Trace
from esbench.registry import Entry
from esbench.schema import Case, Measurement, Phase, Record, Skipped, Variant
from esbench.workload import Workload, WrongResultError
from impls.perturbation.noise import NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.schemes.dense import DenseNoise
from impls.verify import checks, reference
from tests.fakes import FakeClock, FakeScheme, FakeWorkload, World
from tests.loop_cases import measure, measurements

Act = Callable[[Phase, int, int], object]
"""Maps the phase, the number of the call and its number in the phase to a result."""


def failure_of(lines: list[Record], cheat: str = "Cheat") -> str:
    """Return why the cheat failed; check that only the honest variant was measured."""
    (row,) = (row for row in lines if isinstance(row, Skipped))
    assert (row.variant.scheme, row.status) == (cheat, "failed")
    assert {line.variant.scheme for line in lines if isinstance(line, Measurement)} == {"Honest"}
    return row.reason


def reason_of(act: Act, world: World, tools: Instruments | None = None, phase: Phase = "forward") -> str:
    """Measure an honest variant, which must not be blamed, then a cheat; return why the cheat failed."""
    entries = [
        FakeScheme("Honest", world, phases=(phase,)).entry(),
        FakeScheme("Cheat", world, phases=(phase,), act=act, confirms=False).entry(),
    ]
    summary, lines = measure(*entries, tools=tools, phases=(phase,))
    assert (summary.measured, summary.failed) == (1, 1)
    return failure_of(lines)


def result(turn: int) -> Tensor:
    """Return the result of an honest call."""
    return torch.full((4,), float(turn))


def since(number: int, action: Callable[[], object]) -> Act:
    """Return an honest act that also performs an action at the call with this number."""

    def act(_: Phase, call: int, turn: int) -> Tensor:
        if call == number:
            action()
        return result(turn)

    return act


def test_a_call_that_cheats_is_caught() -> None:
    """An old result, a late write, changed noise, kept memory and work on another stream have reasons."""
    world, first, pending, kept = World(), result(1), list[Callable[[], object]](), list[Tensor]()

    def write_late(_: Phase, __: int, turn: int) -> Tensor:
        y = torch.zeros(4) + turn / 2
        pending.append(partial(y.copy_, result(turn)))
        return y

    def synchronize() -> None:
        while pending:
            pending.pop()()

    def change_noise(_: Phase, number: int, turn: int) -> Tensor:
        return result(turn + (number >= 5))

    def keep_memory(_: Phase, __: int, turn: int) -> Tensor:
        kept.append(torch.ones(1000))
        return result(turn)

    def trace(call: Callable[[], object]) -> Trace:
        call()
        return Trace(launches=3, other_streams=(17,) if world.log[-1] == "Cheat" else ())

    old = "returns the same result for different inputs: it reuses an earlier result"
    late = "returned before its result was complete: the values changed after the call"
    footprint = partial(memory.footprint, device="cpu")
    cheats: list[tuple[Phase, Act, dict[str, Any], str]] = [
        ("sample", lambda *_: first.clone(), {}, old),
        ("forward", lambda *_: first.clone(), {}, old),
        ("update", lambda *_: first.clone(), {}, old),
        ("forward", write_late, {"synchronize": synchronize}, late),
        ("sample", change_noise, {}, "draws different noise for the same step before and after timing"),
        (
            "forward",
            keep_memory,
            {"footprint": footprint},
            "leaves 4000 bytes more allocated after each call",
        ),
        ("forward", since(0, list), {"trace": trace}, "works on another stream (17), where it is not timed"),
    ]
    for phase, act, changes, reason in cheats:
        tools = dataclasses.replace(world.tools, **changes)
        assert reason_of(act, world, tools, phase) == f"wrong result: {phase} {reason}"


def test_a_call_that_synchronizes_has_a_label() -> None:
    """A variant that synchronizes inside keeps its time, because it may have to; its row has a label."""
    world = World()
    trace = Trace(launches=3, waits=("cudaStreamSynchronize", "cudaStreamSynchronize"), other_streams=())
    tools = dataclasses.replace(world.tools, trace=lambda _: trace)
    _, lines = measure(FakeScheme("A", world), tools=tools, phases=("forward",))
    (row,) = measurements(lines)
    assert row.labels == ("synchronizes inside: cudaStreamSynchronize, 2 times a call",)


def test_a_call_that_changes_a_global_setting_is_caught() -> None:
    """Changing a global torch setting fails, in the first call or later; the old value is restored."""
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    contexts: list[torch.inference_mode] = []

    def enter_inference_mode() -> None:
        contexts.append(torch.inference_mode())  # leaves the mode when it is freed
        contexts[-1].__enter__()

    cores = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    changes: tuple[tuple[Callable[[], object], str], ...] = (
        (partial(torch.set_num_threads, 3), f"the number of threads from {threads} to 3"),
        (
            partial(torch.set_default_dtype, torch.float64),
            "the default dtype from torch.float32 to torch.float64",
        ),
        (partial(torch.set_float32_matmul_precision, "medium"), "the precision of float32 products from"),
        (partial(torch.backends.mkldnn.set_flags, _enabled=False), "the use of oneDNN from True to False"),
        (
            partial(torch.backends.cudnn.set_flags, _benchmark=True),
            "the search for cuDNN algorithms from False to True",
        ),
        (partial(gc.set_threshold, 1, 1, 1), "the thresholds of garbage collection from"),
        (
            partial(module.register_module_forward_hook, lambda *_: None),
            "the global hooks of modules from (0, 0, 0) to (0, 1, 0)",
        ),
        (
            partial(torch.autograd.set_detect_anomaly, True),  # noqa: FBT003  # torch's signature
            "the detection of anomalies from False to True",
        ),
        (enter_inference_mode, "gradients from True to False, the inference mode from False to"),
        (partial(sys.setrecursionlimit, 5000), "the recursion limit from"),
        (
            partial(torch.set_flush_denormal, True),  # noqa: FBT003  # the same
            "the flushing of denormal numbers from False to True",
        ),
        (
            partial(optimizer.register_optimizer_step_post_hook, lambda *_: None),
            "the global hooks of optimizers from (0, 0) to (0, 1)",
        ),
        (BaseTorchFunctionMode().__enter__, "the torch function modes from 0 to 1"),
        (
            partial(resource.setrlimit, resource.RLIMIT_NOFILE, (files - 1, most_files)),
            f"RLIMIT_NOFILE from {files} to {files - 1}",
        ),
        (partial(sys.setprofile, lambda *_: None), "the profile function from None to <function"),
        *([(partial(os.sched_setaffinity, 0, {1}), "the processors from {")] if {0, 1} <= cores else []),
    )
    for change, words in changes:
        for number in (1, 12):
            reason = reason_of(since(number, change), World())
            assert reason.startswith(f"wrong result: it changed a global setting: {words}")
            assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, torch.float32)
            assert (torch.empty(0).device.type, gc.get_threshold()) == ("cpu", thresholds)
            assert not cores or os.sched_getaffinity(0) == cores

    # Earlier, reading a result on this device fails.
    reason = reason_of(since(12, partial(torch.set_default_device, "meta")), World())
    assert reason.startswith("wrong result: it changed a global setting: the default device from cpu to meta")

    def change_and_raise() -> None:
        torch.set_default_device("meta")
        raise ValueError

    for number in (1, 8, 12):
        assert reason_of(since(number, change_and_raise), World()) == "ValueError"
        assert torch.empty(0).device.type == "cpu", number


def test_a_graph_that_skips_work_is_caught() -> None:
    """A graph replayed on new inputs must return the result of the call; the old inputs are restored."""
    world, buffers = World(), (torch.ones(4), torch.full((4,), 2.0))

    class SkippingClock(FakeClock):
        method = "graph"

        @override
        def prepare(self, call: Callable[[], object], turns: int) -> Callable[[], object]:
            captured = call()
            return lambda: captured

    def act(_: Phase, __: int, turn: int) -> Tensor:
        return buffers[(turn - 1) % 2] * 3

    scheme = FakeScheme("Reader", world, inputs=buffers, act=act)
    tools = dataclasses.replace(world.tools, clocks=(SkippingClock(),))
    _, lines = measure(scheme, tools=tools, phases=("forward",))
    (row,) = (row for row in lines if isinstance(row, Skipped))
    assert row.method == "graph"
    assert row.reason.endswith(": a graph does not repeat work on the CPU")
    assert [buffer.tolist() for buffer in buffers] == [[1.0] * 4, [2.0] * 4]  # the inputs are restored


@dataclass(eq=False)
class Memory:
    """State that a cheat keeps between calls: counts of calls, the last step, and earlier results."""

    forwards: int = 0
    sums: int = 0
    step: object = 0
    ended_s: float = 0.0
    results: dict[object, Tensor] = dataclasses.field(default_factory=dict)

    def overwrite(self, values: Tensor) -> Tensor:
        """Return a copy of values, in the same memory at each call."""
        return self.results.setdefault(values.shape, torch.empty_like(values)).copy_(values)


Sampling = Callable[[Memory, Callable[[NoiseStream], Tensor], NoiseStream], Tensor]
"""Maps its state, a function that draws the correct noise of a stream, and the stream to noise."""
Forward = Callable[[Memory, Callable[..., Tensor], Tensor], Tensor]
"""Maps its state, a function that computes the correct output, from changed noise if it is given a function
that changes it, and the input to an output."""
Summing = Callable[[Memory, Callable[[Tensor], Tensor], Tensor], Tensor]
"""Maps its state, a function that sums the members correctly, and the utilities to an update."""


@dataclass(frozen=True, eq=False)
class Cheating(impls.Perturbed):
    """A scheme whose noise, forward or update may be something else than the correct result."""

    sampling: Sampling = lambda _, draw, stream: draw(stream)
    passing: Forward = lambda _, compute, x: compute()  # noqa: ARG005  # the names say what comes
    summing: Summing = lambda _, add_up, utilities: add_up(utilities)
    memory: Memory = dataclasses.field(default_factory=Memory)

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        def draw(stream: NoiseStream) -> Tensor:
            return super(Cheating, self).sample(weight, stream).values

        self.memory.step = stream.step
        return DenseNoise(self.sampling(self.memory, draw, stream))

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: DenseNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        def compute(change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
            changed = DenseNoise(change(noise.values)) if change else noise
            return super(Cheating, self).forward(op, weight, changed, x, sigma)

        self.memory.forwards += 1
        return self.passing(self.memory, compute, x)

    @override
    def weighted_sum(self, noise: DenseNoise, utilities: Tensor) -> Tensor:
        self.memory.sums += 1
        return self.summing(self.memory, partial(super().weighted_sum, noise), utilities)


def always_the_first(memory: Memory, compute: Callable[[], Tensor], x: Tensor) -> Tensor:
    """Return the first correct result forever."""
    return memory.results.setdefault(tuple(x.shape), compute()).clone()


def stale_after_some_calls(memory: Memory, compute: Callable[[], Tensor], x: Tensor) -> Tensor:
    """Return the correct result for the first calls, then an old one."""
    if memory.forwards <= 4:
        memory.results[tuple(x.shape)] = compute()
    return memory.results[tuple(x.shape)].clone()


def by_address(memory: Memory, compute: Callable[[], Tensor], x: Tensor) -> Tensor:
    """Return the result cached for the input's address, even if the data there have changed."""
    return memory.results.setdefault((tuple(x.shape), x.data_ptr()), compute()).clone()


def nothing_after_the_first_call(memory: Memory, compute: Callable[[], Tensor], _: Tensor) -> Tensor:
    """Return zeros after the first call, as if the noise dropped every input."""
    return compute() if memory.forwards <= 1 else torch.zeros_like(compute())


def negated_after_some_calls(memory: Memory, compute: Callable[[], Tensor], _: Tensor) -> Tensor:
    """Return the result with its sign flipped after some calls, so that its norm is right."""
    return compute() if memory.forwards <= 4 else -compute()


def honest_after_a_pause(memory: Memory, compute: Callable[[], Tensor], _: Tensor) -> Tensor:
    """Return the correct result unless the last call was less than 2 ms ago."""
    pause_s, memory.ended_s = time.monotonic() - memory.ended_s, time.monotonic()
    y = compute() if pause_s > 0.002 or memory.forwards < 20 else 2 * compute()
    memory.ended_s = time.monotonic()
    return y


def nan_while_no_garbage_is_collected(_: Memory, compute: Callable[[], Tensor], __: Tensor) -> Tensor:
    """Return NaN while the collector is off, which shows that calls are being timed."""
    return compute() if gc.isenabled() else compute() * math.nan


def unperturbed_now_and_then(memory: Memory, compute: Callable[[], Tensor], x: Tensor) -> Tensor:
    """Return an output of 0 in every 17th call in float32."""
    is_skipped = x.dtype == torch.float32 and memory.forwards % 17 == 0
    return torch.zeros_like(compute()) if is_skipped else compute()


def unperturbed_after_step_0(memory: Memory, compute: Callable[..., Tensor], _: Tensor) -> Tensor:
    """Skip the perturbation in the forward of every step after step 0."""
    return compute(torch.zeros_like) if memory.step else compute()


def without_member(number: int) -> Forward:
    """Leave the perturbation of one member among many out."""

    def leave_out(noise: Tensor) -> Tensor:
        noise = noise.clone()
        noise[number : number + 1] = 0
        return noise

    return lambda _, compute, x: compute(leave_out)  # noqa: ARG005  # the names say what comes


def half_a_sum_now_and_then(memory: Memory, add_up: Callable[[Tensor], Tensor], utilities: Tensor) -> Tensor:
    """Return an update that is half as long in every 17th call in float32."""
    is_skipped = utilities.dtype == torch.float32 and memory.sums % 17 == 0
    return add_up(utilities * 0.5 if is_skipped else utilities)


def old_sum(memory: Memory, add_up: Callable[[Tensor], Tensor], utilities: Tensor) -> Tensor:
    """Sum the members correctly at first and later return an old sum."""
    if memory.sums <= 4:
        memory.results["sum"] = add_up(utilities)
    return memory.results["sum"].clone()


def repeated_members(_: Memory, draw: Callable[[NoiseStream], Tensor], stream: NoiseStream) -> Tensor:
    """Repeat the noise after 128 members."""
    noise = draw(stream)
    return noise[torch.arange(len(noise)) % 128]


def mirrored_members(_: Memory, draw: Callable[[NoiseStream], Tensor], stream: NoiseStream) -> Tensor:
    """Negate the noise of the first 128 members for the next 128."""
    noise = draw(stream)
    members = torch.arange(len(noise), device=noise.device)
    signs = 1 - 2 * (members // 128 % 2)
    return noise[members % 128] * signs.view(-1, *[1] * (noise.dim() - 1)).to(noise.dtype)


NO_NOISE_AFTER_STEP_0 = Cheating(sampling=lambda _, draw, stream: draw(stream) * (stream.step == 0))
"""Its forward and update agree."""
STALE_NOISE = Cheating(
    sampling=lambda _, draw, stream: draw(dataclasses.replace(stream, step=int(stream.step != 0)))
)
"""The noise of step 1 in every step after step 0."""
NEGATED_UPDATE = Cheating(
    summing=lambda memory, add_up, utilities: add_up(-utilities if memory.step else utilities)
)
"""An update with the wrong sign after step 0."""
FEW_UTILITIES = Cheating(
    summing=lambda _, add_up, utilities: add_up(utilities * (utilities != 0).cumsum(0).le(16))
)
"""An update that sums at most 16 members that have a utility."""


def measured_here(case: Case, *phases: Phase, seed: int = 0, **schemes: object) -> list[Record]:
    """Measure schemes on a real case with the instruments of this machine."""
    entries = [
        Entry(variant=Variant(scheme=name), scheme=scheme, source="", package="tests")
        for name, scheme in schemes.items()
    ]
    with instruments("cpu") as tools:
        _, lines = measure(*entries, tools=tools, cases=(case,), phases=phases, cell_s=0.01, seed=seed)
    return lines


def reason_here(case: Case, phase: Phase, cheat: impls.Perturbed) -> str:
    """Measure a cheat and a scheme that cheats nowhere on a real case; return why the cheat failed."""
    return failure_of(measured_here(case, phase, Cheat=cheat, Honest=Cheating()))


LATE = "found after timing, on new inputs"


def test_a_scheme_that_cheats_is_caught_on_a_real_case() -> None:
    """Real instruments catch each cheat, and the honest scheme is measured.

    The update is compared with the sum of written-out noise, for utilities that the scheme has not been
    called with.
    """
    case = Case(operator="Linear", out_channels=64, in_channels=64, members=64)
    for cheat, words in (
        (always_the_first, "forward returns the same result for different inputs"),
        (nothing_after_the_first_call, "forward returns the same result for different inputs"),
        (stale_after_some_calls, LATE),
        (by_address, LATE),
        (negated_after_some_calls, LATE),
        (nan_while_no_garbage_is_collected, "forward gives values that are not finite"),
        (honest_after_a_pause, LATE),
        (unperturbed_now_and_then, "forward gives different results for the same input and noise"),
    ):
        assert words in reason_here(case, "forward", Cheating(passing=cheat)), cheat
    case = Case(operator="Linear", out_channels=16, in_channels=16, members=8)
    for summing, words in ((old_sum, LATE), (half_a_sum_now_and_then, "update gives different results")):
        assert words in reason_here(case, "update", Cheating(summing=summing))


@pytest.mark.parametrize("max_dense", [reference.MAX_DENSE_NUMBERS["cpu"], 0], ids=["sum", "product"])
def test_a_step_is_checked_for_all_members_after_step_0(
    monkeypatch: pytest.MonkeyPatch, max_dense: int
) -> None:
    """A step is compared with the reference, whether the dense noise of all members is affordable or not."""
    monkeypatch.setitem(reference.MAX_DENSE_NUMBERS, "cpu", max_dense)
    case = Case(operator="Linear", out_channels=16, in_channels=16, members=64)
    cheats: dict[str, tuple[Cheating, str]] = {
        "HonestAtFirst": (Cheating(passing=unperturbed_after_step_0), "step is off by"),
        "NoNoise": (NO_NOISE_AFTER_STEP_0, "step: after step 0 all members have the same noise of weight"),
        "StaleNoise": (STALE_NOISE, "step: all steps after step 0 have the same noise of weight"),
        "NegatedUpdate": (NEGATED_UPDATE, "step.* is off by"),
        "FewUtilities": (FEW_UTILITIES, "step.* is off by"),
    }
    schemes: dict[str, Any] = {name: cheat for name, (cheat, _) in cheats.items()}
    lines = measured_here(case, "step", Honest=Cheating(), **schemes)
    assert {row.variant.scheme for row in lines if isinstance(row, Measurement)} == {"Honest"}
    reasons = {row.variant.scheme: row.reason for row in lines if isinstance(row, Skipped)}
    assert reasons.keys() == cheats.keys()
    for name, (_, words) in cheats.items():
        assert re.search(f"{words}.*{LATE}", reasons[name]), reasons[name]
    assert re.search(f"update.* is off by.*{LATE}", reason_here(case, "update", FEW_UTILITIES))


def test_all_members_of_a_large_population_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward without one member's noise, and noise that returns after 128 members, are found."""
    monkeypatch.setattr(reference, "random_members", lambda count, _=0: iter([0, count - 1]))
    case = Case(operator="Linear", out_channels=16, in_channels=16, members=256)
    one_member_less = Cheating(passing=without_member(100))
    cheats: tuple[tuple[Cheating, Phase, str], ...] = (
        (one_member_less, "forward", "forward of all members: .* is off by"),
        (Cheating(sampling=repeated_members), "step", "members .* have the same noise of weight"),
        (Cheating(sampling=mirrored_members), "step", "members .* have opposite noise of weight"),
    )
    for scheme, phase, words in cheats:
        assert re.search(f"{words}.*{LATE}", reason_here(case, phase, scheme))
    # Outputs are rounded more, so that the error of one member is less than that of the sum of all.
    case = Case(operator="Linear", out_channels=64, in_channels=128, members=256, dtype="bfloat16")
    reason = reason_here(case, "forward", one_member_less)
    assert re.search(f"forward of all members: .* is off by .*{LATE}", reason)


def test_each_member_of_a_network_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that leaves one member's noise out of 64 is found, as each is checked."""
    draw = reference.random_members  # two members, which the check before timing compares, are given
    monkeypatch.setattr(
        reference,
        "random_members",
        lambda count, most=2: draw(count, most) if most > 2 else iter([0, count - 1]),
    )
    case = Case(operator="DigitsMLP", out_channels=10, in_channels=64, members=64)
    reason = reason_here(case, "forward", Cheating(passing=without_member(10)))
    assert re.search(f"forward is off by .*{LATE}", reason)


def wrong_in_float32(change: Callable[[Tensor, NoiseStream], object]) -> Sampling:
    """Change the noise in the dtype that is timed."""

    def sampling(_: Memory, draw: Callable[[NoiseStream], Tensor], stream: NoiseStream) -> Tensor:
        noise = draw(stream)
        if noise.dtype == torch.float32 and not noise.is_meta:
            change(noise, stream)
        return noise

    return sampling


def test_the_noise_that_is_timed_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong moments, noise that depends on the split, one number per row, and an ignored seed are found."""
    monkeypatch.setattr(checks, "COMPARED_PARTS", 40)
    small = Case(operator="Linear", out_channels=8, in_channels=8, members=512)
    wide = Case(operator="Linear", out_channels=64, in_channels=64, members=256)

    def ignore_seed(values: Tensor, stream: NoiseStream) -> None:
        values.copy_(dataclasses.replace(stream, seed=0).normal("dense", *values.shape[1:]))

    wrongs: tuple[tuple[Case, Callable[[Tensor, NoiseStream], object], str], ...] = (
        (small, lambda values, _: values.mul_(0.8), "variance of the noise of weight is 0"),
        (wide, lambda values, _: values.mul_(0.8), "variance of the noise of weight is 0"),
        (small, lambda values, stream: values.add_(0.2 * (stream.step != 0)), "mean of the noise of weight"),
        (
            small,
            lambda values, _: values[256:].mul_(0.5),
            "noise of weight of a part of the population is off",
        ),
        (
            small,
            lambda values, _: values.copy_(values[..., :1].clone().expand_as(values)),
            "biased: the mean",
        ),
        (small, ignore_seed, "correlation of noise between seeds is 1"),
    )
    for case, wrong, words in wrongs:
        reason = reason_here(case, "sample", Cheating(sampling=wrong_in_float32(wrong)))
        assert re.search(f"{words}.*{LATE}", reason)


@dataclass(frozen=True, eq=False)
class NoisePool(impls.Perturbed):
    """A scheme that draws numbers once, and returns a view of them at each step."""

    memory: Memory = dataclasses.field(default_factory=Memory)

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        if stream.device.type == "meta":
            return super().sample(weight, stream)
        shape = (len(stream.members), *weight.shape)
        size = math.prod(shape)
        if size not in self.memory.results:
            self.memory.results[size] = torch.randn(size + 1000, dtype=weight.dtype)
        first = hash((stream.seed, stream.step, stream.layer)) % 1000
        return DenseNoise(self.memory.results[size][first : first + size].view(shape))


def test_noise_from_a_pool_is_found() -> None:
    """A call that returns more bytes than it allocates returns memory of an earlier call."""
    case = Case(operator="Linear", out_channels=16, in_channels=16, members=128)
    reason = reason_here(case, "sample", NoisePool())
    assert reason.startswith("wrong result: sample returns 131072 bytes but allocates at most 0: it returns")


@dataclass(frozen=True, eq=False)
class CachingNoise(DenseNoise):
    """Dense noise with a cache."""

    cache: dict[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class CachedWeights(impls.Perturbed):
    """A scheme whose first forward stores the members' weights in the noise for the later ones."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        return CachingNoise(super().sample(weight, stream).values)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: DenseNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        assert isinstance(noise, CachingNoise)
        if "weights" not in noise.cache:
            noise.cache["weights"] = weight + sigma * noise.values
        return op.apply_per_member(x, noise.cache["weights"])


def test_results_stay_and_are_not_stored() -> None:
    """Reused memory, a global generator in the update and a cache in the noise fail the check in float64."""
    reused_outputs = Cheating(passing=lambda memory, compute, _: memory.overwrite(compute()))
    reused_noise = Cheating(sampling=lambda memory, draw, stream: memory.overwrite(draw(stream)))
    drawing_update = Cheating(summing=lambda _, add_up, utilities: add_up(utilities) + 0 * torch.rand(()))
    schemes: tuple[tuple[impls.Perturbed, Callable[[checks.Setting], None], str], ...] = (
        (reused_outputs, checks.check, "a later call changed outputs"),
        (reused_noise, checks.check, "a later call changed the noise that sample() had returned"),
        (drawing_update, checks.check, "advanced torch's global random generator"),
        (CachedWeights(), checks.check_results_unchanged, "forward or update stored tensors in the noise"),
    )
    for scheme, check, words in schemes:
        setting = checks.Setting(scheme, torch.nn.Linear(8, 8, bias=False, dtype=torch.float64), (8,))
        with pytest.raises(WrongResultError, match=re.escape(words)):
            check(setting)


def test_a_workload_that_compares_nothing_gets_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty check before the timing, and one after it that is empty or has no new inputs, give a reason.

    Base, with which the others are compared, may have such checks.
    """
    world = World()
    silent = "not checked: confirm() of its workload compares no result on new inputs"
    entries = [FakeScheme(name, world, confirms=name == "Honest").entry() for name in ("Honest", "Cheat")]
    base = FakeScheme("Base", world, confirms=False).entry("base")
    assert failure_of(measure(*entries, phases=("forward",))[1]) == silent
    for method, reason in (
        ("verify", "not checked: verify() of its workload is empty: compare results there"),
        ("confirm", silent),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(FakeWorkload, method, getattr(Workload, method))
            summary, lines = measure(base, entries[0], phases=("sample",))
        assert (summary.measured, summary.failed) == (1, 1)
        assert [row.reason for row in lines if isinstance(row, Skipped)] == [reason]


@dataclass(frozen=True, eq=False)
class Lookup:
    """A call that takes 100 us for an input with a new key, and 1 us for one whose result it has stored."""

    world: World
    buffers: tuple[Tensor, ...]
    key_of: Callable[[Tensor], object]
    seen: set[object] = dataclasses.field(default_factory=set)

    def __call__(self, _: Phase, __: int, turn: int) -> Tensor:
        """Return a result that differs between inputs."""
        key = self.key_of(self.buffers[(turn - 1) % 2])
        self.world.clock.now_s += 1e-6 if key in self.seen else 1e-4
        self.seen.add(key)
        return result(turn)


def test_a_variant_cannot_look_up_its_result() -> None:
    """Each timed call reads new values: a look-up of results by content or version takes full time."""
    for key_of in (
        lambda x: tuple(x.flatten().tolist()),
        lambda x: (x.data_ptr(), x._version),  # noqa: SLF001  a cheat may read it
    ):
        for buffers in (
            (torch.randn(4, 3), torch.randn(4, 3)),
            (torch.randn(2**11, 3), torch.randn(2**11, 3)),
            (torch.arange(100).view(20, 5), torch.arange(100, 200).view(20, 5)),
        ):
            world = World()
            world.clock.warm_up_s = (0.001, 0.01)
            act = Lookup(world, buffers, key_of)
            scheme = FakeScheme("Lookup", world, cost_s=0.0, inputs=buffers, act=act)
            _, lines = measure(scheme, phases=("forward",), cell_s=0.05)
            (row,) = measurements(lines)
            samples = [sample for visits in row.samples for sample in visits]
            assert len(samples) > 100
            assert min(samples) == pytest.approx(1e5)


def test_only_the_error_of_a_refusal_makes_a_scheme_unavailable() -> None:
    """A mistake that raises ValueError is a failure of the variant; an UnsupportedError is a refusal."""
    case = Case(operator="Linear", out_channels=4, in_channels=4, members=4)
    for error, status, words in (
        (ValueError("too many values to unpack"), "failed", "ValueError: too many values to unpack"),
        (impls.UnsupportedError("k is too large"), "unavailable", "Linear: k is too large"),
    ):
        refusing = Cheating(sampling=Mock(side_effect=error))
        (row,) = (r for r in measured_here(case, "forward", Cheat=refusing) if isinstance(r, Skipped))
        assert (row.status, row.reason) == (status, words)


def test_equal_results_of_dropout_are_not_a_failure() -> None:
    """Equal outputs and equal noise pass if the reference and other draws are equal as well."""
    case = Case(operator="Linear", out_channels=1, in_channels=1, members=1)
    phases: tuple[Phase, ...] = ("sample", "forward", "update", "step")
    for seed in range(4):
        lines = measured_here(case, *phases, seed=seed, DropoutMask=impls.DropoutMask())
        assert [row.reason for row in lines if isinstance(row, Skipped)] == []
        assert {row.phase for row in lines if isinstance(row, Measurement)} == set(phases)
