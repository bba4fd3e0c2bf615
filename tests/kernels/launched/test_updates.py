"""Updates computed by kernels: sums of outer products and sparse columns, and updates of fused schemes."""

from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from impls import FusedLowRank, FusedLowRankSign
from impls.kernels import lowrank, outer, philox, sparse
from impls.kernels.outer import weighted_outer
from impls.kernels.sparse import column_sums
from impls.kernels.tiling import Tiling
from impls.perturbation.noise import PhiloxStream
from impls.verify.reference import check_close
from tests.kernels.launched.canaries import DEVICE, canaries, generator, normal, random_signs

if TYPE_CHECKING:
    from impls.kernels.scheme import AbstractFused

SMALL, OTHER = Tiling(16, 32, 16, 2, 4, 2), Tiling(32, 16, 32, 1, 4, 2)
NARROW = (torch.float16, torch.float32)


def outer_sum(left: Tensor, right: Tensor, utilities: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum outer products in a dtype."""
    weights = utilities.to(dtype).repeat_interleave(len(left) // len(utilities)).unsqueeze(1)
    return (left.to(dtype) * weights).T @ right.to(dtype)


def sylvester(outputs: int, inputs: int) -> Tensor:
    """Return the Hadamard matrix with entries (-1)^popcount(o & i)."""
    odd = [[(o & i).bit_count() % 2 for i in range(inputs)] for o in range(outputs)]
    return (1 - 2 * torch.tensor(odd)).to(DEVICE)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits so that sums of few members are split into parts too."""
    monkeypatch.setattr(outer, "FEWEST_ROWS", 32)
    monkeypatch.setattr(outer, "STEP", 32)


@pytest.mark.usefixtures("small_parts")
def test_a_sum_of_factors_is_right() -> None:
    """Sums over ranks and parts are right for sizes off a tile's multiples, and stay within their buffers."""
    for members, ranks, outputs, inputs, dtype, tiling in (
        (5, 1, 7, 20, torch.float32, None),
        (1, 4, 33, 1, torch.float16, SMALL),
        (37, 2, 40, 20, torch.float32, SMALL),
        (150, 1, 17, 65, torch.float16, None),
        (70, 1, 40, 72, torch.float16, SMALL),
        (50, 1, 20, 33, torch.float64, SMALL),
    ):
        left = normal(0, members * ranks, outputs, dtype=dtype)
        right = normal(1, members * ranks, inputs, dtype=dtype)
        utilities = normal(2, members, dtype=dtype)
        with canaries(is_watched=dtype is not torch.float64) as buffers:
            guarded = [buffers.guard(values) for values in (left, right, utilities)]
            total = weighted_outer(guarded[0], guarded[1], guarded[2], factor=1 / 3, tiling=tiling)
        exact, slow = (outer_sum(left, right, utilities, each) / 3 for each in (torch.float64, dtype))
        check_close("sum", total, exact, slow)
    for members, outputs, inputs in ((0, 2, 3), (2, 0, 3), (2, 3, 0)):
        total = weighted_outer(normal(0, members, outputs), normal(1, members, inputs), normal(2, members))
        assert torch.equal(total, torch.zeros(outputs, inputs, device=DEVICE))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_signs_are_multiplied_by_what_members_share(dtype: torch.dtype) -> None:
    """Sums of int8 signs are right when multiplied by a core, a Hadamard matrix or both."""
    members = 70
    utilities = normal(2, members, dtype=dtype)
    for outputs, inputs in ((37, 20), (48, 80)):
        left, right = (
            random_signs(seed, members, width).to(torch.int8).to(DEVICE)
            for seed, width in ((0, outputs), (1, inputs))
        )
        core = normal(3, outputs, inputs, dtype=dtype)
        for is_cored, is_hadamard in ((False, True), (True, False), (True, True)):
            with canaries() as buffers:
                guarded = [buffers.guard(values) for values in (left, right, utilities)]
                shared = buffers.guard(core) if is_cored else None
                total = weighted_outer(
                    guarded[0], guarded[1], guarded[2], shared, hadamard=is_hadamard, tiling=SMALL
                )
            matrix = (core if is_cored else 1) * (sylvester(outputs, inputs) if is_hadamard else 1)
            exact, slow = (
                outer_sum(left, right, utilities, each) * matrix for each in (torch.float64, dtype)
            )
            check_close("sum", total, exact, slow)
        floats = normal(4, members, inputs, dtype=dtype)  # signs on one side only
        for factors in ((left, floats), (floats, left)):
            exact, slow = (outer_sum(*factors, utilities, each) for each in (torch.float64, dtype))
            check_close("sum", weighted_outer(*factors, utilities, tiling=SMALL), exact, slow)


@pytest.mark.usefixtures("small_parts")
def test_parts_and_tiles_count_each_member_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of parts does not depend on tile sizes, and a sum that float32 holds exactly is exact."""
    left, right = random_signs(0, 150, 40).to(DEVICE), random_signs(1, 150, 33).to(DEVICE)
    utilities = (torch.arange(75) - 33).to(DEVICE)
    exact = outer_sum(left, right, utilities, torch.float64)
    parts, kernel = [], outer.weighted_outer_kernel

    class Recorded:
        def __getitem__(self, grid: Any) -> Any:
            parts.append(grid[-1])
            return kernel[grid]

    monkeypatch.setattr(outer, "weighted_outer_kernel", Recorded())
    for tiling in (SMALL, OTHER, None):
        total = weighted_outer(left.float(), right.float(), utilities.float(), tiling=tiling)
        assert torch.equal(total.double(), exact), tiling
    parts.clear()
    again = normal(0, 150, 20), normal(1, 150, 30), normal(2, 150)
    results = [weighted_outer(*again, tiling=tiling) for tiling in (SMALL, SMALL, OTHER, None)]
    assert parts == [3, 3, 3, 3]
    assert torch.equal(results[0], results[1])
    monkeypatch.setattr(outer, "ENOUGH_PROGRAMS", 1)
    weighted_outer(*again, tiling=SMALL)
    assert parts[-1] == 1
    rows, transpose = normal(0, 40, 66)[::2, :33], normal(1, 20, 20).T
    strided = weighted_outer(rows, transpose, again[2][:20], tiling=SMALL)
    expected = weighted_outer(rows.contiguous(), transpose.contiguous(), again[2][:20], tiling=SMALL)
    assert torch.equal(strided, expected)


# --- Sparse columns. ---


def column_formula(columns: Tensor, values: Tensor, c: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """Add values up at their columns, one after another."""
    weighted = values.to(dtype) * c.to(dtype).view(-1, 1, 1)
    total = torch.zeros(inputs, values.shape[2], dtype=dtype, device=DEVICE)
    return total.index_add_(0, columns.flatten(), weighted.flatten(0, 1))


@pytest.mark.parametrize("dtype", [*NARROW, torch.float64], ids=str)
def test_columns_are_summed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are right for columns that many members or no member have, and stay within their buffers."""
    for members, kept, inputs, outputs in ((5, 1, 3, 7), (60, 2, 7, 37), (1, 3, 20, 1), (40, 1, 2, 530)):
        columns = torch.rand(members, inputs, generator=generator(9)).argsort(1)[:, :kept].to(DEVICE)
        values, utilities = normal(0, members, kept, outputs, dtype=dtype), normal(1, members, dtype=dtype)
        sort = sparse.sort_columns(columns, inputs)
        with canaries() as buffers, monkeypatch.context() as patch:
            guarded = tuple(map(buffers.guard, sort))
            patch.setattr(sparse, "sort_columns", lambda *_, guarded=guarded: guarded)
            total = column_sums(columns, buffers.guard(values), buffers.guard(utilities), inputs)
        exact, slow = (
            column_formula(columns, values, utilities, inputs, each) for each in (torch.float64, dtype)
        )
        check_close("sum", total, exact, slow)
    order, starts = sparse.sort_columns(columns, inputs)  # members in order, so that sums are repeatable
    for column in range(inputs):
        column_order = order[starts[column] : starts[column + 1]]
        assert torch.equal(column_order, (columns.flatten() == column).nonzero().flatten())


# --- Updates of schemes. ---


def test_factors_are_drawn_again_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors are drawn in pieces of at most PIECE_BYTES, and the sum of all pieces is rounded once."""
    fill = Mock(side_effect=philox.fill)
    monkeypatch.setattr(lowrank, "fill", fill)
    schemes: list[tuple[AbstractFused[Any], torch.dtype, int]] = [
        (FusedLowRank(4, regenerated=True), torch.float16, 4 * 53 * 2),
        (FusedLowRank(4, regenerated=True, values="uniform"), torch.float16, 4 * 53 * 2),
        (FusedLowRankSign(2, regenerated=True), torch.float16, 2 * 53),
    ]
    for scheme, dtype, member_bytes in schemes:
        weight = torch.zeros(1, 20, 33, dtype=dtype, device=DEVICE)
        noise = scheme.sample(weight, PhiloxStream(0, 1, "layer", range(5, 75), weight.device, dtype))
        utilities = normal(0, 70, dtype=dtype) / 8
        fill.reset_mock()
        with monkeypatch.context() as patch:
            patch.setattr(lowrank, "PIECE_BYTES", 25 * member_bytes + 1)
            total = scheme.weighted_sum(noise, utilities)
        sizes = [call.args[0].nbytes for call in fill.call_args_list]
        pieces = [sum(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True)]
        assert pieces == [25 * member_bytes, 25 * member_bytes, 20 * member_bytes]
        written = scheme.plain.dense_noise(noise)
        exact = torch.tensordot(utilities.double(), written.double(), dims=1)
        check_close(f"update of {scheme}", total, exact, torch.tensordot(utilities, written, dims=1))
