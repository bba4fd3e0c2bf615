"""What the README tells people to type does what it says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_cli import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", README, re.DOTALL))
COMMANDS = sorted(set(re.findall(r"^python -m (esbench .*?)\s*(?:#.*)?$", CONSOLE, re.MULTILINE)))
SESSIONS = sorted(set(re.findall(r"nox -s (\w+)", README)))


def program(words: str) -> str:
    """Return the README's program that holds these words."""
    (found,) = [text for text in PROGRAMS if words in text]
    return found


def last_error(text: str) -> float:
    """Run a program in a fresh interpreter; return the number it prints."""
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_the_training_example_learns() -> None:
    """Pasted into a file it ends with a tenth of the error that it starts from, or less."""
    example = program("population.update(noise, (rewards")
    assert "range(100)" in example
    assert last_error(example) < last_error(example.replace("range(100)", "range(0)")) / 10


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("class Signs", ["Signs"]),
        (
            "variant(k=8)",
            ["Permuted(in_sparsity=0.25)", "Permuted(in_sparsity=0.75)", "SparsePerturbed(k=8)"],
        ),
    ],
)
def test_the_readmes_variants_pass_the_oracle(words: str, names: list[str], tmp_path: Path) -> None:
    """Saved as a file, each registers its variants, and all of them hold."""
    plugin = tmp_path / "from_the_readme.py"
    plugin.write_text(program(words))
    command = [sys.executable, "-m", "esbench", "check", "--plugin", str(plugin)]
    command += [word for name in names for word in ("--variants", name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in names:
        assert re.search(rf"^{re.escape(name)} +Linear +ok$", done.stdout, re.MULTILINE)
        assert re.search(rf"^{re.escape(name)} +Conv2d +ok$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_in_the_readme_exists(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each subcommand has a help page, and the page knows each option."""
    words = shlex.split(command)[1:]
    assert run(words[0], "--help") == 0
    page = capsys.readouterr().out
    for option in (word for word in words if word.startswith("--")):
        assert option in page


@pytest.mark.parametrize("session", SESSIONS)
def test_every_session_in_the_readme_exists(session: str) -> None:
    """Each session that the README names is a function of the noxfile."""
    assert f"def {session}(session: nox.Session)" in (ROOT / "noxfile.py").read_text(encoding="utf-8")
