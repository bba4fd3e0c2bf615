"""The digits study: its file, its order of training runs, how it resumes, and its page."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from esbench.errors import UserError
from esbench.registry import Entry
from esbench.schema import Outcome, Recipe, Variant
from esbench.studies.digits import (
    DENSE,
    FILES,
    Study,
    TrainingRun,
    Untrained,
    page,
    render,
    results_of,
    trained_with,
    verdict,
)
from esbench.studies.digits_run import begin, check_resumable, conduct, train
from esbench.workload import UnavailableError, trainer
from tests.cli.cli_runner import refusal, run
from tests.report.report_cases import render_reports
from tests.study_cases import HERE

RECIPE = Recipe(network="DigitsMLP")
OTHER, DROPPED, BROKEN = (Variant(scheme=name) for name in ("Other", "Dropped", "Broken"))


class Learner:
    """A scheme whose training runs end with the next of ``outcomes``, without perturbing anything."""

    def __init__(self, *outcomes: float | Exception) -> None:
        self.outcomes = list(outcomes)


@trainer.register
def _(_: Learner) -> Any:
    class LearnerTrainer:
        def train(self, scheme: Learner, *_: object) -> Outcome:
            accuracy = scheme.outcomes.pop(0)
            if isinstance(accuracy, Exception):
                raise accuracy
            return Outcome(accuracy=accuracy, unbiased=True)

    return LearnerTrainer()


def entry(variant: Variant, *outcomes: float | Exception) -> Entry:
    """Return an unregistered variant whose training runs have these outcomes."""
    return Entry(variant=variant, scheme=Learner(*outcomes), source="", package="tests")


def training(variant: Variant, accuracy: float, seed: int = 0, **fields: Any) -> TrainingRun:
    """Return an invented training run."""
    outcome = Outcome(**{"accuracy": accuracy, "unbiased": True, **fields})
    return TrainingRun(variant=variant, network="DigitsMLP", seed=seed, outcome=outcome, wall_s=2.0)


def study_of(*runs: TrainingRun, number: int = 0, seeds: Sequence[int] = (0,), **fields: Any) -> Study:
    """Return a study with these training runs."""
    return Study(
        **{
            "schema": FILES.schema,
            "study_id": f"study-{number}",
            "started": "2026-11-21T00:00:00+00:00",
            "recipes": (RECIPE,),
            "seeds": tuple(seeds),
            "variants": tuple(dict.fromkeys(run.variant for run in runs)),
            "environment": HERE,
            "training_runs": runs,
            **fields,
        }
    )


COMPLETE = study_of(training(DENSE, 0.96), training(OTHER, 0.95))


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_newest_study_of_each_device_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while a study is written keeps the existing file."""
    path = FILES.write(COMPLETE, tmp_path)
    assert path == tmp_path / "some-cpu/digits/study-0.json"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            FILES.write(study_of(training(DENSE, 0.5)), tmp_path)
    assert FILES.newest(tmp_path) == [COMPLETE]
    assert list(path.parent.iterdir()) == [path]
    for number in (2, 1):
        FILES.write(study_of(number=number), tmp_path)
    FILES.write(study_of(environment=msgspec.structs.replace(HERE, device_name="Another")), tmp_path)
    assert [study.study_id for study in FILES.newest(tmp_path)] == ["study-0", "study-2"]
    with pytest.raises(UserError, match="train with `esbench digits`"):
        FILES.newest_of("nobody", tmp_path)


def test_a_study_without_training_runs_has_no_page_and_an_invalid_one_is_a_problem(tmp_path: Path) -> None:
    """The error has the file and the field, and the other reports are complete."""
    results, out = tmp_path / "results", tmp_path / "out"
    assert render(results, out) == []
    FILES.write(study_of(), results)
    assert render(results, out) == []
    path = FILES.write(COMPLETE, results)
    assert render_reports(results, out) == ([out / "index.html", out / "digits.md"], [])
    assert trained_with(results, OTHER) == "99.0 (DigitsMLP)"
    text = path.read_bytes()
    for invalid, words in ((text.replace(b"0.96", b"96.0"), "accuracy"), (b"{}", "not a digits study")):
        path.write_bytes(invalid)
        written, (problem,) = render_reports(results, out)
        assert written == [out / "index.html"]
        assert path.name in str(problem)
        assert words in str(problem)
        assert trained_with(results, OTHER) == "not tried"


