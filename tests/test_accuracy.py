"""The study of the harness itself: its records, its figures, its page, and a tiny real one."""

import contextlib
import dataclasses
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch.utils.benchmark import Timer as TorchTimer
from typer.testing import CliRunner

from esbench.cli import app
from esbench.errors import UserError
from esbench.measure.accuracy import kernels, replicate, sampling, study, timers
from esbench.measure.accuracy.kernels import Kernel
from esbench.measure.accuracy.study import Pace, Plan
from esbench.measure.accuracy.timers import Timer
from esbench.measure.timing import HostClock, Visit
from esbench.plugins import load_installed
from esbench.records import SCHEMA_VERSION, Environment, Run, RunEnd, RunHeader
from esbench.report import evidence
from esbench.report.accuracy import accuracy_page, render_accuracy
from esbench.report.goals import Goal, goals
from esbench.studies import SCHEMA, Missing, Question, Reading, Study, newest_studies, read_study, write_study

HERE = Environment(
    device="cpu",
    device_name="Some CPU",
    cpu="Some CPU",
    threads=2,
    memory_bytes=1,
    platform="p",
    python="3.11",
    torch="2.13",
    esbench="0.1",
    load=0.5,
)
TORCH, BY_CALL = "torch.utils.benchmark", "torch.utils.benchmark, call by call"
ROUNDS = 10


def reading(
    question: Question, kernel: str, arm: str, rounds: Sequence[Sequence[float]], **fields: Any
) -> Reading:
    """Make a reading from microseconds."""
    samples = tuple(tuple(1e3 * sample for sample in samples) for samples in rounds)
    return Reading(question=question, kernel=kernel, arm=arm, samples=samples, **fields)


def study_of(*readings: Reading, missing: tuple[Missing, ...] = (), number: int = 0, **fields: Any) -> Study:
    """Make a study of readings."""
    return Study(
        schema=SCHEMA,
        study_id=f"study-{number}",
        started="2026-11-21T00:00:00+00:00",
        seed=0,
        wall_s=100.0,
        environment=msgspec.structs.replace(HERE, **fields),
        load_after=1.5,
        readings=readings,
        missing=missing,
    )


def run_that_spent(
    run_id: str, spent_s: dict[str, float], suite: str = "quick", device: str = "Some CPU"
) -> Run:
    """Make a run that says where its time went."""
    header = RunHeader(
        schema=SCHEMA_VERSION,
        run_id=run_id,
        suite=suite,
        started="",
        seed=0,
        environment=msgspec.structs.replace(HERE, device_name=device),
    )
    return Run(header=header, rows=(), end=RunEnd(status="complete", wall_s=1.0, spent_s=spent_s))


def goal(found: Sequence[Goal], words: str) -> Goal:
    """Find the one goal that says this."""
    (one,) = [one for one in found if words in one.goal]
    return one


WHOLE = study_of(
    reading("agreement", "a | b", "esbench", [[200, 202, 198]] * ROUNDS),
    reading("agreement", "a | b", TORCH, [[200.5, 200]] * ROUNDS),
    reading("twins", "add", "first name", [[10, 11]] * ROUNDS, places=(0, 1) * 5),
    reading("twins", "add", "second name", [[10, 11]] * ROUNDS, places=(1, 0) * 5),
    reading("sequence", "add", "first name", [[10, 11]] * ROUNDS),
    reading("sequence", "add", "second name", [[12, 13]] * ROUNDS),
    reading("length", "wait", "esbench", [[1000.5]] * ROUNDS, expected_ns=1e6),
    reading("replicates", "add", "process 1", [[10]] * ROUNDS),
    reading("replicates", "add", "process 2", [[10.01]] * ROUNDS),
    missing=(Missing(question="sampler", arm="sampled", reason="no GPU"),),
)


def test_a_study_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """In the folder of its device, all of it, and nothing beside it."""
    path = write_study(WHOLE, tmp_path)
    assert read_study(path) == WHOLE
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.*")] == [
        "some-cpu/accuracy/study-0.json"
    ]


def test_an_interrupt_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither under the study's name nor under another."""
    monkeypatch.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_study(WHOLE, tmp_path)
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace(b'"seed"', b'"sead"'), "sead"),
        (lambda text: text.replace(b"10000.0", b"0.0"), "readings"),
        (lambda text: text.replace(b'"schema":1', b'"schema":9'), "schema 9"),
        (lambda text: text[:100], "not a study"),
    ],
    ids=["unknown field", "zero time", "another version", "half a file"],
)
def test_what_cannot_be_a_study_is_refused_in_one_line(
    tmp_path: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    """With the file and the field."""
    path = write_study(WHOLE, tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=words) as error:
        newest_studies(tmp_path)
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)


