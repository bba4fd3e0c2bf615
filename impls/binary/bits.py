"""Packed bits: +1 is bit 1 and -1 is bit 0, in words of int64 or int32.

Bit e of a row is bit e % size of word e // size, where size is 64 or 32. The unused bits of the last word,
the tail, are zero. All words of one call have the same type. On ``meta`` tensors only shapes are computed.

On a CPU numpy counts bits, in torch's memory; other devices use plain torch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from impls.perturbation.philox import signs_of

WORD_BITS = {torch.int64: 64, torch.int32: 32}
"""Bits of a word, by its type."""

CHUNK_WORDS = {"cpu": 2**19, "cuda": 2**24}
"""Words that are processed at a time: as many as a core's cache holds, or as are worth a GPU's launches."""

PLANES = 9
"""Bits of a count of 256ths: eight, and one that is set for 256 only."""

Pair = int | tuple[int, int]


def word_bits(*words: Tensor | torch.dtype) -> int:
    """Return the number of bits of a word of a type, or of the common type of tensors.

    Raises:
        ValueError: the types differ, or are not those of words.

    """
    types = {one.dtype if isinstance(one, Tensor) else one for one in words}
    if len(types) > 1:
        message = f"all words in a call must have the same size, got {' and '.join(sorted(map(str, types)))}"
        raise ValueError(message)
    kind = types.pop()
    if kind not in WORD_BITS:
        message = f"words are int64 or int32, got {kind}"
        raise ValueError(message)
    return WORD_BITS[kind]


def word_count(length: int, dtype: torch.dtype = torch.int64) -> int:
    """Return the number of words that hold ``length`` bits."""
    return -(-length // word_bits(dtype))


def chunk_words(device: torch.device) -> int:
    """Return how many words a device processes at a time."""
    return CHUNK_WORDS.get(device.type, CHUNK_WORDS["cuda"])


def chunks(rows: int, words: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, of ``words`` words each, that a device processes at a time."""
    step = max(1, chunk_words(device) // max(1, words))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def pack(bits: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Pack bits [..., n] into words [..., words]: True, or a number above 0, is bit 1."""
    length = bits.shape[-1]
    words = torch.zeros(*bits.shape[:-1], word_count(length, dtype), dtype=dtype, device=bits.device)
    bytes_ = words.view(torch.uint8)[..., : -(-length // 8)]
    # Eight bits at a time, each in its own byte of an int64.
    eights = torch.zeros(bytes_.shape, dtype=torch.int64, device=bits.device)
    torch.gt(bits, 0, out=eights.view(torch.bool)[..., :length])
    # The product moves the bit of byte i to bit 56 + i; nothing carries into those.
    bytes_.copy_(eights.mul_(0x0102040810204080).bitwise_right_shift_(56))
    return words


def unpack(words: Tensor, length: int) -> Tensor:
    """Unpack words [..., words] to bool [..., length].

    Raises:
        ValueError: ``length`` bits take another number of words.

    """
    return _signs(words, length) > 0


def unpack_bytes(words: Tensor) -> Tensor:
    """Unpack contiguous words [..., words] on a CPU to bytes of 0 or 1: [..., bits]."""
    return torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), axis=-1, bitorder="little"))


