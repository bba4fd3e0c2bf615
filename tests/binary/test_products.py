"""Products and weighted sums of packed bits equal those of the signs that they represent."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from impls.binary import bits, products
from impls.binary.products import Product, bit_product, weighted_sum
from tests.binary.test_bits import DTYPES, SIZES, lengths, some


def packed_columns(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack weights [..., length, o] along their length; return [..., K, o]."""
    return bits.pack(matrix.mT, dtype).mT.contiguous()


def check_products(x: Tensor, weights: Tensor, dtype: torch.dtype) -> None:
    """Compare products of bits with those of signs, by the CPU's method and by that of other devices."""
    rows, columns = bits.pack(x, dtype), packed_columns(weights, dtype)
    expected = torch.where(x, 1.0, -1.0) @ torch.where(weights, 1.0, -1.0)
    found = bit_product(rows, columns, x.shape[-1])
    assert found.dtype == torch.int32
    assert found.is_contiguous()
    assert torch.equal(found.float(), expected)
    if found.numel():
        lead = torch.broadcast_shapes(rows.shape[:-2], columns.shape[:-2])
        x_flat, w_flat = (one.expand(*lead, -1, -1)[None].flatten(0, -3) for one in (rows, columns))
        found.zero_()
        Product(found[None].flatten(0, -3), x_flat, w_flat, x.shape[-1]).write()
        assert torch.equal(found.float(), expected)


SIDES = st.integers(0, 5)


@settings(max_examples=50)
@given(
    dtype=DTYPES,
    lead=st.lists(st.sampled_from([(2, 2), (3, 3), (1, 3), (3, 1), (1, 1), (0, 1)]), max_size=3),
    sides=st.tuples(SIDES, st.integers(0, 130), SIDES),
    room=st.sampled_from([1, 2, 7, 50, 2**17]),
    columns=st.sampled_from([1, 3, 4096]),
)
def test_products_of_any_shape_are_those_of_signs(
    dtype: torch.dtype, lead: list[tuple[int, int]], sides: tuple[int, int, int], room: int, columns: int
) -> None:
    """Leading axes may broadcast or be empty, and the piece size does not matter."""
    rows, length, outputs = sides
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bits.CHUNK_WORDS, "cpu", room)
        patch.setattr(products, "MAX_COLUMNS", columns)
        x = some(*(own for own, _ in lead), rows, length)
        check_products(x, some(*(own for _, own in lead), length, outputs, seed=1), dtype)


def test_products_are_exact_at_every_length_and_layout() -> None:
    """Unused bits of the last word do not matter, nor the memory order of leading axes."""
    for dtype, length in lengths():
        check_products(some(3, 2, length), some(3, length, 5, seed=1), dtype)
        check_products(some(3, 7, length), some(1, length, 2, seed=1), dtype)
    for dtype in SIZES:
        with torch.inference_mode():
            check_products(some(4, 1, 3, 70), some(5, 70, 6, seed=1), dtype)
        check_products(some(5, 4, 3, 70).transpose(0, 1), some(4, 5, 70, 6, seed=1), dtype)
        check_products(some(4, 3, 2, 70), some(3, 4, 70, 6, seed=1).transpose(0, 1), dtype)
        x, weights = bits.pack(some(6, 4, 300), dtype), packed_columns(some(3, 300, 8, seed=1), dtype)
        for rows, columns in (
            (x[::2, ::3], weights[:, :, 1::2]),
            (x[:3].mT.contiguous().mT, weights.mT.contiguous().mT),
            (x[:1].expand(3, 4, -1), weights),
            (x[:1, :1].expand(3, 9, -1), weights[:1].expand(3, -1, -1)),
        ):
            expected = bit_product(rows.contiguous(), columns.contiguous(), 300)
            assert torch.equal(bit_product(rows, columns, 300), expected)


