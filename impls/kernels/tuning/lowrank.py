"""Tiles of low-rank products."""

import torch
from torch import Generator

from impls.kernels.lowrank import NAME, low_rank_product, tiling_of
from impls.kernels.rows import Tiling
from impls.kernels.tuning.tunable import Launch, Task, Tunable, grid

SIZES = ((1024, 1024, 1024), (8192, 1024, 1024), (1024, 8192, 8192))
"""Rows, outputs and inputs of the suite ``kernels``."""


def default(sizes: tuple[int, ...]) -> Tiling:
    """Return the tiles where nothing was tuned."""
    return tiling_of(sizes[3])


def set_up(task: Task, device: torch.device) -> Launch:
    """Make rows, a weight and factors of members that have one row each."""
    rows, outputs, inputs, rank = task.sizes
    generator = Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=task.dtype, generator=generator)

    x, weight = normal(1, rows, 1, inputs), normal(outputs, inputs)
    down, up = normal(rows, rank, inputs), normal(rows, rank, outputs)
    y = torch.empty(1, rows, 1, outputs, device=device, dtype=task.dtype)
    return lambda tiling: low_rank_product(x, weight, down, up, 0.02, y, tiling)


TUNABLES = (
    Tunable(
        kernel=NAME,
        tasks=[Task(torch.bfloat16, (*sizes, rank)) for sizes in SIZES for rank in (1, 4)],
        default=default,
        candidates=grid(
            rows=(64, 128),
            columns=(64, 128, 256),
            deep=(32, 64),
            warps=(4, 8),
            stages=(2, 3, 4),
            group=(4, 8),
        ),
        set_up=set_up,
    ),
)