def test_the_newest_study_of_each_device_is_shown(tmp_path: Path) -> None:
    """An older one stays in its file."""
    for number in (2, 1):
        write_study(study_of(number=number), tmp_path)
    write_study(study_of(number=0, device_name="Another"), tmp_path)
    assert [found.study_id for found in newest_studies(tmp_path)] == ["study-0", "study-2"]


def test_the_same_studies_give_the_same_page(tmp_path: Path) -> None:
    """Byte for byte, with every table, where it was taken and what was missing."""
    write_study(WHOLE, tmp_path)
    pages = [render_accuracy(tmp_path, tmp_path / out)[0] for out in ("a", "b")]
    first, second = (page.read_bytes() for page in pages)
    assert first == second
    text = first.decode()
    for words in (
        "## Some CPU",
        "load average 0.500 before and 1.50 after",
        "a \\| b",
        "no GPU",
        "2 threads",
    ):
        assert words in text
    assert text.count("### ") == 6


def test_words_of_a_foreign_study_are_not_live() -> None:
    """A link in the name of a device stays a name."""
    assert "## \\[a\\](b)\n" in accuracy_page([study_of(device_name="[a](b)")], [])


def test_without_a_study_there_is_no_page(tmp_path: Path) -> None:
    """Nothing is written."""
    assert render_accuracy(tmp_path, tmp_path / "out") == []
    assert not (tmp_path / "out").exists()


def test_an_empty_study_meets_nothing(tmp_path: Path) -> None:
    """Every goal is shown as not shown, none as met."""
    assert {found.met for found in goals(study_of(), None)} == {None}
    write_study(study_of(), tmp_path)
    assert "not shown" in render_accuracy(tmp_path, tmp_path)[0].read_text()


@pytest.mark.parametrize(("bias", "met"), [(1.0, True), (1.009, True), (1.02, False), (0.98, False)])
@pytest.mark.parametrize("timer", [TORCH, BY_CALL])
def test_a_timer_that_is_further_off_than_one_percent_is_shown_to_be(
    timer: str, bias: float, met: bool
) -> None:
    """Ours reads so many times what the other reads, in every round, however fast the machine was then."""
    speeds = [1 + 0.3 * (k % 3) for k in range(ROUNDS)]
    ours = reading("agreement", "k", "esbench", [[200 * bias * speed] * 4 for speed in speeds])
    samples = 1 if timer == TORCH else 4
    theirs = reading("agreement", "k", timer, [[200 * speed] * samples for speed in speeds])
    found = study_of(ours, theirs)
    assert goal(goals(found, None), f"of {timer} above").met is met
    assert evidence.agreements(found)[0].ratio.median == pytest.approx(bias)
    assert ("**no**" in accuracy_page([found], [])) is not met


def test_one_kernel_that_is_off_is_enough_to_miss_a_goal() -> None:
    """The other is near."""
    rows = [
        reading("agreement", kernel, arm, [[us] * 4] * ROUNDS)
        for kernel, arm, us in (
            ("a", "esbench", 200.0),
            ("a", TORCH, 200.0),
            ("b", "esbench", 204.0),
            ("b", TORCH, 200.0),
        )
    ]
    one = goal(goals(study_of(*rows), None), f"{TORCH} above")
    assert (one.met, one.found) == (False, "1 of 2 kernels, 0 unclear; the furthest is 2.00 % off")


def test_what_is_off_is_unclear_where_its_interval_reaches_below_the_limit() -> None:
    """The median ratio is 2 % off, and the rounds lie 4 % around it."""
    shares = [1.02 + 0.04 * (-1) ** k * (k > 1) for k in range(ROUNDS)]
    ours = reading("agreement", "k", "esbench", [[200 * share] * 4 for share in shares])
    theirs = reading("agreement", "k", TORCH, [[200.0]] * ROUNDS)
    one = goal(goals(study_of(ours, theirs), None), f"{TORCH} above")
    assert (one.met, one.found) == (False, "0 of 1 kernels, 1 unclear; the furthest is 2.00 % off")


