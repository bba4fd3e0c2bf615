"""The timer study: its comparisons and goals, its file and page, and its measurement."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from typing_extensions import override

from esbench.errors import UserError
from esbench.measure.timers import Call, Visit, keep_inputs
from esbench.studies import timer_accuracy_run
from esbench.studies.timer_accuracy import (
    AGREEMENT,
    FILES,
    LENGTH,
    QUESTIONS,
    TWINS,
    Reading,
    Study,
    comparisons,
    goals,
    page,
    render,
)
from esbench.studies.timer_accuracy_run import Kernel, Plan
from tests.cli.cli_runner import run
from tests.fakes import FakeClock
from tests.study_cases import HERE

ROUNDS = 10
OURS, TORCH = QUESTIONS[AGREEMENT].arms


def reading(
    question: str, kernel: str, arm: str, rounds: Sequence[Sequence[float]], **fields: Any
) -> Reading:
    """Return a reading from microseconds."""
    samples = tuple(tuple(1e3 * sample for sample in samples) for samples in rounds)
    return Reading(question=question, kernel=kernel, arm=arm, samples=samples, **fields)


def study_of(*readings: Reading, number: int = 0, **fields: Any) -> Study:
    """Return a study with these readings."""
    return Study(
        schema=FILES.schema,
        study_id=f"study-{number}",
        started="2026-11-21T00:00:00+00:00",
        wall_s=100.0,
        environment=msgspec.structs.replace(HERE, **fields),
        readings=readings,
    )


def met(*readings: Reading, **fields: Any) -> list[bool | None]:
    """Return the verdicts on agreement, twins and lengths, None where nothing was measured."""
    verdicts = {"met": True, "**not met**": False, "": None}
    return [verdicts[goal.verdict] for goal in goals(study_of(*readings, **fields))]


def test_a_timer_that_differs_by_more_than_one_percent_misses_the_goal() -> None:
    """The speed of a round does not matter; means are compared; kernels below 0.1 ms are not judged."""
    assert met() == [None, None, None]
    speeds = [1 + 0.3 * (k % 3) for k in range(ROUNDS)]
    theirs = reading(AGREEMENT, "k", TORCH, [[200 * speed] * 2 for speed in speeds])
    for bias, expected in ((1.0, True), (1.009, True), (1.02, False), (0.98, False)):
        rounds = [[bias * speed * us for us in (50, 150, 200, 400)] for speed in speeds]
        ours = reading(AGREEMENT, "k", OURS, rounds)
        assert met(ours, theirs)[0] is expected
        (row,) = comparisons(study_of(ours, theirs), AGREEMENT)
        assert (row.difference, row.half_range) == pytest.approx((bias - 1, 0))
        assert row.rounds == ROUNDS
    near = [reading(AGREEMENT, "near", arm, [[200.0] * 4] * ROUNDS) for arm in (OURS, TORCH)]
    assert goals(study_of(*near, ours, theirs))[0].result == "1 of 2; worst: 2.00 %, k"
    short = [reading(AGREEMENT, "k", arm, [[us] * 4] * ROUNDS) for arm, us in ((OURS, 5), (TORCH, 4))]
    assert met(*short)[0] is None
    assert "+25.0" in page([study_of(*short)])


def test_arms_of_the_same_repetition_and_state_of_the_cache_are_compared() -> None:
    """The machine is faster in the second repetition, and an arm has a round fewer in the first.

    On a GPU the other timer, which does not flush the cache, is compared with the warm latency.
    """
    rows = [
        reading(AGREEMENT, "k", arm, [[us] * samples] * rounds, repetition=repetition, metric=metric)
        for repetition, us in ((0, 300.0), (1, 200.0))
        for arm, samples, rounds, metric in (
            (OURS, 4, 6, "warm_latency_ns"),
            (TORCH, 1, 5 + repetition, "latency_ns"),
        )
    ]
    cold = [reading(AGREEMENT, "k", OURS, [[900.0]] * 6, repetition=repetition) for repetition in (0, 1)]
    (row,) = comparisons(study_of(*cold, *rows, device="cuda"), AGREEMENT)
    assert (row.difference, row.half_range, row.rounds) == (0, 0, 11)


def test_twins_differ_by_the_noise_of_rounds() -> None:
    """Drift between rounds cancels in ratios; the half-range is that of the middle 60 % of them."""
    drift = [10.0 + k for k in range(ROUNDS)]
    for first, second, half_range in (
        (drift, drift, 0.0),
        ([20.0, 10.0, *[10.1, 10.0] * 4], [10.0, 10.1] * 5, 0.01),
    ):
        twins = [
            reading(TWINS, "k", arm, [[us] for us in times])
            for arm, times in zip(QUESTIONS[TWINS].arms, (first, second), strict=True)
        ]
        (row,) = comparisons(study_of(*twins), TWINS)
        assert row.difference == pytest.approx(0, abs=1e-4)
        assert row.half_range == pytest.approx(half_range, rel=0.02)
        assert met(*twins) == [None, half_range == 0, None]


def test_the_length_of_a_wait_is_known_on_a_cpu_and_relative_on_a_gpu() -> None:
    """An offset shows in short waits; on a GPU the longest wait defines the length of a cycle."""
    waits = [reading(LENGTH, f"{us}", OURS, [[us + 0.3] * 3], expected_ns=us * 1e3) for us in (10.0, 1000.0)]
    rows = comparisons(study_of(*waits), LENGTH)
    assert [row.difference for row in rows] == pytest.approx([0.03, 0.0003])
    assert goals(study_of(*waits))[2].result == "1 of 2; worst: 3.00 %, 10.0"
    spins = [reading(LENGTH, f"{us}", OURS, [[us * 1.05] * 3], expected_ns=us * 1e3) for us in (10, 1000)]
    assert met(*spins, device="cuda")[2] is True
    assert met(*spins)[2] is False


def test_the_newest_study_of_each_device_is_shown(tmp_path: Path) -> None:
    """An invalid file is an error line with file and field; readings of other questions are ignored."""
    assert render(tmp_path, tmp_path / "out") == []
    complete = study_of(
        *(reading(AGREEMENT, "a | b", arm, [[200, 202, 198]] * ROUNDS) for arm in (OURS, TORCH)),
        *(reading(TWINS, "add", arm, [[10, 11]] * ROUNDS) for arm in QUESTIONS[TWINS].arms),
        reading(LENGTH, "wait", OURS, [[1000.5]] * ROUNDS, expected_ns=1e6),
        reading("replicates", "add", "process 1", [[10]] * ROUNDS),
        number=2,
    )
    path = FILES.write(complete, tmp_path)
    FILES.write(study_of(number=1), tmp_path)
    empty = study_of(number=0, device_name="[a](b)")
    FILES.write(empty, tmp_path)
    text = render(tmp_path, tmp_path / "out")[0].read_text()
    assert text == page([empty, complete])
    for words in ("## Some CPU", "## \\[a\\](b)\n", "load average 0.500 before", "a \\| b", "2 threads"):
        assert words in text
    stored = path.read_bytes()
    for old, new, word in (
        (b'"readings"', b'"reading"', "readings"),
        (b"10000.0", b"0.0", "readings"),
        (b'"schema":2', b'"schema":9', "schema version 9"),
    ):
        path.write_bytes(stored.replace(old, new))
        with pytest.raises(UserError, match=rf"{path.name}.*{word}"):
            render(tmp_path, tmp_path / "out")


class BiasedClock(FakeClock):
    """A clock whose readings are a multiple of the true times."""

    bias = 1.0

    @override
    def visit(self, call: Call, calls: int, renew: Call = keep_inputs) -> Visit:
        times = super().visit(call, calls, renew).samples["latency_ns"]
        return Visit({"latency_ns": tuple(self.bias * ns for ns in times)})


def fake_plan(bias: float = 1.05) -> Plan:
    """Return a plan for two kernels and a wait on a fake clock, with another timer of this bias."""
    ours, theirs = FakeClock(), BiasedClock()
    theirs.bias = bias

    def kernel(name: str, cost_s: float, expected_ns: float | None = None) -> Kernel:
        def call() -> None:
            for clock in (ours, theirs):
                clock.now_s += cost_s

        return Kernel(name, call, expected_ns)

    kernels = [kernel("short", 1e-4), kernel("long", 1e-3)]
    return Plan(ours, theirs, kernels, [kernel("wait", 1e-3, 1e6)], repetitions=1)


def test_a_biased_timer_is_measured_and_a_dead_one_missing() -> None:
    """A bias of 5 % is measured, and an arm without samples has a reason."""
    progress = Mock()
    biased = timer_accuracy_run.measure(fake_plan(), HERE, progress)
    assert [row.difference for row in comparisons(biased, AGREEMENT)] == [pytest.approx(1 / 1.05 - 1)] * 2
    assert [row.difference for row in comparisons(biased, TWINS)] == [0, 0]
    assert [row.difference for row in comparisons(biased, LENGTH)] == [pytest.approx(0)]
    assert progress.call_args_list[0].args == (0, 5, "agreement: short")
    assert [call.args[0] for call in progress.call_args_list] == [*range(5)]
    dead = timer_accuracy_run.measure(fake_plan(0.0), HERE, progress)
    assert {(absent.arm, absent.kernel) for absent in dead.missing} == {(TORCH, "short"), (TORCH, "long")}
    assert "torch.utils.benchmark long: ClockError: the clock measured 0 ns" in page([dead])


def test_a_real_study_is_measured() -> None:
    """A study of two kernels runs with the timers of a CPU."""
    plan = timer_accuracy_run.default_plan("cpu")
    plan = replace(plan, kernels=plan.kernels[:2], waits=plan.waits[:2], repetitions=2, budget_s=0.02)
    study = timer_accuracy_run.measure(plan, HERE, Mock())
    assert not study.missing
    assert len({(reading.question, reading.arm, reading.repetition) for reading in study.readings}) == 9
    for question, kernels in ((AGREEMENT, plan.kernels), (TWINS, plan.kernels), (LENGTH, plan.waits)):
        rows = comparisons(study, question)
        assert [row.kernel for row in rows] == [kernel.name for kernel in kernels]
        assert all(-0.9 < row.difference < 9 for row in rows)


def test_the_command_stores_the_study_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every verdict is printed; the exit code is 0 even if goals are missed; an interrupt stores nothing."""
    monkeypatch.setattr(timer_accuracy_run, "default_plan", lambda _: fake_plan())
    monkeypatch.chdir(tmp_path)
    assert run("accuracy", "--device", "cpu", "--reports", "pages") == 0
    assert "not met" in capsys.readouterr().out
    assert Path("pages", "accuracy.md").exists()
    assert len([*Path("results").glob("*/accuracy/*.json")]) == 1
    monkeypatch.setattr(timer_accuracy_run, "measure", Mock(side_effect=KeyboardInterrupt))
    assert run("accuracy", "--device", "cpu", "--results", "none") == 130
    assert "nothing is stored" in capsys.readouterr().err
    assert not list(Path("none").iterdir())
