"""Sums over bits of packed words: products of +1 and -1, and weighted sums over members.

A product of p rows and o columns counts the bits in which they differ. On a CPU that goes piece by piece, in
memory that stays in a core's cache: torch's exclusive or, numpy's count, a sum over words in narrow integers.
Inner loops run along columns, so the longer of p and o becomes that axis. Weights that all members share are
read once for many rows.

A weighted sum of large weights looks sixteen members' bits up at once, in a table of sums of their weights.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from impls.binary.words import array, count, pieces, room, size_of, swar, unpacked
from impls.perturbation.philox import signs_of

COLUMNS = 4096
"""The widest piece of a product."""

GROUP = 16
"""Members whose bits are looked up together."""

FEW = {"cpu": 2**16, "cuda": 2**13}
"""Bits of a member below which it is faster to write them out than to make tables."""

TABLES = 64
"""Tables that are kept at a time."""

SHORT, MATRIX = 48, 2
"""Columns that are too few for an inner loop, where there are more rows; axes of a matrix."""


def products(x: Tensor, weights: Tensor, length: int) -> Tensor:
    """Multiply rows of bits by columns of bits, +1 or -1 each: length - 2 popcount(x xor w), summed over K.

    Args:
        x: [..., p, K] words.
        weights: [..., K, o] words; leading axes broadcast.
        length: the bits that count, of those in K words: tails of both are zero.

    Returns:
        int32 [..., p, o].

    Raises:
        ValueError: words differ in their type or number, or hold fewer bits than ``length``.

    """
    size, words = size_of(x, weights), x.shape[-1]
    if weights.shape[-2] != words or words * size < length:
        message = (
            f"{length} bits in K words: got x {[*x.shape]} and weights {[*weights.shape]} of {size} bits"
        )
        raise ValueError(message)
    lead = torch.broadcast_shapes(x.shape[:-2], weights.shape[:-2])
    out = torch.empty(*lead, x.shape[-2], weights.shape[-1], dtype=torch.int32, device=x.device)
    if not out.is_meta and out.numel():
        # An axis in front, so that there is one to walk along.
        axes = (*(lead or (1,)), -1, -1)
        _write(out.view(*axes[:-2], *out.shape[-2:]), x.expand(axes), weights.expand(axes), length)
    return out


def _write(out: Tensor, x: Tensor, weights: Tensor, length: int) -> None:
    """Write products [*lead, p, o], their leading axes joined as far as that copies nothing."""
    while out.dim() > 1 + MATRIX:
        if not all(_joinable(of) for of in (out, x, weights)):
            for parts in zip(out, x, weights, strict=True):
                _write(*parts, length)
            return
        out, x, weights = (of.flatten(0, 1) for of in (out, x, weights))
    if _shared(weights) and _joinable(x):
        out, x, weights = (of.flatten(0, 1).unsqueeze(0) for of in (out, x, weights[:1]))
    if out.shape[2] < SHORT and out.shape[1] > out.shape[2]:
        # Inner loops are long: along rows, where outputs are few.
        columns = (x[:1] if _shared(x) else x).mT.contiguous().expand(len(x), -1, -1)
        out, x, weights = out.mT, weights.mT, columns
    task = Product(out, x, weights, length)
    if out.device.type == "cpu":
        task.write_on_cpu()
    else:
        task.write()


def _shared(of: Tensor) -> bool:
    return len(of) == 1 or of.stride(0) == 0


def _joinable(of: Tensor) -> bool:
    return 1 in of.shape[:2] or of.stride(0) == of.stride(1) * of.shape[1]


class Product(NamedTuple):
    """Products to be written, piece by piece.

    Attributes:
        out: int32 [m, p, o].
        x: words [m, p, K].
        weights: words [m, K, o].
        length: bits that count.

    """

    out: Tensor
    x: Tensor
    weights: Tensor
    length: int

    def sizes(self) -> tuple[int, int, int, int]:
        """Return how many members, rows, words and columns fit in a piece: first columns, members last."""
        left = room(self.out.device)
        members, rows, columns = self.out.shape
        across = min(columns, COLUMNS)
        deep = max(1, min(self.x.shape[2], left // across))
        down = max(1, min(rows, left // (across * deep)))
        return max(1, min(members, left // (across * deep * down))), down, deep, across

    def pieces(self) -> Iterator["Product"]:
        """Cut everything up."""
        members, rows, _, columns = self.sizes()
        whole = (self.out, self.x, self.weights)
        for out, x, weights in zip(*(of.split(members) for of in whole), strict=True):
            for across, row in zip(out.split(rows, 1), x.split(rows, 1), strict=True):
                for one, column in zip(across.split(columns, 2), weights.split(columns, 2), strict=True):
                    yield Product(one, row, column, self.length)

    def operands(self, words: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut rows [m, p, words, 1] and columns [m, 1, words, o], so many words at a time."""
        return zip(
            self.x.unsqueeze(3).split(words, 2), self.weights.unsqueeze(1).split(words, 2), strict=True
        )

    def write(self) -> None:
        """Write everything in plain torch."""
        words = self.sizes()[2]
        for piece in self.pieces():
            piece.out.fill_(self.length)
            for rows, columns in piece.operands(words):
                piece.out.sub_(swar(rows ^ columns).sum(2), alpha=2)

    def write_on_cpu(self) -> None:
        """Write everything by way of numpy, in memory that all pieces use."""
        sizes = self.sizes()
        met = torch.empty(sizes, dtype=self.x.dtype)
        counts = np.empty(sizes, np.uint8)
        # Sums of bytes are as narrow as they can be: widening is what they cost.
        narrow = np.uint16 if self.x.shape[2] * size_of(self.x) < 2**16 else np.uint32
        for piece in self.pieces():
            out, left = piece.out.numpy(), np.asarray(self.length, np.int32)
            for rows, columns in piece.operands(sizes[2]):
                at = tuple(map(slice, (len(out), out.shape[1], rows.shape[2], out.shape[2])))
                words = torch.bitwise_xor(rows, columns, out=met[at])
                np.bitwise_count(array(words), out=counts[at])
                differ = np.add.reduce(counts[at], axis=2, dtype=narrow)
                left = np.subtract(left, np.multiply(differ, 2, dtype=np.int32, casting="unsafe"), out=out)


