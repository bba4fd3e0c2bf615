"""Readings from NVML, NVIDIA's management library, each checked for plausibility.

In containers, on MIG slices and with old drivers, NVML may be missing, refuse, or return a number with all
bits set; bindings that do not match the driver read the wrong field. So each number is compared with the
range of real GPUs, and every failure is an :class:`NvmlError` with a message of one line.
"""

import contextlib
import importlib
from collections.abc import Collection
from pathlib import PureWindowsPath
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch

from esbench.errors import message_of
from esbench.stats import POWER_CAP


class NvmlError(Exception):
    """NVML gives no plausible answer; the message is the reason."""


class Process(NamedTuple):
    """A process on the GPU: its id on the host, its program and its device memory, None if unknown."""

    pid: int
    name: str | None
    used_bytes: int | None

    def __str__(self) -> str:
        """Return name and id."""
        return f"{self.name or 'a process'} (pid {self.pid})"


PLAUSIBLE = {
    "percent": (0, 100),
    "MHz": (1, 10_000),
    "degrees Celsius": (0, 150),
    "mW": (1, 10_000_000),
    "mJ": (0, 10**15),
    "bytes": (0, 2**50),
    "process id": (1, 2**31 - 1),
    "bits": (0, 2**16 - 1),
}
"""Unit -> the lowest and the highest plausible number."""

NOT_AVAILABLE = 2**64 - 1
"""``NVML_VALUE_NOT_AVAILABLE``: the bytes of a process if the driver does not count them."""
SM_CLOCK = 1
"""``NVML_CLOCK_SM``."""
GPU_DIE = 0
"""``NVML_TEMPERATURE_GPU``."""

APPLICATION_CLOCKS = "application clocks setting"
RELIABILITY_LIMIT = "reliability limit"
CLOCK_REASONS = {
    0x1: "idle",
    0x2: APPLICATION_CLOCKS,
    0x4: POWER_CAP,
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: RELIABILITY_LIMIT,
}
"""Bit of ``nvmlClocksEventReason...`` -> meaning."""
NO_THROTTLING = {"idle", APPLICATION_CLOCKS, RELIABILITY_LIMIT}
"""Reasons in CLOCK_REASONS that do not count as throttling."""


