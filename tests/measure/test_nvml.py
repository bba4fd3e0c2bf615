"""NVML, with a fake of its bindings: answers, refusals, nonsense."""

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esbench.measure.nvml import (
    CLOCK_REASONS,
    DIE,
    NOT_AVAILABLE,
    SM_CLOCK,
    Nvml,
    NvmlError,
    Process,
    current_uuid,
)
from tests.fake_nvml import GOOD, MIB, UUID, answering, bindings, install, processes, refusing

NUMBERS: dict[str, tuple[str, Callable[[Nvml], float], float, float]] = {
    "utilization_percent": ("nvmlDeviceGetUtilizationRates", Nvml.utilization_percent, 0, 100),
    "clock_hz": ("nvmlDeviceGetClockInfo", Nvml.clock_hz, 1e6, 1e10),
    "temperature_c": ("nvmlDeviceGetTemperature", Nvml.temperature_c, 0, 150),
    "power_w": ("nvmlDeviceGetPowerUsage", Nvml.power_w, 1e-3, 1e4),
    "energy_j": ("nvmlDeviceGetTotalEnergyConsumption", Nvml.energy_j, 0, 1e12),
}
"""Metric -> the function of pynvml, ours, and the least and the most that may leave it."""

UNNEEDED = {
    "nvmlShutdown",
    "nvmlSystemGetProcessName",
    "nvmlDeviceGetApplicationsClock",
    "nvmlDeviceGetAutoBoostedClocksEnabled",
}
"""Functions of pynvml without which every question still has an answer."""

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**65), 2**65),
    st.sampled_from([0xFFFFFFFF, 2**63, 2**64 - 1, 10**9, 10**12]),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.integers(), max_size=3),
)


def nvml(**answers: Any) -> Nvml:
    """Open a fake NVML that answers as it is told."""
    return Nvml(UUID, bindings(**answers))


def as_answer(function: str, value: object) -> Callable[..., object]:
    """Answer a value in the form that a function of pynvml gives it."""
    rates = function == "nvmlDeviceGetUtilizationRates"
    return answering(SimpleNamespace(gpu=value, memory=3) if rates else value)


def test_the_fake_has_no_function_that_pynvml_lacks() -> None:
    """Nor have we a constant of another value; where this machine has no driver, that is the reason."""
    assert [name for name in GOOD if not callable(getattr(pynvml, name, None))] == []
    assert (SM_CLOCK, DIE) == (pynvml.NVML_CLOCK_SM, pynvml.NVML_TEMPERATURE_GPU)
    assert pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value == NOT_AVAILABLE
    assert pynvml.nvmlClocksThrottleReasonAll & ~sum(CLOCK_REASONS) == 0
    with pytest.raises(NvmlError, match=r"NVML cannot (start|find the GPU): \w"):
        Nvml("GPU-that-does-not-exist")


