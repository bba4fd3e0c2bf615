"""Sums over bits of packed words: products of +1 and -1, and weighted sums over members.

A product of p rows and o columns counts the bits in which they differ. On a CPU that goes piece by piece, in
memory that stays in a core's cache: torch's exclusive or, numpy's count, a sum over words in narrow integers.
Inner loops run along columns, so the longer of p and o becomes that axis. Weights that all members share are
read once for many rows.

A weighted sum looks sixteen members' bits up at once, in a table of all sums of their weights.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from impls.words import array, count, room, size_of, swar

PARALLEL = 2**21
"""Words from which on threads are worth being started."""

COLUMNS = 4096
"""The widest piece of a product."""

GROUP = 16
"""Members whose bits are looked up together."""

MATRIX = 2
"""Axes of a matrix."""

Start = tuple[int, int, int]


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
    if out.shape[1] > out.shape[2]:
        # Inner loops are long: along positions, where there are more of them than of outputs.
        columns = (x[:1] if _shared(x) else x).mT.contiguous().expand(len(x), -1, -1)
        out, x, weights = out.mT, weights.mT, columns
    task = Product(out, x, weights, length)
    if out.device.type == "cpu":
        _in_threads(task)
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

    def starts(self) -> list[Start]:
        """Return where pieces begin: member, row and column."""
        members, rows, _, columns = self.sizes()
        m, p, o = self.out.shape
        return list(product(range(0, m, members), range(0, p, rows), range(0, o, columns)))

    def piece(self, start: Start) -> "Product":
        """Cut a piece out."""
        members, rows, _, columns = self.sizes()
        m, p, o = (slice(at, at + size) for at, size in zip(start, (members, rows, columns), strict=True))
        return Product(self.out[m, p, o], self.x[m, p], self.weights[m, :, o], self.length)

    def operands(self, words: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut rows [m, p, words, 1] and columns [m, 1, words, o], so many words at a time."""
        for k in range(0, self.x.shape[2], words):
            yield self.x[:, :, k : k + words, None], self.weights[:, None, k : k + words]

    def write(self) -> None:
        """Write everything in plain torch."""
        words = self.sizes()[2]
        for start in self.starts():
            piece = self.piece(start)
            piece.out.fill_(self.length)
            for rows, columns in piece.operands(words):
                piece.out.sub_(swar(rows ^ columns).sum(2), alpha=2)

    def write_on_cpu(self, starts: list[Start]) -> None:
        """Write some pieces, in memory that all of them use."""
        sizes = self.sizes()
        met = torch.empty(sizes, dtype=self.x.dtype)
        counts = np.empty(sizes, np.uint8)
        # Sums of bytes are as narrow as they can be: widening is what they cost.
        narrow = np.uint16 if self.x.shape[2] * size_of(self.x) < 2**16 else np.uint32
        for start in starts:
            piece = self.piece(start)
            out = piece.out.numpy()
            out.fill(self.length)
            for rows, columns in piece.operands(sizes[2]):
                at = tuple(map(slice, (len(out), out.shape[1], rows.shape[2], out.shape[2])))
                words = torch.bitwise_xor(rows, columns, out=met[at])
                np.bitwise_count(array(words), out=counts[at])
                differ = np.add.reduce(counts[at], axis=2, dtype=narrow)
                out -= np.multiply(differ, 2, dtype=np.int32, casting="unsafe")


def _in_threads(task: Product) -> None:
    """Write everything, pieces in as many threads as torch has: numpy and torch let each other run."""
    starts = task.starts()
    threads = torch.get_num_threads() if task.out.numel() * task.x.shape[2] >= PARALLEL else 1
    if threads == 1:
        task.write_on_cpu(starts)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(task.write_on_cpu, (starts[thread::threads] for thread in range(threads))))


def weighted_sum(words: Tensor, weights: Tensor, length: int, axis: int = -1) -> Tensor:
    """Sum weights[m] * bit over members: what their gradient is made of.

    Sixteen members are transposed within words, so that 16 bits of one place lie side by side: they look the
    sum of their weights up in a table of all 2^16.

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
    shape, lanes = words.shape[1:], size // GROUP
    sums = torch.zeros(GROUP, shape.numel() * lanes, dtype=dtype, device=words.device)
    if not sums.is_meta and sums.numel():
        _add_groups(sums, words, weights.to(dtype))
    order = [*range(1, at + 1), len(shape) + 1, 0, *range(at + 1, len(shape) + 1)]
    summed = sums.view(GROUP, *shape, lanes).permute(order).flatten(at - 1, at + 1)
    return summed.narrow(at - 1, 0, length)


def _add_groups(sums: Tensor, words: Tensor, weights: Tensor) -> None:
    """Add weighted bits to sums [16, 16-bit lanes]: row r is bit r of a lane."""
    weights = functional.pad(weights, (0, -len(weights) % GROUP)).view(-1, 2, GROUP // 2, 1)
    halves = weights.new_zeros(len(weights), 2, 1)
    for bit in weights.unbind(2):
        halves = torch.cat([halves, halves + bit], -1)
    per = size_of(words) // GROUP
    across = room(words.device) // GROUP
    for group, (low, high) in enumerate(halves):
        table = (high.unsqueeze(1) + low).flatten()
        rows = words[group * GROUP : (group + 1) * GROUP].flatten(1)
        for start in range(0, rows.shape[1], across):
            lanes = _transposed(rows[:, start : start + across]).view(torch.int16)
            first = start * per
            for row, lane in zip(sums[:, first : first + lanes.shape[1]], lanes, strict=True):
                row.add_(table.index_select(0, lane.long().bitwise_and_(0xFFFF)))


def _transposed(rows: Tensor) -> Tensor:
    """Transpose 16 x 16 bits: of up to 16 rows of words, bit i of a lane in row r is bit r of it in row i."""
    words = rows.new_zeros(GROUP, rows.shape[1])
    words[: len(rows)] = rows
    lane = 0x0001000100010001 if rows.dtype == torch.int64 else 0x00010001
    for shift, mask in ((8, 0x00FF), (4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        low, high = words.view(-1, 2, shift, rows.shape[1]).unbind(1)
        swap = (low >> shift).bitwise_xor_(high).bitwise_and_(mask * lane)
        high.bitwise_xor_(swap)
        low.bitwise_xor_(swap.bitwise_left_shift_(shift))
    return words
