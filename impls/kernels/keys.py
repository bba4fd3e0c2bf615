"""Keys of Philox made on the device of a step that is a tensor, so that a CUDA graph can advance the step.

A key is the BLAKE2b digest of 64 bits of ``repr((seed, step))``, as for steps that the host knows: see
:meth:`impls.perturbation.philox.Place.of`. BLAKE2b: RFC 7693.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_SEED = 2**64
"""Seeds below it leave room for any step: the message fits in the part of a block that the kernel fills."""

PREFIX = 24
"""Bytes of the message that the host knows at most: a bracket, 20 digits of the seed, a comma and a space."""

IV = tl.constexpr(
    (
        0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
        0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
    )
)  # fmt: skip

PARAMETERS = tl.constexpr(0x01010008)
"""One digest of 8 bytes, without a key."""

LAST = tl.constexpr(0xE07C265404BE4294)
"""The seventh initial value with its bits inverted, as for the only block of a message."""

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
def _rotated(x, BITS: tl.constexpr):
    return (x >> BITS) | (x << (64 - BITS))


@triton.jit
def _mixed(a, b, c, d, x, y):
    """Mix two words of the message into four of the state."""
    a = a + b + x
    d = _rotated(d ^ a, 32)
    c = c + d
    b = _rotated(b ^ c, 24)
    a = a + b + y
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 63)
    return a, b, c, d


@triton.jit
def _word(words, at: tl.constexpr):
    """Return one of 8 words as a scalar."""
    return tl.sum(tl.where(tl.arange(0, 8) == at, words, tl.zeros_like(words)), axis=0)


@triton.jit
def _message(number, w0, w1, w2, size):
    """Return the words of the message, uint64 [8], and its length: ``size`` bytes, digits and a bracket."""
    digits, rest = 1, number // 10
    for _ in tl.static_range(18):
        digits += (rest > 0).to(tl.int32)
        rest = rest // 10
    byte = tl.arange(0, 64)
    exponent = size + digits - 1 - byte
    power = tl.full((64,), 1, tl.uint64)
    for k in tl.static_range(18):
        power = tl.where(exponent > k, power * 10, power)
    shift = ((byte % 8) * 8).to(tl.uint64)
    word = tl.where(byte // 8 == 0, w0, tl.where(byte // 8 == 1, w1, w2))
    end = tl.where(byte == size + digits, 41, 0).to(tl.uint64)
    value = tl.where(byte < size + digits, number // power % 10 + 48, end)
    value = tl.where(byte < size, word >> shift & 255, value)
    return tl.sum((value << shift).reshape(8, 8), axis=1), size + digits + 1


@triton.jit(do_not_specialize=["word0", "word1", "word2", "size"])
def round_keys_kernel(
    keys, step, word0, word1, word2, size, ROUNDS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr
):
    """Write the keys of all rounds, [ROUNDS, 2], for the step that stands in memory; one program."""
    number = tl.load(step).to(tl.uint64, bitcast=True)
    w0 = tl.cast(word0, tl.int64).to(tl.uint64, bitcast=True)
    w1 = tl.cast(word1, tl.int64).to(tl.uint64, bitcast=True)
    w2 = tl.cast(word2, tl.int64).to(tl.uint64, bitcast=True)
    words, length = _message(number, w0, w1, w2, size)
    zero = tl.zeros((), tl.uint64)
    m = (
        _word(words, 0), _word(words, 1), _word(words, 2), _word(words, 3),
        _word(words, 4), _word(words, 5), _word(words, 6), _word(words, 7),
        zero, zero, zero, zero, zero, zero, zero, zero,
    )  # fmt: skip
    start = zero + IV[0] ^ PARAMETERS
    v0, v1, v2, v3 = start, zero + IV[1], zero + IV[2], zero + IV[3]
    v4, v5, v6, v7 = zero + IV[4], zero + IV[5], zero + IV[6], zero + IV[7]
    v8, v9, v10, v11 = zero + IV[0], zero + IV[1], zero + IV[2], zero + IV[3]
    v12, v13, v14, v15 = zero + IV[4] ^ length.to(tl.uint64), zero + IV[5], zero + LAST, zero + IV[7]
    for i in tl.static_range(12):
        v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, m[SIGMA[i % 10][0]], m[SIGMA[i % 10][1]])
        v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, m[SIGMA[i % 10][2]], m[SIGMA[i % 10][3]])
        v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, m[SIGMA[i % 10][4]], m[SIGMA[i % 10][5]])
        v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, m[SIGMA[i % 10][6]], m[SIGMA[i % 10][7]])
        v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, m[SIGMA[i % 10][8]], m[SIGMA[i % 10][9]])
        v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, m[SIGMA[i % 10][10]], m[SIGMA[i % 10][11]])
        v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, m[SIGMA[i % 10][12]], m[SIGMA[i % 10][13]])
        v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, m[SIGMA[i % 10][14]], m[SIGMA[i % 10][15]])
    key = (start ^ v0 ^ v8).to(tl.int64, bitcast=True)
    for i in tl.static_range(ROUNDS):
        tl.store(keys + 2 * i, (key + i * FIRST) & 0xFFFFFFFF)
        tl.store(keys + 2 * i + 1, ((key >> 32) + i * SECOND) & 0xFFFFFFFF)


def round_keys(seed: int, step: Tensor, rounds: int, weyl: tuple[int, int]) -> Tensor:
    """Return the keys of all rounds for a step on the device, [rounds, 2] words as int64.

    One program: some 700 additions and 400 rotations of 64 bits, of which four at a time do not depend on
    each other, and a hundred divisions for the digits.

    Args:
        seed: of all noise, below MOST_SEED.
        step: a scalar int64, 0 or more, which is not checked: to read it is to wait for the device.
        rounds: how many there are.
        weyl: what both words of a key grow by from round to round.

    Raises:
        ValueError: the seed has too many digits.

    """
    if seed >= MOST_SEED:
        message = f"with a step on the device a seed is below 2^64, got {seed}"
        raise ValueError(message)
    prefix = f"({seed}, ".encode()
    words = [int.from_bytes(prefix[at : at + 8], "little") for at in (0, 8, 16)]
    keys = torch.empty(rounds, 2, device=step.device, dtype=torch.int64)
    with torch.cuda.device_of(step):
        round_keys_kernel[(1,)](
            keys, step, *words, len(prefix), ROUNDS=rounds, FIRST=weyl[0], SECOND=weyl[1], num_warps=1
        )  # fmt: skip
    return keys
