"""The command `recommend`: the candidates it measures, the stored runs it uses, and its errors."""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench import store
from esbench.cli.recommend import conv2d_case, linear_case, size_bytes, template_case
from esbench.cli.screening import KEPT, Screened, choose, extrapolate, small_case
from esbench.errors import UserError
from esbench.measure.environment import environment
from esbench.measure.model_layers import load_model
from esbench.registry import REGISTRY
from esbench.report.analysis import load
from esbench.report.formats.json import recommendation_document
from esbench.report.site import console_tables
from esbench.schema import Case, Request, Row, Run, RunEnd, Variant
from impls.benchmark import suites
from tests import synthetic
from tests.cli import cli_runner
from tests.report import ranking_cases, report_cases
from tests.report.ranking_cases import FLIPPED, HADAMARD, KAPPAS, SQUARE, quality_row, rows
from tests.synthetic import DENSE

ASK = ("--linear", "64x64", "--offline", "--device", "cpu")
ORDER = ["Hadamard", "LowRank(rank=1)", "Flipped(cores=8)", "Flipped", "Perturbed"]


def run(*arguments: str) -> int:
    """Run the command in this process; return its exit code."""
    return cli_runner.run("recommend", *arguments)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command with arguments that it refuses; return its error."""
    return cli_runner.refusal(capsys, "recommend", *arguments)


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
        ("--linear 8x8 --sigma 0", "--sigma 0: expected a finite number above 0"),
        ("--linear 8x8 --memory-limit 0GB", "--memory-limit 0GB: expected a size above 0, such as 2GB"),
        ("--linear 8x8 --device tpu", "no device 'tpu'; available: auto, cpu, cuda"),
        ("--linear 8x8 --variants Nope*", "no variant matches 'Nope*'"),
        ("--model no_such_module:make", "--model no_such_module:make: cannot import it"),
        ("--model json:loads", "--model json:loads: the factory raises TypeError"),
        ("--model json", "--model json: expected module:factory"),
        ("--linear 8x8 --variants Base", "--variants Base: none of these perturbs"),
    ):
        assert words in refusal(capsys, *arguments.split(), "--results", str(tmp_path / "results"))
        assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.write_text("mine")
    for results in (file, file / "deeper" / "still"):
        assert f"{file} is not a folder" in refusal(capsys, "--linear", "8x8", "--results", str(results))
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
                "nearest is Linear 64 -> 64, 1024 members"
            ),
        ),
        ("a", None, "64x64 --variants Orthogonal*", "ranks Linear 64 -> 64, 1024 members for Orthogonal"),
        (
            "a",
            None,
            "64x64 --forwards-per-step 9",
            "1024 members with 9 forwards per step; leave --offline out to measure it\n",
        ),
        ("b", None, "64x64", "no stored run ranks Linear 64 -> 64, 1024 members; leave --offline out"),
        ("c", "", "64x64", "no stored run of this device ("),
        (
            "d",
            "Another CPU",
            "32x32",
            "no stored run ranks Linear 32 -> 32, 1024 members; leave --offline out",
        ),
    ):
        if device_name != "" and not (tmp_path / folder).exists():
            unranked = synthetic.three(SQUARE) if folder == "b" else None
            stored(tmp_path / folder, unranked, device_name=device_name)
        results = str(tmp_path / folder / "results")
        arguments = ["--offline", "--device", "cpu", "--results", results, "--linear", *shape.split()]
        assert words in refusal(capsys, *arguments)


def test_without_a_ranking_the_reasons_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no variant supports the shape, each has its reason, the run is stored, and the exit code is 1.

    With --json the document has the reasons and no code.
    """
    arguments = ["--linear", "4x1", "--members", "8", "--device", "cpu", "--results", str(tmp_path)]
    arguments += ["--variants", "SparsePerturbed(k=2)"]
    assert run(*arguments) == 1
    captured = capsys.readouterr()
    assert "no variant has both a time and a quality:" in captured.out
    assert "SparsePerturbedLinear(k=2): unavailable: " in captured.out
    assert "layer's 1 input channels" in captured.out
    assert "perturb(" not in captured.out
    assert "rows are stored in" in captured.err

    ((measured,), _) = store.read_results(tmp_path)
    again = tmp_path, Mock(notes=(), failed=0), measured  # without measuring a second time
    monkeypatch.setattr("esbench.cli.recommend._measure", lambda *_: again)
    assert run(*arguments, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["code"] == ""
    (answer,) = document["recommendations"]
    (sparse,) = (entry for entry in answer["variants"] if entry["variant"] == "SparsePerturbed(k=2)")
    assert "layer's 1 input channels" in sparse["reason"]


def test_load_is_the_reason_where_nothing_is_ranked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run under load has numbers, but no answer: the reason is the same as with --offline."""
    for limit in ("FAR", "FAR_NS"):
        monkeypatch.setattr(load, limit, 0.0)
    arguments = ["--linear", "8x8", "--members", "16", "--device", "cpu", "--results", str(tmp_path)]
    for options in (["--variants", "Flipped"], ["--offline"]):
        assert run(*arguments, *options) == 1
        out = capsys.readouterr().out
        assert out.startswith("Linear 8 -> 8, 16 members: no recommendation, unreliable: load")
        assert "the run holds no reason" not in out


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
    monkeypatch.setattr("esbench.measure.runner.run", Mock(side_effect=KeyboardInterrupt))
    arguments = ("--linear", "8x8", "--variants", "Flipped*", "--device", "cpu", "--results", str(tmp_path))
    assert run(*arguments) == 130
    message = capsys.readouterr().err  # commands are not broken into lines
    assert f"`esbench run --resume --results {tmp_path} --device cpu`" in message
    question = f"`esbench recommend --linear 8x8 --variants 'Flipped*' --device cpu --results {tmp_path}"
    assert f"{question} --offline`" in message


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


MODELS = """
import torch
from torch import nn

def layers():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))

