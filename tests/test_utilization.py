"""GPU utilisation, with fakes of NVML."""

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from esbench.measure import utilization
from esbench.measure.nvml import Nvml, NvmlError
from esbench.measure.utilization import Pace, Sampler, of_call, watch

FAST = Pace(lead_in_s=0.001, window_s=0.05, interval_s=0.001)


class FakeGauge:
    """Gives the readings it was given, the last of them for ever; raises those that are errors."""

    def __init__(self, *readings: float | NvmlError) -> None:
        """Keep the readings; ``read`` is set at the last of them."""
        self.readings = list(readings)
        self.read = threading.Event()

    def utilization_percent(self) -> float:
        """Return the next reading."""
        if len(self.readings) > 1:
            reading = self.readings.pop(0)
        else:
            reading = self.readings[0]
            self.read.set()
        if isinstance(reading, NvmlError):
            raise reading
        return reading


def bindings(**answers: Any) -> ModuleType:
    """Return a module that answers as pynvml does, but for what is given."""
    module = ModuleType("pynvml")
    good: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda name: name,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=len(handle), memory=3),
    }
    vars(module).update(good | answers)
    return module


def refusing(*_: object) -> Any:
    """Fail as pynvml does, with an exception of its own."""
    message = "Insufficient Permissions"
    raise OSError(message)


def sampling() -> list[str]:
    """Return the names of sampling threads that are alive."""
    return [thread.name for thread in threading.enumerate() if "utilization" in thread.name]


def test_the_gpu_is_found_by_its_uuid() -> None:
    """Indices differ between torch and NVML; the handle is the one asked for by name."""
    with Nvml("abc", bindings()) as found:
        assert found.utilization_percent() == len("GPU-abc")
        assert found.driver() == "580.1"


@pytest.mark.parametrize("gpu", [-1, 101, 2**32 - 1, None, "97", float("nan")])
def test_nonsense_is_not_a_percentage(gpu: object) -> None:
    """Whatever NVML answers that is no share of a hundred is an error that quotes it."""
    nonsense = bindings(nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=gpu))
    with Nvml("abc", nonsense) as found, pytest.raises(NvmlError, match="when asked for a utilisation"):
        found.utilization_percent()


@pytest.mark.parametrize(
    "question", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetUtilizationRates"]
)
def test_a_refusal_is_one_line_that_says_what_was_asked(question: str) -> None:
    """At the start, on looking for the GPU and on reading."""
    denied = bindings(**{question: refusing})
    with pytest.raises(NvmlError, match=r"NVML cannot .*: Insufficient Permissions"):
        Nvml("abc", denied).utilization_percent()


def test_nvml_is_closed_when_the_gpu_is_not_found() -> None:
    """What was opened is closed, though nobody got it."""
    closed = []
    strange = bindings(nvmlDeviceGetHandleByUUID=refusing, nvmlShutdown=lambda: closed.append(1))
    with pytest.raises(NvmlError):
        Nvml("abc", strange)
    assert closed == [1]


def test_without_the_bindings_the_reason_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised; there are no readings and the reason says what is missing."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert of_call(lambda: None).reason == "the package nvidia-ml-py is not installed"


def test_readings_are_kept_as_they_were_read() -> None:
    """One after another, from the sampling thread, while the call is looped and waited for."""
    calls: list[str] = []
    gauge = FakeGauge(10.0, 20.0)

    def wait() -> None:
        calls.append("wait")
        gauge.read.wait(10)

    result = watch(lambda: calls.append("call"), gauge, wait, FAST)
    assert result.samples[:2] == (10.0, 20.0)
    assert not result.reason
    assert calls[::2] == ["call"] * (len(calls) // 2)
    assert calls[1::2] == ["wait"] * (len(calls) // 2)
    assert not sampling()


def test_a_reading_that_fails_leaves_the_reason_and_no_figure() -> None:
    """Half of the readings would be a figure of another window."""
    gauge = FakeGauge(10.0, NvmlError("denied"))
    result = watch(lambda: gauge.read.wait(10), gauge, lambda: None, FAST)
    assert result == utilization.Utilization((), "denied")


def test_a_pass_without_a_reading_says_so() -> None:
    """A call that ends the pass before the first interval gives no empty row."""
    result = watch(lambda: None, FakeGauge(10.0), lambda: None, Pace(lead_in_s=9.0, window_s=-9.0))
    assert result == utilization.Utilization((), "the pass ended before a reading")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_thread_is_stopped_when_the_call_raises(error: type[BaseException]) -> None:
    """The error passes through, and nothing samples on."""
    gauge = FakeGauge(10.0)

    def call() -> None:
        gauge.read.wait(10)
        raise error

    with pytest.raises(error):
        watch(call, gauge, lambda: None, FAST)
    assert not sampling()


def test_a_sampler_waits_for_its_thread() -> None:
    """Alive inside the context, gone after it."""
    with Sampler(FakeGauge(10.0), FAST):
        assert sampling() == ["esbench-utilization"]
    assert not sampling()
