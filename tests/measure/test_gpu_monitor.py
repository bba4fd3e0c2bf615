"""GPU metrics while a call is repeated, and processes that use the GPU, with a fake NVML."""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from esbench.measure import gpu_monitor
from esbench.measure.gpu_monitor import (
    Activity,
    ConditionsReader,
    Pace,
    foreign_processes,
    monitor,
    monitor_call,
    own_pids,
)
from esbench.measure.nvml import Nvml
from esbench.schema import Conditions
from tests.fake_nvml import MIB, UUID, answering, bindings, install, processes, refusing

PATIENCE_S = 10
TICK_S = 0.1

HERE = os.getpid()
HOST, ALIEN = 2**30, 2**30 + 1
"""Ids unused on this machine: ours as a host may number it, and that of another process."""


class Gpu:
    """A fake GPU that draws 300 W during calls, which are all that advances its clock, by one tick each.

    A call returns when NVML's energy counter has been read after it, so that the sampler reads each of its
    values. ``energy_mj`` maps the energy drawn to the value of the counter.
    """

    power_w = 300

    def __init__(self, energy_mj: Callable[[float], object] = int, **answers: Any) -> None:
        self.calls = 0
        self.waits = 0
        self.pace = Pace(lead_in_s=0.45, window_s=2.95, max_s=4.95, interval_s=1e-4, now=self.seconds)
        self._energy_mj = energy_mj
        self._read = threading.Condition()
        self._reads = 0
        counter = {"nvmlDeviceGetTotalEnergyConsumption": self._counter}
        self.nvml = Nvml(UUID, bindings(**(counter | answers)))

    def seconds(self) -> float:
        """Return the time of the fake clock."""
        return self.calls * TICK_S

    def call(self) -> None:
        """Advance the clock by a tick, and wait for the sampler if there is one."""
        self.calls += 1
        if samplers():
            with self._read:
                reads = self._reads
                assert self._read.wait_for(lambda: self._reads > reads + 1, PATIENCE_S)

    def wait(self) -> None:
        """Count a synchronization."""
        self.waits += 1

    def monitor(self, idle_w: float | None = None) -> Activity:
        """Return the metrics read while the call is repeated."""
        return monitor(self.call, self.nvml, self.wait, idle_w, self.pace)

    def _counter(self, _: object) -> object:
        with self._read:
            self._reads += 1
            self._read.notify_all()
        return self._energy_mj(round(self.power_w * self.seconds() * 1e3))


def samplers() -> list[str]:
    """Return the names of the sampling threads that are alive."""
    return [thread.name for thread in threading.enumerate() if "esbench" in thread.name]


def test_each_metric_is_read_while_the_call_is_repeated() -> None:
    """Each reading is a sample, throttling has one in all; a requested metric that was read has no reason."""
    gpu = Gpu(nvmlDeviceGetCurrentClocksThrottleReasons=answering(0x4))
    activity = gpu.monitor(idle_w=100.0)
    samples = {metric: set(values) for metric, values in activity.samples.items()}
    assert [round(value, 9) for value in (*samples.pop("energy_j"), *samples.pop("net_energy_j"))] == [30, 20]
    assert samples == {
        "utilization_percent": {97.0},
        "power_w": {300.0},
        "clock_hz": {1.98e9},
        "temperature_c": {45.0},
        "throttled_percent": {100.0},
    }
    assert not activity.reason
    assert len(activity.samples["power_w"]) >= 30
    assert len(activity.samples["throttled_percent"]) == 1
    assert gpu.waits == gpu.calls == 5 + 30
    assert not samplers()

    answers: list[int] = []

    def reasons(_: object) -> int:
        answers.append((0x1, 0x4, 0x21)[len(answers) % 3])
        return answers[-1]

    (share,) = Gpu(nvmlDeviceGetCurrentClocksThrottleReasons=reasons).monitor().samples["throttled_percent"]
    assert share == pytest.approx(100 * sum(answer != 0x1 for answer in answers) / len(answers))


def test_short_calls_share_a_synchronization() -> None:
    """Short calls share a synchronization, so that the GPU never idles and the launch queue never fills."""
    calls, now = 0, 0.0

    def call() -> None:
        nonlocal calls
        calls += 1

    blocks: list[int] = []

    def wait() -> None:
        nonlocal now
        blocks.append(calls - sum(blocks))
        now += 1e-5 * blocks[-1]

    monitor(call, Gpu().nvml, wait, pace=Pace(0.1, 0.1, 0.1, 1e-4, lambda: now))
    assert blocks[:3] == [1, 2, 4]
    assert set(blocks[-5:]) == {512}
    assert all(block * 1e-5 <= gpu_monitor.BLOCK_S for block in blocks)


