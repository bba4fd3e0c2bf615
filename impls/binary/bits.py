"""Packed bits: +1 is bit 1 and -1 is bit 0, in words of int64.

Bit e of a row is bit e % 64 of word e // 64. The unused bits of the last word, the tail, are zero. On
``meta`` tensors only shapes are computed.

On a CPU numpy counts bits, in torch's memory; other devices use plain torch.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from impls.perturbation.philox import unpack_signs

WORD_BITS = 64
"""Bits of a word."""

CHUNK_WORDS = {"cpu": 2**19, "cuda": 2**24}
"""Words that are processed at a time: as many as a core's cache holds, or as are worth a GPU's launches."""

PLANES = 9
"""Bits of a count of 256ths: eight, and one that is set for 256 only."""

Pair = tuple[int, int]
"""A vertical and a horizontal size."""


def word_count(length: int) -> int:
    """Return the number of words that hold ``length`` bits."""
    return -(-length // WORD_BITS)


def chunk_words(device: torch.device) -> int:
    """Return how many words a device processes at a time."""
    return CHUNK_WORDS.get(device.type, CHUNK_WORDS["cuda"])


def chunks(rows: int, words: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, of ``words`` words each, that a device processes at a time."""
    step = max(1, chunk_words(device) // max(1, words))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def pack(bits: Tensor) -> Tensor:
    """Pack bits [..., n] into words [..., words]: True, or a number above 0, is bit 1."""
    length = bits.shape[-1]
    words = torch.zeros(*bits.shape[:-1], word_count(length), dtype=torch.int64, device=bits.device)
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
    if words.shape[-1] != word_count(length):
        raise ValueError(f"{length} bits take {word_count(length)} words, got {words.shape[-1]}")
    if words.device.type == "cpu":
        bytes_ = np.ascontiguousarray(words.numpy()).view(np.uint8)
        on = np.unpackbits(bytes_, axis=-1, count=length, bitorder="little")
        return torch.from_numpy(on).view(torch.bool)
    # Copied: a slice of one word with a step counts as contiguous, but cannot be viewed as bytes.
    return unpack_signs(words.clone(memory_format=torch.contiguous_format))[..., :length] > 0


def unpack_as_signs(words: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Unpack words [..., words] to +1 and -1 of a signed dtype: [..., length]."""
    return unpack(words, length).to(dtype).mul_(2).sub_(1)


def expand(values: Tensor) -> Tensor:
    """Pack bytes [..., c], uint8 or int8, into words of 8 c bits: bit 8 j + b is bit b of value j.

    Raises:
        ValueError: the values are not bytes.
    """
    if values.dtype not in {torch.uint8, torch.int8}:
        raise ValueError(f"inputs of eight bits are uint8 or int8, got {values.dtype}")
    words = word_count(8 * values.shape[-1])
    expanded = torch.zeros(*values.shape[:-1], words, dtype=torch.int64, device=values.device)
    expanded.view(values.dtype)[..., : values.shape[-1]] = values
    return expanded


def popcount(words: Tensor) -> Tensor:
    """Count the set bits of each word, in plain torch."""
    counts = words - ((words >> 1) & 0x5555555555555555)
    counts = (counts & 0x3333333333333333) + ((counts >> 2) & 0x3333333333333333)
    counts.add_(counts >> 4).bitwise_and_(0x0F0F0F0F0F0F0F0F).mul_(0x0101010101010101)
    return counts.bitwise_right_shift_(56)


def round_probabilities(p: Tensor) -> Tensor:
    """Round probabilities to counts of 256ths: int16, from 0 to 256.

    The check waits for the device; it is skipped while a CUDA graph is captured.

    Raises:
        ValueError: some are NaN or outside [0, 1].
    """
    if not p.is_meta and not (p.is_cuda and torch.cuda.is_current_stream_capturing()):
        wrong = p.numel() - int(((p >= 0) & (p <= 1)).sum())
        if wrong:
            raise ValueError(f"{wrong} of {p.numel()} probabilities are NaN or outside [0, 1]")
    return (p * 256).round_().to(torch.int16)


def pack_planes(counts: Tensor) -> Tensor:
    """Pack each binary digit of counts of 256ths [..., n], lowest first: [9, ..., words]."""
    return torch.stack([pack((counts >> bit) & 1) for bit in range(PLANES)])


def sample(planes: Tensor, words: Tensor) -> Tensor:
    """Draw bits that are 1 with probability count / 256.

    From the lowest plane to the highest, each fair bit is combined by OR where the plane's bit is 1 and by
    AND elsewhere: the probability is halved, and increased by a half where the plane's bit is 1.

    Args:
        planes: those of the counts, [9, *shape]; zero in tails, whose bits are then never set.
        words: fair random words, [m, 8, *shape].

    Returns:
        Words [m, *shape].
    """
    drawn = torch.zeros(len(words), *planes.shape[1:], dtype=torch.int64, device=words.device)
    if drawn.is_meta:
        return drawn
    for start, stop in chunks(len(words), planes[0].numel(), words.device):
        on, fair = drawn[start:stop], words[start:stop]
        either = torch.empty_like(on)
        for bit in range(PLANES - 1):
            # on & fair, or on | fair where the plane's bit is 1.
            torch.bitwise_xor(on, fair[:, bit], out=either).bitwise_and_(planes[bit])
            on.bitwise_and_(fair[:, bit]).bitwise_or_(either)
        on.bitwise_or_(planes[-1])
    return drawn


def patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, channels: int | None = None) -> Tensor:
    """Return the windows of a convolution: words [..., h, w, c] -> [..., h', w', kh * kw * c].

    Images are padded with zero words: bits 0, which are -1. If ``channels`` is given and fits in one word,
    the kh * kw words of a window are joined by :func:`join_words`.

    Raises:
        ValueError: the kernel is larger than the padded image.
    """
    windows = _pad(x, kernel, padding).unfold(-3, kernel[0], stride[0]).unfold(-3, kernel[1], stride[1])
    if channels is None or x.shape[-1] != 1:
        return windows.movedim(-3, -1).flatten(-3)
    taps = [column[..., 0] for row in windows.unbind(-2) for column in row.unbind(-1)]
    return join_words(taps, channels).movedim(0, -1)


def join_words(words: Sequence[Tensor], length: int) -> Tensor:
    """Pack k words of ``length`` bits into fewer words: [*shape] each -> [k', *shape].

    A product of rows and columns that are both joined has the same value and reads fewer words.
    """
    per_word = max(1, WORD_BITS // max(1, length))
    joined = torch.stack(list(words[::per_word]))
    for index in range(1, per_word):
        for target, word in zip(joined, words[index::per_word], strict=False):
            target.bitwise_or_(word << index * length)
    return joined


def max_pool(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Return the maximum of each window, which is OR: words [..., h, w, c] -> [..., h', w', c].

    Images are padded with -1.

    Raises:
        ValueError: the kernel is larger than the padded image.
    """
    x = _pad(x, kernel, padding)
    # The OR of a window's rows, then of its columns.
    for axis, size, step in zip((-3, -2), kernel, stride, strict=True):
        windows = x.unfold(axis, size, step)
        x = windows[..., 0].clone()
        for index in range(1, size):
            x.bitwise_or_(windows[..., index])
    return x


def _pad(x: Tensor, kernel: Pair, padding: Pair) -> Tensor:
    """Pad images [..., h, w, c] with zero words."""
    vertical, horizontal = padding
    height, width = x.shape[-3] + 2 * vertical, x.shape[-2] + 2 * horizontal
    if height < kernel[0] or width < kernel[1]:
        raise ValueError(
            f"a kernel of {kernel} does not fit in an image of {(height, width)}, its padding included"
        )
    return functional.pad(x, (0, 0, horizontal, horizontal, vertical, vertical)) if any(padding) else x
