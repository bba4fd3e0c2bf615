"""The time budget of a run, on a fake clock."""

import dataclasses
import itertools
import random
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec
import pytest
import torch

from esbench.cli.run import plan_of
from esbench.measure import case_runner, cuda, validation
from esbench.measure.interleave import REFERENCE_ROUNDS
from esbench.measure.plan import Plan
from esbench.measure.recorder import RunSummary, Stopwatch
from esbench.measure.timers import CudaClock
from esbench.registry import REGISTRY, Entry, load
from esbench.schema import OUT_OF_TIME, Case, Checkpoint, Conditions, Phase, Record, Request, Skipped
from tests.fake_cuda import FakeCuda
from tests.fakes import CASE, FakeScheme, World
from tests.loop_cases import measure, measurements, rows_of

load("impls")

CASES = tuple(msgspec.structs.replace(CASE, members=members) for members in (8, 16, 32, 64))
PHASES: tuple[Phase, ...] = ("sample", "forward")
NAMES = ("Base", "A", "B", "C", "D", "E")
CELL_CALLS = 12
"""A bound of the calls of a cell with the fewest samples."""


@pytest.fixture(autouse=True)
def no_real_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out pauses in real time: the clock of these runs is fake."""
    monkeypatch.setattr(case_runner, "has_running_threads", lambda: False)
    monkeypatch.setattr(validation, "PATIENCE_S", (0.0, 0.0))


def entries(
    world: World, cost_s: float = 0.02, set_up_s: float = 0.1, names: Sequence[str] = NAMES
) -> list[Entry]:
    """Return variants whose calls take ``cost_s`` and whose set-up takes ``set_up_s``."""

    def check(_: Case) -> None:
        world.clock.now_s += set_up_s

    schemes = [FakeScheme(name, world, cost_s=cost_s, check=check) for name in names]
    return [scheme.entry("base" if scheme.name == "Base" else "batched") for scheme in schemes]


def within(
    budget_s: float, world: World, variants: Sequence[Entry], past: Iterable[Record] = ()
) -> tuple[RunSummary, list[Record], float]:
    """Measure variants on all cases within a budget; return summary, records and the seconds used."""
    start_s, stopwatch = world.clock.now_s, Stopwatch(world.clock.seconds)
    summary, lines = measure(*variants, past=past, stopwatch=stopwatch, cases=CASES, end_s=start_s + budget_s)
    return summary, lines, world.clock.now_s - start_s


def jittery() -> World:
    """Return a world whose samples vary, so that each cell is sampled until its time is used up."""
    return World(jitter=0.2)


def lost(lines: Sequence[Record]) -> list[Skipped]:
    """Return the rows that were not measured because the time budget was used up."""
    return [line for line in lines if isinstance(line, Skipped) and line.reason == OUT_OF_TIME]


def test_a_short_budget_takes_fewer_samples_before_it_drops_rows() -> None:
    """A sufficient budget changes nothing; with 37 % of it every cell is measured in fewer rounds."""
    free, enough, short = jittery(), jittery(), jittery()
    _, unbounded, whole_s = within(1e9, free, entries(free))
    summary, bounded, _ = within(2 * whole_s, enough, entries(enough))
    assert summary.notes == ()
    assert measurements(unbounded) == measurements(bounded)
    summary, lines, took_s = within(0.37 * whole_s, short, entries(short))
    assert 0.7 * 0.37 * whole_s < took_s <= 0.37 * whole_s
    assert lost(lines) == []
    assert len(measurements(lines)) == len(CASES) * len(PHASES) * len(NAMES)
    (note,) = summary.notes
    assert note.startswith("time budget of the run: a cell got only 0.")
    assert note.endswith(" s instead of 1 s")
    assert {row.stop.partition(" of ")[0] for row in measurements(lines)} == {"budget"}


def test_a_budget_too_short_for_all_rows_drops_the_last_ones() -> None:
    """Base and the first variants have all their numbers; the last variants have a reason and are counted.

    A resumed run does not measure the rows that were cut; it spends its own budget on the rest.
    """
    world = World()
    summary, lines, took_s = within(16.0, world, entries(world, set_up_s=1.0))
    assert took_s <= 16.0 + CELL_CALLS * 0.02
    cut = lost(lines)
    by_case = {
        case: [row.variant.scheme for row in cut if (row.case, row.phase) == (case, None)] for case in CASES
    }
    assert any(by_case.values())
    for names in by_case.values():
        assert names == list(NAMES[len(NAMES) - len(names) :])
    assert {row.variant.scheme for row in measurements(lines)} >= {"Base", "A"}
    assert summary.failed == 0
    assert summary.notes[-1].startswith(f"time budget of the run: {len(cut)} rows not measured")
    ends = [n for n, line in enumerate(lines, 1) if isinstance(line, Checkpoint) and line.phase is None]
    kept, world = lines[: ends[1]], jittery()
    summary, resumed, took_s = within(1000.0, world, entries(world, set_up_s=1.0), kept)
    assert took_s <= 1000.0
    assert lost(kept)
    assert lost(resumed) == []
    assert len({row.case for row in measurements(resumed)}) == len(CASES) - 2
    assert summary.unavailable == len(lost(kept))


def test_a_slow_set_up_leaves_time_to_measure() -> None:
    """Of many variants with a slow set-up, those that are set up have times in nearly all phases."""
    world = jittery()
    names = ("Base", *(f"V{number}" for number in range(40)))
    _, lines, took_s = within(40.0, world, entries(world, cost_s=0.01, set_up_s=0.2, names=names))
    assert took_s <= 42.0
    set_up = len(names) * len(CASES) - sum(row.phase is None for row in lost(lines))
    assert len(measurements(lines)) >= 0.8 * len(PHASES) * set_up > 30


def test_a_run_ends_within_its_budget() -> None:
    """A run overruns its budget only by the set-up or cell in progress; each row has a number or a reason."""
    for budget_s, set_up_s, cost_s in (
        *itertools.product((0.5, 5.0, 20.0, 80.0), (0.01, 3.0), (0.001, 1.0)),
        (10.0, 0.3, 0.05),
        (40.0, 0.3, 0.05),
    ):
        world = jittery()
        _, lines, took_s = within(budget_s, world, entries(world, cost_s, set_up_s))
        base_s = len(CASES) * (2 * cost_s * len(PHASES) + set_up_s)
        setting = (budget_s, set_up_s, cost_s)
        assert took_s <= budget_s + base_s + set_up_s + CELL_CALLS * cost_s * len(PHASES), setting
        reported = {(row.variant.scheme, row.case) for row in rows_of(lines)}
        assert reported == {(name, case) for name in NAMES for case in CASES}, setting


def test_one_slow_variant_does_not_take_the_time_of_all_cases() -> None:
    """A slow variant is cut where it does not fit, and base is measured on every case."""
    world = jittery()
    slow = FakeScheme("Slow", world, cost_s=4.0).entry()
    _, lines, took_s = within(60.0, world, [*entries(world, names=("Base", "A")), slow])
    assert took_s <= 60.0 + CELL_CALLS * 4.0
    assert {row.case for row in measurements(lines) if row.variant.scheme == "Base"} == {*CASES}


def test_dense_noise_has_six_rounds_of_a_step_before_others_get_time() -> None:
    """References are set up first, the others leave time for their rounds, and the step comes first."""
    phases: tuple[Phase, ...] = ("sample", "forward", "step")
    for cost_s, end_s in ((0.2, 12.0), (0.02, 4.0)):
        world = jittery()
        dense = FakeScheme("Perturbed", world, cost_s=cost_s, phases=phases).entry()
        names = ("Base", *(f"V{number}" for number in range(20)))
        _, lines = measure(
            *reversed([*entries(world, cost_s, names=names), dense]),
            stopwatch=Stopwatch(world.clock.seconds),
            phases=phases,
            end_s=end_s,
            cell_s=0.3,
        )
        assert lost(lines)
        found = {(row.variant.scheme, row.phase): len(row.samples) for row in measurements(lines)}
        assert min(found["Perturbed", "step"], found["Base", "forward"]) >= REFERENCE_ROUNDS
        assert next(line.phase for line in lines if isinstance(line, Checkpoint)) == "step"


def test_the_search_for_the_largest_population_ends_within_the_budget() -> None:
    """The search starts no attempt when time is up, and then writes no row."""
    world = World(room_bytes=500)
    big = FakeScheme("Big", world, built_bytes=0, bytes_per_member=100, cost_s=0.3).entry()
    _, lines, took_s = within(8.0, world, [*entries(world, names=("Base",)), big])
    assert took_s <= 8.0 + 0.3
    assert {row.variant.scheme for row in lines if isinstance(row, Skipped)} == {"Big"}


GPU_CASES = CASES[:2]
KERNEL_NS = {"Base": 20_000.0, "A": 50_000.0, "Syncs": 30_000.0}
"""Variants of a run on a fake GPU; the last one synchronizes inside, so it cannot be captured."""


def on_gpu(budget_s: float) -> tuple[list[Record], float]:
    """Measure three variants by the readme suite's methods on a fake device; return records and seconds."""
    world, device = World(), FakeCuda()
    noise = random.Random(0)  # noqa: S311  # jitter, not a secret

    def act(name: str, _: Phase, __: int, turn: int) -> torch.Tensor:
        device.launch(KERNEL_NS[name] * noise.uniform(1, 1.2), launch_ns=5_000)
        if name == "Syncs":
            device.synchronize()
        return torch.full((2,), float((turn - 1) % 2))

    def check(_: Case) -> None:
        device.host_ns += 0.2e9

    schemes = [FakeScheme(name, world, act=partial(act, name), check=check) for name in KERNEL_NS]
    streak = cuda.Streak()
    tools = dataclasses.replace(
        world.tools,
        clocks=tuple(CudaClock(method, device, streak) for method in ("eager", "graph")),
        conditions=lambda: Conditions(clock_hz=1.7e9, power_w=300.0),
    )
    _, lines = measure(
        *(scheme.entry("base" if scheme.name == "Base" else "batched") for scheme in schemes),
        tools=tools,
        stopwatch=Stopwatch(lambda: device.host_ns / 1e9),
        cases=GPU_CASES,
        device="cuda",
        methods={"sample": ("eager",), "forward": ("graph",)},
        end_s=budget_s,
    )
    return lines, device.host_ns / 1e9