def test_all_variants_are_trained_with_the_first_seed_before_the_second() -> None:
    """Training runs are ordered by seed, then network, without those finished or impossible."""
    cnn = msgspec.structs.replace(RECIPE, network="DigitsCNN")
    study = study_of(
        training(OTHER, 0.5),
        seeds=(0, 1),
        variants=(DENSE, OTHER),
        recipes=(RECIPE, cnn),
        untrained=(Untrained(variant=OTHER, network="DigitsCNN", reason="no"),),
    )
    assert [(seed, recipe.network, variant.name) for seed, recipe, variant in study.remaining_runs()] == [
        (0, "DigitsMLP", "Perturbed"),
        (0, "DigitsCNN", "Perturbed"),
        (1, "DigitsMLP", "Perturbed"),
        (1, "DigitsMLP", "Other"),
        (1, "DigitsCNN", "Perturbed"),
    ]


def test_a_variant_that_cannot_be_trained_has_a_reason_and_the_study_goes_on(tmp_path: Path) -> None:
    """Other seeds of a variant that is unavailable or raises are not tried."""
    entries = [
        entry(DENSE, 0.9, 0.8),
        entry(OTHER, UnavailableError("too narrow")),
        entry(BROKEN, RuntimeError("broken")),
    ]
    study = conduct(begin(entries, [RECIPE], [5, 6], HERE), entries, Mock(), tmp_path)
    assert [(run.variant, run.seed, run.outcome.accuracy) for run in study.training_runs] == [
        (DENSE, 5, 0.9),
        (DENSE, 6, 0.8),
    ]
    assert [(failure.variant, failure.reason, failure.failed) for failure in study.untrained] == [
        (OTHER, "too narrow", False),
        (BROKEN, "RuntimeError: broken", True),
    ]
    assert not study.remaining_runs()
    assert FILES.newest_of(HERE.slug, tmp_path) == study
    # A missing package affects every variant, so the study ends and asks to install it.
    entries = [entry(DENSE, UserError("install it"))]
    with pytest.raises(UserError, match="install it"):
        conduct(begin(entries, [RECIPE], [0], HERE), entries, Mock(), tmp_path)


