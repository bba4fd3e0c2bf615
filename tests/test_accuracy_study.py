"""Studies of the harness as they are taken: on a fake clock, a tiny real one, and the command."""

import dataclasses
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from esbench.cli import app
from esbench.measure.accuracy import kernels, replicate, timers
from esbench.measure.accuracy.timers import Timer
from esbench.measure.timers import HostClock
from esbench.report import evidence
from esbench.report.accuracy import render_accuracy
from esbench.studies import timer_accuracy_run as study
from esbench.studies.timer_accuracy import Missing, newest_studies, write_study
from esbench.studies.timer_accuracy_run import Pace, Plan
from tests.accuracy_cases import HERE, FakeClock, fake_plan


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
    (reason,) = {one.reason for one in found.missing if one.arm == "dead"}
    assert reason.startswith("ClockError: the clock read 0 ns: ")


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
    # A busy machine may spend an arm's seconds on its first round.
    assert {one.rounds for one in evidence.agreements(found)} <= {2, 3, 2 * 2}
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
