"""The command line: every error is one line with the documented exit code."""

import json
import re
from pathlib import Path

import pytest
import torch

from esbench import store
from esbench.cli import app
from esbench.cli.run import plan_of
from esbench.measure import validation
from esbench.registry import REGISTRY, Suite
from esbench.report.analysis.rollout import with_forwards_per_step
from esbench.schema import Case, Request, Skipped
from esbench.stats import median
from esbench.text import short_path
from tests.cli.cli_runner import refusal, run
from tests.loop_cases import stored_in

ROOT = Path(__file__).parents[2]

GOOD = '''
"""A third-party scheme: Gaussian noise with one value for each output."""
from dataclasses import dataclass

import torch
from esbench.registry import variant
from impls import AbstractAdditiveScheme
from impls.perturbation.noise import Noise


@dataclass(frozen=True, eq=False)
class RowNoise(Noise):
    rows: torch.Tensor


@variant(source="another package")
@dataclass(frozen=True)
class RowShared(AbstractAdditiveScheme):
    """One value for each output and tap."""

    def sample(self, weight, stream):
        return RowNoise(stream.normal("rows", *weight.shape))
    def correction(self, op, noise, x):
        return op.apply_per_member(x, noise.rows)
    def weighted_sum(self, noise, utilities):
        return torch.tensordot(utilities, noise.rows, dims=1)
    def dense_noise(self, noise):
        return noise.rows
'''


def plugin(folder: Path, name: str, *replaced: tuple[str, str]) -> tuple[str, ...]:
    """Write a plug-in with a scheme of this name and with texts replaced; return options that choose it."""
    file, text = folder / f"{name.lower()}_rows.py", GOOD.replace("RowShared", name)
    for old, new in replaced:
        text = text.replace(old, new)
    file.write_text(text)
    return "--plugin", str(file), "--variants", name


