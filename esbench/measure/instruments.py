"""The instruments of a device, with which a run measures: clocks, memory, profiler and GPU monitor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from esbench.measure import gpu_monitor, memory, profiler
from esbench.measure.gpu_monitor import Activity, ConditionsReader, foreign_processes
from esbench.measure.interleave import ReadConditions, no_conditions
from esbench.measure.memory import Footprint
from esbench.measure.profiler import Trace
from esbench.measure.timers import Call, Clock, clocks


def do_nothing() -> None:
    """Do nothing, in place of a synchronization: a call on a CPU returns when its work is done."""


@dataclass(frozen=True)
class Instruments:
    """The instruments of a device.

    Attributes:
        clocks: a clock for each timing method.
        footprint: measures the memory of a call.
        trace: counts the launches of a call.
        activity: measures utilization, power and energy of a call; None if the device does not report them.
        conditions: reads clock, temperature and power after each visit.
        synchronize: waits for the device.
        alive: returns whether the device still responds.
        other_processes: returns the other processes on the device.
        traces_last: whether calls are traced after the last timing, because a trace slows later calls down.
    """

    clocks: tuple[Clock, ...]
    footprint: Callable[[Call], Footprint]
    trace: Callable[[Call], Trace]
    activity: Callable[[Call], Activity] | None = None
    conditions: ReadConditions = no_conditions
    synchronize: Callable[[], object] = do_nothing
    alive: Callable[[], bool] = lambda: True
    other_processes: Callable[[], tuple[str, ...]] = tuple
    traces_last: bool = False


@contextmanager
def instruments(
    device: str, methods: tuple[str, ...] = (), idle_w: float | None = None
) -> Iterator[Instruments]:
    """Open the instruments of a device, with a clock for each timing method, by default for all.

    ``idle_w`` is the power of the idle GPU, which is subtracted for the net energy of a call.
    """
    if device != "cuda":
        yield Instruments(
            clocks=clocks(device, methods),
            footprint=partial(memory.footprint, device=device),
            trace=partial(profiler.trace, device=device),
        )
        return
    # A side stream: work that autograd recorded on the default stream cannot be captured.
    with ConditionsReader() as conditions, torch.cuda.stream(torch.cuda.Stream()):
        yield Instruments(
            clocks=clocks(device, methods),
            footprint=partial(memory.footprint, device=device, process_bytes=conditions.process_bytes),
            trace=partial(profiler.trace, device=device),
            activity=partial(gpu_monitor.monitor_call, idle_w=idle_w),
            conditions=conditions,
            synchronize=torch.cuda.synchronize,
            alive=_gpu_responds,
            other_processes=foreign_processes,
            traces_last=True,
        )


def _gpu_responds() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
