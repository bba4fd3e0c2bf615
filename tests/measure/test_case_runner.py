"""The loop over variants and phases, on fakes: its rows, its progress, its quality metrics and its errors."""

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock, call

import msgspec
import pytest
import torch
from typing_extensions import override

from esbench.errors import LONGEST
from esbench.measure.case_runner import free_memory
from esbench.measure.failure import DeviceLostError, Failure
from esbench.measure.gpu_monitor import Activity
from esbench.measure.profiler import ProfileError
from esbench.measure.recorder import Recorder, RunSummary, Stopwatch
from esbench.measure.runner import run_cases
from esbench.measure.validation import ExactChecks
from esbench.progress import RunProgress
from esbench.registry import parse_phases
from esbench.schema import PHASES, QUALITY, Case, Checkpoint, Measurement, Phase, Record, Skipped, Variant
from esbench.store import encode
from esbench.workload import QualityMetric, UnavailableError, WrongResultError, build
from tests.fakes import CASE, FEWEST_ROUNDS, FakeScheme, FakeWorkload, World, raising
from tests.loop_cases import measure, measurements, plan_of, rows_of, skipped


def groups(lines: Sequence[Record]) -> list[tuple[int, str]]:
    """Return the group and the scheme of each time."""
    return [(row.group, row.variant.scheme) for row in measurements(lines)]


def test_every_variant_and_phase_gets_its_rows() -> None:
    """Each phase has times, peaks and the size of its noise, or the reason why the variant lacks it."""
    world = World()
    summary, lines = measure(
        FakeScheme("A", world).entry(),
        FakeScheme("Base", world, phases=("forward",)).entry("base"),
        phases=("sample", "forward", "update"),
    )
    stored = {(r.variant.scheme, r.phase, r.metric) for r in lines if isinstance(r, Measurement)}
    everywhere = ("latency_ns", "peak_bytes", "launches")
    assert stored == {
        *(("A", phase, metric) for phase in ("sample", "forward") for metric in everywhere),
        ("A", "sample", "noise_bytes"),
        *(("Base", "forward", metric) for metric in everywhere),
    }
    assert sorted(skipped(lines)) == [
        ("A", "update", "unavailable", "it learns nothing"),
        ("Base", "sample", "unavailable", "it has no phase sample"),
        ("Base", "update", "unavailable", "it learns nothing"),
    ]
    assert summary == RunSummary(measured=3, unavailable=3)
    assert not world.resident
    logs = []
    for seed in (0, 0, 1):
        world = World()
        measure(*(FakeScheme(n, world) for n in "ABC"), phases=("forward",), seed=seed)
        logs.append(world.log)
    assert logs[0] == logs[1] != logs[2]


def test_a_phase_is_stored_at_once_and_progress_is_not_shown_in_rounds() -> None:
    """A phase and a case end with a checkpoint; progress counts every cell, but not during rounds."""
    world, shown = World(), []
    batches: list[Sequence[Record]] = []

    def show(done: int, total: int, activity: str, _: RunProgress | None = None, /) -> None:
        shown.append((done, total, activity))
        world.log.append("shown")

    run_cases(plan_of(*(FakeScheme(name, world) for name in "AB")), batches.append, show, world.tools)
    ends = [(line.group, line.phase) for *_, line in batches if isinstance(line, Checkpoint)]
    assert sorted(ends[:2]) == [(0, "forward"), (0, "sample")]
    assert ends[2:] == [(0, None)]
    assert [len({row.variant for row in rows_of(batch)}) for batch in batches] == [2, 2, 0]
    assert shown[0] == (0, 4, f"set-up  A  {CASE.label}")
    assert shown[-1][:2] == (2, 4)
    silent = max("".join(name[0] for name in world.log).split("s"), key=len)
    assert len(silent) >= 4 * FEWEST_ROUNDS


