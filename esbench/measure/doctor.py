"""Checks of what this machine can measure, as printed by ``esbench doctor``."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import psutil
import torch

from esbench.errors import UserError
from esbench.measure import memory
from esbench.measure.device_lock import lock_device
from esbench.measure.environment import commit, cpu_name, cuda_problem, governor, package_version
from esbench.measure.float32_precision import AMPERE, TF32, capability_message, unsupported_reason
from esbench.measure.gpu_monitor import other_processes, own_pids
from esbench.measure.nvml import Nvml, NvmlError
from esbench.stats import BUSY


class Finding(NamedTuple):
    """A check: its subject, whether it passed, and the details or the reason why not."""

    subject: str
    is_available: bool
    reason: str


class MissingError(Exception):
    """A check did not pass; the message is the reason."""


def diagnose() -> list[Finding]:
    """Check everything that affects a measurement on this machine. Never fails."""
    return [
        _finding("CPU timing", cpu_name),
        _finding("threads", _check_threads),
        _finding("quiet machine", _check_load),
        _finding("fixed CPU clock", _check_clock),
        _finding("memory of a call on the CPU", _check_memory),
        _finding("memory limit of a CPU run", _check_memory_limit),
        _finding("CPU to one run", partial(_check_lock, "cpu")),
        *_gpu(),
        _finding("fused kernels", _check_triton),
        _finding("commit of a run", _check_git),
    ]


def _finding(subject: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, is_available=True, reason=check())
    except (MissingError, NvmlError, UserError) as error:
        return Finding(subject, is_available=False, reason=str(error))


def _require(condition: object, reason: str) -> None:
    if not condition:
        raise MissingError(reason)


def _check_threads() -> str:
    used, cpus = torch.get_num_threads(), usable_cpus()
    text = f"torch uses {used} threads on {cpus} usable CPUs"
    _require(used <= cpus, f"{text}, so threads wait for each other: set OMP_NUM_THREADS={cpus}")
    return text


def _check_load() -> str:
    load, cpus = psutil.getloadavg()[0], usable_cpus()
    text = f"load average {load:.1f} on {cpus} usable CPUs"
    _require(load <= BUSY * cpus, f"{text}: other programs disturb CPU timings")
    return text


def _check_clock() -> str:
    rule = governor()
    _require(rule, "the system does not report its CPU frequency governor")
    text = f"the CPU frequency governor is {rule}"
    _require(rule == "performance", f"{text}: only `performance` does not lower the clock")
    return text


def _check_memory() -> str:
    probe_bytes = 4096
    try:
        counted = memory.peak_bytes(lambda: torch.empty(probe_bytes, dtype=torch.uint8), "cpu")
    except RuntimeError as error:
        raise MissingError(f"torch's profiler does not run: {error}") from error
    text = f"torch's profiler counts {counted} bytes where {probe_bytes} were allocated"
    _require(counted == probe_bytes, text)
    return "torch's allocator counts to the byte"


def _check_memory_limit() -> str:
    _require(
        memory.can_limit(),
        "this system cannot limit the memory of a case: one that does not fit may end the run",
    )
    room_gib = (memory.available_bytes() - memory.RESERVE_BYTES) / 1024**3
    return f"a case may use {room_gib:.1f} GiB; a larger one is stored as out of memory"


def _check_lock(device: str) -> str:
    with lock_device(device, "esbench doctor", print, wait_s=0):
        return "no other run of esbench uses it"


def _gpu() -> Iterator[Finding]:
    if missing := cuda_problem():
        yield Finding("GPU timing and memory", is_available=False, reason=missing)
        yield Finding("GPU utilization", is_available=False, reason="no GPU that torch can use")
        return
    own = own_pids()  # before torch makes its CUDA context, which adds this process to NVML's list
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    text = f"{gpu.name}, {gpu.total_memory / 1024**3:.0f} GiB, L2 {gpu.L2_cache_size / 1024**2:.0f} MiB"
    yield Finding("GPU timing and memory", is_available=True, reason=text)
    for dtype in (TF32, "bfloat16"):
        reason = unsupported_reason(dtype, "cuda")
        yield Finding(dtype, is_available=not reason, reason=reason or "this GPU multiplies in it")
    yield _finding("GPU to one run", partial(_check_lock, "cuda"))
    meters: dict[str, Callable[[Nvml], str]] = {
        "GPU utilization": lambda nvml: f"{nvml.utilization_percent():.0f} % now, driver {nvml.driver()}",
        "GPU power": lambda nvml: f"{nvml.power_w():.0f} W now",
        "GPU energy": lambda nvml: f"{nvml.energy_j() / 1e3:.0f} kJ since the driver was loaded",
        "GPU clock": lambda nvml: f"{nvml.clock_hz() / 1e6:.0f} MHz now, {nvml.clock_policy()}",
        "GPU temperature": lambda nvml: f"{nvml.temperature_c():.0f} degrees Celsius now",
        "unthrottled GPU": _check_throttling,
        "GPU to itself": partial(_check_alone, own),
    }
    try:
        with Nvml() as nvml:
            yield from [_finding(subject, partial(read, nvml)) for subject, read in meters.items()]
    except NvmlError as error:
        yield from (Finding(subject, is_available=False, reason=str(error)) for subject in meters)


def _check_throttling(nvml: Nvml) -> str:
    reasons = ", ".join(nvml.throttled())
    _require(not reasons, f"its clock is reduced: {reasons}")
    return "nothing reduces its clock now"


def _check_alone(own: frozenset[int], nvml: Nvml) -> str:
    others = other_processes(nvml, own)
    _require(own, "NVML does not list this process, so other processes cannot be recognized")
    _require(not others, f"also used by {', '.join(others)}, which makes runs invalid")
    return "no other process computes on it"


def _check_triton() -> str:
    version = package_version("triton")
    _require(version, "triton is not installed; torch brings it with CUDA on Linux")
    _require(torch.cuda.is_available(), f"triton {version} has no GPU to run on")
    _require(torch.cuda.get_device_capability() >= AMPERE, f"triton's compiler {capability_message()}")
    return f"triton {version}"


def _check_git() -> str:
    revision = commit()
    _require(revision, "esbench does not run from a git checkout, or git is not installed")
    return str(revision)


def usable_cpus() -> int:
    """Return the number of CPUs that this process may run on."""
    return len(psutil.Process().cpu_affinity()) if psutil.LINUX else psutil.cpu_count() or 1
