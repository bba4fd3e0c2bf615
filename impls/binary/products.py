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

from impls.binary.bits import (
    chunk_words,
    chunks,
    popcount_swar,
    unpack_bytes,
    unsigned,
    word_bits,
    word_count,
)
from impls.perturbation.philox import signs_of

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
        x: [..., p, K] words.
        weights: [..., K, o] words; leading axes broadcast.
        length: number of bits in the K words; the tails of both are zero.

    Returns:
        int32 [..., p, o].

    Raises:
        ValueError: words differ in their type or number, or hold fewer than ``length`` bits.

    """
    size, words = word_bits(x, weights), x.shape[-1]
    if weights.shape[-2] != words or words * size < length:
        message = (
            f"{length} bits in K words: got x {[*x.shape]} and weights {[*weights.shape]} of {size} bits"
        )
        raise ValueError(message)
    lead = torch.broadcast_shapes(x.shape[:-2], weights.shape[:-2])
    out = torch.empty(*lead, x.shape[-2], weights.shape[-1], dtype=torch.int32, device=x.device)
    if not out.is_meta and out.numel():
        # At least one leading axis, for ``_write``.
        axes = (*(lead or (1,)), -1, -1)
        _write(out.view(*axes[:-2], *out.shape[-2:]), x.expand(axes), weights.expand(axes), length)
    return out


def _write(out: Tensor, x: Tensor, weights: Tensor, length: int) -> None:
    """Write products [*lead, p, o]; leading axes are joined where that needs no copy."""
    while out.dim() > 3:  # noqa: PLR2004  one leading axis and a matrix's two
        if not all(_joinable(one) for one in (out, x, weights)):
            for parts in zip(out, x, weights, strict=True):
                _write(*parts, length)
            return
        out, x, weights = (one.flatten(0, 1) for one in (out, x, weights))
    if _shared(weights) and _joinable(x):
        out, x, weights = (one.flatten(0, 1).unsqueeze(0) for one in (out, x, weights[:1]))
    if out.shape[2] < SHORT and out.shape[1] > out.shape[2]:
        # Inner loops run along rows if there are few columns.
        columns = (x[:1] if _shared(x) else x).mT.contiguous().expand(len(x), -1, -1)
        out, x, weights = out.mT, weights.mT, columns
    task = Product(out, x, weights, length)
    if out.device.type == "cpu":
        task.write_on_cpu()
    else:
        task.write()


def _shared(tensor: Tensor) -> bool:
    return len(tensor) == 1 or tensor.stride(0) == 0


def _joinable(tensor: Tensor) -> bool:
    return 1 in tensor.shape[:2] or tensor.stride(0) == tensor.stride(1) * tensor.shape[1]


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

    def sizes(self) -> tuple[int, int, int, int]:
        """Return how many members, rows, words and columns a piece has; columns are split last."""
        left = chunk_words(self.out.device)
        members, rows, columns = self.out.shape
        across = min(columns, MAX_COLUMNS)
        deep = max(1, min(self.x.shape[2], left // across))
        down = max(1, min(rows, left // (across * deep)))
        return max(1, min(members, left // (across * deep * down))), down, deep, across

    def pieces(self) -> Iterator["Product"]:
        """Yield pieces that together are all products."""
        members, rows, _, columns = self.sizes()
        whole = (self.out, self.x, self.weights)
        for out, x, weights in zip(*(one.split(members) for one in whole), strict=True):
            for across, row in zip(out.split(rows, 1), x.split(rows, 1), strict=True):
                for one, column in zip(across.split(columns, 2), weights.split(columns, 2), strict=True):
                    yield Product(one, row, column, self.length)

    def operands(self, words: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows [m, p, words, 1] and columns [m, 1, words, o] of at most ``words`` words."""
        return zip(
            self.x.unsqueeze(3).split(words, 2), self.weights.unsqueeze(1).split(words, 2), strict=True
        )

    def write(self) -> None:
        """Write the products in plain torch."""
        words = self.sizes()[2]
        for piece in self.pieces():
            piece.out.fill_(self.length)
            for rows, columns in piece.operands(words):
                piece.out.sub_(popcount_swar(rows ^ columns).sum(2), alpha=2)

    def write_on_cpu(self) -> None:
        """Write the products by numpy, in temporary memory that all pieces share."""
        sizes = self.sizes()
        differing = torch.empty(sizes, dtype=self.x.dtype)
        counts = np.empty(sizes, np.uint8)
        # The narrowest type that fits: most of the time of a sum of bytes goes into widening.
        narrow = np.uint16 if self.x.shape[2] * word_bits(self.x) < 2**16 else np.uint32
        for piece in self.pieces():
            out, left = piece.out.numpy(), np.asarray(self.length, np.int32)
            for rows, columns in piece.operands(sizes[2]):
                at = tuple(map(slice, (len(out), out.shape[1], rows.shape[2], out.shape[2])))
                words = torch.bitwise_xor(rows, columns, out=differing[at])
                np.bitwise_count(unsigned(words), out=counts[at])
                count = np.add.reduce(counts[at], axis=2, dtype=narrow)
                left = np.subtract(left, np.multiply(count, 2, dtype=np.int32, casting="unsafe"), out=out)