def test_only_arms_of_the_same_sitting_share_rounds() -> None:
    """The machine was faster in the second, and one of the two left the first a round earlier."""
    rows = [
        reading("agreement", "k", arm, [[us] * samples] * rounds, sitting=sitting)
        for sitting, us in ((0, 300.0), (1, 200.0))
        for arm, samples, rounds in (("esbench", 4, 6), (TORCH, 1, 5 + sitting))
    ]
    (found,) = evidence.agreements(study_of(*rows))
    assert (found.ratio.low, found.ratio.high, found.rounds) == (1, 1, 11)
    twice = [
        reading("twins", "k", arm, [[us]] * 6, sitting=sitting, places=(place,) * 6)
        for sitting, us in ((0, 300.0), (1, 200.0))
        for place, arm in enumerate(("first name", "second name"))
    ]
    (one,) = evidence.twins(study_of(*twice[:-1]), "twins")
    assert (one.half_range, one.rounds) == (0, 6)
    assert evidence.twins(study_of(*twice), "twins")[0].rounds == 12


def test_a_short_kernel_is_shown_and_not_judged() -> None:
    """The goal begins at 100 us."""
    ours = reading("agreement", "k", "esbench", [[5.0] * 4] * ROUNDS)
    theirs = reading("agreement", "k", TORCH, [[4.0]] * ROUNDS)
    assert goal(goals(study_of(ours, theirs), None), f"{TORCH} above").met is None
    assert "+25.0" in accuracy_page([study_of(ours, theirs)], [])


def test_a_mean_of_a_block_is_compared_with_a_mean() -> None:
    """One slow call of four moves the mean of a visit, in ours as in the block, and not the median."""
    ours = reading("agreement", "k", "esbench", [[200.0, 200.0, 200.0, 400.0]] * ROUNDS)
    block = reading("agreement", "k", TORCH, [[250.0, 250.0]] * ROUNDS)
    (found,) = evidence.agreements(study_of(ours, block))
    assert found.ratio.median == pytest.approx(1)
    assert found.difference == pytest.approx(-0.2)


def test_a_timer_with_a_cold_cache_stands_beside_our_cold_time() -> None:
    """And one that keeps the cache warm beside our warm one."""
    cold = reading("agreement", "k", "esbench", [[300.0] * 4] * ROUNDS)
    warm = reading("agreement", "k", "esbench", [[200.0] * 4] * ROUNDS, metric="warm_latency_ns")
    host = reading("agreement", "k", "esbench", [[9.0] * 4] * ROUNDS, metric="host_latency_ns")
    theirs = [
        reading("agreement", "k", timer, [[value] * 4] * ROUNDS)
        for timer, value in ((TORCH, 200.0), ("triton.testing.do_bench", 300.0))
    ]
    found = evidence.agreements(study_of(cold, warm, host, *theirs, device="cuda"))
    assert [one.ratio.median for one in found] == [pytest.approx(1)] * 2


def two(first: Sequence[float], second: Sequence[float], places: Sequence[int]) -> Study:
    """Make a study of one call under two names."""
    return study_of(
        reading("twins", "k", "first name", [[value] for value in first], places=tuple(places)),
        reading("twins", "k", "second name", [[v] for v in second], places=tuple(1 - p for p in places)),
    )


def test_twins_that_drift_together_are_equal() -> None:
    """A ratio taken inside a round is free of what happens between rounds."""
    drift = [10.0 + k for k in range(ROUNDS)]
    (found,) = evidence.twins(two(drift, drift, (0, 1) * 5), "twins")
    assert (found.half_range, found.bias, found.ratio.relative) == (0, 0, 0)


def test_a_slower_first_visit_is_shown_whichever_name_had_it() -> None:
    """Each name is first in half of the rounds, so that the ratio of the names shows nothing."""
    places = (0, 1) * 5
    first = [10.1 if place == 0 else 10.0 for place in places]
    second = [10.0 if place == 0 else 10.1 for place in places]
    found = two(first, second, places)
    (one,) = evidence.twins(found, "twins")
    assert one.bias == pytest.approx(0.01)
    assert one.half_range == pytest.approx(0.01, rel=0.02)
    assert goal(goals(found, None), "visited first").met is False
    assert goal(goals(found, None), "under two names").met is False


def test_one_after_the_other_the_first_name_is_always_first() -> None:
    """The ratio is the order's."""
    (found,) = evidence.twins(WHOLE, "sequence")
    assert found.bias == pytest.approx(10.5 / 12.5 - 1)


