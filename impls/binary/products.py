"""Products of packed bits (+1 and -1), and utility-weighted sums over members.

A product of p rows and o columns counts the bits in which they differ. On a CPU this is done in pieces that
stay in a core's cache: torch's exclusive or, numpy's bit count, a sum over words in narrow integers. Inner
loops run along the longer of p and o, and weights that all members share are read once for many rows.

A weighted sum of large weights looks up sixteen members' bits at once, in a table of the sums of their
weights.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from impls.binary.bits import WORD_BITS, chunk_words, chunks, popcount, unpack, word_count

MAX_COLUMNS = 4096
"""Most columns of a piece of a product."""

GROUP = 16
"""Members whose bits are looked up at once."""

TABLE_MIN_BITS = {"cpu": 2**16, "cuda": 2**13}
"""Bits of a member from which tables are faster than unpacking."""

TABLES = 64
"""Tables that are kept at a time."""

SHORT = 48
"""Columns that are too few for an inner loop if there are more rows."""


def bit_product(x: Tensor, weights: Tensor, length: int) -> Tensor:
    """Multiply packed rows by packed columns of +1 and -1: length - 2 popcount(x xor w), summed over K.

    Args:
        x: [m, p, K] words.
        weights: [m, K, o] words, or [1, K, o] for all members.
        length: number of bits in the K words; the tails of both are zero.

    Returns:
        int32 [m, p, o].

    Raises:
        ValueError: the numbers of members or words differ, or the words hold fewer than ``length`` bits.
    """
    (members, rows, words), columns = x.shape, weights.shape[2]
    if len(weights) not in {1, members} or not weights.shape[1] == words >= word_count(length):
        raise ValueError(
            f"a product of {length} bits takes x [m, p, K] and weights [m or 1, K, o] with K of at least "
            f"{word_count(length)} words, got {[*x.shape]} and {[*weights.shape]}"
        )
    out = torch.empty(members, rows, columns, dtype=torch.int32, device=x.device)
    if out.is_meta or not out.numel():
        return out
    y, weights = out, weights.expand(members, -1, -1)
    if _is_shared(weights) and (1 in {members, rows} or x.stride(0) == x.stride(1) * rows):
        # One matrix of all members' rows.
        y, x, weights = y.flatten(0, 1)[None], x.flatten(0, 1)[None], weights[:1]
    if columns < SHORT and y.shape[1] > columns:
        # The transposed product: inner loops run along rows if there are few columns.
        transposed = (x[:1] if _is_shared(x) else x).mT.contiguous().expand(len(x), -1, -1)
        y, x, weights = y.mT, weights.mT, transposed
    product = Product(y, x, weights, length)
    if x.device.type == "cpu":
        product.write_on_cpu()
    else:
        product.write()
    return out


def _is_shared(tensor: Tensor) -> bool:
    """Return whether all members have the same values in memory."""
    return len(tensor) == 1 or tensor.stride(0) == 0


class Product(NamedTuple):
    """Operands of products, and where the products are written.

    Attributes:
        out: int32 [m, p, o].
        x: words [m, p, K].
        weights: words [m, K, o].
        length: number of bits in the K words.
    """

    out: Tensor
    x: Tensor
    weights: Tensor
    length: int

    def piece_sizes(self) -> tuple[int, int, int, int]:
        """Return the members, rows, words and columns of a piece; columns are split last."""
        room, (members, rows, columns) = chunk_words(self.out.device), self.out.shape
        columns = min(columns, MAX_COLUMNS)
        words = max(1, min(self.x.shape[2], room // columns))
        rows = max(1, min(rows, room // (columns * words)))
        members = max(1, min(members, room // (columns * words * rows)))
        return members, rows, words, columns

    def pieces(self) -> Iterator["Product"]:
        """Yield pieces that together are all products."""
        members, rows, _, columns = self.piece_sizes()
        operands = (self.out, self.x, self.weights)
        for out, x, weights in zip(*(operand.split(members) for operand in operands), strict=True):
            for out_rows, x_rows in zip(out.split(rows, 1), x.split(rows, 1), strict=True):
                for y, w in zip(out_rows.split(columns, 2), weights.split(columns, 2), strict=True):
                    yield Product(y, x_rows, w, self.length)

    def factors(self, words: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows [m, p, words, 1] and columns [m, 1, words, o] of at most ``words`` words."""
        return zip(
            self.x.unsqueeze(3).split(words, 2), self.weights.unsqueeze(1).split(words, 2), strict=True
        )

    def write(self) -> None:
        """Write the products in plain torch."""
        words = self.piece_sizes()[2]
        for piece in self.pieces():
            piece.out.fill_(self.length)
            for rows, columns in piece.factors(words):
                piece.out.sub_(popcount(rows ^ columns).sum(2), alpha=2)

    def write_on_cpu(self) -> None:
        """Write the products by numpy, in temporary memory that all pieces share."""
        sizes = self.piece_sizes()
        differing = torch.empty(sizes, dtype=torch.int64)
        counts = np.empty(sizes, np.uint8)
        # The narrowest dtype that fits: most of the time of a sum of bytes goes into widening.
        narrow = np.uint16 if self.x.shape[2] * WORD_BITS < 2**16 else np.uint32
        for piece in self.pieces():
            out, product = piece.out.numpy(), np.asarray(self.length, np.int32)
            for rows, columns in piece.factors(sizes[2]):
                # The last piece of an axis uses a part of the memory.
                used = tuple(map(slice, (len(out), out.shape[1], rows.shape[2], out.shape[2])))
                words = torch.bitwise_xor(rows, columns, out=differing[used])
                # Unsigned: of a signed integer numpy counts the bits of the magnitude.
                np.bitwise_count(words.numpy().view(np.uint64), out=counts[used])
                count = np.add.reduce(counts[used], axis=2, dtype=narrow)
                twice = np.multiply(count, 2, dtype=np.int32, casting="unsafe")
                product = np.subtract(product, twice, out=out)


