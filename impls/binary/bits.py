"""Networks of bits: +1 is bit 1 and -1 is bit 0, packed into words.

Words are int64, or int32, and one call takes one of the two. Bit e of a row is bit e % size of its word
e // size, lowest first; the bits behind the last one, the tail, are zero. Wherever two rows of bits meet,
tails are equal and so count for nothing.

Words and what is counted of them are :mod:`impls.binary.words`; sums over bits,
:mod:`impls.binary.bit_products`; all of it
is called by this module's name. On ``meta`` shapes are made and nothing is computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from impls.binary.bit_products import products, weighted_sum
from impls.binary.words import count, pieces, popcount, size_of
from impls.perturbation.philox import signs_of

__all__ = [
    "count",
    "expand",
    "joined",
    "max_pool",
    "pack",
    "patches",
    "planes",
    "popcount",
    "products",
    "quantised",
    "sample",
    "signed",
    "thresholded",
    "unpack",
    "weighted_sum",
]

PLANES = 9
"""Bits of a count of 256ths: eight, and one that is set for 256 alone."""

Pair = int | tuple[int, int]


def pack(bits: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Pack bits [..., n] into words [..., words]: True, or a number above 0, is bit 1."""
    length = bits.shape[-1]
    words = torch.zeros(*bits.shape[:-1], count(length, dtype), dtype=dtype, device=bits.device)
    bytes_ = words.view(torch.uint8)[..., : -(-length // 8)]
    # Eight bits at a time, each in a byte of its own.
    eights = torch.zeros(bytes_.shape, dtype=torch.int64, device=bits.device)
    torch.gt(bits, 0, out=eights.view(torch.bool)[..., :length])
    # Byte i meets 2^(56 - 7 i): its bit comes to stand at 56 + i, and nothing carries into those.
    bytes_.copy_(eights.mul_(0x0102040810204080).bitwise_right_shift_(56))
    return words


def unpack(words: Tensor, length: int) -> Tensor:
    """Write bits out as bool, [..., words] -> [..., length].

    Raises:
        ValueError: so many bits do not take so many words.

    """
    return _signs(words, length) > 0


def signed(words: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Write bits out as +1 and -1 of any signed type, [..., words] -> [..., length].

    Raises:
        ValueError: so many bits do not take so many words.

    """
    return _signs(words, length).to(dtype).contiguous()


def _signs(words: Tensor, length: int) -> Tensor:
    if words.shape[-1] * size_of(words) - length not in range(size_of(words)):
        message = f"{length} bits take {count(length, words.dtype)} words, got {words.shape[-1]}"
        raise ValueError(message)
    if not words.numel():
        return torch.empty(*words.shape[:-1], length, dtype=torch.int8, device=words.device)
    # A copy, for one word of a slice with steps counts as contiguous, and cannot be looked at as bytes.
    return signs_of(words.clone(memory_format=torch.contiguous_format))[..., :length]


def expand(values: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Take every bit of bytes [..., c], uint8 or int8, as a bit of its own: words of 8 c bits.

    Bit 8 j + b is bit b of value j; the sign is bit 7.

    Raises:
        ValueError: the values are no bytes.

    """
    if values.dtype not in {torch.uint8, torch.int8}:
        message = f"inputs of eight bits are uint8 or int8, got {values.dtype}"
        raise ValueError(message)
    words = count(8 * values.shape[-1], dtype)
    expanded = torch.zeros(*values.shape[:-1], words, dtype=dtype, device=values.device)
    expanded.view(values.dtype)[..., : values.shape[-1]] = values
    return expanded


def quantised(p: Tensor) -> Tensor:
    """Round probabilities to counts of 256ths, int16 from 0 to 256.

    What is wrong is found by waiting for the device; while a CUDA graph is captured nothing is looked for.

    Raises:
        ValueError: some are NaN or outside [0, 1].

    """
    if not p.is_meta and not (p.is_cuda and torch.cuda.is_current_stream_capturing()):
        wrong = p.numel() - int(((p >= 0) & (p <= 1)).sum())
        if wrong:
            message = f"{wrong} of {p.numel()} probabilities are NaN or outside [0, 1]"
            raise ValueError(message)
    return (p * 256).round_().to(torch.int16)


def planes(counts: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Pack counts of 256ths [..., n] by their bits, lowest first: [9, ..., words]. The last is always on."""
    return torch.stack([pack((counts >> bit) & 1, dtype) for bit in range(PLANES)])


def sample(planes: Tensor, words: Tensor) -> Tensor:
    """Draw bits that are 1 with probability count / 256.

    From the lowest plane upwards a fair bit joins by OR, where the plane's bit is 1, or by AND: that halves
    the probability, and adds a half where the plane has a bit. Planes are zero in a tail: nothing comes on.

    Args:
        planes: of the counts, [9, *shape]; axes of ``shape`` mean nothing here.
        words: fair random words, [m, 8, *shape].

    Returns:
        Words [m, *shape].

    Raises:
        ValueError: planes and words differ in their type or shape.

    """
    size_of(planes, words)
    shape = planes.shape[1:]
    if len(planes) != PLANES or words.shape[1:] != (PLANES - 1, *shape):
        message = f"planes [9, *shape] take words [m, 8, *shape], got {[*planes.shape]} and {[*words.shape]}"
        raise ValueError(message)
    drawn = torch.zeros(len(words), *shape, dtype=words.dtype, device=words.device)
    if drawn.is_meta:
        return drawn
    for start, stop in pieces(len(words), shape.numel(), words.device):
        on, fair = drawn[start:stop], words[start:stop]
        either = torch.empty_like(on)
        for bit in range(PLANES - 1):
            torch.bitwise_xor(on, fair[:, bit], out=either).bitwise_and_(planes[bit])
            on.bitwise_and_(fair[:, bit]).bitwise_or_(either)
        on.bitwise_or_(planes[-1])
    return drawn


def thresholded(y: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Turn sums [..., o], real or integer, into the bits that follow: packed words of y > 0."""
    return pack(y, dtype)


def _pair(name: str, value: Pair, least: int) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else value
    if min(first, second) < least:
        message = f"{name} is one or two integers of {least} or more, got {value!r}"
        raise ValueError(message)
    return first, second


def _padded(x: Tensor, kernel: tuple[int, int], padding: Pair) -> Tensor:
    """Put zero words around images [..., h, w, c]."""
    down, across = _pair("padding", padding, 0)
    size_of(x)
    high, wide = x.shape[-3] + 2 * down, x.shape[-2] + 2 * across
    if high < kernel[0] or wide < kernel[1]:
        message = f"a kernel of {kernel} does not fit in an image of {(high, wide)} with its padding"
        raise ValueError(message)
    return functional.pad(x, (0, 0, across, across, down, down)) if down or across else x


def patches(
    x: Tensor, kernel_size: Pair, stride: Pair = 1, padding: Pair = 0, channels: int | None = None
) -> Tensor:
    """Write out what a convolution sees: words [..., h, w, c] -> [..., h', w', kh * kw * c].

    Outside the image are zero words: bits 0, which are -1. If the number of channels is given, and a position
    is one word of them, the kh * kw words are :func:`joined`.

    Raises:
        ValueError: the kernel is larger than the image with its padding, or a size makes no sense.

    """
    kernel, steps = _pair("kernel_size", kernel_size, 1), _pair("stride", stride, 1)
    seen = _padded(x, kernel, padding).unfold(-3, kernel[0], steps[0]).unfold(-3, kernel[1], steps[1])
    if channels is None or x.shape[-1] != 1:
        return seen.movedim(-3, -1).flatten(-3)
    taps = [column[..., 0] for row in seen.unbind(-2) for column in row.unbind(-1)]
    return joined(taps, channels).movedim(0, -1)


def joined(words: Sequence[Tensor], length: int) -> Tensor:
    """Lay words of ``length`` bits side by side, as many in one as fit: k times [*shape] -> [k', *shape].

    Their tails are zero. A product of two such rows is the same, and has fewer words to read.
    """
    fit = max(1, size_of(*words) // max(1, length))
    found = torch.stack(list(words[::fit]))
    for at in range(1, fit):
        for into, part in zip(found, words[at::fit], strict=False):
            into.bitwise_or_(part << at * length)
    return found


def max_pool(x: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Take the largest bit of every window, which is OR: words [..., h, w, c] -> [..., h', w', c].

    Any padding may be asked for; it is -1, bits 0. Without ``stride`` windows stand side by side.

    Raises:
        ValueError: as for :func:`patches`.

    """
    kernel = _pair("kernel_size", kernel_size, 1)
    steps = kernel if stride is None else _pair("stride", stride, 1)
    x = _padded(x, kernel, padding)
    for axis, size, step in zip((-3, -2), kernel, steps, strict=True):
        windows = x.unfold(axis, size, step)
        x = windows[..., 0].clone()
        for at in range(1, size):
            x.bitwise_or_(windows[..., at])
    return x
