"""The phase quality of a run: figures become rows, and nothing of it is timed, lost or asked for twice."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from esbench.measure.plan import Plan
from esbench.measure.recorder import Stopwatch
from esbench.measure.runner import Past, run_cases
from esbench.registry import Figure, UnavailableError, build, phases_named
from esbench.schema import (
    PHASES,
    QUALITY,
    Case,
    Checkpoint,
    Measurement,
    Phase,
    Record,
    Row,
    Skipped,
    Variant,
)
from esbench.store import encode
from tests.fakes import CASE, FakeScheme, FakeWorkload, World
from tests.loop_cases import latencies, measure, rows_of, skipped

KAPPA = Figure("kappa", "linear fitness", (-0.5, 0.25))


def say(*figures: Figure) -> Iterator[Figure]:
    """Yield figures, by default the one."""
    yield from figures or (KAPPA,)


def fail(error: Exception) -> Iterator[Figure]:
    """Yield one figure, and raise."""
    yield KAPPA
    raise error


@dataclasses.dataclass(frozen=True, eq=False)
class Rated(FakeScheme):
    """A fake variant that says something of its quality."""

    says: Callable[[], Iterator[Figure]] = say


class RatedWorkload(FakeWorkload):
    """It takes a second to say it."""

    scheme: Rated

    def quality(self) -> Iterator[Figure]:
        """Say what the scheme says."""
        self.scheme.world.log.append(f"{self.scheme.name} rated")
        self.scheme.world.clock.now_s += 1.0
        return self.scheme.says()


@build.register
def _(scheme: Rated, case: Case, device: str, seed: int) -> RatedWorkload:  # noqa: ARG001  # the signature of build
    return RatedWorkload(scheme, case)


@dataclasses.dataclass(frozen=True, eq=False)
class Silent(FakeScheme):
    """A fake variant of a package that knows nothing of quality."""


class SilentWorkload:
    """All of a workload but the method quality."""

    def __init__(self, workload: FakeWorkload) -> None:
        """Take what answers for the rest."""
        self._workload = workload

    def __getattr__(self, name: str) -> Any:
        """Return what the workload has of that name."""
        if name == "quality":
            raise AttributeError(name)
        return getattr(self._workload, name)


@build.register
def _(scheme: Silent, case: Case, device: str, seed: int) -> Any:  # noqa: ARG001  # the signature of build
    return SilentWorkload(FakeWorkload(scheme, case))


def figures(rows: Sequence[Row]) -> list[Measurement]:
    """Return the rows of the phase quality that hold numbers."""
    return [row for row in rows if isinstance(row, Measurement) and row.phase == QUALITY]


def test_figures_become_rows() -> None:
    """One row for each figure with all its replicates, below 0 as well, and no time, memory or launches."""
    world = World()
    dots = Figure("dot_mean", "pairs", (0.0, 0.125, -0.125))
    entry = Rated("A", world, says=partial(say, KAPPA, dots)).entry()
    outcome, rows = measure(entry, world=world, phases=("forward", QUALITY))
    found = [(row.metric, row.method, row.samples) for row in figures(rows)]
    assert found == [("kappa", "linear fitness", ((-0.5, 0.25),)), ("dot_mean", "pairs", (dots.samples,))]
    assert {row.phase for row in latencies(rows)} == {"forward"}
    assert outcome.measured == 2


def test_quality_alone_times_nothing() -> None:
    """The only phase of a run may be quality: no call of a variant is made."""
    world = World()
    outcome, rows = measure(Rated("A", world).entry(), world=world, phases=(QUALITY,))
    assert [type(row) for row in rows] == [Measurement]
    assert world.log == ["A rated"]
    assert outcome.measured == 1


def test_quality_comes_last() -> None:
    """Whatever the order of the timed phases, what is computed beside them disturbs none."""
    world = World()
    measure(Rated("A", world).entry(), world=world, phases=(QUALITY, "sample", "forward"))
    assert world.log[-1] == "A rated"
    assert "A" in world.log


def test_quality_that_raises_costs_its_own_row_only() -> None:
    """Its row has the reason, the times and the other variants stay."""
    cases: list[tuple[Callable[[], Iterator[Figure]], str, str]] = [
        (partial(fail, UnavailableError("no such thing")), "unavailable", "no such thing"),
        (partial(fail, KeyError("x")), "failed", "KeyError: 'x'"),
        (partial(fail, MemoryError("much")), "unavailable", "out of memory: much"),
    ]
    for says, status, words in cases:
        world = World()
        entries = (Rated("A", world, says=says).entry(), Rated("B", world).entry())
        _, rows = measure(*entries, world=world, phases=("forward", QUALITY))
        assert skipped(rows) == [("A", QUALITY, status, words)]
        assert [row.variant.scheme for row in figures(rows)] == ["B"]
        assert [row.variant.scheme for row in latencies(rows)] == ["A", "B"]


def test_a_workload_that_says_nothing_has_a_row_that_says_so() -> None:
    """A plugin's workload without the method is measured as before; its quality is unavailable."""
    world = World()
    outcome, rows = measure(Silent("A", world).entry(), world=world, phases=("forward", QUALITY))
    assert len(latencies(rows)) == 1
    assert [row[:3] for row in skipped(rows)] == [("A", QUALITY, "unavailable")]
    assert outcome.failed == 0