def test_long_rows_are_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums may exceed 16 bits, and a product 2^32 bits; rows may be split into pieces of words."""
    for length in (65472, 65536, 200_000):
        ones, none = torch.ones(1, length, dtype=torch.bool), torch.zeros(length, 1, dtype=torch.bool)
        for room in (2**17, 100):
            monkeypatch.setitem(bits.CHUNK_WORDS, "cpu", room)
            assert bit_product(bits.pack(ones), packed_columns(none, torch.int64), length).item() == -length
            assert bit_product(bits.pack(ones), packed_columns(~none, torch.int64), length).item() == length
    monkeypatch.undo()
    # Operands expanded from one word in memory.
    found = bit_product(
        torch.tensor([[[5]]]).expand(2**14, 1, 1), torch.tensor([[[-1]]]).expand(2**14, 1, 2**12), 64
    )
    assert found.shape == (2**14, 1, 2**12)
    assert found.min() == found.max() == 64 - 2 * 62


def test_products_and_sums_have_shapes_on_the_meta_device() -> None:
    """Shapes may have more words than memory holds; nothing is computed."""
    meta = torch.device("meta")
    for dtype in SIZES:
        x = torch.empty(2**20, 1, 16, dtype=dtype, device=meta)
        weights = torch.empty(2**20, 16, 4096, dtype=dtype, device=meta)
        assert bit_product(x, weights, 500).shape == (2**20, 1, 4096)
        length = 16 * 8 * dtype.itemsize
        summed = weighted_sum(weights, torch.empty(2**20, device=meta), length, axis=1)
        assert summed.shape == (length, 4096)


WAYS = {"tables": 0, "written out": 2**16}
"""Value of ``TABLE_MIN_BITS`` for which sums are computed in each way."""


def test_weighted_sums_are_exact_at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums with whole-number weights are exact for any number of members."""
    monkeypatch.setattr(products, "TABLES", 2)
    for (dtype, length), (way, few) in itertools.product(lengths(), WAYS.items()):
        monkeypatch.setitem(products.TABLE_MIN_BITS, "cpu", few)
        for members in (0, 1, 15, 17, 40):
            on = some(members, 3, length)
            weights = torch.arange(members) - 7.0
            found = weighted_sum(bits.pack(on, dtype), weights, length)
            assert found.dtype == torch.float32
            expected = torch.einsum("m,mse->se", weights, on.float())
            assert torch.equal(found, expected), (way, dtype, length, members)


@settings(max_examples=40)
@given(
    dtype=DTYPES,
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    length=st.integers(0, 140),
    room=st.sampled_from([16, 48, 2**17]),
    data=st.data(),
)
def test_words_may_lie_along_any_axis_of_a_weighted_sum(
    dtype: torch.dtype, shape: list[int], length: int, room: int, data: st.DataObject
) -> None:
    """The axis may be negative, and pieces may have any size, by both methods."""
    axis = data.draw(st.integers(1, len(shape)))
    on = some(9, *shape[:-1], length).movedim(-1, axis)
    packed = bits.pack(on.movedim(axis, -1), dtype).movedim(-1, axis)
    weights = torch.arange(9, dtype=data.draw(st.sampled_from([torch.float32, torch.float64]))) - 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bits.CHUNK_WORDS, "cpu", room)
        patch.setitem(products.TABLE_MIN_BITS, "cpu", data.draw(st.sampled_from([*WAYS.values()])))
        found = weighted_sum(packed, weights, length, axis)
        assert torch.equal(found, weighted_sum(packed, weights, length, axis - packed.dim()))
    assert found.dtype == weights.dtype
    assert torch.equal(found, (weights.view(-1, *[1] * len(shape)) * on).sum(0))


def test_weighted_sums_keep_the_precision_of_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in float64 are summed in float64, narrower ones in float32."""
    on, weights = some(200, 70), torch.randn(200, generator=torch.Generator().manual_seed(0)).double()
    expected = weights @ on.double()
    packed = bits.pack(on)
    for few in WAYS.values():
        monkeypatch.setitem(products.TABLE_MIN_BITS, "cpu", few)
        torch.testing.assert_close(weighted_sum(packed, weights, 70), expected, rtol=1e-13, atol=1e-13)
        single = weighted_sum(packed, weights.float(), 70)
        torch.testing.assert_close(single, expected.float(), rtol=1e-5, atol=1e-5)
        assert weighted_sum(packed, weights.bfloat16(), 70).dtype == torch.float32


def test_more_than_two_to_the_31_bits_are_summed() -> None:
    """Members and words beyond the range of a 32-bit index are included."""
    last = torch.zeros(2**15 + 1, 1, dtype=torch.int64).expand(-1, 2**11)
    weights = torch.zeros(2**15 + 1)
    last[-1, 0] = -(2**63)
    weights[-1] = 3
    found = weighted_sum(last, weights, 2**17).view(-1, 64)
    assert found[:, 63].eq(3).all()
    assert not found[:, :63].any()


def test_operands_that_do_not_fit_are_refused() -> None:
    """Words of mixed or wrong dtypes, and shapes that do not hold the bits, are refused."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (
            bit_product,
            (zeros(1, 2), zeros(2, 3, dtype=torch.int32), 90),
            "all words in a call must have the same size",
        ),
        (bit_product, (torch.zeros(1, 2), torch.zeros(2, 3), 90), "words are int64 or int32"),
        (bit_product, (zeros(1, 2), zeros(3, 3), 90), "90 bits in K words"),
        (bit_product, (zeros(1, 2), zeros(2, 3), 129), "129 bits in K words"),
        (weighted_sum, (zeros(4, 2), torch.ones(4), 129), "129 bits along axis -1"),
        (weighted_sum, (zeros(4, 2), torch.ones(3), 128), r"and \[3\] weights"),
        (weighted_sum, (zeros(4, 4), torch.ones(4), 256, 0), "256 bits along axis 0"),
    ]
    for call, arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            call(*arguments)
