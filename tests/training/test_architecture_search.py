"""The example architecture_search.py, run from its own file."""

import gc
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "architecture_search.py"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """Run the script in this process; return the cells of its table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        patch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["candidate", "widths"]
    return [row.split() for row in rows]


def test_the_search_improves_in_constant_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """No parameter of a candidate is left, and the result is a function of the seed."""
    run(capsys, "--candidates", "1", "--steps", "1")  # torch imports what a first step needs
    tables = [run(capsys, "--candidates", "4", "--steps", "20", "--seed", seed) for seed in ("0", "0", "1")]
    assert tables[0] == tables[1] != tables[2]
    for rows in tables:
        accuracies = [float(row[2].removesuffix("%")) for row in rows[:-1]]
        assert accuracies == sorted(accuracies)
        assert accuracies[-1] > 50
        assert rows[-1][0] == "4"
    gc.disable()
    try:
        rows = run(capsys, "--candidates", "8", "--steps", "2")
    finally:
        gc.enable()
    assert {row[-1] for row in rows} == {"0"}
