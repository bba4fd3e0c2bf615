"""A model's layers as cases, and factories that do not make one."""

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
    """A convolution, norms, tokens, a table and a layer that nothing comes past."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.conv = nn.Conv2d(4, 8, (3, 5), stride=2, padding=1, groups=2, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.tokens = nn.Linear(8, 6)
        self.table = nn.Embedding(3, 6)
        self.idle = nn.Linear(2, 2)
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Come past all but one."""
        y = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        return torch.as_tensor(self.frozen(self.tokens(y) + self.table.weight[0]))


def of(model: nn.Module, *shape: int, dtype: str | None = None) -> Layers:
    """The layers of a model on an example of this shape."""
    return layers(model, torch.zeros(*shape), LIKE, dtype=dtype)


def test_layers_become_cases() -> None:
    """Each layer has its shapes, strides and bias as a suite writes them, and the population's numbers."""
    found = {layer.name: layer.case for layer in of(Strange(), 3, 4, 9, 11).chosen}
    assert found["conv"] == Case(
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
    assert list(found) == ["conv", "tokens"]


def test_tokens_of_a_row_are_repeats() -> None:
    """A layer that sees several positions of each row has as many repeats more."""
    (linear,) = [layer.case for layer in of(Strange(), 3, 4, 9, 11).chosen if layer.name == "tokens"]
    positions = 5 * 5  # of the convolution's output
    assert (linear.out_channels, linear.in_channels, linear.bias) == (6, 8, True)
    assert linear.repeats == 2 * positions


def test_rest_of_what_is_trained_is_said() -> None:
    """Norms, layers that the example misses and what cannot be perturbed are named, frozen ones not."""
    others = {other.name: other for other in of(Strange(), 3, 4, 9, 11).others}
    assert list(others) == ["norm", "table", "idle"]
    assert [other.excluded for other in others.values()] == [False, True, False]
    assert "Embedding: cannot be perturbed" in others["table"].why


def test_a_population_takes_what_is_not_excluded() -> None:
    """The names to exclude are those that a population refuses, and no more."""
    model = Strange()
    excluded = [other.name for other in of(model, 3, 4, 9, 11).others if other.excluded]
    assert perturb(model, Perturbed(), members=2, sigma=0.1, exclude=excluded)
    with pytest.raises(ValueError, match="table"):
        perturb(model, Perturbed(), members=2, sigma=0.1)


def test_type_is_the_layers_own_unless_one_is_asked_for() -> None:
    """Without a type each layer keeps its own; with one all have it."""
    model = nn.Linear(4, 4).double()
    rows = torch.zeros(1, 4, dtype=torch.float64)
    assert layers(model, rows, LIKE).chosen[0].case.dtype == "float64"
    assert layers(model, rows, LIKE, dtype="bfloat16").chosen[0].case.dtype == "bfloat16"


def test_model_that_raises_or_holds_nothing_is_one_line() -> None:
    """An example that does not fit, and a model without a layer to choose for, say what to do."""
    with pytest.raises(UserError, match=r"raises on rows of shape \(1, 5\): RuntimeError: .*return \(module"):
        of(nn.Linear(4, 4), 1, 5)
    with pytest.raises(UserError, match="LayerNorm has no trainable Linear or Conv2d layer"):
        of(nn.LayerNorm(4), 1, 4)


def test_running_leaves_nothing_behind() -> None:
    """After its layers were looked for, a model holds no function of ours: it can be saved as it is."""
    model = nn.Linear(4, 4)
    of(model, 1, 4)
    with pytest.raises(UserError):
        of(model, 1, 5)
    torch.save(model, io.BytesIO())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of factories in the working folder."""
    (tmp_path / "factories_of_a_test.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def mlp(): return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))\n"
        "def conv(): return nn.Conv2d(3, 3, 3)\n"
        "def pair(): return nn.Conv2d(3, 3, 3), torch.zeros(2, 3, 8, 8)\n"
        "def empty(): return nn.Conv2d(3, 3, 3), torch.zeros(0, 3, 8, 8)\n"
        "def plain(): return nn.Tanh()\n"
        "def lazy(): return nn.LazyLinear(3)\n"
        "def three(): return 1, 2, 3\n"
        "def nothing(): return None\n"
        "def leaves(): raise SystemExit('no')\n"
        "def fails(): raise KeyError('size')\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "factories_of_a_test"
    sys.modules.pop("factories_of_a_test", None)


def test_factory_may_give_its_own_rows(package: str) -> None:
    """A model that begins with a Linear layer needs no example; any other brings one."""
    model, rows = load_model(f"{package}:mlp")
    assert rows.shape == (1, 4)
    assert [layer.name for layer in layers(model, rows, LIKE).chosen] == ["0", "2"]
    assert load_model(f"{package}:pair")[1].shape == (2, 3, 8, 8)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("conv", "begins with Conv2d, so the shape of its rows is unknown: return (module, rows)"),
        ("lazy", "begins with LazyLinear"),
        ("plain", "has no trainable parameter"),
        ("empty", "the example has no rows"),
        ("three", "the factory returned a tuple of int, int, int: return an nn.Module"),
        ("nothing", "the factory returned NoneType"),
        ("leaves", "the factory raises SystemExit: no"),
        ("fails", "the factory raises KeyError: 'size'"),
        ("number", "the factory raises TypeError: 'int' object is not callable"),
        ("unheard", "cannot import it: AttributeError"),
    ],
)
def test_factory_that_makes_no_model_is_one_line(package: str, name: str, words: str) -> None:
    """Whatever a factory does, the message says what, and what to return."""
    with pytest.raises(UserError) as raised:
        load_model(f"{package}:{name}")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_name_that_is_no_factory_is_one_line() -> None:
    """A name without a module or a factory, or of what there is not, is said."""
    cases: list[str] = [
        "",
        "module",
        "module:",
        ":factory",
        "no.such.module:make",
    ]
    for name in cases:
        with pytest.raises(UserError, match=r"expected module:factory|cannot import it"):
            load_model(name)