def test_a_constant_that_the_harness_adds_matters_to_short_waits_alone() -> None:
    """0.3 us more are 3 % of 10 us and 0.03 % of 1 ms."""
    waits = [
        reading("length", f"{us}", "esbench", [[us + 0.3] * 3], expected_ns=us * 1e3) for us in (10.0, 1000.0)
    ]
    found = evidence.lengths(study_of(*waits))
    assert [one.excess_ns for one in found] == [pytest.approx(300)] * 2
    assert [one.error for one in found] == [pytest.approx(0.03), pytest.approx(0.0003)]
    one = goal(goals(study_of(*waits), None), "known length")
    assert one.met is False
    assert "1 of 2 lengths; the worst is 10" in one.found


def test_on_a_gpu_the_longest_spin_sets_the_scale() -> None:
    """All are 5 % longer than asked for: they are proportional, which is what can be known."""
    waits = [
        reading("length", f"{us}", "esbench", [[us * 1.05] * 3], expected_ns=us * 1e3)
        for us in (10.0, 1000.0)
    ]
    found = study_of(*waits, device="cuda")
    assert [one.error for one in evidence.lengths(found)] == [pytest.approx(0)] * 2
    assert goal(goals(found, None), "known length").met is True


def test_the_variation_of_fresh_processes_is_that_of_their_medians() -> None:
    """Standard deviation with n - 1, by the mean: of 9, 10 and 11 it is a tenth."""
    rows = [reading("replicates", "k", f"process {us}", [[us, us, 100.0]]) for us in (9.0, 10.0, 11.0)]
    (found,) = evidence.replicates(study_of(*rows))
    assert found.variation == pytest.approx(0.1)
    assert goal(goals(study_of(*rows), None), "fresh processes").met is False


def test_the_time_outside_measuring_is_of_the_newest_quick_run_on_this_device() -> None:
    """Not of another suite, another device, or one that does not say."""
    runs = [
        run_that_spent("2", {"rounds": 97.0, "other": 3.0}),
        run_that_spent("1", {"rounds": 1.0, "other": 1.0}),
        run_that_spent("3", {}),
        run_that_spent("4", {"other": 1.0}, suite="readme"),
        run_that_spent("5", {"other": 1.0}, device="Another"),
    ]
    newest = evidence.newest_quick_run(WHOLE, runs)
    assert newest is runs[0]
    one = goal(goals(WHOLE, newest), "quick run")
    assert (one.found, one.met) == ("3.00 %", True)
    assert goal(goals(WHOLE, runs[1]), "quick run").met is False
    assert "| other" in accuracy_page([WHOLE], runs)


def test_a_sampler_that_slows_a_kernel_down_is_shown() -> None:
    """By the ratio inside rounds; with one of the two alone there is nothing to compare."""
    without = reading("sampler", "k", "not sampled", [[100.0] * 3] * ROUNDS)
    with_it = reading("sampler", "k", "sampled", [[103.0] * 3] * ROUNDS)
    assert "+3.00" in accuracy_page([study_of(without, with_it)], [])
    assert evidence.sampled(study_of(without)) == []


class FakeClock:
    """A clock that kernels move, and that reads so many times what passed."""

    method = "fake"
    warm_up_s = (0.0, 0.0)

    def __init__(self) -> None:
        """Start at zero."""
        self.now_s = 0.0

    def seconds(self) -> float:
        """Return the time."""
        return self.now_s

    def prepare(self, call: Callable[[], object], turns: int) -> Callable[[], object]:  # noqa: ARG002  # a clock's signature
        """Return the call as it is."""
        return call

    def visit(self, call: Callable[[], object], calls: int) -> Visit:
        """Return what the calls took."""
        return Visit({"latency_ns": tuple(self.read(call, calls))})

    def read(self, call: Callable[[], object], calls: int, share: float = 1.0) -> Iterator[float]:
        """Yield so many times what each call took."""
        for _ in range(calls):
            start_s = self.now_s
            call()
            yield (self.now_s - start_s) * 1e9 * share

    def kernel(self, name: str, cost_s: float, expected_ns: float | None = None) -> Kernel:
        """Return a call that takes so long."""

        def call() -> None:
            self.now_s += cost_s

        return Kernel(name, call, expected_ns)


