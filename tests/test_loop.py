"""The loop over cases, variants and phases, on fakes."""

import dataclasses
import gc
import random
from collections.abc import Callable
from typing import Any, NoReturn
from unittest.mock import Mock

import msgspec
import pytest
import torch

from esbench.measure.ledger import Outcome
from esbench.measure.loop import Plan, run
from esbench.measure.rounds import MOST_ROUNDS, Track, interleave
from esbench.measure.utilization import Utilization
from esbench.records import Case, Measurement, Phase, Row, Skipped
from esbench.registry import Entry, UnavailableError, WrongResultError
from tests.fakes import CASE, FakeScheme, FakeWorkload, World


def measure(
    *entries: Entry,
    world: World,
    phases: tuple[Phase, ...] = ("sample", "forward"),
    checks: tuple[Case, ...] = (),
) -> tuple[Outcome, list[Row]]:
    """Run entries on one case with a budget of a second; return the outcome and the rows."""
    rows: list[Row] = []
    plan = Plan(entries=entries, cases=(CASE,), phases=phases, cell_s=1.0, checks=checks)
    return run(plan, rows.append, lambda *_: None, world.tools), rows


def latencies(rows: list[Row]) -> list[Measurement]:
    """Return the rows that are times."""
    return [row for row in rows if isinstance(row, Measurement) and row.metric == "latency_ns"]


def skipped(rows: list[Row]) -> list[tuple[str, str | None, str, str]]:
    """Return name, phase, status and reason of the rows without a number."""
    return [(r.variant.scheme, r.phase, r.status, r.reason) for r in rows if isinstance(r, Skipped)]


def tracks(world: World, *costs_s: float, budget_s: float = 1.0) -> list[Track]:
    """Return warm tracks of variants A, B, ... of these costs, with nothing in the log."""
    schemes = [FakeScheme(chr(ord("A") + i), world, cost_s=cost_s) for i, cost_s in enumerate(costs_s)]
    warm = [Track(FakeWorkload(scheme, CASE), "forward", world.clock, budget_s) for scheme in schemes]
    for track in warm:
        track.warm_up()
    world.log.clear()
    return warm


def order(seed: int = 0) -> random.Random:
    """Return what shuffles the rounds."""
    return random.Random(seed)  # noqa: S311  # an order, not a secret


def raising(error: BaseException, after: int = 0) -> Callable[[Phase, int], object]:
    """Return an action that raises from some call on."""

    def act(phase: Phase, number: int) -> object:
        del phase
        if number > after:
            raise error
        return torch.ones(2)

    return act


def test_a_round_visits_every_variant_and_goes_back_in_the_reverse_order() -> None:
    """Each round is a permutation of the variants followed by its mirror image."""
    world = World()
    interleave(tracks(world, 0.01, 0.01, 0.01), order())
    for start in range(0, len(world.log), 6):
        there, back = world.log[start : start + 3], world.log[start + 3 : start + 6]
        assert sorted(there) == ["A", "B", "C"]
        assert back == there[::-1]


def test_rounds_are_shuffled_and_the_seed_decides_how() -> None:
    """Two runs with one seed have one order, which is not the same in all rounds."""
    orders = []
    for seed in (1, 1, 2):
        world = World()
        interleave(tracks(world, 0.01, 0.01, 0.01), order(seed))
        orders.append(world.log)
    assert orders[0] == orders[1] != orders[2]
    assert len({tuple(orders[0][i : i + 3]) for i in range(0, len(orders[0]), 6)}) > 1


def test_a_round_holds_the_samples_of_both_visits() -> None:
    """Two visits of one call each give two samples, until there are enough rounds."""
    (track,) = tracks(World(), 0.01)
    interleave([track], order())
    assert [len(samples) for samples in track.rounds] == [2] * MOST_ROUNDS
    assert track.rounds[0] == pytest.approx((1e7, 1e7))
    assert track.stop == "20 rounds"


def test_a_slow_variant_leaves_the_rounds_and_the_others_go_on() -> None:
    """A budget of a second buys two rounds of two calls of 0.2 s; the quick ones get all rounds."""
    quick, slow = tracks(World(), 0.01, 0.2)
    interleave([quick, slow], order())
    assert len(quick.rounds) == MOST_ROUNDS
    assert len(slow.rounds) == 2
    assert slow.stop == "budget of 1 s"