def test_an_interrupt_keeps_the_rows_of_the_phases_before_it() -> None:
    """Ctrl-C is not swallowed; complete phases are stored, and the garbage collector is on again."""
    world = World()
    lines: list[Record] = []
    scheme = FakeScheme("A", world, phases=("forward", "step"), act=raising(KeyboardInterrupt(), after=50))
    plan = plan_of(scheme, phases=("forward", "step"))
    with pytest.raises(KeyboardInterrupt):
        run_cases(plan, lines.extend, lambda *_: None, world.tools)
    assert len(measurements(lines)) == 1
    assert gc.isenabled()


def test_utilization_power_and_energy_are_rows_or_a_note() -> None:
    """Readings make rows of the forward on the cases that a suite names; a missing one makes one note."""
    world = World()
    entries = [FakeScheme(name, world).entry() for name in "AB"]
    larger = msgspec.structs.replace(CASE, out_channels=8)
    for activity, active, expected, notes in (
        (Activity({"power_w": (97.0, 98.0)}), "*", {CASE: 2, larger: 2}, ()),
        (Activity({"power_w": (97.0, 98.0)}), "*(8,*", {larger: 2}, ()),
        (Activity({}, "NVML denies it"), "*", {}, ("utilization, power and energy: NVML denies it",)),
    ):
        tools = dataclasses.replace(world.tools, activity=Mock(return_value=activity))
        summary, lines = measure(*entries, tools=tools, cases=(CASE, larger), active=(active,))
        rows = measurements(lines, "power_w")
        assert {
            case: sum(row.case == case for row in rows) for case in {row.case for row in rows}
        } == expected
        assert summary.notes == notes
        assert {row.phase for row in rows} <= {"forward"}


