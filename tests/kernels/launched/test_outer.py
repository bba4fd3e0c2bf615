"""Weighted sums of outer products are those of written-out products, whatever their tiles and parts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from impls.kernels import outer
from impls.kernels.outer import weighted_outer
from impls.kernels.tiling import Tiling
from tests.kernels.launched.canaries import DEVICE, canaries, random_signs
from tests.kernels.launched.operands import NARROW, SMALL, held, normal

SIZES = [(5, 1, 7, 20), (1, 4, 33, 1), (37, 2, 70, 40), (150, 1, 17, 65)]
"""(members, ranks, outputs, inputs): no multiples of a tile; the last ones have several parts of members."""
OTHER = Tiling(block_m=32, block_n=16, block_k=32, group_m=1, num_warps=4, num_stages=2)


def written(  # noqa: PLR0913, PLR0917  what a product takes, and its type
    left: Tensor, right: Tensor, utilities: Tensor, core: Tensor | None, first: int, dtype: torch.dtype
) -> Tensor:
    """Sum outer products one member after another, each times its core."""
    ranks = len(left) // len(utilities)
    c = utilities.to(dtype).repeat_interleave(ranks)
    weighted, other = left.to(dtype) * c.unsqueeze(1), right.to(dtype)
    if core is None:
        return weighted.T @ other
    cores = core.to(dtype).reshape(-1, *core.shape[-2:])
    own = (first + torch.arange(len(utilities))).repeat_interleave(ranks).to(DEVICE) % len(cores)
    return sum(
        ((weighted[own == j].T @ other[own == j]) * cores[j] for j in range(len(cores))),
        start=torch.zeros_like(cores[0]),
    )


def sylvester(outputs: int, inputs: int) -> Tensor:
    """Write out signs by counting bits."""
    odd = [[(o & i).bit_count() % 2 for i in range(inputs)] for o in range(outputs)]
    return (1 - 2 * torch.tensor(odd)).to(DEVICE)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split sums of few members too."""
    monkeypatch.setattr(outer, "FEWEST_ROWS", 32)
    monkeypatch.setattr(outer, "STEP", 32)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(("members", "ranks", "outputs", "inputs"), SIZES)
@pytest.mark.parametrize("tiling", [None, SMALL], ids=["default", "small"])
def test_a_sum_is_right(  # noqa: PLR0913, PLR0917  a case's sizes are passed by name
    dtype: torch.dtype, members: int, ranks: int, outputs: int, inputs: int, tiling: Tiling | None
) -> None:
    """It is as near to the sum in float64 as a slow one is, and touches nothing but its buffers."""
    left, right = (
        normal(seed, members * ranks, width, dtype=dtype) for seed, width in ((0, outputs), (1, inputs))
    )
    utilities = normal(2, members, dtype=dtype)
    with canaries() as kept:
        operands = [kept.guard(values) for values in (left, right, utilities)]
        found = weighted_outer(operands[0], operands[1], operands[2], factor=0.5, tiling=tiling)
    truth, slow = (written(left, right, utilities, None, 0, wider) * 0.5 for wider in (torch.float64, dtype))
    held(found, truth, slow)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    ("count", "first", "hadamard"),
    [(None, 0, True), (1, 0, False), (3, 0, False), (3, 2, False), (2, 1, True)],
)
def test_signs_meet_what_members_share(
    dtype: torch.dtype, count: int | None, first: int, hadamard: bool
) -> None:
    """Signs of a byte are summed in the utilities' type, and times each member's own core and its place."""
    members, outputs, inputs = 101, 37, 20
    left, right = (
        random_signs(seed, members, w).to(torch.int8).to(DEVICE) for seed, w in ((0, outputs), (1, inputs))
    )
    utilities = normal(2, members, dtype=dtype)
    core = None if count is None else normal(3, count, outputs, inputs, dtype=dtype)
    with canaries() as kept:
        operands = [kept.guard(values) for values in (left, right, utilities)]
        shared = None if core is None else kept.guard(core)
        found = weighted_outer(
            operands[0], operands[1], operands[2], shared, hadamard=hadamard, first=first, tiling=SMALL
        )
    truth, slow = (
        written(left, right, utilities, core, first, wider)
        * (sylvester(outputs, inputs) if hadamard else torch.ones((), dtype=torch.int8, device=DEVICE))
        for wider in (torch.float64, dtype)
    )
    held(found, truth, slow)


@pytest.mark.parametrize("sides", [(torch.int8, torch.float16), (torch.float16, torch.int8)], ids=str)
def test_one_side_may_be_signs(sides: tuple[torch.dtype, torch.dtype]) -> None:
    """Either operand may be bytes beside one of the utilities' type."""
    left, right = (
        (random_signs(seed, 40, 33).to(DEVICE) if dtype is torch.int8 else normal(seed, 40, 33)).to(dtype)
        for seed, dtype in enumerate(sides)
    )
    utilities = normal(2, 40, dtype=torch.float16)
    truth, slow = (
        written(left, right, utilities, None, 0, wider) for wider in (torch.float64, torch.float16)
    )
    held(weighted_outer(left, right, utilities, tiling=SMALL), truth, slow)