def fake_plan(clock: FakeClock) -> Plan:
    """Plan a study of two kernels and two rounds without a process."""
    biased = Timer(BY_CALL, lambda call, calls: tuple(clock.read(call, calls, 1.05)))
    broken = Timer("broken", Mock(side_effect=RuntimeError("no driver")))
    return Plan(
        clock=clock,
        kernels=[clock.kernel("short", 1e-4), clock.kernel("long", 1e-3)],
        waits=[clock.kernel("wait", 1e-3, 1e6)],
        timers=[biased, broken],
        reasons={"cuda-bench": "not installed"},
        unsampled="no GPU",
        pace=Pace(sittings=1, rounds=2, processes=0),
    )


def test_a_biased_timer_is_found_by_the_study_itself() -> None:
    """Each question is read, a timer that raises is missing with its reason, and 5 % are seen."""
    found = study.study(fake_plan(FakeClock()), HERE, Mock())
    assert {one.question for one in found.readings} == {"agreement", "twins", "sequence", "length"}
    assert {len(one.samples) for one in found.of("agreement")} == {2}
    assert [one.ratio.median for one in evidence.agreements(found)] == [pytest.approx(1 / 1.05)] * 2
    reasons = {(one.arm, one.kernel): one.reason for one in found.missing}
    assert "no driver" in reasons["broken", "long"]
    assert reasons["cuda-bench", ""] == "not installed"
    assert reasons["sampled", ""] == "no GPU"
    (length,) = evidence.lengths(found)
    assert length.error == pytest.approx(0)


def test_all_timers_stay_for_the_rounds_of_an_agreement() -> None:
    """None leaves because it knows enough: the others would be compared with nothing."""
    plan = dataclasses.replace(fake_plan(FakeClock()), pace=Pace(sittings=1, rounds=12, processes=0))
    found = study.study(plan, HERE, Mock())
    assert {len(one.samples) for one in found.of("agreement")} == {12}


def test_progress_names_each_step() -> None:
    """From the first to the last, with as many in all."""
    progress = Mock()
    study.study(fake_plan(FakeClock()), HERE, progress)
    steps = [call.args for call in progress.call_args_list]
    assert [done for done, _, _ in steps] == list(range(len(steps)))
    assert {total for _, total, _ in steps} == {len(steps)}
    assert steps[0][2] == "agreement: short"


def test_a_timer_that_reads_zero_is_missing() -> None:
    """No call takes no time."""
    plan = dataclasses.replace(fake_plan(FakeClock()), timers=[Timer("dead", Mock(return_value=[0.0]))])
    found = study.study(plan, HERE, Mock())
    assert {one.reason for one in found.missing if one.arm == "dead"} == {"it read a time of zero"}


def test_a_real_study_is_stored_and_shown(tmp_path: Path) -> None:
    """Two kernels, two rounds, every timer of a CPU, one fresh process."""
    others, reasons = timers.timers("cpu")
    plan = Plan(
        clock=HostClock(),
        kernels=kernels.kernels("cpu", 0)[:2],
        waits=kernels.waits("cpu")[:2],
        timers=others,
        reasons=reasons,
        unsampled="no GPU",
        pace=Pace(sittings=2, rounds=2, agreement_s=0.1, twins_s=0.02, length_s=0.02, processes=1),
    )
    found = study.study(plan, HERE, Mock())
    assert len(found.of("agreement")) == 2 * 2 * 4
    assert {one.rounds for one in evidence.agreements(found)} == {2 * 2}
    for question in ("agreement", "twins", "sequence"):
        assert {one.sitting for one in found.readings if one.question == question} == {0, 1}
    assert {one.kernel for one in found.of("replicates")} == set(replicate.REPLICATED["cpu"])
    write_study(found, tmp_path)
    (page,) = render_accuracy(tmp_path, tmp_path)
    assert all(kernel.name in page.read_text() for kernel in plan.kernels)


def test_a_process_that_fails_is_missing_and_says_nothing_of_this_machine() -> None:
    """Its last line is the reason; where Python lives is not."""
    plan = fake_plan(FakeClock())
    (missing,) = study.fresh(plan, "nonsense", 3)
    assert isinstance(missing, Missing)
    assert missing.arm == "process 3"
    assert "exit code 1" in missing.reason
    assert sys.executable not in missing.reason


def test_the_kernels_of_a_cpu_have_names_of_their_own_and_run() -> None:
    """The three of the fresh processes are among them."""
    found = kernels.kernels("cpu", 0)
    names = [kernel.name for kernel in found]
    assert len(names) == len(set(names)) >= 12
    assert set(replicate.REPLICATED["cpu"]) <= set(names)
    assert all(isinstance(kernel.call(), torch.Tensor) for kernel in found[:6])


