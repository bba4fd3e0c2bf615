"""Checks of what this machine can measure, as printed by ``esbench doctor``."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import psutil
import torch

from esbench.errors import UserError
from esbench.measure import memory
from esbench.measure.device_lock import holding
from esbench.measure.environment import (
    commit,
    cpu_name,
    device_uuid,
    governor,
    no_cuda,
    package_version,
)
from esbench.measure.float32_precision import AMPERE, TF32, missing_type
from esbench.measure.gpu_monitor import other_processes, own_pids
from esbench.measure.nvml import Nvml, NvmlError

BUSY = 0.25
"""A load above this share of the CPUs disturbs the times."""


class Finding(NamedTuple):
    """Something that a run needs or can use: whether it is available, and why or why not."""

    subject: str
    able: bool
    why: str


class _Lacking(str):
    """Why something is not available."""

    __slots__ = ()


def diagnosis() -> list[Finding]:
    """Check everything that affects a measurement here. Never fails."""
    checks: dict[str, Callable[[], str]] = {
        "CPU timing": cpu_name,
        "threads": _threads,
        "quiet machine": _load,
        "fixed CPU clock": _clock,
        "memory of a call on the CPU": _memory,
        "memory limit of a CPU run": _limit,
        "CPU to one run": partial(_lock, "cpu"),
    }
    rest = {"fused kernels": _triton, "commit of a run": _git}
    return [*map(_finding, checks, checks.values()), *_gpu(), *map(_finding, rest, rest.values())]


def _finding(subject: str, check: Callable[[], str]) -> Finding:
    try:
        why = check()
    except (NvmlError, UserError) as error:
        why = _Lacking(error)
    return Finding(subject, able=not isinstance(why, _Lacking), why=why)


def _threads() -> str:
    used, cpus = torch.get_num_threads(), usable_cpus()
    why = f"torch uses {used} threads on {cpus} usable CPUs"
    if used > cpus:
        return _Lacking(f"{why}, so they wait for each other; set OMP_NUM_THREADS={cpus}")
    return why


def _load() -> str:
    load, cpus = psutil.getloadavg()[0], usable_cpus()
    why = f"load average {load:.1f} on {cpus} usable CPUs"
    if load > BUSY * cpus:
        return _Lacking(f"{why}: other programs disturb CPU timings")
    return why


def _clock() -> str:
    rule = governor()
    if rule is None:
        return _Lacking("the system does not say how it sets the clock")
    if rule != "performance":
        return _Lacking(f"the governor is {rule}; only `performance` keeps the clock up")
    return f"the governor is {rule}"


def _memory() -> str:
    probe_bytes = 4096
    try:
        seen = memory.peak_bytes(lambda: torch.empty(probe_bytes, dtype=torch.uint8), "cpu")
    except RuntimeError as error:
        return _Lacking(f"torch's profiler does not run: {error}")
    if seen != probe_bytes:
        return _Lacking(f"torch's profiler counts {seen} bytes where {probe_bytes} were allocated")
    return "torch's allocator counts to the byte"


def _limit() -> str:
    if not memory.can_limit():
        return _Lacking("only Linux has one; a case that does not fit may end the run")
    room_gib = (memory.available_bytes() - memory.RESERVE_BYTES) / 1024**3
    return f"a case may take {room_gib:.1f} GiB; a larger one gets its reason"


def _lock(device: str) -> str:
    with holding(device_uuid(device) or device, "esbench doctor", print, wait_s=0):
        return "no other run of esbench is on it"


def _gpu() -> Iterator[Finding]:
    if missing := no_cuda():
        yield Finding("GPU timing and memory", able=False, why=missing)
        yield Finding("GPU utilisation", able=False, why="no GPU that torch can use")
        return
    # Before torch makes its CUDA context: that is how this process knows itself in NVML's list.
    own = own_pids()
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    why = f"{gpu.name}, {gpu.total_memory / 1024**3:.0f} GiB, L2 {gpu.L2_cache_size / 1024**2:.0f} MiB"
    yield Finding("GPU timing and memory", able=True, why=why)
    for dtype in (TF32, "bfloat16"):
        lacking = missing_type(dtype, "cuda")
        yield Finding(dtype, able=not lacking, why=lacking or "products of it")
    yield _finding("GPU to one run", partial(_lock, "cuda"))
    meters: dict[str, Callable[[Nvml], str]] = {
        "GPU utilisation": lambda nvml: f"{nvml.utilization_percent():.0f} % now, driver {nvml.driver()}",
        "GPU power": lambda nvml: f"{nvml.power_w():.0f} W now",
        "GPU energy": lambda nvml: f"{nvml.energy_j() / 1e3:.0f} kJ since the driver was loaded",
        "GPU clock": lambda nvml: f"{nvml.clock_hz() / 1e6:.0f} MHz now, {nvml.clock_policy()}",
        "GPU temperature": lambda nvml: f"{nvml.temperature_c():.0f} degrees Celsius now",
        "unthrottled GPU": _throttling,
        "GPU to itself": partial(_alone, own),
    }
    try:
        with Nvml() as nvml:
            yield from [_finding(subject, partial(ask, nvml)) for subject, ask in meters.items()]
    except NvmlError as error:
        yield from (Finding(subject, able=False, why=str(error)) for subject in meters)


def _throttling(nvml: Nvml) -> str:
    throttled = ", ".join(nvml.throttled())
    return (
        _Lacking(f"its clock is held down: {throttled}") if throttled else "nothing holds its clock down now"
    )


def _alone(own: frozenset[int], nvml: Nvml) -> str:
    others = other_processes(nvml, own)
    if not own:
        return _Lacking("NVML does not show this process, so others cannot be told from it")
    if others:
        return _Lacking(f"{', '.join(others)} would make a run invalid: they compute on it too")
    return "no other process computes on it"


def _triton() -> str:
    version = package_version("triton")
    if version is None:
        return _Lacking("triton is not installed; torch brings it with CUDA on Linux")
    if not torch.cuda.is_available():
        return _Lacking(f"triton {version} has no GPU to run on")
    capability = torch.cuda.get_device_capability()
    if capability < AMPERE:
        have, need = (".".join(map(str, one)) for one in (capability, AMPERE))
        return _Lacking(f"they need a GPU of capability {need} or more, this one has {have}")
    return f"triton {version}"


def _git() -> str:
    return commit() or _Lacking("esbench runs from no git checkout, or git is missing")


def usable_cpus() -> int:
    """Return how many CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