def test_a_gpu_run_with_a_method_for_each_phase_ends_within_its_budget() -> None:
    """Cold, warm and host times are rows; a phase that cannot be captured has a reason and no eager time.

    The forward of base is timed by both methods because the sample of other variants is compared with it.
    Warm-ups of the device's clocks take most of a short run. Rows that do not fit have a reason.
    """
    lines, whole_s = on_gpu(1e9)
    reasons = {(r.variant.scheme, r.phase, r.method, r.reason[:20]) for r in lines if isinstance(r, Skipped)}
    assert reasons == {("Syncs", "forward", "graph", "graph capture failed")}
    cells = {
        *((name, "sample", "eager") for name in KERNEL_NS),
        *((name, "forward", "graph") for name in ("Base", "A")),
        ("Base", "forward", "eager"),
    }
    for metric in ("latency_ns", "warm_latency_ns", "host_latency_ns"):
        times = measurements(lines, metric)
        assert len(times) == len(GPU_CASES) * len(cells)
        assert {(row.variant.scheme, row.phase, row.method) for row in times} == cells
        for row in times if metric != "host_latency_ns" else ():
            if row.variant.scheme != "Syncs":
                samples = [
                    sample / KERNEL_NS[row.variant.scheme] for visits in row.samples for sample in visits
                ]
                assert 0.998 <= min(samples) <= max(samples) <= 1.203
        if metric == "latency_ns":
            assert all(len(row.positions) == len(row.samples) == len(row.conditions) for row in times)
            assert times[0].conditions[0][0].clock_hz == 1.7e9
            assert times[0].warm_up.startswith("flat after")
        else:  # a condition is stored once for all times of a visit
            assert not any(row.conditions for row in times)
    for fraction in (0.01, 0.2, 0.8):
        lines, took_s = on_gpu(fraction * whole_s)
        assert took_s <= fraction * whole_s + 1.0
        reported = {(row.variant.scheme, row.case) for row in rows_of(lines)}
        assert len(reported) == 3 * len(GPU_CASES)
        assert bool(measurements(lines)) == (fraction > 0.01)


