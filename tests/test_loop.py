"""The loop over cases, variants and phases, on fakes."""

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from unittest.mock import Mock

import msgspec
import pytest
import torch

from esbench.measure.activity import Activity
from esbench.measure.company import release
from esbench.measure.fault import DeviceLostError
from esbench.measure.ledger import Outcome
from esbench.measure.loop import run
from esbench.measure.plan import Plan
from esbench.measure.profiling import ProfileError
from esbench.measure.rounds import FEWEST_ROUNDS
from esbench.records import Case, Measurement, Phase, Record, Row, Settled, Skipped
from esbench.registry import Entry, UnavailableError, WrongResultError
from tests.fakes import CASE, FakeScheme, World, raising


def measure(
    *entries: Entry,
    world: World,
    phases: tuple[Phase, ...] = ("sample", "forward"),
    checks: tuple[Case, ...] = (),
) -> tuple[Outcome, list[Row]]:
    """Run entries on one case with a budget of a second; return the outcome and the rows."""
    lines: list[Record] = []
    plan = Plan(entries=entries, cases=(CASE,), phases=phases, cell_s=1.0, checks=checks)
    return run(plan, lines.extend, lambda *_: None, world.tools), rows_of(lines)


def rows_of(lines: Sequence[Record]) -> list[Row]:
    """Return the rows among what a run stored."""
    return [line for line in lines if isinstance(line, Row)]


def latencies(rows: list[Row]) -> list[Measurement]:
    """Return the rows that are times."""
    return [row for row in rows if isinstance(row, Measurement) and row.metric == "latency_ns"]


def skipped(rows: list[Row]) -> list[tuple[str, str | None, str, str]]:
    """Return name, phase, status and reason of the rows without a number."""
    return [(r.variant.scheme, r.phase, r.status, r.reason) for r in rows if isinstance(r, Skipped)]


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
    assert outcome == Outcome(measured=3, unavailable=3)
    assert not world.resident


def test_all_variants_of_a_case_share_their_rounds() -> None:
    """Rounds of one phase are of one company; base stays as long as the variant."""
    world = World()
    _, rows = measure(
        FakeScheme("A", world).entry(),
        FakeScheme("Base", world).entry("base"),
        world=world,
        phases=("forward",),
    )
    assert [(row.company, len(row.samples)) for row in latencies(rows)] == [(0, FEWEST_ROUNDS)] * 2


@pytest.mark.parametrize("need", ["built_bytes", "entered_bytes", "call_bytes"])
def test_what_does_not_fit_beside_the_others_waits_for_the_next_company(need: str) -> None:
    """Whether it is set up, enters a phase or is called: the base is measured again beside it."""
    world = World(room_bytes=1000)
    needs: dict[str, Any] = {need: 600}
    entries = [FakeScheme(name, world, **needs).entry() for name in "AB"]
    outcome, rows = measure(
        FakeScheme("Base", world).entry("base"), *entries, world=world, phases=("forward",)
    )
    companies = [(row.company, row.variant.scheme) for row in latencies(rows)]
    if need == "call_bytes":  # a call's memory is free again when the next variant is called
        assert companies == [(0, "Base"), (0, "A"), (0, "B")]
    else:
        assert companies == [(0, "Base"), (0, "A"), (1, "Base"), (1, "B")]
    assert outcome.unavailable == outcome.failed == 0


def test_base_has_room_before_the_variants_it_is_compared_with() -> None:
    """Where base's call does not fit beside the variants, the last of these waits."""
    world = World(room_bytes=1000)
    base = FakeScheme("Base", world, call_bytes=300)
    guests = [FakeScheme(name, world, built_bytes=400).entry() for name in "AB"]
    _, rows = measure(base.entry("base"), *guests, world=world, phases=("forward",))
    assert [(row.company, row.variant.scheme) for row in latencies(rows)] == [
        (0, "Base"),
        (0, "A"),
        (1, "Base"),
        (1, "B"),
    ]


def test_base_takes_its_memory_first() -> None:
    """However late it is registered: it is there in every company, the variants take what is left."""
    world = World(room_bytes=1000)
    variant = FakeScheme("A", world, built_bytes=600).entry()
    _, rows = measure(variant, FakeScheme("Base", world, built_bytes=600).entry("base"), world=world)
    assert {row.variant.scheme for row in latencies(rows)} == {"Base"}
    assert [(name, status) for name, _, status, _ in skipped(rows)] == [("A", "unavailable")]


