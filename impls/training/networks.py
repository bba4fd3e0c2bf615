"""Small networks that classify handwritten digits, for quality metrics and for examples.

The digits are the 1797 images of 8 x 8 pixels that come with scikit-learn, so nothing is downloaded. Nothing
here uses a global random generator.
"""

import copy
import math
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.errors import UserError

CLASSES = 10
TRAINING = 1437
"""Number of training images, four of five; the others are for tests."""
SPLIT_SEED = 0

STEPS, BATCH, LEARNING_RATE = 300, 128, 5e-3


class Digits(NamedTuple):
    """Images, float32 [rows, 64] in 0..1, and their digits [rows]."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


class DigitsMLP(nn.Sequential):
    """64-128-128-10 with tanh, 26 122 parameters: rows [*, 64]."""

    features = (64,)

    def __init__(self) -> None:
        super().__init__(
            nn.utils.skip_init(nn.Linear, 64, 128),
            nn.Tanh(),
            nn.utils.skip_init(nn.Linear, 128, 128),
            nn.Tanh(),
            nn.utils.skip_init(nn.Linear, 128, CLASSES),
        )


class DigitsCNN(nn.Sequential):
    """Two convolutions, the second with stride 2, and a linear layer, 3 818 parameters: rows [*, 1, 8, 8]."""

    features = (1, 8, 8)

    def __init__(self) -> None:
        super().__init__(
            nn.utils.skip_init(nn.Conv2d, 1, 8, 3, padding=1),
            nn.Tanh(),
            nn.utils.skip_init(nn.Conv2d, 8, 16, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.utils.skip_init(nn.Linear, 256, CLASSES),
        )


class ResidualBlock(nn.Module):
    """Two convolutions whose result is added to their input [*, channels, height, width]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.utils.skip_init(nn.Conv2d, channels, channels, 3, padding=1) for _ in range(2)
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(torch.relu(x))))
        return x + y


class DigitsResNet(nn.Sequential):
    """A convolution, two residual blocks and a linear layer, 12 010 parameters: rows [*, 1, 8, 8]."""

    features = (1, 8, 8)

    def __init__(self) -> None:
        super().__init__(
            nn.utils.skip_init(nn.Conv2d, 1, 16, 3, padding=1),
            ResidualBlock(16),
            nn.AvgPool2d(2),
            ResidualBlock(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.utils.skip_init(nn.Linear, 256, CLASSES),
        )


Network = DigitsMLP | DigitsCNN | DigitsResNet

NETWORKS: Mapping[str, type[Network]] = MappingProxyType(
    {"DigitsMLP": DigitsMLP, "DigitsCNN": DigitsCNN, "DigitsResNet": DigitsResNet}
)


def shape_of(name: str) -> tuple[int, ...]:
    """Return the shape of one row that a network reads."""
    return _network_class(name).features


def untrained(name: str, seed: int = 0) -> nn.Module:
    """Return a network with seeded weights N(0, 1 / fan in) and biases of zero, in float32 on the CPU."""
    model, generator = _network_class(name)(), Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.zero_()
            else:
                parameter.normal_(0.0, 1 / math.sqrt(parameter[0].numel()), generator=generator)
    return model


def trained(name: str, seed: int = 0, steps: int = STEPS) -> nn.Module:
    """Return a copy of a network after a second or two of backpropagation, in float32 on the CPU.

    After the default number of steps the gradient has nearly vanished; after fewer it has not.
    """
    return copy.deepcopy(_train(name, seed, steps))


def accuracy(model: nn.Module) -> float:
    """Return the share of test images that a network of this module classifies correctly, on any device."""
    data, weight = digits(), next(model.parameters())
    with torch.no_grad():
        predicted = model(rows_for(model, data.test_x.to(weight))).argmax(-1).cpu()
    return float((predicted == data.test_y).double().mean())


def rows_for(model: nn.Module, x: Tensor) -> Tensor:
    """Reshape images [*, 64] to rows that a network reads."""
    return x.reshape(-1, *shape_of(type(model).__name__))


@cache
def digits() -> Digits:
    """Return the images, shuffled by a fixed seed and split; do not write to them."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415  a second, and only digits need it
    except ModuleNotFoundError as error:
        raise UserError(
            f"the digits come with scikit-learn, which is not installed ({error}): pip install scikit-learn"
        ) from error
    pixels, names = load_digits(return_X_y=True)
    order = torch.randperm(len(names), generator=Generator().manual_seed(SPLIT_SEED))
    x, y = torch.as_tensor(pixels, dtype=torch.float32)[order] / 16, torch.as_tensor(names)[order]
    return Digits(x[:TRAINING], y[:TRAINING], x[TRAINING:], y[TRAINING:])


@cache
def _train(name: str, seed: int, steps: int) -> nn.Module:
    """Train with Adam on seeded batches; the learning rate falls to zero as a cosine."""
    model, data = untrained(name, seed), digits()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = Generator().manual_seed(seed)
    with torch.enable_grad():
        for _ in range(steps):
            batch = torch.randint(len(data.train_y), (BATCH,), generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                model(rows_for(model, data.train_x[batch])), data.train_y[batch]
            )
            loss.backward()
            optimizer.step()
            schedule.step()
    optimizer.zero_grad()
    return model


def _network_class(name: str) -> type[Network]:
    if name not in NETWORKS:
        raise UserError(f"no network {name!r}; available: {', '.join(NETWORKS)}")
    return NETWORKS[name]