def wide():
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 40000, bias=False))

def tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model

def half_frozen():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].bias.requires_grad_(False)
    return model

def complex():
    return nn.Linear(8, 8, dtype=torch.complex64), torch.zeros(1, 8, dtype=torch.complex64)

def quarter():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight = nn.Parameter(torch.zeros(8, 8).to(torch.float8_e5m2))
    model[0].forward = lambda x: x
    return model, torch.zeros(1, 8)

def named():
    model = nn.Module()
    for name, width in (("a[0]", 8), ("a0", 4), ("b*", 8)):
        model.add_module(name, nn.Linear(8, width))
    model.forward = lambda x: [layer(x) for layer in model.children()]
    return model

def recurrent():
    return nn.LSTM(8, 8), torch.zeros(2, 3, 8)

def normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))), torch.zeros(1, 8)

def broken():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 4)), torch.zeros(1, 8)

def strange():
    model = nn.Sequential()
    model.add_module("in[0]", nn.Linear(8, 8))
    model.add_module("deep*", nn.PReLU())
    return model
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with the models and a stored run of their layers."""
    (tmp_path / "some_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_models", raising=False)
    square = msgspec.structs.replace(SQUARE, out_channels=8, in_channels=8, bias=True)
    narrow = msgspec.structs.replace(square, out_channels=4)
    alone, wide = (msgspec.structs.replace(square, out_channels=width, bias=False) for width in (8, 40000))
    slow = {variant: 9.0 if variant == HADAMARD else ms for variant, ms in ranking_cases.STEPS.items()}
    stored(tmp_path, [*rows(square), *rows(narrow, steps=slow), *rows(alone), *rows(wide)])
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_model_has_a_ranking_for_each_layer(capsys: pytest.CaptureFixture[str]) -> None:
    """Layers of one shape share a table with their names, and are ranked with the d of the model."""
    ask = ["--offline", "--device", "cpu"]
    assert run("--model", "some_models:layers", *ask) == 0
    captured = capsys.readouterr()
    assert "Linear 8 -> 8, bias=True, 1024 members (0, 1): use Hadamard.\n" in captured.out
    assert "Linear 8 -> 4, bias=True, 1024 members (3): use LowRank(rank=1).\n" in captured.out
    assert captured.out.count("kept: n_eff / n") == captured.out.count(", run ") == 1
    assert '    "3": LowRank(rank=1),\n    "*": Hadamard(),\n' in captured.out
    assert "2: LayerNorm: dense noise, whatever the scheme" in captured.err
    assert run("--model", "some_models:layers", "--tables", *ask) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "the network's d, 196, of which a layer like this has 72:" in output  # 2 * 72 + 16 + 36
    assert "the network's d, 196, of which a layer like this has 36:" in output
    for target, best in (
        (("--linear", "8x8"), "Hadamard()"),
        (("--model", "some_models:wide"), "Flipped(cores=8)"),
    ):
        assert run(*target, *ask) == 0
        assert f"population = perturb(model, {best}, " in capsys.readouterr().out


def test_a_model_that_cannot_be_perturbed_is_refused_before_anything_is_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error line has the reason, the exit code is 2, and no run is stored."""
    before = sorted(folder.rglob("*.jsonl"))
    for factory, words in (
        ("tied", "0 and 1 share a weight but not their bias: share the bias too"),
        ("half_frozen", "cannot perturb 0 (Linear, where only the weight or only the bias is trainable)"),
        ("complex", "the weight of the model is complex64: only real floating point can be perturbed"),
        ("recurrent", "LSTM has no trainable Linear or Conv2d layer"),
        ("normed", "Sequential has no trainable Linear or Conv2d layer"),
        ("broken", "the model raises on rows of shape (1, 8)"),
        ("quarter", "0 is float8_e5m2; esbench measures float64, float32"),
    ):
        error = refusal(capsys, "--model", f"some_models:{factory}", "--device", "cpu")
        assert f"--model some_models:{factory}: {words}" in error
    assert sorted(folder.rglob("*.jsonl")) == before


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("factory", ["named", "strange"])
def test_the_printed_code_runs(capsys: pytest.CaptureFixture[str], factory: str) -> None:
    """The printed code, run after a new model of that kind, makes a population with the best schemes."""
    assert run("--model", f"some_models:{factory}", "--device", "cpu", "--offline") == 0
    text = capsys.readouterr().out
    code = text[text.index("from impls") : text.index("\n\n")]
    model, _ = load_model(f"some_models:{factory}")
    variables: dict[str, Any] = {"model": model}
    exec(code, variables)  # noqa: S102  the code that a person would paste
    schemes = {layer.name: type(layer.scheme).__name__ for layer in variables["population"].layers}
    expected = {
        "named": {"a[0]": "Hadamard", "a0": "LowRank", "b*": "Hadamard"},
        "strange": {"in[0]": "Hadamard"},
    }
    assert schemes == expected[factory]


