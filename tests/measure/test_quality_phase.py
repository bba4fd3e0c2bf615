"""The quality phase: figures become rows, are not timed, and are computed only once."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from esbench.measure.recorder import Stopwatch
from esbench.registry import phases_named
from esbench.schema import PHASES, QUALITY, Case, Checkpoint, Measurement, Phase, Skipped, Variant
from esbench.store import encode
from esbench.workload import Figure, UnavailableError, build
from tests.fakes import CASE, FakeScheme, FakeWorkload, World
from tests.loop_cases import measure, measurements, skipped

KAPPA = Figure("kappa", "linear fitness", (-0.5, 0.25))
TIMED_AND_RATED: tuple[Phase, ...] = ("forward", QUALITY)


def figures(*found: Figure, error: Exception | None = None) -> Iterator[Figure]:
    """Yield figures, by default kappa; then raise the error, if one is given."""
    yield from found or (KAPPA,)
    if error:
        raise error


@dataclasses.dataclass(frozen=True, eq=False)
class Rated(FakeScheme):
    """A fake variant with quality figures."""

    says: Callable[[], Iterator[Figure]] = figures


class RatedWorkload(FakeWorkload):
    """A workload that takes a second to compute its figures."""

    scheme: Rated

    def quality(self) -> Iterator[Figure]:
        """Return the scheme's figures."""
        self.scheme.world.log.append(f"{self.scheme.name} rated")
        self.scheme.world.clock.now_s += 1.0
        return self.scheme.says()


@build.register
def _(scheme: Rated, case: Case, device: str, seed: int) -> Any:  # noqa: ARG001  # the signature of build
    return RatedWorkload(scheme, case)


def test_figures_become_rows() -> None:
    """Each figure is a row with all its replicates, negative ones too, without time, memory or launches."""
    world = World()
    dots = Figure("dot_mean", "pairs", (0.0, 0.125, -0.125))
    entry = Rated("A", world, says=partial(figures, KAPPA, dots)).entry()
    summary, lines = measure(entry, world=world, phases=(QUALITY, "sample", "forward"))
    found = [
        (r.metric, r.method, r.samples) for r in lines if isinstance(r, Measurement) and r.phase == QUALITY
    ]
    assert found == [("kappa", "linear fitness", ((-0.5, 0.25),)), ("dot_mean", "pairs", (dots.samples,))]
    assert {row.phase for row in measurements(lines)} == {"sample", "forward"}
    assert summary.measured == 3
    assert (world.log[-1], world.log.count("A rated")) == ("A rated", 1)  # quality comes last
    world = World()
    summary, lines = measure(Rated("A", world).entry(), world=world, phases=(QUALITY,))
    assert [line.metric for line in lines if isinstance(line, Measurement)] == ["kappa"]
    assert world.log == ["A rated"]  # no call was made
    assert summary.measured == 1


def test_quality_that_fails_costs_its_own_row_only() -> None:
    """The quality row has the reason; the times and the other variants are kept."""
    for says, status, words in (
        (partial(figures, error=UnavailableError("no such thing")), "unavailable", "no such thing"),
        (partial(figures, error=KeyError("x")), "failed", "KeyError: 'x'"),
        (partial(figures, error=MemoryError("much")), "unavailable", "out of memory: much"),
    ):
        world = World()
        entries = (Rated("A", world, says=says).entry(), Rated("B", world).entry())
        summary, lines = measure(*entries, world=world, phases=TIMED_AND_RATED)
        assert skipped(lines) == [("A", QUALITY, status, words)]
        assert [row.variant.scheme for row in measurements(lines, "kappa")] == ["B"]
        assert [row.variant.scheme for row in measurements(lines)] == ["A", "B"]
        assert summary.failed == (status == "failed")
    world = World()  # the workload of this variant has no method for its quality
    _, lines = measure(FakeScheme("A", world).entry(), world=world, phases=TIMED_AND_RATED)
    assert skipped(lines) == [
        ("A", QUALITY, "unavailable", "no quality figures: its workload has no method quality")
    ]
    assert measurements(lines)


def test_a_figure_without_numbers_is_a_reason() -> None:
    """The reason is stored under its method, and the other figures are rows."""
    for figure, words in (
        (Figure("kappa", "m", reason="none was derived"), "none was derived"),
        (Figure("kappa", "m", (0.0, float("nan"))), "1 of 2 numbers are not finite"),
        (Figure("kappa", "m"), "0 of 0 numbers are not finite"),
    ):
        world = World()
        entry = Rated("A", world, says=partial(figures, figure, KAPPA)).entry()
        _, lines = measure(entry, world=world, phases=(QUALITY,))
        (reason,) = [row for row in lines if isinstance(row, Skipped)]
        assert (reason.method, reason.reason) == ("m", words)
        assert len(measurements(lines, "kappa")) == 1


def test_quality_of_base_is_computed_once_stored_resumed_and_charged() -> None:
    """Base is in every group, but its figures are computed only in the first, also after resuming."""
    world = World(room_bytes=1000)
    entries = [Rated("Base", world).entry("base")]
    entries += [Rated(name, world, built_bytes=600).entry() for name in "AB"]
    stopwatch = Stopwatch(world.clock.seconds)
    _, lines = measure(*entries, world=world, stopwatch=stopwatch, phases=TIMED_AND_RATED)
    found = [(row.group, row.variant.scheme) for row in measurements(lines, "kappa")]
    assert found == [(0, "Base"), (0, "A"), (1, "B")]
    assert stopwatch.spent_s["quality"] == pytest.approx(3.0)
    last = next(n for n, line in enumerate(lines) if isinstance(line, Checkpoint) and line.phase == QUALITY)
    kept = lines[: last + 1]
    world.log.clear()
    _, rest = measure(*entries, world=world, past=kept, phases=TIMED_AND_RATED)
    assert [name for name in world.log if name.endswith("rated")] == ["B rated"]
    assert len(measurements([*kept, *rest], "kappa")) == 3


def test_quality_is_no_timed_phase_and_alone_goes_below_zero() -> None:
    """Only quality may be negative: a negative time is refused when made and when read."""
    assert phases_named("quality, forward") == ("forward", QUALITY)
    assert QUALITY not in PHASES
    row = Measurement(
        variant=Variant(scheme="A"),
        case=CASE,
        phase=QUALITY,
        metric="kappa",
        method="linear fitness",
        samples=((-1.0, 0.5),),
    )
    assert msgspec.json.decode(encode(row), type=Measurement) == row
    with pytest.raises(ValueError, match=r"0.0 - at `\$.samples\[0\]\[0\]`"):
        msgspec.structs.replace(row, phase="forward")
    line = encode(row).replace(b'"quality"', b'"step"')
    with pytest.raises(msgspec.ValidationError, match=r"\$.samples\[0\]\[0\]"):
        msgspec.json.decode(line, type=Measurement)
