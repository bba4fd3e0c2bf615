"""NVML with fake bindings: answers, refusals, and impossible values."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pynvml
import pytest
import torch

from esbench.measure.nvml import (
    CLOCK_REASONS,
    GPU_DIE,
    NOT_AVAILABLE,
    SM_CLOCK,
    Nvml,
    NvmlError,
    current_uuid,
)
from tests.fake_nvml import GOOD, MIB, UUID, answering, bindings, install, processes, refusing

NUMBERS: dict[str, tuple[Callable[[Nvml], float], float]] = {
    "nvmlDeviceGetUtilizationRates": (Nvml.utilization_percent, 97),
    "nvmlDeviceGetClockInfo": (Nvml.clock_hz, 1.98e9),
    "nvmlDeviceGetTemperature": (Nvml.temperature_c, 45),
    "nvmlDeviceGetPowerUsage": (Nvml.power_w, 300),
    "nvmlDeviceGetTotalEnergyConsumption": (Nvml.energy_j, 5000),
}
"""A function of pynvml -> ours, and its value for a healthy GPU, in the unit at the end of its name."""

NEEDLESS = {
    "nvmlShutdown",
    "nvmlSystemGetProcessName",
    "nvmlDeviceGetApplicationsClock",
    "nvmlDeviceGetAutoBoostedClocksEnabled",
}
"""Functions of pynvml without which every question still has an answer."""


def nvml(**answers: Any) -> Nvml:
    """Open a fake NVML with these answers."""
    return Nvml(UUID, bindings(**answers))


def ask_everything(opened: Nvml) -> None:
    """Make every query once, and compare the numbers with those of a healthy GPU."""
    for read, expected in NUMBERS.values():
        assert read(opened) == expected
    for question in (opened.driver, opened.throttled, opened.clock_policy, opened.processes):
        question()


def test_the_fake_has_no_function_that_pynvml_lacks() -> None:
    """Functions and constants match pynvml; without a driver, opening NVML gives that reason."""
    assert [name for name in GOOD if not callable(getattr(pynvml, name, None))] == []
    assert (SM_CLOCK, GPU_DIE) == (pynvml.NVML_CLOCK_SM, pynvml.NVML_TEMPERATURE_GPU)
    assert pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value == NOT_AVAILABLE
    assert pynvml.nvmlClocksThrottleReasonAll & ~sum(CLOCK_REASONS) == 0
    with pytest.raises(NvmlError, match=r"nvml(Init|DeviceGetHandleByUUID): \w"):
        Nvml("GPU-that-does-not-exist")


def test_the_gpu_is_found_by_the_uuid_that_torch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch and NVML number GPUs differently. Without a GPU, or if torch fails, there is no UUID."""
    uuids: list[str] = []
    install(monkeypatch, nvmlDeviceGetHandleByUUID=uuids.append)
    with Nvml():
        assert uuids == [current_uuid()] == [UUID]
    error = RuntimeError("CUDA error:\nunspecified launch failure")
    monkeypatch.setattr(torch.cuda, "current_device", Mock(side_effect=error))
    with pytest.raises(NvmlError, match="CUDA error: unspecified launch failure"):
        current_uuid()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NvmlError, match="torch sees no CUDA device"):
        current_uuid()


