"""Drawing packed weights in Triton, bit by bit from the words of Philox4x32-10."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.kernels.drawn import COUNTERS, Draw, five_words, seed_of, side_by_side, unsigned
from impls.kernels.planes import PLANES
from impls.kernels.words import halves, load_words, programs, tile

OWN_MEMBERS = 8
"""Members that a program draws with the same planes in its registers."""

MOST_CALLS = 128
"""Calls of Philox in a tile, one for each thread: of one member, or of several with few words each."""


@triton.jit
def _random(seed, first, member, layer, draw, WHOLE: tl.constexpr):
    """Return words first, first + 1, + 2 and + 3 of a member's draw, for rows of both, as [rows, 4]."""
    r0, r1, r2, r3, _ = five_words(seed, first, member, layer, draw, WHOLE)
    return side_by_side(r0, r1, r2, r3).reshape(first.shape[0], 4)


@triton.jit(do_not_specialize=[*COUNTERS, "members"])
def sample_bits_kernel(
    out, planes, words, tiles, key0, key1, layer, draw, first_member, members,
    WHOLE: tl.constexpr, OWN: tl.constexpr, AT_ONCE: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """Draw OWN members' words of CALLS calls, AT_ONCE of them: the grid is tiles times groups of members."""
    program = tl.program_id(0).to(tl.int64)
    words = tl.cast(words, tl.int64)
    layer = unsigned(layer)
    draw = unsigned(draw)
    first_member = unsigned(first_member)
    seed = seed_of(key0, key1)
    # A row is a call of one of the members that are drawn at once.
    row = tl.arange(0, AT_ONCE * CALLS)
    fours = ((program % tiles) * CALLS + row % CALLS) * 4
    at = fours[:, None] + tl.arange(0, 4)[None, :]
    inside = at < words
    p0 = load_words(planes + at, inside)
    p1 = load_words(planes + at + words, inside)
    p2 = load_words(planes + at + words * 2, inside)
    p3 = load_words(planes + at + words * 3, inside)
    p4 = load_words(planes + at + words * 4, inside)
    p5 = load_words(planes + at + words * 5, inside)
    p6 = load_words(planes + at + words * 6, inside)
    p7 = load_words(planes + at + words * 7, inside)
    always = load_words(planes + at + words * 8, inside)
    fraction = (p0, p1, p2, p3, p4, p5, p6, p7)
    own = (program // tiles) * OWN
    for first in range(own, tl.minimum(own + OWN, members), AT_ONCE):
        member = first + row // CALLS
        counter = (member + first_member).to(tl.uint32)
        on = tl.zeros_like(always)
        for plane in tl.static_range(8):
            r = _random(seed, fours + words * plane, counter, layer, draw, WHOLE)
            # A plane's bit 1 makes on | r of them, its bit 0 makes on & r.
            on = (on & r) | (fraction[plane] & (on | r))
        into = out + (member * words)[:, None] + at
        tl.store(into, (on | always).to(tl.int32, bitcast=True), mask=inside & (member < members)[:, None])


def sample_bits(
    planes: Tensor, key: tuple[int, int] | Tensor, layer: int, draw: int, members: range
) -> Tensor:
    """Draw packed bits for consecutive members: [m, *shape], of the type of ``planes``.

    A bit is on with the probability that its planes say. A member has the same bits in any range of members:
    those made of ``words(draw, 8, *shape)``, in int64, of the stream
    :class:`impls.perturbation.noise.PhiloxStream`, with
    the key, layer and draw of its :class:`impls.perturbation.philox.Place`. For W words of 32 bits of a
    member:

    * read: 36 W bytes for every OWN_MEMBERS members, mostly from the cache; written: 4 W for each member.
    * two calls of Philox for each word, four where W is no multiple of 4: a call is 20 wide multiplications
      and 20 xor of three; and eight majorities of three bits.

    Args:
        planes: [9, *shape] words of int32 or int64: bits of round(256 P) from the lowest up. Where bits are
            0 in every plane, as behind the last one, they are 0 in the result.
        key: of seed and step.
        layer: a word, of the layer's name.
        draw: a word, of the draw's name.
        members: counters of the members.

    Raises:
        ValueError: these are no nine planes of words, or a counter does not fit in 32 bits.

    """
    if planes.shape[0] != PLANES:
        message = f"a probability has {PLANES} planes, got {list(planes.shape)}"
        raise ValueError(message)
    flat = halves(planes, "planes").flatten(1)
    words = flat.shape[1]
    counters = Draw(key, layer, draw, members).arguments(words * (PLANES - 1), 4)
    out = torch.empty((len(members), *planes.shape[1:]), device=planes.device, dtype=planes.dtype)
    if not out.numel():
        return out
    calls = tile(-(-words // 4), MOST_CALLS)
    tiles, at_once = -(-words // (4 * calls)), min(OWN_MEMBERS, MOST_CALLS // calls)
    with torch.cuda.device_of(planes):
        sample_bits_kernel[programs(tiles, -(-len(members) // OWN_MEMBERS))](
            out.view(torch.int32), flat, words, tiles, *counters, len(members),
            WHOLE=words % 4 == 0, OWN=OWN_MEMBERS, AT_ONCE=at_once, CALLS=calls,
        )  # fmt: skip
    return out
