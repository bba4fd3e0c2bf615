"""Noise that is drawn inside of kernels: words of Philox4x32-10, normals and signs of them, inlined.

A kernel draws what :class:`impls.perturbation.noise.PhiloxStream` draws, by the counters call, member,
layer and draw of
:mod:`impls.perturbation.philox`. Each call is made once, for four values next to each other, or 128 signs.
Words and signs
are equal to the stream's bit by bit. Normals are Box-Muller in float32, as there, with a logarithm, a sine
and a cosine of our own: the argument is known to lie in (0, 1] or [0, 2 pi], so that none needs a slow path
for what lies far outside, and the same bits come out in every kernel. They are within a few float32 roundings
of the stream's.

Work of a call: 20 wide multiplications and 20 xor of three; its four normals take some 80 operations more. A
GPU that draws 1e12 normals a second is at the floor.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

WORD = 2**32
"""Values of a counter, and of a word."""

NORMALS, SIGNS = 4, 128
"""Values of one call."""

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: what is added to it is rounded to an integer, and its lowest bit is the integer's."""


class Draw(NamedTuple):
    """Which numbers a kernel draws.

    Attributes:
        key: two words, of seed and step; of a step on the device
        :func:`impls.perturbation.philox.device_keys`.
        layer: a word, of the layer's name.
        draw: a word, of the draw's name.
        members: their counters, consecutive ones.

    """

    key: tuple[int, int] | Tensor
    layer: int
    draw: int
    members: range

    def arguments(self, elements: int, width: int) -> tuple[int | Tensor, ...]:
        """Return key0, key1, layer, draw and first_member as int32, for members of so many elements.

        In place of key0 the keys of a step on the device, which :func:`seed_of` loads.

        Raises:
            ValueError: a member, or the call of an element, has no counter of 32 bits.

        """
        members = self.members
        if members.step != 1 or members.start < 0 or members.stop > WORD:
            message = f"members must be consecutive and have counters of 32 bits, got {members}"
            raise ValueError(message)
        if elements > width * WORD:
            message = f"{elements} elements of a member need more calls than a counter tells apart"
            raise ValueError(message)
        words = tuple(signed(word) for word in (self.layer, self.draw, members.start))
        if isinstance(self.key, Tensor):
            return (self.key, 0, *words)
        return (*map(signed, self.key), *words)


COUNTERS = ("key0", "key1", "layer", "draw", "first_member")
"""Arguments of a kernel that draws, which no launch should be compiled for."""


def signed(word: int) -> int:
    """Return the int32 with the bits of a word: arguments of a kernel have one type then."""
    return word - WORD if word >= WORD // 2 else word


@triton.jit
def unsigned(word):
    """Return the word that :func:`signed` has turned into an int32."""
    return word.to(tl.uint32, bitcast=True)


@triton.jit
def seed_of(key0, key1):
    """Return both words of the key as one; ``key0`` may point to them."""
    if key0.dtype.is_ptr():
        return tl.load(key0 + 1).to(tl.uint64) << 32 | tl.load(key0).to(tl.uint64)
    else:  # noqa: RET505  the compiler takes no early return here
        return unsigned(key1).to(tl.uint64) << 32 | unsigned(key0)


@triton.jit
def _shifted(calls, lane: tl.constexpr, shift):
    """Return value ``lane + shift`` of two consecutive calls, given as the eight values of both."""
    word = calls[lane]
    for by in tl.static_range(1, 4):
        word = tl.where(shift == by, calls[lane + by], word)
    return word