def test_an_error_of_nvml_names_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query, refused or missing in the library, has its message; without pynvml it names the package."""
    ask_everything(nvml(nvmlSystemGetDriverVersion=answering(b"580.1")))
    for function in sorted(GOOD.keys() - NEEDLESS):
        for failing in (refusing, None):
            with pytest.raises(NvmlError, match=r"nvml\w+: (Insufficient Permissions|'NoneType')"):
                ask_everything(nvml(**{function: failing}))
    for function in NEEDLESS:
        with nvml(**{function: refusing}) as opened:
            ask_everything(opened)
    closed = []
    with pytest.raises(NvmlError):
        nvml(nvmlDeviceGetHandleByUUID=refusing, nvmlShutdown=lambda: closed.append(1))
    assert closed == [1]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlError, match="the package nvidia-ml-py is not installed"):
        Nvml(UUID)


def test_an_implausible_number_is_an_error() -> None:
    """A number that is out of range, has all bits set or is not whole is refused."""
    for function, (read, _) in NUMBERS.items():
        for nonsense in (-1, 0xFFFFFFFF, 2**64 - 1, 97.5, True, "45", None):
            if (function, nonsense) == ("nvmlDeviceGetTotalEnergyConsumption", 0xFFFFFFFF):
                continue  # 4.3 MJ, which a board consumes within hours
            is_rates = function == "nvmlDeviceGetUtilizationRates"
            answer = SimpleNamespace(gpu=nonsense, memory=3) if is_rates else nonsense
            with pytest.raises(NvmlError, match=str(nonsense)):
                read(nvml(**{function: answering(answer)}))
    for function in ("nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage"):
        with pytest.raises(NvmlError, match="returned the implausible value 0 "):
            NUMBERS[function][0](nvml(**{function: answering(0)}))
    with pytest.raises(NvmlError, match=r"101 \(percent"):
        nvml(nvmlDeviceGetUtilizationRates=answering(SimpleNamespace(gpu=101))).utilization_percent()


def test_clock_policy_and_throttling() -> None:
    """An idle, fixed or highest clock is not throttling; an unknown bit is. Refused values are left out."""
    for bits, throttled in (
        (0x603, ("board limit",)),
        (0x6, ("power cap",)),
        (
            0xE8,
            ("hardware slowdown", "thermal slowdown", "hardware thermal slowdown", "hardware power brake"),
        ),
        (0x801, ("reason 0x800",)),
    ):
        assert nvml(nvmlDeviceGetCurrentClocksThrottleReasons=answering(bits)).throttled() == throttled
    names = (
        "nvmlDeviceGetApplicationsClock",
        "nvmlDeviceGetAutoBoostedClocksEnabled",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    )
    chosen: dict[str, Any] = dict(zip(names, map(answering, (1410, [0, 1], 0x2)), strict=True))
    policy = "up to 1980 MHz, application clock 1410 MHz, auto boost off, limited by a setting"
    assert nvml(**chosen).clock_policy() == policy
    assert nvml(**dict.fromkeys(names, refusing)).clock_policy() == "up to 1980 MHz"


def test_processes_have_names_and_bytes() -> None:
    """Folders may be private. Impossible ids or bytes mean that the bindings do not match."""
    names = {7: "/home/user/bin/train", 8: r"C:\tools\train.exe", 9: b"python3"}
    listed = [*processes(7, 8, used=3 * MIB), *processes(9, used=NOT_AVAILABLE), *processes(10, used=None)]
    opened = nvml(
        nvmlDeviceGetComputeRunningProcesses=answering(listed),
        nvmlSystemGetProcessName=lambda pid: names[pid],
    )
    assert [process.name for process in opened.processes()] == ["train", "train.exe", "python3", None]
    assert [str(process) for process in opened.processes()[2:]] == ["python3 (pid 9)", "a process (pid 10)"]
    assert [process.used_bytes for process in opened.processes()] == [3 * MIB, 3 * MIB, None, None]
    assert opened.process_bytes({7, 8}) == 6 * MIB
    assert [opened.process_bytes(pids) for pids in ({8, 9}, {10}, {1})] == [None] * 3
    for pid, used in ((0, MIB), (2**40, MIB), (None, MIB), (7, -1), (7, 2**60)):
        wrong = nvml(nvmlDeviceGetComputeRunningProcesses=answering(processes(pid, used=used)))
        with pytest.raises(
            NvmlError, match="nvmlDeviceGetComputeRunningProcesses returned the implausible value"
        ):
            wrong.processes()
