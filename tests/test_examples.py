"""The examples run from their own files, and end with their table."""

import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from impls.training import networks

ROOT = Path(__file__).parent.parent
MAIN = '__name__ == "__main__"'
OTHERS = ("architecture_search",)
"""Those with a table of their own, and tests of their own."""
SCRIPTS = [
    path
    for path in sorted(ROOT.glob("examples/*.py"))
    if MAIN in path.read_text(encoding="utf-8") and path.stem not in OTHERS
]
pytestmark = pytest.mark.filterwarnings("ignore:entries will never move")  # in so few steps
POPULATIONS = {path for path in SCRIPTS if path.stem != "rigl_digits"}
"""Those that train by evolution strategies have members."""


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.stem)
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make what stands beside a script importable, as Python does when it runs one."""
    path: Path = request.param
    monkeypatch.syspath_prepend(path.parent)
    return path


def tiny(script: Path) -> tuple[str, ...]:
    """Return the options of a training that is over at once."""
    return (*(("--members", "3") if script in POPULATIONS else ()), "--steps", "2")


def run(script: Path, *arguments: str) -> None:
    """Run a script in this process."""
    threads, before, sys.argv = torch.get_num_threads(), sys.argv, [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
        torch.set_num_threads(threads)


def test_an_example_ends_with_its_table(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How well the network reads after each way of training it, backpropagation last."""
    run(script, *tiny(script))
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
    run(script, *arguments, *tiny(script))
    assert "backpropagation" in capsys.readouterr().out


def test_an_example_runs_from_anywhere_without_an_installation(script: Path, tmp_path: Path) -> None:
    """A checkout and the packages it depends on are enough."""
    called = [sys.executable, str(script), "--help"]
    done = subprocess.run(called, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Example: " in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--members", "0"),
        ("--steps", "0"),
        ("--seed", "-1"),
        ("--learning-rate", "nan"),
        ("--members", "many"),
    ],
)
def test_a_number_out_of_range_is_one_line(
    script: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]
) -> None:
    """That names the option, below the usage, with exit code 2."""
    if script not in POPULATIONS:
        arguments = (arguments[0].replace("members", "steps"), arguments[1])
    with pytest.raises(SystemExit, match="2"):
        run(script, *arguments)
    *_, line = capsys.readouterr().err.splitlines()
    assert f"argument {arguments[0]}: invalid " in line
    assert arguments[1] in line


def test_without_scikit_learn_one_line_says_so(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exit code 2: it is where the digits come from."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    networks.digits.cache_clear()
    with pytest.raises(SystemExit, match="2"):
        run(script, *tiny(script))
    networks.digits.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install scikit-learn" in line
