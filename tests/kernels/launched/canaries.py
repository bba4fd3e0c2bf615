"""Tensors between canaries (poisoned memory), and helpers that make operands of tests."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

POISON = 0x7FC0DEAD7FC0DEAD
"""NaN in float32 and in float64; in packed bits a value that would change a count of differing bits."""

AROUND = 512
"""Number of 64-bit words on each side of a buffer: more than a tile can reach beyond its edge."""

_empty = torch.empty


class Canaries:
    """Buffers with poison before and after them.

    In the interpreter a load or store outside the buffers fails, even if the loaded value is not used.
    """

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int, Tensor]] = []

    def empty(
        self, *shape: Any, device: torch.device | str = DEVICE, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Replace torch.empty: return a buffer full of poison, between canaries."""
        sizes = torch.Size(shape[0] if shape and isinstance(shape[0], tuple) else shape)
        size = sizes.numel() * dtype.itemsize
        room = _empty(2 * AROUND + -(-size // 8), dtype=torch.int64, device=DEVICE).fill_(POISON)
        assert torch.device(device).type == DEVICE
        self.buffers.append((room, size, room.clone()))
        return room.view(torch.uint8)[8 * AROUND : 8 * AROUND + size].view(dtype).view(sizes)

    def guard(self, values: Tensor) -> Tensor:
        """Return a copy of values between canaries."""
        copy = self.empty(*values.shape, dtype=values.dtype)
        return copy.copy_(values)

    def check(self) -> None:
        """Fail if a canary was overwritten."""
        for room, size, before in self.buffers:
            now, then = room.view(torch.uint8), before.view(torch.uint8)
            assert torch.equal(now[: 8 * AROUND], then[: 8 * AROUND])
            assert torch.equal(now[8 * AROUND + size :], then[8 * AROUND + size :])

    def watched(self, access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
        """Wrap a masked load or store of the interpreter so that addresses outside all buffers fail.

        Its mask is argument ``mask_at`` of those after the pointers.
        """

        def watching(pointers: Any, *arguments: Any, **options: Any) -> Any:
            addresses = pointers.data[np.asarray(arguments[mask_at].data, dtype=bool)].astype("int64")
            element_bytes = pointers.get_element_ty().primitive_bitwidth // 8
            is_inside = np.zeros(addresses.shape, dtype=bool)
            for room, size, _ in self.buffers:
                start = room.data_ptr() + 8 * AROUND
                is_inside |= (addresses >= start) & (addresses <= start + size - element_bytes)
            assert is_inside.all()
            return access(pointers, *arguments, **options)

        return watching


@contextlib.contextmanager
def canaries(*, is_watched: bool = True) -> Iterator[Canaries]:
    """Put every buffer from torch.empty between canaries, and check at the end that these are intact.

    Args:
        is_watched: whether the interpreter fails on loads and stores outside these buffers.
    """
    buffers = Canaries()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", buffers.empty)
        if is_watched and DEVICE == "cpu":
            builder = interpreter.interpreter_builder
            patch.setattr(builder, "create_masked_load", buffers.watched(builder.create_masked_load, 0))
            patch.setattr(builder, "create_masked_store", buffers.watched(builder.create_masked_store, 1))
        yield buffers
    buffers.check()


def generator(seed: int) -> torch.Generator:
    """Return a generator of a test's inputs, on the CPU."""
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers on the CPU and round them to a dtype."""
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed)).to(dtype).to(DEVICE)


def random_signs(seed: int, *shape: int) -> Tensor:
    """Draw +1 and -1 as int64, on the CPU."""
    return torch.randint(0, 2, shape, generator=generator(seed)) * 2 - 1


def packed(signs: Tensor, axis: int) -> Tensor:
    """Pack +1 and -1 along an axis into words of int64, by a loop over bits."""
    rows = signs.movedim(axis, 0)
    words = torch.zeros(-(-len(rows) // 64), *rows.shape[1:], dtype=torch.int64)
    for index, row in enumerate(rows):
        words[index // 64] |= (row > 0).long() << index % 64
    return words.movedim(0, axis).contiguous().to(DEVICE)


def product(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply +1 and -1, x [m, p, i] and weights [m, i, o], in int64 on the CPU: int32 [m, p, o]."""
    return torch.einsum("mpi,mio->mpo", x, weights).int()
