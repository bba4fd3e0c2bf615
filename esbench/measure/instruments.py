"""The instruments of a run; each is read in a pass of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from esbench.measure import memory
from esbench.measure.timing import Call, Clock, clock
from esbench.measure.utilization import Utilization, of_call


@dataclass(frozen=True)
class Instruments:
    """What a run reads: the clock, the peak of a call in bytes, its utilisation if there is one."""

    clock: Clock
    peak_bytes: Callable[[Call], int]
    utilization: Callable[[Call], Utilization] | None = None


def instruments(device: str) -> Instruments:
    """Return the instruments for a device."""
    return Instruments(
        clock=clock(device),
        peak_bytes=partial(memory.peak_bytes, device=device),
        utilization=of_call if device == "cuda" else None,
    )
