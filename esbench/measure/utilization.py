"""GPU utilisation of one call, in a pass of its own.

NVML's figure is the share of a window with a kernel running, and says nothing of how much of the
GPU that kernel uses. It looks back over up to a second, so sampling starts after a lead-in.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch

from esbench.measure.nvml import Nvml, NvmlError

METHOD = "nvml"


class Pace(NamedTuple):
    """Seconds before the first reading, from then to the end, and between readings."""

    lead_in_s: float = 1.0
    window_s: float = 2.0
    interval_s: float = 0.1


PACE = Pace()


class Gauge(Protocol):
    """What tells the utilisation: NVML, or a fake of it."""

    def utilization_percent(self) -> float:
        """Return the share of the last sample period with a kernel running.

        Raises:
            NvmlError: it cannot say.

        """


@dataclass(frozen=True)
class Utilization:
    """Percentages as they were read, or none of them and the reason."""

    samples: tuple[float, ...]
    reason: str = ""


class Sampler:
    """Reads a gauge at intervals on a thread of its own, from entering to leaving the context."""

    def __init__(self, gauge: Gauge, pace: Pace) -> None:
        """Prepare the thread; entering the context starts it."""
        self._gauge = gauge
        self._pace = pace
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="esbench-utilization", daemon=True)
        self._samples: list[float] = []
        self._reason = ""

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread and wait for it."""
        self._over.set()
        self._thread.join()

    @property
    def result(self) -> Utilization:
        """What was read; nothing but the reason if any reading failed."""
        if self._reason:
            return Utilization((), self._reason)
        return Utilization(tuple(self._samples), "" if self._samples else "the pass ended before a reading")

    def _read(self) -> None:
        wait_s = self._pace.lead_in_s
        while not self._over.wait(wait_s):
            wait_s = self._pace.interval_s
            try:
                self._samples.append(self._gauge.utilization_percent())
            except NvmlError as error:
                self._reason = str(error)
                return


def of_call(call: Callable[[], object]) -> Utilization:
    """Loop a CUDA call for some seconds and return NVML's readings meanwhile."""
    try:
        with Nvml() as nvml:
            return watch(call, nvml, torch.cuda.synchronize)
    except NvmlError as error:
        return Utilization((), str(error))


def watch(
    call: Callable[[], object], gauge: Gauge, synchronize: Callable[[], object], pace: Pace = PACE
) -> Utilization:
    """Loop a call for lead-in and window and return the readings of the window.

    The call is waited for each time, so that launches do not pile up; the gap this leaves between
    kernels is part of the figure.
    """
    with Sampler(gauge, pace) as sampler:
        end = time.monotonic() + pace.lead_in_s + pace.window_s
        while time.monotonic() < end:
            call()
            synchronize()
    return sampler.result