@triton.jit
def five_words(seed, first, member, layer, draw, WHOLE: tl.constexpr):
    """Return words first to first + 4 of members' draws; ``first``, int64, and ``member`` broadcast.

    With WHOLE, ``first`` are multiples of four, each is one call, and the fifth word is none. Otherwise words
    are parts of two calls.
    """
    call = (first // 4).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, call, member, layer, draw)
    r4 = r0
    if not WHOLE:
        r4, r5, r6, r7 = tl.philox(seed, call + 1, member, layer, draw)
        calls = (r0, r1, r2, r3, r4, r5, r6, r7)
        shift = first % 4
        r0 = _shifted(calls, 0, shift)
        r1 = _shifted(calls, 1, shift)
        r2 = _shifted(calls, 2, shift)
        r3 = _shifted(calls, 3, shift)
        r4 = _shifted(calls, 4, shift)
    return r0, r1, r2, r3, r4


@triton.jit
def side_by_side(v0, v1, v2, v3):
    """Join four tiles [..., n] to one [..., 4 n] in which their values alternate."""
    joined = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    return joined.reshape(v0.shape[:-1] + (4 * v0.shape[-1],))  # noqa: RUF005  the compiler knows no star


@triton.jit
def _twice_negative_log(u):
    """Return -2 log u for u in [2^-33, 1], within a rounding or two."""
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    # -2 log(1 + f) / f for f in [-1/3, 1/3].
    p = tl.fma(f, -0.276404738426208, 0.3024437427520752)
    p = tl.fma(f, p, -0.28084617853164673)
    p = tl.fma(f, p, 0.3294465243816376)
    p = tl.fma(f, p, -0.4001583755016327)
    p = tl.fma(f, p, 0.5000847578048706)
    p = tl.fma(f, p, -0.6666653156280518)
    p = tl.fma(f, p, 1.0)
    p = tl.fma(f, p, -2.0)
    return tl.fma(exponent.to(tl.float32), -1.3862943649291992, f * p)


@triton.jit
def box_muller(first, second):
    """Turn two words into two normals: the first gives the radius, the second the angle."""
    # All 32 bits and never 0, so that the tails reach as far as a word can tell.
    u = first.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    radius = tl.sqrt(_twice_negative_log(u))
    angle = second.to(tl.float32) * 1.4629180792671596e-09
    # What is left of the angle beyond a multiple of pi, of which an odd one turns both signs.
    turns = tl.fma(angle, 0.31830987334251404, MAGIC)
    halves = turns - MAGIC
    rest = tl.fma(halves, 8.742277657347586e-08, tl.fma(halves, -3.1415927410125732, angle))
    odd = turns.to(tl.uint32, bitcast=True) << 31
    radius = (radius.to(tl.uint32, bitcast=True) ^ odd).to(tl.float32, bitcast=True)
    square = rest * rest
    p = tl.fma(square, -2.6193814051111985e-07, 2.4769304218352772e-05)
    p = tl.fma(square, p, -0.0013888569083064795)
    p = tl.fma(square, p, 0.041666656732559204)
    p = tl.fma(square, p, -0.5)
    cosine = tl.fma(square, p, 1.0)
    p = tl.fma(square, 2.600054585855105e-06, -0.00019806614727713168)
    p = tl.fma(square, p, 0.008333017118275166)
    p = tl.fma(square, p, -0.16666656732559204)
    sine = tl.fma(rest * square, p, rest)
    return radius * cosine, radius * sine


@triton.jit
def four_normals(seed, first, member, layer, draw, WHOLE: tl.constexpr):
    """Return normals first to first + 3 of members' draws; ``first``, int64, and ``member`` broadcast.

    With WHOLE ``first`` are multiples of four: one call; otherwise normals are parts of two.
    """
    call = (first // 4).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, call, member, layer, draw)
    n0, n1 = box_muller(r0, r1)
    n2, n3 = box_muller(r2, r3)
    if not WHOLE:
        r0, r1, r2, r3 = tl.philox(seed, call + 1, member, layer, draw)
        n4, n5 = box_muller(r0, r1)
        n6, n7 = box_muller(r2, r3)
        calls = (n0, n1, n2, n3, n4, n5, n6, n7)
        shift = first % 4
        n0 = _shifted(calls, 0, shift)
        n1 = _shifted(calls, 1, shift)
        n2 = _shifted(calls, 2, shift)
        n3 = _shifted(calls, 3, shift)
    return n0, n1, n2, n3


@triton.jit
def four_bits(seed, first, member, layer, draw, WHOLE: tl.constexpr):
    """Return bits first to first + 127 of members' draws in four words, lowest bits first.

    With WHOLE ``first`` are multiples of 128: one call; otherwise the bits are parts of two.
    """
    r0, r1, r2, r3, r4 = five_words(seed, first // 32, member, layer, draw, WHOLE)
    if not WHOLE:
        low = (first % 32).to(tl.uint32)
        # The upper word moves up in two steps: by 32 at once it would be undefined.
        r0 = (r0 >> low) | ((r1 << 1) << (31 - low))
        r1 = (r1 >> low) | ((r2 << 1) << (31 - low))
        r2 = (r2 >> low) | ((r3 << 1) << (31 - low))
        r3 = (r3 >> low) | ((r4 << 1) << (31 - low))
    return r0, r1, r2, r3


@triton.jit
def sign_of(words):
    """Return +1 where a word's highest bit is set, else -1, in float32."""
    return ((words & 0x80000000) ^ 0xBF800000).to(tl.float32, bitcast=True)


@triton.jit
def turned(values, words):
    """Return float32 or float64 values, negated where a word's highest bit is set."""
    if values.dtype == tl.float32:
        return (values.to(tl.uint32, bitcast=True) ^ (words & 0x80000000)).to(tl.float32, bitcast=True)
    else:  # noqa: RET505  the compiler takes no early return here
        return tl.where((words >> 31) != 0, -values, values)


@triton.jit
def signs_of(words):
    """Return the signs [..., 32] of the bits of words [...], lowest first; each thread expands its own."""
    raised = tl.join(words << 16, words)
    raised = tl.join(raised << 8, raised)
    raised = tl.join(raised << 4, raised)
    raised = tl.join(raised << 2, raised)
    raised = tl.join(raised << 1, raised)
    return sign_of(raised.reshape(words.shape + (32,)))  # noqa: RUF005  the compiler knows no star


@triton.jit
def values_of(seed, first, member, layer, draw, SIGN: tl.constexpr, WHOLE: tl.constexpr):
    """Return a tile [..., width n] of the calls that begin at ``first`` [..., n], a width apart, in float32.

    Four normals of a call, or with SIGN 128 signs.
    """
    if SIGN:
        r0, r1, r2, r3 = four_bits(seed, first, member, layer, draw, WHOLE)
        words = side_by_side(r0, r1, r2, r3)
        return signs_of(words).reshape(words.shape[:-1] + (32 * words.shape[-1],))  # noqa: RUF005  the same
    else:  # noqa: RET505  the compiler takes no early return here
        n0, n1, n2, n3 = four_normals(seed, first, member, layer, draw, WHOLE)
        return side_by_side(n0, n1, n2, n3)
