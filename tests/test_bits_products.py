"""Sums over packed bits are those of the +1 and -1 that they stand for."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impls.binary import bit_products, bits, words
from tests.test_bits import BOTH, EVERY_LENGTH, some


def packed_columns(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack weights [..., length, o] along their first axis: [..., K, o]."""
    return bits.pack(matrix.mT, dtype).mT.contiguous()


def held(x: Tensor, weights: Tensor, dtype: torch.dtype) -> None:
    """Hold products of bits to those of signs, on the CPU's way and on the others'."""
    rows, columns = bits.pack(x, dtype), packed_columns(weights, dtype)
    expected = torch.where(x, 1.0, -1.0) @ torch.where(weights, 1.0, -1.0)
    found = bits.products(rows, columns, x.shape[-1])
    assert found.dtype == torch.int32
    assert found.is_contiguous()
    assert torch.equal(found.float(), expected)
    if found.numel():
        pieces = bit_products.Product(found[None].flatten(0, -3), *flat(rows, columns), x.shape[-1])
        found.zero_()
        pieces.write()
        assert torch.equal(found.float(), expected)


WAYS = pytest.mark.parametrize("few", [0, 2**16], ids=["looked up", "written out"])


def flat(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Write leading axes out, as one."""
    lead = torch.broadcast_shapes(x.shape[:-2], weights.shape[:-2])
    return tuple(of.expand(*lead, -1, -1)[None].flatten(0, -3) for of in (x, weights))  # type: ignore[return-value]  # a tuple of two, of a generator


@BOTH
@EVERY_LENGTH
def test_products_are_those_of_signs(length: int, dtype: torch.dtype) -> None:
    """Rows by columns of bits give the product of +1 and -1 exactly, whatever the last word holds."""
    held(some(3, 2, length), some(3, length, 5, seed=1), dtype)
    held(some(3, 7, length), some(1, length, 2, seed=1), dtype)


SIDES = st.integers(0, 5)


@BOTH
@settings(max_examples=60)
@given(
    lead=st.lists(st.sampled_from([(2, 2), (3, 3), (1, 3), (3, 1), (1, 1), (0, 1)]), max_size=3),
    sides=st.tuples(SIDES, st.integers(0, 130), SIDES),
    room=st.sampled_from([1, 2, 7, 50, 2**17]),
    columns=st.sampled_from([1, 3, 4096]),
)
def test_products_of_any_shape_are_those_of_signs(
    dtype: torch.dtype, lead: list[tuple[int, int]], sides: tuple[int, int, int], room: int, columns: int
) -> None:
    """Leading axes broadcast in every way, axes may be empty, and pieces leave no trace."""
    rows, length, outputs = sides
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(words.ROOM, "cpu", room)
        patch.setattr(bit_products, "COLUMNS", columns)
        held(
            some(*(own for own, _ in lead), rows, length),
            some(*(own for _, own in lead), length, outputs, seed=1),
            dtype,
        )


@BOTH
def test_leading_axes_that_cannot_be_joined_are_walked_along(dtype: torch.dtype) -> None:
    """Repeats of rows for weights of members, and groups in any order in memory, multiply rightly."""
    held(some(4, 1, 3, 70), some(5, 70, 6, seed=1), dtype)
    held(some(4, 1, 3, 70), some(1, 5, 70, 6, seed=1), dtype)
    held(some(5, 4, 3, 70).transpose(0, 1), some(4, 5, 70, 6, seed=1), dtype)
    held(some(4, 3, 2, 70), some(3, 4, 70, 6, seed=1).transpose(0, 1), dtype)


@BOTH
def test_operands_lie_anywhere_in_memory(dtype: torch.dtype) -> None:
    """Slices with steps, transposed and expanded operands give what their copies give."""
    x, weights = bits.pack(some(6, 4, 300), dtype), packed_columns(some(3, 300, 8, seed=1), dtype)
    for rows, columns in (
        (x[::2, ::3], weights[:, :, 1::2]),
        (x[:3].mT.contiguous().mT, weights.mT.contiguous().mT),
        (x[:1].expand(3, 4, -1), weights),
        (x[:1, :1].expand(3, 9, -1), weights[:1].expand(3, -1, -1)),
    ):
        expected = bits.products(rows.contiguous(), columns.contiguous(), 300)
        assert torch.equal(bits.products(rows, columns, 300), expected)


def test_long_rows_of_bits_are_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums reach beyond 16 bits, also in pieces of words: rows that agree or differ everywhere are right."""
    for length in (65472, 65536, 200_000):
        ones, none = torch.ones(1, length, dtype=torch.bool), torch.zeros(length, 1, dtype=torch.bool)
        for room in (2**17, 100):
            monkeypatch.setitem(words.ROOM, "cpu", room)
            assert bits.products(bits.pack(ones), packed_columns(none, torch.int64), length).item() == -length
            assert bits.products(bits.pack(ones), packed_columns(~none, torch.int64), length).item() == length


def test_pieces_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a piece, and in inference mode, sums are the same."""
    x, weights = bits.pack(some(9, 3, 130)), packed_columns(some(9, 130, 11, seed=1), torch.int64)
    whole = bits.products(x, weights, 130)
    summed = bits.weighted_sum(weights, torch.arange(9), 130, axis=1)
    monkeypatch.setitem(bit_products.FEW, "cpu", 0)
    monkeypatch.setitem(words.ROOM, "cpu", 64)
    for inference in (False, True):
        with torch.inference_mode(inference):
            assert torch.equal(bits.products(x, weights, 130), whole)
            assert torch.equal(bits.weighted_sum(weights, torch.arange(9), 130, axis=1), summed)


def test_more_than_two_to_the_31_bits_are_multiplied() -> None:
    """A product of 2^32 bits, of operands that are one word in memory, is right everywhere."""
    x = torch.tensor([[[5]]]).expand(2**14, 1, 1)
    weights = torch.tensor([[[-1]]]).expand(2**14, 1, 2**12)
    found = bits.products(x, weights, 64)
    assert found.shape == (2**14, 1, 2**12)
    assert found.min() == found.max() == 64 - 2 * 62


@BOTH
def test_products_and_sums_have_shapes_on_the_meta_device(dtype: torch.dtype) -> None:
    """Sums over more words than memory holds have their shapes, and nothing is computed."""
    meta = torch.device("meta")
    x = torch.empty(2**20, 1, 16, dtype=dtype, device=meta)
    weights = torch.empty(2**20, 16, 4096, dtype=dtype, device=meta)
    assert bits.products(x, weights, 500).shape == (2**20, 1, 4096)
    length = 16 * 8 * dtype.itemsize
    summed = bits.weighted_sum(weights, torch.empty(2**20, device=meta), length, axis=1)
    assert summed.shape == (length, 4096)


@BOTH
@EVERY_LENGTH
@WAYS
def test_weighted_sums_are_those_of_bits(
    monkeypatch: pytest.MonkeyPatch, few: int, length: int, dtype: torch.dtype
) -> None:
    """Sums over members are exact where weights are whole numbers, for any number of members."""
    monkeypatch.setitem(bit_products.FEW, "cpu", few)
    monkeypatch.setattr(bit_products, "TABLES", 2)
    for members in (0, 1, 15, 16, 17, 40):
        on = some(members, 3, length)
        weights = torch.arange(members) - 7.0
        found = bits.weighted_sum(bits.pack(on, dtype), weights, length)
        assert found.dtype == torch.float32
        assert torch.equal(found, torch.einsum("m,mse->se", weights, on.float()))


@BOTH
@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    length=st.integers(0, 140),
    room=st.sampled_from([16, 48, 2**17]),
    data=st.data(),
)
def test_words_lie_along_any_axis(
    dtype: torch.dtype, shape: list[int], length: int, room: int, data: st.DataObject
) -> None:
    """The axis of words may stand anywhere and be counted from either end; pieces leave no trace."""
    axis = data.draw(st.integers(1, len(shape)))
    on = some(9, *shape[:-1], length).movedim(-1, axis)
    packed = bits.pack(on.movedim(axis, -1), dtype).movedim(-1, axis)
    weights = torch.arange(9, dtype=data.draw(st.sampled_from([torch.float32, torch.float64]))) - 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(words.ROOM, "cpu", room)
        patch.setitem(bit_products.FEW, "cpu", data.draw(st.sampled_from([0, 2**16])))
        found = bits.weighted_sum(packed, weights, length, axis)
        assert torch.equal(found, bits.weighted_sum(packed, weights, length, axis - packed.dim()))
    assert found.dtype == weights.dtype
    assert torch.equal(found, (weights.view(-1, *[1] * len(shape)) * on).sum(0))


@WAYS
def test_weights_keep_their_precision(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """Sums in float64 are those of float64, and narrow weights are summed in float32."""
    monkeypatch.setitem(bit_products.FEW, "cpu", few)
    on, weights = some(200, 70), torch.randn(200, generator=torch.Generator().manual_seed(0)).double()
    expected = weights @ on.double()
    packed = bits.pack(on)
    torch.testing.assert_close(bits.weighted_sum(packed, weights, 70), expected, rtol=1e-13, atol=1e-13)
    single = bits.weighted_sum(packed, weights.float(), 70)
    torch.testing.assert_close(single, expected.float(), rtol=1e-5, atol=1e-5)
    assert bits.weighted_sum(packed, weights.bfloat16(), 70).dtype == torch.float32


def test_more_than_two_to_the_31_bits_are_summed() -> None:
    """Members and words whose bits no 32-bit index reaches are summed, to the last."""
    last = torch.zeros(2**15 + 1, 1, dtype=torch.int64).expand(-1, 2**11)
    weights = torch.zeros(2**15 + 1)
    last[-1, 0] = -(2**63)
    weights[-1] = 3
    found = bits.weighted_sum(last, weights, 2**17).view(-1, 64)
    assert found[:, 63].eq(3).all()
    assert not found[:, :63].any()


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make words."""
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: bits.products(zeros(1, 2), zeros(2, 3, dtype=torch.int32), 90),
            "words of one size in one call",
        ),
        (lambda: bits.products(torch.zeros(1, 2), torch.zeros(2, 3), 90), "words are int64 or int32"),
        (lambda: bits.products(zeros(1, 2), zeros(3, 3), 90), "90 bits in K words"),
        (lambda: bits.products(zeros(1, 2), zeros(2, 3), 129), "129 bits in K words"),
        (lambda: bits.weighted_sum(zeros(4, 2), torch.ones(4), 129), "129 bits along axis -1"),
        (lambda: bits.weighted_sum(zeros(4, 2), torch.ones(3), 128), r"and \[3\] weights"),
        (lambda: bits.weighted_sum(zeros(4, 4), torch.ones(4), 256, axis=0), "256 bits along axis 0"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    """Words of two sizes, of other numbers, and axes that hold no words are refused in words."""
    with pytest.raises(ValueError, match=message):
        call()
