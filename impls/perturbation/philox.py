"""Philox4x32-10: random numbers as a pure function of a key and four counters, for tensors on any device.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". A call maps four
counters (element / values per call, member, layer, draw) to four 32-bit words. A value depends on the words
of one call only, so any member and any element can be drawn alone, with the same bits.

Words, uniforms, bits and integers are equal on every device, and in kernels that use the same counters.
Normals (Box-Muller in float32) are equal up to the device's rounding of log, sqrt, sin and cos.

A draw takes ten rounds of 64-bit integer arithmetic, and each operation is a pass over memory. On a CPU it is
a few times slower than ``Tensor.normal_``.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from impls.perturbation.errors import UnsupportedError

MASK = 0xFFFFFFFF
"""The 32 bits of a word, and the largest word."""

SHARED = MASK
"""The member counter of draws that all members share; no member has it."""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
"""The constants of Philox4x32-10; ``WEYL`` is added to the key after each round."""

TILE = {"cpu": 2**16, "cuda": 2**20}
"""Calls computed at a time: their words fit a CPU core's cache, or keep a GPU busy for a launch."""

Key = tuple[int, int] | Tensor
"""Two words made of seed and step, or the tensor of :func:`device_keys`."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]
Counter = Tensor | int
Counters = tuple[Counter, Counter, Counter, Counter]


def philox(key: Key, c0: Tensor, c1: Tensor, c2: Counter, c3: Counter) -> Words:
    """Compute the four words of every call.

    Args:
        key: two words, or the keys of all rounds, [ROUNDS, 2] on the counters' device.
        c0: first counters as int64; the shapes of all counters broadcast.
        c1: second counters.
        c2: third counters, or one number for all calls.
        c3: fourth counters, or one number for all calls.

    Returns:
        Four int64 tensors of the broadcast shape, with values in [0, 2^32).
    """
    keys: Sequence[Sequence[Counter]] = (
        [pair.unbind() for pair in key.unbind()] if isinstance(key, Tensor) else _round_keys(key)
    )
    counters = _round(keys[1], _round(keys[0], (c0, c1, c2, c3)))
    shape = torch.broadcast_shapes(*(c.shape for c in counters if isinstance(c, Tensor)))
    c0, c1, c2, c3 = (_expand(counter, shape, c0.device) for counter in counters)
    # The other rounds compute what _round computes, in the memory of eight tensors.
    high0, high1, low0, low1 = (torch.empty_like(c0) for _ in range(4))
    for first, second in keys[2:]:
        torch.mul(c0, MULTIPLIERS[0], out=low0)
        torch.mul(c2, MULTIPLIERS[1], out=low1)
        torch.bitwise_right_shift(low1, 32, out=high1).bitwise_xor_(c1).bitwise_xor_(first).bitwise_and_(MASK)
        torch.bitwise_right_shift(low0, 32, out=high0).bitwise_xor_(c3).bitwise_xor_(second).bitwise_and_(
            MASK
        )
        # The bits above 32 of the low halves are masked in the next round, or at the end.
        c0, c1, c2, c3, high1, low1, high0, low0 = high1, low1, high0, low0, c0, c1, c2, c3
    return c0, c1.bitwise_and_(MASK), c2, c3.bitwise_and_(MASK)


def _round_keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the key of every round."""
    return [((key[0] + WEYL[0] * i) & MASK, (key[1] + WEYL[1] * i) & MASK) for i in range(ROUNDS)]


def _round(key: Sequence[Counter], counters: Counters) -> Counters:
    """Compute one round. Products wrap in int64, which leaves the same bits as unsigned arithmetic."""
    c0, c1, c2, c3 = counters
    product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
    return (
        ((product1 >> 32) ^ c1 ^ key[0]) & MASK,
        product1 & MASK,
        ((product0 >> 32) ^ c3 ^ key[1]) & MASK,
        product0 & MASK,
    )


def _expand(counter: Counter, shape: torch.Size, device: torch.device) -> Tensor:
    """Expand a counter to a new int64 tensor with one value for each call."""
    expanded = torch.empty(shape, dtype=torch.int64, device=device)
    return expanded.copy_(counter) if isinstance(counter, Tensor) else expanded.fill_(counter)


class Distribution(NamedTuple):
    """How values of a distribution are computed from random words.

    Attributes:
        values_per_call: n; element e is value e % n of call e // n.
        convert: function from words [...] to values [..., n].
    """

    values_per_call: int
    convert: Callable[[Words], Tensor]


