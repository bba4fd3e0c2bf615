"""Variants that cheat: each is caught, and its row says what it did."""

import dataclasses
import gc
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typing_extensions import override

import impls
from esbench.cli import main
from esbench.measure import memory, timers
from esbench.measure.instruments import Instruments, instruments
from esbench.measure.plan import Plan
from esbench.measure.profiler import Trace
from esbench.measure.runner import run_cases
from esbench.registry import Entry
from esbench.schema import Case, Measurement, Phase, Record, Skipped, Variant
from impls.perturbation.operators import AbstractOperator
from impls.schemes.dense import DenseNoise
from tests.fakes import CASE, FakeClock, FakeScheme, World

Act = Callable[[Phase, int, int], object]


def caught(act: Act, world: World, tools: Instruments | None = None, phase: Phase = "forward") -> str:
    """Measure a cheat beside an honest variant; return its one reason. The honest one has its time."""
    lines: list[Record] = []
    # The honest one comes first: it must not be blamed for what the other did between its visits.
    entries = (honest(world, phase), FakeScheme("Cheat", world, phases=(phase,), act=act).entry())
    plan = Plan(entries=entries, cases=(CASE,), phases=(phase,), cell_s=1.0)
    outcome = run_cases(plan, lines.extend, lambda *_: None, tools or world.tools)
    timed = {row.variant.scheme for row in lines if isinstance(row, Measurement)}
    (row,) = (row for row in lines if isinstance(row, Skipped))
    assert (timed, row.variant.scheme, row.status) == ({"Honest"}, "Cheat", "failed")
    assert (outcome.measured, outcome.failed) == (1, 1)
    return row.reason


def honest(world: World, phase: Phase) -> Entry:
    """Return a variant with nothing to hide."""
    return FakeScheme("Honest", world, phases=(phase,)).entry()


def result(turn: int) -> Tensor:
    """Return what an honest call gives."""
    return torch.full((4,), float(turn))


@pytest.mark.parametrize("phase", ["sample", "forward", "update"])
def test_a_call_that_returns_its_last_output_again_is_caught(phase: Phase) -> None:
    """Even as a copy: other inputs must give other results."""
    kept = result(1)
    words = caught(lambda *_: kept.clone(), World(), phase=phase)
    assert words == f"oracle: {phase} gives the same for other inputs: it returns an earlier result"


def test_a_call_that_writes_its_output_late_is_caught() -> None:
    """What it returned changes once the device has been waited for."""
    world, pending = World(), []

    def act(phase: Phase, number: int, turn: int) -> Tensor:
        del phase, number
        y = torch.zeros(4) + turn / 2
        pending.append(partial(y.copy_, result(turn)))
        return y

    def synchronize() -> None:
        while pending:
            pending.pop()()

    words = caught(act, world, dataclasses.replace(world.tools, synchronize=synchronize))
    assert words == "oracle: forward returned before its result was written: it changed afterwards"


def test_work_on_another_stream_is_caught() -> None:
    """The trace tells where each kernel ran."""
    world = World()
    seen = {"Cheat": Trace(launches=3, waits=(), other_streams=(17,))}

    def trace(call: Callable[[], object]) -> Trace:
        world.log.clear()
        call()
        return seen.get(world.log[-1], Trace(launches=3, waits=(), other_streams=()))

    tools = dataclasses.replace(world.tools, trace=trace)
    words = caught(lambda phase, number, turn: result(turn), world, tools)  # noqa: ARG005  # the names say what comes
    assert words == "oracle: forward works on another stream (17), where it is not timed"