def test_a_variant_slower_than_its_budget_gives_one_sample() -> None:
    """It is called once to be timed, stays out of the rounds, and the row says so."""
    world = World()
    quick, slow = tracks(world, 0.01, 3.0)
    interleave([quick, slow], order())
    assert slow.rounds == [pytest.approx((3e9,))]
    assert slow.stop == "one sample: a call takes longer than the budget of 1 s"
    assert "B" not in world.log


def test_a_variant_that_raises_leaves_the_rounds_of_the_others_aligned() -> None:
    """Half a round of a variant that raised is dropped; the others have all of theirs."""
    world = World()
    good, bad = (
        Track(FakeWorkload(scheme, CASE), "forward", world.clock, 1.0)
        for scheme in (FakeScheme("A", world), FakeScheme("B", world, act=raising(ValueError("no"), after=4)))
    )
    for track in (good, bad):
        track.warm_up()
    interleave([good, bad], order())
    assert len(good.rounds) == MOST_ROUNDS
    assert len(bad.rounds) == 1
    assert bad.fault == ("failed", "ValueError: no")


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
        ("A", "sample", "noise_bytes"),
        ("A", "forward", "latency_ns"),
        ("A", "forward", "peak_bytes"),
        ("Base", "forward", "latency_ns"),
        ("Base", "forward", "peak_bytes"),
    }
    assert sorted(skipped(rows)) == [
        ("A", "update", "unavailable", "it learns nothing"),
        ("Base", "sample", "unavailable", "it has no phase sample"),
        ("Base", "update", "unavailable", "it learns nothing"),
    ]
    assert outcome == Outcome(measured=3, unavailable=3)
    assert not world.resident


def test_all_variants_of_a_case_share_their_rounds() -> None:
    """Rounds of one phase are of one company and equally many."""
    world = World()
    _, rows = measure(
        FakeScheme("A", world).entry(),
        FakeScheme("Base", world).entry("base"),
        world=world,
        phases=("forward",),
    )
    assert [(row.company, len(row.samples)) for row in latencies(rows)] == [(0, MOST_ROUNDS)] * 2


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


@pytest.mark.parametrize("after", [0, 1, 9, 42])
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
    rows: list[Row] = []
    scheme = FakeScheme("A", world, phases=("forward", "step"), act=raising(KeyboardInterrupt(), after=60))
    plan = Plan(entries=(scheme.entry(),), cases=(CASE,), phases=("forward", "step"), cell_s=1.0)
    with pytest.raises(KeyboardInterrupt):
        run(plan, rows.append, lambda *_: None, world.tools)
    assert len(latencies(rows)) == 1
    assert gc.isenabled()


def test_garbage_is_not_collected_while_a_call_is_timed() -> None:
    """Off in every call of the rounds, on again afterwards."""
    world = World()
    states = []
    scheme = FakeScheme("A", world, act=lambda *_: states.append(gc.isenabled()))
    track = Track(FakeWorkload(scheme, CASE), "forward", world.clock, 1.0)
    track.warm_up()
    interleave([track], order())
    assert states
    assert not any(states)
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
    run(plan, lambda row: None, show, world.tools)  # noqa: ARG005  # the name says what comes
    assert shown[0] == (0, 4, f"ALinear  {CASE.label}  set-up")
    assert shown[-1][:2] == (2, 4)
    silent = max("".join(name[0] for name in world.log).split("s"), key=len)
    assert len(silent) >= 4 * MOST_ROUNDS


def test_utilisation_is_a_row_or_a_note() -> None:
    """Readings make a row under the forward; a reason for none is said once, not per variant."""
    world = World()
    entries = [FakeScheme(name, world).entry() for name in "AB"]
    plan = Plan(entries=entries, cases=(CASE,), phases=("sample", "forward"), cell_s=1.0)
    for answer, found, notes in (
        (Utilization((97.0, 98.0)), 2, ()),
        (Utilization((), "NVML denies it"), 0, ("no utilisation: NVML denies it",)),
    ):
        rows: list[Row] = []
        tools = dataclasses.replace(world.tools, utilization=Mock(return_value=answer))
        outcome = run(plan, rows.append, lambda *_: None, tools)
        shares = [r for r in rows if isinstance(r, Measurement) and r.metric == "utilization_percent"]
        assert len(shares) == found
        assert outcome.notes == notes