def _normals(words: Words) -> Tensor:
    """Return normal values, r cos t and r sin t with r^2 = -2 log u and t = 2 pi v (Box and Muller 1958).

    Words 0 and 2 give u, words 1 and 3 give v.
    """
    values = torch.empty(*words[0].shape, 4, dtype=torch.float32, device=words[0].device)
    for pair in (0, 2):
        # u = (word + 1/2) / 2^32 is never 0, and its smallest value gives the largest normal, 6.7.
        radius = words[pair].float().mul_(2.0**-32).add_(2.0**-33).log_().mul_(-2).sqrt_()
        angle = words[pair + 1].float().mul_(2 * math.pi * 2.0**-32)
        torch.mul(radius, angle.cos(), out=values[..., pair])
        torch.mul(radius, angle.sin_(), out=values[..., pair + 1])
    return values


def _uniforms(words: Words) -> Tensor:
    """Return uniform values in [0, 1): the upper 24 bits of each word, which float32 represents exactly."""
    return torch.stack([word >> 8 for word in words], -1).float().mul_(2.0**-24)


def _bits(words: Words) -> Tensor:
    """Join the four words to two of 64 bits, as int64: words 0 and 2 are the low halves."""
    return torch.stack([words[0] | words[1] << 32, words[2] | words[3] << 32], -1)


SIGNS = (2 * np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little").view(np.int8) - 1).view(
    np.int64
)
"""The eight signs of each byte's bits as one int64; computing them takes longer than a small draw."""


def unpack_signs(words: Tensor) -> Tensor:
    """Unpack the bits of integers [..., n] to int8 signs [..., bits], lowest bit first: +1 for 1, -1 for 0.

    Each byte selects a row of a table of 256 rows of eight signs, as one int64.
    """
    if words.is_cpu and not torch.compiler.is_compiling():
        table = torch.from_numpy(SIGNS)
    else:
        values = torch.arange(256, device=words.device).unsqueeze(1)
        table = ((values >> torch.arange(8, device=words.device)) & 1).mul_(2).sub_(1).to(torch.int8)
        table = table.view(torch.int64).flatten()
    signs = table.index_select(0, words.view(torch.uint8).flatten().int())
    return signs.view(torch.int8).view(*words.shape[:-1], -1)


