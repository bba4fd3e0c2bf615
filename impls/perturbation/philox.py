"""Philox4x32-10: random numbers as a pure function of a key and four counters, for tensors on any device.

Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". A call takes four counters
(call of the element, member, layer, draw) and returns four 32-bit words; a value depends on the words of one
call only. So any member and any element can be drawn alone, and parts of a population or of a weight have
the bits of the whole.

Words, uniforms, bits and integers are equal on every device, and in kernels that call Philox with these
counters. Normals are Box-Muller in float32: they are equal up to the device's logarithm, square root, sine
and cosine.

Work: ten rounds in 64-bit integer arithmetic, one pass over memory for each operation. On a CPU a normal
number takes a few times as long as with ``Tensor.normal_``.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
"""The 32 bits of a word, and the largest word."""

SHARED = MASK
"""The member counter of draws that all members share; no member has it."""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

TILE = {"cpu": 2**16, "cuda": 2**20}
"""Calls computed at a time: their words fit a CPU core's cache, or are worth a GPU's launch."""

Key = tuple[int, int] | Tensor
"""Two words made of seed and step; for a step on a device :func:`device_keys`."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]
Counter = Tensor | int
Counters = tuple[Counter, Counter, Counter, Counter]


def philox(key: Key, c0: Tensor, c1: Tensor, c2: Counter, c3: Counter) -> Words:
    """Compute the four words of every call.

    Args:
        key: two words, or the keys of all rounds on the counters' device.
        c0: first counters, words as int64; the shapes of all counters broadcast.
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
    high0, high1, low0, low1 = (torch.empty_like(c0) for _ in range(4))
    for first, second in keys[2:]:
        torch.mul(c0, MULTIPLIERS[0], out=low0)
        torch.mul(c2, MULTIPLIERS[1], out=low1)
        torch.bitwise_right_shift(low1, 32, out=high1).bitwise_xor_(c1).bitwise_xor_(first).bitwise_and_(MASK)
        torch.bitwise_right_shift(low0, 32, out=high0).bitwise_xor_(c3).bitwise_xor_(second).bitwise_and_(
            MASK
        )
        # The bits above 32 of the low halves are masked later, where they matter.
        c0, c1, c2, c3, high1, low1, high0, low0 = high1, low1, high0, low0, c0, c1, c2, c3
    return c0, c1.bitwise_and_(MASK), c2, c3.bitwise_and_(MASK)


def _round_keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the key of every round."""
    return [((key[0] + WEYL[0] * i) & MASK, (key[1] + WEYL[1] * i) & MASK) for i in range(ROUNDS)]


def _round(key: Sequence[Counter], counters: Counters) -> Counters:
    """Compute one round; products of int64 wrap, with the same bits as unsigned ones."""
    c0, c1, c2, c3 = counters
    product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
    return (
        ((product1 >> 32) ^ c1 ^ key[0]) & MASK,
        product1 & MASK,
        ((product0 >> 32) ^ c3 ^ key[1]) & MASK,
        product0 & MASK,
    )


def _expand(counter: Counter, shape: torch.Size, device: torch.device) -> Tensor:
    """Return a counter as a new tensor with one value for each call."""
    written = torch.empty(shape, dtype=torch.int64, device=device)
    return written.copy_(counter) if isinstance(counter, Tensor) else written.fill_(counter)


class Distribution(NamedTuple):
    """A distribution: how values are computed from random words.

    Attributes:
        values_per_call: n; element e is value e % n of call e // n.
        convert: function from words [...] to values [..., n].

    """

    values_per_call: int
    convert: Callable[[Words], Tensor]


def _normals(words: Words) -> Tensor:
    """Box-Muller: words 0 and 2 give the radius, words 1 and 3 the angle; cosine first, then sine."""
    values = torch.empty(*words[0].shape, 4, dtype=torch.float32, device=words[0].device)
    for pair in (0, 2):
        # All 32 bits and never 0: the tails are as long as a word allows.
        radius = words[pair].float().mul_(2.0**-32).add_(2.0**-33).log_().mul_(-2).sqrt_()
        angle = words[pair + 1].float().mul_(2 * math.pi * 2.0**-32)
        torch.mul(radius, angle.cos(), out=values[..., pair])
        torch.mul(radius, angle.sin_(), out=values[..., pair + 1])
    return values


def _uniforms(words: Words) -> Tensor:
    """The upper 24 bits of a word, which float32 represents exactly: [0, 1)."""
    return torch.stack([word >> 8 for word in words], -1).float().mul_(2.0**-24)


def _bits(words: Words) -> Tensor:
    """Two words of 64 bits: words 0 and 2 are the low halves, words 1 and 3 the high ones."""
    return torch.stack([words[0] | words[1] << 32, words[2] | words[3] << 32], -1)


