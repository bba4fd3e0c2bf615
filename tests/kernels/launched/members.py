"""Members' rows and their written-out weights: what kernels on rows are held to."""

from typing import NamedTuple

import torch
from torch import Tensor

from impls.verify.reference import compare
from tests.kernels.launched.canaries import DEVICE, generator


class Sizes(NamedTuple):
    """Of a product: repeats, members, positions, inputs, outputs."""

    repeats: int
    members: int
    positions: int
    inputs: int
    outputs: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """The axes that rows have."""
        return self[:3]


SIZES = [
    Sizes(1, 1, 1, 1, 1),
    Sizes(1, 5, 1, 6, 5),
    Sizes(2, 45, 1, 150, 70),
    Sizes(2, 3, 7, 33, 40),
    Sizes(3, 2, 35, 70, 130),
    Sizes(1, 140, 1, 20, 33),
]
"""No multiples of a tile, several tiles each way, several repeats and positions."""

TYPES = [torch.float32, torch.float16]


class Drawn(NamedTuple):
    """What a product starts from.

    Attributes:
        x: [r, m, p, i].
        weight: [o, i].

    """

    x: Tensor
    weight: Tensor


def drawn(sizes: Sizes, dtype: torch.dtype) -> Drawn:
    """Draw rows and a weight of usual size."""
    x = torch.randn(*sizes.rows, sizes.inputs, generator=generator(0))
    weight = torch.randn(sizes.outputs, sizes.inputs, generator=generator(1)) / sizes.inputs**0.5
    return Drawn(x.to(DEVICE, dtype), weight.to(DEVICE, dtype))


def signs(seed: int, *shape: int) -> Tensor:
    """Draw +1 and -1 as int8."""
    return (torch.randint(0, 2, shape, generator=generator(seed)) * 2 - 1).to(DEVICE, torch.int8)


def check(y: Tensor, given: Drawn, changes: Tensor, sigma: float | Tensor) -> None:
    """Hold y to each member's W + sigma E_m, E_m being changes [m, o, i], as the oracle does.

    Raises:
        WrongResultError: it errs more than twice as much as the same products one by one in its type.

    """
    scales = torch.as_tensor(sigma, dtype=torch.float64, device=y.device).reshape(-1, 1, 1, 1)
    wide = given.x.double() @ (given.weight.double() + scales * changes.double()).mT
    dtype = given.x.dtype
    slow = given.x @ (given.weight + (scales.to(dtype) * changes.to(dtype))).mT
    compare("product", y, wide, slow)