LIKE = template_case(1024, 1, None, 0.02)


def test_a_shape_is_the_case_of_the_suites() -> None:
    """Members, repeats, dtype and sigma are separate options; a kernel may have two sizes."""
    assert linear_case("512x256", LIKE) == suites.linear(512, 256)
    assert conv2d_case("64x64x3@32x32", LIKE) == suites.conv2d(64, 64, (3, 3), (32, 32))
    case = conv2d_case("8x4x3x5@9x7", LIKE)
    assert (case.kernel_size, case.input_size) == ((3, 5), (9, 7))
    with pytest.raises(UserError, match="a kernel of 3 x 8 is larger than an input of 9 x 7"):
        conv2d_case("8x4x3x8@9x7", LIKE)
    numbers = {"members": 64, "repeats": 3, "sigma": 0.5}
    expected = Case(operator="Linear", out_channels=2, in_channels=3, dtype="bfloat16", **numbers)  # type: ignore[arg-type]  # by name
    assert linear_case("2x3", template_case(64, 3, "bfloat16", 0.5)) == expected


def test_a_size_has_a_decimal_unit() -> None:
    """Sizes have decimal units such as GB; any other unit is refused."""
    for text, size in (("2GB", 2e9), ("500MB", 5e8), ("1.5 T", 1.5e12), ("10 kB", 1e4), ("7", 7)):
        assert size_bytes(text) == size
    for text in ("2 gb", "1GiB", "-1GB", "0", "GB", "9" * 400):
        with pytest.raises(UserError, match="expected a size above 0"):
            size_bytes(text)


@given(st.text(alphabet="0123456789x@-. ", max_size=20))
def test_any_text_is_a_shape_or_an_error_of_one_line(text: str) -> None:
    """A text that parses is a case with positive sizes."""
    for parse in (linear_case, conv2d_case):
        case, message = parsed(parse, text)
        assert "\n" not in message
        if case:
            assert min(case.out_channels, case.in_channels, *case.kernel_size, *case.input_size) >= 1


def parsed(parse: Callable[[str, Case], Case], text: str) -> tuple[Case | None, str]:
    """Return the case, or the error."""
    try:
        return parse(text, LIKE), ""
    except UserError as error:
        return None, str(error)


