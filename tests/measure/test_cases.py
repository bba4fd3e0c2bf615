"""The loop over cases, variants and phases, on fakes: what it stores, shows and survives."""

import dataclasses
import gc
from typing import TYPE_CHECKING
from unittest.mock import Mock

import msgspec
import pytest
import torch

from esbench.measure.case_runner import release
from esbench.measure.failure import DeviceLostError
from esbench.measure.gpu_monitor import Activity
from esbench.measure.plan import Plan
from esbench.measure.profiler import ProfileError
from esbench.measure.recorder import RunSummary
from esbench.measure.runner import run_cases
from esbench.schema import Checkpoint, Measurement, Record
from tests.fakes import CASE, FEWEST_ROUNDS, FakeScheme, World, raising
from tests.loop_cases import latencies, measure, rows_of, skipped

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_every_variant_and_phase_gets_its_rows() -> None:
    """Times, peaks and the noise's size; the reason for a phase that a variant does not have."""
    world = World()
    outcome, rows = measure(
        FakeScheme("A", world).entry(),
        FakeScheme("Base", world, phases=("forward",)).entry("base"),
        world=world,
        phases=("sample", "forward", "update"),
    )
    figures = {(r.variant.scheme, r.phase, r.metric) for r in rows if isinstance(r, Measurement)}
    assert figures == {
        ("A", "sample", "latency_ns"),
        ("A", "sample", "peak_bytes"),
        ("A", "sample", "launches"),
        ("A", "sample", "noise_bytes"),
        ("A", "forward", "latency_ns"),
        ("A", "forward", "peak_bytes"),
        ("A", "forward", "launches"),
        ("Base", "forward", "latency_ns"),
        ("Base", "forward", "peak_bytes"),
        ("Base", "forward", "launches"),
    }
    assert sorted(skipped(rows)) == [
        ("A", "update", "unavailable", "it learns nothing"),
        ("Base", "sample", "unavailable", "it has no phase sample"),
        ("Base", "update", "unavailable", "it learns nothing"),
    ]
    assert outcome == RunSummary(measured=3, unavailable=3)
    assert not world.resident


def test_an_interrupt_keeps_the_rows_of_the_phases_before_it() -> None:
    """Ctrl-C passes through; what was complete has been handed over, memory and gc are as before."""
    world = World()
    rows: list[Record] = []
    scheme = FakeScheme("A", world, phases=("forward", "step"), act=raising(KeyboardInterrupt(), after=30))
    plan = Plan(entries=(scheme.entry(),), cases=(CASE,), phases=("forward", "step"), cell_s=1.0)
    with pytest.raises(KeyboardInterrupt):
        run_cases(plan, rows.extend, lambda *_: None, world.tools)
    assert len(latencies(rows_of(rows))) == 1
    assert gc.isenabled()


def test_progress_counts_every_cell_and_is_silent_in_the_rounds() -> None:
    """From the first cell to all but the last phase's, and never between two visits."""
    world = World()
    shown = []

    def show(done: int, total: int, what: str) -> None:
        shown.append((done, total, what))
        world.log.append("shown")

    plan = Plan(
        entries=[FakeScheme(name, world).entry() for name in "AB"],
        cases=(CASE,),
        phases=("sample", "forward"),
        cell_s=1.0,
    )
    run_cases(plan, lambda lines: None, show, world.tools)  # noqa: ARG005  # the name says what comes
    assert shown[0] == (0, 4, f"ALinear  {CASE.label}  set-up")
    assert shown[-1][:2] == (2, 4)
    silent = max("".join(name[0] for name in world.log).split("s"), key=len)
    assert len(silent) >= 4 * FEWEST_ROUNDS


def test_what_the_meters_read_are_rows_or_a_note() -> None:
    """Readings make rows under the forward; a reason for none is said once, not per variant."""
    world = World()
    entries = [FakeScheme(name, world).entry() for name in "AB"]
    plan = Plan(entries=entries, cases=(CASE,), phases=("sample", "forward"), cell_s=1.0)
    for answer, found, notes in (
        (Activity({"power_w": (97.0, 98.0), "energy_j": (0.5,)}), 4, ()),
        (Activity({}, "NVML denies it"), 0, ("utilisation, power and energy: NVML denies it",)),
    ):
        lines: list[Record] = []
        tools = dataclasses.replace(world.tools, activity=Mock(return_value=answer))
        outcome = run_cases(plan, lines.extend, lambda *_: None, tools)
        rows = [r for r in lines if isinstance(r, Measurement) and r.metric in {"power_w", "energy_j"}]
        assert len(rows) == found
        assert outcome.notes == notes
        assert {row.phase for row in rows} <= {"forward"}