def weighted_sum(words: Tensor, weights: Tensor, length: int) -> Tensor:
    """Sum weights[m] * bit over members, for the gradient estimate.

    Args:
        words: [m, *shape, K, o], with bits packed along K.
        weights: [m].
        length: number of bits in the K words.

    Returns:
        The sums [*shape, length, o]: float64 if the weights are, else float32.

    Raises:
        ValueError: shapes do not fit together.
    """
    if weights.shape != words.shape[:1] or words.shape[-2] != word_count(length):
        raise ValueError(
            f"a sum of {length} bits takes words [m, ..., {word_count(length)}, o] and weights [m], got "
            f"{[*words.shape]} and {[*weights.shape]}"
        )
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    shape, lanes = words.shape[1:], WORD_BITS // GROUP
    if words.is_meta or not words.numel():
        sums = torch.zeros(*shape, lanes, GROUP, dtype=dtype, device=words.device)
    elif shape.numel() * WORD_BITS < TABLE_MIN_BITS.get(words.device.type, TABLE_MIN_BITS["cuda"]):
        sums = _sum_unpacked(words.flatten(1), weights.to(dtype)).view(*shape, lanes, GROUP)
    else:
        sums = _sum_by_tables(words, weights.to(dtype)).view(GROUP, *shape, lanes).movedim(0, -1)
    # [*shape, K, o, lanes, bits of a lane] -> [*shape, length, o].
    return sums.movedim(-3, -1).flatten(-4, -2).narrow(-2, 0, length)


def _sum_unpacked(words: Tensor, weights: Tensor) -> Tensor:
    """Sum weighted bits of words [m, words] by unpacking them: [bits]."""
    sums = weights.new_zeros(words.shape[1] * WORD_BITS)
    for start, stop in chunks(len(words), len(sums), words.device):
        on = unpack(words[start:stop], len(sums)).view(torch.uint8)  # converted faster than bool
        sums.addmv_(on.to(sums.dtype).T, weights[start:stop])
    return sums


def _sum_by_tables(words: Tensor, weights: Tensor) -> Tensor:
    """Sum weighted bits of words [m, *shape] by tables: [16, 16-bit lanes], row r is bit r of every lane.

    The bits of sixteen members are transposed within words, so that 16 bits of one place are adjacent: they
    are the index of the sum of their weights in a table of all 2^16 sums.
    """
    lanes = WORD_BITS // GROUP
    sums = weights.new_zeros(GROUP, words[0].numel() * lanes)
    step = max(1, chunk_words(words.device) // GROUP)
    for members, member_weights in zip(
        words.split(TABLES * GROUP), weights.split(TABLES * GROUP), strict=True
    ):
        groups = [rows.flatten(1) for rows in members.split(GROUP)]
        tables = _subset_sums(member_weights)
        for start in range(0, words[0].numel(), step):
            part = sums[:, start * lanes : (start + step) * lanes]
            # Shared by all groups: allocating these costs more than the arithmetic in them.
            work = words.new_empty(GROUP + GROUP // 2, part.shape[1] // lanes)
            index = torch.empty(part.shape[1], dtype=torch.int64, device=words.device)
            subset_sums = torch.empty_like(index, dtype=sums.dtype)
            for rows, table in zip(groups, tables, strict=True):
                indices = _transpose_bits(rows[:, start : start + step], work).view(torch.uint16)
                for row, row_indices in zip(part, indices, strict=True):
                    row.add_(torch.index_select(table, 0, index.copy_(row_indices), out=subset_sums))
    return sums


def _subset_sums(weights: Tensor) -> Tensor:
    """Sum every subset of each sixteen weights: [m] -> [groups, 2^16]; bit i of an index is member i's."""
    # All subsets of each eight weights; then each of the upper eight's with each of the lower eight's.
    halves = functional.pad(weights, (0, -len(weights) % GROUP)).view(-1, 2, GROUP // 2, 1)
    sums = halves.new_zeros(len(halves), 2, 1)
    for member in halves.unbind(2):
        sums = torch.cat([sums, sums + member], -1)
    return (sums[:, 1].unsqueeze(2) + sums[:, 0].unsqueeze(1)).flatten(1)


def _transpose_bits(rows: Tensor, work: Tensor) -> Tensor:
    """Transpose 16 x 16 bits in each 16-bit lane: bit i of row r becomes bit r of row i.

    Args:
        rows: up to 16 rows, [rows, words].
        work: temporary memory of 24 such rows; the first 16 become the result.
    """
    words, swap = work[:GROUP], work[GROUP:]
    # Rows of missing members may hold anything: their weights in the table are zero.
    words[: len(rows)] = rows
    # Exchange blocks of 8 x 8 bits, then smaller ones in each of them.
    for shift, mask in ((8, 0x00FF), (4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        low, high = words.view(-1, 2, shift, rows.shape[1]).unbind(1)
        swapped = swap.view(low.shape)
        torch.bitwise_right_shift(low, shift, out=swapped).bitwise_xor_(high).bitwise_and_(
            mask * 0x0001000100010001
        )
        high.bitwise_xor_(swapped)
        low.bitwise_xor_(swapped.bitwise_left_shift_(shift))
    return words
