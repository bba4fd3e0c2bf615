"""The command `recommend`: the candidates it measures, the stored runs it uses, and its errors."""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from esbench import store
from esbench.measure.environment import environment
from esbench.registry import REGISTRY
from esbench.report.site import console_tables
from esbench.schema import Case, Request, Row, Run, RunEnd, Variant
from tests import synthetic
from tests.cli import cli_runner
from tests.report import ranking_cases, report_cases
from tests.report.ranking_cases import HADAMARD, KAPPAS, SQUARE, rows

ASK = ("--linear", "64x64", "--offline", "--device", "cpu")
ORDER = ["Hadamard", "LowRank(rank=1)", "Flipped(cores=8)", "Flipped", "Perturbed"]


def run(*arguments: str) -> int:
    """Run the command in this process; return its exit code."""
    return cli_runner.run("recommend", *arguments)


def stored(
    folder: Path,
    measured_rows: Iterable[Row] | None = None,
    *variants: Variant,
    number: int = 1,
    device_name: str | None = None,
    end: RunEnd | None = None,
) -> Run:
    """Store a run of this or a different machine, with these rows, of these variants or of all."""
    kappas = {variant: KAPPAS[variant] for variant in (variants or KAPPAS)}
    measured = synthetic.run(
        rows(kappas=kappas) if measured_rows is None else measured_rows,
        suite="recommend 64x64",
        device_name=device_name or environment("cpu").device_name,
        run_id=f"2026010{number}T000000Z-recommend-{number}",
    )
    request = Request(variants=tuple(variant.scheme for variant in variants), shapes=(SQUARE,))
    header = msgspec.structs.replace(measured.header, request=request)
    measured = msgspec.structs.replace(measured, header=header, end=end or measured.end)
    report_cases.store(folder, measured)
    return measured


def labels(text: str) -> list[str]:
    """Return the names, without operator, of the table's rows that have a rate."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("-----"))
    names = []
    for line in lines[start + 1 :]:
        if not line:
            break
        name, rate, *_ = re.split(r" {2,}", line)
        if "[" not in rate:
            names.append(name.replace("Linear", ""))
    return names


def test_bad_usage_ends_in_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The error line has the expected input; nothing is measured or written."""
    for arguments, words in (
        ("", "recommend needs one of --linear, --conv and --model"),
        ("--linear 8x8 --conv 8x8x3@8x8", "recommend needs one of --linear, --conv and --model"),
        ("--linear 0x5", "--linear 0x5: expected OUTxIN, such as 1024x1024, each from 1"),
        ("--conv 8x8x3", "--conv 8x8x3: expected OUTxINxKERNEL@HEIGHTxWIDTH"),
        ("--conv 8x8x9@8x8", "a kernel of 9 x 9 is larger than an input of 8 x 8"),
        ("--linear 8x8 --dtype int8", "no dtype 'int8'; available: float64, float32"),
        ("--linear 8x8 --members 0", "'--members'"),
        ("--linear 8x8 --repeats -1", "'--repeats'"),
        ("--linear 8x8 --sigma 0", "--sigma 0: expected a number above 0"),
        ("--linear 8x8 --memory-limit 0GB", "--memory-limit 0GB: expected a size above 0, such as 2GB"),
        ("--linear 8x8 --device tpu", "no device 'tpu'; available: auto, cpu, cuda"),
        ("--linear 8x8 --variants Nope*", "no variant matches 'Nope*'"),
        ("--model no_such_module:make", "--model no_such_module:make: cannot import it"),
        ("--model json:loads", "--model json:loads: the factory raises TypeError"),
        ("--model json", "--model json: expected module:factory"),
        ("--linear 8x8 --variants Base", "--variants Base: nothing to train with"),
    ):
        assert run(*arguments.split(), "--results", str(tmp_path / "results")) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("esbench: ")
        assert captured.err.count("\n") == 1
        assert words in captured.err
        assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.write_text("mine")
    for results in (file, file / "deeper" / "still"):
        assert run("--linear", "8x8", "--results", str(results)) == 2
        assert f"{file} is not a folder" in capsys.readouterr().err
        assert cli_runner.run("run", "--device", "cpu", "--results", str(results)) == 2
        assert capsys.readouterr().err == f"esbench: --results {results}: {file} is not a folder\n"