ONE_FORWARD = ("--cases", "Linear(128*", "--phases", "forward", "--device", "cpu", "--results")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("run --variants Nope*", "no variant matches 'Nope*'; closest: "),
        ("run --suite populaton", "no suite 'populaton'; closest: population, "),
        ("run --dtype int8", "no dtype 'int8'; available: float64, float32, tfloat32, bfloat16, float16"),
        ("run --cases Nope*", "no case matches 'Nope*'; available: Linear(128, 128)"),
        ("run --phases backward", "no phase 'backward'; available: sample, forward, update, step"),
        ("run --device tpu", "no device 'tpu'; available: auto, cpu, cuda"),
        ("run --plugin nope.py", "cannot load variants from nope.py: FileNotFoundError: no such file"),
        ("run --plugin no_such_module", "No module named 'no_such_module'"),
        ("run --seed minus", "--seed"),
        ("run --nope", "No such option: --nope"),
        ("run --budget 0", "--budget"),
        ("nope", "No such command 'nope'"),
        ("list --variants nope", "no variant matches 'nope'"),
        ("check --variants nope", "no variant matches 'nope'"),
        ("report --results no/such/folder", "no folder no/such/folder: measure with `esbench run`"),
        ("readme --file no/such/file", "no/such/file cannot be read"),
    ],
)
def test_bad_usage_ends_in_one_line_and_exit_code_2(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A usage error prints one line that lists the valid values, and writes nothing."""
    out = ["--results", str(tmp_path)] if arguments.startswith("run") else []
    assert words in refusal(capsys, *arguments.split(), *out)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_every_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command has a sentence in the list, and an example on one line whose options exist."""
    assert run("--help") == 0
    overview = capsys.readouterr().out
    assert "..." not in overview.partition("Commands:")[2]
    commands = [group.name or group.callback.__name__ for group in app.registered_commands if group.callback]
    assert len(commands) == 18
    for command in commands:
        assert f"  {command} " in overview
        assert run(command, "--help") == 0
        text = capsys.readouterr().out
        assert re.search(rf"^  Example: esbench {command}[^\n]*\n\n", text, re.MULTILINE), text
        assert "range>" not in text
        assert "list[" not in text
        page = " ".join(text.split())
        example = page.split(f"Example: esbench {command}")[1].split("Options:")[0].split("Arguments:")[0]
        for option in re.findall(r"--[a-z-]+", example):
            assert page.count(option) > 1, (command, option)


def test_list_as_json_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output has one JSON object and nothing else."""
    assert run("list", "--json", "--variants", "Flipped*") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed["variants"]] == [
        "Flipped",
        "Flipped(side=out)",
        "Flipped(side=both)",
        "Flipped(cores=32)",
        "Flipped(side=both, cores=8)",
        "FlippedSign",
    ]
    assert {"quick", "readme", "check"} <= {suite["name"] for suite in listed["suites"]}


def test_a_run_is_stored_and_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The best go to stdout, progress and the path to stderr; base, naive and dense noise are measured too.

    A file of some 20 lines, given with --plugin, joins the suite, is checked and gets rows.
    """
    added = plugin(tmp_path, "RowShared")
    assert run("check", *added) == 0
    assert "RowShared  correct: Linear, Conv2d\n" in capsys.readouterr().out
    planned = plan_of(Request(plugins=added[1:2]), "quick", "cpu", 0).entries
    assert {"RowShared", "Base", "Flipped"} <= {entry.variant.name for entry in planned}
    options = ("--suite", "quick", *added, "--variants", "Flipped", "--budget", "900")
    assert run("run", *options, *ONE_FORWARD, str(tmp_path)) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0].startswith("measuring suite quick on cpu")
    assert "Linear 128 -> 128, 256 members  forward (ms)" in captured.out
    assert {"Flipped", "RowShared"} <= {line.split(" ")[0] for line in captured.out.splitlines()}
    lines = (captured.out + captured.err).splitlines()
    assert len(lines) < 20
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 100
    assert re.search(
        r"^\d+:\d\d elapsed, \d+:\d\d left  cell 1/\d+  set-up  Base  Linear", captured.err, re.MULTILINE
    )
    measured = stored_in(tmp_path)
    assert measured.end is not None
    assert measured.end.status == "complete"
    assert measured.header.sources["Flipped"].startswith("NESgpu")
    assert measured.header.docs["Flipped"].module == "impls"
    timed = [row for row in measured.measurements if row.metric == "latency_ns"]
    assert {row.variant.name for row in timed} == {"Base", "Flipped", "Naive", "Perturbed", "RowShared"}
    assert len(timed) == 5
    assert {row.method for row in timed} == {"host"}


def test_without_a_gpu_the_first_line_says_what_runs_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line says that the quick suite runs on the CPU; rows without any number have reasons."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--tables", "--phases", "sample", "--variants", "Base", "--cases", "Linear(128*"]
    assert run("run", *arguments, "--results", str(tmp_path)) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("no CUDA GPU here: measuring suite quick on cpu")
    assert "a plain layer draws no noise" in captured.out
    assert "the plain layer draws no noise" in captured.out


def test_paths_are_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path below the working directory is relative."""
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "results" / "a.jsonl") == "results/a.jsonl"
    assert short_path(Path("/elsewhere")) == "/elsewhere"


def test_an_installed_packages_variants_are_found_by_entry_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package with the entry point is listed without naming it."""
    (tmp_path / "their_rows.py").write_text(GOOD.replace("RowShared", "Theirs"))
    metadata = tmp_path / "their_rows-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their_rows\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[esbench.variants]\nrows = their_rows\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run("list", "--json", "--variants", "Theirs*") == 0
    (listed,) = json.loads(capsys.readouterr().out)["variants"]
    assert listed["package"] == "their_rows"


