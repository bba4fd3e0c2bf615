"""Products of which groups of members keep blocks are those of weights with the other blocks at 0."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from impls.kernels.blocks import Cut, kept_blocks
from impls.schemes.blocks import cells
from tests.kernels.launched.canaries import DEVICE, canaries
from tests.kernels.launched.operands import NARROW, SIZES, SMALL, TYPES, held, normal, output, rows

ON, OFF = 2.5, -1.0
NONE: list[int] = []


def cut(width: int, count: int) -> Cut:
    """Cut channels as the scheme does."""
    unit, number = cells(width, count)
    return Cut(count, number, unit)


def mask(kept: list[list[int]], width: int, blocks: int) -> Tensor:
    """Write out which channels are on, bool [groups, width], from which blocks are."""
    unit, number = cells(width, blocks)
    borders = [*(block * number // blocks * unit for block in range(blocks)), width]
    on = torch.zeros(len(kept), width, dtype=torch.bool)
    for group, own in enumerate(kept):
        for block, (start, stop) in enumerate(pairwise(borders)):
            on[group, start:stop] = block in own
    return on.to(DEVICE)


def changes(outputs: list[list[int]], inputs: list[list[int]], counts: tuple[int, int]) -> Tensor:
    """Make what the scheme stores: -1 where a block is off, and above it where both are on."""
    both = [
        torch.tensor([[float(block in own) for block in range(count)] for own in kept])
        for kept, count in zip((outputs, inputs), counts, strict=True)
    ]
    return (1.6 * both[0].unsqueeze(2) * both[1].unsqueeze(1) - 1).to(DEVICE)


def written(  # noqa: PLR0913, PLR0917  what a product takes, and its type
    x: Tensor,
    weight: Tensor,
    masks: tuple[Tensor, Tensor],
    first: int,
    on: float | Tensor,
    off: float | Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply each member's rows by its group's weight, written out."""
    group = (first + torch.arange(x.shape[1], device=DEVICE)) % len(masks[0])
    is_on = (masks[0].unsqueeze(2) & masks[1].unsqueeze(1))[group].to(dtype)
    x, weight = x.to(dtype), weight.to(dtype)
    both = [
        torch.as_tensor(one, device=DEVICE).to(dtype).expand(len(x)).view(-1, 1, 1, 1) for one in (on, off)
    ]
    kept, rest = (torch.einsum("rmpi,moi->rmpo", x, weight * one) for one in (is_on, 1 - is_on))
    return both[0] * kept + both[1] * rest


