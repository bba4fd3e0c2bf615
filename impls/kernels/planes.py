"""Bit planes of probabilities in Triton: what bits are drawn by."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.words import GROUPS, programs, tile

MOST_COLUMNS = 64
"""Columns of words in a tile: with 128 threads, 16 probabilities in the registers of each."""

PLANES = 9
"""Planes of a probability in steps of 1/256: eight bits of a fraction from the lowest up, and always on."""


@triton.jit
def bit_planes_kernel(
    out, p, outputs, inputs, taps, depth, width, tiles, plane,
    PLANES: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Pack the planes of COLUMNS words of 32 bits: the grid is tiles times rows of words."""
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    columns = (program % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    bit = tl.arange(0, 32)
    # A word of 64 bits is two columns here, and its high half has inputs 32 further on.
    k = ((row % depth) * GROUP + columns % GROUP)[:, None] * 32 + bit[None, :]
    tap, group = row // depth % taps, row // depth // taps
    at = ((group * outputs + columns // GROUP)[:, None] * inputs + k) * taps + tap
    here = (columns < width)[:, None] & (k < inputs)
    out += row * width + columns
    counts = (tl.load(p + at, mask=here, other=0).to(tl.float32) * 256).to(tl.uint32)
    for one in tl.static_range(PLANES):
        words = tl.sum(((counts >> one) & 1) << bit.to(tl.uint32)[None, :], axis=1)
        tl.store(out, words.to(tl.int32, bitcast=True), mask=columns < width)
        out += plane


def bit_planes(p: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Pack probabilities by the bits of 256 P, lowest first, in the layout of a product.

    Plain torch packs each plane by several passes, some seventy launches for all. Here is one: 4 bytes read
    and 9/8 of a byte written for a probability in float32, which is 5.4 MB for a weight of 1024 x 1024 and
    1.3 us at an H200's 4.3 TB/s, beside 174 us to draw the bits of 1024 members.

    Args:
        p: multiples of 1/256 from 0 to 1, [g, o, i, *taps], of a floating type.
        dtype: of the words.

    Returns:
        Planes [9, g, *taps, words, o]; bits behind the last input are 0.

    Raises:
        ValueError: words are of another type.

    """
    if dtype not in GROUPS:
        message = f"planes must be words of int32 or int64, got {dtype}"
        raise ValueError(message)
    groups, outputs, inputs, *taps = p.shape
    group = GROUPS[dtype]
    depth, width = -(-inputs // (32 * group)), outputs * group
    out = torch.empty(PLANES, groups, *taps, depth, outputs, device=p.device, dtype=dtype)
    if not out.numel():
        return out
    count, columns = math.prod(taps), tile(width, MOST_COLUMNS)
    tiles, rows = -(-width // columns), groups * count * depth
    with torch.cuda.device_of(p):
        bit_planes_kernel[programs(tiles, rows)](
            out.view(torch.int32), p.contiguous(), outputs, inputs, count, depth, width, tiles, rows * width,
            PLANES=PLANES, GROUP=group, COLUMNS=columns,
        )  # fmt: skip
    return out
