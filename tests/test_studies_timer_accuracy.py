"""The timer study: its figures and goals, its file and page, and its measurement."""

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
from esbench.measure.timers import HostClock, Visit
from esbench.studies import timer_accuracy as study
from esbench.studies import timer_accuracy_run
from esbench.studies.timer_accuracy import (
    DO_BENCH,
    SCHEMA,
    TORCH,
    Goal,
    Missing,
    Question,
    Reading,
    Study,
    goals,
)
from esbench.studies.timer_accuracy_run import Kernel, Plan, Timer
from tests.study_cases import HERE

ROUNDS = 10


def reading(
    question: Question, kernel: str, arm: str, rounds: Sequence[Sequence[float]], **fields: Any
) -> Reading:
    """Return a reading from microseconds."""
    samples = tuple(tuple(1e3 * sample for sample in samples) for samples in rounds)
    return Reading(question=question, kernel=kernel, arm=arm, samples=samples, **fields)


def study_of(*readings: Reading, missing: tuple[Missing, ...] = (), number: int = 0, **fields: Any) -> Study:
    """Return a study with these readings."""
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


WHOLE = study_of(
    reading("agreement", "a | b", "esbench", [[200, 202, 198]] * ROUNDS),
    reading("agreement", "a | b", TORCH, [[200.5, 200]] * ROUNDS),
    reading("twins", "add", "first name", [[10, 11]] * ROUNDS, places=(0, 1) * 5),
    reading("twins", "add", "second name", [[10, 11]] * ROUNDS, places=(1, 0) * 5),
    reading("length", "wait", "esbench", [[1000.5]] * ROUNDS, expected_ns=1e6),
    reading("replicates", "add", "process 1", [[10]] * ROUNDS),
    reading("replicates", "add", "process 2", [[10.01]] * ROUNDS),
    missing=(Missing(question="agreement", arm=DO_BENCH, reason="no GPU"),),
)


def goal(found: Study, words: str) -> Goal:
    """Return the one goal with these words."""
    (one,) = [one for one in goals(found) if words in one.goal]
    return one


# Figures and goals


def test_a_timer_that_differs_by_more_than_one_percent_misses_the_goal() -> None:
    """The speed of a round does not matter; it is unclear if the interval includes 1 %."""
    assert {one.met for one in goals(study_of())} == {None}
    speeds = [1 + 0.3 * (k % 3) for k in range(ROUNDS)]
    theirs = reading("agreement", "k", TORCH, [[200 * speed] for speed in speeds])
    for bias, met in ((1.0, True), (1.009, True), (1.02, False), (0.98, False)):
        ours = reading("agreement", "k", "esbench", [[200 * bias * speed] * 4 for speed in speeds])
        found = study_of(ours, theirs)
        assert goal(found, f"of {TORCH} above").met is met
        assert ratios(found) == [pytest.approx(bias)]
        assert ("**no**" in study.page([found])) is not met
    near = [reading("agreement", "near", arm, [[200.0] * 4] * ROUNDS) for arm in ("esbench", TORCH)]
    one = goal(study_of(*near, ours, theirs), f"{TORCH} above")
    assert (one.met, one.found) == (False, "1 of 2 kernels, 0 unclear; worst 2.00 %")
    shares = [1.02 + 0.04 * (-1) ** k * (k > 1) for k in range(ROUNDS)]
    noisy = reading("agreement", "k", "esbench", [[200 * share] * 4 for share in shares])
    steady = reading("agreement", "k", TORCH, [[200.0]] * ROUNDS)
    one = goal(study_of(noisy, steady), f"{TORCH} above")
    assert (one.met, one.found) == (False, "0 of 1 kernels, 1 unclear; worst 2.00 %")
    short = [reading("agreement", "k", arm, [[us] * 4] * ROUNDS) for arm, us in (("esbench", 5), (TORCH, 4))]
    assert goal(study_of(*short), f"{TORCH} above").met is None
    assert "+25.0" in study.page([study_of(*short)])


def ratios(found: Study) -> list[float]:
    """Return the ratios of the harness to other timers."""
    return [1 + row["in-round difference (%)"] for row in study.agreements(found)]


