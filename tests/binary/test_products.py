"""Products and weighted sums of packed bits equal those of the signs that they represent."""

import itertools

import pytest
import torch
from torch import Tensor

from impls.binary import bits, products
from impls.binary.products import Product, bit_product, weighted_sum
from tests.binary.test_bits import LENGTHS, fair_bits


def packed_columns(matrix: Tensor) -> Tensor:
    """Pack bits [..., length, o] along their length; return [..., K, o]."""
    return bits.pack(matrix.mT).mT.contiguous()


def check_products(x: Tensor, weights: Tensor) -> None:
    """Compare products of bits with those of signs, by the CPU's method and by that of other devices."""
    rows, columns = bits.pack(x), packed_columns(weights)
    expected = torch.where(x, 1.0, -1.0) @ torch.where(weights, 1.0, -1.0)
    y = bit_product(rows, columns, x.shape[-1])
    assert y.dtype == torch.int32
    assert torch.equal(y.float(), expected)
    if y.numel():
        Product(y.zero_(), rows, columns.expand(len(rows), -1, -1), x.shape[-1]).write()
        assert torch.equal(y.float(), expected)


def test_products_are_exact_at_every_length_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unused bits of the last word do not matter, nor sizes of zero, sizes of pieces and memory layouts."""
    for room, widest, length in itertools.product((1, 7, 50), (1, 3), (0, 1, 65, 130)):
        with monkeypatch.context() as patch:
            patch.setitem(bits.CHUNK_WORDS, "cpu", room)
            patch.setattr(products, "MAX_COLUMNS", widest)
            for members, shared, sides in ((2, 2, (3, 5)), (3, 1, (5, 4)), (1, 1, (0, 2)), (0, 0, (2, 0))):
                x, weights = fair_bits(members, sides[0], length), fair_bits(shared, length, sides[1], seed=1)
                check_products(x, weights)
    for length in LENGTHS:
        check_products(fair_bits(3, 2, length), fair_bits(3, length, 5, seed=1))
        check_products(fair_bits(3, 70, length), fair_bits(1, length, 2, seed=1))
    check_products(fair_bits(3, 5, 70).transpose(0, 1), fair_bits(1, 70, 6, seed=1))
    x, weights = bits.pack(fair_bits(6, 4, 300)), packed_columns(fair_bits(3, 300, 8, seed=1))
    for rows, columns in (
        (x[::2, ::3], weights[:, :, 1::2]),
        (x[:3].mT.contiguous().mT, weights.mT.contiguous().mT),
        (x[:1].expand(3, 4, -1), weights),
        (x[:1, :1].expand(3, 9, -1), weights[:1].expand(3, -1, -1)),
    ):
        expected = bit_product(rows.contiguous(), columns.contiguous(), 300)
        assert torch.equal(bit_product(rows, columns, 300), expected)
    for rows, columns in ((x[:3], weights[:, :4]), (x[:2], weights), (x[:3, :, :4], weights[:, :4])):
        with pytest.raises(ValueError, match="a product of 300 bits takes"):
            bit_product(rows, columns, 300)


def test_long_rows_are_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums may exceed 16 bits, and a product 2^32 bits; rows may be split into pieces of words."""
    for length in (65472, 65536, 200_000):
        ones, zeros = torch.ones(1, 1, length, dtype=torch.bool), torch.zeros(1, length, 1, dtype=torch.bool)
        for room in (2**17, 100):
            monkeypatch.setitem(bits.CHUNK_WORDS, "cpu", room)
            assert bit_product(bits.pack(ones), packed_columns(zeros), length).item() == -length
            assert bit_product(bits.pack(ones), packed_columns(~zeros), length).item() == length
    monkeypatch.undo()
    # Operands expanded from one word in memory.
    total = bit_product(
        torch.tensor([[[5]]]).expand(2**14, 1, 1), torch.tensor([[[-1]]]).expand(2**14, 1, 2**12), 64
    )
    assert total.shape == (2**14, 1, 2**12)
    assert total.min() == total.max() == 64 - 2 * 62


METHODS = {"tables": 0, "unpacked": 2**16}
"""Value of ``TABLE_MIN_BITS`` for which sums are computed by each method."""


def test_weighted_sums_are_exact_at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are exact for any number of members, for pieces of any size, in the dtype of the weights."""
    monkeypatch.setattr(products, "TABLES", 2)
    for length, (method, min_bits), room in itertools.product(LENGTHS, METHODS.items(), (48, 2**19)):
        monkeypatch.setitem(products.TABLE_MIN_BITS, "cpu", min_bits)
        monkeypatch.setitem(bits.CHUNK_WORDS, "cpu", room)
        for members, dtype in itertools.product((0, 1, 15, 17, 40), (torch.float32, torch.float64)):
            on = fair_bits(members, 2, length, 3)
            weights = torch.arange(members, dtype=dtype) - 7
            total = weighted_sum(packed_columns(on), weights, length)
            assert total.dtype == dtype
            expected = torch.einsum("m,m...->...", weights, on.to(dtype))
            assert torch.equal(total, expected), (method, length, members)
    with pytest.raises(ValueError, match="129 bits"):
        weighted_sum(torch.zeros(4, 2, 1, dtype=torch.int64), torch.ones(4), 129)
    with pytest.raises(ValueError, match=r"got \[4, 2, 1\] and \[3\]"):
        weighted_sum(torch.zeros(4, 2, 1, dtype=torch.int64), torch.ones(3), 128)


def test_weighted_sums_keep_the_precision_of_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in float64 are summed in float64, narrower ones in float32."""
    on, weights = fair_bits(200, 70, 1), torch.randn(200, generator=torch.Generator().manual_seed(0)).double()
    expected = torch.einsum("m,m...->...", weights, on.double())
    for min_bits in METHODS.values():
        monkeypatch.setitem(products.TABLE_MIN_BITS, "cpu", min_bits)
        total = weighted_sum(packed_columns(on), weights, 70)
        torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-13)
        single = weighted_sum(packed_columns(on), weights.float(), 70)
        torch.testing.assert_close(single, expected.float(), rtol=1e-5, atol=1e-5)
        assert weighted_sum(packed_columns(on), weights.bfloat16(), 70).dtype == torch.float32


def test_more_than_two_to_the_31_bits_are_summed() -> None:
    """Members and words beyond the range of a 32-bit index are included."""
    words = torch.zeros(2**15 + 1, 1, 1, dtype=torch.int64).expand(-1, 2**11, 1)
    weights = torch.zeros(2**15 + 1)
    words[-1, 0] = -(2**63)
    weights[-1] = 3
    total = weighted_sum(words, weights, 2**17).view(-1, 64)
    assert total[:, 63].eq(3).all()
    assert not total[:, :63].any()
