"""The command `profile`: a table and a trace of each call, and a line for each variant that has none."""

import json
from pathlib import Path

import pytest

from esbench.cli.profile import Cell
from esbench.registry import REGISTRY, load
from esbench.schema import PHASES
from tests.cli.cli_runner import refusal, run

load("impls")

DOUBLED = """
import impls
from esbench.registry import variant

@variant()
class Doubled(impls.Perturbed):
    def weighted_sum(self, noise, utilities):
        return 2 * super().weighted_sum(noise, utilities)
"""
ON = ("--cases", "Linear(128*", "--device", "cpu")

Captured = pytest.CaptureFixture[str]


def test_a_profile_is_printed_and_written(capsys: Captured, tmp_path: Path) -> None:
    """Each matching variant has a table and launches on stdout and a trace file, and progress on stderr."""
    out = tmp_path / "profiles"
    assert run("profile", "--variants", "Flipped", "--variants", "Base", *ON, "--out", str(out)) == 0
    captured = capsys.readouterr()
    assert "FlippedLinear, Linear(128, 128) members=256, forward on cpu" in captured.out
    assert "Base, Linear(128, 128) members=256, forward on cpu" in captured.out
    assert "launches per call: 1 operators" in captured.out
    assert "aten::linear" in captured.out
    assert "cell 1/2" in captured.err
    names = [f"{name}-Linear-128-128-members=256-forward-on-cpu.json" for name in ("Base", "FlippedLinear")]
    assert sorted(path.name for path in out.iterdir()) == names
    for path in out.iterdir():
        assert str(path) in captured.out
        assert json.loads(path.read_text())["traceEvents"]


def test_calls_that_cannot_be_profiled_have_a_reason(capsys: Captured, tmp_path: Path) -> None:
    """A missing phase is not a failure; a wrong variant is, and no file is written for it.

    A folder without write permission is an error of the command, not of the variant.
    """
    out = str(tmp_path / "profiles")
    lacking = ("--variants", "Naive", "--variants", "Base", "--phases", "update", *ON)
    assert run("profile", *lacking, "--out", str(tmp_path / "some")) == 0
    text = capsys.readouterr().out
    assert "Naive, Linear(128, 128) members=256, update on cpu: unavailable: the plain layer" in text
    assert "Base, Linear(128, 128) members=256, update on cpu\n" in text

    plugin = tmp_path / "doubled_rows.py"
    plugin.write_text(DOUBLED)
    assert run("profile", "--plugin", str(plugin), "--variants", "Doubled", *ON, "--out", out) == 1
    text = capsys.readouterr().out
    assert "DoubledLinear, Linear(128, 128) members=256, forward on cpu: failed: wrong result: " in text
    assert "launches" not in text
    assert not Path(out).exists()

    assert run("profile", "--variants", "Base", *ON, "--out", "/dev/null/x") == 2
    assert capsys.readouterr().err == "esbench: --out /dev/null/x: /dev/null is not a folder\n"


def test_no_matching_call_is_an_error_of_one_line(capsys: Captured, tmp_path: Path) -> None:
    """The error lists what is available, the exit code is 2, and nothing is written."""
    out = tmp_path / "profiles"
    for arguments, words in (
        ("--variants Nope*", "no variant matches 'Nope*'; closest: "),
        ("", "name a variant, such as --variants Permuted; `esbench list` shows all of them"),
        ("--variants Base --cases Nope*", "no case matches 'Nope*'; available: Linear(128, 128)"),
        ("--variants Base --phases backward", "no phase 'backward'; available: sample,"),
        ("--variants Base --phases ,", "',' contains no name: give comma-separated names"),
        ("--variants Base --phases forward,quality", "--phases quality: only these phases can be profiled"),
        ("--variants Base --suite nope", "no suite 'nope'; closest: "),
        ("--variants Base --device tpu", "no device 'tpu'; available: auto, cpu, cuda"),
    ):
        assert words in refusal(capsys, "profile", *arguments.split(), "--out", str(out))
        assert not out.exists()


def test_every_call_has_its_own_file() -> None:
    """File names differ for all variants, cases and phases, and are valid on any system."""
    cases = list({case.label: case for suite in REGISTRY.suites.values() for case in suite.cases}.values())
    entries = REGISTRY.select()
    cells = {(entry, cases[0], phase) for entry in entries for phase in PHASES}
    cells |= {(entries[0], case, phase) for case in cases for phase in PHASES}
    names = [Cell(*cell, "cpu").path(Path()).name for cell in cells]
    assert len(set(names)) == len(names)
    assert not set("".join(names)) & set('<>:"/\\|?* ')