def test_the_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices differ between torch and NVML; the handle is the one asked for by name."""
    install(monkeypatch)
    with Nvml() as found:
        assert found.uuid() == current_uuid() == UUID
    with Nvml("GPU-other", bindings()) as found:
        assert found.uuid() == "GPU-other"


def test_what_a_healthy_gpu_says() -> None:
    """Each in the unit that its name ends in."""
    found = nvml(nvmlSystemGetDriverVersion=answering(b"580.1"))
    assert found.driver() == "580.1"
    assert found.utilization_percent() == 97
    assert found.clock_hz() == 1.98e9
    assert found.temperature_c() == 45
    assert found.power_w() == 300
    assert found.energy_j() == 5000
    assert found.clock_reasons() == found.throttled() == ()


def test_a_number_that_no_gpu_has_is_an_error() -> None:
    """Out of range, all bits set, or no whole number."""
    cases: list[tuple[str, object]] = [
        ("utilization_percent", 101),
        ("clock_hz", 0),
        ("clock_hz", 0xFFFFFFFF),
        ("temperature_c", 0xFFFFFFFF),
        ("power_w", 0),
        ("power_w", 10**12),
        ("power_w", 0xFFFFFFFF),
        ("power_w", 97_000.0),
        ("utilization_percent", True),
        ("temperature_c", "45"),
        ("energy_j", None),
    ]
    for metric, answer in cases:
        function, read, *_ = NUMBERS[metric]
        with pytest.raises(NvmlError, match=str(answer)):
            read(nvml(**{function: as_answer(function, answer)}))


@pytest.mark.parametrize("metric", NUMBERS)
@given(answer=ANYTHING)
def test_no_answer_leaves_as_a_number_out_of_its_range(metric: str, answer: object) -> None:
    """Whatever is answered: a plausible number, or the one kind of error."""
    function, read, least, most = NUMBERS[metric]
    try:
        value = read(nvml(**{function: as_answer(function, answer)}))
    except NvmlError as error:
        assert "\n" not in str(error)  # noqa: PT017  # either outcome is right
    else:
        assert isinstance(value, float)
        assert least <= value <= most


@given(answer=ANYTHING)
def test_whatever_is_answered_no_question_raises_another_error(answer: object) -> None:
    """Every function of the library answers the same nonsense, also as what a process is."""
    row = SimpleNamespace(pid=answer, usedGpuMemory=answer)
    nonsense = dict.fromkeys(GOOD, answering(answer)) | {
        "nvmlDeviceGetComputeRunningProcesses": answering([row])
    }
    found = nvml(**nonsense)
    words = (found.driver, found.uuid, found.clock_policy, found.clock_reasons, found.throttled)
    for question in (*words, found.processes, found.process_bytes):
        try:
            question()
        except NvmlError as error:
            assert "\n" not in str(error)  # noqa: PT017  # either outcome is right


def test_a_refusal_is_one_line_that_says_what_was_asked() -> None:
    """Whatever is refused, or missing in the library."""
    for function in sorted(GOOD.keys() - UNNEEDED):
        for failing in (refusing, None):
            with pytest.raises(NvmlError, match=r"NVML cannot .*: (Insufficient Permissions|'NoneType')"):
                ask_everything(nvml(**{function: failing}))


def ask_everything(found: Nvml) -> None:
    """Ask every question once."""
    for _, read, *_ in NUMBERS.values():
        read(found)
    for question in (found.driver, found.uuid, found.throttled, found.clock_policy, found.processes):
        question()


def test_words_are_one_line_of_text() -> None:
    """A version with control characters is refused."""
    cases: list[object] = [
        "",
        "  ",
        "580\n1",
        "\x1b[2J",
        b"\x00",
        580,
        None,
    ]
    for nonsense in cases:
        with pytest.raises(NvmlError, match=r"NVML cannot read the driver's version: it answers .") as error:
            nvml(nvmlSystemGetDriverVersion=answering(nonsense)).driver()
        assert str(error.value).isprintable()


def test_nvml_is_closed_when_the_gpu_is_not_found() -> None:
    """What was opened is closed."""
    closed = []
    with pytest.raises(NvmlError):
        nvml(nvmlDeviceGetHandleByUUID=refusing, nvmlShutdown=lambda: closed.append(1))
    assert closed == [1]


def test_a_library_that_does_not_close_is_ignored() -> None:
    """What was read stands."""
    with nvml(nvmlShutdown=refusing) as found:
        assert found.power_w() == 300


def test_without_the_bindings_the_reason_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to install."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlError, match="the package nvidia-ml-py is not installed"):
        Nvml(UUID)


def test_without_a_gpu_there_is_no_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where torch fails on the one it has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NvmlError, match="torch sees no CUDA device"):
        current_uuid()

    def broken() -> int:
        message = "CUDA error:\nunspecified launch failure"
        raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", broken)
    with pytest.raises(NvmlError, match="CUDA error: unspecified launch failure"):
        current_uuid()


def test_reasons_for_a_low_clock_are_words() -> None:
    """Idleness, a chosen clock and the highest one are no throttling; a bit without a name is."""
    cases: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = [
        (0x0, (), ()),
        (0x1, ("idle",), ()),
        (0x2, ("application clocks setting",), ()),
        (0x6, ("application clocks setting", "power cap"), ("power cap",)),
        (
            0xE8,
            ("hardware slowdown", "thermal slowdown", "hardware thermal slowdown", "hardware power brake"),
            ("hardware slowdown", "thermal slowdown", "hardware thermal slowdown", "hardware power brake"),
        ),
        (0x600, ("board limit", "reliability limit"), ("board limit",)),
        (0x801, ("idle", "reason 0x800"), ("reason 0x800",)),
    ]
    for bits, reasons, throttled in cases:
        found = nvml(nvmlDeviceGetCurrentClocksThrottleReasons=answering(bits))
        assert found.clock_reasons() == reasons
        assert found.throttled() == throttled


def test_all_bits_set_are_no_reasons() -> None:
    """That is how an unknown number arrives."""
    with pytest.raises(NvmlError, match="4294967295 as bits"):
        nvml(nvmlDeviceGetCurrentClocksThrottleReasons=answering(0xFFFFFFFF)).throttled()


def test_the_clock_policy_says_what_nvml_knows() -> None:
    """What it refuses is left out."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "up to 1980 MHz, application clock 1980 MHz, auto boost on"),
        (
            {
                "nvmlDeviceGetApplicationsClock": answering(1410),
                "nvmlDeviceGetAutoBoostedClocksEnabled": answering([0, 1]),
                "nvmlDeviceGetCurrentClocksThrottleReasons": answering(0x2),
            },
            "up to 1980 MHz, application clock 1410 MHz, auto boost off, held by a setting",
        ),
        (
            {
                "nvmlDeviceGetApplicationsClock": refusing,
                "nvmlDeviceGetAutoBoostedClocksEnabled": refusing,
                "nvmlDeviceGetCurrentClocksThrottleReasons": refusing,
            },
            "up to 1980 MHz",
        ),
    ]
    for answers, policy in cases:
        assert nvml(**answers).clock_policy() == policy