def plan(suite: str, device: str, cases: str = "*", phases: str = "", methods: str = "") -> Plan:
    """Return the plan of a suite on a device, which this machine need not have."""
    return plan_of(Request(cases=cases, phases=phases, methods=methods), suite, device, 0)


def test_on_a_gpu_the_readme_suite_has_one_method_for_each_phase() -> None:
    """Requested methods replace the default ones; a CPU has only one. At least one phase is always traced."""
    gpu = plan("readme", "cuda")
    assert {phase: tuple(gpu.methods_of(phase)) for phase in gpu.timed} == {
        "sample": ("eager",),
        "forward": ("graph",),
        "update": ("graph",),
        "step": ("eager",),
    }
    assert gpu.traced == ["step"]
    assert plan("readme", "cuda", phases="forward").traced == ("forward",)
    assert plan("readme", "cuda", methods="graph").methods_of("sample") == ("graph",)
    cpu = plan("readme", "cpu")
    assert cpu.methods_of("forward") == ("host",)
    assert cpu.traced == cpu.phases


def test_no_suite_compiles_and_only_unstored_has_a_million_members() -> None:
    """Compiled schemes run only if named; only suite ``unstored`` has a million members."""
    suites = [suite for suite in REGISTRY.suites.values() if suite.name != "check"]
    for suite in suites:
        measured = [
            entry for entry in REGISTRY.select(suite.variants) for case in suite.cases if entry.supports(case)
        ]
        assert not any(entry.on_request for entry in measured)
    assert [suite.name for suite in suites if any(case.members >= 2**20 for case in suite.cases)] == [
        "unstored"
    ]
