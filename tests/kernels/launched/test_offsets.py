"""Channels may lie so far apart that their offsets have no 32 bits: activations have any strides."""

import mmap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from impls.kernels.dense_rng import FewRowsTiling, ManyRowsTiling, dense_rng_product
from impls.kernels.lowrank import low_rank_product
from impls.kernels.lowrank_rng import down_product
from impls.kernels.philox import Draw
from tests.kernels.launched.canaries import DEVICE, normal

INPUTS, OUTPUTS, MEMBERS = 3, 4, 2
APART = 2**30
"""Numbers from a channel to the next: the third is 2^31 away from the first."""

NOISE = Draw((0, 0), 1, 2, range(MEMBERS))
WEIGHT = normal(1, OUTPUTS, INPUTS, dtype=torch.float16)


def low_rank(x: Tensor, y: Tensor) -> Tensor:
    """With stored factors."""
    down, up = (normal(seed, MEMBERS, 1, width, dtype=x.dtype) for seed, width in ((2, INPUTS), (3, OUTPUTS)))
    return low_rank_product(x, WEIGHT, down, up, 0.1, y)


def narrow(x: Tensor, _: Tensor) -> Tensor:
    """With drawn ones."""
    return down_product(x, NOISE, 2)


def few(x: Tensor, y: Tensor) -> Tensor:
    """With dense noise, in the registers that drew."""
    return dense_rng_product(x, WEIGHT, NOISE, 0.1, y, tiling=FewRowsTiling())


def few_signs(x: Tensor, y: Tensor) -> Tensor:
    """The same of signs."""
    tiling = FewRowsTiling(block_n=128, line=32, calls=1)
    return dense_rng_product(x, WEIGHT, NOISE, 0.1, y, signs=True, tiling=tiling)


def many(x: Tensor, y: Tensor) -> Tensor:
    """With dense noise as an operand."""
    return dense_rng_product(x, WEIGHT, NOISE, 0.1, y, tiling=ManyRowsTiling())


@pytest.mark.skipif(DEVICE != "cpu", reason="untouched pages take no memory only on a CPU")
@pytest.mark.parametrize("launch", [low_rank, narrow, few, few_signs, many], ids=lambda one: one.__name__)
def test_channels_may_lie_far_apart(launch: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The result is that of a copy whose channels lie next to each other."""
    values = normal(0, 1, MEMBERS, 1, INPUTS, dtype=torch.float16)
    with mmap.mmap(-1, 2 * ((INPUTS - 1) * APART + MEMBERS)) as pages:
        x = torch.frombuffer(pages, dtype=torch.float16).as_strided(values.shape, (MEMBERS, 1, 1, APART))
        x.copy_(values)
        y, expected = (torch.zeros(1, MEMBERS, 1, OUTPUTS, dtype=torch.float16) for _ in range(2))
        assert torch.equal(launch(x, y), launch(values, expected))
        del x
