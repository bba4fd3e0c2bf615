"""The findings of ``esbench doctor`` about a machine."""

import shutil
from typing import Any

import pytest
import torch

from esbench.measure import memory
from esbench.measure.device_lock import lock_device
from esbench.measure.doctor import Finding, diagnose
from esbench.measure.gpu_monitor import own_pids
from tests.fake_nvml import UUID, answering, install, processes, refusing

pytestmark = pytest.mark.usefixtures("new_process")


def findings() -> dict[str, Finding]:
    """Return the finding of each subject; check that each subject appears once."""
    diagnosed = diagnose()
    by_subject = {finding.subject: finding for finding in diagnosed}
    assert len(by_subject) == len(diagnosed)
    assert all(finding.reason for finding in diagnosed)
    return by_subject


def test_the_doctor_gives_a_reason_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without git, GPU or memory count, with too many threads, has a reason for each of them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    by_subject = findings()
    assert by_subject["CPU timing"].is_available
    assert by_subject["memory of a call on the CPU"].is_available
    assert not by_subject["GPU timing and memory"].is_available
    assert not by_subject["GPU utilization"].is_available
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10**6)
    monkeypatch.setattr(memory, "peak_bytes", lambda *_: 0)
    monkeypatch.setattr("psutil.getloadavg", lambda: (1e6, 0, 0))
    by_subject = findings()
    assert not by_subject["commit of a run"].is_available
    assert "OMP_NUM_THREADS=" in by_subject["threads"].reason
    for subject in ("threads", "memory of a call on the CPU", "quiet machine"):
        assert not by_subject[subject].is_available


def test_the_doctor_prints_values_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each NVML quantity appears with its present value."""
    listed = [[], processes(8)]
    install(
        monkeypatch, nvmlDeviceGetComputeRunningProcesses=lambda _: listed.pop(0) if listed else processes(8)
    )
    by_subject = findings()
    gpu = {subject: by_subject[subject] for subject in by_subject if subject.startswith(("GPU", "unthr"))}
    assert {subject: finding.reason for subject, finding in gpu.items()} == {
        "GPU timing and memory": "Fake GPU, 128 GiB, L2 60 MiB",
        "GPU to one run": "no other run of esbench uses it",
        "GPU utilization": "97 % now, driver 580.1",
        "GPU power": "300 W now",
        "GPU energy": "5 kJ since the driver was loaded",
        "GPU clock": "1980 MHz now, up to 1980 MHz, application clock 1980 MHz, auto boost on",
        "GPU temperature": "45 degrees Celsius now",
        "unthrottled GPU": "nothing reduces its clock now",
        "GPU to itself": "no other process computes on it",
    }
    assert all(finding.is_available for finding in gpu.values())


def test_the_doctor_prints_why_nvml_has_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failed NVML query has its reason, and other processes on the GPU are listed."""
    listed = [processes(7), processes(7, 8)]
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("GPU power", {"PowerUsage": refusing}, "nvmlDeviceGetPowerUsage: Insufficient Perm"),
        ("GPU clock", {"ClockInfo": answering(0)}, "nvmlDeviceGetClockInfo returned the implausible value 0"),
        (
            "unthrottled GPU",
            {"CurrentClocksThrottleReasons": answering(0x24)},
            "its clock is reduced: power cap, thermal slowdown",
        ),
        ("GPU to itself", {"ComputeRunningProcesses": refusing}, "nvmlDeviceGetComputeRunningProcesses: "),
        ("GPU to itself", {}, "NVML does not list this process, so other processes cannot be recognized"),
        (
            "GPU to itself",
            {"ComputeRunningProcesses": lambda _: listed.pop(0) if listed else processes(7, 8, 9)},
            "also used by python3 (pid 7), python3 (pid 9), which makes runs invalid",
        ),
    ]
    for subject, answers, why in cases:
        own_pids.cache_clear()
        install(monkeypatch, **{f"nvmlDeviceGet{function}": answer for function, answer in answers.items()})
        finding = findings()[subject]
        assert not finding.is_available
        assert finding.reason.startswith(why)
    install(monkeypatch, nvmlInit=refusing)
    assert findings()["GPU energy"] == ("GPU energy", False, "nvmlInit: Insufficient Permissions")


def test_the_doctor_names_the_run_that_holds_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor reports a locked device without waiting for it."""
    install(monkeypatch)
    for subject, key in (("CPU to one run", "cpu"), ("GPU to one run", UUID)):
        assert findings()[subject].is_available
        with lock_device(key, "suite readme", pytest.fail):
            finding = findings()[subject]
        assert not finding.is_available
        assert f"{key} is in use by suite readme (pid " in finding.reason


def test_the_doctor_says_what_an_old_gpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old GPU lacks dtypes and kernels that need capability 8.0; a newer one has them."""
    subjects = ("bfloat16", "tfloat32", "fused kernels")
    install(monkeypatch)
    by_subject = findings()
    assert all(by_subject[subject].is_available for subject in subjects)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation)
    by_subject = findings()
    assert not any(by_subject[subject].is_available for subject in subjects)
