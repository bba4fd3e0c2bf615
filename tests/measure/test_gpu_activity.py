"""What a GPU does while a call is looped, with a fake of NVML and a clock that only calls move."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from esbench.measure import gpu_monitor
from esbench.measure.gpu_monitor import (
    Activity,
    ConditionsReader,
    Pace,
    Sampler,
    idle_power_w,
    of_call,
    watch,
)
from esbench.measure.nvml import Nvml
from esbench.schema import Conditions
from tests.fake_nvml import UUID, answering, bindings, install, refusing

PATIENCE_S = 10
TICK_S = 0.1


class Gpu:
    """A GPU that draws 300 W while a clock runs that only its calls move, one tick each.

    A call returns when NVML's energy counter has been read after it, so that the sampler sees each of its
    values. ``energy_mj`` makes the counter's value from the energy that was drawn.
    """

    power_w = 300

    def __init__(self, energy_mj: Callable[[float], object] = int, **answers: Any) -> None:
        """Open NVML, with these answers."""
        self.calls = 0
        self.waits = 0
        self.pace = Pace(lead_in_s=0.45, window_s=2.95, most_s=4.95, interval_s=1e-4, now=self.seconds)
        self._energy_mj = energy_mj
        self._read = threading.Condition()
        self._reads = 0
        counter = {"nvmlDeviceGetTotalEnergyConsumption": self._counter}
        self.nvml = Nvml(UUID, bindings(**(counter | answers)))

    def seconds(self) -> float:
        """Return the time."""
        return self.calls * TICK_S

    def call(self) -> None:
        """Take a tick, and wait for the sampler where there is one."""
        self.calls += 1
        if sampling():
            with self._read:
                seen = self._reads
                assert self._read.wait_for(lambda: self._reads > seen + 1, PATIENCE_S)

    def wait(self) -> None:
        """Be waited for."""
        self.waits += 1

    def watch(self, idle_w: float | None = None) -> Activity:
        """Watch the calls."""
        return watch(self.call, self.nvml, self.wait, idle_w, self.pace)

    def _counter(self, _: object) -> object:
        with self._read:
            self._reads += 1
            self._read.notify_all()
        return self._energy_mj(round(self.power_w * self.seconds() * 1e3))


def sampling() -> list[str]:
    """Return the names of sampling threads that are alive."""
    return [thread.name for thread in threading.enumerate() if "esbench" in thread.name]


def test_each_metric_is_read_while_the_call_is_looped() -> None:
    """A sample for each reading, one for throttling; what was asked for alone has no reason."""
    gpu = Gpu(nvmlDeviceGetCurrentClocksThrottleReasons=answering(0x4))
    found = gpu.watch(idle_w=100.0)
    samples = {metric: set(values) for metric, values in found.samples.items()}
    assert [round(value, 9) for value in (*samples.pop("energy_j"), *samples.pop("net_energy_j"))] == [30, 20]
    assert samples == {
        "utilization_percent": {97.0},
        "power_w": {300.0},
        "clock_hz": {1.98e9},
        "temperature_c": {45.0},
        "throttled_percent": {100.0},
    }
    assert not found.reason
    assert len(found.samples["power_w"]) >= 30
    assert len(found.samples["throttled_percent"]) == 1
    assert gpu.calls == 5 + 30
    assert gpu.waits == gpu.calls
    assert not sampling()


def test_the_share_of_throttled_readings_is_one_number() -> None:
    """Nothing to do is no throttling."""
    answers: list[int] = []

    def reasons(_: object) -> int:
        answers.append((0x1, 0x4, 0x21)[len(answers) % 3])
        return answers[-1]

    (share,) = Gpu(nvmlDeviceGetCurrentClocksThrottleReasons=reasons).watch().samples["throttled_percent"]
    assert share == pytest.approx(100 * sum(answer != 0x1 for answer in answers) / len(answers))


def test_short_calls_are_waited_for_together() -> None:
    """So the GPU does not run dry between them; nor do more launches pile up than it takes."""
    calls, now = 0, 0.0

    def call() -> None:
        nonlocal calls
        calls += 1

    blocks: list[int] = []

    def wait() -> None:
        nonlocal now
        blocks.append(calls - sum(blocks))
        now += 1e-5 * blocks[-1]

    watch(call, Gpu().nvml, wait, pace=Pace(0.1, 0.1, 0.1, 1e-4, lambda: now))
    assert blocks[:3] == [1, 2, 4]
    assert set(blocks[-5:]) == {512}
    assert all(block * 1e-5 <= gpu_monitor.BLOCK_S for block in blocks)


def test_a_metric_that_is_refused_leaves_the_others() -> None:
    """With the reason for that one."""
    cases: list[tuple[str, str]] = [
        ("nvmlDeviceGetUtilizationRates", "utilization_percent"),
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetClockInfo", "clock_hz"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", "throttled_percent"),
    ]
    for function, metric in cases:
        whole = Gpu().watch(idle_w=1.0)
        found = Gpu(**{function: refusing}).watch(idle_w=1.0)
        assert whole.samples.keys() - found.samples.keys() == {metric}
        assert found.reason.startswith(f"no {metric}: NVML cannot ")
        assert found.reason.endswith(": Insufficient Permissions")


def test_a_reading_that_fails_leaves_the_reason_and_no_figure() -> None:
    """Half of the readings would be a figure of another window."""
    answers = iter([45, 45])
    found = Gpu(nvmlDeviceGetTemperature=lambda *_: next(answers, 0xFFFFFFFF)).watch(idle_w=1.0)
    assert "temperature_c" not in found.samples
    assert found.reason == (
        "no temperature_c: NVML cannot read the temperature: it answers 4294967295 degrees Celsius"
    )


def test_without_idle_power_there_is_no_net_energy() -> None:
    """The raw one stands."""
    found = Gpu().watch()
    assert found.samples["energy_j"][0] == pytest.approx(30.0)
    assert found.reason == "no net_energy_j: the idle power is not known"


def test_net_energy_is_never_negative() -> None:
    """Less than the idle power is no figure but a sentence."""
    found = Gpu().watch(idle_w=301.0)
    assert "net_energy_j" not in found.samples
    assert found.reason == "no net_energy_j: 300 W at work are less than the 301 W of the idle GPU"


def test_a_counter_that_does_not_count_gives_no_energy() -> None:
    """Nor one that moves so seldom that a tick more or less would show."""
    cases: list[tuple[Callable[[float], object], str, float]] = [
        (lambda _: 7, "not at all", 3.0),
        (lambda spent: 10**12 - spent, "by -900 J", 3.0),
        (lambda spent: 1000 * spent, "by 900000 J", 3.0),
        (lambda spent: spent // 120_000, "12 times, not 20,", 5.0),
    ]
    for energy_mj, words, window_s in cases:
        found = Gpu(energy_mj).watch(idle_w=1.0)
        assert not {"energy_j", "net_energy_j"} & found.samples.keys()
        assert found.reason == f"no energy_j: the energy counter moved {words} in {window_s} s"


def test_a_slow_counter_is_given_more_time() -> None:
    """Until it has moved often enough."""
    gpu = Gpu(lambda spent: spent // 60_000 * 60_000)
    assert gpu.watch().samples["energy_j"][0] == pytest.approx(30.0, rel=0.03)
    assert 5 + 39 <= gpu.calls <= 5 + 43


def test_a_counter_that_is_refused_later_gives_no_energy() -> None:
    """The window has no end."""
    gpu = Gpu(lambda spent: spent if spent < 300_000 else -1)
    found = gpu.watch(idle_w=1.0)
    assert not {"energy_j", "net_energy_j"} & found.samples.keys()
    assert found.reason == "no energy_j: NVML cannot read the energy counter: it answers -1 mJ"


def test_without_nvml_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised and nothing called."""
    install(monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert of_call(pytest.fail) == Activity({}, "the package nvidia-ml-py is not installed")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_thread_is_stopped_when_the_call_raises(error: type[BaseException]) -> None:
    """The error passes through, and nothing samples on."""
    seen = []

    def call() -> None:
        seen.extend(sampling())
        if seen:
            raise error

    with pytest.raises(error):
        watch(call, Gpu().nvml, lambda: None, pace=Pace(0, PATIENCE_S, PATIENCE_S, 1e-4))
    assert seen == ["esbench-activity"]
    assert not sampling()


def test_a_sampler_reads_once_at_least() -> None:
    """However short its time is; and its thread is gone after it."""
    with Sampler(Gpu().nvml, PATIENCE_S) as sampler:
        pass
    assert sampler.result.samples["power_w"] == (300.0,)
    assert not sampling()


def test_idle_power_is_the_median_of_a_second() -> None:
    """One peak does not count."""
    powers = iter([70_000, 500_000])
    pauses: list[float] = []
    nvml = Nvml(UUID, bindings(nvmlDeviceGetPowerUsage=lambda _: next(powers, 75_000)))
    assert idle_power_w(nvml, pauses.append) == 75.0
    assert sum(pauses) == pytest.approx(1.0)


def test_conditions_are_read_at_each_call() -> None:
    """NVML is opened once."""
    opened = []
    clocks = iter([1980, 1500])
    module = bindings(
        nvmlInit=lambda: opened.append(1),
        nvmlDeviceGetClockInfo=lambda *_: next(clocks),
        nvmlDeviceGetCurrentClocksThrottleReasons=answering(0x21),
    )
    with ConditionsReader(Nvml(UUID, module)) as read:
        assert [read(), read()] == [
            Conditions(clock_hz=hz, temperature_c=45.0, power_w=300.0, throttled=("thermal slowdown",))
            for hz in (1.98e9, 1.5e9)
        ]
    assert opened == [1]


def test_conditions_hold_what_is_not_refused() -> None:
    """None stands for the rest."""
    names = ("PowerUsage", "Temperature", "CurrentClocksThrottleReasons")
    module = bindings(**{f"nvmlDeviceGet{name}": refusing for name in names})
    assert ConditionsReader(Nvml(UUID, module))() == Conditions(clock_hz=1.98e9)


def test_conditions_that_nvml_stops_telling_are_none() -> None:
    """In the middle of a run nothing is raised; nor after it."""
    module = bindings()
    closed = []
    read = ConditionsReader(Nvml(UUID, module))
    assert read() is not None
    vars(module).update(dict.fromkeys(vars(module), refusing) | {"nvmlShutdown": lambda: closed.append(1)})
    assert read() is None
    read.close()
    read.close()
    assert closed == [1]
    assert read() is None


def test_without_nvml_there_are_no_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the reason is told once."""
    install(monkeypatch, nvmlInit=refusing)
    read = ConditionsReader()
    assert read() is None
    assert read.reason == "NVML cannot start: Insufficient Permissions"