def test_a_lost_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One error line ends the run; a second error, raised while memory is freed, does not hide the first."""
    world = World()
    lost = FakeScheme("Lost", world, act=raising(RuntimeError("CUDA error: device lost")))
    tools = dataclasses.replace(world.tools, alive=lambda: False)
    lines: list[Record] = []
    with pytest.raises(DeviceLostError, match=r"stopped responding after Lost: RuntimeError: CUDA"):
        run_cases(plan_of(lost), lines.extend, lambda *_: None, tools)
    assert not lines
    gone = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", gone)
    free_memory()
    assert gone.called


def test_the_variant_that_lost_the_device_is_announced() -> None:
    """The first announcement names the variant whose call failed, not the first variant with a row."""
    world, lost, watch = World(), Mock(return_value=False), Mock()
    error = RuntimeError("CUDA error: an illegal memory access was encountered")

    def act(phase: Phase, number: int, turn: int, *, breaks: bool = False) -> object:
        lost.return_value |= breaks and number > 12
        return raising(error)(phase, number, turn) if lost() else torch.full((2,), float(turn))

    entries = [FakeScheme("A", world, act=act), FakeScheme("Bad", world, act=partial(act, breaks=True))]
    tools = dataclasses.replace(world.tools, alive=lambda: not lost())
    plan = plan_of(*entries, phases=("forward",))
    with pytest.raises(DeviceLostError, match=r"responding after Bad: RuntimeError: CUDA"):
        run_cases(plan, lambda _: None, lambda *_: None, tools, watch=watch)
    bad, reason = entries[1].entry().variant, f"the device stopped responding (RuntimeError: {error})"
    announced = [announcement for announcement in watch.mock_calls if announcement.args[2] != "clean-up"]
    assert announced[-2:] == [call(bad, CASE, "forward"), call(bad, CASE, "forward", reason)]


def test_a_resumed_run_without_a_variant_has_all_rows_of_the_others() -> None:
    """A resumed run measures variants that have room only without the variant that ended the process."""
    world = World(room_bytes=1000)
    entries = [FakeScheme(name, world, built_bytes=600).entry() for name in "AB"]
    _, uninterrupted = measure(*entries)
    end = next(index for index, line in enumerate(uninterrupted) if isinstance(line, Checkpoint)) + 1
    crash = Skipped(
        variant=entries[0].variant, case=CASE, phase=None, status="failed", reason="the process ended"
    )
    _, resumed = measure(*entries, past=[*uninterrupted[:end], crash])
    assert {(row.variant.scheme, row.phase) for row in measurements(resumed)} == {
        ("B", "sample"),
        ("B", "forward"),
    }
    # It is not traced either, where traces come last.
    tools = dataclasses.replace(world.tools, traces_last=True)
    _, traces = measure(*entries, tools=tools, past=[*uninterrupted, crash])
    assert {row.variant.scheme for row in measurements(traces, "launches")} == {"B"}
    # Another one that ended it in the set-up of two cases is not tried on the third.
    others = [msgspec.structs.replace(CASE, members=members) for members in (16, 32)]
    reason = "the process ended with SIGSEGV during forward check"
    past = [msgspec.structs.replace(crash, case=case, reason=reason) for case in others]
    _, resumed = measure(*entries, past=past)
    assert skipped(resumed) == [
        ("A", None, "failed", f"not tried: it ended the process on 2 other cases: {reason}")
    ]
    assert {row.variant.scheme for row in measurements(resumed)} == {"B"}


def test_a_failure_replaces_the_reason_of_an_unavailable_row() -> None:
    """Base has rows in each group: a reason is stored once, and a failure after it as well."""
    stored: list[Record] = []
    unavailable = Skipped(
        variant=Variant(scheme="Base"), case=CASE, phase="forward", status="unavailable", reason="no memory"
    )
    failed = msgspec.structs.replace(unavailable, status="failed", reason="wrong result")
    recorder = Recorder(stored.extend, lambda *_: None)
    for row in (unavailable, unavailable, failed, unavailable, failed):
        recorder.store_rows([row])
    assert stored == [unavailable, failed]
    assert recorder.skipped == [failed]


def test_times_are_kept_if_the_profiler_fails() -> None:
    """Times are kept without launch counts, and a label says that the streams were not checked."""
    world = World()
    tools = dataclasses.replace(world.tools, trace=Mock(side_effect=ProfileError("no records came back")))
    summary, lines = measure(FakeScheme("A", world), tools=tools, phases=("forward",))
    assert summary == RunSummary(measured=1)
    (row,) = measurements(lines)
    assert row.labels == ("launches and streams were not checked: no records came back",)
    assert not measurements(lines, "launches")


def test_a_variant_without_room_is_measured_in_the_next_group() -> None:
    """A variant that runs out of memory in set-up or phase is moved to a new group with base."""
    apart = [(0, "Base"), (0, "A"), (1, "Base"), (1, "B")]
    together = [(0, "Base"), (0, "A"), (0, "B")]  # a call's memory is free again when the next one is called
    needs: dict[str, list[tuple[int, str]]] = {
        "built_bytes": apart,
        "entered_bytes": apart,
        "call_bytes": together,
    }
    for need, expected in needs.items():
        world = World(room_bytes=1000)
        options: dict[str, Any] = {need: 600}
        entries = [FakeScheme(name, world, **options).entry() for name in "AB"]
        base = FakeScheme("Base", world).entry("base")
        summary, lines = measure(base, *entries, phases=("forward",))
        assert groups(lines) == expected, need
        assert summary.unavailable == summary.failed == 0
        assert {len(row.samples) for row in measurements(lines)} == {FEWEST_ROUNDS}
    # Where base's call does not fit beside both variants, the last variant moves to the next group.
    world = World(room_bytes=1000)
    base = FakeScheme("Base", world, call_bytes=300).entry("base")
    entries = [FakeScheme(name, world, built_bytes=400).entry() for name in "AB"]
    assert groups(measure(base, *entries, phases=("forward",))[1]) == apart


def test_base_is_set_up_first_and_has_one_reason_for_a_missing_phase() -> None:
    """Base is set up first even if registered last; each group has it, but its missing sample is one row."""
    world = World(room_bytes=1000)
    entries = [FakeScheme(name, world, built_bytes=600).entry() for name in "AB"]
    base = FakeScheme("Base", world, phases=("forward",)).entry("base")
    summary, lines = measure(*entries, base)
    assert skipped(lines) == [("Base", "sample", "unavailable", "it has no phase sample")]
    assert summary == RunSummary(measured=6, unavailable=1)


def test_a_variant_that_never_fits_is_unavailable() -> None:
    """A variant too big for the machine is unavailable, not failed; it is not tried in further groups."""
    for built_bytes, reason in (
        (5000, "out of memory: tried to allocate 5000 bytes"),
        (800, "out of memory: tried to allocate 300 bytes"),
    ):
        world = World(room_bytes=1000)
        big = FakeScheme("Big", world, built_bytes=built_bytes).entry()
        base = FakeScheme("Base", world, call_bytes=300).entry("base")
        summary, lines = measure(base, big, FakeScheme("A", world))
        assert ("Big", None, "unavailable", reason) in skipped(lines)
        assert {name for _, name in groups(lines)} == {"Base", "A"}
        assert (summary.unavailable, summary.failed) == (1, 0)


def refusing(error: Exception, dtype: str = "") -> Callable[[Case], None]:
    """Return a check that raises an error, on all cases or only on those of one dtype."""

    def check(case: Case) -> None:
        if dtype in {"", case.dtype}:
            raise error

    return check


def test_a_variant_that_fails_its_check_gets_no_number() -> None:
    """Such a variant is never called, and its row has the error; one that cannot run is unavailable."""
    for error, status, reason in (
        (WrongResultError("forward is off by 3"), "failed", "wrong result: forward is off by 3"),
        (UnavailableError("needs a GPU"), "unavailable", "needs a GPU"),
    ):
        world = World()
        summary, lines = measure(FakeScheme("A", world, check=refusing(error)))
        assert skipped(lines) == [("A", None, status, reason)]
        assert (summary.measured, getattr(summary, status)) == (0, 1)
        assert not world.log


def test_only_screening_times_a_call_that_is_not_compared_on_new_inputs() -> None:
    """Its times choose what is measured, and then everything is compared."""
    scheme = FakeScheme("A", World(), confirms=False)
    assert len(skipped(measure(scheme)[1])) == 2
    assert skipped(measure(scheme, is_screening=True)[1]) == []


def test_a_variant_is_checked_on_exact_cases_once_per_operator() -> None:
    """A failed exact case refuses the variant on its operator; one that was not compared gives a label."""
    world, checked = World(), []
    exact = msgspec.structs.replace(CASE, dtype="float64")
    checks = (msgspec.structs.replace(exact, operator="Conv2d"), exact)

    def check(case: Case) -> None:
        checked.append(case)
        refusing(WrongResultError("off"), "float64")(case)

    larger = msgspec.structs.replace(CASE, members=16)
    entry = FakeScheme("A", world, check=check).entry()
    _, lines = measure(entry, checks=checks, cases=(CASE, larger))
    assert {row[1:] for row in skipped(lines)} == {(None, "failed", f"wrong result: off (on {exact.label})")}
    assert checked == [exact]
    declining = FakeScheme("A", world, check=refusing(UnavailableError("float32 only"), "float64"))
    assert measure(declining, checks=checks)[0] == RunSummary(measured=2)
    unavailable = Failure("unavailable", f"float32 only (on {exact.label})")
    other = msgspec.structs.replace(exact, operator="Conv2d")
    labelled: tuple[tuple[FakeScheme, tuple[Case, ...], set[str]], ...] = (
        (declining, (exact,), {f"not checked in float64: {unavailable.reason}"}),
        (declining, (other,), {"not checked in float64: the suite check has no case of its operators"}),
        (FakeScheme("A", world), (exact,), set()),
        (FakeScheme("A", world), (), set()),
    )
    for scheme, compared, labels in labelled:
        _, lines = measure(scheme, checks=compared)
        assert {label for row in measurements(lines) for label in row.labels} == labels
    for cases, outcome in (((exact,), unavailable), ((exact, CASE), None), ((CASE, exact), None)):
        assert ExactChecks(cases, "cpu", 0).outcome(declining.entry(), "Linear") == outcome


def test_an_output_that_is_not_finite_is_wrong() -> None:
    """One inf or NaN anywhere in a call's result fails the variant, in the first call or a later one."""
    wraps: tuple[Callable[[torch.Tensor], object], ...] = (lambda t: t, lambda t: [t], lambda t: {"y": (t,)})
    for value, wrap, first in (
        *itertools.product((float("nan"), float("inf"), float("-inf")), wraps, (1,)),
        *((float("nan"), wraps[0], first) for first in (2, 12)),
    ):
        world = World()

        def act(
            _: Phase, number: int, turn: int, value: float = value, wrap: Any = wrap, first: int = first
        ) -> object:
            return wrap(torch.tensor([1.0, value if number >= first else turn, 2.0]))

        summary, lines = measure(FakeScheme("A", world, act=act), phases=("forward",))
        reason = "wrong result: forward gives values that are not finite"
        assert [row[2:] for row in skipped(lines)] == [("failed", reason)], first
        assert summary == RunSummary(failed=1)