def fill_signs(values: Tensor, words: Tensor) -> Tensor:
    """Fill ``values`` [rows, count] with +1 or -1 for each of the first bits of int64 words [rows, n]."""
    if values.is_meta or not values.numel():
        return values
    count = values.shape[1]
    # TILE counts Philox calls; each gave two of these words.
    step = max(1, 2 * TILE.get(words.device.type, TILE["cpu"]) // words.shape[1])
    if step >= len(words):
        return values.copy_(unpack_signs(words)[:, :count])
    for row in range(0, len(words), step):
        values[row : row + step] = unpack_signs(words[row : row + step])[:, :count]
    return values


LEVEL_STEP = 14189 / 2**20
"""The difference of neighboring levels, sqrt(12 / (256^2 - 1)) rounded to 14 bits.

It makes the variance of levels 1 - 1e-5. Products with a byte are exact in float32, and so are levels,
whatever the order of operations.
"""


def fill_levels(values: Tensor, words: Tensor) -> Tensor:
    """Fill ``values`` [rows, count], float32, with levels of the first bytes of int64 words [rows, n].

    A level is (byte - 127.5) * LEVEL_STEP, which is exact in float32; lowest bytes come first.
    """
    if values.is_meta:
        return values
    values.copy_(words.view(torch.uint8)[:, : values.shape[1]])
    return torch.add(torch.tensor(-127.5 * LEVEL_STEP), values, alpha=LEVEL_STEP, out=values)  # one pass


NORMAL = Distribution(4, _normals)
UNIFORM = Distribution(4, _uniforms)
BITS = Distribution(2, _bits)


def integers_below(high: int) -> Distribution:
    """Return the uniform distribution of integers in [0, high), two per call.

    An integer is floor(high * w / 2^64) for 64 random bits w (Lemire 2019, arXiv:1805.10941, without
    rejection). Probabilities differ by a relative high / 2^64 at most.

    Raises:
        ValueError: high is outside [1, 2^32].
    """
    if not 1 <= high <= MASK + 1:
        raise ValueError(f"high must be 1 to 2^32 for random integers, got {high}")

    def integers(words: Words) -> Tensor:
        pairs = ((words[0], words[1]), (words[2], words[3]))  # w = 2^32 * upper + lower
        # The numbers are unsigned; >> of a negative int64 inserts sign bits, which the mask removes.
        return torch.stack(
            [((upper * high + ((lower * high) >> 32 & MASK)) >> 32) & MASK for upper, lower in pairs], -1
        )

    return Distribution(2, integers)


class DrawKey(NamedTuple):
    """The key of a draw and its last two counters; the first two are element and member.

    Attributes:
        key: made of seed and step.
        layer: hash of the layer's name, a word.
        draw: hash of the draw's name, a word.
    """

    key: Key
    layer: int
    draw: int

    @classmethod
    def of(cls, seed: int, step: int | Tensor, layer: str, draw: str) -> "DrawKey":
        """Hash seed, step and names; ``step`` is an int or the tensor of :func:`device_keys`."""
        key = step if isinstance(step, Tensor) else _key(seed, step)
        return cls(key, hash_name(layer, 32), hash_name(draw, 32))


def _key(seed: int, step: int) -> tuple[int, int]:
    """Hash seed and step to the two words of the key."""
    key = hash_name(repr((seed, step)), 64)
    return key & MASK, key >> 32


def hash_name(name: str, bits: int) -> int:
    """Hash a name to an unsigned integer of ``bits`` bits."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=bits // 8).digest(), "little")


def device_keys(seed: int, step: Tensor) -> Tensor:
    """Return the keys of all rounds for a step on a device, [ROUNDS, 2] words as int64 on that device.

    They are the keys of the same step as an int. They are computed on the device, so each replay of a CUDA
    graph uses the present value of the step.

    Args:
        seed: seed of all noise.
        step: a 0-d int64 tensor. Its value is not checked, because that would synchronize; it must not be
            negative.

    Raises:
        ValueError: on a GPU, the seed has more than 64 bits or triton is not installed.
    """
    keys: Tensor = _OPERATORS.philox_keys(str(seed), step)
    return keys


NAMESPACE = f"esbench_{hash_name(__file__, 32):08x}"
"""The namespace of operators in torch, derived from the file, so that a process can import two revisions."""
_OPERATORS = getattr(torch.ops, NAMESPACE)
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_LIBRARY.define("philox_keys(str seed, Tensor step) -> Tensor")  # on CUDA: impls.kernels.philox


@torch.library.impl(_LIBRARY, "philox_keys", "CPU")
def _keys_on_cpu(seed: str, step: Tensor) -> Tensor:
    return torch.tensor(_round_keys(_key(int(seed), int(step))))


@torch.library.register_fake(f"{NAMESPACE}::philox_keys", lib=_LIBRARY)  # type: ignore[untyped-decorator]  # torch's
def _empty_keys(seed: str, step: Tensor) -> Tensor:  # noqa: ARG001  only the shape, for meta and tracing
    return step.new_empty(ROUNDS, 2)


def fill(
    values: Tensor, distribution: Distribution, draw: DrawKey, members: range, elements: range
) -> Tensor:
    """Fill ``values`` [members, elements] with a draw's values of these members and elements, and return it.

    Values are rounded to the tensor's dtype. On ``meta`` nothing is drawn.

    Raises:
        ValueError: a member or an element is above the range of its 32-bit counter.
    """
    per_call = distribution.values_per_call
    calls = range(elements.start // per_call, -(-elements.stop // per_call))
    _check_counter("member", members)
    _check_counter(f"element / {per_call}", calls)
    if values.is_meta or not values.numel():
        return values
    device = values.device
    tile = TILE.get(device.type, TILE["cpu"])
    calls_at_once = min(tile, len(calls))
    members_at_once = tile // calls_at_once
    for row in range(0, len(members), members_at_once):
        tile_members = members[row : row + members_at_once]
        rows = slice(row, row + len(tile_members))
        c1 = torch.arange(tile_members.start, tile_members.stop, device=device).unsqueeze(1)
        for first_call in calls[::calls_at_once]:
            c0 = torch.arange(first_call, min(first_call + calls_at_once, calls.stop), device=device)
            drawn = distribution.convert(philox(draw.key, c0, c1, draw.layer, draw.draw)).flatten(1)
            # The first call may begin before the first element, and the last one end after the last.
            start = first_call * per_call - elements.start
            stop = min(start + drawn.shape[1], len(elements))
            values[rows, max(start, 0) : stop] = drawn[:, max(-start, 0) : stop - start]
    return values


def _check_counter(name: str, counters: range) -> None:
    if counters and not (counters[0] >= 0 and counters[-1] <= MASK):
        invalid = counters[0] if counters[0] < 0 else counters[-1]
        raise UnsupportedError(
            f"{name} = {invalid} is outside the counter range, 0 to 2^32 - 1: draw fewer values"
        )
