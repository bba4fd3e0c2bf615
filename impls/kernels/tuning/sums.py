"""Tiles of the sums that updates are made of."""

import torch
from torch import Generator

from impls.kernels.outer import CORES_TILING, NAMES, TILING, weighted_outer
from impls.kernels.rows import Tiling
from impls.kernels.tuning.tunable import Launch, Task, Tunable, grid

SIZES = ((1024, 1024, 1024), (1024, 1024, 8192), (8192, 8192, 1024))
"""Outputs, inputs and members of the suite ``kernels``, with one row each."""


def _tunable(*, signs: bool) -> Tunable:
    def set_up(task: Task, device: torch.device) -> Launch:
        outputs, inputs, rows, _ = task.sizes
        generator = Generator(device).manual_seed(0)
        left, right = (
            (2 * torch.randint(2, (rows, width), device=device, generator=generator) - 1).to(torch.int8)
            if signs
            else torch.randn(rows, width, device=device, dtype=task.dtype, generator=generator)
            for width in (outputs, inputs)
        )
        utilities = torch.randn(rows, device=device, dtype=task.dtype, generator=generator)
        return lambda tiling: weighted_outer(left, right, utilities, tiling=tiling)

    return Tunable(
        kernel=NAMES[signs],
        tasks=[Task(torch.bfloat16, (*sizes, 1)) for sizes in SIZES],
        default=_default,
        candidates=grid(
            rows=(64, 128), columns=(64, 128), deep=(32, 64, 128), warps=(4, 8), stages=(2, 3, 4)
        ),
        set_up=set_up,
    )


def _default(sizes: tuple[int, ...]) -> Tiling:
    return TILING if sizes[3] == 1 else CORES_TILING


TUNABLES = (_tunable(signs=False), _tunable(signs=True))
"""In the order in which they are tuned."""
