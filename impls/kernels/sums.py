"""The weighted sum of members' packed bits in Triton: what an update is made of."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.words import GROUPS, halves, load_words, programs, tile

ENOUGH_PROGRAMS = 512
"""A sum is split over members until it has about this many programs: a few for each processor of a GPU."""

FEWEST_MEMBERS = 64
"""What a part of a split sum has at least."""

MOST_COLUMNS = 128
"""Columns in a tile: with 128 threads, 32 sums in the registers of each."""

AT_ONCE = 4
"""Members whose words are loaded at once."""


@triton.jit
def weighted_sum_kernel(
    out, words, weights, centre, members, part, depth, width, length, rows, tiles, taps,
    out_part, out_lead, out_tap, out_bit, out_column,
    CENTRED: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum ``part`` members' 32 bits of COLUMNS words: the grid is tiles times rows of words times parts.

    With CENTRED every member's bits are counted from ``centre``, which lies as a part of ``out`` does.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles % rows
    slice_ = program // tiles // rows
    columns = (program % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    bit = tl.arange(0, 32)
    mask = (tl.full((32,), 1, tl.uint32) << bit.to(tl.uint32))[:, None]
    words += row * width + columns
    size = tl.cast(rows, tl.int64) * width
    sums = tl.zeros((32, COLUMNS), dtype=out.dtype.element_ty)
    whole = tl.zeros((), dtype=out.dtype.element_ty)
    end = tl.minimum((slice_ + 1) * part, members)
    for first in range(slice_ * part, end, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            member = first + ahead
            weight = tl.load(weights + member, mask=member < end, other=0.0)
            word = load_words(words + member * size, inside & (member < end))
            sums = tl.where((word[None, :] & mask) != 0, sums + weight, sums)
            whole += weight
    # A word of 64 bits is two columns here, and its high half belongs 32 bits further down.
    lead, tap = row // depth // taps, row // depth % taps
    first = ((row % depth) * GROUP + columns % GROUP) * 32
    at = lead * out_lead + tap * out_tap + first * out_bit + columns // GROUP * out_column
    at = at[None, :] + (bit.to(tl.int64) * out_bit)[:, None]
    left = tl.where(inside, length - first, 0)
    edge = bit[:, None] < tl.minimum(left, 32).to(tl.int32)[None, :]
    if CENTRED:
        sums -= whole * tl.load(centre + at, mask=edge, other=0.0).to(sums.dtype)
    tl.store(out + slice_ * out_part + at, sums, mask=edge)


class Sum(NamedTuple):
    """A sum over members' words, as a kernel takes it.

    Attributes:
        words: [m, *lead, K, o], halves of words.
        weights: [m].
        group: halves in a word.
        length: bits of a column that are wanted.
        taps: how many of the rows of words lie side by side in the result.

    """

    words: Tensor
    weights: Tensor
    group: int
    length: int
    taps: int

    def launch(self, shape: tuple[int, ...], strides: tuple[int, ...], centre: Tensor | None) -> Tensor:
        """Sum up: a contiguous result of this shape, of the type of the weights.

        Args:
            shape: of the result.
            strides: in it, of the axes before the taps, the taps, bits and columns.
            centre: what bits are counted from, laid out as the result.

        """
        members, depth, width = len(self.words), *self.words.shape[-2:]
        rows = self.words[0].numel() // max(1, width) if members else 0
        columns = tile(width, MOST_COLUMNS, 32)
        tiles = -(-width // columns)
        parts = max(1, min(ENOUGH_PROGRAMS // max(1, tiles * rows), members // FEWEST_MEMBERS))
        part = -(-members // parts)
        parts = -(-members // max(1, part))
        out = torch.empty(parts, *shape, device=self.words.device, dtype=self.weights.dtype)
        if not out.numel():
            return out.sum(0)
        with torch.cuda.device_of(self.words):
            weighted_sum_kernel[programs(tiles, rows, parts)](
                out, self.words, self.weights, self.weights if centre is None else centre,
                members, part, depth, width, self.length, rows, tiles, self.taps, out.stride(0), *strides,
                CENTRED=centre is not None, GROUP=self.group, AT_ONCE=AT_ONCE, COLUMNS=columns,
            )  # fmt: skip
        return out[0] if parts == 1 else out.sum(0)


def weighted_sum(words: Tensor, weights: Tensor, length: int) -> Tensor:
    """Sum bits by their members' weights, sum_m c_m bit_m: [*taps, length, o], of the type of the weights.

    In one order, without atomics: the same bits every time. For W words of 32 bits of a member:

    * bytes: 4 W for each member once, and 128 W written; once more for each part of the members, and read,
      where W is too small to fill a GPU. Numbers are of 4 bytes, in float64 of 8.
    * operations: 32 W tests of a bit, and as many additions and selections, for each member.

    Args:
        words: [m, *taps, K, o] words of int32 or int64, o contiguous.
        weights: [m] of float32 or float64.
        length: bits of a column that are wanted, of the 32 K or 64 K that there are.

    Raises:
        ValueError: shapes or types do not fit.

    """
    _check(words, weights, length)
    *taps, outputs = *words.shape[1:-2], words.shape[-1]
    strides = (length * outputs, 0, outputs, 1)
    return _sum_of(words, weights, length, 1).launch((*taps, length, outputs), strides, None)


def centred_sum(words: Tensor, weights: Tensor, p: Tensor) -> Tensor:
    """Sum what members' bits are above their mean, sum_m c_m (bit_m - P): what an update is made of.

    As :func:`weighted_sum`, and P is subtracted before the sums are written, so that no pass follows. For W
    words of 32 bits of a member P has 32 W numbers, which are read, and so many are written. For 1024 members
    with a weight of 1024 x 1024 that is 142 MB, 33 us at an H200's 4.3 TB/s, and 2.1e9 operations, 73 us at
    2.9e13 a second: it is bound by these, and has two parts, whose sum is 3 us more.

    Args:
        words: [m, g, *taps, K, o] words of int32 or int64.
        weights: [m] of float32 or float64.
        p: the means of bits, [g, o, i, *taps], in any floating type.

    Returns:
        The sums, [g, o, i, *taps] of the type of the weights.

    Raises:
        ValueError: shapes or types do not fit.

    """
    groups, outputs, length, *taps = p.shape
    _check(words, weights, length)
    if (groups, *taps, outputs) != (*words.shape[1:-2], words.shape[-1]):
        message = f"means must be [g, o, i, *taps] of words [m, g, *taps, K, o], got {list(p.shape)}"
        raise ValueError(message)
    count = math.prod(taps)
    strides = (outputs * length * count, 1, count, length * count)
    return _sum_of(words, weights, length, count).launch((*p.shape,), strides, p.contiguous())


def _check(words: Tensor, weights: Tensor, length: int) -> None:
    """Hold words [m, *lead, K, o], weights [m] and a number of bits to each other.

    Raises:
        ValueError: they do not fit.

    """
    is_known = weights.dtype in {torch.float32, torch.float64} and words.dtype in GROUPS
    if not is_known or weights.shape != words.shape[:1] or words.dim() < 3:  # noqa: PLR2004  m, K and o
        message = (
            "a weighted sum takes words [m, *taps, K, o] and weights [m] of float32 or float64, got "
            f"{list(words.shape)} and {weights.dtype} {list(weights.shape)}"
        )
        raise ValueError(message)
    size = 32 * GROUPS[words.dtype]
    if length > size * words.shape[-2]:
        message = f"{words.shape[-2]} words of {size} bits have no {length} bits"
        raise ValueError(message)


def _sum_of(words: Tensor, weights: Tensor, length: int, taps: int) -> Sum:
    """Look at words and weights."""
    return Sum(halves(words.contiguous(), "words"), weights.contiguous(), GROUPS[words.dtype], length, taps)