def test_means_are_compared_with_means_and_warm_with_warm() -> None:
    """One slow call moves a block's mean; timers that do not flush the cache are compared with warm times."""
    ours = reading("agreement", "k", "esbench", [[200.0, 200.0, 200.0, 400.0]] * ROUNDS)
    block = reading("agreement", "k", TORCH, [[250.0, 250.0]] * ROUNDS)
    (found,) = study.agreements(study_of(ours, block))
    assert found["in-round difference (%)"] == pytest.approx(0)
    assert (found["esbench (ms)"], found["timer (ms)"]) == (200e3, 250e3)
    every = [
        reading("agreement", "k", arm, [[value] * 4] * ROUNDS, metric=metric)
        for arm, value, metric in (
            ("esbench", 300.0, "latency_ns"),
            ("esbench", 200.0, "warm_latency_ns"),
            ("esbench", 9.0, "host_latency_ns"),
            (TORCH, 200.0, "latency_ns"),
            (DO_BENCH, 300.0, "latency_ns"),
        )
    ]
    assert ratios(study_of(*every, device="cuda")) == [pytest.approx(1)] * 2


def test_only_arms_of_the_same_sitting_share_rounds() -> None:
    """The machine is faster in the second sitting, and one arm has a round fewer in the first."""
    rows = [
        reading("agreement", "k", arm, [[us] * samples] * rounds, sitting=sitting)
        for sitting, us in ((0, 300.0), (1, 200.0))
        for arm, samples, rounds in (("esbench", 4, 6), (TORCH, 1, 5 + sitting))
    ]
    (found,) = study.agreements(study_of(*rows))
    assert (found["in-round difference (%)"], found["± (%)"], found["rounds"]) == (0, 0, 11)
    names = [
        reading("twins", "k", arm, [[us]] * 6, sitting=sitting, places=(place,) * 6)
        for sitting, us in ((0, 300.0), (1, 200.0))
        for place, arm in enumerate(("first name", "second name"))
    ]
    (one,) = study.twins(study_of(*names[:-1]))
    assert (one["half-range (%)"], one["rounds"]) == (0, 6)
    (one,) = study.twins(study_of(*names))
    assert one["rounds"] == 12


def test_twins_show_order_effects_and_no_drift() -> None:
    """Drift between rounds cancels in ratios; a slower first visit shows, whichever twin is first."""

    def two(first: Sequence[float], second: Sequence[float]) -> Study:
        return study_of(
            reading("twins", "k", "first name", [[value] for value in first], places=(0, 1) * 5),
            reading("twins", "k", "second name", [[value] for value in second], places=(1, 0) * 5),
        )

    drift = [10.0 + k for k in range(ROUNDS)]
    (one,) = study.twins(two(drift, drift))
    assert (one["half-range (%)"], one["first visited (%)"], one["± (%)"]) == (0, 0, 0)
    biased = two([10.1, 10.0] * 5, [10.0, 10.1] * 5)
    (one,) = study.twins(biased)
    assert one["first visited (%)"] == pytest.approx(0.01)
    assert one["half-range (%)"] == pytest.approx(0.01, rel=0.02)
    assert goal(biased, "first visit").met is False
    assert goal(biased, "under two names").met is False


def test_lengths_and_fresh_processes_are_held_to_their_goals() -> None:
    """An error of 0.3 us is 3 % of 10 us; on a GPU the longest spin defines the scale.

    The variation of fresh processes is standard deviation (n - 1) / mean of their medians.
    """
    waits = [
        reading("length", f"{us}", "esbench", [[us + 0.3] * 3], expected_ns=us * 1e3) for us in (10.0, 1000.0)
    ]
    found = study_of(*waits)
    assert [row["error (%)"] for row in study.lengths(found)] == [pytest.approx(0.03), pytest.approx(0.0003)]
    one = goal(found, "known length")
    assert (one.met, one.found) == (False, "1 of 2 lengths; worst: 10.0, 3.00 %")
    spins = [
        reading("length", f"{us}", "esbench", [[us * 1.05] * 3], expected_ns=us * 1e3) for us in (10, 1000)
    ]
    assert goal(study_of(*spins, device="cuda"), "known length").met is True
    rows = [reading("replicates", "k", f"process {us}", [[us, us, 100.0]]) for us in (9.0, 10.0, 11.0)]
    (row,) = study.replicates(study_of(*rows))
    assert row["variation (%)"] == pytest.approx(0.1)
    assert goal(study_of(*rows), "fresh processes").met is False