def test_a_refused_metric_has_a_reason_and_others_have_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused metric has its own reason, also if only a later reading fails; without NVML all have one."""
    complete = Gpu().monitor(idle_w=1.0)
    temperatures = iter([45, 45])
    for function, metric, failing in (
        ("PowerUsage", "power_w", refusing),
        ("CurrentClocksThrottleReasons", "throttled_percent", refusing),
        ("Temperature", "temperature_c", lambda *_: next(temperatures, 2**32 - 1)),
    ):
        activity = Gpu(**{f"nvmlDeviceGet{function}": failing}).monitor(idle_w=1.0)
        assert complete.samples.keys() - activity.samples.keys() == {metric}
        assert activity.reason.startswith(f"no {metric}: nvmlDeviceGet{function}")
    install(monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert monitor_call(pytest.fail) == Activity({}, "the package nvidia-ml-py is not installed")


def test_energy_has_a_value_or_a_reason() -> None:
    """Energy needs a counter that advances often enough; a slow counter gets more time."""
    for energy_mj, words, window_s in (
        (lambda _: 7, "not at all", 3.0),
        (lambda spent: 10**12 - spent, "by -900 J", 3.0),
        (lambda spent: 1000 * spent, "by 900000 J", 3.0),
        (lambda spent: spent // 120_000, "12 times, not 20,", 5.0),
    ):
        activity = Gpu(energy_mj).monitor(idle_w=1.0)
        assert not {"energy_j", "net_energy_j"} & activity.samples.keys()
        assert activity.reason == f"no energy_j: the energy counter moved {words} in {window_s} s"
    slow = Gpu(lambda spent: spent // 60_000 * 60_000)
    assert slow.monitor().samples["energy_j"][0] == pytest.approx(30.0, rel=0.03)
    assert 5 + 39 <= slow.calls <= 5 + 43  # the lead-in, and 20 updates of the counter: one in two calls
    for idle_w, reason in (
        (None, "the idle power is unknown"),
        (301.0, "300 W under load are less than 301 W when idle"),
    ):
        activity = Gpu().monitor(idle_w)
        assert activity.samples["energy_j"][0] == pytest.approx(30.0)
        assert "net_energy_j" not in activity.samples
        assert activity.reason == f"no net_energy_j: {reason}"


def test_the_thread_is_stopped_when_the_call_raises() -> None:
    """An error in the call is raised, and the sampling thread ends."""
    threads: list[str] = []

    def call() -> None:
        threads.extend(samplers())
        if threads:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        monitor(call, Gpu().nvml, lambda: None, pace=Pace(0, PATIENCE_S, PATIENCE_S, 1e-4))
    assert threads == ["esbench-activity"]
    assert not samplers()


def test_conditions_are_none_where_nvml_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML is opened and closed once, and its errors do not interrupt a run."""
    log: list[str] = []
    clocks = iter([1980, 1500])
    module = bindings(
        nvmlInit=lambda: log.append("open"),
        nvmlShutdown=lambda: log.append("close"),
        nvmlDeviceGetClockInfo=lambda *_: next(clocks, 1980),
        nvmlDeviceGetCurrentClocksThrottleReasons=answering(0x21),
    )
    with ConditionsReader(Nvml(UUID, module)) as read:
        assert [read(), read()] == [
            Conditions(clock_hz=hz, temperature_c=45.0, power_w=300.0, throttled=("thermal slowdown",))
            for hz in (1.98e9, 1.5e9)
        ]
        names = ("PowerUsage", "Temperature", "CurrentClocksThrottleReasons")
        vars(module).update({f"nvmlDeviceGet{name}": refusing for name in names})
        assert read() == Conditions(clock_hz=1.98e9)
        module.nvmlDeviceGetClockInfo = refusing  # type: ignore[attr-defined]  # a module made up
        assert read() is None
    assert log == ["open", "close"]
    install(monkeypatch, nvmlInit=refusing)
    with ConditionsReader() as read:
        assert read() is None
        assert read.process_bytes() is None


@pytest.mark.usefixtures("new_process")
def test_this_process_is_the_one_that_appears_with_the_cuda_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that appears with the CUDA context is this one; otherwise the id is unknown."""
    before: tuple[int, ...]
    after: tuple[int, ...]
    for before, after, expected in (
        ((), (HERE,), {HERE}),
        ((ALIEN,), (ALIEN, HERE), {HERE}),
        ((), (HERE, ALIEN), {HERE}),
        ((HERE, ALIEN), (HERE, ALIEN), {HERE}),
        ((ALIEN,), (ALIEN, HOST), {HOST}),
        ((HERE,), (HERE, HOST), {HOST}),
        ((), (), set()),
        ((ALIEN,), (ALIEN,), set()),
    ):
        listed = [processes(*before), processes(*after)]
        install(monkeypatch, nvmlDeviceGetComputeRunningProcesses=lambda _, listed=listed: listed.pop(0))
        own_pids.cache_clear()
        assert own_pids() == expected, (before, after)

    install(monkeypatch, nvmlDeviceGetComputeRunningProcesses=answering(processes(ALIEN)))
    monkeypatch.setattr(
        torch.cuda, "synchronize", Mock(side_effect=RuntimeError("CUDA error: out of memory"))
    )
    own_pids.cache_clear()
    assert own_pids() == set()


@pytest.mark.usefixtures("new_process")
def test_all_other_processes_are_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes are listed by name and id, also later ones; none if this process is not identified.

    The bytes of this process are found under the id that the host gives it.
    """
    listed = [[], processes(HOST), processes(HOST), processes(HOST, ALIEN), processes(HOST, used=5 * MIB)]
    install(monkeypatch, nvmlDeviceGetComputeRunningProcesses=lambda _: listed.pop(0))
    assert foreign_processes() == ()
    assert foreign_processes() == (f"python3 (pid {ALIEN})",)
    assert own_pids() == {HOST}
    assert ConditionsReader().process_bytes() == 5 * MIB
    for function in ("nvmlInit", "nvmlDeviceGetComputeRunningProcesses"):
        install(monkeypatch, **{function: refusing})
        assert foreign_processes() == ()
        assert ConditionsReader().process_bytes() is None
        own_pids.cache_clear()
        assert own_pids() == set()
    install(monkeypatch, nvmlDeviceGetComputeRunningProcesses=answering(processes(ALIEN)))
    assert foreign_processes() == ()