def test_a_process_is_told_without_its_folder() -> None:
    """The folder may be private; both kinds of path separators are known."""
    names = {7: "/home/user/bin/train", 8: r"C:\tools\train.exe", 9: b"python3"}
    found = nvml(
        nvmlDeviceGetComputeRunningProcesses=answering(processes(7, 8, 9, 10)),
        nvmlSystemGetProcessName=lambda pid: names[pid],
    ).processes()
    assert [process.name for process in found] == ["train", "train.exe", "python3", None]
    assert [str(process) for process in found[2:]] == ["python3 (pid 9)", "a process (pid 10)"]


def test_bytes_that_the_driver_does_not_count_are_none() -> None:
    """The process is there all the same."""
    cases: list[object] = [
        None,
        2**64 - 1,
    ]
    for used in cases:
        found = nvml(nvmlDeviceGetComputeRunningProcesses=answering(processes(os.getpid(), used=used)))
        assert found.processes() == (Process(os.getpid(), "python3", None),)
        assert found.process_bytes() is None


def test_a_process_that_cannot_be_is_an_error() -> None:
    """Bindings that do not match the driver read one field for another."""
    cases: list[tuple[object, object]] = [
        (0, MIB),
        (2**40, MIB),
        (7, -1),
        (7, 2**60),
        (7, "1"),
        (None, MIB),
    ]
    for row in cases:
        wrong = [SimpleNamespace(pid=row[0], usedGpuMemory=row[1])]
        with pytest.raises(NvmlError, match="NVML cannot list the processes"):
            nvml(nvmlDeviceGetComputeRunningProcesses=answering(wrong)).processes()


def test_the_bytes_of_this_process_are_told_apart() -> None:
    """By the id that it has itself, or by those that the host gave it; None where it is not listed."""
    listed = [*processes(os.getpid(), used=3 * MIB), *processes(2**30, 2**30 + 1, used=5 * MIB)]
    found = nvml(nvmlDeviceGetComputeRunningProcesses=answering(listed))
    assert found.process_bytes() == 3 * MIB
    assert found.process_bytes({2**30, 2**30 + 1}) == 10 * MIB
    assert found.process_bytes({1}) is None
    listed.append(SimpleNamespace(pid=2**30, usedGpuMemory=None))
    assert found.process_bytes({2**30, 2**30 + 1}) is None
    assert nvml().process_bytes() is None
