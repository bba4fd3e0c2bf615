"""Noise drawn inside kernels: words of Philox4x32-10, and normals, levels and signs made from them.

Kernels draw the values of :class:`impls.perturbation.noise.PhiloxStream`, by the counters call, member, layer
and draw of :mod:`impls.perturbation.philox`. A call gives four normals, 16 levels or 128 signs. Words, levels
and signs are equal to the stream's bit by bit. Normals are Box-Muller in float32, as in the stream, with a
logarithm, sine and cosine for the ranges (0, 1] and [0, 2 pi] only: they need no slow path for large
arguments, have the same bits in every kernel, and are within a few float32 roundings of the stream's.

On capability 9.0 a call takes about 60 instructions, a normal about 21 more, and a level four.

:func:`fill` writes noise out, and :func:`round_keys` makes the keys of a step that is a tensor on the device.
"""

import importlib.util
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from impls.kernels.gemm import grid_of
from impls.kernels.optional_triton import tl, triton
from impls.kernels.tiling import block_size
from impls.perturbation.noise import NoiseStream
from impls.perturbation.philox import LEVEL_STEP, NAMESPACE, ROUNDS, WEYL, DrawKey

WORD = 2**32
"""Number of values of a 32-bit word."""

Law = Literal["normal", "uniform", "sign"]
"""The distribution of a draw: that of the stream's normals, levels or signs."""

VALUES_PER_CALL: Mapping[Law, int] = {"normal": 4, "uniform": 16, "sign": 128}
"""Values of one Philox call."""

STEP, OFFSET = tl.constexpr(LEVEL_STEP / 2**24), tl.constexpr(127.5 * LEVEL_STEP)
"""Factor of the highest byte of a word, and what is subtracted from the product."""

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it rounds a float32 to an integer and puts that into the lowest bits."""


class Draw(NamedTuple):
    """The noise that a kernel draws.

    Attributes:
        key: two words made of seed and step, or :func:`impls.perturbation.philox.device_keys` of a step on
            the device.
        layer: a word made of the layer's name.
        draw: a word made of the draw's name.
        members: consecutive members, which are their counters.
    """

    key: tuple[int, int] | Tensor
    layer: int
    draw: int
    members: range

    def arguments(self, count: int, elements: int, width: int) -> tuple[int | Tensor, ...]:
        """Return the arguments key0, key1, layer, draw and first_member of a kernel, as int32.

        For a step on the device key0 is the tensor of its keys.

        Args:
            count: number of members of the other operands.
            elements: number of elements of a member.
            width: number of values of a Philox call.

        Raises:
            ValueError: the numbers of members differ, or the counter of a member or of an element exceeds 32
                bits.
        """
        members = self.members
        if len(members) != count:
            raise ValueError(f"the noise has {len(members)} members, the operands have {count}")
        if members.step != 1 or members.start < 0 or members.stop > WORD:
            raise ValueError(f"members must be consecutive, from 0 to 2^32 - 1, got {members}")
        if elements > width * WORD:
            limit = width * WORD
            raise ValueError(
                f"a member's noise has {elements} elements, more than the {limit} that Philox counters of 32 "
                "bits can number: use a smaller layer"
            )
        words = tuple(as_int32(word) for word in (self.layer, self.draw, members.start))
        if isinstance(self.key, Tensor):
            return (self.key, 0, *words)
        return (*map(as_int32, self.key), *words)


COUNTERS = ("key0", "key1", "layer", "draw", "first_member")
"""Arguments of a kernel that draws: launches must not be specialized on their values."""


def as_int32(word: int) -> int:
    """Return the int32 with the bits of a word, so that a kernel's argument always has the same dtype."""
    return word - WORD if word >= WORD // 2 else word


@triton.jit
def as_uint32(word):
    """Return the word whose bits are those of an int32, see :func:`as_int32`."""
    return word.to(tl.uint32, bitcast=True)


@triton.jit
def seed_of(key0, key1):
    """Return the key as a uint64, from two words or from a pointer ``key0`` to them."""
    if key0.dtype.is_ptr():
        return tl.load(key0 + 1).to(tl.uint64) << 32 | tl.load(key0).to(tl.uint64)
    else:  # noqa: RET505  Triton needs both branches
        return as_uint32(key1).to(tl.uint64) << 32 | as_uint32(key0)


