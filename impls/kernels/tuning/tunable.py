"""A kernel whose tiles may be tuned: all that has to be said of it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from impls.kernels.rows import Tiling

Launch = Callable[[Tiling], Tensor]
"""Compute with these tiles, on the same inputs every time."""


class Task(NamedTuple):
    """A type and sizes that a kernel is tuned for: all sizes of their bucket will have these tiles."""

    dtype: torch.dtype
    sizes: tuple[int, ...]


class Tunable(NamedTuple):
    """A kernel to be tuned.

    Attributes:
        kernel: the name under which its launcher asks for tiles.
        tasks: what it is tuned for.
        default: the tiles that it has at such sizes where nothing was tuned; others are held to its result.
        candidates: the tiles to be tried.
        set_up: make inputs for a task on a device, and return a call that computes with given tiles.

    """

    kernel: str
    tasks: Sequence[Task]
    default: Callable[[tuple[int, ...]], Tiling]
    candidates: Sequence[Tiling]
    set_up: Callable[[Task, torch.device], Launch]


def grid(
    rows: Sequence[int],
    columns: Sequence[int],
    deep: Sequence[int],
    warps: Sequence[int],
    stages: Sequence[int],
    group: Sequence[int] = (8,),
) -> tuple[Tiling, ...]:
    """Return every combination of these sizes."""
    return tuple(
        Tiling(r, c, d, g, w, s)
        for r in rows
        for c in columns
        for d in deep
        for g in group
        for w in warps
        for s in stages
    )