class Unreadable(BaseException):
    """An error that is no Exception and has no message."""

    @override
    def __str__(self) -> str:
        raise self


def test_a_variant_that_raises_at_any_moment_has_one_row_and_no_time() -> None:
    """Any error becomes a short printable reason, and other variants go on; Ctrl-C ends the run."""
    errors: tuple[tuple[BaseException, str], ...] = (
        (ValueError("two\n lines \ud800"), "ValueError: two lines ?"),
        (Unreadable(), "Unreadable"),
        (GeneratorExit("gone"), "GeneratorExit: gone"),
        (ValueError("\x1b[31m|\n" + "A" * 100_000), f"ValueError: [31m| {'A' * (LONGEST - 7)}…"),
        (KeyboardInterrupt(), ""),
    )
    # An error in the first calls, the warm-up, the rounds and the memory pass.
    for (error, reason), after in itertools.product(errors, (0, 1, 2, 9, 15, 16, 17)):
        world = World()
        bad = FakeScheme("Bad", world, act=raising(error, after=after)).entry()
        measuring = partial(measure, bad, FakeScheme("A", world).entry(), phases=("forward",))
        if not reason:
            with pytest.raises(KeyboardInterrupt):
                measuring()
            continue
        summary, lines = measuring()
        assert [(row[0], *row[2:]) for row in skipped(lines)] == [("Bad", "failed", reason)]
        assert {row.variant.scheme for row in lines if isinstance(row, Measurement)} == {"A"}
        assert summary == RunSummary(measured=1, failed=1)


