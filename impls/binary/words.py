"""Words of bits: how many bits they hold, and how many of them are set.

Words are int64, or int32, and one call takes one of the two. On a CPU numpy counts, which reads torch's
memory in place; other devices count in plain torch.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIZES = {torch.int64: 64, torch.int32: 32}
"""Bits of a word, by its type."""

ROOM = {"cpu": 2**19, "cuda": 2**24}
"""Words that are worked on at a time: what a core's cache holds; what is worth a GPU's launches."""


def size_of(*words: Tensor | torch.dtype) -> int:
    """Return the bits of a word of these types, which have to be one."""
    types = {of.dtype if isinstance(of, Tensor) else of for of in words}
    if len(types) > 1:
        message = f"words of one size in one call, got {' and '.join(sorted(map(str, types)))}"
        raise ValueError(message)
    kind = types.pop()
    if kind not in SIZES:
        message = f"words are int64 or int32, got {kind}"
        raise ValueError(message)
    return SIZES[kind]


def count(length: int, dtype: torch.dtype = torch.int64) -> int:
    """Return how many words hold so many bits."""
    return -(-length // size_of(dtype))


def pieces(rows: int, each: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that together have about as many words as are worked on at a time."""
    step = max(1, room(device) // max(1, each))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def room(device: torch.device) -> int:
    """Return how many words are worked on at a time."""
    return ROOM.get(device.type, ROOM["cuda"])


def popcount(words: Tensor) -> Tensor:
    """Count the bits of every word, int32."""
    size_of(words)
    if words.device.type == "cpu":
        return torch.from_numpy(np.asarray(np.bitwise_count(array(words)))).to(torch.int32)
    return swar(words).to(torch.int32)


def array(words: Tensor) -> np.ndarray[Any, Any]:
    """Look at words as unsigned ones: of a signed one numpy counts the bits of its magnitude."""
    return words.numpy().view(f"u{words.itemsize}")


def unpacked(words: Tensor) -> Tensor:
    """Write bits of contiguous words [..., words] out on a CPU, each as a byte of 0 or 1: [..., bits]."""
    return torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), axis=-1, bitorder="little"))


def swar(words: Tensor) -> Tensor:
    """Count bits within words, as words: of two, four and eight bits at once, and the bytes by a product."""
    size = size_of(words)
    ones = ((1 << size) - 1) // 255
    counts = words - ((words >> 1) & 0x55 * ones)
    counts = (counts & 0x33 * ones) + ((counts >> 2) & 0x33 * ones)
    counts.add_(counts >> 4).bitwise_and_(0x0F * ones).mul_(ones)
    return counts.bitwise_right_shift_(size - 8)