def test_an_interrupted_study_continues_after_its_last_training_run(tmp_path: Path) -> None:
    """Finished training runs are kept, and only the rest is run, on the same machine with the same code."""
    entries = [entry(DENSE, 0.9), entry(OTHER, 0.7)]
    interrupt = Mock(side_effect=[None, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        conduct(begin(entries, [RECIPE], [0], HERE), entries, interrupt, tmp_path)
    half = FILES.newest_of(HERE.slug, tmp_path)
    check_resumable(half, entries, HERE)
    study = conduct(half, entries, Mock(), tmp_path)
    assert [(run.variant, run.outcome.accuracy) for run in study.training_runs] == [
        (DENSE, 0.9),
        (OTHER, 0.7),
    ]
    with pytest.raises(UserError, match="nothing to resume"):
        check_resumable(study, entries, HERE)
    with pytest.raises(UserError, match="device name Some CPU vs Another"):
        check_resumable(half, entries, msgspec.structs.replace(HERE, device_name="Another"))
    assert study.code.keys() >= {DENSE.name, OTHER.name}
    assert "esbench" not in study.code  # a change of the harness does not change what is learnt
    changed = msgspec.structs.replace(half, code={**study.code, DENSE.name: "0"})
    with pytest.raises(UserError, match="the code of Perturbed"):
        check_resumable(changed, entries, HERE)


def test_each_variant_is_compared_with_dense_noise() -> None:
    """The goal is 95 % of dense noise's mean accuracy over seeds; dense noise itself has no goal."""
    study = study_of(
        *(training(DENSE, accuracy, seed) for seed, accuracy in enumerate((0.9, 1.0))),
        *(training(OTHER, accuracy, seed) for seed, accuracy in enumerate((0.895, 0.91))),
        *(training(BROKEN, accuracy, seed) for seed, accuracy in enumerate((0.895, 0.90))),
        *(training(DROPPED, 0.1, seed, unbiased=False) for seed in (0, 1)),
        msgspec.structs.replace(training(OTHER, 0.0), network="DigitsCNN"),
        seeds=(0, 1),
    )
    results = {result.variant: result for result in results_of(study, "DigitsMLP")}
    assert results[OTHER].share == pytest.approx(0.95)
    assert {variant.name: result.verdict for variant, result in results.items()} == {
        "Perturbed": "",
        "Other": "met",
        "Broken": "**not met**",
        "Dropped": "",
    }
    count = "1 of 2 unbiased variants"
    assert (
        verdict(study, "DigitsMLP") == f"DigitsMLP: {count} reach 95% of dense noise's accuracy; not Broken"
    )
    without_dense = study_of(training(OTHER, 0.9))
    (result,) = results_of(without_dense, "DigitsMLP")
    assert (result.share, result.verdict) == (None, "not shown")
    assert "0 of 0 unbiased variants" in verdict(without_dense, "DigitsMLP")
    assert "n/a" in page([without_dense])


def test_the_page_shows_every_variant_and_what_is_missing(tmp_path: Path) -> None:
    """The page has accuracy, interval, share and n_eff by the law, with missing training runs below."""
    study = study_of(
        training(DENSE, 0.9, effective_members=100.0),
        training(DENSE, 1.0, 1, effective_members=100.0),
        training(OTHER, 0.8),
        seeds=(0, 1),
        untrained=(Untrained(variant=BROKEN, network="DigitsMLP", reason="broke *here*", failed=True),),
    )
    FILES.write(study, tmp_path / "results")
    text = render(tmp_path / "results", tmp_path)[0].read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    assert cells[2:] == [
        ["Perturbed", "yes", "100", "95.0", "63.5", "100", ""],
        ["Other", "yes", "n/a", "80.0", "n/a", "84.2", "**not met**"],
    ]
    assert r"- Broken failed: broke \*here\*" in text
    assert "Incomplete: 1 training run missing." in text
    assert "Not measured: DigitsCNN, DigitsResNet;" in text


SMALL = ("--members", "3", "--steps", "1", "--batch", "2", "--device", "cpu")


def test_the_command_trains_stores_and_renders(capsys: pytest.CaptureFixture[str]) -> None:
    """Dense noise takes part unasked, and a network that is named twice is trained once."""
    networks = [f"--network=Digits{network}" for network in ("MLP", "CNN", "CNN")]
    assert run("digits", *SMALL, "--seeds", "2", *networks, "--variants", "SparsePerturbed(k=2)") == 0
    out, err = capsys.readouterr()
    assert [line.partition(":")[0] for line in out.splitlines()] == ["DigitsMLP", "DigitsCNN"]
    assert err.startswith("Perturbed is trained as well: accuracies are shown relative to it\n")
    assert "written to build/reports/digits.md" in err
    (study,) = FILES.newest(Path("results"))
    assert len(study.training_runs) == 6
    assert [failure.network for failure in study.untrained] == ["DigitsCNN"]
    assert "k = 2 exceeds" in Path("build/reports/digits.md").read_text()
    assert "nothing to resume" in refusal(capsys, "digits", "--device", "cpu", "--resume")


def test_bad_usage_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2, and no folder is created."""
    for arguments, words in (
        ("--sigma 0", "--sigma 0: expected a finite number above 0"),
        ("--sigma nan", "--sigma nan: expected a finite number above 0"),
        ("--learning-rate inf", "--learning-rate inf: expected a finite number above 0"),
        ("--members 0", "--members"),
        ("--network Digits", "no network 'Digits'; available: DigitsMLP, DigitsCNN, DigitsResNet"),
        ("--variants Base --variants Naive", "no variant of --variants Base Naive perturbs weights"),
        ("--variants Nope", "no variant matches 'Nope'"),
    ):
        error = refusal(capsys, "digits", "--device", "cpu", *arguments.split())
        assert words in error
        assert error.startswith(f"esbench: {words}") or words.startswith("--")
    assert not list(tmp_path.iterdir())


def test_baselines_are_trained_if_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Baselines are slow and draw dense noise too, so they are not trained by default."""
    monkeypatch.setattr("esbench.studies.digits_run.conduct", lambda study, *_: study)
    begun = Mock(side_effect=begin)
    monkeypatch.setattr("esbench.studies.digits_run.begin", begun)
    for which in ((), ("--variants", "Loop")):
        assert run("digits", "--device", "cpu", *which) == 0
    unnamed, named = ({entry.variant.name for entry in call.args[0]} for call in begun.call_args_list)
    assert {"Perturbed", "Loop"} & unnamed == {"Perturbed"}
    assert named == {"Loop", "Perturbed"}


def test_an_untrained_variant_has_its_reason_on_the_console(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, as for a run; other variants are trained."""

    def train_others(scheme: object, recipe: Recipe, seed: int, device: str) -> Outcome:
        errors = {"Hadamard": RuntimeError("broken *here*"), "Orthogonal": MemoryError()}
        if error := errors.get(type(scheme).__name__):
            raise error
        return train(scheme, recipe, seed, device)

    monkeypatch.setattr("esbench.studies.digits_run.train", train_others)
    which = ("--variants", "Hadamard", "--variants", "Orthogonal", "--variants", "Perturbed")
    assert run("digits", *SMALL, "--seeds", "1", *which) == 1
    err = capsys.readouterr().err
    assert "DigitsMLP: Hadamard failed: RuntimeError: broken *here*\n" in err
    assert "DigitsMLP: Orthogonal failed: out of memory" in err
    (study,) = FILES.newest(Path("results"))
    assert [run.variant.name for run in study.training_runs] == ["Perturbed"]
