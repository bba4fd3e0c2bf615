"""Checks of what this machine can measure, as printed by ``esbench doctor``."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import psutil
import torch

from esbench.measure import memory
from esbench.measure.device_lock import LockError, holding
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

METERS: dict[str, Callable[[Nvml], str]] = {
    "GPU utilisation": lambda nvml: f"{nvml.utilization_percent():.0f} % now, driver {nvml.driver()}",
    "GPU power": lambda nvml: f"{nvml.power_w():.0f} W now",
    "GPU energy": lambda nvml: f"{nvml.energy_j() / 1e3:.0f} kJ since the driver was loaded",
    "GPU clock": lambda nvml: f"{nvml.clock_hz() / 1e6:.0f} MHz now, {nvml.clock_policy()}",
    "GPU temperature": lambda nvml: f"{nvml.temperature_c():.0f} degrees Celsius now",
}
"""Meter -> a question to NVML."""


class Finding(NamedTuple):
    """Something that a run needs or can use: whether it is available, and why or why not."""

    subject: str
    able: bool
    why: str


def diagnosis() -> list[Finding]:
    """Check everything that affects a measurement here. Never fails."""
    return [
        _timing(),
        _threads(),
        _quiet(),
        _clocks(),
        _pinning(),
        _memory(),
        _limit(),
        _lock("cpu"),
        *_gpu(),
        _triton(),
        _git(),
    ]


def _timing() -> Finding:
    resolution_ns = time.get_clock_info("perf_counter").resolution * 1e9
    return Finding("CPU timing", able=True, why=f"{cpu_name()}; the clock resolves {resolution_ns:.0f} ns")


def _threads() -> Finding:
    used, cpus = torch.get_num_threads(), usable_cpus()
    why = f"torch uses {used} threads on {cpus} usable CPUs"
    if used > cpus:
        return Finding(
            "threads", able=False, why=f"{why}, so they wait for each other; set OMP_NUM_THREADS={cpus}"
        )
    return Finding("threads", able=True, why=why)


def _quiet() -> Finding:
    load, cpus = psutil.getloadavg()[0], usable_cpus()
    why = f"load average {load:.1f} on {cpus} usable CPUs"
    if load > BUSY * cpus:
        return Finding("quiet machine", able=False, why=f"{why}: other programs disturb CPU timings")
    return Finding("quiet machine", able=True, why=why)


def _clocks() -> Finding:
    rule = governor()
    if rule is None:
        return Finding("fixed CPU clock", able=False, why="the system does not say how it sets the clock")
    why = f"the governor is {rule}"
    if rule != "performance":
        return Finding("fixed CPU clock", able=False, why=f"{why}; only `performance` keeps the clock up")
    return Finding("fixed CPU clock", able=True, why=why)


def _pinning() -> Finding:
    if not hasattr(os, "sched_setaffinity"):
        return Finding("pinning to CPUs", able=False, why="this system cannot pin a process to CPUs")
    return Finding("pinning to CPUs", able=True, why=f"e.g. `taskset -c 0-{usable_cpus() - 1} esbench run`")


def _memory() -> Finding:
    probe_bytes = 4096
    try:
        seen = memory.peak_bytes(lambda: torch.empty(probe_bytes, dtype=torch.uint8), "cpu")
    except RuntimeError as error:
        return Finding(
            "memory of a call on the CPU", able=False, why=f"torch's profiler does not run: {error}"
        )
    if seen != probe_bytes:
        why = f"torch's profiler counts {seen} bytes where {probe_bytes} were allocated"
        return Finding("memory of a call on the CPU", able=False, why=why)
    return Finding("memory of a call on the CPU", able=True, why="torch's allocator counts to the byte")


def _limit() -> Finding:
    subject = "memory limit of a CPU run"
    if not memory.can_limit():
        return Finding(
            subject, able=False, why="only Linux has one; a case that does not fit may end the run"
        )
    room_gib = (memory.available_bytes() - memory.RESERVE_BYTES) / 1024**3
    return Finding(
        subject, able=True, why=f"a case may take {room_gib:.1f} GiB; a larger one gets its reason"
    )


def _lock(device: str) -> Finding:
    subject = "GPU to one run" if device == "cuda" else "CPU to one run"
    try:
        with holding(device_uuid(device) or device, "esbench doctor", print, wait_s=0):
            return Finding(subject, able=True, why="no other run of esbench is on it")
    except LockError as error:
        return Finding(subject, able=False, why=str(error))


def _gpu() -> list[Finding]:
    if missing := no_cuda():
        return [
            Finding("GPU timing and memory", able=False, why=missing),
            Finding("GPU utilisation", able=False, why="no GPU that torch can use"),
        ]
    # Before torch makes its CUDA context: that is how this process knows itself in NVML's list.
    own = own_pids()
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    why = f"{gpu.name}, {gpu.total_memory / 1024**3:.0f} GiB, L2 {gpu.L2_cache_size / 1024**2:.0f} MiB"
    return [Finding("GPU timing and memory", able=True, why=why), *_types(), _lock("cuda"), *_meters(own)]


def _types() -> list[Finding]:
    """Return which of the types that not every GPU has are there."""
    missing = {dtype: missing_type(dtype, "cuda") for dtype in (TF32, "bfloat16")}
    return [Finding(dtype, able=not why, why=why or "products of it") for dtype, why in missing.items()]


def _meters(own: frozenset[int]) -> list[Finding]:
    """Ask NVML for each meter."""
    try:
        with Nvml() as nvml:
            return [_answer(subject, partial(ask, nvml)) for subject, ask in METERS.items()] + [
                _throttling(nvml),
                _alone(nvml, own),
            ]
    except NvmlError as error:
        return [Finding(subject, able=False, why=str(error)) for subject in METERS]


def _answer(subject: str, ask: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, able=True, why=ask())
    except NvmlError as error:
        return Finding(subject, able=False, why=str(error))


def _throttling(nvml: Nvml) -> Finding:
    subject = "unthrottled GPU"
    try:
        throttled = nvml.throttled()
    except NvmlError as error:
        return Finding(subject, able=False, why=str(error))
    if throttled:
        return Finding(subject, able=False, why=f"its clock is held down: {', '.join(throttled)}")
    return Finding(subject, able=True, why="nothing holds its clock down now")


def _alone(nvml: Nvml, own: frozenset[int]) -> Finding:
    subject = "GPU to itself"
    try:
        others = other_processes(nvml, own)
    except NvmlError as error:
        return Finding(subject, able=False, why=str(error))
    if not own:
        why = "NVML does not show this process, so others cannot be told from it"
        return Finding(subject, able=False, why=why)
    if others:
        return Finding(
            subject, able=False, why=f"{', '.join(others)} would make a run invalid: they compute on it too"
        )
    return Finding(subject, able=True, why="no other process computes on it")


def _triton() -> Finding:
    version = package_version("triton")
    if version is None:
        return Finding(
            "fused kernels", able=False, why="triton is not installed; torch brings it with CUDA on Linux"
        )
    if not torch.cuda.is_available():
        return Finding("fused kernels", able=False, why=f"triton {version} has no GPU to run on")
    capability = torch.cuda.get_device_capability()
    if capability < AMPERE:
        have, need = (".".join(map(str, one)) for one in (capability, AMPERE))
        return Finding(
            "fused kernels",
            able=False,
            why=f"they need a GPU of capability {need} or more, this one has {have}",
        )
    return Finding("fused kernels", able=True, why=f"triton {version}")


def _git() -> Finding:
    head = commit()
    if head is None:
        return Finding(
            "commit of a run", able=False, why="esbench runs from no git checkout, or git is missing"
        )
    return Finding("commit of a run", able=True, why=head)


def usable_cpus() -> int:
    """Return how many CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
