"""The digits and the networks that read them."""

import sys

import pytest
import torch
from torch import nn

from esbench.errors import UserError
from impls.training import networks

NAMES = tuple(networks.NETWORKS)


def test_the_digits_are_all_there_and_no_image_is_in_both_parts() -> None:
    """1797 images in 0..1, split, each digit in both parts, and the same ones every time."""
    data = networks.digits()
    assert data.train_x.shape == (networks.TRAINING, 64)
    assert data.test_x.shape == (1797 - networks.TRAINING, 64)
    x, y = torch.cat([data.train_x, data.test_x]), torch.cat([data.train_y, data.test_y])
    assert (x.dtype, float(x.min()), float(x.max())) == (torch.float32, 0.0, 1.0)
    assert len(x.unique(dim=0)) == len(x) == len(y)
    assert data.train_y.unique().tolist() == data.test_y.unique().tolist() == list(range(networks.CLASSES))
    networks.digits.cache_clear()
    assert all(map(torch.equal, data, networks.digits()))


@pytest.mark.parametrize("name", NAMES)
def test_a_network_learns_the_digits(name: str) -> None:
    """Nearly all test images are named rightly afterwards, hardly more than by chance before."""
    assert networks.accuracy(networks.trained(name)) > 0.95
    assert networks.accuracy(networks.untrained(name)) < 0.3


@pytest.mark.parametrize("name", NAMES)
def test_training_is_a_function_of_the_seed(name: str) -> None:
    """The same seed gives the same bits, another one gives others, and no global generator moves."""
    state = torch.get_rng_state()
    weights = [weights_of(networks.trained(name, seed, 3)) for seed in (0, 1)]
    networks._trained.cache_clear()  # noqa: SLF001  what was kept is forgotten, to be computed again
    assert torch.equal(weights[0], weights_of(networks.trained(name, 0, 3)))
    assert not torch.equal(*weights)
    assert torch.equal(state, torch.get_rng_state())


def test_a_trained_network_is_the_callers_own() -> None:
    """What one caller does to its copy, no other one sees; no gradient is left on it."""
    first = networks.trained("DigitsMLP", 0, 3)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    second = networks.trained("DigitsMLP", 0, 3)
    assert weights_of(second).abs().sum() > 0
    assert all(parameter.grad is None for parameter in second.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_network_reads_rows_of_its_shape(name: str) -> None:
    """What ``shape_of`` says of a row is what the network reads, and its type's name is its name."""
    model = networks.untrained(name)
    assert model(torch.zeros(3, *networks.shape_of(name))).shape == (3, networks.CLASSES)
    assert type(model).__name__ == name
    assert sum(parameter.numel() for parameter in model.parameters()) < 30_000


def test_accuracy_is_a_share_of_the_rows() -> None:
    """A network that names every image a three is right as often as there are threes."""
    model = networks.untrained("DigitsMLP")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        list(model.parameters())[-1][3] = 1.0
    y = torch.tensor([3, 3, 1, 2, 3])
    assert networks.accuracy(model, torch.rand(5, 64, generator=torch.Generator().manual_seed(0)), y) == 0.6


def test_an_unknown_network_lists_the_known_ones() -> None:
    """In one line."""
    with pytest.raises(UserError, match="no network 'Digits'; there are: DigitsMLP, DigitsCNN"):
        networks.trained("Digits")


def test_without_scikit_learn_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what to install."""
    networks.digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        networks.digits()


def weights_of(model: nn.Module) -> torch.Tensor:
    """Return all parameters in a row."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
