"""The harness's clock with the thread that samples the device running beside it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from esbench.measure.gpu_monitor import Sampler
from esbench.measure.nvml import Nvml, NvmlError
from esbench.measure.timers import Call, Clock, Visit

INTERVAL_S = 0.001
"""Readings come faster than in any pass of the harness: a visit lasts milliseconds."""


@dataclass(frozen=True)
class Sampled:
    """A clock, each visit of which runs inside the context that ``sampling`` opens."""

    clock: Clock
    sampling: Callable[[], AbstractContextManager[object]]

    @property
    def method(self) -> str:
        """The method of the clock."""
        return self.clock.method

    @property
    def warm_up_s(self) -> tuple[float, float]:
        """The least and the most seconds of a warm-up."""
        return self.clock.warm_up_s

    def seconds(self) -> float:
        """Seconds since some moment."""
        return self.clock.seconds()

    def prepare(self, call: Call, turns: int) -> Call:
        """Return what the clock times instead of the call."""
        return self.clock.prepare(call, turns)

    def visit(self, call: Call, calls: int) -> Visit:
        """Let the clock time so many calls while the device is sampled."""
        with self.sampling():
            return self.clock.visit(call, calls)


def sampled(clock: Clock, device: str) -> tuple[Sampled | None, str]:
    """Return the clock with NVML's sampler beside it, or none and why."""
    if device != "cuda":
        return None, "NVML samples a GPU, this is a CPU"
    try:
        nvml = Nvml()  # open until the process ends: each visit starts a thread that reads it
    except NvmlError as error:
        return None, str(error)
    return Sampled(clock, lambda: Sampler(nvml, INTERVAL_S)), ""
