"""Which stored run recommend answers from, and what it says of those that were cut off."""

import sys
from pathlib import Path

import msgspec
import pytest

from esbench.measure.environment import environment
from esbench.registry import REGISTRY
from esbench.schema import Request, Run, RunEnd, Variant
from tests import synthetic
from tests.report import report_cases
from tests.report.ranking_cases import FLIPPED, HADAMARD, KAPPAS, SQUARE, rows
from tests.test_recommend import ORDER, labels, run

ASK = ("--linear", "64x64", "--offline", "--device", "cpu")


def keep(folder: Path, number: int, *variants: Variant, end: RunEnd | None = None) -> Run:
    """Store a run of these variants, or of all, in the order of the numbers."""
    kappas = {one: KAPPAS[one] for one in (variants or KAPPAS)}
    found = rows(kappas=kappas)
    name = environment("cpu").device_name
    measured = synthetic.run(
        found, suite="recommend 64x64", device_name=name, run_id=f"2026010{number}T000000Z-recommend-{number}"
    )
    request = Request(variants=tuple(one.scheme for one in variants), shapes=(SQUARE,))
    header = msgspec.structs.replace(measured.header, request=request)
    measured = msgspec.structs.replace(measured, header=header, end=end or measured.end)
    report_cases.store(folder, measured)
    return measured


def answer(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], str]:
    """The ranking, and what is said beside it."""
    assert run(*ASK, "--results", str(folder / "results"), *arguments) == 0
    captured = capsys.readouterr()
    return labels(captured.out), captured.err


def test_partial_runs_do_not_hide_a_whole_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole run ranks all, though newer runs hold one variant each; one line names them."""
    keep(tmp_path, 1)
    keep(tmp_path, 2, HADAMARD)
    keep(tmp_path, 3, FLIPPED)
    assert answer(tmp_path, capsys)[0] == ORDER
    ranked, said = answer(tmp_path, capsys, "--variants", "Hadamard")
    assert ranked == ["Hadamard"]
    assert said.count("\n") <= 1
    ranked, said = answer(tmp_path, capsys, "--variants", "Hadamard", "--variants", "Flipped")
    assert set(ranked) == {"Hadamard", "Flipped"}
    assert "shows run 20260101T000000Z-recommend-1" in said
    assert "newer 20260103T000000Z-recommend-3 ranks 1 (Flipped)" in said


def test_variants_that_no_run_ranks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No empty table: one line, and exit code 2."""
    keep(tmp_path, 1, HADAMARD)
    assert run(*ASK, "--results", str(tmp_path / "results"), "--variants", "Orthogonal*") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "ranks Linear(64, 64) for Orthogonal" in captured.err


def test_run_that_was_cut_off_is_said_with_what_completes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of exactly this shape and newer than the answer; an older one is past."""
    end = RunEnd(status="interrupted", wall_s=1.0)
    keep(tmp_path, 1, end=end)
    whole = keep(tmp_path, 2)
    assert "was interrupted" not in answer(tmp_path, capsys)[1]
    keep(tmp_path, 3, HADAMARD, end=end)
    ranked, said = answer(tmp_path, capsys)
    assert ranked == ORDER
    assert f"shows run {whole.header.run_id}" in said
    results = tmp_path / "results"
    command = f"`esbench run --resume --out {results} --device cpu` completes it"
    assert f"run 20260103T000000Z-recommend-3 of Linear(64, 64) was interrupted: {command}" in said


def test_interrupt_says_the_commands_that_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resume with the same folder of results, then the same question of what is stored."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("esbench.measure.runner.run", interrupted)
    arguments = ("--linear", "8x8", "--variants", "Flipped*", "--device", "cpu", "--results", str(tmp_path))
    assert run(*arguments) == 130
    said = capsys.readouterr().err
    assert f"`esbench run --resume --out {tmp_path} --device cpu` completes it, then " in said
    question = f"`esbench recommend --linear 8x8 --variants 'Flipped*' --device cpu --results {tmp_path}"
    assert f"{question} --offline` answers" in said


@pytest.mark.parametrize("below", [(), ("deeper", "still")])
def test_results_that_are_no_folder_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], below: tuple[str, ...]
) -> None:
    """In one line, before a model is loaded or anything is measured."""
    file = tmp_path / "file"
    file.write_text("mine")
    assert run("--linear", "8x8", "--results", str(file.joinpath(*below))) == 2
    said = capsys.readouterr().err
    assert f"{file} is not a folder" in said
    assert said.count("\n") == 1


def test_nothing_that_trains_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Base draws no noise: one line, exit code 2."""
    assert run("--linear", "8x8", "--variants", "Base", "--results", str(tmp_path)) == 2
    assert "--variants Base: nothing to train with" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_schemes_are_imported_from_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plugin's scheme from the plugin; without it the code says that it has to be loaded."""
    theirs = Variant(scheme="SchemeOfATest")
    found = [
        msgspec.structs.replace(row, variant=theirs) if row.variant == HADAMARD else row for row in rows()
    ]
    name = environment("cpu").device_name
    report_cases.store(tmp_path, synthetic.run(found, suite="quality", device_name=name))
    asked = (*ASK, "--results", str(tmp_path / "results"))
    assert run(*asked) == 0
    text = capsys.readouterr().out
    assert "# SchemeOfATest is not registered" in text
    assert "import SchemeOfATest" not in text
    plugin = tmp_path / "plugin_of_a_test.py"
    plugin.write_text(
        "import impls\nfrom esbench.registry import variant\n"
        "@variant()\nclass SchemeOfATest(impls.Perturbed):\n    pass\n"
    )
    monkeypatch.setattr(REGISTRY, "entries", dict(REGISTRY.entries))
    try:
        assert run(*asked, "--plugin", str(plugin)) == 0
        assert "from plugin_of_a_test import SchemeOfATest\n" in capsys.readouterr().out
    finally:
        del sys.modules["plugin_of_a_test"]
