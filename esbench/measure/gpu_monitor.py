"""Utilization, power, clock and energy of a GPU while a call is repeated, and the processes on the GPU.

NVML's utilization is the share of time in which any kernel ran, not the share of the GPU that kernels used.
Utilization and power are means over up to a second, so readings begin after a lead-in. Energy is the
increase of the board's energy counter.
"""

import contextlib
import functools
import os
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeVar

import torch

from esbench.measure.nvml import PLAUSIBLE, Nvml, NvmlError
from esbench.schema import Conditions

T = TypeVar("T")

METHOD = "nvml"

MAX_W = PLAUSIBLE["mW"][1] / 1e3
UPDATES = 20
"""The least number of updates of the energy counter in a window: an error of one update is then 5 %."""
BLOCK_S = 0.01
"""The seconds of work between two synchronizations: few launches queue up, and the GPU is seldom idle."""
MAX_CALLS = 1024
"""The most calls between two synchronizations."""


class Pace(NamedTuple):
    """The durations of a pass.

    Attributes:
        lead_in_s: the time before the first reading.
        window_s: the time during which readings are taken.
        max_s: the longest window, used if the energy counter is updated slowly.
        interval_s: the time between readings.
        now: the clock, in seconds.
    """

    lead_in_s: float = 1.0
    window_s: float = 2.0
    max_s: float = 4.0
    interval_s: float = 0.05
    now: Callable[[], float] = time.monotonic


PACE = Pace()
IDLE_S = 1.0
"""The seconds for which the idle power is read before a run."""


@dataclass(frozen=True)
class Activity:
    """Samples of each metric, and the reasons for missing metrics.

    ``energy_j`` and ``net_energy_j`` have one sample, the energy of a call; ``throttled_percent`` has one,
    the share of readings with a throttled clock; other metrics have a sample for each reading.
    """

    samples: Mapping[str, tuple[float, ...]]
    reason: str = ""


@dataclass
class Readings:
    """The readings of a window.

    Attributes:
        samples: metric -> its values.
        missing: metric -> the reason why it has no values.
        updates: how often the energy counter has changed.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    updates: int = 0

    def add(self, metric: str, read: Callable[[], float]) -> None:
        """Read a metric and store its value; after a failure all its values are dropped."""
        if metric in self.missing:
            return
        try:
            self.samples.setdefault(metric, []).append(read())
        except NvmlError as error:
            self.samples.pop(metric, None)
            self.missing[metric] = str(error)


@contextlib.contextmanager
def sample_in_background(nvml: Nvml, interval_s: float) -> Iterator[Readings]:
    """Read NVML at intervals on a thread inside the context, at least once."""
    readings, stop = Readings(), threading.Event()

    def sample() -> None:
        last_j: float | None = None
        while True:
            readings.add("utilization_percent", nvml.utilization_percent)
            readings.add("power_w", nvml.power_w)
            readings.add("clock_hz", nvml.clock_hz)
            readings.add("temperature_c", nvml.temperature_c)
            readings.add("throttled_percent", lambda: 100.0 * bool(nvml.throttled()))
            with contextlib.suppress(NvmlError):  # monitor() reads the counter as well and stores the reason
                now_j = nvml.energy_j()
                readings.updates += last_j is not None and now_j != last_j
                last_j = now_j
            if stop.wait(interval_s):
                break

    thread = threading.Thread(target=sample, name="esbench-activity", daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        stop.set()
        thread.join()


def monitor_call(call: Callable[[], object], idle_w: float | None = None) -> Activity:
    """Repeat a CUDA call for some seconds and return NVML's readings.

    Net energy is computed only with the idle power from :func:`idle_power_w`.
    """
    try:
        with Nvml() as nvml:
            return monitor(call, nvml, torch.cuda.synchronize, idle_w)
    except NvmlError as error:
        return Activity({}, str(error))


def monitor(
    call: Callable[[], object],
    nvml: Nvml,
    synchronize: Callable[[], object],
    idle_w: float | None = None,
    pace: Pace = PACE,
) -> Activity:
    """Repeat a call for the lead-in and the window; return NVML's readings in the window."""
    now, block_calls = pace.now, 1

    def run_block() -> int:
        """Launch a block of calls and wait for it; return the number of calls."""
        nonlocal block_calls
        calls, start_s = block_calls, now()
        for _ in range(calls):
            call()
        synchronize()
        if now() - start_s < BLOCK_S / 2:
            block_calls = min(2 * block_calls, MAX_CALLS)
        return calls

    lead_in_ends_s, calls = now() + pace.lead_in_s, 0
    while now() < lead_in_ends_s:
        run_block()
    with sample_in_background(nvml, pace.interval_s) as readings:
        readings.add("energy_j", nvml.energy_j)
        start_s = now()
        while (spent_s := now() - start_s) < pace.window_s or (
            0 < readings.updates < UPDATES and spent_s < pace.max_s  # the energy counter is slow
        ):
            calls += run_block()
        readings.add("energy_j", nvml.energy_j)
    _compute_energy(readings, spent_s, calls, idle_w)
    samples = {metric: tuple(values) for metric, values in readings.samples.items()}
    if throttled := samples.get("throttled_percent"):
        samples["throttled_percent"] = (statistics.fmean(throttled),)
    return Activity(samples, "; ".join(f"no {metric}: {why}" for metric, why in readings.missing.items()))