@triton.jit
def _select_value(values, lane: tl.constexpr, shift):
    """Return ``values[lane + shift]`` of the eight values of two calls.

    ``shift`` is a tensor with entries 0 to 3. Triton cannot index a tuple by a tensor.
    """
    value = values[lane]
    for distance in tl.static_range(1, 4):
        value = tl.where(shift == distance, values[lane + distance], value)
    return value


@triton.jit
def five_words(seed, first, member, layer, draw, ALIGNED: tl.constexpr):
    """Return words first to first + 4 of members' draws; ``first``, int64, and ``member`` broadcast.

    With ALIGNED, ``first`` are multiples of four: the first four words are one call, and the fifth is not
    valid. Otherwise words are parts of two calls.
    """
    call = (first // 4).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, call, member, layer, draw)
    r4 = r0
    if not ALIGNED:
        r4, r5, r6, r7 = tl.philox(seed, call + 1, member, layer, draw)
        values = (r0, r1, r2, r3, r4, r5, r6, r7)
        shift = first % 4
        r0 = _select_value(values, 0, shift)
        r1 = _select_value(values, 1, shift)
        r2 = _select_value(values, 2, shift)
        r3 = _select_value(values, 3, shift)
        r4 = _select_value(values, 4, shift)
    return r0, r1, r2, r3, r4


@triton.jit
def interleave(v0, v1, v2, v3):
    """Interleave four tiles [..., n] to one [..., 4 n]."""
    joined = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    return joined.reshape(v0.shape[:-1] + (4 * v0.shape[-1],))  # noqa: RUF005  Triton has no star expressions


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
    """Return two normals, radius * (cos, sin)(angle), from two words (Box and Muller 1958)."""
    # In (0, 1], with all 32 bits: the tails are as long as a word allows.
    u = first.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    radius = tl.sqrt(_twice_negative_log(u))
    angle = second.to(tl.float32) * 1.4629180792671596e-09
    # The remainder of the angle modulo pi; an odd multiple of pi flips both signs.
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
def four_normals(seed, first, member, layer, draw, ALIGNED: tl.constexpr):
    """Return normals first to first + 3 of members' draws; ``first``, int64, and ``member`` broadcast.

    With ALIGNED ``first`` are multiples of four and the normals are one call, otherwise parts of two.
    """
    call = (first // 4).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(seed, call, member, layer, draw)
    n0, n1 = box_muller(r0, r1)
    n2, n3 = box_muller(r2, r3)
    if not ALIGNED:
        r0, r1, r2, r3 = tl.philox(seed, call + 1, member, layer, draw)
        n4, n5 = box_muller(r0, r1)
        n6, n7 = box_muller(r2, r3)
        values = (n0, n1, n2, n3, n4, n5, n6, n7)
        shift = first % 4
        n0 = _select_value(values, 0, shift)
        n1 = _select_value(values, 1, shift)
        n2 = _select_value(values, 2, shift)
        n3 = _select_value(values, 3, shift)
    return n0, n1, n2, n3


@triton.jit
def four_words(seed, first, member, layer, draw, ALIGNED: tl.constexpr):
    """Return bits first to first + 127 of members' draws in four words, lowest bits first.

    With ALIGNED ``first`` are multiples of 128 and the bits are one call, otherwise parts of two.
    """
    r0, r1, r2, r3, r4 = five_words(seed, first // 32, member, layer, draw, ALIGNED)
    if not ALIGNED:
        low = (first % 32).to(tl.uint32)
        # In two steps, as a shift by 32 is undefined.
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
def flip_by_high_bit(values, words):
    """Return float32 or float64 values, negated where a word's highest bit is set."""
    if values.dtype == tl.float32:
        return (values.to(tl.uint32, bitcast=True) ^ (words & 0x80000000)).to(tl.float32, bitcast=True)
    else:  # noqa: RET505  Triton needs both branches
        return tl.where((words >> 31) != 0, -values, values)


@triton.jit
def unpack_signs(words):
    """Return the signs [..., 32] of the bits of words [...], lowest first, within a thread."""
    shifted = tl.join(words << 16, words)
    shifted = tl.join(shifted << 8, shifted)
    shifted = tl.join(shifted << 4, shifted)
    shifted = tl.join(shifted << 2, shifted)
    shifted = tl.join(shifted << 1, shifted)
    return sign_of(shifted.reshape(words.shape + (32,)))  # noqa: RUF005  Triton has no star expressions


@triton.jit
def four_level_words(seed, first, member, layer, draw, ALIGNED: tl.constexpr):
    """Return the bytes of levels first to first + 15 of members' draws in four words, lowest bytes first.

    With ALIGNED ``first`` are multiples of 16 and the bytes are one call, otherwise parts of two.
    """
    return four_words(seed, first * 8, member, layer, draw, ALIGNED)


@triton.jit
def level_of(words):
    """Return the level of a word's highest byte, in float32."""
    # Converting 32 bits, not 8, keeps the compiler from a slower instruction.
    return (words & 0xFF000000).to(tl.float32) * STEP - OFFSET


@triton.jit
def unpack_levels(words):
    """Return the levels [..., 4 n] of the bytes of words [..., n], lowest first."""
    return interleave(level_of(words << 24), level_of(words << 16), level_of(words << 8), level_of(words))


@triton.jit
def draw_values(seed, first, member, layer, draw, LAW: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the float32 values [..., width * n] of n Philox calls.

    ``first`` [..., n] is the index of each call's first value; a call has ``width`` values, see
    VALUES_PER_CALL. With ALIGNED, ``first`` are multiples of ``width``.
    """
    if LAW == "sign":
        r0, r1, r2, r3 = four_words(seed, first, member, layer, draw, ALIGNED)
        words = interleave(r0, r1, r2, r3)
        return unpack_signs(words).reshape(words.shape[:-1] + (32 * words.shape[-1],))  # noqa: RUF005  Triton has no star expressions
    elif LAW == "uniform":  # noqa: RET505  Triton needs all branches
        r0, r1, r2, r3 = four_level_words(seed, first, member, layer, draw, ALIGNED)
        return unpack_levels(interleave(r0, r1, r2, r3))
    else:
        n0, n1, n2, n3 = four_normals(seed, first, member, layer, draw, ALIGNED)
        return interleave(n0, n1, n2, n3)


def draw_of(stream: NoiseStream, name: str) -> Draw:
    """Return the noise that a stream draws under this name."""
    key = DrawKey.of(stream.seed, stream.step, stream.layer, name)
    return Draw(key.key, key.layer, key.draw, stream.members)


FILL_MEMBERS = 8
"""Members in a tile of :func:`fill`."""

MAX_VALUES = 1024
"""Most values of a member in a tile of :func:`fill`."""


@triton.jit(do_not_specialize=COUNTERS)
def fill_kernel(
    values, key0, key1, layer, draw, first_member, members, start, size, tiles,
    LAW: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr,
    MEMBERS: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """Write the values of CALLS Philox calls, of WIDTH values each, for MEMBERS members to [members, size].

    The grid is tiles of elements times tiles of members. Column 0 is element ``start`` of a member's noise.
    """
    pid = tl.program_id(0).to(tl.int64)
    member = pid // tiles * MEMBERS + tl.arange(0, MEMBERS)
    start_n = (pid % tiles) * CALLS * WIDTH
    first = start + start_n + tl.arange(0, CALLS).to(tl.int64) * WIDTH
    counter = as_uint32(first_member) + member.to(tl.uint32)
    seed, layer, draw = seed_of(key0, key1), as_uint32(layer), as_uint32(draw)
    drawn = draw_values(seed, first[None, :], counter[:, None], layer, draw, LAW, ALIGNED)
    offs_n = start_n + tl.arange(0, CALLS * WIDTH)
    mask = (member < members)[:, None] & (offs_n < size)[None, :]
    offsets = member[:, None] * size + offs_n[None, :]
    tl.store(values + offsets, drawn.to(values.dtype.element_ty), mask=mask)


def fill(values: Tensor, draw: Draw, start: int = 0, law: Law = "normal") -> Tensor:
    """Draw elements from ``start`` on into ``values`` [members, elements], which is returned.

    A value does not depend on the range of members and elements it is drawn with. Levels and signs are those
    of :class:`impls.perturbation.noise.PhiloxStream`, normals are up to rounding.

    * bytes: e written for each value of e bytes.
    * Philox calls: one for 4 normals, 16 levels or 128 signs; two where ``start`` is not a multiple of that.

    Raises:
        ValueError: ``values`` is not a contiguous [members, elements], or the counter of a member or an
            element exceeds 32 bits.
    """
    width = VALUES_PER_CALL[law]
    counters = draw.arguments(len(values), start + values.shape[-1], width)
    if values.dim() != 2 or not values.is_contiguous():  # noqa: PLR2004  members, elements
        raise ValueError(
            f"values must be contiguous [members, elements], got {list(values.shape)} with strides "
            f"{list(values.stride())}"
        )
    if not values.numel():
        return values
    calls = block_size(-(-values.shape[1] // width), MAX_VALUES // width)
    tiles = -(-values.shape[1] // (calls * width))
    with torch.cuda.device_of(values):
        fill_kernel[grid_of(tiles, -(-len(values) // FILL_MEMBERS))](
            values, *counters, *values.shape[:1], start, values.shape[1], tiles,
            LAW=law, ALIGNED=start % width == 0, WIDTH=width, MEMBERS=FILL_MEMBERS, CALLS=calls,
        )  # fmt: skip
    return values


MAX_SEED = 2**64
"""Seeds below it, with any step, make messages that fit into the part of a block that the kernel fills."""

PREFIX = 24
"""Most bytes of the message that the host knows: a bracket, 20 digits of the seed, a comma and a space."""

IV = tl.constexpr(
    (
        0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
        0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
    )
)  # fmt: skip

PARAMETERS = tl.constexpr(0x01010008)
"""BLAKE2b's parameters: a digest of 8 bytes, without a key."""

LAST = tl.constexpr(0xE07C265404BE4294)
"""The seventh initial value with its bits inverted, as BLAKE2b has it for the last block."""

SIGMA = tl.constexpr(
    (
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        (14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3),
        (11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4),
        (7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8),
        (9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13),
        (2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9),
        (12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11),
        (13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10),
        (6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5),
        (10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0),
    )
)


@triton.jit
def _rotate_right(x, BITS: tl.constexpr):
    """Rotate uint64 words to the right."""
    return (x >> BITS) | (x << (64 - BITS))


@triton.jit
def _mix(a, b, c, d, x, y):
    """Mix two words of the message into four of the state: the function G of BLAKE2b (RFC 7693, 3.1)."""
    a = a + b + x
    d = _rotate_right(d ^ a, 32)
    c = c + d
    b = _rotate_right(b ^ c, 24)
    a = a + b + y
    d = _rotate_right(d ^ a, 16)
    c = c + d
    b = _rotate_right(b ^ c, 63)
    return a, b, c, d


@triton.jit
def _select_word(words, index: tl.constexpr):
    """Return one of 8 words as a scalar."""
    return tl.sum(tl.where(tl.arange(0, 8) == index, words, tl.zeros_like(words)), axis=0)


@triton.jit
def _message_words(step, w0, w1, w2, size):
    """Return the text of ``repr((seed, step))``, 8 bytes to a uint64 [8], and its length in bytes.

    The first ``size`` bytes, up to the digits of the step, are given as the words w0 to w2.
    """
    digits, higher = 1, step // 10
    for _ in tl.static_range(18):
        digits += (higher > 0).to(tl.int32)
        higher = higher // 10
    byte = tl.arange(0, 64)
    # The digit in a byte is that of 10^exponent.
    exponent = size + digits - 1 - byte
    power = tl.full((64,), 1, tl.uint64)
    for lower in tl.static_range(18):
        power = tl.where(exponent > lower, power * 10, power)
    shift = ((byte % 8) * 8).to(tl.uint64)
    prefix = tl.where(byte // 8 == 0, w0, tl.where(byte // 8 == 1, w1, w2))
    # In ASCII 48 is "0" and 41 is ")".
    bracket = tl.where(byte == size + digits, 41, 0).to(tl.uint64)
    value = tl.where(byte < size + digits, step // power % 10 + 48, bracket)
    value = tl.where(byte < size, prefix >> shift & 255, value)
    return tl.sum((value << shift).reshape(8, 8), axis=1), size + digits + 1


@triton.jit(do_not_specialize=["word0", "word1", "word2", "size"])
def round_keys_kernel(
    keys, step, word0, word1, word2, size, ROUNDS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr
):
    """Write Philox keys, [ROUNDS, 2]: the BLAKE2b digest of repr((seed, step)), advanced for each round.

    One program reads the step from device memory. The words hold the first ``size`` bytes of the text.
    """
    step = tl.load(step).to(tl.uint64, bitcast=True)
    w0 = tl.cast(word0, tl.int64).to(tl.uint64, bitcast=True)
    w1 = tl.cast(word1, tl.int64).to(tl.uint64, bitcast=True)
    w2 = tl.cast(word2, tl.int64).to(tl.uint64, bitcast=True)
    words, length = _message_words(step, w0, w1, w2, size)
    zero = tl.zeros((), tl.uint64)
    m = (
        _select_word(words, 0), _select_word(words, 1), _select_word(words, 2), _select_word(words, 3),
        _select_word(words, 4), _select_word(words, 5), _select_word(words, 6), _select_word(words, 7),
        zero, zero, zero, zero, zero, zero, zero, zero,
    )  # fmt: skip
    start = zero + IV[0] ^ PARAMETERS
    v0, v1, v2, v3 = start, zero + IV[1], zero + IV[2], zero + IV[3]
    v4, v5, v6, v7 = zero + IV[4], zero + IV[5], zero + IV[6], zero + IV[7]
    v8, v9, v10, v11 = zero + IV[0], zero + IV[1], zero + IV[2], zero + IV[3]
    v12, v13, v14, v15 = zero + IV[4] ^ length.to(tl.uint64), zero + IV[5], zero + LAST, zero + IV[7]
    for i in tl.static_range(12):
        v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m[SIGMA[i % 10][0]], m[SIGMA[i % 10][1]])
        v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m[SIGMA[i % 10][2]], m[SIGMA[i % 10][3]])
        v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m[SIGMA[i % 10][4]], m[SIGMA[i % 10][5]])
        v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m[SIGMA[i % 10][6]], m[SIGMA[i % 10][7]])
        v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m[SIGMA[i % 10][8]], m[SIGMA[i % 10][9]])
        v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m[SIGMA[i % 10][10]], m[SIGMA[i % 10][11]])
        v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m[SIGMA[i % 10][12]], m[SIGMA[i % 10][13]])
        v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m[SIGMA[i % 10][14]], m[SIGMA[i % 10][15]])
    key = (start ^ v0 ^ v8).to(tl.int64, bitcast=True)
    for i in tl.static_range(ROUNDS):
        tl.store(keys + 2 * i, (key + i * FIRST) & 0xFFFFFFFF)
        tl.store(keys + 2 * i + 1, ((key >> 32) + i * SECOND) & 0xFFFFFFFF)


