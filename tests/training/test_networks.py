"""The digits and the networks that classify them."""

import sys

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from esbench.errors import UserError
from esbench.studies import digits
from impls.training import networks

NAMES = tuple(networks.NETWORKS)


def test_the_digits_are_complete_and_no_image_is_in_both_parts() -> None:
    """There are 1797 images in 0..1, with each digit in both parts, split in the same way every time."""
    data = networks.digits()
    assert data.train_x.shape == (networks.TRAINING, 64)
    assert data.test_x.shape == (1797 - networks.TRAINING, 64)
    x, y = torch.cat([data.train_x, data.test_x]), torch.cat([data.train_y, data.test_y])
    assert (x.dtype, float(x.min()), float(x.max())) == (torch.float32, 0.0, 1.0)
    assert len(x.unique(dim=0)) == len(x) == len(y)
    assert data.train_y.unique().tolist() == data.test_y.unique().tolist() == list(range(networks.CLASSES))
    networks.digits.cache_clear()
    assert all(map(torch.equal, data, networks.digits()))


def test_networks_learn_the_digits() -> None:
    """Networks classify nearly all test images after training, and few before; shapes and names are right."""
    for name in NAMES:
        fewer_steps = {"steps": 100} if name == "DigitsResNet" else {}  # whose steps are the slowest
        assert networks.accuracy(networks.trained(name, **fewer_steps)) > 0.95
        model = networks.untrained(name)
        assert networks.accuracy(model) < 0.3
        assert model(torch.zeros(3, *networks.shape_of(name))).shape == (3, networks.CLASSES)
        assert type(model).__name__ == name
        assert sum(parameter.numel() for parameter in model.parameters()) < 30_000
    assert NAMES == digits.NETWORKS


def test_training_is_a_function_of_the_seed() -> None:
    """Equal seeds give equal weights, other seeds others; each caller gets a copy, without gradients."""
    for name in NAMES:
        state = torch.get_rng_state()
        weights = [parameters_to_vector(networks.trained(name, seed, 3).parameters()) for seed in (0, 1)]
        networks._train.cache_clear()  # noqa: SLF001  so that it is trained again
        again = networks.trained(name, 0, 3)
        assert torch.equal(weights[0], parameters_to_vector(again.parameters()))
        assert not torch.equal(*weights)
        assert torch.equal(state, torch.get_rng_state())
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        copied = networks.trained(name, 0, 3)
        assert torch.equal(weights[0], parameters_to_vector(copied.parameters()))
        assert all(parameter.grad is None for parameter in copied.parameters())


def test_accuracy_is_the_share_of_correct_test_images() -> None:
    """A network that predicts 3 for every image is right for the threes."""
    model = networks.untrained("DigitsMLP")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        list(model.parameters())[-1][3] = 1.0
    threes = networks.digits().test_y == 3
    assert networks.accuracy(model) == pytest.approx(float(threes.double().mean()))


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-learn, the message says what to install."""
    networks.digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        networks.digits()