def test_a_reason_that_base_gives_in_every_company_is_one_row() -> None:
    """Its times are measured again beside each company; why it has no sample is said once."""
    world = World(room_bytes=1000)
    entries = [FakeScheme(name, world, built_bytes=600).entry() for name in "AB"]
    base = FakeScheme("Base", world, phases=("forward",)).entry("base")
    outcome, rows = measure(base, *entries, world=world)
    assert skipped(rows) == [("Base", "sample", "unavailable", "it has no phase sample")]
    assert outcome == Outcome(measured=6, unavailable=1)


def test_a_variant_that_never_fits_beside_base_is_unavailable() -> None:
    """Base is measured, and no further company is tried."""
    world = World(room_bytes=1000)
    base = FakeScheme("Base", world, call_bytes=300).entry("base")
    outcome, rows = measure(base, FakeScheme("A", world, built_bytes=800).entry(), world=world)
    assert skipped(rows) == [("A", None, "unavailable", "out of memory: tried to allocate 300 bytes")]
    assert outcome == Outcome(measured=2, unavailable=1)


def test_what_does_not_fit_alone_gets_a_row_with_the_bytes_and_the_run_goes_on() -> None:
    """Unavailable, not failed: the machine cannot, the variant is not to blame."""
    world = World(room_bytes=1000)
    big, small = FakeScheme("Big", world, built_bytes=5000).entry(), FakeScheme("A", world).entry()
    outcome, rows = measure(big, small, FakeScheme("Base", world).entry("base"), world=world)
    assert skipped(rows) == [("Big", None, "unavailable", "out of memory: tried to allocate 5000 bytes")]
    assert outcome == Outcome(measured=4, unavailable=1)


def test_a_variant_that_its_oracle_refuses_gets_no_number() -> None:
    """It is never called, its row says what was wrong, and the run has failed."""
    world = World()

    def refuse(case: Case) -> NoReturn:
        message = f"forward is off by 3 on {case.operator}"
        raise WrongResultError(message)

    outcome, rows = measure(FakeScheme("A", world, check=refuse).entry(), world=world)
    assert skipped(rows) == [("A", None, "failed", "oracle: forward is off by 3 on Linear")]
    assert outcome == Outcome(failed=1)
    assert not world.log


def test_a_variant_that_is_wrong_on_a_small_exact_case_is_not_measured_on_a_large_one() -> None:
    """The verdict is taken once for an operator, on the checks of that operator alone."""
    world = World()
    seen = []

    def refuse(case: Case) -> None:
        seen.append(case)
        if case.dtype == "float64":
            message = "off"
            raise WrongResultError(message)

    exact = msgspec.structs.replace(CASE, dtype="float64")
    checks = (msgspec.structs.replace(exact, operator="Conv2d"), exact)
    outcome, rows = measure(FakeScheme("A", world, check=refuse).entry(), world=world, checks=checks)
    assert skipped(rows) == [("A", None, "failed", f"oracle: off (on {exact.label})")]
    assert outcome.failed == 1
    assert seen == [exact]


def test_a_check_that_a_variant_cannot_serve_does_not_count_against_it() -> None:
    """Unavailable on a check is no verdict."""
    world = World()

    def decline(case: Case) -> None:
        if case.dtype == "float64":
            message = "float32 only"
            raise UnavailableError(message)

    checks = (msgspec.structs.replace(CASE, dtype="float64"),)
    outcome, _ = measure(FakeScheme("A", world, check=decline).entry(), world=world, checks=checks)
    assert outcome == Outcome(measured=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: [t], lambda t: {"y": (t,)}], ids=["tensor", "list", "dict"]
)
def test_an_output_that_is_not_finite_is_wrong(value: float, wrap: Callable[[torch.Tensor], object]) -> None:
    """One such number anywhere in what a call returns refuses the variant."""
    world = World()
    outcome, rows = measure(
        FakeScheme("A", world, act=lambda *_: wrap(torch.tensor([1.0, value, 2.0]))).entry(),
        world=world,
        phases=("forward",),
    )
    assert skipped(rows) == [("A", None, "failed", "oracle: forward gives values that are not finite")]
    assert outcome == Outcome(failed=1)


def test_a_variant_that_says_it_cannot_is_unavailable() -> None:
    """Its own words are the reason."""
    world = World()

    def decline(case: Case) -> NoReturn:
        del case
        message = "needs a GPU"
        raise UnavailableError(message)

    outcome, rows = measure(FakeScheme("A", world, check=decline).entry(), world=world)
    assert skipped(rows) == [("A", None, "unavailable", "needs a GPU")]
    assert outcome == Outcome(unavailable=1)


