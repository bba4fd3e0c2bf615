"""Low-rank products are those with the factors written out, up to the largest rank that a kernel takes."""

import math

import pytest
import torch
from torch import Tensor

from impls.fused import FusedLowRank, FusedLowRankSign, lowrank, sparse
from impls.kernels import lowrank as lowrank_kernels
from impls.kernels import sparse as sparse_kernels
from impls.kernels.lowrank import low_rank_product, tiling_of
from impls.kernels.ranks import MOST_RANK
from impls.kernels.rows import LEAST, strength_of
from impls.verify.reference import compare
from tests.kernels.launched.canaries import DEVICE, canaries, generator
from tests.kernels.launched.operands import guarded

SIGMA = 0.25
RANKS = [2**power for power in range(MOST_RANK.bit_length())]


def slow_product(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Multiply rows [r, m, p, i] as the plain scheme would, in the type of x."""
    narrow = torch.einsum("rmpi,mki->rmpk", x, down) * (SIGMA / math.sqrt(down.shape[1]))
    return torch.einsum("rmpi,oi->rmpo", x, weight) + torch.einsum("rmpk,mko->rmpo", narrow, up)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rank", RANKS)
def test_rows_see_their_members_factors(rank: int, dtype: torch.dtype) -> None:
    """In the tiles of every rank, of which there are several each way, and which sizes are no multiple of."""
    shape, outputs = (2, 3, 5, 70), 150
    tiles = tiling_of(rank).suited(dtype)
    x, weight, down, up = (
        torch.randn(size, generator=generator(seed)).to(dtype)
        for seed, size in enumerate((shape, (outputs, 70), (3, rank, 70), (3, rank, outputs)))
    )
    with canaries() as kept, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowrank_kernels, "strength_of", lambda *given: guarded(kept, strength_of(*given)))
        y = kept.empty(*shape[:3], outputs, dtype=dtype)
        rows, shared, first, second = (kept.guard(one.to(DEVICE)) for one in (x, weight, down, up))
        low_rank_product(rows, shared, first, second, SIGMA, y, tiles.within(LEAST, 64, LEAST))
    truth = slow_product(*(one.double() for one in (x, weight, down, up)))
    compare("product", y.cpu(), truth, slow_product(x, weight, down, up))


@pytest.mark.parametrize("regenerated", [False, True])
@pytest.mark.parametrize("scheme", [FusedLowRank, FusedLowRankSign])
def test_a_rank_that_no_kernel_takes_is_refused(
    scheme: type[FusedLowRank | FusedLowRankSign], regenerated: bool
) -> None:
    """Where the scheme is named, and not when it is launched."""
    assert scheme(MOST_RANK, regenerated).rank == MOST_RANK
    with pytest.raises(ValueError, match=f"at most {MOST_RANK} for a kernel.* got {2 * MOST_RANK}"):
        scheme(2 * MOST_RANK, regenerated)


def test_a_launch_refuses_it_too() -> None:
    """A raw launch is held to the same limits."""
    x, weight, y = torch.zeros(1, 2, 1, 4), torch.zeros(3, 4), torch.zeros(1, 2, 1, 3)
    for rank, reason in ((3, "power of two"), (2 * MOST_RANK, f"at most {MOST_RANK}")):
        with pytest.raises(ValueError, match=f"{reason}, got {rank}"):
            low_rank_product(x, weight, torch.zeros(2, rank, 4), torch.zeros(2, rank, 3), 0.1, y)


def test_variants_state_the_limits_of_their_kernels() -> None:
    """They say them again, as triton need not be there to name a scheme."""
    assert lowrank.MOST_RANK == MOST_RANK
    assert sparse.MOST == sparse_kernels.MOST