# The file and the page


def test_a_study_is_read_back_and_shown(tmp_path: Path) -> None:
    """The newest study of each device is shown; any other file is an error line with file and field."""
    assert study.render(tmp_path, tmp_path / "out") == []
    for number in (2, 1):
        study.write_study(study_of(number=number), tmp_path)
    study.write_study(study_of(number=0, device_name="[a](b)"), tmp_path)
    assert [found.study_id for found in study.newest_studies(tmp_path)] == ["study-0", "study-2"]
    assert "## \\[a\\](b)\n" in study.page(study.newest_studies(tmp_path))
    path = study.write_study(WHOLE, tmp_path / "whole")
    assert study.newest_studies(tmp_path / "whole") == [WHOLE]
    text = study.render(tmp_path / "whole", tmp_path / "out")[0].read_text()
    for words in (
        "## Some CPU",
        "load average 0.500 before and 1.50 after",
        "a \\| b",
        "no GPU",
        "2 threads",
    ):
        assert words in text
    assert text.count("### ") == 4
    assert goal(WHOLE, DO_BENCH).found == "no GPU"
    whole = path.read_bytes()
    for old, new, words in (
        (b'"seed"', b'"sead"', "sead"),
        (b"10000.0", b"0.0", "readings"),
        (b'"schema":2', b'"schema":9', "schema 9"),
    ):
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(UserError, match=words) as error:
            study.newest_studies(tmp_path / "whole")
        assert path.name in str(error.value)
        assert "\n" not in str(error.value)


# Measuring


class FakeClock:
    """A clock whose time is advanced by the kernels."""

    method = "fake"
    warm_up_s = (0.0, 0.0)

    def __init__(self) -> None:
        """Start at zero."""
        self.now_s = 0.0

    def seconds(self) -> float:
        """Return the time."""
        return self.now_s

    def prepare(self, call: Callable[[], object], turns: int) -> Callable[[], object]:  # noqa: ARG002  # a clock's signature
        """Return the call unchanged."""
        return call

    def visit(self, call: Callable[[], object], calls: int) -> Visit:
        """Return the time of each call."""
        return Visit({"latency_ns": tuple(self.read(call, calls))})

    def read(self, call: Callable[[], object], calls: int, share: float = 1.0) -> Iterator[float]:
        """Yield the time of each call, multiplied by a number."""
        for _ in range(calls):
            start_s = self.now_s
            call()
            yield (self.now_s - start_s) * 1e9 * share

    def kernel(self, name: str, cost_s: float, expected_ns: float | None = None) -> Kernel:
        """Return a call that takes this time."""

        def call() -> None:
            self.now_s += cost_s

        return Kernel(name, call, expected_ns)


def fake_plan() -> Plan:
    """Return a plan for two kernels on a fake clock with a biased, a broken and a dead timer."""
    clock = FakeClock()
    return Plan(
        clock=clock,
        kernels=[clock.kernel("short", 1e-4), clock.kernel("long", 1e-3)],
        waits=[clock.kernel("wait", 1e-3, 1e6)],
        timers=[
            Timer(TORCH, lambda call, calls: tuple(clock.read(call, calls, 1.05))),
            Timer("broken", Mock(side_effect=RuntimeError("no driver"))),
            Timer("dead", Mock(return_value=[0.0])),
        ],
        reasons={DO_BENCH: "not installed"},
        sittings=1,
        rounds=12,
        processes=0,
    )


