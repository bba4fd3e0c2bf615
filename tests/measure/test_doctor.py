"""What the doctor says of a machine."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from esbench.measure.device_lock import holding
from esbench.measure.doctor import Finding, diagnosis
from tests.fake_nvml import UUID, answering, install, processes, refusing
from tests.fresh_process import new_process


@pytest.fixture(autouse=True)
def _new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Know nothing of the GPU from another test."""
    with new_process(tmp_path, monkeypatch):
        yield


def test_the_doctor_gives_a_reason_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each subject once, each with words, on a machine that has neither git nor a GPU."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    findings = {finding.subject: finding for finding in diagnosis()}
    assert len(findings) == len(diagnosis())
    assert all(finding.why for finding in findings.values())
    assert findings["CPU timing"].able
    assert findings["memory of a call on the CPU"].able
    assert not findings["commit of a run"].able
    assert not findings["GPU timing and memory"].able
    assert not findings["GPU utilisation"].able


def finding(subject: str) -> Finding:
    """Return what the doctor says of a subject."""
    (found,) = (finding for finding in diagnosis() if finding.subject == subject)
    return found


def test_the_doctor_tells_what_nvml_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each quantity with what it is now."""
    listed = [[], processes(8)]
    install(
        monkeypatch, nvmlDeviceGetComputeRunningProcesses=lambda _: listed.pop(0) if listed else processes(8)
    )
    found = {finding.subject: finding for finding in diagnosis()}
    assert {subject: found[subject].why for subject in found if subject.startswith(("GPU", "unthr"))} == {
        "GPU timing and memory": "Fake GPU, 128 GiB, L2 60 MiB",
        "GPU to one run": "no other run of esbench is on it",
        "GPU utilisation": "97 % now, driver 580.1",
        "GPU power": "300 W now",
        "GPU energy": "5 kJ since the driver was loaded",
        "GPU clock": "1980 MHz now, up to 1980 MHz, application clock 1980 MHz, auto boost on",
        "GPU temperature": "45 degrees Celsius now",
        "unthrottled GPU": "nothing holds its clock down now",
        "GPU to itself": "no other process computes on it",
    }
    assert all(finding.able for subject, finding in found.items() if subject.startswith(("GPU", "unthr")))


@pytest.mark.parametrize(
    ("subject", "answers", "why"),
    [
        ("GPU power", {"nvmlDeviceGetPowerUsage": refusing}, "NVML cannot read the power: Insufficient Perm"),
        (
            "GPU clock",
            {"nvmlDeviceGetClockInfo": answering(0)},
            "NVML cannot read the clock: it answers 0 MHz",
        ),
        ("GPU energy", {"nvmlInit": refusing}, "NVML cannot start: Insufficient Permissions"),
        (
            "unthrottled GPU",
            {"nvmlDeviceGetCurrentClocksThrottleReasons": answering(0x24)},
            "its clock is held down: power cap, thermal slowdown",
        ),
        (
            "unthrottled GPU",
            {"nvmlDeviceGetCurrentClocksThrottleReasons": refusing},
            "NVML cannot say what holds the clock: ",
        ),
        (
            "GPU to itself",
            {"nvmlDeviceGetComputeRunningProcesses": refusing},
            "NVML cannot list the processes: ",
        ),
        ("GPU to itself", {}, "NVML does not show this process, so others cannot be told from it"),
    ],
)
def test_the_doctor_says_what_nvml_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, subject: str, answers: dict[str, Any], why: str
) -> None:
    """Question by question, with the reason."""
    install(monkeypatch, **answers)
    assert not finding(subject).able
    assert finding(subject).why.startswith(why)


def test_the_doctor_names_other_processes_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would make a run invalid."""
    listed = [processes(7), processes(7, 8)]
    install(
        monkeypatch,
        nvmlDeviceGetComputeRunningProcesses=lambda _: listed.pop(0) if listed else processes(7, 8, 9),
    )
    found = finding("GPU to itself")
    assert not found.able
    assert found.why.startswith("python3 (pid 7), python3 (pid 9) would make a run invalid")


@pytest.mark.parametrize(("subject", "key"), [("CPU to one run", "cpu"), ("GPU to one run", UUID)])
def test_the_doctor_names_the_run_that_holds_a_device(
    monkeypatch: pytest.MonkeyPatch, subject: str, key: str
) -> None:
    """And does not wait."""
    install(monkeypatch)
    assert finding(subject).able
    with holding(key, "suite readme", pytest.fail):
        assert not finding(subject).able
        assert f"{key} is held by suite readme (pid " in finding(subject).why


@pytest.mark.parametrize("subject", ["bfloat16", "tfloat32", "fused kernels"])
def test_the_doctor_says_what_an_old_gpu_lacks(monkeypatch: pytest.MonkeyPatch, subject: str) -> None:
    """Types and kernels that need capability 8.0; a newer one has them."""
    install(monkeypatch)
    assert finding(subject).able
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation)
    assert not finding(subject).able


def test_more_threads_than_cpus_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variable that sets it right."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10**6)
    (finding,) = (finding for finding in diagnosis() if finding.subject == "threads")
    assert not finding.able
    assert "OMP_NUM_THREADS=" in finding.why
