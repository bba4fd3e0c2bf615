"""The weighted sum of members' dense noise, drawn as it is summed and never stored, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.drawn import (
    COUNTERS,
    NORMALS,
    SIGNS,
    Draw,
    four_bits,
    four_normals,
    seed_of,
    side_by_side,
    turned,
    unsigned,
)
from impls.kernels.rows import DOT, wide
from impls.kernels.words import programs

ENOUGH_PROGRAMS = 512
"""A sum is split over members until it has about this many programs: a few for each processor of a GPU."""

FEWEST_MEMBERS = 64
"""What a part of a split sum has at least."""

MOST_MEMBERS = 2**14
"""Summed by one launch, one after the other where it is not split: of more, launches are added."""

CALLS = {False: 256, True: 128}
"""Calls of Philox in a tile, of normals and of signs: one or two for each thread.

With signs 128 sums are in the registers of each.
"""


@triton.jit(do_not_specialize=[*COUNTERS, "members", "part"])
def noise_sum_kernel(
    out, utilities, key0, key1, layer, draw, first_member, members, part, elements, tiles,
    SIGN: tl.constexpr, TYPE: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """Sum ``part`` members' noise of CALLS calls: the grid is tiles times parts of the members."""
    program = tl.program_id(0).to(tl.int64)
    slice_ = program // tiles
    width: tl.constexpr = 128 if SIGN else 4
    first = ((program % tiles) * CALLS + tl.arange(0, CALLS)) * width
    seed, layer, draw = seed_of(key0, key1), unsigned(layer), unsigned(draw)
    start = unsigned(first_member)
    end = tl.minimum((slice_ + 1) * part, members)
    out += slice_ * elements
    if SIGN:
        # A thread has its own call, whose bits are rows here: no value passes from one to another.
        bit = tl.arange(0, 32)[:, None]
        raised = (31 - bit).to(tl.uint32)
        s0 = tl.zeros((32, CALLS), dtype=TYPE)
        s1 = tl.zeros((32, CALLS), dtype=TYPE)
        s2 = tl.zeros((32, CALLS), dtype=TYPE)
        s3 = tl.zeros((32, CALLS), dtype=TYPE)
        for member in range(slice_ * part, end):
            counter = (start + member).to(tl.uint32)
            utility = tl.load(utilities + member).to(TYPE)
            r0, r1, r2, r3 = four_bits(seed, first, counter, layer, draw, WHOLE=True)
            s0 -= turned(utility, r0[None, :] << raised)
            s1 -= turned(utility, r1[None, :] << raised)
            s2 -= turned(utility, r2[None, :] << raised)
            s3 -= turned(utility, r3[None, :] << raised)
        at = first[None, :] + bit
        tl.store(out + at, s0, mask=at < elements)
        tl.store(out + at + 32, s1, mask=at + 32 < elements)
        tl.store(out + at + 64, s2, mask=at + 64 < elements)
        tl.store(out + at + 96, s3, mask=at + 96 < elements)
    else:
        s0 = tl.zeros((CALLS,), dtype=TYPE)
        s1 = tl.zeros((CALLS,), dtype=TYPE)
        s2 = tl.zeros((CALLS,), dtype=TYPE)
        s3 = tl.zeros((CALLS,), dtype=TYPE)
        for member in range(slice_ * part, end):
            counter = (start + member).to(tl.uint32)
            utility = tl.load(utilities + member).to(TYPE)
            n0, n1, n2, n3 = four_normals(seed, first, counter, layer, draw, WHOLE=True)
            # Rounded as the stream's values are, in the weight's type.
            s0 += n0.to(utilities.dtype.element_ty).to(TYPE) * utility
            s1 += n1.to(utilities.dtype.element_ty).to(TYPE) * utility
            s2 += n2.to(utilities.dtype.element_ty).to(TYPE) * utility
            s3 += n3.to(utilities.dtype.element_ty).to(TYPE) * utility
        at = (program % tiles) * CALLS * 4 + tl.arange(0, CALLS * 4)
        tl.store(out + at, side_by_side(s0, s1, s2, s3), mask=at < elements)


def noise_sum(
    draw: Draw, utilities: Tensor, elements: int, *, signs: bool = False, calls: int | None = None
) -> Tensor:
    """Sum utilities[m] * E_m over members, [elements] in float32, or in float64 if utilities are.

    E_m are the first elements of members' draws, rounded to the type of the utilities: the values that
    :func:`impls.kernels.fills.fill` writes. Nothing but the sum is stored. Every sum has one order: members
    of a part one after the other, then parts, then what launches of 2^14 members give. How many parts there
    are follows from the sizes alone, so the bits are the same every time and for every ``calls``; the sums
    of two shares of a population add up to that of the whole but for rounding. For m members:

    * bytes: 4 written for each element, and 4 for each part of the members where elements are too few to
      fill a GPU; utilities are read out of a cache.
    * calls: m / 4 for each element, which is the floor: 1e12 normals a second. Of signs m / 128, and three
      operations for each sign.

    Args:
        draw: which noise, of one member for each utility.
        utilities: [m], floating.
        elements: of a member's noise.
        signs: whether it is of signs, and not of normals.
        calls: of Philox in a tile, a power of two, if not as CALLS has it.

    Raises:
        ValueError: utilities do not fit, or a member or an element has no counter.

    """
    if utilities.shape != (len(draw.members),) or utilities.dtype not in DOT:
        message = (
            f"a sum takes one floating utility for each of {len(draw.members)} members, got "
            f"{utilities.dtype} {list(utilities.shape)}"
        )
        raise ValueError(message)
    width = SIGNS if signs else NORMALS
    draw.arguments(elements, width)
    kind = torch.promote_types(utilities.dtype, torch.float32)
    total = torch.zeros(elements, device=utilities.device, dtype=kind)
    if not elements:
        return total
    for start in range(0, len(utilities), MOST_MEMBERS):
        some = utilities[start : start + MOST_MEMBERS].contiguous()
        mine = draw._replace(members=draw.members[start : start + MOST_MEMBERS])
        fewest = -(-elements // (CALLS[signs] * width))
        parts = max(1, min(ENOUGH_PROGRAMS // fewest, len(some) // FEWEST_MEMBERS))
        part = -(-len(some) // parts)
        parts = -(-len(some) // part)
        out = torch.empty(parts, elements, device=utilities.device, dtype=kind)
        at_once = calls or CALLS[signs]
        tiles = -(-elements // (at_once * width))
        with torch.cuda.device_of(utilities):
            noise_sum_kernel[programs(tiles, parts)](
                out, some, *mine.arguments(elements, width), len(some), part, elements, tiles,
                SIGN=signs, TYPE=wide(utilities.dtype), CALLS=at_once,
            )  # fmt: skip
        total += out[0] if parts == 1 else out.sum(0)
    return total
