"""The study of tasks: goals, rank correlations, resuming, its page and its command."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from esbench.errors import UserError
from esbench.registry import REGISTRY, Entry
from esbench.schema import Task, Variant
from esbench.stats import rank_correlation
from esbench.studies import tasks_run
from esbench.studies.digits import DENSE, Untrained
from esbench.studies.digits_run import check_resumable
from esbench.studies.tasks import (
    FILES,
    Learning,
    StepTime,
    Study,
    correlation,
    disagreement,
    finding,
    render,
    results_of,
    steps_to_goal,
)
from esbench.studies.tasks_run import Plan, begin, conduct
from esbench.workload import UnavailableError, trainer
from impls.training import evolution
from tests.cli.cli_runner import refusal, run
from tests.report.report_cases import render_reports
from tests.study_cases import HERE

TASK = Task(
    name="Walk",
    members=8,
    batch=1,
    sigma=0.1,
    learning_rate=0.1,
    steps=6,
    every=2,
    score="reward",
    goal=10.0,
    rises=True,
    tests="a walker",
)
OTHER, THIRD = Variant(scheme="Other"), Variant(scheme="Third")


class Learner:
    """A scheme whose training runs have the next of ``runs`` as their scores."""

    def __init__(self, *runs: Sequence[float] | Exception) -> None:
        self.runs = list(runs)


class LearnerTrainer:
    """Trains a Learner without a network."""

    def begin(self, scheme: Learner, *_: object) -> Any:
        """Return a training run with the next scores."""
        scores = scheme.runs.pop(0)
        if isinstance(scores, Exception):
            raise scores
        return Mock(score=Mock(side_effect=scores), step=Mock())

    def effective_members(self, *_: object) -> float:
        """Return an n_eff."""
        return 8.0


@trainer.register
def _(_: Learner) -> Any:
    return LearnerTrainer()


def entries(monkeypatch: pytest.MonkeyPatch, *runs: Sequence[Sequence[float] | Exception]) -> list[Entry]:
    """Register DENSE, OTHER, ... with these training runs, the first of which is timed."""
    made = [
        Entry(variant=variant, scheme=Learner(*own), source="", package="tests")
        for variant, own in zip((DENSE, OTHER, THIRD), runs, strict=False)
    ]
    monkeypatch.setattr(REGISTRY, "entries", {entry.variant.name: entry for entry in made})
    monkeypatch.setattr(tasks_run, "BUDGET_S", 1e-3)
    return made


def learning(variant: Variant, *scores: float, seed: int = 0) -> Learning:
    """Return an invented training run."""
    return Learning(variant=variant, task="Walk", seed=seed, scores=scores, wall_s=1.0)


def step_time(variant: Variant, step_ms: float, effective_members: float | None = 8.0) -> StepTime:
    """Return invented times of steps."""
    rounds = ((1e6 * step_ms, 2e6 * step_ms, 1e6 * step_ms),) * 6
    return StepTime(variant=variant, task="Walk", rounds=rounds, effective_members=effective_members)


def study_of(*learnings: Learning, **fields: Any) -> Study:
    """Return a study with these training runs."""
    return Study(
        **{
            "schema": FILES.schema,
            "study_id": "study-0",
            "started": "2026",
            "tasks": (TASK,),
            "seeds": tuple({run.seed: run for run in learnings}),
            "variants": tuple(dict.fromkeys(run.variant for run in learnings)),
            "environment": HERE,
            "learnings": learnings,
            **fields,
        }
    )


FULL = study_of(
    learning(DENSE, 0, 11, 10),
    learning(OTHER, 0, 1, 10, 11),
    learning(THIRD, 0, 11, 9, 12),
    learning(DENSE, 0, 1, 10, 10, seed=1),
    learning(OTHER, 0, 1, 10, 11, seed=1),
    learning(THIRD, 0, 11, 9, 12, seed=1),
    learning(DENSE, 0, 1, 11, 10, seed=2),
    learning(OTHER, 0, 1, 10, 11, seed=2),
    learning(THIRD, 0, 11, 10, seed=2),
    times=(step_time(DENSE, 4), step_time(OTHER, 1, 4.0), step_time(THIRD, 2, 2.0)),
)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


def test_the_goal_is_reached_by_two_tests_in_a_row() -> None:
    """The steps are those before the first of both tests; a single good test is not enough."""
    assert steps_to_goal(TASK, [0, 10, 9, 10, 12]) == 6
    assert steps_to_goal(TASK, [0, 10, 9, 12]) == math.inf
    falling = msgspec.structs.replace(TASK, rises=False)
    assert steps_to_goal(falling, [20, 10, 9]) == 2
    dense, other, third = results_of(FULL, TASK)
    assert [dense.seconds, other.seconds, third.seconds] == [4 * 4e-3, 4 * 1e-3, math.inf]
    assert [dense.rate, other.rate, third.rate] == [2, 4, 1]


def test_rank_correlations_compare_n_eff_with_learning() -> None:
    """A variant that does not reach the goal is the slowest; p counts permutations as extreme."""
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx((1, 2 / 24))
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx((0.8, 8 / 24))
    assert rank_correlation([1, 1], [1, 2]) is None
    many = rank_correlation(range(20), range(20))
    assert many is not None
    assert many[1] < 1e-3
    results = results_of(FULL, TASK)
    assert correlation(results).time == pytest.approx((1, 2 / 6))
    assert finding(FULL, TASK) == (
        "Walk: 7 of 9 training runs reached reward ≥ 10; "
        "rank correlation of n_eff per ms and speed 1.00 (p = 0.33)"
    )
    (words,) = [line for line in disagreement(results).split(": ") if "0.5" in line]
    assert words.startswith("by n_eff per ms it takes 0.500x dense noise's time, and it took 0.250x")
    assert disagreement([]) == disagreement([results[0], results[0]]) == ""


def test_the_page_has_a_table_and_plots_and_says_what_is_missing(tmp_path: Path) -> None:
    """Goals that were not reached, failures and missing training runs are named."""
    results, out = tmp_path / "results", tmp_path / "out"
    assert render(results, out) == []
    partly = msgspec.structs.replace(
        FULL,
        seeds=(0, 1, 2, 3),
        variants=(*FULL.variants, Variant(scheme="Broken")),
        untrained=(Untrained(variant=Variant(scheme="Broken"), network="Walk", reason="*no*", failed=True),),
    )
    FILES.write(partly, results)
    page, times, curves = render(results, out)
    text = page.read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    assert rows[2:] == [
        ["Perturbed", "3 of 3", "64", "32 - 64", "4.00", "0.0160", "8.00", "2.00", "1.00x", "1.00x"],
        ["Other", "3 of 3", "64", "64 - 64", "1.00", "0.00400", "4.00", "4.00", "0.250x", "0.500x"],
        [
            *("Third", "1 of 3", "not reached", "32 - not reached", "2.00", "not reached"),
            *("2.00", "1.00", "n/a", "2.00x"),
        ],
    ]
    assert r"- Broken failed: \*no\*" in text
    assert "Incomplete: 3 training runs missing." in text
    assert "rank correlation with speed: Walk 1.00" in times.read_text()
    assert render_reports(results, out) == ([out / "index.html", page, times, curves], [])


def test_a_study_keeps_what_is_finished_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training run ends at its goal; after an interrupt only the rest is trained."""
    chosen = entries(monkeypatch, [(), (0, 11, 12)], [(), (0, 1, 2, 3)])
    interrupt = Mock(side_effect=[None, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        conduct(begin(chosen, [TASK], [5], HERE), Plan("cpu"), interrupt, tmp_path)
    half = FILES.newest_of(HERE.slug, tmp_path)
    assert [run.scores for run in half.learnings] == [(0, 11, 12)]
    check_resumable(half, chosen, HERE)
    study = conduct(half, Plan("cpu"), Mock(), tmp_path)
    assert [run.scores for run in study.learnings] == [(0, 11, 12), (0, 1, 2, 3)]
    assert study.times == half.times
    assert {time.variant for time in study.times} == {DENSE, OTHER}
    assert all(len(time.rounds) >= 6 for time in study.times)
    assert FILES.newest_of(HERE.slug, tmp_path) == study
    with pytest.raises(UserError, match="nothing to resume"):
        check_resumable(study, chosen, HERE)


def test_a_variant_that_fails_has_its_reason_and_a_broken_environment_ends_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other seeds of a failed variant are not tried; the study of an environment that raises is kept."""
    error = UserError("the environment Walk raised ValueError: no ground")
    failures: list[list[tuple[float, ...] | Exception]] = [
        [UnavailableError("too narrow")],
        [(), RuntimeError("broken")],
    ]
    chosen = entries(monkeypatch, [(), (11, 12), error], *failures)
    with pytest.raises(UserError, match="no ground"):
        conduct(begin(chosen, [TASK], [0, 1], HERE), Plan("cpu"), Mock(), tmp_path)
    study = FILES.newest_of(HERE.slug, tmp_path)
    assert [(run.variant, run.scores) for run in study.learnings] == [(DENSE, (11, 12))]
    assert [(failure.variant, failure.reason, failure.failed) for failure in study.untrained] == [
        (OTHER, "too narrow", False),
        (THIRD, "RuntimeError: broken", True),
    ]
    assert [(seed, variant) for seed, _, variant in study.remaining_runs()] == [(1, DENSE)]


SMALL = ("tasks", "--device", "cpu", "--task", "DigitsCNN", "--steps", "1", "--variants", "Hadamard")


def test_the_command_trains_in_processes_as_in_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores do not depend on the number of processes; steps are timed, and the page is written."""
    monkeypatch.setattr(tasks_run, "BUDGET_S", 1e-3)
    monkeypatch.setattr(evolution, "MEASURED", 4)
    assert run(*SMALL, "--seeds", "1", "--processes", "2") == 0
    (study,) = FILES.newest(Path("results"))
    assert [time.effective_members for time in study.times] == [pytest.approx(128, rel=0.1)]
    (task,) = study.tasks
    (learned,) = study.learnings
    alone = tasks_run.train(learned.variant, task, 0, "cpu")
    assert msgspec.structs.replace(alone, wall_s=learned.wall_s) == learned
    assert "DigitsCNN: 0 of 1 training run reached accuracy (%) ≥ 80" in capsys.readouterr().out
    assert Path("build/reports/tasks.md").exists()


def test_bad_usage_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 2, and no folder is created."""
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    for arguments, words in (
        ("--task Chess", "no task 'Chess'; available: CartPole, Pendulum, DigitsCNN, Characters"),
        ("--seeds 0", "--seeds"),
        ("--variants Base", "none of these variants can be trained"),
        ("", "CartPole and Pendulum need gymnasium: pip install gymnasium, or choose others with --task"),
        ("--resume", "no study of tasks in results"),
    ):
        assert words in refusal(capsys, "tasks", "--device", "cpu", *arguments.split())
    assert not list(tmp_path.glob("results/*"))