class Sweep:
    """A run of forward calls over growing populations."""

    cases = tuple(msgspec.structs.replace(CASE, members=members) for members in (256, 64, 1024, 16))

    def __init__(self, world: World, *schemes: FakeScheme, **options: Any) -> None:
        """Measure the schemes and store the records."""
        options = {"cases": self.cases, "phases": ("forward",), "sweep": "members", **options}
        stopwatch = Stopwatch(world.clock.seconds)
        entries = [scheme.entry() for scheme in schemes]
        self.summary, self.lines = measure(*entries, stopwatch=stopwatch, **options)

    def timed(self, scheme: str) -> list[int]:
        """Return the populations on which a scheme was timed, in the order of the run."""
        return [row.case.members for row in measurements(self.lines) if row.variant.scheme == scheme]

    @property
    def reasons(self) -> list[tuple[int, str]]:
        """Return members and reason of each row without a number."""
        return [(row.case.members, row.reason) for row in self.lines if isinstance(row, Skipped)]


def test_a_sweep_stops_for_a_variant_that_takes_too_long() -> None:
    """The reason has the case, its time and the limit; it also holds in a resumed run.

    A sweep runs from small to large populations, whatever the order of the suite's cases.
    """
    world = World()

    def check(case: Case) -> None:
        world.clock.now_s += case.members

    slow, quick = FakeScheme("Slow", world, check=check), FakeScheme("Quick", world)
    sweep = Sweep(world, slow, quick, stop_s=60.0)
    assert sweep.timed("Slow") == [16, 64]
    assert sweep.timed("Quick") == [16, 64, 256, 1024]
    ((_, first), (_, second)) = sweep.reasons
    assert first == second
    assert first.startswith("time budget: members 64 took 64")
    assert first.endswith(" s in all, above 60 s")
    assert [members for members, _ in sweep.reasons] == [256, 1024]
    # Cut the run between the last phase of 64 members and the end of that case.
    ends = [n for n, line in enumerate(sweep.lines) if isinstance(line, Checkpoint) and line.phase]
    kept = sweep.lines[: ends[1] + 1]
    resumed = Sweep(World(), dataclasses.replace(slow, check=lambda _: None), stop_s=60.0, past=kept)
    assert [members for members, _ in resumed.reasons] == [256, 1024]
    assert resumed.timed("Slow") == []