@torch.library.impl(f"{NAMESPACE}::philox_keys", "CUDA")
def _keys_on_cuda(seed: str, step: Tensor) -> Tensor:
    """Compute :func:`impls.perturbation.philox.device_keys` on a GPU."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError("a step on a GPU needs triton, which is not installed: pass the step as an int")
    return round_keys(int(seed), step, ROUNDS, WEYL)


def round_keys(seed: int, step: Tensor, rounds: int, weyl: tuple[int, int]) -> Tensor:
    """Return the keys of all rounds for a step on the device, [rounds, 2] words as int64.

    A key is the BLAKE2b digest (RFC 7693) of 64 bits of ``repr((seed, step))``, as for steps that the host
    knows, see :meth:`impls.perturbation.philox.DrawKey.of`. So a CUDA graph can advance the step. One program
    with about 700 additions, 400 rotations and 100 divisions of 64 bits.

    Args:
        seed: of all noise, below MAX_SEED.
        step: a scalar int64 of 0 or more; not checked, as reading it would wait for the device.
        rounds: number of rounds of Philox.
        weyl: increments of the two words of a key from round to round.

    Raises:
        ValueError: the seed is 2^64 or more.
    """
    if seed >= MAX_SEED:
        raise ValueError(f"a step on the device needs a seed below 2^64, got {seed}: pass the step as an int")
    prefix = f"({seed}, ".encode()
    words = [int.from_bytes(prefix[at : at + 8], "little") for at in (0, 8, 16)]
    keys = torch.empty(rounds, 2, device=step.device, dtype=torch.int64)
    with torch.cuda.device_of(step):
        round_keys_kernel[(1,)](
            keys, step, *words, len(prefix), ROUNDS=rounds, FIRST=weyl[0], SECOND=weyl[1], num_warps=1
        )  # fmt: skip
    return keys
