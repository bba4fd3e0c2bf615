"""What members pick is picked, and two products are the sum of both."""

import pytest
import torch
from torch import Tensor

from impls.kernels.permuted import added_product, picked_rows
from impls.kernels.tiling import Tiling
from tests.kernels.launched.canaries import DEVICE, canaries, generator
from tests.kernels.launched.members import SIZES, TYPES, Sizes, check, drawn

TILINGS = [Tiling(block_m=32, block_n=16, block_k=16), Tiling(block_m=16, block_n=64, block_k=32, group_m=1)]
SIGMA = 0.3


def draw_picks(sizes: Sizes, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Draw inputs with replacement, [m, count]."""
    return torch.randint(0, sizes.inputs, (sizes.members, count), generator=generator(2)).to(DEVICE, dtype)


def draw_core(sizes: Sizes, count: int, dtype: torch.dtype) -> Tensor:
    """Draw a core, [o, count]."""
    return torch.randn(sizes.outputs, count, generator=generator(3)).to(DEVICE, dtype)


def written_out(core: Tensor, picks: Tensor, inputs: int) -> Tensor:
    """Return every E_m, [m, o, i]: columns that pick the same input add up."""
    columns = picks.long().unsqueeze(1).expand(-1, len(core), -1)
    wide = torch.zeros(len(picks), len(core), inputs, dtype=torch.float64, device=core.device)
    return wide.scatter_add_(2, columns, core.double().expand(columns.shape))


@pytest.mark.parametrize("picked_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [1, 33, 300])
def test_channels_are_picked_by_each_member(count: int, picked_type: torch.dtype) -> None:
    """Rows are copied channel by channel, from any strides, and nothing else is read or written."""
    sizes = Sizes(2, 3, 7, 70, 1)
    x, picks = drawn(sizes, torch.float32).x, draw_picks(sizes, count, picked_type)
    with canaries() as kept:
        found = picked_rows(kept.guard(x.mT.contiguous()).mT, kept.guard(picks))
    assert torch.equal(found, x.gather(3, picks.long()[:, None].expand(2, 3, 7, count)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("count", [1, 40])
def test_a_product_is_that_of_written_out_members(sizes: Sizes, count: int, dtype: torch.dtype) -> None:
    """Of few picks and of more than there are inputs; nothing but its buffers is touched."""
    given, picks, core = drawn(sizes, dtype), draw_picks(sizes, count), draw_core(sizes, count, dtype)
    with canaries() as kept:
        x, weight, middle, index = map(kept.guard, (given.x, given.weight, core, picks))
        y = kept.empty(*sizes.rows, sizes.outputs, dtype=dtype)
        found = added_product(x, weight, picked_rows(x, index), middle, SIGMA, y)
    assert found is y
    check(y, given, written_out(core, picks, sizes.inputs), SIGMA)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_any_tiling_will_do(tiling: Tiling, dtype: torch.dtype) -> None:
    """However the products are cut, they are the same up to rounding, in float64 too."""
    sizes = Sizes(2, 45, 1, 150, 70)
    given, picks, core = drawn(sizes, dtype), draw_picks(sizes, 50), draw_core(sizes, 50, dtype)
    y = torch.empty(*sizes.rows, sizes.outputs, dtype=dtype, device=DEVICE)
    added_product(*given, picked_rows(given.x, picks), core, SIGMA, y, tiling)
    check(y, given, written_out(core, picks, sizes.inputs), SIGMA)


def test_repeats_may_have_scales_of_their_own_and_channels_any_stride() -> None:
    """Antithetic halves turn the sign of the noise; an image's channels lie far apart."""
    sizes = Sizes(2, 3, 7, 33, 40)
    given, picks, core = (
        drawn(sizes, torch.float32),
        draw_picks(sizes, 20),
        draw_core(sizes, 20, torch.float32),
    )
    images = given.x.mT.contiguous().mT
    y = torch.empty(2, 3, 40, 7, device=DEVICE).mT
    sigma = torch.tensor([0.5, -0.5], device=DEVICE)
    added_product(
        images,
        given.weight,
        picked_rows(images, picks),
        core.mT.contiguous().mT,
        sigma.view(2, 1, 1, 1, 1),
        y,
    )
    check(y, given, written_out(core, picks, sizes.inputs), sigma)


def test_no_rows_are_no_work() -> None:
    """Without repeats nothing is launched."""
    x, weight, y = torch.zeros(0, 2, 1, 3), torch.zeros(4, 3), torch.empty(0, 2, 1, 4)
    picked = picked_rows(x, torch.zeros(2, 2, dtype=torch.int64))
    assert picked.shape == (0, 2, 1, 2)
    assert added_product(x, weight, picked, torch.zeros(4, 2), 1.0, y) is y


@pytest.mark.parametrize("picks", [torch.zeros(2, 3), torch.zeros(3, 3).long(), torch.zeros(6).long()])
def test_picks_that_do_not_fit_are_refused(picks: Tensor) -> None:
    """Of another type, or not one row for each member."""
    with pytest.raises(ValueError, match="picks must be int32 or int64"):
        picked_rows(torch.zeros(1, 2, 1, 3), picks)


@pytest.mark.parametrize(
    ("second", "core"),
    [
        (torch.zeros(1, 2, 1, 5), torch.zeros(4, 6)),
        (torch.zeros(1, 2, 1, 5), torch.zeros(3, 5)),
        (torch.zeros(1, 2, 1, 5).half(), torch.zeros(4, 5)),
        (torch.zeros(1, 2, 1, 10)[..., ::2], torch.zeros(4, 5)),
    ],
)
def test_a_second_product_that_does_not_fit_is_refused(second: Tensor, core: Tensor) -> None:
    """Other shapes, types and rows that are not one behind the other raise."""
    x, weight, y = torch.zeros(1, 2, 1, 3), torch.zeros(4, 3), torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match="the second product takes contiguous rows"):
        added_product(x, weight, second, core, 1.0, y)
