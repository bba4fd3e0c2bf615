"""Low-rank products are those with the factors written out, up to the largest rank that a kernel takes."""

import math

import pytest
import torch
from torch import Tensor

from impls.kernels import FusedLowRank, FusedLowRankSign, lowrank
from impls.kernels.gemm import noise_scale
from impls.kernels.lowrank import default_tiling, low_rank_product
from impls.kernels.lowrank_rng import MAX_RANK
from impls.kernels.tiling import MIN_BLOCK
from impls.verify.reference import compare
from tests.kernels.launched.canaries import DEVICE, canaries, generator
from tests.kernels.launched.operands import guarded

SIGMA = 0.25
RANKS = [2**power for power in range(MAX_RANK.bit_length())]


def slow_product(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Multiply rows [r, m, p, i] as the plain scheme would, in the type of x."""
    narrow = torch.einsum("rmpi,mki->rmpk", x, down) * (SIGMA / math.sqrt(down.shape[1]))
    return torch.einsum("rmpi,oi->rmpo", x, weight) + torch.einsum("rmpk,mko->rmpo", narrow, up)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rank", RANKS)
def test_rows_see_their_members_factors(rank: int, dtype: torch.dtype) -> None:
    """In the tiles of every rank, of which there are several each way, and which sizes are no multiple of."""
    shape, outputs = (2, 3, 5, 70), 150
    tiles = default_tiling(rank).for_dtype(dtype)
    x, weight, down, up = (
        torch.randn(size, generator=generator(seed)).to(dtype)
        for seed, size in enumerate((shape, (outputs, 70), (3, rank, 70), (3, rank, outputs)))
    )
    with canaries() as kept, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowrank, "noise_scale", lambda *given: guarded(kept, noise_scale(*given)))
        y = kept.empty(*shape[:3], outputs, dtype=dtype)
        rows, shared, first, second = (kept.guard(one.to(DEVICE)) for one in (x, weight, down, up))
        low_rank_product(rows, shared, first, second, SIGMA, y, tiles.clipped(MIN_BLOCK, 64, MIN_BLOCK))
    truth = slow_product(*(one.double() for one in (x, weight, down, up)))
    compare("product", y.cpu(), truth, slow_product(x, weight, down, up))


@pytest.mark.parametrize("regenerated", [False, True])
@pytest.mark.parametrize("scheme", [FusedLowRank, FusedLowRankSign])
def test_a_rank_that_no_kernel_takes_is_refused(
    scheme: type[FusedLowRank | FusedLowRankSign], regenerated: bool
) -> None:
    """Where the scheme is named, and not when it is launched."""
    assert scheme(MAX_RANK, regenerated).rank == MAX_RANK
    with pytest.raises(ValueError, match=f"at most {MAX_RANK} for a kernel.* got {2 * MAX_RANK}"):
        scheme(2 * MAX_RANK, regenerated)


def test_a_launch_refuses_it_too() -> None:
    """A raw launch is held to the same limits."""
    x, weight, y = torch.zeros(1, 2, 1, 4), torch.zeros(3, 4), torch.zeros(1, 2, 1, 3)
    for rank, reason in ((3, "power of two"), (2 * MAX_RANK, f"at most {MAX_RANK}")):
        with pytest.raises(ValueError, match=f"{reason}.* got {rank}"):
            low_rank_product(x, weight, torch.zeros(2, rank, 4), torch.zeros(2, rank, 3), 0.1, y)