def test_a_wrong_variant_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A variant whose update forgets the utilities gets a reason, no time, and exit code 1.

    With --json the standard output has one JSON object and nothing else.
    """
    chosen = plugin(tmp_path, "Forgetful", ("tensordot(utilities", "tensordot(utilities.sign()"))
    assert run("check", *chosen) == 1
    assert "Forgetful  failed on Linear: wrong result: update of" in capsys.readouterr().out
    assert run("run", "--json", *chosen, *ONE_FORWARD, str(tmp_path)) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 1
    (row,) = (row for row in stored_in(tmp_path).rows if row.variant.scheme == "Forgetful")
    assert isinstance(row, Skipped)
    assert (row.status, row.reason[:23]) == ("failed", "wrong result: update of")


def test_an_undeclared_bias_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A scheme that shifts whole rows fails the check with one line, unless it declares that it is biased."""
    drawn = 'stream.normal("rows", *weight.shape[:2]).view(-1, *weight.shape[:2], *[1] * (weight.dim() - 2))'
    shifting = 'stream.normal("rows", *weight.shape)', f"{drawn}.expand(-1, *weight.shape)"
    for name, declared, code in (("Shifting", "", 1), ("Declared", "    is_biased = True\n", 0)):
        head = f"class {name}(AbstractAdditiveScheme):\n"
        assert run("check", *plugin(tmp_path, name, shifting, (head, head + declared))) == code
        reason = "wrong result: biased: the mean of its estimates over many steps has"
        assert (f"{name}  failed on Linear: {reason}" in capsys.readouterr().out) == bool(code)


SET_UP = """
from esbench.workload import UnavailableError, build
from impls.perturbation.scheme import AbstractScheme
@build.register
def _(scheme: NAME, case, device, seed):
    IN_SET_UP
    return build.dispatch(AbstractScheme)(scheme, case, device, seed)
"""


def test_check_says_what_it_did_not_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A case that the set-up refuses is unavailable; one that stops later, or for memory, is not checked.

    If nothing was compared, the exit code is 1.
    """
    for number, (in_set_up, in_call, code, words) in enumerate(
        (
            ("", "raise MemoryError", 1, "not checked on Linear: out of memory: "),
            ("", "raise UnavailableError('no')", 1, "not checked on Conv2d: no (on Conv2d("),
            ("raise MemoryError", "", 1, "not checked on Conv2d: out of memory: "),
            ("raise UnavailableError('no')", "", 1, "Conv2d, Linear: 1 variant"),
            ("if case.groups > 1: raise UnavailableError('no')", "", 0, "Linear, Conv2d (1 of 2 cases)"),
        )
    ):
        name = f"Stopping{number}"
        set_up = SET_UP.replace("NAME", name).replace("IN_SET_UP", in_set_up or "pass")
        called = ("return op.", f"{in_call or 'pass'}; return op.")
        chosen = plugin(tmp_path, name, called, ("return noise.rows\n", f"return noise.rows\n{set_up}"))
        assert run("check", *chosen) == code, words
        assert words in capsys.readouterr().out
    own = ('@variant(source="another package")', '@variant(operators=("Scale",))')
    assert run("check", *plugin(tmp_path, "Scaling", own)) == 1
    words = "no case of its operators; `esbench run` compares it, by its workload's verify()\n"
    assert f"Scaling  not checked: the suite check has {words}" in capsys.readouterr().out


def test_check_compares_an_own_operator_on_the_cases_of_its_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its operators have no case in the suite check."""
    monkeypatch.setattr(REGISTRY, "suites", dict(REGISTRY.suites))
    case = Case(operator="Doubling", out_channels=4, in_channels=4, members=4, dtype="float64")
    REGISTRY.suite(Suite("own", "an own operator", (case,), variants=()))
    own = '@variant(source="another package")', '@variant(operators=("Doubling",))'
    for name, compares, code, words in (
        ("Equal", "pass", 0, "correct: Doubling\n"),
        ("Unequal", "raise WrongResultError('other')", 1, "failed on Doubling: wrong result: other (on"),
    ):
        workload = f"""
from types import SimpleNamespace
from esbench.workload import WrongResultError, build
@build.register
def _(scheme: {name}, case, device, seed):
    def verify():
        {compares}
    return SimpleNamespace(verify=lambda: verify())
"""
        chosen = plugin(tmp_path, name, own, ("return noise.rows\n", f"return noise.rows\n{workload}"))
        assert run("check", *chosen) == code
        assert f"{name}  {words}" in capsys.readouterr().out


