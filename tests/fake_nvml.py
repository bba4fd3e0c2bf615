"""A fake of the module pynvml, which answers, refuses or returns nonsense as configured."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

MIB = 1024**2
UUID = "GPU-abc"


class RefusedError(Exception):
    """An exception of pynvml."""


def refusing(*_: object) -> Any:
    """Raise an error of pynvml."""
    raise RefusedError("Insufficient Permissions")


def answering(answer: object) -> Callable[..., object]:
    """Return a function that always returns the same answer."""
    return lambda *_: answer


def processes(*pids: object, used: object = MIB) -> list[SimpleNamespace]:
    """Return NVML's list for processes that use some bytes."""
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid in pids]


GOOD: dict[str, Any] = {
    "nvmlInit": answering(None),
    "nvmlShutdown": answering(None),
    "nvmlDeviceGetHandleByUUID": lambda name: ("handle of", name),
    "nvmlSystemGetDriverVersion": answering("580.1"),
    "nvmlDeviceGetUtilizationRates": answering(SimpleNamespace(gpu=97, memory=3)),
    "nvmlDeviceGetClockInfo": answering(1980),
    "nvmlDeviceGetTemperature": answering(45),
    "nvmlDeviceGetPowerUsage": answering(300_000),
    "nvmlDeviceGetTotalEnergyConsumption": answering(5_000_000),
    "nvmlDeviceGetCurrentClocksThrottleReasons": answering(0),
    "nvmlDeviceGetMaxClockInfo": answering(1980),
    "nvmlDeviceGetApplicationsClock": answering(1980),
    "nvmlDeviceGetAutoBoostedClocksEnabled": answering([1, 1]),
    "nvmlDeviceGetComputeRunningProcesses": answering([]),
    "nvmlSystemGetProcessName": answering("/usr/bin/python3"),
}
"""What a healthy GPU answers."""


def bindings(**answers: Any) -> ModuleType:
    """Return a fake pynvml of a healthy GPU, with the given functions replaced."""
    unknown = answers.keys() - GOOD.keys()
    assert not unknown, f"pynvml's functions that are never called: {unknown}"
    module = ModuleType("pynvml")
    vars(module).update(GOOD | answers)
    return module


def install(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Let torch and NVML of this process find a CUDA device, and NVML return these answers."""
    monkeypatch.setitem(sys.modules, "pynvml", bindings(**answers))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpu = SimpleNamespace(
        name="Fake GPU", uuid="abc", total_memory=2**37, L2_cache_size=60 * MIB, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (gpu.major, gpu.minor))
