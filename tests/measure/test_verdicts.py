"""What the loop says of a variant that is wrong, cannot or raises, on fakes."""

from collections.abc import Callable
from typing import NoReturn

import msgspec
import pytest
import torch

from esbench.measure.plan import Plan
from esbench.measure.recorder import RunSummary
from esbench.measure.runner import run_cases
from esbench.registry import UnavailableError, WrongResultError
from esbench.schema import Case, Measurement, Record
from tests.fakes import CASE, FakeScheme, World, raising
from tests.loop_cases import measure, rows_of, skipped


def test_a_variant_that_its_oracle_refuses_gets_no_number() -> None:
    """It is never called, its row says what was wrong, and the run has failed."""
    world = World()

    def refuse(case: Case) -> NoReturn:
        message = f"forward is off by 3 on {case.operator}"
        raise WrongResultError(message)

    outcome, rows = measure(FakeScheme("A", world, check=refuse).entry(), world=world)
    assert skipped(rows) == [("A", None, "failed", "oracle: forward is off by 3 on Linear")]
    assert outcome == RunSummary(failed=1)
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
    assert outcome == RunSummary(measured=2)


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
    assert outcome == RunSummary(failed=1)


def test_a_variant_that_says_it_cannot_is_unavailable() -> None:
    """Its own words are the reason."""
    world = World()

    def decline(case: Case) -> NoReturn:
        del case
        message = "needs a GPU"
        raise UnavailableError(message)

    outcome, rows = measure(FakeScheme("A", world, check=decline).entry(), world=world)
    assert skipped(rows) == [("A", None, "unavailable", "needs a GPU")]
    assert outcome == RunSummary(unavailable=1)


def test_a_variant_that_raises_at_any_moment_has_one_row_and_no_time() -> None:
    """First call, warm-up, rounds or memory pass: one line with the type, and the others go on."""
    cases: list[int] = [
        0,
        1,
        2,
        9,
        15,
        16,
        17,
    ]
    for after in cases:
        world = World()
        bad = FakeScheme("Bad", world, act=raising(ValueError("two\n lines"), after=after))
        outcome, rows = measure(bad.entry(), FakeScheme("A", world).entry(), world=world, phases=("forward",))
        ((name, _, status, reason),) = skipped(rows)
        assert (name, status, reason) == ("Bad", "failed", "ValueError: two lines")
        assert {row.variant.scheme for row in rows if isinstance(row, Measurement)} == {"A"}
        assert outcome == RunSummary(measured=1, failed=1)


def test_float32_does_not_pass_for_tf32() -> None:
    """Where the device has none, every row says so and nothing is timed."""
    world = World()
    lines: list[Record] = []
    case = msgspec.structs.replace(CASE, dtype="tfloat32")
    plan = Plan(entries=[FakeScheme("A", world).entry()], cases=(case,), phases=("forward",), cell_s=1.0)
    outcome = run_cases(plan, lines.extend, lambda *_: None, world.tools)
    assert skipped(rows_of(lines)) == [
        ("A", None, "unavailable", "this device does not multiply in TF32"),
    ]
    assert outcome == RunSummary(unavailable=1)
    assert not world.log


def test_an_error_that_cannot_be_encoded_is_stored_all_the_same() -> None:
    """A lone surrogate in a message is replaced."""
    world = World()
    bad = FakeScheme("Bad", world, act=raising(ValueError("half \ud800 a character")))
    _, rows = measure(bad.entry(), world=world)
    ((_, _, status, reason),) = skipped(rows)
    assert (status, reason) == ("failed", "ValueError: half ? a character")
