"""The examples run from their own files and end with a table; bad options are errors of one line."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from impls.training import networks

ROOT = Path(__file__).parent.parent
OTHERS = ("comparison", "architecture_search", "cartpole", "characters")
"""A module that the examples share, and examples with another table and other tests."""
SCRIPTS = [path for path in sorted(ROOT.glob("examples/*.py")) if path.stem not in OTHERS]
pytestmark = pytest.mark.filterwarnings("ignore:entries will never move")  # the runs have too few steps
BAD_OPTIONS = (
    ("--members", "0"),
    ("--members", "many"),
    ("--steps", "0"),
    ("--seed", "-1"),
    ("--learning-rate", "nan"),
)


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.stem)
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script with its folder on the path, as when Python runs it."""
    path: Path = request.param
    monkeypatch.syspath_prepend(path.parent)
    return path


def run(script: Path, *arguments: str) -> None:
    """Run a script in this process."""
    threads, before, sys.argv = torch.get_num_threads(), sys.argv, [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
        torch.set_num_threads(threads)


def test_an_example(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example in a script's help runs and prints accuracies; a bad option or missing package ends it."""
    with pytest.raises(SystemExit, match="0"):
        run(script, "--help")
    out = capsys.readouterr().out
    example = next(line for line in out.splitlines() if line.startswith("Example: "))
    python, path, *arguments = shlex.split(example.removeprefix("Example: "))
    assert (python, ROOT / path) == ("python", script)

    has_members = "--members" in out
    tiny = (*(("--members", "3") if has_members else ()), "--steps", "2")
    run(script, *arguments, *tiny)
    out, error = capsys.readouterr()
    header, line, *rows = out.splitlines()
    assert header.split()[:2] == ["trained", "with"]
    assert set(line) <= {"-", " "}
    assert len(rows) > 1
    assert rows[-1].startswith("backpropagation")
    assert all(0 <= float(row.split()[-2].removesuffix("%")) <= 100 for row in rows)
    assert "training" in error

    for option, value in BAD_OPTIONS:
        if option != "--members" or has_members:
            with pytest.raises(SystemExit, match="2"):
                run(script, option, value)
            *_, line = capsys.readouterr().err.splitlines()
            assert f"argument {option}: invalid " in line
            assert value in line

    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    networks.digits.cache_clear()
    with pytest.raises(SystemExit, match="2"):
        run(script, *tiny)
    networks.digits.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install scikit-learn" in line


def test_a_policy_learns_to_balance_the_pole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example in the script's help reaches 475 of 500; without gymnasium it says what to install."""
    script = ROOT / "examples/cartpole.py"
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(SystemExit, match="0"):
        run(script, "--help")
    example = re.findall(
        r"^Example: python examples/cartpole.py (.*)$", capsys.readouterr().out, re.MULTILINE
    )
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "gymnasium", None)
        with pytest.raises(SystemExit, match="2"):
            run(script)
    assert capsys.readouterr().err.splitlines()[-1] == "this example needs gymnasium: pip install gymnasium"
    pytest.importorskip("gymnasium", reason="the group tasks is not installed")
    run(script, *shlex.split(example[0]))
    *_, row = capsys.readouterr().out.splitlines()
    name, reward, episodes, _ = row.split()
    assert name == "LowRank"
    assert 475 <= float(reward) <= 500
    assert int(episodes) < 64 * 300


def test_a_transformer_learns_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example prints bits per character beside the bigram entropy, and learns within some steps."""
    script = ROOT / "examples/characters.py"
    monkeypatch.syspath_prepend(script.parent)
    run(script, "--steps", "12", "--members", "64")
    *_, learned, bigram = capsys.readouterr().out.splitlines()
    assert learned.split()[0] == "LowRank"
    assert 3 < float(learned.split()[1]) < 4.4
    assert bigram.split()[:2] == ["bigram", "entropy"]


def test_examples_run_from_anywhere_without_an_installation(tmp_path: Path) -> None:
    """The examples' shared module adds the checkout to the path before it imports the packages."""
    for path in (*SCRIPTS, *(ROOT / f"examples/{name}.py" for name in ("cartpole", "characters"))):
        imports = re.findall(r"^from (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        ours = [name for name in imports if name in {"esbench", "impls", "comparison"}]
        assert ours[0] == "comparison", path
    called = [sys.executable, str(SCRIPTS[0]), "--help"]
    done = subprocess.run(called, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Example: " in done.stdout