def test_check_compares_every_variant_that_has_a_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training on data, which has no case, is not checked if it is named, and otherwise left out."""
    monkeypatch.setattr(validation.ExactChecks, "outcome", lambda *_: None)
    assert run("check") == 0
    assert "StandardStep  " in (shown := capsys.readouterr().out)
    assert "DenseDigits" not in shown
    assert run("check", "--variants", "DenseDigits") == 1
    assert "DenseDigits  not checked: " in capsys.readouterr().out


def test_a_scheme_that_exits_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SystemExit raised by a variant ends the variant, not the command."""
    chosen = plugin(tmp_path, "Exiting", ("return op.", "raise SystemExit(7); return op."))
    assert run("check", *chosen, "--variants", "Flipped") == 1
    out = capsys.readouterr().out
    assert "failed on Linear: SystemExit: 7" in out
    assert "Flipped  correct: Linear, Conv2d\n" in out
    assert out.count("\nunavailable on BinarizedConv2d, BinarizedLinear: 2 variants (") == 1


def test_check_and_doctor_print_one_json_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each outcome has its variant, operator and reason; what a variant prints is not among them."""
    chosen = plugin(tmp_path, "Failing", ("return op.", "print('a line'); return 2 * op."))
    assert run("check", "--json", *chosen, "--variants", "FusedFlipped") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["counts"]["failed"] == 2
    outcomes = {(outcome["variant"], outcome["operator"]): outcome for outcome in document["outcomes"]}
    assert outcomes["Failing", "Conv2d"]["status"] == "failed"
    assert outcomes["Failing", "Conv2d"]["reason"].startswith("wrong result: ")
    assert outcomes["FusedFlipped", "Linear"]["status"] == "unavailable"
    assert run("check", "--json", "--variants", "Flipped") == 0
    first, *_ = json.loads(capsys.readouterr().out)["outcomes"]
    assert first == {
        "variant": "Flipped",
        "operator": "Linear",
        "status": "correct",
        "reason": "",
        "compared": 1,
        "cases": 1,
    }
    assert run("doctor", "--json") == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"subject", "is_available", "reason"} == findings[0].keys()
    assert "CPU timing" in {finding["subject"] for finding in findings}


def test_the_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script that --install-completion installs asks with these variables."""
    for words, number, expected in (
        ("esbench rec", "1", "recommend"),
        ("esbench run --forw", "2", "--forwards"),
    ):
        monkeypatch.setenv("_ESBENCH_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", number)
        assert run() == 0
        assert expected in capsys.readouterr().out


def test_many_forwards_per_step_need_both_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error comes before anything is measured; with both phases the tables have the combined time."""
    arguments = ["run", "--forwards-per-step", "100", "--device", "cpu", "--results", str(tmp_path)]
    assert run(*arguments, "--phases", "forward") == 2
    assert "needs the phases step and forward, but this run has forward" in capsys.readouterr().err
    chosen = ("--variants", "Flipped", "--cases", "Linear(128*")
    assert run(*arguments, *chosen, "--phases", "forward,step,quality") == 0
    captured = capsys.readouterr()
    assert "A step here has 100 forwards" in captured.err
    ((stored_run,), _) = store.read_results(tmp_path)
    (step_ns,) = (
        median(row) or 0.0
        for row in with_forwards_per_step(stored_run, 100).measurements
        if (row.variant.name, row.phase, row.metric) == ("Flipped", "step", "latency_ns")
    )
    (line,) = (line for line in captured.out.splitlines() if line.startswith("Flipped "))
    assert float(line.split()[3]) == pytest.approx(step_ns / 1e6, rel=0.01)


def test_what_a_variant_prints_is_not_among_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variant may print, and close stdout: results are on stdout alone. Names have a limited length."""
    printing = ("return op.", "import sys; print('a line'); sys.stdout.close(); return op.")
    assert run("check", *plugin(tmp_path, "Printing", printing)) == 1
    assert capsys.readouterr().out.startswith("Printing  failed on ")
    assert run("check", *plugin(tmp_path, "R" * 200)) == 2
    assert "RRRR... has a name of 200 characters: use at most 120" in capsys.readouterr().err