def screened(count: int, *, step_s: float = 0.01, dense_s: float = 0.1) -> list[Screened]:
    """Return variants A0, A1, ..., best first, and dense noise last."""
    variants = [Screened(Variant(scheme=f"A{rank}"), 100.0 - rank, step_s) for rank in range(count)]
    return [*variants, Screened(DENSE, 1.0, dense_s)]


def test_the_best_variants_and_dense_noise_are_measured_if_there_is_time() -> None:
    """Dense noise takes a slot of its own; what there is no time for is named with its reason."""
    best = [f"A{rank}" for rank in range(KEPT)]
    assert choose({SQUARE: screened(12)}, 60.0) == (["Perturbed", *best], [])
    # 56 s for six rounds of dense noise, which may take half of the time, and 10 s for each of the others
    names, notes = choose({SQUARE: screened(12, step_s=0.5, dense_s=1.4)}, 112.0)
    assert names == ["Perturbed", *best[:5]]
    assert notes == [f"{SQUARE.label}: no time for A5, A6, A7: give a longer --budget"]
    assert choose({SQUARE: screened(12, dense_s=1.4)}, 111.0)[0] == best
    names, notes = choose({SQUARE: screened(12, dense_s=2.4)}, 60.0)
    assert names == best
    (note,) = notes
    assert note.startswith(f"{SQUARE.label}: Perturbed (dense noise) is left out, a step takes about 2.4 s")
    assert note.endswith("--budget 420 measures it")
    names, notes = choose({SQUARE: screened(12, step_s=0.5, dense_s=9.0)}, 30.0)  # 10 s each
    assert names == ["A0", "A1", "A2"]
    assert notes[1] == f"{SQUARE.label}: no time for A3, A4, A5 and 2 more: give a longer --budget"
    assert choose({SQUARE: screened(1, step_s=99.0)[:1]}, 30.0) == (["A0"], [])  # the best in any case
    assert choose({SQUARE: screened(0)}, 30.0) == (["Perturbed"], [])
    assert choose({SQUARE: []}, 30.0) == ([], [])


def test_a_large_population_is_screened_at_a_small_one() -> None:
    """Dense noise has at most 2^23 entries, the product 2^30 terms; at least 8 members; fewer stay."""
    for width, members, expected in ((64, 1024, 1024), (64, 2**20, 2048), (1024, 1024, 8), (8192, 1024, 8)):
        case = msgspec.structs.replace(SQUARE, out_channels=width, in_channels=width, members=members)
        assert small_case(case).members == expected
    image = Case(
        operator="Conv2d", out_channels=64, in_channels=64, kernel_size=(3, 3), input_size=(32, 32), repeats=2
    )
    assert small_case(image).members == 2**30 // (2 * 32 * 32 * 64 * 64 * 9)


@pytest.mark.parametrize(("forwards", "rate"), [(1, 1024 / 5e-3), (11, 1024 / 25e-3)])
def test_screening_rates_steps_with_all_their_forwards(forwards: int, rate: float) -> None:
    """The rate has the time of all forwards; the cost of the measurement is that of a step with one."""
    measured = ranking_cases.run([*rows(), synthetic.time_row(HADAMARD, SQUARE, *[2.0] * 6)])
    by_variant = {entry.variant: entry for entry in extrapolate(measured, SQUARE, None, forwards)}
    assert by_variant[HADAMARD].rate == pytest.approx(rate)
    assert by_variant[HADAMARD].step_s == 5e-3
    assert len(by_variant) == len(KAPPAS)


def test_screening_leaves_out_what_has_no_n_eff_but_not_what_had_no_time_for_quality() -> None:
    """A biased variant could never be recommended; one that was not rated may be the best."""
    times = [synthetic.time_row(variant, SQUARE, *[1.0] * 6) for variant in (FLIPPED, HADAMARD)]
    times = [msgspec.structs.replace(row, phase="step") for row in times]
    no_direction = quality_row(FLIPPED, SQUARE, "dot_mean", "pairs", 0.5)
    (left,) = extrapolate(ranking_cases.run([*times, no_direction]), SQUARE, None, 1)
    assert (left.variant, left.rate) == (HADAMARD, 0.0)