def test_a_sweep_stops_for_a_variant_that_does_not_fit() -> None:
    """On the first case that does not fit, bisection finds how many members do."""
    world = World(room_bytes=1000)
    sweep = Sweep(world, FakeScheme("Big", world, bytes_per_member=5))
    assert sweep.timed("Big") == [16, 64]
    assert sweep.reasons == [
        (256, "out of memory: tried to allocate 1290 bytes"),
        (1024, "stopped: out of memory already at members 256"),
    ]
    (row,) = measurements(sweep.lines, "largest_members")
    (members,) = row.samples[0]
    assert row.case.members == 256
    assert 190 <= members <= (1000 - 10) / 5


def test_the_largest_population_is_searched_in_a_phase_that_all_variants_have() -> None:
    """The search uses forward for base, which draws no noise and has no sample phase."""
    world = World(room_bytes=100)
    base = FakeScheme("Base", world, built_bytes=200, phases=("forward",)).entry("base")
    summary, lines = measure(base)
    (row,) = measurements(lines, "largest_members")
    assert (row.phase, row.samples) == ("forward", ((0.0,),))
    assert summary.notes == ()


KAPPA = QualityMetric("kappa", "linear fitness", (-0.5, 0.25))
TIMED_WITH_QUALITY: tuple[Phase, ...] = ("forward", QUALITY)


def yield_metrics(*metrics: QualityMetric, error: Exception | None = None) -> Iterator[QualityMetric]:
    """Yield quality metrics, by default kappa; then raise the error, if one is given."""
    yield from metrics or (KAPPA,)
    if error:
        raise error


@dataclasses.dataclass(frozen=True, eq=False)
class WithQuality(FakeScheme):
    """A fake variant with quality metrics."""

    metrics: Callable[[], Iterator[QualityMetric]] = yield_metrics


class WithQualityWorkload(FakeWorkload):
    """A workload that takes a second to compute its metrics."""

    scheme: WithQuality

    def quality(self) -> Iterator[QualityMetric]:
        """Return the metrics of the scheme."""
        self.scheme.world.log.append(f"{self.scheme.name} quality")
        self.scheme.world.clock.now_s += 1.0
        return self.scheme.metrics()


@build.register
def _(scheme: WithQuality, case: Case, device: str, seed: int) -> Any:  # noqa: ARG001  # the signature of build
    return WithQualityWorkload(scheme, case)