def test_rows_may_lie_anywhere() -> None:
    """Rows with a stride are read in place, and columns of a transpose are copied first."""
    left, right, utilities = normal(0, 40, 66)[::2, :33], normal(1, 20, 20).T, normal(2, 20)
    found = weighted_outer(left, right, utilities, tiling=SMALL)
    assert torch.equal(found, weighted_outer(left.contiguous(), right.contiguous(), utilities, tiling=SMALL))


@pytest.mark.parametrize("is_signs", [False, True])
def test_a_sum_of_float64_is_one(is_signs: bool) -> None:
    """A kernel's numbers are float32, and yet factors and sums in float64 have 53 bits, of signs too."""
    wide = [
        normal(seed, *shape, dtype=torch.float64) for seed, shape in enumerate([(50, 20), (50, 33), (50,)])
    ]
    left, right = (values.sign().to(torch.int8) if is_signs else values for values in wide[:2])
    core = normal(3, 2, 20, 33, dtype=torch.float64)
    found = weighted_outer(left, right, wide[2], core, factor=1 / 3, tiling=SMALL)
    torch.testing.assert_close(found, written(left, right, wide[2], core, 0, torch.float64) / 3)


def test_a_sum_of_parts_is_the_same_again() -> None:
    """Members are split into parts, and the parts added in one order: the same bits every time."""
    left, right, utilities = normal(0, 150, 20), normal(1, 150, 30), normal(2, 150)
    found = weighted_outer(left, right, utilities, tiling=SMALL)
    assert torch.equal(found, weighted_outer(left, right, utilities, tiling=SMALL))


@pytest.mark.parametrize("tiling", [SMALL, OTHER, None], ids=["small", "other", "default"])
def test_no_tile_counts_a_member_twice(tiling: Tiling | None) -> None:
    """A sum that float32 holds exactly is exact, whatever its tiles and parts."""
    left, right, core = random_signs(0, 150, 40), random_signs(1, 150, 33), random_signs(2, 3, 40, 33)
    utilities = torch.arange(75) - 33
    truth = written(
        left.to(DEVICE), right.to(DEVICE), utilities.to(DEVICE), core.to(DEVICE), 1, torch.float64
    )
    operands = [values.float().to(DEVICE) for values in (left, right, utilities, core)]
    assert torch.equal(weighted_outer(*operands, first=1, tiling=tiling).double(), truth)


def test_members_split_into_parts_only_where_tiles_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second kernel adds as many parts whatever the tiles are, and a sum of many tiles has none."""
    parts = []
    kernel = outer.weighted_outer_kernel

    class Recorded:
        def __getitem__(self, grid: Any) -> Any:
            parts.append(grid[-1])
            return kernel[grid]

    monkeypatch.setattr(outer, "weighted_outer_kernel", Recorded())
    operands = normal(0, 70, 40), normal(1, 70, 40), normal(2, 70)
    for tiling in (SMALL, OTHER, None):
        weighted_outer(*operands, tiling=tiling)
    monkeypatch.setattr(outer, "ENOUGH_PROGRAMS", 1)
    weighted_outer(*operands, tiling=SMALL)
    assert parts == [2, 2, 2, 1]


@pytest.mark.parametrize("sizes", [(0, 2, 3), (2, 0, 3), (2, 3, 0)])
def test_nothing_sums_to_nothing(sizes: tuple[int, int, int]) -> None:
    """Without members a sum is 0, without outputs or inputs it is empty."""
    members, outputs, inputs = sizes
    found = weighted_outer(normal(0, members, outputs), normal(1, members, inputs), normal(2, members))
    assert torch.equal(found, torch.zeros(outputs, inputs, device=DEVICE))


@pytest.mark.parametrize(
    ("left", "right", "utilities", "core", "message"),
    [
        (torch.zeros(4, 2), torch.zeros(3, 2), torch.zeros(2), None, "a sum takes"),
        (torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(3), None, "a sum takes"),
        (torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(0), None, "a sum takes"),
        (torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(4, 1), None, "a sum takes"),
        (torch.zeros(4, 2, 1), torch.zeros(4, 2), torch.zeros(4), None, "a sum takes"),
        (torch.zeros(4, 2), torch.zeros(4, 2).half(), torch.zeros(4), None, "int8 or of the utilities"),
        (torch.zeros(4, 2).char(), torch.zeros(4, 2).char(), torch.zeros(4).int(), None, "int8 or of the"),
        (torch.zeros(4, 2), torch.zeros(4, 3), torch.zeros(4), torch.zeros(3, 2), "a core must be"),
        (torch.zeros(4, 2), torch.zeros(4, 3), torch.zeros(4), torch.zeros(2), "a core must be"),
    ],
)
def test_what_does_not_fit_is_refused(
    left: Tensor, right: Tensor, utilities: Tensor, core: Tensor | None, message: str
) -> None:
    """Other shapes and types raise, and nothing is launched."""
    with pytest.raises(ValueError, match=message):
        weighted_outer(left, right, utilities, core)