def unpack_signs(words: Tensor) -> Tensor:
    """Convert the bits of integers [..., words] to signs, +1 for a set bit: int8, [..., bits].

    Lowest bits come first. Each byte is looked up in a table of eight signs.
    """
    bytes_ = torch.arange(256, device=words.device).unsqueeze(1)
    table = ((bytes_ >> torch.arange(8, device=words.device)) & 1).mul_(2).sub_(1).to(torch.int8)
    signs = table.view(torch.int64).flatten().index_select(0, words.view(torch.uint8).flatten().int())
    return signs.view(torch.int8).view(*words.shape[:-1], -1)


def signs_from_words(words: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Convert the first bits of each row of int64 words [rows, words] to signs of any type, [rows, count]."""
    values = torch.empty(len(words), count, device=words.device, dtype=dtype)
    if values.is_meta or not values.numel():
        return values
    # A call gives two such words.
    step = max(1, 2 * TILE.get(words.device.type, TILE["cpu"]) // words.shape[1])
    for row in range(0, len(words), step):
        values[row : row + step] = unpack_signs(words[row : row + step])[:, :count]
    return values


NORMAL = Distribution(4, _normals)
UNIFORM = Distribution(4, _uniforms)
BITS = Distribution(2, _bits)


def integers_below(high: int) -> Distribution:
    """Uniform integers in [0, high), two per call.

    Each is the upper part of the product of high and 64 random bits; probabilities differ by at most
    high / 2^64 relative to each other.

    Raises:
        ValueError: high is outside [1, 2^32].

    """
    if not 1 <= high <= MASK + 1:
        message = f"integers are drawn below a limit of 1 to 2^32, got {high}"
        raise ValueError(message)

    def integers(words: Words) -> Tensor:
        pairs = ((words[0], words[1]), (words[2], words[3]))
        # Unsigned 64-bit numbers in int64: the mask removes the sign bits that a shift inserts.
        return torch.stack([((a * high + ((b * high) >> 32 & MASK)) >> 32) & MASK for a, b in pairs], -1)

    return Distribution(2, integers)


class DrawKey(NamedTuple):
    """The key and counters of a draw, all but element and member.

    Attributes:
        key: key made of seed and step.
        layer: word made of the layer's name.
        draw: word made of the draw's name.

    """

    key: Key
    layer: int
    draw: int

    @classmethod
    def of(cls, seed: int, step: int | Tensor, layer: str, draw: str) -> "DrawKey":
        """Hash names to words; ``step`` is an int, or :func:`device_keys` for a step on a device."""
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

    They equal the keys of the same step as an int, but are computed on the device: a captured CUDA graph uses
    the step that the tensor has at each replay. Later changes of the step do not change them.

    Args:
        seed: seed of all noise.
        step: a 0-d int64 tensor of at least 0; the value is not checked, which would synchronize.

    Raises:
        ValueError: the device is a GPU, and the seed has more than 64 bits or triton is not installed.

    """
    keys: Tensor = torch.ops.esbench.philox_keys(str(seed), step)
    return keys


_LIBRARY = torch.library.Library("esbench", "DEF")
_LIBRARY.define("philox_keys(str seed, Tensor step) -> Tensor")  # on CUDA: impls.kernels.philox


@torch.library.impl(_LIBRARY, "philox_keys", "CPU")
def _keys_on_cpu(seed: str, step: Tensor) -> Tensor:
    return torch.tensor(_round_keys(_key(int(seed), int(step))))


@torch.library.register_fake("esbench::philox_keys", lib=_LIBRARY)  # type: ignore[untyped-decorator]  # torch's
def _keys_of_no_device(seed: str, step: Tensor) -> Tensor:  # noqa: ARG001  the same for every seed
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
    columns = min(tile, len(calls))
    rows = tile // columns
    for row in range(0, len(members), rows):
        chunk = members[row : row + rows]
        c1 = torch.arange(chunk.start, chunk.stop, device=device).unsqueeze(1)
        for first in calls[::columns]:
            c0 = torch.arange(first, min(first + columns, calls.stop), device=device)
            tile_values = distribution.convert(philox(draw.key, c0, c1, draw.layer, draw.draw)).flatten(1)
            start = first * per_call - elements.start
            stop = min(start + tile_values.shape[1], len(elements))
            values[row : row + rows, max(start, 0) : stop] = tile_values[:, max(-start, 0) : stop - start]
    return values


def _check_counter(name: str, counters: range) -> None:
    if counters and not (counters[0] >= 0 and counters[-1] <= MASK):
        invalid = counters[0] if counters[0] < 0 else counters[-1]
        message = f"{name} = {invalid} is outside the counter range, 0 to 2^32 - 1: draw fewer values"
        raise ValueError(message)