def test_a_figure_without_numbers_is_a_reason() -> None:
    """It stands under its method, and the other figures beside it."""
    cases: list[tuple[Figure, str]] = [
        (Figure("kappa", "m", reason="none was derived"), "none was derived"),
        (Figure("kappa", "m", (0.0, float("nan"))), "1 of 2 numbers are not finite"),
        (Figure("kappa", "m"), "0 of 0 numbers are not finite"),
    ]
    for figure, words in cases:
        world = World()
        entry = Rated("A", world, says=partial(say, figure, KAPPA)).entry()
        _, rows = measure(entry, world=world, phases=(QUALITY,))
        (reason,) = [row for row in rows if isinstance(row, Skipped)]
        assert (reason.method, reason.reason) == ("m", words)
        assert len(figures(rows)) == 1


def test_base_is_asked_once() -> None:
    """It sits in every group, and says what it has to say in the first."""
    world = World(room_bytes=1000)
    entries = [Rated(name, world, built_bytes=600).entry() for name in "AB"]
    _, rows = measure(Rated("Base", world).entry("base"), *entries, world=world, phases=("forward", QUALITY))
    assert [(row.group, row.variant.scheme) for row in figures(rows)] == [(0, "Base"), (0, "A"), (1, "B")]


def test_quality_is_settled_resumed_and_charged() -> None:
    """After its checkpoint it is not computed again, and its seconds are charged to quality."""
    world = World()
    lines: list[Record] = []
    phases: tuple[Phase, ...] = ("forward", QUALITY)
    plan = Plan(entries=[Rated("A", world).entry()], cases=[CASE], phases=phases, cell_s=1.0)
    watch = Stopwatch(world.clock.seconds)
    run_cases(plan, lines.extend, lambda *_: None, world.tools, stopwatch=watch)
    assert watch.spent_s["quality"] == pytest.approx(1.0)
    last = next(n for n, line in enumerate(lines) if isinstance(line, Checkpoint) and line.phase == QUALITY)
    kept = lines[: last + 1]
    world.log.clear()
    past = Past(rows_of(kept), [line for line in kept if isinstance(line, Checkpoint)])
    run_cases(plan, kept.extend, lambda *_: None, world.tools, past)
    assert "A rated" not in world.log
    assert len(figures(rows_of(kept))) == 1


def test_phases_are_named() -> None:
    """Quality is chosen by name, comes last, and is not a timed phase."""
    assert phases_named("quality, forward") == ("forward", QUALITY)
    assert QUALITY not in PHASES


ROW = Measurement(
    variant=Variant(scheme="A"),
    case=CASE,
    phase=QUALITY,
    metric="kappa",
    method="linear fitness",
    samples=((-1.0, 0.5),),
)


def test_only_quality_goes_below_zero() -> None:
    """A time below 0 is refused where it is made and where it is read, with its place."""
    assert msgspec.json.decode(encode(ROW), type=Measurement) == ROW
    with pytest.raises(ValueError, match=r"0.0 - at `\$.samples\[0\]\[0\]`"):
        msgspec.structs.replace(ROW, phase="forward")
    line = encode(ROW).replace(b'"quality"', b'"step"')
    with pytest.raises(msgspec.ValidationError, match=r"\$.samples\[0\]\[0\]"):
        msgspec.json.decode(line, type=Measurement)


def test_a_case_says_its_sigma_where_it_is_another() -> None:
    """The label has it, a file without it reads as the default, and none that is not above 0 is read."""
    assert CASE.sigma == 0.02
    assert "sigma" not in CASE.label
    assert msgspec.structs.replace(CASE, sigma=0.1).label.endswith("sigma=0.1")
    line = msgspec.json.encode(CASE)
    assert msgspec.json.decode(line.replace(b',"sigma":0.02', b""), type=Case) == CASE
    with pytest.raises(msgspec.ValidationError, match="sigma"):
        msgspec.json.decode(line.replace(b'"sigma":0.02', b'"sigma":0.0'), type=Case)