def test_meters_are_read_on_the_cases_that_a_suite_names() -> None:
    """Each pass lasts seconds."""
    world = World()
    lines: list[Record] = []
    meter = Mock(return_value=Activity({"power_w": (97.0,)}))
    larger = msgspec.structs.replace(CASE, out_channels=8)
    plan = Plan(
        entries=[FakeScheme("A", world).entry()],
        cases=(CASE, larger),
        phases=("forward",),
        cell_s=1.0,
        active=("*(8,*",),
    )
    run_cases(plan, lines.extend, lambda *_: None, dataclasses.replace(world.tools, activity=meter))
    assert [r.case for r in lines if isinstance(r, Measurement) and r.metric == "power_w"] == [larger]


def test_a_phase_is_stored_whole_with_the_line_that_settles_it() -> None:
    """So that a run that is cut off can be resumed after it; the case is complete last."""
    world = World()
    batches: list[Sequence[Record]] = []
    plan = Plan(
        entries=[FakeScheme(name, world).entry() for name in "AB"],
        cases=(CASE,),
        phases=("sample", "forward"),
        cell_s=1.0,
    )
    run_cases(plan, batches.append, lambda *_: None, world.tools)
    ends = [(line.group, line.phase) for *_, line in batches if isinstance(line, Checkpoint)]
    assert sorted(ends[:2]) == [(0, "forward"), (0, "sample")]
    assert ends[2:] == [(0, None)]
    assert [len({row.variant for row in rows_of(batch)}) for batch in batches] == [2, 2, 0]


def test_a_device_that_is_gone_ends_the_run_in_one_line() -> None:
    """What was settled is stored; nothing more is tried on a device that does not answer."""
    world = World()
    lines: list[Record] = []
    lost = FakeScheme("Lost", world, act=raising(RuntimeError("CUDA error: device lost")))
    plan = Plan(entries=[lost.entry()], cases=(CASE,), phases=("sample", "forward"), cell_s=1.0)
    with pytest.raises(
        DeviceLostError, match=r"does not answer any more since Lost: RuntimeError: CUDA error"
    ):
        run_cases(plan, lines.extend, lambda *_: None, dataclasses.replace(world.tools, alive=lambda: False))
    assert not lines


def test_the_largest_population_is_searched_in_a_phase_that_all_variants_have() -> None:
    """Base draws no noise; what raises in the search is a note, and the run goes on."""
    world = World(room_bytes=100)
    base = FakeScheme("Base", world, built_bytes=200, phases=("forward",)).entry("base")
    outcome, rows = measure(base, world=world)
    (row,) = (row for row in rows if isinstance(row, Measurement) and row.metric == "largest_members")
    assert (row.phase, row.samples) == ("forward", ((0.0,),))
    assert outcome.notes == ()


def test_memory_of_a_device_that_is_gone_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA raises at whatever is asked of it then; the error that ended the run is the one to see."""
    gone = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", gone)
    release()
    assert gone.called


def test_a_profiler_that_fails_costs_no_time() -> None:
    """The times are kept, without launches, and their label says that the streams were not checked."""
    world = World()
    lines: list[Record] = []
    failing = Mock(side_effect=ProfileError("no records came back"))
    plan = Plan(entries=[FakeScheme("A", world).entry()], cases=(CASE,), phases=("forward",), cell_s=1.0)
    outcome = run_cases(plan, lines.extend, lambda *_: None, dataclasses.replace(world.tools, trace=failing))
    assert outcome == RunSummary(measured=1)
    (row,) = latencies(rows_of(lines))
    assert row.labels == ("launches and streams were not looked at: no records came back",)
    assert not [line for line in lines if isinstance(line, Measurement) and line.metric == "launches"]
