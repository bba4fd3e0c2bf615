"""The command `profile`: tables, traces, and one line for what cannot be profiled."""

import csv
import json
from pathlib import Path

import pytest

from esbench.cli.profile import Cell
from esbench.registry import REGISTRY, load
from tests.cli_runner import run

load("impls")

WRONG = '''
"""A scheme whose update is twice what it should be."""
from dataclasses import dataclass

import impls
from esbench.registry import variant


@variant()
@dataclass(frozen=True)
class Doubled(impls.Perturbed):
    """Learns too fast."""

    def weighted_sum(self, noise, utilities):
        return 2 * super().weighted_sum(noise, utilities)
'''


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nobody who measures beside these tests."""
    monkeypatch.setenv("ESBENCH_LOCK_DIR", str(tmp_path))


def test_a_profile_is_printed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """For each variant that matches: a table and the launches on stdout, three files, progress on stderr."""
    out = tmp_path / "profiles"
    arguments = ["--variant", "Flipped", "--variant", "Base", "--case", "Linear(128*", "--device", "cpu"]
    assert run("profile", *arguments, "--out", str(out)) == 0
    captured = capsys.readouterr()
    assert "FlippedLinear, Linear(128, 128) members=256, forward on cpu" in captured.out
    assert "Base, Linear(128, 128) members=256, forward on cpu" in captured.out
    assert "launches per call: 1 operators" in captured.out
    assert "aten::linear" in captured.out
    assert "cell 1/2" in captured.err
    stems = [f"{name}-Linear-128-128-members=256-forward-on-cpu" for name in ("Base", "FlippedLinear")]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        f"{stem}.{kind}" for stem in stems for kind in ("csv", "json", "md")
    )
    for path in out.iterdir():
        assert str(path) in captured.out
    with (out / f"{stems[0]}.csv").open(newline="") as file:
        assert {"aten::linear"} < {row["name"] for row in csv.DictReader(file)}
    assert "| aten::linear" in (out / f"{stems[0]}.md").read_text()
    assert json.loads((out / f"{stems[0]}.json").read_text())["traceEvents"]


def test_what_cannot_be_profiled_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The others are profiled all the same; what there is not has not failed."""
    arguments = ["--variant", "Naive", "--variant", "Base", "--case", "Linear(128*", "--phase", "update"]
    assert run("profile", *arguments, "--device", "cpu", "--out", str(tmp_path)) == 0
    captured = capsys.readouterr()
    assert "Naive, Linear(128, 128) members=256, update on cpu: unavailable: the plain layer" in captured.out
    assert "Base, Linear(128, 128) members=256, update on cpu\n" in captured.out


def test_a_folder_that_cannot_be_written_is_not_the_variants_fault(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line and exit code 2."""
    arguments = ["--variant", "Base", "--case", "Linear(128*", "--device", "cpu"]
    assert run("profile", *arguments, "--out", "/dev/null/x") == 2
    assert "/dev/null/x" in capsys.readouterr().err


def test_a_variant_that_is_wrong_is_not_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict of its check is printed instead; nothing is written."""
    plugin, out = tmp_path / "doubled_rows.py", tmp_path / "profiles"
    plugin.write_text(WRONG)
    arguments = ["--plugin", str(plugin), "--variant", "Doubled", "--case", "Linear(128*", "--device", "cpu"]
    assert run("profile", *arguments, "--out", str(out)) == 1
    text = capsys.readouterr().out
    assert "DoubledLinear, Linear(128, 128) members=256, forward on cpu: failed: oracle: " in text
    assert "launches" not in text
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--variant Nope*", "no variant matches 'Nope*'; there are: "),
        ("--case Nope*", "no case matches 'Nope*'; there are: Linear(128, 128)"),
        ("--phase backward", "no phase 'backward'; there are: sample,"),
        ("--phase ,", "',' names nothing: give names with commas between them"),
        ("--suite nope", "no suite 'nope'; there are: backward,"),
        ("--device tpu", "no device 'tpu'; there are: auto, cpu, cuda"),
    ],
)
def test_where_nothing_matches_one_line_says_what_there_is(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With exit code 2, and nothing written."""
    assert run("profile", *arguments.split(), "--out", str(tmp_path / "profiles")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("esbench: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err
    assert not (tmp_path / "profiles").exists()


def test_every_call_has_files_of_its_own() -> None:
    """No two variants, cases and phases share a file name, and each is one on any system."""
    cases = [case for suite in REGISTRY.suites.values() for case in suite.cases]
    cells = {
        Cell(entry, case, phase, "cpu")
        for entry in REGISTRY.select()
        for case in cases
        for phase in ("forward", "update")
    }
    stems = {cell.stem for cell in cells}
    assert len(stems) == len(cells)
    assert not any(set(stem) & set('<>:"/\\|?* ') for stem in stems)
