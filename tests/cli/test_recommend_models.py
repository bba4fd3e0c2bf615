"""The command `recommend` for a user's model: refusals before measuring, and code that works."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from esbench.measure.environment import environment
from esbench.measure.model_layers import load_model
from tests import synthetic
from tests.cli.test_recommend import run
from tests.report import ranking_cases, report_cases
from tests.report.ranking_cases import SQUARE, rows

SLOW_HADAMARD = {
    variant: 9.0 if variant == ranking_cases.HADAMARD else ms for variant, ms in ranking_cases.STEPS.items()
}

MODELS = """
import torch
from torch import nn

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
    measured_rows = [*rows(square), *rows(narrow, steps=SLOW_HADAMARD)]
    name = environment("cpu").device_name
    report_cases.store(tmp_path, synthetic.run(measured_rows, suite="quality", device_name=name))
    return tmp_path


def test_a_model_that_cannot_be_perturbed_is_refused_before_anything_is_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error line has the reason, the exit code is 2, and no run is stored."""
    before = sorted(folder.rglob("*.jsonl"))
    for factory, words in (
        ("tied", "0 and 1 share a weight but not their bias: share the bias too"),
        ("half_frozen", "cannot perturb 0 (Linear, where only the weight or only the bias is trainable)"),
        ("complex", "the model is complex64: only real floating point can be perturbed"),
        ("recurrent", "LSTM has no trainable Linear or Conv2d layer"),
        ("normed", "Sequential has no trainable Linear or Conv2d layer"),
        ("broken", "the model raises on rows of shape (1, 8)"),
        ("quarter", "0 is float8_e5m2; esbench measures float64, float32"),
    ):
        assert run("--model", f"some_models:{factory}", "--device", "cpu") == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert f"--model some_models:{factory}: {words}" in captured.err
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
