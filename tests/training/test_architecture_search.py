"""The example architecture_search.py, run from its own file."""

import gc
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from torch import nn

from impls.training import implicit_optimizer

SCRIPT = Path(__file__).parents[2] / "examples" / "architecture_search.py"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """Run the script in this process; return the cells of its table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        patch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["generation", "candidates"]
    return [row.split() for row in rows]


def test_memory_is_flat_over_a_hundred_candidates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No parameter of a candidate is left, without any garbage collection."""
    trained = []

    class Counted(implicit_optimizer.ImplicitOptimizer):
        """Counts the models that it trains."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            trained.append(id(model))

    run(capsys, "--candidates", "1", "--steps", "1")  # torch imports what a first step needs
    monkeypatch.setattr(implicit_optimizer, "ImplicitOptimizer", Counted)
    gc.disable()
    try:
        rows = run(capsys, "--candidates", "100", "--steps", "2", "--reclaim", "nothing")
    finally:
        gc.enable()
    assert len(trained) == 100
    assert [row[1] for row in rows] == [str(candidates) for candidates in [*range(5, 100, 3), 100]]
    assert {row[-1] for row in rows} == {"0"}


def test_the_search_improves_and_is_a_function_of_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """The best candidate is never lost, and beats guessing; how memory is reclaimed changes nothing."""
    best = [float(row[2].removesuffix("%")) for row in run(capsys, "--candidates", "20", "--steps", "60")]
    assert best == sorted(best)
    assert best[-1] > 60
    small = ("--candidates", "8", "--steps", "3")
    found = [
        [row[:4] for row in run(capsys, *small, *arguments)]
        for arguments in (
            *(("--reclaim", mode) for mode in ("nothing", "collect", "iterator")),
            ("--seed", "1"),
        )
    ]
    assert found[0] == found[1] == found[2] != found[3]


def test_its_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The help has an example that works; what needs CUDA is refused in one line."""
    with pytest.raises(SystemExit, match="0"):
        run(capsys, "--help")
    lines = capsys.readouterr().out.splitlines()
    example = next(line for line in lines if line.startswith("Example: "))
    python, path, *arguments = shlex.split(example.removeprefix("Example: "))
    assert (python, SCRIPT.parents[1] / path) == ("python", SCRIPT)
    rows = run(capsys, *arguments, "--candidates", "3", "--steps", "1")
    assert [row[1] for row in rows] == ["3"]
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "--reclaim", "pool")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--reclaim pool: memory pools belong to torch's CUDA allocator")
