"""Members' rows and a shared weight, as kernels take them, and what their results are held to."""

import torch
from torch import Tensor

from impls.kernels.gemm import NoiseScale
from impls.kernels.tiling import Tiling
from impls.verify.reference import compare
from tests.kernels.launched.canaries import DEVICE, Canaries, generator

SMALL = Tiling(block_m=16, block_n=32, block_k=16, group_m=2, num_warps=4, num_stages=2)
"""Tiles that a small product has several of, each way."""

NARROW = (torch.float32, torch.float16)
"""Types whose sums are float32, which a kernel's numbers are too."""

TYPES = (*NARROW, torch.float64)

SIZES = [(1, 5, 1, 7, 20), (2, 21, 1, 70, 37), (1, 3, 6, 33, 65), (3, 5, 4, 17, 48)]
"""(repeats, members, positions, outputs, inputs): no multiples of a tile, and several tiles each way."""


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers on the CPU and round them to a type."""
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed)).to(dtype).to(DEVICE)


def rows(  # noqa: PLR0913, PLR0917  the sizes of activations, in their order
    kept: Canaries,
    repeats: int,
    members: int,
    positions: int,
    channels: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> Tensor:
    """Draw activations [r, m, p, c] between canaries; of several positions, channels lie further apart."""
    if positions == 1:
        return kept.guard(normal(seed, repeats, members, 1, channels, dtype=dtype))
    return kept.guard(normal(seed, repeats, members, channels, positions, dtype=dtype)).mT


def output(kept: Canaries, x: Tensor, outputs: int) -> Tensor:
    """Make room for a product between canaries, laid out as its input is."""
    repeats, members, positions, _ = x.shape
    if positions == 1:
        return kept.empty(repeats, members, 1, outputs, dtype=x.dtype)
    return kept.empty(repeats, members, outputs, positions, dtype=x.dtype).mT


def guarded(kept: Canaries, scale: NoiseScale) -> NoiseScale:
    """Put the scales that a launch makes between canaries too."""
    return scale._replace(per_repeat=kept.guard(scale.per_repeat)) if scale.is_per_repeat else scale


def held(got: Tensor, truth: Tensor, slow: Tensor) -> None:
    """Hold a result to that in float64: at most twice as far off as the slow one, and a few roundings."""
    assert got.shape == truth.shape
    compare("kernel", got, truth, slow)
