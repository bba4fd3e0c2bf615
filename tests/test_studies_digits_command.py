"""The command that trains digits: what it refuses, and what it says on the console."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from esbench.schema import Outcome, Recipe
from esbench.studies.digits import newest_studies, train
from esbench.studies.digits_run import begin
from tests.cli_runner import run

SMALL = ("--members", "3", "--steps", "1", "--batch", "2", "--seeds", "1", "--device", "cpu")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--sigma 0", "--sigma 0: expected a number above 0"),
        ("--sigma nan", "--sigma nan: expected a finite number"),
        ("--learning-rate -1", "--learning-rate -1: expected a number above 0"),
        ("--learning-rate inf", "--learning-rate inf: expected a finite number"),
        ("--members 0", "--members"),
        ("--network Digits", "no network 'Digits'; there are: DigitsMLP, DigitsCNN"),
        ("--variants Base", "--variants Base: nothing to train"),
        ("--variants Base --variants Naive", "--variants Base Naive: nothing to train"),
        ("--variants Nope", "no variant matches 'Nope'"),
    ],
)
def test_bad_usage_is_one_line_before_anything_is_announced(
    arguments: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2; no folder is made."""
    assert run("digits", "--device", "cpu", *arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"esbench: {words}" if words[:2] != "--" else "esbench: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_dense_noise_takes_part_whatever_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    """It is said at the start: shares are of its accuracy. A network that is named twice is trained once."""
    twice = ("--network", "DigitsCNN", "--network", "DigitsCNN")
    assert run("digits", *SMALL, "--variants", "Hadamard", *twice) == 0
    out, said = capsys.readouterr()
    assert said.startswith("Perturbed is trained as well: accuracies are shown relative to it\n")
    assert "of 1 unbiased variants" in out
    (study,) = newest_studies(Path("results"))
    assert [(one.variant.name, one.network) for one in study.trainings] == [
        ("Perturbed", "DigitsCNN"),
        ("Hadamard", "DigitsCNN"),
    ]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("broken *here*"), "DigitsMLP: Hadamard failed: RuntimeError: broken *here*"),
        (MemoryError(), "DigitsMLP: Hadamard failed: out of memory"),
    ],
)
def test_what_could_not_be_trained_has_its_reason_on_the_console(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And exit code 1, as for a run; the others are trained."""

    def train_others(scheme: object, recipe: Recipe, seed: int, device: str) -> Outcome:
        if type(scheme).__name__ == "Hadamard":
            raise error
        return train(scheme, recipe, seed, device)

    monkeypatch.setattr("esbench.studies.digits_run.train", train_others)
    assert run("digits", *SMALL, "--variants", "Hadamard", "--variants", "Perturbed") == 1
    assert words in capsys.readouterr().err.splitlines()[-2]
    (study,) = newest_studies(Path("results"))
    assert [one.variant.name for one in study.trainings] == ["Perturbed"]


def test_baselines_take_part_where_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their noise is dense noise, and they are slow."""
    monkeypatch.setattr("esbench.studies.digits_run.conduct", lambda study, *_: study)
    begun = Mock(side_effect=begin)
    monkeypatch.setattr("esbench.studies.digits_run.begin", begun)
    for which in ((), ("--variants", "Loop")):
        assert run("digits", "--device", "cpu", *which) == 0
    names = [{one.variant.name for one in call.args[0]} for call in begun.call_args_list]
    assert {"Perturbed", "Loop"} & names[0] == {"Perturbed"}
    assert names[1] == {"Loop", "Perturbed"}
