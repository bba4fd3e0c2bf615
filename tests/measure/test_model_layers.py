"""Cases made from a model's layers, and factories that return no usable model."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from esbench.errors import UserError
from esbench.measure.model_layers import Layers, layers, load_model
from esbench.schema import Case
from impls import Perturbed, perturb

LIKE = Case(operator="", out_channels=1, in_channels=1, members=64, repeats=2, sigma=0.1)


class Strange(nn.Module):
    """A model with a convolution, a norm, a table, a layer that is not called, and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, (3, 5), stride=2, padding=1, groups=2, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.tokens = nn.Linear(8, 6)
        self.table = nn.Embedding(3, 6)
        self.idle = nn.Linear(2, 2)
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.biased = nn.Linear(6, 6)
        self.biased.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call all layers but one."""
        y = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        return torch.as_tensor(self.biased(self.frozen(self.tokens(y) + self.table.weight[0])))


def layers_of(model: nn.Module, *shape: int) -> Layers:
    """Return the layers of a model on an example of this shape."""
    return layers(model, torch.zeros(*shape), LIKE)


def test_layers_become_cases() -> None:
    """Each case has the layer's shapes, strides and bias; each position of a row is a repeat."""
    cases = {layer.name: layer.case for layer in layers_of(Strange(), 3, 4, 9, 11).chosen}
    assert list(cases) == ["conv", "tokens"]
    assert cases["conv"] == Case(
        operator="Conv2d",
        out_channels=8,
        in_channels=4,
        kernel_size=(3, 5),
        input_size=(9, 11),
        stride=2,
        padding=1,
        groups=2,
        members=64,
        repeats=2,
        sigma=0.1,
    )
    linear = cases["tokens"]
    assert (linear.out_channels, linear.in_channels, linear.bias) == (6, 8, True)
    assert linear.repeats == 2 * 5 * 5  # the positions of the convolution's output
    model, rows = nn.Linear(4, 4).double(), torch.zeros(1, 4, dtype=torch.float64)
    assert layers(model, rows, LIKE).chosen[0].case.dtype == "float64"
    assert layers(model, rows, LIKE, dtype="bfloat16").chosen[0].case.dtype == "bfloat16"


def test_other_trainable_modules_are_listed() -> None:
    """Norms, layers that were not called and layers that are not measured are listed, unless frozen."""
    model = Strange()
    others = {module.name: module for module in layers_of(model, 3, 4, 9, 11).others}
    assert list(others) == ["norm", "table", "idle", "biased"]
    excluded = [module.name for module in others.values() if module.excluded]
    assert excluded == ["table", "biased"]
    assert others["table"].reason == "Embedding: not measured, so it is left out"
    assert others["biased"].reason == "Linear: not measured, so it is left out"
    assert perturb(model, Perturbed(), members=2, sigma=0.1, exclude=excluded)
    with pytest.raises(ValueError, match="biased"):
        perturb(model, Perturbed(), members=2, sigma=0.1)


def test_a_model_that_raises_or_has_no_layer_is_refused() -> None:
    """The error says what to do; a failed model keeps no hook and can still be saved."""
    model = nn.Linear(4, 4)
    with pytest.raises(UserError, match=r"raises on rows of shape \(1, 5\): RuntimeError: .*return \(module"):
        layers_of(model, 1, 5)
    layers_of(model, 1, 4)
    torch.save(model, io.BytesIO())
    with pytest.raises(UserError, match="LayerNorm has no trainable Linear or Conv2d layer"):
        layers_of(nn.LayerNorm(4), 1, 4)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Create a module of factories in the working folder."""
    (tmp_path / "factories_of_a_test.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def mlp(): return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))\n"
        "def conv(): return nn.Conv2d(3, 3, 3)\n"
        "def pair(): return nn.Conv2d(3, 3, 3), torch.zeros(2, 3, 8, 8)\n"
        "def empty(): return nn.Conv2d(3, 3, 3), torch.zeros(0, 3, 8, 8)\n"
        "def plain(): return nn.Tanh()\n"
        "def three(): return 1, 2, 3\n"
        "def leaves(): raise SystemExit('no')\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "factories_of_a_test"
    sys.modules.pop("factories_of_a_test", None)


def test_a_factory_may_return_example_rows(package: str) -> None:
    """A model that begins with a Linear layer needs no example; other factories return one."""
    model, rows = load_model(f"{package}:mlp")
    assert rows.shape == (1, 4)
    assert [layer.name for layer in layers(model, rows, LIKE).chosen] == ["0", "2"]
    assert load_model(f"{package}:pair")[1].shape == (2, 3, 8, 8)


def test_a_factory_that_returns_no_model_is_refused(package: str) -> None:
    """The message has the fault, and the values that a factory may return."""
    for name, words in (
        (f"{package}:conv", "begins with Conv2d, so the shape of its rows is unknown: return (module, rows)"),
        (f"{package}:plain", "has no trainable parameter"),
        (f"{package}:empty", "the tensor that the factory returned has no rows"),
        (f"{package}:three", "the factory returned tuple: return an nn.Module"),
        (f"{package}:leaves", "the factory raises SystemExit: no"),
        (f"{package}:number", "the factory raises TypeError: 'int' object is not callable"),
        (f"{package}:unheard", "cannot import it: AttributeError"),
        ("no.such.module:make", "cannot import it"),
        *((name, "expected module:factory") for name in ("", "module", "module:", ":factory")),
    ):
        with pytest.raises(UserError) as raised:
            load_model(name)
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)