def _compute_energy(readings: Readings, window_s: float, calls: int, idle_w: float | None) -> None:
    """Replace the two values of the energy counter by the energy of a call.

    energy = (after - before) / calls, and net energy = (after - before - idle power * window) / calls.
    """
    if "energy_j" in readings.missing:
        return
    before_j, after_j = readings.samples.pop("energy_j")
    spent_j = after_j - before_j
    change = ""
    if not 0 <= spent_j <= MAX_W * window_s:
        change = f"by {spent_j:g} J"
    elif not spent_j:
        change = "not at all"
    elif readings.updates < UPDATES:
        change = f"{readings.updates} times, not {UPDATES},"
    if change:
        readings.missing["energy_j"] = f"the energy counter moved {change} in {window_s:.1f} s"
        return
    readings.samples["energy_j"] = [spent_j / calls]
    if idle_w is None:
        readings.missing["net_energy_j"] = "the idle power is unknown"
    elif (net_j := spent_j - idle_w * window_s) < 0:
        drawn_w = spent_j / window_s
        readings.missing["net_energy_j"] = (
            f"{drawn_w:.3g} W under load are less than {idle_w:.3g} W when idle"
        )
    else:
        readings.samples["net_energy_j"] = [net_j / calls]


def idle_power_w(nvml: Nvml) -> float:
    """Return the median power of the idle GPU over about a second.

    Raises:
        NvmlError: NVML does not report the power.
    """
    readings = []
    for _ in range(round(IDLE_S / PACE.interval_s)):
        readings.append(nvml.power_w())
        time.sleep(PACE.interval_s)
    return statistics.median(readings)


class ConditionsReader:
    """Reads clock, temperature, power and throttling after each visit; NVML stays open for the whole run.

    A reading is None if NVML does not answer. No method raises.
    """

    def __init__(self, nvml: Nvml | None = None) -> None:
        self._nvml = nvml
        if nvml is None:
            with contextlib.suppress(NvmlError):
                self._nvml = Nvml()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._nvml:
            self._nvml.close()

    def __call__(self) -> Conditions | None:
        """Return the current readings, None if NVML refuses all of them."""
        conditions = Conditions(
            clock_hz=self._read(Nvml.clock_hz),
            temperature_c=self._read(Nvml.temperature_c),
            power_w=self._read(Nvml.power_w),
            throttled=self._read(Nvml.throttled) or (),
        )
        return None if conditions == Conditions() else conditions

    def process_bytes(self) -> int | None:
        """Return the bytes of device memory that this process uses, None if NVML does not report them."""
        return self._read(lambda nvml: nvml.process_bytes(own_pids() or {os.getpid()}))

    def _read(self, read: Callable[[Nvml], T]) -> T | None:
        try:
            return read(self._nvml) if self._nvml else None
        except NvmlError:
            return None


@functools.cache
def own_pids() -> frozenset[int]:
    """Return the ids under which NVML lists this process, empty if NVML does not list it. Never fails.

    In a container, NVML lists the ids of the host, which this process does not know. It is therefore
    recognized by its appearance in the list when torch creates its CUDA context: call this before anything
    else uses the GPU. The result is cached.
    """
    try:
        with Nvml() as nvml:
            before = {process.pid for process in nvml.processes()}
            torch.cuda.synchronize()
            after = {process.pid for process in nvml.processes()}
    except (NvmlError, RuntimeError):  # a RuntimeError from a GPU that is broken or has no free memory
        return frozenset()
    appeared, known_id = after - before, {os.getpid()}
    # Outside of a container it is listed under the id that it knows; it may have a context already.
    return frozenset((appeared & known_id) or appeared or (after & known_id))


def foreign_processes() -> tuple[str, ...]:
    """Return the other processes that NVML lists on the GPU now, empty if it does not answer. Never fails."""
    own = own_pids()
    try:
        with Nvml() as nvml:
            return other_processes(nvml, own)
    except NvmlError:
        return ()


def other_processes(nvml: Nvml, own: Collection[int]) -> tuple[str, ...]:
    """Return the processes on the GPU other than ``own``; an empty tuple if ``own`` is unknown.

    Raises:
        NvmlError: NVML does not list processes.
    """
    return tuple(str(process) for process in sorted(nvml.processes()) if own and process.pid not in own)