@pytest.mark.parametrize(
    ("owner", "name"), [(time, "perf_counter_ns"), (torch.cuda, "synchronize"), (timers, "_host_ns")]
)
@pytest.mark.parametrize("since", [1, 12])
def test_a_call_that_replaces_a_timer_is_caught(owner: object, name: str, since: int) -> None:
    """At its first call or in the midst of the rounds; the right timer is put back."""
    right = getattr(owner, name)

    def act(phase: Phase, number: int, turn: int) -> Tensor:
        del phase
        if number == since:
            setattr(owner, name, lambda: 0)
        return result(turn)

    try:
        words = caught(act, World())
        assert getattr(owner, name) is right
    finally:
        setattr(owner, name, right)
    assert words.startswith("oracle: it replaced a timer: ")
    assert words.endswith(name)


@pytest.mark.parametrize("since", [1, 2, 12])
def test_a_call_that_gives_nan_is_caught(since: int) -> None:
    """At once, at the second inputs, or only once it is timed."""
    words = caught(
        lambda phase, number, turn: result(turn) * (math.nan if number >= since else 1),  # noqa: ARG005  # the names say what comes
        World(),
    )
    assert words == "oracle: forward gives values that are not finite"


def test_noise_that_is_another_once_it_is_timed_is_caught() -> None:
    """The first step must give after the rounds what it gave before."""
    words = caught(
        lambda phase, number, turn: result(turn if number < 5 else turn + 1),  # noqa: ARG005  # the names say what comes
        World(),
        phase="sample",
    )
    assert words == "oracle: sample draws other noise after timing than before it, for the same step"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: torch.set_num_threads(3), "the number of threads from {threads} to 3"),
        (
            lambda: torch.set_default_dtype(torch.float64),
            "the default dtype from torch.float32 to torch.float64",
        ),
        (lambda: torch.set_float32_matmul_precision("medium"), "the precision of float32 products from"),
    ],
)
@pytest.mark.parametrize("since", [1, 12])
def test_a_call_that_changes_torch_for_all_is_caught(
    change: Callable[[], None], words: str, since: int
) -> None:
    """At once or in the midst of the rounds; what was set before is set again."""
    threads = torch.get_num_threads()

    def act(phase: Phase, number: int, turn: int) -> Tensor:
        del phase
        if number == since:
            change()
        return result(turn)

    found = caught(act, World())
    assert found.startswith(f"oracle: it changed a shared setting: {words.format(threads=threads)}")
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, torch.float32)


def test_a_method_of_a_clock_that_is_replaced_is_caught() -> None:
    """Not only functions: whatever stands between a call and its samples."""
    right = timers.HostClock.visit

    def act(phase: Phase, number: int, turn: int) -> Tensor:
        del phase, number
        timers.HostClock.visit = lambda *_: timers.Visit({"latency_ns": (1.0,)})  # type: ignore[method-assign]  # what a cheat would do
        return result(turn)

    try:
        assert caught(act, World()) == "oracle: it replaced a timer: HostClock.visit"
        assert timers.HostClock.visit is right
    finally:
        timers.HostClock.visit = right  # type: ignore[method-assign]  # put back what the test replaced


def test_a_call_that_hoards_memory_while_it_is_timed_is_caught() -> None:
    """By the allocator's own count, to the byte."""
    world, hoard = World(), []

    def act(phase: Phase, number: int, turn: int) -> Tensor:
        del phase, number
        hoard.append(torch.ones(1000))
        return result(turn)

    tools = dataclasses.replace(world.tools, footprint=partial(memory.footprint, device="cpu"))
    assert caught(act, world, tools) == "oracle: forward holds 4000 bytes more after every call"


def test_a_call_that_synchronises_inside_is_labelled() -> None:
    """It may have to, so it keeps its time, and its row says what it does."""
    world = World()
    lines: list[Record] = []
    trace = Trace(launches=3, waits=("cudaStreamSynchronize", "cudaStreamSynchronize"), other_streams=())
    tools = dataclasses.replace(world.tools, trace=lambda _: trace)
    plan = Plan(entries=(honest(world, "forward"),), cases=(CASE,), phases=("forward",), cell_s=1.0)
    run_cases(plan, lines.extend, lambda *_: None, tools)
    (row,) = (row for row in lines if isinstance(row, Measurement) and row.metric == "latency_ns")
    assert row.labels == ("synchronises inside: cudaStreamSynchronize, 2 times a call",)