def test_a_registered_scheme_is_one_of_the_kernels() -> None:
    """Its forward, on a case of the suite quick."""
    load_installed()
    (kernel,) = kernels.scheme("cpu", 0)
    assert isinstance(kernel.call(), torch.Tensor)


def test_a_block_of_calls_runs_with_as_many_threads_as_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default torch's timer takes one."""
    made = Mock(wraps=TorchTimer)
    monkeypatch.setattr(timers, "TorchTimer", made)
    call = Mock()
    (mean,) = timers.by_block(call, 5)
    assert mean > 0
    assert made.call_args.kwargs["num_threads"] == torch.get_num_threads()
    assert len(timers.by_call(call, 3)) == 3
    assert len(timers.by_timeit(call, 3)) == 1


def test_kernels_are_summed_from_flush_to_flush() -> None:
    """A call may launch none, one or several."""
    records = [("fill", 9.0), ("a", 1.0), ("b", 2.0), ("fill", 9.0), ("fill", 9.0), ("a", 4.0)]
    assert timers.split(records, 3) == [3.0, 0.0, 4.0]


def test_a_lost_record_is_an_error() -> None:
    """It would be a call that took no time."""
    with pytest.raises(RuntimeError, match="1 of 2 calls"):
        timers.split([("fill", 9.0), ("a", 1.0)], 2)


def test_triton_is_asked_for_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its milliseconds become nanoseconds."""
    testing = types.ModuleType("triton.testing")
    testing.do_bench = Mock(return_value=[1.0, 2.0])  # type: ignore[attr-defined]  # a stand-in for a module
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    assert timers.by_do_bench(Mock(), 2) == [1e6, 2e6]
    assert testing.do_bench.call_args.kwargs["return_mode"] == "all"


def test_nvbench_registers_once_and_times_the_call_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seconds become nanoseconds; what it was told to run, it runs each time."""
    bench, results = types.ModuleType("cuda.bench"), types.ModuleType("cuda.bench.results")
    registered: list[Callable[[Any], None]] = []
    state = Mock()
    state.exec = lambda launch, **_: launch(Mock())
    run_all = Mock(side_effect=lambda _: [one(state) for one in registered])
    answer = Mock()
    answer.from_json.return_value.values.return_value = [[Mock(samples=[1e-6, 2e-6])]]
    vars(bench).update(register=registered.append, run_all_benchmarks=run_all)
    vars(results).update(BenchmarkResult=answer)
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bench", bench)
    monkeypatch.setitem(sys.modules, "cuda.bench.results", results)
    monkeypatch.setattr(torch.cuda, "ExternalStream", Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    calls = [Mock(), Mock()]
    for call in calls:
        assert timers.by_nvbench(call, 2) == [pytest.approx(1e3), pytest.approx(2e3)]
    assert len(registered) == 1
    assert [call.call_count for call in calls] == [1, 1]


def test_what_a_device_cannot_be_timed_with_is_said() -> None:
    """On a CPU nothing that times a GPU; on a GPU nothing that does not wait for it."""
    found, reasons = timers.timers("cpu")
    assert [timer.method for timer in found] == [TORCH, BY_CALL, "timeit"]
    assert len(reasons) == 3
    assert "timeit" in timers.timers("cuda")[1]


def test_the_sampler_runs_beside_each_visit_and_only_then() -> None:
    """It is started before the first call and stopped after the last."""
    log: list[str] = []

    @contextlib.contextmanager
    def sampling_thread() -> Iterator[None]:
        log.append("start")
        yield
        log.append("stop")

    beside = sampling.Sampled(FakeClock(), sampling_thread)
    beside.visit(lambda: log.append("call"), 2)
    assert log == ["start", "call", "call", "stop"]
    assert sampling.sampled(FakeClock(), "cpu")[0] is None


def test_the_command_stores_the_study_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints every verdict and ends with 0 though goals are missed."""
    monkeypatch.setattr(study, "plan_for", lambda *_: fake_plan(FakeClock()))
    command = ["accuracy", "--device", "cpu", "--out", str(tmp_path), "--reports", str(tmp_path / "pages")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "not met" in result.stdout
    assert (tmp_path / "pages" / "accuracy.md").exists()
    assert len(newest_studies(tmp_path)) == 1


def test_an_interrupted_command_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so."""
    monkeypatch.setattr(study, "study", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(study, "plan_for", Mock())
    result = CliRunner().invoke(app, ["accuracy", "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert "nothing is stored" in result.stderr
    assert not list(tmp_path.iterdir())