@pytest.mark.parametrize("after", [0, 1, 2, 9, 15, 16, 17])
def test_a_variant_that_raises_at_any_moment_has_one_row_and_no_time(after: int) -> None:
    """First call, warm-up, rounds or memory pass: one line with the type, and the others go on."""
    world = World()
    bad = FakeScheme("Bad", world, act=raising(ValueError("two\n lines"), after=after))
    outcome, rows = measure(bad.entry(), FakeScheme("A", world).entry(), world=world, phases=("forward",))
    ((name, _, status, reason),) = skipped(rows)
    assert (name, status, reason) == ("Bad", "failed", "ValueError: two lines")
    assert {row.variant.scheme for row in rows if isinstance(row, Measurement)} == {"A"}
    assert outcome == Outcome(measured=1, failed=1)


def test_an_interrupt_keeps_the_rows_of_the_phases_before_it() -> None:
    """Ctrl-C passes through; what was complete has been handed over, memory and gc are as before."""
    world = World()
    rows: list[Record] = []
    scheme = FakeScheme("A", world, phases=("forward", "step"), act=raising(KeyboardInterrupt(), after=30))
    plan = Plan(entries=(scheme.entry(),), cases=(CASE,), phases=("forward", "step"), cell_s=1.0)
    with pytest.raises(KeyboardInterrupt):
        run(plan, rows.extend, lambda *_: None, world.tools)
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
    run(plan, lambda lines: None, show, world.tools)  # noqa: ARG005  # the name says what comes
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
        outcome = run(plan, lines.extend, lambda *_: None, tools)
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
    run(plan, lines.extend, lambda *_: None, dataclasses.replace(world.tools, activity=meter))
    assert [r.case for r in lines if isinstance(r, Measurement) and r.metric == "power_w"] == [larger]


def test_a_phase_is_stored_whole_with_the_line_that_settles_it() -> None:
    """So that a run that is cut off can go on behind it; the case is settled last."""
    world = World()
    batches: list[Sequence[Record]] = []
    plan = Plan(
        entries=[FakeScheme(name, world).entry() for name in "AB"],
        cases=(CASE,),
        phases=("sample", "forward"),
        cell_s=1.0,
    )
    run(plan, batches.append, lambda *_: None, world.tools)
    ends = [(line.company, line.phase) for *_, line in batches if isinstance(line, Settled)]
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
        run(plan, lines.extend, lambda *_: None, dataclasses.replace(world.tools, alive=lambda: False))
    assert not lines


def test_float32_does_not_pass_for_tf32() -> None:
    """Where the device has none, every row says so and nothing is timed."""
    world = World()
    lines: list[Record] = []
    case = msgspec.structs.replace(CASE, dtype="tfloat32")
    plan = Plan(entries=[FakeScheme("A", world).entry()], cases=(case,), phases=("forward",), cell_s=1.0)
    outcome = run(plan, lines.extend, lambda *_: None, world.tools)
    assert skipped(rows_of(lines)) == [
        ("A", None, "unavailable", "this device does not multiply in TF32"),
    ]
    assert outcome == Outcome(unavailable=1)
    assert not world.log


def test_the_largest_population_is_searched_in_a_phase_that_everybody_has() -> None:
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
    """The times are kept, without launches, and say that nobody looked at the streams."""
    world = World()
    lines: list[Record] = []
    failing = Mock(side_effect=ProfileError("no records came back"))
    plan = Plan(entries=[FakeScheme("A", world).entry()], cases=(CASE,), phases=("forward",), cell_s=1.0)
    outcome = run(plan, lines.extend, lambda *_: None, dataclasses.replace(world.tools, trace=failing))
    assert outcome == Outcome(measured=1)
    (row,) = latencies(rows_of(lines))
    assert row.labels == ("launches and streams were not looked at: no records came back",)
    assert not [line for line in lines if isinstance(line, Measurement) and line.metric == "launches"]


def test_an_error_that_cannot_be_encoded_is_stored_all_the_same() -> None:
    """A lone surrogate in a message is replaced."""
    world = World()
    bad = FakeScheme("Bad", world, act=raising(ValueError("half \ud800 a character")))
    _, rows = measure(bad.entry(), world=world)
    ((_, _, status, reason),) = skipped(rows)
    assert (status, reason) == ("failed", "ValueError: half ? a character")