def test_many_candidates_are_screened_and_the_best_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run holds the best, here one, base and dense noise."""
    for module in ("recommend", "screening"):
        monkeypatch.setattr(f"esbench.cli.{module}.KEPT", 1)
    globs = [f"--variants={glob}" for glob in ("Perturbed", "Flipped", "Hadamard")]
    arguments = ("--linear", "16x16", "--members", "64", "--device", "cpu", "--results", str(tmp_path))
    assert cli_runner.run("recommend", *arguments, *globs) == 0
    captured = capsys.readouterr()
    ((run,), _) = store.read_results(tmp_path)
    names = {row.variant.name for row in run.measurements}
    assert {"Base", "Perturbed"} < names
    assert len(names) == 3
    assert "screening 4 variants on cpu" in captured.err
    assert captured.err.index("screening") < captured.err.index("measuring 3 variants on cpu")
    assert "population = perturb(model, " in captured.out


def test_many_forwards_per_step_change_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stored run answers for any number of forwards, and says that the time is combined."""
    forwards = {HADAMARD: 30.0, ranking_cases.LOW_RANK: 1.0, DENSE: 40.0}
    forward_rows = [synthetic.time_row(variant, SQUARE, *[ms] * 6) for variant, ms in forwards.items()]
    stored(tmp_path, [*rows(), *forward_rows])
    arguments = (*ASK, "--results", str(tmp_path / "results"))
    assert run(*arguments, "--forwards-per-step", "200") == 0
    text = capsys.readouterr().out
    assert text.startswith("Linear 64 -> 64, 1024 members: use LowRank(rank=1).\n")
    assert "A step here has 200 forwards with one draw of noise. Its time is combined" in text
    assert "\nLowRank(rank=1) " in text
    assert " 205 " in text  # 6 ms of the step and 199 of other forwards
    assert run(*arguments, "--forwards-per-step", "1") == 0
    text = capsys.readouterr().out
    assert "use Hadamard" in text
    assert "combined" not in text


def test_antithetic_sampling_needs_even_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The case is antithetic, and so is the printed code."""
    error = refusal(capsys, *ASK, "--antithetic", "--results", str(tmp_path))
    assert "--antithetic needs an even number of --repeats, such as 2, got 1" in error
    antithetic = msgspec.structs.replace(SQUARE, antithetic=True, repeats=2)
    stored(tmp_path, rows(antithetic))
    results = ("--results", str(tmp_path / "results"))
    assert run(*ASK, "--antithetic", "--repeats", "2", *results) == 0
    assert "sigma=0.02, antithetic=True)\n" in capsys.readouterr().out
    nearest = "nearest is Linear 64 -> 64, antithetic=True, repeats=2, 1024 members\n"
    assert nearest in refusal(capsys, *ASK, *results)


def test_json_is_one_document_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the figures and the code of the text, also where a variant has no rate or is exact."""
    stored(tmp_path, [*rows(), *ranking_cases.orthogonal(SQUARE)])
    arguments = (*ASK, "--results", str(tmp_path / "results"))
    assert run(*arguments, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["code"].endswith("perturb(model, Orthogonal(), members=1024, sigma=0.02)")
    assert document["forwards_per_step"] == 1
    (answer,) = document["recommendations"]
    assert answer["case"]["operator"] == "Linear"
    assert (answer["recommended"], answer["layers"]) == (["Orthogonal", "Hadamard"], [])
    by_name = {variant["variant"]: variant for variant in answer["variants"]}
    assert (by_name["Orthogonal"]["exact"], by_name["Orthogonal"]["n_eff_per_ms"]) == (True, None)
    hadamard = by_name["Hadamard"]
    assert (hadamard["step_ns"], hadamard["n_eff"], hadamard["kappa"]) == (5e6, 1024, 0)
    assert hadamard["n_eff_per_ms"] == pytest.approx(1024 / 5)
    assert (hadamard["n_eff_per_ms_low"], hadamard["reason"]) == (pytest.approx(1024 / 5), "")
    assert by_name["SparsePerturbed(k=1)"]["reason"].startswith("out of memory")
    assert by_name["Flipped(cores=8)"]["options"] == {"cores": 8}


def test_json_of_a_case_without_ranking_has_the_reasons() -> None:
    """A stored row without a number has its reason, and nothing is recommended."""
    unranked = synthetic.run([synthetic.skipped(HADAMARD, SQUARE, "no time")])
    (answer,) = json.loads(recommendation_document({"": SQUARE}, {}, "", 1, unranked))["recommendations"]
    assert (answer["recommended"], answer["run"]) == ([], unranked.header.run_id)
    assert answer["variants"] == [
        {"variant": "Hadamard", "scheme": "Hadamard", "options": {}, "reason": "no time"}
    ]