def test_a_biased_timer_is_found_and_broken_ones_are_missing() -> None:
    """A bias of 5 % is measured, all arms have all rounds, and each missing timer has a reason."""
    progress = Mock()
    found = timer_accuracy_run.study(fake_plan(), HERE, progress)
    assert {one.question for one in found.readings} == {"agreement", "twins", "length"}
    assert {len(one.samples) for one in found.readings if one.question == "agreement"} == {12}
    assert ratios(found) == [pytest.approx(1 / 1.05)] * 2
    reasons = {(one.arm, one.kernel): one.reason for one in found.missing}
    assert "no driver" in reasons["broken", "long"]
    assert reasons["dead", "long"].startswith("ClockError: the clock read 0 ns: ")
    assert reasons[DO_BENCH, ""] == "not installed"
    assert [row["error (%)"] for row in study.lengths(found)] == [pytest.approx(0)]
    steps = [call.args for call in progress.call_args_list]
    assert [done for done, _, _ in steps] == list(range(len(steps)))
    assert ({total for _, total, _ in steps}, steps[0][2]) == ({len(steps)}, "agreement: short")


def test_a_real_study_is_measured(tmp_path: Path) -> None:
    """A study with two kernels and two rounds runs with every CPU timer and one fresh process."""
    others, reasons = timer_accuracy_run.timers("cpu")
    plan = Plan(
        clock=HostClock(),
        kernels=timer_accuracy_run.kernels("cpu", 0)[:2],
        waits=timer_accuracy_run.waits("cpu")[:2],
        timers=others,
        reasons=reasons,
        sittings=2,
        rounds=2,
        agreement_s=0.1,
        twins_s=0.02,
        processes=1,
    )
    found = timer_accuracy_run.study(plan, HERE, Mock())
    assert len([one for one in found.readings if one.question == "agreement"]) == 2 * 2 * 2
    assert {one.sitting for one in found.readings if one.question == "twins"} == {0, 1}
    assert {*found.by_kernel("replicates")} == {*timer_accuracy_run.REPLICATED["cpu"]}
    study.write_study(found, tmp_path)
    (page,) = study.render(tmp_path, tmp_path)
    assert all(kernel.name in page.read_text() for kernel in plan.kernels)
    assert isinstance(plan.kernels[0].call(), torch.Tensor)
    (missing,) = timer_accuracy_run.fresh(plan, "nonsense", "process 3")
    assert isinstance(missing, Missing)
    assert missing.arm == "process 3"
    assert "exit code 1" in missing.reason
    assert sys.executable not in missing.reason


def test_the_command_stores_the_study_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints every verdict and exits with 0 even if goals are missed; an interrupt stores nothing."""
    monkeypatch.setattr(timer_accuracy_run, "plan_for", lambda *_: fake_plan())
    command = ["accuracy", "--device", "cpu", "--out", str(tmp_path), "--reports", str(tmp_path / "pages")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "not met" in result.stdout
    assert (tmp_path / "pages" / "accuracy.md").exists()
    assert len(study.newest_studies(tmp_path)) == 1
    monkeypatch.setattr(timer_accuracy_run, "study", Mock(side_effect=KeyboardInterrupt))
    result = CliRunner().invoke(app, ["accuracy", "--device", "cpu", "--out", str(tmp_path / "none")])
    assert result.exit_code != 0
    assert "nothing is stored" in result.stderr
    assert not list((tmp_path / "none").iterdir())


def test_other_timers_are_called_as_they_are_meant_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other timers use the harness's threads, and return all their samples in nanoseconds."""
    made = Mock(wraps=TorchTimer)
    monkeypatch.setattr(timer_accuracy_run, "TorchTimer", made)
    (mean,) = timer_accuracy_run.by_torch(Mock(), 5)
    assert mean > 0
    assert made.call_args.kwargs["num_threads"] == torch.get_num_threads()
    testing = types.ModuleType("triton.testing")
    testing.do_bench = Mock(return_value=[1.0, 2.0])  # type: ignore[attr-defined]  # a stand-in for a module
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    assert timer_accuracy_run.by_do_bench(Mock(), 2) == [1e6, 2e6]
    assert testing.do_bench.call_args.kwargs["return_mode"] == "all"
    found, reasons = timer_accuracy_run.timers("cpu")
    assert ([timer.method for timer in found], [*reasons]) == ([TORCH], [DO_BENCH])