def test_quality_metrics_become_rows() -> None:
    """Each quality metric has a row with all its replicates, also negative ones, and no time or memory."""
    world = World()
    dots = QualityMetric("dot_mean", "pairs", (0.0, 0.125, -0.125))
    entry = WithQuality("A", world, metrics=partial(yield_metrics, KAPPA, dots)).entry()
    summary, lines = measure(entry, phases=(QUALITY, "sample", "forward"))
    stored = [
        (r.metric, r.method, r.samples) for r in lines if isinstance(r, Measurement) and r.phase == QUALITY
    ]
    assert stored == [("kappa", "linear fitness", ((-0.5, 0.25),)), ("dot_mean", "pairs", (dots.samples,))]
    assert {row.phase for row in measurements(lines)} == {"sample", "forward"}
    assert summary.measured == 3
    assert (world.log[-1], world.log.count("A quality")) == ("A quality", 1)  # quality comes last
    world = World()
    summary, lines = measure(WithQuality("A", world), phases=(QUALITY,))
    assert [line.metric for line in lines if isinstance(line, Measurement)] == ["kappa"]
    assert world.log == ["A quality"]  # no call was made
    assert summary.measured == 1


def test_quality_that_fails_costs_its_own_row_only() -> None:
    """The quality row has the reason; times, other metrics and other variants are kept."""
    for metrics, status, method, words in (
        (
            partial(yield_metrics, error=UnavailableError("no such thing")),
            "unavailable",
            None,
            "no such thing",
        ),
        (partial(yield_metrics, error=KeyError("x")), "failed", None, "KeyError: 'x'"),
        (partial(yield_metrics, error=MemoryError("much")), "unavailable", None, "out of memory: much"),
        *(
            (partial(yield_metrics, QualityMetric("kappa", "m", *fields), KAPPA), "unavailable", "m", words)
            for fields, words in (
                (((), "none was derived"), "none was derived"),
                (((0.0, float("nan")),), "1 of 2 samples are not finite"),
                ((), "the metric has no samples"),
            )
        ),
    ):
        world = World()
        entries = (WithQuality("A", world, metrics=metrics).entry(), WithQuality("B", world).entry())
        summary, lines = measure(*entries, phases=TIMED_WITH_QUALITY)
        assert skipped(lines) == [("A", QUALITY, status, words)]
        assert [row.method for row in lines if isinstance(row, Skipped)] == [method]
        with_kappa = [row.variant.scheme for row in measurements(lines, "kappa")]
        assert with_kappa == (["A", "B"] if method else ["B"])
        assert [row.variant.scheme for row in measurements(lines)] == ["A", "B"]
        assert summary.failed == (status == "failed")
    world = World()  # the workload of this variant has no method for its quality
    _, lines = measure(FakeScheme("A", world), phases=TIMED_WITH_QUALITY)
    assert skipped(lines) == [
        ("A", QUALITY, "unavailable", "no quality metrics: its workload has no method quality")
    ]
    assert measurements(lines)


def test_quality_of_base_is_computed_once() -> None:
    """Base is in every group, but its metrics are computed only in the first, also after resuming."""
    world = World(room_bytes=1000)
    entries = [WithQuality("Base", world).entry("base")]
    entries += [WithQuality(name, world, built_bytes=600).entry() for name in "AB"]
    stopwatch = Stopwatch(world.clock.seconds)
    _, lines = measure(*entries, stopwatch=stopwatch, phases=TIMED_WITH_QUALITY)
    computed = [(row.group, row.variant.scheme) for row in measurements(lines, "kappa")]
    assert computed == [(0, "Base"), (0, "A"), (1, "B")]
    assert stopwatch.spent_s["quality"] == pytest.approx(3.0)
    last = next(n for n, line in enumerate(lines) if isinstance(line, Checkpoint) and line.phase == QUALITY)
    kept = lines[: last + 1]
    world.log.clear()
    _, resumed = measure(*entries, past=kept, phases=TIMED_WITH_QUALITY)
    assert [name for name in world.log if name.endswith("quality")] == ["B quality"]
    assert len(measurements([*kept, *resumed], "kappa")) == 3


def test_quality_is_not_a_timed_phase_and_may_be_negative() -> None:
    """Only quality may be negative: a negative time is refused when made and when read."""
    assert parse_phases("quality, forward") == ("forward", QUALITY)
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