def test_a_graph_that_skips_work_is_caught() -> None:
    """Replayed on inputs that it has not seen, it must give what the call gives."""
    world = World()

    class SkippingClock(FakeClock):
        method = "graph"

        @override
        def prepare(self, call: Callable[[], object], turns: int) -> Callable[[], object]:
            captured = call()
            return lambda: captured

    plan = Plan(entries=(reading(world),), cases=(CASE,), phases=("forward",), cell_s=1.0)
    lines: list[Record] = []
    run_cases(
        plan, lines.extend, lambda *_: None, dataclasses.replace(world.tools, clocks=(SkippingClock(),))
    )
    (row,) = (row for row in lines if isinstance(row, Skipped))
    assert row.method == "graph"
    assert row.reason.endswith("replayed from a graph gives another result than a call: the graph skips work")


def reading(world: World) -> Entry:
    """Return a variant whose result is what stands in the input of its turn."""
    buffers = (torch.ones(4), torch.full((4,), 2.0))
    scheme = FakeScheme(
        "Reader",
        world,
        phases=("forward",),
        inputs=buffers,
        act=lambda phase, number, turn: buffers[(turn - 1) % 2] * 3,  # noqa: ARG005  # the names say what comes
    )
    return scheme.entry()


def test_a_plugin_that_replaces_a_timer_when_it_is_loaded_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured, in one line."""
    plugin = tmp_path / "patch.py"
    plugin.write_text("import esbench.measure.timers as timing\ntiming._host_ns = lambda: 0\n")
    right = vars(timers)["_host_ns"]
    arguments = ["run", "--plugin", str(plugin), "--device", "cpu", "--out", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["esbench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "it replaced a timer: esbench.measure.timers._host_ns" in capsys.readouterr().err
    assert vars(timers)["_host_ns"] is right
    assert not (tmp_path / "results").exists()


@dataclass(eq=False)
class Memory:
    """What a cheat remembers from call to call."""

    calls: int = 0
    results: dict[object, Tensor] = dataclasses.field(default_factory=dict)


Cheat = Callable[[Memory, Callable[[], Tensor], Tensor], Tensor]
"""Gets what it remembers, a function that computes the right result, and the input."""


def always_the_first(memory: Memory, compute: Callable[[], Tensor], x: Tensor) -> Tensor:
    """Return for ever what was right once."""
    return memory.results.setdefault(tuple(x.shape), compute()).clone()


def stale_after_some_calls(memory: Memory, compute: Callable[[], Tensor], x: Tensor) -> Tensor:
    """Be honest for the first calls."""
    if memory.calls <= 4:
        memory.results[tuple(x.shape)] = compute()
    return memory.results[tuple(x.shape)].clone()


def by_address(memory: Memory, compute: Callable[[], Tensor], x: Tensor) -> Tensor:
    """Take an input for the one that was at its address before."""
    return memory.results.setdefault((tuple(x.shape), x.data_ptr()), compute()).clone()


def nothing_once_it_is_rehearsed(memory: Memory, compute: Callable[[], Tensor], x: Tensor) -> Tensor:
    """Look like noise that drops every input."""
    del x
    return compute() if memory.calls <= 1 else torch.zeros_like(compute())


def negated_after_some_calls(memory: Memory, compute: Callable[[], Tensor], x: Tensor) -> Tensor:
    """Have the right norm."""
    del x
    return compute() if memory.calls <= 4 else -compute()


def nan_while_no_garbage_is_collected(memory: Memory, compute: Callable[[], Tensor], x: Tensor) -> Tensor:
    """Know the conditions in which calls are timed."""
    del memory, x
    return compute() if gc.isenabled() else compute() * math.nan


@dataclass(frozen=True, eq=False)
class Cheating(impls.Perturbed):
    """Does something else than it says."""

    cheat: Cheat = always_the_first
    memory: Memory = dataclasses.field(default_factory=Memory)

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: DenseNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        self.memory.calls += 1
        return self.cheat(self.memory, lambda: super(Cheating, self).forward(op, weight, noise, x, sigma), x)


@pytest.mark.parametrize(
    ("cheat", "words"),
    [
        (always_the_first, "forward gives the same for other inputs"),
        (nothing_once_it_is_rehearsed, "forward gives the same for other inputs"),
        (stale_after_some_calls, "found after timing, on new inputs"),
        (by_address, "found after timing, on new inputs"),
        (negated_after_some_calls, "found after timing, on new inputs"),
        (nan_while_no_garbage_is_collected, "forward gives values that are not finite"),
    ],
)
def test_a_scheme_that_cheats_is_caught_on_a_real_case(cheat: Cheat, words: str) -> None:
    """With the instruments of this machine, beside an honest scheme that is measured."""
    lines: list[Record] = []
    entries = [
        Entry(variant=Variant(scheme=name), scheme=scheme, source="", package="tests")
        for name, scheme in (("Cheating", Cheating(cheat=cheat)), ("Honest", impls.Perturbed()))
    ]
    case = Case(operator="Linear", out_channels=64, in_channels=64, members=64)
    plan = Plan(entries=entries, cases=(case,), phases=("forward",), cell_s=0.01)
    with instruments("cpu") as tools:
        run_cases(plan, lines.extend, lambda *_: None, tools)
    (row,) = (row for row in lines if isinstance(row, Skipped))
    assert (row.variant.scheme, row.status) == ("Cheating", "failed")
    assert words in row.reason
    assert {line.variant.scheme for line in lines if isinstance(line, Measurement)} == {"Honest"}


@dataclass(frozen=True, eq=False)
class Forgetting(impls.Perturbed):
    """Sums its members correctly at first, and returns an old sum from then on."""

    memory: Memory = dataclasses.field(default_factory=Memory)

    @override
    def weighted_sum(self, noise: DenseNoise, utilities: Tensor) -> Tensor:
        self.memory.calls += 1
        if self.memory.calls <= 4:
            self.memory.results["sum"] = super().weighted_sum(noise, utilities)
        return self.memory.results["sum"].clone()


def test_an_update_that_cheats_is_caught_on_a_real_case() -> None:
    """It is held to the sum of written-out noise, for utilities that it has not seen."""
    lines: list[Record] = []
    entry = Entry(variant=Variant(scheme="Forgetting"), scheme=Forgetting(), source="", package="tests")
    case = Case(operator="Linear", out_channels=16, in_channels=16, members=8)
    plan = Plan(entries=[entry], cases=(case,), phases=("update",), cell_s=0.01)
    with instruments("cpu") as tools:
        run_cases(plan, lines.extend, lambda *_: None, tools)
    (row,) = (row for row in lines if isinstance(row, Skipped))
    assert (row.status, "found after timing, on new inputs" in row.reason) == ("failed", True)
    assert not [line for line in lines if isinstance(line, Measurement)]


@pytest.mark.parametrize("seed", range(4))
def test_noise_that_drops_every_input_is_not_accused(seed: int) -> None:
    """Outputs and noise may be equal from call to call where the reference and other draws agree."""
    lines: list[Record] = []
    entry = Entry(
        variant=Variant(scheme="DropoutMask"), scheme=impls.DropoutMask(), source="", package="tests"
    )
    case = Case(operator="Linear", out_channels=1, in_channels=1, members=1)
    phases: tuple[Phase, ...] = ("sample", "forward", "update", "step")
    plan = Plan(entries=[entry], cases=(case,), phases=phases, cell_s=0.01, seed=seed)
    with instruments("cpu") as tools:
        run_cases(plan, lines.extend, lambda *_: None, tools)
    assert [row.reason for row in lines if isinstance(row, Skipped)] == []
    assert {row.phase for row in lines if isinstance(row, Measurement)} == set(phases)
