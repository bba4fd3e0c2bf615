"""The programs, commands and sessions of the README and of docs work."""

import copy
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from esbench.measure import device_peaks, interleave
from esbench.registry import REGISTRY
from tests.cli.cli_runner import run

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", README, re.DOTALL))
COMMANDS = sorted(set(re.findall(r"^python -m (esbench .*?)\s*(?:#.*)?$", CONSOLE, re.MULTILINE)))
SESSIONS = sorted(set(re.findall(r"nox -s (\w+)", README)))


def program(words: str) -> str:
    """Return the program in the README that contains these words."""
    return next(text for text in PROGRAMS if words in text)


def test_the_training_example_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example, run from a file, ends with at most a tenth of its initial error."""
    examples = [text for text in PROGRAMS if "population.update(noise, impls.z_scores" in text]
    assert len(examples) == 2
    for example in examples:
        assert "range(100)" in example
        errors = []
        for steps in (0, 100):
            file = tmp_path / f"training_{steps}.py"
            file.write_text(example.replace("range(100)", f"range({steps})"))
            runpy.run_path(str(file), run_name="__main__")
            errors.append(float(capsys.readouterr().out))
        assert errors[1] < errors[0] / 10


def test_several_processes_train_as_one_does_even_if_one_of_them_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher starts the program of the page in two processes, and again after a kill within a step."""
    text = program("shard.evaluate(step, evaluate)").replace("range(first, 100)", "range(first, 8)")
    one, two = (tmp_path / name for name in ("one", "two"))
    for folder in (one, two):
        folder.mkdir()
        (folder / "train.py").write_text(text)
    update = "    shard.update("
    assert text.count(update) == 1
    kill = f"    if step == 4 and shard.rank == 1 and first == 0:\n        os.kill(os.getpid(), 9)\n{update}"
    (two / "train.py").write_text(text.replace(update, kill))
    line = next(line for line in CONSOLE.splitlines() if " torchrun " in line)
    setting, _, options = line.replace("--nproc-per-node 4", "--nproc-per-node 2").partition(" torchrun ")
    process = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1", *options.split()],
        cwd=two,
        env=dict(os.environ, **dict([setting.split("=")])),
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "exitcode: -9" in process.stderr
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(one)
    runpy.run_path("train.py", run_name="__main__")
    assert float(process.stdout) == pytest.approx(float(capsys.readouterr().out), rel=1e-4)


def test_the_programs_of_the_page_on_rigl_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each program runs by itself; the first prints the sparsity of the layers."""
    programs = [text for text in PROGRAMS if "RigLScheduler" in text]
    assert len(programs) == 2
    for index, text in enumerate(programs):
        file = tmp_path / f"rigl_{index}.py"
        file.write_text(text)
        runpy.run_path(str(file), run_name="__main__")
        assert ("the model: " in capsys.readouterr().out) == (index == 0)


def test_the_variants_of_the_readme_pass_their_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each program, run from a file, registers its variants."""
    for number, (words, names) in enumerate(
        (
            ("class Signs", ["Signs"]),
            (
                "variant(k=3)",
                ["Permuted(in_sparsity=0.25)", "Permuted(in_sparsity=0.75)", "SparsePerturbed(k=3)"],
            ),
        )
    ):
        plugin = tmp_path / f"from_the_readme_{number}.py"
        plugin.write_text(program(words))
        chosen = [word for name in names for word in ("--variants", name)]
        assert run("check", "--plugin", str(plugin), *chosen) == 0
        lines = capsys.readouterr().out
        for name in names:
            assert re.search(rf"^{re.escape(name)} +correct: Linear, Conv2d$", lines, re.MULTILINE), lines


def test_the_suite_and_the_operator_of_the_docs_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both files run as they are printed; a wrong forward of the own operator gets a reason."""
    monkeypatch.setattr(interleave, "MAX_ROUNDS", 6)
    monkeypatch.setitem(device_peaks.PRODUCT_NS, "cpu", 1e5)
    for name in ("entries", "suites", "reserved"):  # other tests do not see what is registered here
        monkeypatch.setattr(REGISTRY, name, copy.copy(getattr(REGISTRY, name)))
    results = ("--results", str(tmp_path / "results"), "--device", "cpu", "--budget", "30")
    for name, words in (("suite", 'Suite("policy"'), ("operator", "class ScaleWorkload")):
        (tmp_path / f"docs_{name}.py").write_text(program(words))
    suite = ("--suite", "policy", "--phases", "forward", "--variants", "Perturbed", "--cases", "Linear(6*")
    assert run("run", "--plugin", str(tmp_path / "docs_suite.py"), *suite, *results) == 0
    assert "\nLinear 64 -> 6, " in capsys.readouterr().out
    operator = tmp_path / "docs_operator.py"
    assert run("run", "--plugin", str(operator), "--suite", "scale", *results) == 0
    out = capsys.readouterr().out
    assert "Scale 64 -> 64, repeats=4, 256 members" in out
    assert re.search(r"^MemberScale +[\d.]+ +[\d.]+x", out, re.MULTILINE)
    wrong = tmp_path / "wrong_operator.py"
    text = program("class ScaleWorkload").replace("return x * self.scales", "return x * self.scales[:1]")
    wrong.write_text(
        re.sub(r"(Plain|Member)Scale", r"Wrong\1Scale", text).replace('"scale"', '"wrong_scale"')
    )
    monkeypatch.setattr(REGISTRY, "entries", {})  # an operator has a single base
    assert run("run", "--plugin", str(wrong), "--suite", "wrong_scale", *results) == 1
    assert "WrongMemberScale failed: wrong result: member 1 differs" in capsys.readouterr().err


def test_every_command_option_and_session_in_the_readme_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """Each subcommand has a help page that knows each option; each session is in the noxfile."""
    assert COMMANDS
    assert SESSIONS
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        assert run(words[0], "--help") == 0
        page = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert option in page, command
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 250
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    for session in SESSIONS:
        assert f"def {session}(session: nox.Session)" in noxfile


def test_every_link_leads_to_a_file() -> None:
    """Links and pictures of the README and of docs are files of the repository."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'<img src="([^"]+)"', text)
        for link in links:
            assert link.startswith("https://") or (page.parent / link).exists(), (page.name, link)
