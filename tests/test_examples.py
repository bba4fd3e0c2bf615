"""The examples run from their own files, and end with their table."""

import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAIN = '__name__ == "__main__"'
SCRIPTS = [path for path in sorted(ROOT.glob("examples/*.py")) if MAIN in path.read_text(encoding="utf-8")]
TINY = ("--members", "3", "--steps", "2")


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.stem)
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make what stands beside a script importable, as Python does when it runs one."""
    path: Path = request.param
    monkeypatch.syspath_prepend(path.parent)
    return path


def run(script: Path, *arguments: str) -> None:
    """Run a script in this process."""
    before, sys.argv = sys.argv, [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before


def test_an_example_ends_with_its_table(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How well the network reads after each way of training it, backpropagation last."""
    run(script, *TINY)
    out, error = capsys.readouterr()
    header, line, *rows = out.splitlines()
    assert header.split()[:2] == ["trained", "with"]
    assert set(line) <= {"-", " "}
    assert len(rows) > 1
    assert rows[-1].startswith("backpropagation")
    assert all(0 <= float(row.split()[-2].removesuffix("%")) <= 100 for row in rows)
    assert "training" in error


def test_an_example_shows_how_it_is_called(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its help has a command line that the script understands."""
    with pytest.raises(SystemExit, match="0"):
        run(script, "--help")
    lines = capsys.readouterr().out.splitlines()
    example = next(line for line in lines if line.startswith("Example: "))
    python, path, *arguments = shlex.split(example.removeprefix("Example: "))
    assert (python, ROOT / path) == ("python", script)
    run(script, *arguments, *TINY)
    assert "backpropagation" in capsys.readouterr().out