def signed(words: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Unpack words [..., words] to +1 and -1 of any signed type: [..., length].

    Raises:
        ValueError: ``length`` bits take another number of words.

    """
    return _signs(words, length).to(dtype).contiguous()


def _signs(words: Tensor, length: int) -> Tensor:
    if words.shape[-1] * word_bits(words) - length not in range(word_bits(words)):
        message = f"{length} bits take {word_count(length, words.dtype)} words, got {words.shape[-1]}"
        raise ValueError(message)
    if not words.numel():
        return torch.empty(*words.shape[:-1], length, dtype=torch.int8, device=words.device)
    # Copied: a slice of one word with a step counts as contiguous, but cannot be viewed as bytes.
    return signs_of(words.clone(memory_format=torch.contiguous_format))[..., :length]


def expand(values: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make each bit of bytes [..., c], uint8 or int8, a packed bit: words of 8 c bits.

    Bit 8 j + b is bit b of value j; the sign is bit 7.

    Raises:
        ValueError: the values are not bytes.

    """
    if values.dtype not in {torch.uint8, torch.int8}:
        message = f"inputs of eight bits are uint8 or int8, got {values.dtype}"
        raise ValueError(message)
    words = word_count(8 * values.shape[-1], dtype)
    expanded = torch.zeros(*values.shape[:-1], words, dtype=dtype, device=values.device)
    expanded.view(values.dtype)[..., : values.shape[-1]] = values
    return expanded


def unsigned(words: Tensor) -> np.ndarray[Any, Any]:
    """View words as unsigned: numpy counts the bits of the magnitude of a signed integer."""
    return words.numpy().view(f"u{words.itemsize}")


def popcount_swar(words: Tensor) -> Tensor:
    """Count the set bits of each word by arithmetic within words; the counts have the type of the words."""
    size = word_bits(words)
    ones = ((1 << size) - 1) // 255
    counts = words - ((words >> 1) & 0x55 * ones)
    counts = (counts & 0x33 * ones) + ((counts >> 2) & 0x33 * ones)
    counts.add_(counts >> 4).bitwise_and_(0x0F * ones).mul_(ones)
    return counts.bitwise_right_shift_(size - 8)


def quantised(p: Tensor) -> Tensor:
    """Round probabilities to counts of 256ths: int16, from 0 to 256.

    The check waits for the device; it is skipped while a CUDA graph is captured.

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
    """Pack each binary digit of counts of 256ths [..., n], lowest first: [9, ..., words]."""
    return torch.stack([pack((counts >> bit) & 1, dtype) for bit in range(PLANES)])


def sample(planes: Tensor, words: Tensor) -> Tensor:
    """Draw bits that are 1 with probability count / 256.

    From the lowest plane to the highest, each fair bit is combined by OR where the plane's bit is 1 and by
    AND elsewhere: the probability is halved, and increased by a half where the plane's bit is 1.

    Args:
        planes: those of the counts, [9, *shape]; zero in tails, whose bits are then never set.
        words: fair random words, [m, 8, *shape].

    Returns:
        Words [m, *shape].

    Raises:
        ValueError: planes and words differ in their type or shape.

    """
    word_bits(planes, words)
    shape = planes.shape[1:]
    if len(planes) != PLANES or words.shape[1:] != (PLANES - 1, *shape):
        message = f"planes [9, *shape] take words [m, 8, *shape], got {[*planes.shape]} and {[*words.shape]}"
        raise ValueError(message)
    drawn = torch.zeros(len(words), *shape, dtype=words.dtype, device=words.device)
    if drawn.is_meta:
        return drawn
    for start, stop in chunks(len(words), shape.numel(), words.device):
        on, fair = drawn[start:stop], words[start:stop]
        either = torch.empty_like(on)
        for bit in range(PLANES - 1):
            torch.bitwise_xor(on, fair[:, bit], out=either).bitwise_and_(planes[bit])
            on.bitwise_and_(fair[:, bit]).bitwise_or_(either)
        on.bitwise_or_(planes[-1])
    return drawn


def patches(
    x: Tensor, kernel_size: Pair, stride: Pair = 1, padding: Pair = 0, channels: int | None = None
) -> Tensor:
    """Return the windows of a convolution: words [..., h, w, c] -> [..., h', w', kh * kw * c].

    Images are padded with zero words: bits 0, which are -1. If ``channels`` is given and fits in one word,
    the kh * kw words of a window are :func:`joined`.

    Raises:
        ValueError: the kernel is larger than the padded image, or a size is out of range.

    """
    kernel, steps = pair("kernel_size", kernel_size, 1), pair("stride", stride, 1)
    seen = _padded(x, kernel, padding).unfold(-3, kernel[0], steps[0]).unfold(-3, kernel[1], steps[1])
    if channels is None or x.shape[-1] != 1:
        return seen.movedim(-3, -1).flatten(-3)
    taps = [column[..., 0] for row in seen.unbind(-2) for column in row.unbind(-1)]
    return joined(taps, channels).movedim(0, -1)


def joined(words: Sequence[Tensor], length: int) -> Tensor:
    """Pack k words of ``length`` bits into fewer words: [*shape] each -> [k', *shape].

    As many as fit share a word. Products of rows that are packed alike keep their value and read fewer words.
    """
    fit = max(1, word_bits(*words) // max(1, length))
    found = torch.stack(list(words[::fit]))
    for place in range(1, fit):
        for into, part in zip(found, words[place::fit], strict=False):
            into.bitwise_or_(part << place * length)
    return found


def max_pool(x: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Return the maximum of each window, which is OR: words [..., h, w, c] -> [..., h', w', c].

    Images are padded with -1. Without ``stride``, windows do not overlap.

    Raises:
        ValueError: as for :func:`patches`.

    """
    kernel = pair("kernel_size", kernel_size, 1)
    steps = kernel if stride is None else pair("stride", stride, 1)
    x = _padded(x, kernel, padding)
    for axis, size, step in zip((-3, -2), kernel, steps, strict=True):
        windows = x.unfold(axis, size, step)
        x = windows[..., 0].clone()
        for place in range(1, size):
            x.bitwise_or_(windows[..., place])
    return x


def pair(name: str, sizes: Pair, least: int) -> tuple[int, int]:
    """Return the sizes of both axes, given one number or two.

    Raises:
        ValueError: there are not one or two integers of at least ``least``.

    """
    both = (sizes, sizes) if isinstance(sizes, int) else sizes
    if len(both) != 2 or not all(isinstance(size, int) and size >= least for size in both):  # noqa: PLR2004  height and width
        message = f"{name} must be one or two integers of at least {least}, got {sizes!r}"
        raise ValueError(message)
    return both


def _padded(x: Tensor, kernel: tuple[int, int], padding: Pair) -> Tensor:
    """Pad images [..., h, w, c] with zero words."""
    down, across = pair("padding", padding, 0)
    word_bits(x)
    height, width = x.shape[-3] + 2 * down, x.shape[-2] + 2 * across
    if height < kernel[0] or width < kernel[1]:
        message = f"a kernel of {kernel} does not fit in an image of {(height, width)} with its padding"
        raise ValueError(message)
    return functional.pad(x, (0, 0, across, across, down, down)) if down or across else x