def test_a_small_layer_is_measured_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Candidates and base are measured at this shape, ranked and stored; a second call uses the run."""
    arguments = ["--linear", "8x8", "--members", "16", "--device", "cpu", "--results", str(tmp_path)]
    names = ["--variants", "Perturbed", "--variants", "Flipped"]
    assert run(*arguments, *names) == 0
    captured = capsys.readouterr()
    ((measured,), problems) = store.read_results(tmp_path)
    assert not problems
    case = Case(operator="Linear", out_channels=8, in_channels=8, members=16)
    assert measured.header.request == Request(variants=("Perturbed", "Flipped"), shapes=(case,))
    assert {row.case for row in measured.rows} == {case}
    assert {row.variant.name for row in measured.rows} == {"Base", "Perturbed", "Flipped"}
    assert "\nPerturbed (dense noise) " in captured.out
    assert captured.out.splitlines()[2].startswith("population = perturb(model, ")
    assert "measuring 3 variants on cpu" in captured.err
    assert "rows are stored in" in captured.err
    assert run(*arguments, "--offline") == 0
    assert capsys.readouterr().out == captured.out


def test_a_stored_run_answers_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer has the ranking of the run's tables, filtered by memory limit and globs."""
    measured = stored(tmp_path)
    results = str(tmp_path / "results")
    arguments = ["--linear", "64x64", "--offline", "--device", "cpu", "--results", results]
    assert run(*arguments) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 12
    assert all(f"\n{name} " in text for name in ("Hadamard", "Perturbed (dense noise)"))
    assert run(*arguments, "--tables") == 0
    assert labels(capsys.readouterr().out) == labels(console_tables(measured)) == ORDER
    assert text.startswith(
        "Linear 64 -> 64, 1024 members: use Hadamard.\nfrom impls import Hadamard, perturb\n"
        "population = perturb(model, Hadamard(), members=1024, sigma=0.02)\n"
    )
    arguments.append("--tables")
    assert run(*arguments, "--memory-limit", "2GB") == 0
    assert labels(capsys.readouterr().out) == ORDER[:-1]
    assert run(*arguments, "--variants", "Flipped*") == 0
    assert {"Flipped"} <= set(labels(capsys.readouterr().out)) <= {"Flipped(cores=8)", "Flipped"}
    assert run(*arguments, "--memory-limit", "1 B") == 1
    assert "no recommendation" in capsys.readouterr().out
    assert len(list((tmp_path / "results").rglob("*.jsonl"))) == 1


def test_offline_answers_from_another_device_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without runs of this machine the committed ones answer, with a warning that names their device.

    The code is that of the exact scheme, not of the best of the others.
    """
    stored(tmp_path, [*rows(), *ranking_cases.orthogonal(SQUARE)], device_name="Another CPU")
    results = str(tmp_path / "results")
    assert run("--offline", "--device", "cpu", "--results", results, "--linear", "64x64") == 0
    captured = capsys.readouterr()
    assert "this is the answer for Another CPU" in captured.err
    assert "population = perturb(model, Orthogonal()" in captured.out


def test_offline_without_a_matching_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a run of this device, shape or variant there is one error line and exit code 2."""
    for folder, device_name, shape, words in (
        (
            "a",
            None,
            "32x32",
            (
                "no stored run ranks Linear 32 -> 32, 1024 members; leave --offline out to measure it; "
                "nearest is Linear 64 -> 64, 1024 members: `esbench recommend --linear 64x64 --members 1024 "
                f"--results {tmp_path}/a/results --offline`"
            ),
        ),
        ("a", None, "64x64 --variants Orthogonal*", "ranks Linear 64 -> 64, 1024 members for Orthogonal"),
        ("b", None, "64x64", "no stored run ranks Linear 64 -> 64, 1024 members; leave --offline out"),
        ("c", "", "64x64", "no stored run of this device ("),
    ):
        if device_name != "" and not (tmp_path / folder).exists():
            unranked = synthetic.three(SQUARE) if folder == "b" else None
            stored(tmp_path / folder, unranked, device_name=device_name)
        results = str(tmp_path / folder / "results")
        arguments = ["--offline", "--device", "cpu", "--results", results, "--linear", *shape.split()]
        assert run(*arguments) == 2, words
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert words in captured.err


