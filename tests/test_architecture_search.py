"""The example that searches for an architecture, from its own file."""

import gc
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from impls.training import backward

SCRIPT = Path(__file__).parent.parent / "examples" / "architecture_search.py"


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make what stands beside the script importable, as Python does when it runs one.

    Collections are spared what was there before.
    """
    monkeypatch.syspath_prepend(SCRIPT.parent)
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def _no_collection() -> Iterator[None]:
    """Let nothing be collected, once torch has loaded what it needs for a first step."""
    run("--candidates", "1", "--steps", "1")
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    yield
    if was_enabled:
        gc.enable()


def run(*arguments: str) -> None:
    """Run the script in this process."""
    before, sys.argv = sys.argv, [str(SCRIPT), *arguments]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = before


def table(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Return the cells that it printed, below the header and its line."""
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["generation", "candidates"]
    return [row.split() for row in rows]


@pytest.mark.usefixtures("_no_collection")
def test_memory_is_flat_over_a_hundred_candidates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of any candidate is left when implicit optimizers trained it, without any collection."""
    trained = []

    class Counted(backward.ImplicitOptimizer):
        """Counts what is trained by it."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            trained.append(id(model))

    monkeypatch.setattr(backward, "ImplicitOptimizer", Counted)
    capsys.readouterr()
    run("--candidates", "100", "--steps", "2", "--reclaim", "nothing")
    assert len(trained) == 100
    rows = table(capsys)
    assert [row[1] for row in rows] == [str(trained) for trained in [*range(5, 100, 3), 100]]
    assert {row[-1] for row in rows} == {"0"}


def test_the_search_finds_better_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """The best is never lost, and learns more than to guess one of three labels."""
    run("--candidates", "20", "--steps", "60")
    best = [float(row[2].removesuffix("%")) for row in table(capsys)]
    assert best == sorted(best)
    assert best[-1] > 60


@pytest.mark.parametrize("mode", ["nothing", "collect", "iterator"])
def test_a_search_is_a_pure_function_of_its_seed(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is done about memory."""
    found = []
    for arguments in (("--reclaim", mode), ("--reclaim", "nothing"), ("--seed", "1")):
        run("--candidates", "8", "--steps", "3", *arguments)
        found.append([row[:4] for row in table(capsys)])
    assert found[0] == found[1] != found[2]


def test_it_shows_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    """Its help has a command line that it understands."""
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    lines = capsys.readouterr().out.splitlines()
    example = next(line for line in lines if line.startswith("Example: "))
    python, path, *arguments = shlex.split(example.removeprefix("Example: "))
    assert (python, SCRIPT.parent.parent / path) == ("python", SCRIPT)
    run(*arguments, "--candidates", "3", "--steps", "1")
    assert [row[1] for row in table(capsys)] == ["3"]


def test_what_needs_cuda_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2: its models are on the CPU."""
    with pytest.raises(SystemExit, match="2"):
        run("--reclaim", "pool")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--reclaim pool: memory pools are of torch's CUDA allocator")