def weighted_sum(words: Tensor, weights: Tensor, length: int, axis: int = -1) -> Tensor:
    """Sum weights[m] * bit over members, for the gradient estimate.

    Args:
        words: [m, *shape].
        weights: [m].
        length: number of bits along ``axis``.
        axis: the axis of ``words`` along which bits are packed; not the first one.

    Returns:
        The sums, of ``shape`` with ``length`` bits in place of words: float64 if the weights are, else
        float32.

    Raises:
        ValueError: shapes do not fit together.

    """
    size, at = word_bits(words), axis % words.dim()
    if not at or weights.shape != words.shape[:1] or words.shape[at] != word_count(length, words.dtype):
        message = (
            f"{length} bits along axis {axis} and {[*weights.shape]} weights: words are {[*words.shape]}"
        )
        raise ValueError(message)
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    shape, each = words.shape[1:], (size // GROUP, GROUP)
    if words.is_meta or not words.numel():
        summed = torch.zeros(*shape, *each, dtype=dtype, device=words.device)
    elif shape.numel() * size < TABLE_MIN_BITS.get(words.device.type, TABLE_MIN_BITS["cuda"]):
        summed = _sum_unpacked(words.flatten(1), weights.to(dtype)).view(*shape, *each)
    else:
        summed = _sum_by_tables(words, weights.to(dtype)).view(GROUP, *shape, each[0]).movedim(0, -1)
    # Join word, lane and bit into one axis.
    return summed.movedim((-2, -1), (at, at + 1)).flatten(at - 1, at + 1).narrow(at - 1, 0, length)


def _sum_unpacked(words: Tensor, weights: Tensor) -> Tensor:
    """Sum weighted bits of words [m, words] by unpacking them: [bits]."""
    sums = weights.new_zeros(words.shape[1] * word_bits(words))
    for start, stop in chunks(len(words), len(sums), words.device):
        part = words[start:stop].clone(memory_format=torch.contiguous_format)
        on = unpack_bytes(part) if part.device.type == "cpu" else signs_of(part) > 0
        sums.addmv_(on.to(sums.dtype).T, weights[start:stop])
    return sums


def _sum_by_tables(words: Tensor, weights: Tensor) -> Tensor:
    """Sum weighted bits of words [m, *shape] by tables: [16, 16-bit lanes], row r is bit r of every lane.

    The bits of sixteen members are transposed within words, so that 16 bits of one place are adjacent: they
    are the index of the sum of their weights in a table of all 2^16 sums.
    """
    lanes = word_bits(words) // GROUP
    sums = weights.new_zeros(GROUP, words[0].numel() * lanes)
    across = max(1, chunk_words(words.device) // GROUP)
    for some, own in zip(words.split(TABLES * GROUP), weights.split(TABLES * GROUP), strict=True):
        groups = [rows.flatten(1) for rows in some.split(GROUP)]
        tables = _tables(own)
        for start in range(0, words[0].numel(), across):
            found = sums[:, start * lanes : (start + across) * lanes]
            # Shared by all groups: allocating it costs more than what is computed in it.
            work = words.new_empty(GROUP + GROUP // 2, found.shape[1] // lanes)
            index = torch.empty(found.shape[1], dtype=torch.int64, device=words.device)
            looked_up = torch.empty_like(index, dtype=sums.dtype)
            for rows, table in zip(groups, tables, strict=True):
                indices = _transposed(rows[:, start : start + across], work).view(torch.uint16)
                for row, places in zip(found, indices, strict=True):
                    row.add_(torch.index_select(table, 0, index.copy_(places), out=looked_up))
    return sums


def _tables(weights: Tensor) -> Tensor:
    """Sum every subset of each sixteen weights: [m] -> [groups, 2^16]; bit i of an index is member i's."""
    halves = functional.pad(weights, (0, -len(weights) % GROUP)).view(-1, 2, GROUP // 2, 1)
    sums = halves.new_zeros(len(halves), 2, 1)
    for member in halves.unbind(2):
        sums = torch.cat([sums, sums + member], -1)
    return (sums[:, 1].unsqueeze(2) + sums[:, 0].unsqueeze(1)).flatten(1)


def _transposed(rows: Tensor, work: Tensor) -> Tensor:
    """Transpose 16 x 16 bits: of up to 16 rows of words, bit i of a lane in row r is bit r of it in row i.

    Args:
        rows: [rows, words].
        work: temporary memory of 24 such rows; the first 16 become the result.

    """
    words, swap = work[:GROUP], work[GROUP:]
    # Rows of missing members may hold anything: their weights in the table are zero.
    words[: len(rows)] = rows
    lane = 0x0001000100010001 if rows.dtype == torch.int64 else 0x00010001
    for shift, mask in ((8, 0x00FF), (4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        low, high = words.view(-1, 2, shift, rows.shape[1]).unbind(1)
        swapped = swap.view(low.shape)
        torch.bitwise_right_shift(low, shift, out=swapped).bitwise_xor_(high).bitwise_and_(mask * lane)
        high.bitwise_xor_(swapped)
        low.bitwise_xor_(swapped.bitwise_left_shift_(shift))
    return words