def test_without_a_ranking_the_reasons_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no variant supports the shape, each has its reason, the run is stored, and the exit code is 1."""
    arguments = ["--linear", "4x1", "--members", "8", "--device", "cpu", "--results", str(tmp_path)]
    assert run(*arguments, "--variants", "SparsePerturbed(k=2)") == 1
    captured = capsys.readouterr()
    assert "no variant has both a time and a quality:" in captured.out
    assert "SparsePerturbedLinear(k=2): unavailable: " in captured.out
    assert "1 input columns" in captured.out
    assert "perturb(" not in captured.out
    assert "rows are stored in" in captured.err


def test_a_model_has_a_ranking_for_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers of one shape share a table with their names, and are ranked with the d of the model."""
    (tmp_path / "models_of_a_test.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))\n"
        "def wide():\n"
        "    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 40000, bias=False))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    square = msgspec.structs.replace(SQUARE, out_channels=8, in_channels=8, bias=True)
    narrow = msgspec.structs.replace(square, out_channels=4)
    alone, wide = (msgspec.structs.replace(square, out_channels=width, bias=False) for width in (8, 40000))
    slow = {variant: 9.0 if variant == HADAMARD else ms for variant, ms in ranking_cases.STEPS.items()}
    stored(tmp_path, [*rows(square), *rows(narrow, steps=slow), *rows(alone), *rows(wide)])
    ask = ["--offline", "--device", "cpu", "--results", str(tmp_path / "results")]
    assert run("--model", "models_of_a_test:make", *ask) == 0
    captured = capsys.readouterr()
    assert "Linear 8 -> 8, bias=True, 1024 members (0, 1): use Hadamard.\n" in captured.out
    assert "Linear 8 -> 4, bias=True, 1024 members (3): use LowRank(rank=1).\n" in captured.out
    assert captured.out.count("kept: n_eff / n") == captured.out.count(", run ") == 1
    assert '    "3": LowRank(rank=1),\n    "*": Hadamard(),\n' in captured.out
    assert "2: LayerNorm: dense noise, whatever the scheme" in captured.err
    assert run("--model", "models_of_a_test:make", "--tables", *ask) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "the network's d, 196, of which a layer like this has 72:" in output  # 2 * 72 + 16 + 36
    assert "the network's d, 196, of which a layer like this has 36:" in output
    for target, best in (
        (("--linear", "8x8"), "Hadamard()"),
        (("--model", "models_of_a_test:wide"), "Flipped(cores=8)"),
    ):
        assert run(*target, *ask) == 0
        assert f"population = perturb(model, {best}, " in capsys.readouterr().out


def test_run_by_shape_can_be_resumed() -> None:
    """The header of a run has the shape that was requested, so a resumed run has the same plan."""
    from esbench.cli.run import plan_of  # noqa: PLC0415  # the command line imports it late as well

    request = Request(variants=("Flipped",), shapes=(SQUARE,))
    again = msgspec.json.decode(msgspec.json.encode(request), type=Request)
    plan = plan_of(again, "recommend 64x64", "cpu", 0)
    assert plan.cases == (SQUARE,)
    assert [entry.variant.name for entry in plan.entries] == ["Flipped", "Base"]
    assert {"sample", "forward", "step", "quality"} <= set(plan.phases)
    everything = plan_of(msgspec.structs.replace(request, variants=()), "recommend 64x64", "cpu", 0)
    baselines = [entry.variant.name for entry in everything.entries if entry.variant.baseline]
    assert baselines == ["Base"]
    assert json.loads(msgspec.json.encode(request))["shapes"][0]["operator"] == "Linear"


def test_after_an_interrupt_the_next_commands_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands resume in the same results folder, then ask again for the stored answer."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("esbench.measure.runner.run", interrupted)
    arguments = ("--linear", "8x8", "--variants", "Flipped*", "--device", "cpu", "--results", str(tmp_path))
    assert run(*arguments) == 130
    message = capsys.readouterr().err
    assert f"`esbench run --resume --results {tmp_path} --device cpu` completes it, then " in message
    question = f"`esbench recommend --linear 8x8 --variants 'Flipped*' --device cpu --results {tmp_path}"
    assert f"{question} --offline` answers" in message


def test_the_code_imports_each_scheme_from_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code imports a plug-in's scheme from the plug-in, or says that it must be loaded."""
    theirs = Variant(scheme="SchemeOfATest")
    measured_rows = [
        msgspec.structs.replace(row, variant=theirs) if row.variant == HADAMARD else row for row in rows()
    ]
    stored(tmp_path, measured_rows)
    arguments = (*ASK, "--results", str(tmp_path / "results"))
    assert run(*arguments) == 0
    text = capsys.readouterr().out
    assert "# SchemeOfATest is not registered" in text
    assert "import SchemeOfATest" not in text
    plugin = tmp_path / "plugin_of_a_test.py"
    plugin.write_text(
        "import impls\nfrom esbench.registry import variant\n"
        "@variant()\nclass SchemeOfATest(impls.Perturbed):\n    pass\n"
    )
    monkeypatch.setattr(REGISTRY, "entries", dict(REGISTRY.entries))
    try:
        assert run(*arguments, "--plugin", str(plugin)) == 0
        assert "from plugin_of_a_test import SchemeOfATest\n" in capsys.readouterr().out
    finally:
        del sys.modules["plugin_of_a_test"]