class Nvml:
    """One GPU as NVML sees it. It is found by its UUID, because ``CUDA_VISIBLE_DEVICES`` changes indices.

    Use it as a context manager. All methods raise NvmlError if NVML refuses or its answer is implausible.

    Args:
        uuid: the UUID of the GPU, by default of torch's current one.
        bindings: a replacement for the module ``pynvml``, for tests.

    Raises:
        NvmlError: NVML is missing, or it does not know the device.
    """

    def __init__(self, uuid: str | None = None, bindings: ModuleType | None = None) -> None:
        try:
            self._nvml = bindings or importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlError("the package nvidia-ml-py is not installed") from error
        self._query("nvmlInit")
        try:
            self._handle = self._query("nvmlDeviceGetHandleByUUID", uuid or current_uuid())
        except NvmlError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the library; a failure is ignored."""
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()

    def driver(self) -> str:
        """Return the driver's version."""
        return _text(self._query("nvmlSystemGetDriverVersion"))

    def utilization_percent(self) -> float:
        """Return the share of the last sampling period, of 1/6 s to 1 s, in which a kernel ran."""
        function = "nvmlDeviceGetUtilizationRates"
        return float(_check_plausible(function, self._query(function, self._handle).gpu, "percent"))

    def clock_hz(self) -> float:
        """Return the current clock of the multiprocessors."""
        return self._number("nvmlDeviceGetClockInfo", "MHz", SM_CLOCK) * 1e6

    def temperature_c(self) -> float:
        """Return the temperature of the GPU's die."""
        return float(self._number("nvmlDeviceGetTemperature", "degrees Celsius", GPU_DIE))

    def power_w(self) -> float:
        """Return the power draw of the board; since Ampere usually the mean of the last second."""
        return self._number("nvmlDeviceGetPowerUsage", "mW") / 1e3

    def energy_j(self) -> float:
        """Return the energy since the driver was loaded, from a counter that advances in ticks."""
        return self._number("nvmlDeviceGetTotalEnergyConsumption", "mJ") / 1e3

    def clock_reasons(self) -> tuple[str, ...]:
        """Return the reasons why the clock is not higher."""
        # Newer bindings have an alias with "EventReasons" in its name, which older drivers lack.
        bits = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", "bits")
        reasons = [reason for bit, reason in CLOCK_REASONS.items() if bits & bit]
        unknown = bits & ~sum(CLOCK_REASONS)
        return tuple([*reasons, f"reason {unknown:#x}"] if unknown else reasons)

    def throttled(self) -> tuple[str, ...]:
        """Return the reasons for throttling, if any."""
        return tuple(reason for reason in self.clock_reasons() if reason not in NO_THROTTLING)

    def clock_policy(self) -> str:
        """Return the settings of the clock that NVML reports.

        NVML reports locked clocks only under load, as the reason why the clock is not higher.
        """
        parts = [f"up to {self._number('nvmlDeviceGetMaxClockInfo', 'MHz', SM_CLOCK)} MHz"]
        with contextlib.suppress(NvmlError):
            chosen = self._number("nvmlDeviceGetApplicationsClock", "MHz", SM_CLOCK)
            parts.append(f"application clock {chosen} MHz")
        with contextlib.suppress(NvmlError):
            is_on, _ = self._query("nvmlDeviceGetAutoBoostedClocksEnabled", self._handle)
            parts.append(f"auto boost {'on' if is_on else 'off'}")
        with contextlib.suppress(NvmlError):
            parts += ["limited by a setting"] if APPLICATION_CLOCKS in self.clock_reasons() else []
        return ", ".join(parts)

    def processes(self) -> tuple[Process, ...]:
        """Return the processes on the GPU. In a container, the ids are of the host, or the list is empty."""
        function = "nvmlDeviceGetComputeRunningProcesses"
        processes = []
        for row in self._query(function, self._handle):
            pid = _check_plausible(function, row.pid, "process id")
            is_unknown = row.usedGpuMemory in {None, NOT_AVAILABLE}
            used_bytes = None if is_unknown else _check_plausible(function, row.usedGpuMemory, "bytes")
            processes.append(Process(pid, self._program(pid), used_bytes))
        return tuple(processes)

    def process_bytes(self, own: Collection[int]) -> int | None:
        """Return the bytes of device memory of the processes with these ids, None if unknown."""
        used = [process.used_bytes for process in self.processes() if process.pid in own]
        known = [used_bytes for used_bytes in used if used_bytes is not None]
        return sum(known) if known and len(known) == len(used) else None

    def _program(self, pid: int) -> str | None:
        """Return the file name of a process's program, without the folder, which may be private."""
        try:
            path = _text(self._query("nvmlSystemGetProcessName", pid))
        except NvmlError:
            return None
        return PureWindowsPath(path).name or None  # PureWindowsPath splits at / and at \

    def _number(self, function: str, unit: str, *arguments: object) -> int:
        return _check_plausible(function, self._query(function, self._handle, *arguments), unit)

    def _query(self, function: str, *arguments: object) -> Any:  # noqa: ANN401  # pynvml has no types
        try:
            return getattr(self._nvml, function)(*arguments)
        except Exception as error:  # pynvml's errors have no common base class
            raise NvmlError(f"{function}: {_one_line(error)}") from error


def current_uuid() -> str:
    """Return the UUID of torch's current CUDA device as NVML writes it, or raise an NvmlError."""
    if not torch.cuda.is_available():
        raise NvmlError("torch sees no CUDA device")
    try:
        return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    except RuntimeError as error:
        raise NvmlError(f"torch cannot describe its CUDA device: {_one_line(error)}") from error


def _check_plausible(function: str, answer: object, unit: str) -> int:
    """Return the answer of an NVML function if it is an integer in the plausible range of its unit."""
    low, high = PLAUSIBLE[unit]
    if type(answer) is int and low <= answer <= high:
        return answer
    raise NvmlError(f"{function} returned the implausible value {answer} ({unit}, expected {low} to {high})")


def _text(answer: str | bytes) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def _one_line(error: Exception) -> str:
    return message_of(error) or type(error).__name__