INPUTS = [[0, 1, 3], NONE, [0, 1, 2, 3, 4], [2, 4]]
OUTPUTS = [[1], [0, 1], [0, 2], NONE]
"""Blocks that each of four groups keeps, of five and of three: runs, all, none and both ends."""


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("is_both", [False, True])
def test_a_product_is_right(dtype: torch.dtype, sizes: tuple[int, ...], is_both: bool) -> None:
    """It is as near to that in float64 as a slow one is, and touches nothing but its buffers."""
    repeats, members, positions, outputs, inputs = sizes
    kept_out, counts = (OUTPUTS, (3, 5)) if is_both else ([[0]] * 4, (1, 5))
    cuts = (cut(outputs, counts[0]), cut(inputs, counts[1]))
    masks = (mask(kept_out, outputs, counts[0]), mask(INPUTS, inputs, counts[1]))
    weight, factors = normal(1, outputs, inputs, dtype=dtype), changes(kept_out, INPUTS, counts)
    with canaries() as around:
        x = rows(around, repeats, members, positions, inputs, dtype)
        operands = around.guard(weight), around.guard(factors.to(dtype))
        y = kept_blocks(x, *operands, cuts, ON, 0.0, output(around, x, outputs), 3, SMALL)
    held(y, *(written(x, weight, masks, 3, ON, 0.0, wider) for wider in (torch.float64, dtype)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("tiling", [None, SMALL], ids=["default", "small"])
def test_repeats_may_count_dropped_blocks(dtype: torch.dtype, first: int, tiling: None) -> None:
    """Rows that see the negated noise read dropped blocks too, beside rows that do not."""
    x, weight = normal(0, 2, 9, 2, 170, dtype=dtype), normal(1, 100, 170, dtype=dtype)
    on, off = torch.tensor([ON, OFF]).to(DEVICE), torch.tensor([0.0, 2.0]).to(DEVICE)
    y = torch.empty(2, 9, 2, 100, dtype=dtype, device=DEVICE)
    factors, cuts = changes(OUTPUTS, INPUTS, (3, 5)).to(dtype), (cut(100, 3), cut(170, 5))
    kept_blocks(x, weight, factors, cuts, on, off, y, first, tiling)
    masks = (mask(OUTPUTS, 100, 3), mask(INPUTS, 170, 5))
    held(y, *(written(x, weight, masks, first, on, off, wider) for wider in (torch.float64, dtype)))


@pytest.mark.parametrize("width", [7, 65, 100, 512])
@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_blocks_begin_where_the_scheme_has_them(width: int, blocks: int) -> None:
    """Each block alone sums the channels that it has in the scheme, and drops all other outputs."""
    kept = [[block] for block in range(blocks)]
    x, weight = torch.ones(1, blocks, 1, width, device=DEVICE), torch.ones(3, width, device=DEVICE)
    on = mask(kept, width, blocks)
    y = kept_blocks(
        x, weight, changes([[0]] * blocks, kept, (1, blocks)), (cut(3, 1), cut(width, blocks)), 1.0, 0.0,
        torch.empty(1, blocks, 1, 3, device=DEVICE),
    )  # fmt: skip
    assert torch.equal(y[0, :, 0, 0], on.sum(1).float())
    x, weight = torch.ones(1, blocks, 1, 3, device=DEVICE), torch.ones(width, 3, device=DEVICE)
    y = kept_blocks(
        x, weight, changes(kept, [[0]] * blocks, (blocks, 1)), (cut(width, blocks), cut(3, 1)), 1.0, 0.0,
        torch.empty(1, blocks, 1, width, device=DEVICE),
    )  # fmt: skip
    assert torch.equal(y[0, :, 0], on * 3.0)


def test_dropped_blocks_are_not_read() -> None:
    """What a group drops may be no number, in its rows and in the weight: the product is smaller."""
    x, weight = torch.ones(1, 4, 1, 128, device=DEVICE), torch.ones(40, 128, device=DEVICE)
    on = mask([[0], [2]], 128, 4)
    x[0] = torch.where(on[[0, 1, 0, 1]].unsqueeze(1), 1.0, torch.nan)
    weight[:, 32:64] = torch.nan
    y = kept_blocks(
        x, weight, changes([[0]] * 2, [[0], [2]], (1, 4)), (cut(40, 1), cut(128, 4)), 1.0, 0.0,
        torch.empty(1, 4, 1, 40, device=DEVICE),
    )  # fmt: skip
    assert torch.equal(y, torch.full_like(y, 32.0))


def test_a_tile_without_kept_outputs_reads_no_weights() -> None:
    """Tiles of outputs that a group drops are zeros, and weights for them are not touched."""
    factors, cuts = changes([[1]] * 2, [[0]] * 2, (2, 1)), (cut(64, 2), cut(32, 1))
    with canaries() as around:
        kept = around.empty(32, 32).fill_(1)
        # The rows in front are a canary, which nobody may read.
        weight = kept.as_strided((64, 32), (32, 1), kept.storage_offset() - kept.numel())
        x, y = around.guard(torch.ones(1, 2, 1, 32)), around.empty(1, 2, 1, 64)
        kept_blocks(x, weight, around.guard(factors), cuts, 1.0, 0.0, y, 0, SMALL)
    assert torch.equal(y[0, 1, 0].cpu(), torch.tensor([0.0, 32.0]).repeat_interleave(32))


@pytest.mark.parametrize(
    ("factors", "counts", "message"),
    [
        (torch.zeros(2, 1, 3), (1, 2), "changes must be"),
        (torch.zeros(1, 2), (1, 2), "changes must be"),
        (torch.zeros(2, 1, 17), (1, 17), "at most 16 blocks"),
        (torch.zeros(2, 17, 1), (17, 1), "at most 16 blocks"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(factors: Tensor, counts: tuple[int, int], message: str) -> None:
    """Other shapes and more blocks raise, and nothing is launched."""
    x, weight, y = torch.zeros(1, 3, 1, 40), torch.zeros(40, 40), torch.zeros(1, 3, 1, 40)
    with pytest.raises(ValueError, match=message):
        kept_blocks(x, weight, factors, (cut(40, counts[0]), cut(40, counts[1])), 1.0, 0.0, y)