def weighted_sum(words: Tensor, weights: Tensor, length: int, axis: int = -1) -> Tensor:
    """Sum weights[m] * bit over members: what their gradient is made of.

    Args:
        words: [m, *shape].
        weights: [m].
        length: bits along the axis of words.
        axis: the axis of ``words`` along which bits are packed, not the members' own.

    Returns:
        The sums in float32, in float64 where weights are: of ``shape`` with ``length`` in the place of words.

    Raises:
        ValueError: shapes do not fit together.

    """
    size, at = size_of(words), axis % words.dim()
    if not at or weights.shape != words.shape[:1] or words.shape[at] != count(length, words.dtype):
        message = (
            f"{length} bits along axis {axis} and {[*weights.shape]} weights: words are {[*words.shape]}"
        )
        raise ValueError(message)
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    shape, each = words.shape[1:], (size // GROUP, GROUP)
    if words.is_meta or not words.numel():
        summed = torch.zeros(*shape, *each, dtype=dtype, device=words.device)
    elif shape.numel() * size < FEW.get(words.device.type, FEW["cuda"]):
        summed = _summed_plainly(words.flatten(1), weights.to(dtype)).view(*shape, *each)
    else:
        summed = _summed(words, weights.to(dtype)).view(GROUP, *shape, each[0]).movedim(0, -1)
    # Word, lane and bit become one axis.
    return summed.movedim((-2, -1), (at, at + 1)).flatten(at - 1, at + 1).narrow(at - 1, 0, length)


def _summed_plainly(words: Tensor, weights: Tensor) -> Tensor:
    """Sum weighted bits of words [m, words] that are written out: [bits]."""
    sums = weights.new_zeros(words.shape[1] * size_of(words))
    for start, stop in pieces(len(words), len(sums), words.device):
        part = words[start:stop].clone(memory_format=torch.contiguous_format)
        on = unpacked(part) if part.device.type == "cpu" else signs_of(part) > 0
        sums.addmv_(on.to(sums.dtype).T, weights[start:stop])
    return sums


def _summed(words: Tensor, weights: Tensor) -> Tensor:
    """Sum weighted bits of words [m, *shape] by tables: [16, 16-bit lanes], row r is bit r of every lane.

    Sixteen members are transposed within words, so that 16 bits of one place lie side by side: they look the
    sum of their weights up in a table of all 2^16.
    """
    lanes = size_of(words) // GROUP
    sums = weights.new_zeros(GROUP, words[0].numel() * lanes)
    across = max(1, room(words.device) // GROUP)
    for some, of in zip(words.split(TABLES * GROUP), weights.split(TABLES * GROUP), strict=True):
        groups = [rows.flatten(1) for rows in some.split(GROUP)]
        tables = _tables(of)
        for start in range(0, words[0].numel(), across):
            found = sums[:, start * lanes : (start + across) * lanes]
            # Memory that all groups use: asking for it again costs more than what is done in it.
            work = words.new_empty(GROUP + GROUP // 2, found.shape[1] // lanes)
            index = torch.empty(found.shape[1], dtype=torch.int64, device=words.device)
            looked_up = torch.empty_like(index, dtype=sums.dtype)
            for rows, table in zip(groups, tables, strict=True):
                indices = _transposed(rows[:, start : start + across], work).view(torch.uint16)
                for row, places in zip(found, indices, strict=True):
                    row.add_(torch.index_select(table, 0, index.copy_(places), out=looked_up))
    return sums


def _tables(weights: Tensor) -> Tensor:
    """Sum every subset of sixteen weights: [m] -> [groups, 2^16], where bit i of an index is member i's."""
    halves = functional.pad(weights, (0, -len(weights) % GROUP)).view(-1, 2, GROUP // 2, 1)
    sums = halves.new_zeros(len(halves), 2, 1)
    for member in halves.unbind(2):
        sums = torch.cat([sums, sums + member], -1)
    return (sums[:, 1].unsqueeze(2) + sums[:, 0].unsqueeze(1)).flatten(1)


def _transposed(rows: Tensor, work: Tensor) -> Tensor:
    """Transpose 16 x 16 bits: of up to 16 rows of words, bit i of a lane in row r is bit r of it in row i.

    Args:
        rows: [rows, words].
        work: memory of 24 such rows, the first 16 of which become the result.

    """
    words, swap = work[:GROUP], work[GROUP:]
    # What stands in the rows of members that are missing is found in a table where their weights are zero.
    words[: len(rows)] = rows
    lane = 0x0001000100010001 if rows.dtype == torch.int64 else 0x00010001
    for shift, mask in ((8, 0x00FF), (4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        low, high = words.view(-1, 2, shift, rows.shape[1]).unbind(1)
        swapped = swap.view(low.shape)
        torch.bitwise_right_shift(low, shift, out=swapped).bitwise_xor_(high).bitwise_and_(mask * lane)
        high.bitwise_xor_(swapped)
        low.bitwise_xor_(swapped.bitwise_left_shift_(shift))
    return words
