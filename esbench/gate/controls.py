"""The gate's own work: as many units as are asked for, the same in both arms, from no tree.

Equal units show that the gate cries no wolf, 2 % more of them in one arm that it is not deaf.
"""

from collections.abc import Callable

import torch

SIDE = {"cpu": 48, "cuda": 512}
"""A unit is one product of square matrices of this side; on a CPU it takes some 5 us."""


def control(units: int, device: str) -> Callable[[], object]:
    """Return a call that does so many units of work, none of which depends on another."""
    generator = torch.Generator(device).manual_seed(0)
    side = SIDE[device]
    a, b = (torch.randn(side, side, generator=generator, device=device) for _ in range(2))
    out = torch.empty(side, side, device=device)

    def work() -> torch.Tensor:
        for _ in range(units):
            torch.mm(a, b, out=out)
        return out

    return work
