"""The weighted sum of members' packed bits in Triton: what an update is made of."""

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
    out, words, weights, members, part, depth, width, length, rows, tiles,
    GROUP: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum ``part`` members' 32 bits of COLUMNS words: the grid is tiles times rows of words times parts."""
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles % rows
    slice_ = program // tiles // rows
    columns = (program % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    bit = tl.arange(0, 32)
    mask = (tl.full((32,), 1, tl.uint32) << bit.to(tl.uint32))[:, None]
    words += row * width + columns
    size = tl.cast(rows, tl.int64) * width
    sums = tl.zeros((32, COLUMNS), dtype=tl.float32)
    end = tl.minimum((slice_ + 1) * part, members)
    for first in range(slice_ * part, end, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            member = first + ahead
            weight = tl.load(weights + member, mask=member < end, other=0.0)
            word = load_words(words + member * size, inside & (member < end))
            sums = tl.where((word[None, :] & mask) != 0, sums + weight, sums)
    # A word of 64 bits is two columns here, and its high half belongs 32 bits further down.
    place = ((row % depth) * GROUP + columns % GROUP)[None, :] * 32 + bit[:, None]
    o = width // GROUP
    at = ((slice_ * (rows // depth) + row // depth) * length + place) * o + (columns // GROUP)[None, :]
    tl.store(out + at, sums, mask=inside[None, :] & (place < length))


def weighted_sum(words: Tensor, weights: Tensor, length: int) -> Tensor:
    """Sum bits by their members' weights, sum_m c_m bit_m: float32 [*taps, length, o].

    In float32 and in one order, without atomics: the same bits every time. For W words of 32 bits of a
    member:

    * bytes: 4 W for each member once, and 128 W written; once more for each part of the members, and read,
      where W is too small to fill a GPU.
    * operations: 32 W tests of a bit, and as many additions and selections, for each member.

    Args:
        words: [m, *taps, K, o] words of int32 or int64, o contiguous.
        weights: float32 [m].
        length: bits of a column that are wanted, of the 32 K or 64 K that there are.

    Raises:
        ValueError: shapes or types do not fit.

    """
    if weights.dtype != torch.float32 or weights.shape != words.shape[:1] or words.dim() < 3:  # noqa: PLR2004  m, K and o
        message = (
            "a weighted sum takes words [m, *taps, K, o] and float32 weights [m], got "
            f"{list(words.shape)} and {weights.dtype} {list(weights.shape)}"
        )
        raise ValueError(message)
    members, *taps, depth, outputs = words.shape
    group = GROUPS.get(words.dtype, 0)
    read = halves(words.contiguous(), "words")
    if length > 32 * group * depth:
        message = f"{depth} words of {32 * group} bits have no {length} bits"
        raise ValueError(message)
    width = outputs * group
    rows = read[0].numel() // max(1, width) if members else 0
    columns = tile(width, MOST_COLUMNS, 32)
    tiles = -(-width // columns)
    parts = max(1, min(ENOUGH_PROGRAMS // max(1, tiles * rows), members // FEWEST_MEMBERS))
    part = -(-members // parts)
    parts = -(-members // max(1, part))
    out = torch.empty(parts, *taps, length, outputs, device=words.device)
    if not out.numel():
        return out.sum(0)
    with torch.cuda.device_of(words):
        weighted_sum_kernel[programs(tiles, rows, parts)](
            out, read, weights.contiguous(), members, part, depth, width, length, rows, tiles,
            GROUP=group, AT_ONCE=AT_ONCE, COLUMNS=columns,
        )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)
