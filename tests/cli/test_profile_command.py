"""The command `profile`: tables, traces, and one error line per variant that cannot be profiled."""

import csv
import json
from pathlib import Path

import pytest

from esbench.cli.profile import Cell
from esbench.registry import REGISTRY, load
from tests.cli.cli_runner import run

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
ON = ("--case", "Linear(128*", "--device", "cpu")

Captured = pytest.CaptureFixture[str]


def test_a_profile_is_printed_and_written(capsys: Captured, tmp_path: Path) -> None:
    """Each matching variant has a table and launches on stdout, three files, and progress on stderr."""
    out = tmp_path / "profiles"
    assert run("profile", "--variant", "Flipped", "--variant", "Base", *ON, "--out", str(out)) == 0
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


def test_what_cannot_be_profiled_says_why(capsys: Captured, tmp_path: Path) -> None:
    """A missing phase is not a failure; a wrong variant is, and no file is written for it.

    A folder without write permission is an error of the command, not of the variant.
    """
    out = str(tmp_path / "profiles")
    lacking = ("--variant", "Naive", "--variant", "Base", "--phase", "update", *ON)
    assert run("profile", *lacking, "--out", str(tmp_path / "some")) == 0
    text = capsys.readouterr().out
    assert "Naive, Linear(128, 128) members=256, update on cpu: unavailable: the plain layer" in text
    assert "Base, Linear(128, 128) members=256, update on cpu\n" in text

    plugin = tmp_path / "doubled_rows.py"
    plugin.write_text(WRONG)
    assert run("profile", "--plugin", str(plugin), "--variant", "Doubled", *ON, "--out", out) == 1
    text = capsys.readouterr().out
    assert "DoubledLinear, Linear(128, 128) members=256, forward on cpu: failed: oracle: " in text
    assert "launches" not in text
    assert not Path(out).exists()

    assert run("profile", "--variant", "Base", *ON, "--out", "/dev/null/x") == 2
    assert "/dev/null/x" in capsys.readouterr().err


def test_where_nothing_matches_one_line_says_what_there_is(capsys: Captured, tmp_path: Path) -> None:
    """The line lists what is available, the exit code is 2, and nothing is written."""
    out = tmp_path / "profiles"
    for arguments, words in (
        ("--variant Nope*", "no variant matches 'Nope*'; there are: "),
        ("--case Nope*", "no case matches 'Nope*'; there are: Linear(128, 128)"),
        ("--phase backward", "no phase 'backward'; there are: sample,"),
        ("--phase ,", "',' contains no name: give comma-separated names"),
        ("--suite nope", "no suite 'nope'; there are: backward,"),
        ("--device tpu", "no device 'tpu'; there are: auto, cpu, cuda"),
    ):
        assert run("profile", *arguments.split(), "--out", str(out)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("esbench: ")
        assert captured.err.count("\n") == 1
        assert words in captured.err
        assert not out.exists()


def test_every_call_has_files_of_its_own() -> None:
    """File names differ for all variants, cases and phases, and are valid on any system."""
    cases = {case.label: case for suite in REGISTRY.suites.values() for case in suite.cases}
    stems = [
        Cell(entry, case, "forward", "cpu").stem for entry in REGISTRY.select() for case in cases.values()
    ]
    assert len(set(stems)) == len(stems)
    assert Cell(REGISTRY.entries["Base"], next(iter(cases.values())), "update", "cpu").stem not in stems
    assert not set("".join(stems)) & set('<>:"/\\|?* ')
