"""Utilisation, power, clock and energy of a GPU while one call is looped, and the processes on it.

NVML's utilisation is the share of a window with a kernel running, not how much of the
GPU that kernel uses. It looks back over up to a second, as the power does, so reading starts after a
lead-in. Energy is no sum of powers: it is how far the board's own counter moved over the window.
"""

import contextlib
import functools
import os
import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeVar

import torch

from esbench.measure.nvml import MILLIWATT, Nvml, NvmlError
from esbench.schema import Conditions

T = TypeVar("T")

METHOD = "nvml"

MOST_W = MILLIWATT.most / 1e3
UPDATES = 20
"""So often the energy counter has to move in a window: one tick more or less is then 5 % of it."""
BLOCK_S = 0.01
"""Calls are waited for about this often: launches do not pile up, and the GPU seldom runs dry."""
MOST_CALLS = 1024
"""Not more calls than this are launched before they are waited for."""


class Pace(NamedTuple):
    """The durations of a pass.

    Seconds before the first reading, from then to the end, to the end where the energy counter moves
    slowly, and between readings; the clock that counts them.
    """

    lead_in_s: float = 1.0
    window_s: float = 2.0
    most_s: float = 4.0
    interval_s: float = 0.05
    now: Callable[[], float] = time.monotonic


PACE = Pace()
IDLE_S = 1.0
"""So long the power is read before a run."""


@dataclass(frozen=True)
class Activity:
    """Samples of each metric as they were read, and the reason for each that is missing.

    ``energy_j`` and ``net_energy_j`` have one sample, for one call; ``throttled_percent`` has one, the share
    of readings that found the clock throttled; the others have one for each reading.
    """

    samples: Mapping[str, tuple[float, ...]]
    reason: str = ""


@dataclass
class _Readings:
    """The readings of a sampler; a metric that was refused once is listed under ``refused`` only."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def take(self, metric: str, read: Callable[[], float]) -> None:
        """Read a metric; after a failure it is not read again, since a part of a window gives no figure."""
        if metric in self.refused:
            return
        try:
            self.samples.setdefault(metric, []).append(read())
        except NvmlError as error:
            self.samples.pop(metric, None)
            self.refused[metric] = str(error)

    @property
    def reason(self) -> str:
        """What was refused, and why."""
        return "; ".join(f"no {metric}: {why}" for metric, why in self.refused.items())


class Sampler:
    """Reads NVML at intervals on a thread, from entering to leaving the context."""

    def __init__(self, nvml: Nvml, interval_s: float) -> None:
        """Prepare the thread; entering the context starts it."""
        self._nvml = nvml
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="esbench-activity", daemon=True)
        self._readings = _Readings()
        self.updates = 0

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread and wait for it; it has read once at least."""
        self._over.set()
        self._thread.join()

    @property
    def result(self) -> Activity:
        """The readings until the context was left."""
        found = self._readings
        samples = {metric: tuple(values) for metric, values in found.samples.items()}
        if throttled := samples.get("throttled_percent"):
            samples["throttled_percent"] = (statistics.fmean(throttled),)
        return Activity(samples, found.reason)

    def _run(self) -> None:
        over = False
        last_j: float | None = None
        while not over:
            self._readings.take("utilization_percent", self._nvml.utilization_percent)
            self._readings.take("power_w", self._nvml.power_w)
            self._readings.take("clock_hz", self._nvml.clock_hz)
            self._readings.take("temperature_c", self._nvml.temperature_c)
            self._readings.take("throttled_percent", lambda: 100.0 * bool(self._nvml.throttled()))
            with contextlib.suppress(NvmlError):  # the reading for the figure itself reports the reason
                now_j = self._nvml.energy_j()
                self.updates += last_j is not None and now_j != last_j
                last_j = now_j
            over = self._over.wait(self._interval_s)


def of_call(call: Callable[[], object], idle_w: float | None = None) -> Activity:
    """Loop a CUDA call for some seconds and return what NVML reports.

    ``idle_w`` is what the GPU draws without work, from :func:`idle_power_w`; without it there is no net
    energy.
    """
    try:
        with Nvml() as nvml:
            return watch(call, nvml, torch.cuda.synchronize, idle_w)
    except NvmlError as error:
        return Activity({}, str(error))


def watch(
    call: Callable[[], object],
    nvml: Nvml,
    synchronize: Callable[[], object],
    idle_w: float | None = None,
    pace: Pace = PACE,
) -> Activity:
    """Loop a call for the lead-in and the window; return what NVML reports in the window."""
    now, block = pace.now, 1

    def loop_block() -> int:
        """Call and wait; return how many calls that were."""
        nonlocal block
        calls, start_s = block, now()
        for _ in range(calls):
            call()
        synchronize()
        if now() - start_s < BLOCK_S / 2:
            block = min(2 * block, MOST_CALLS)
        return calls

    lead_in_ends_s = now() + pace.lead_in_s
    while now() < lead_in_ends_s:
        loop_block()
    counter, calls = _Readings(), 0
    with Sampler(nvml, pace.interval_s) as sampler:
        counter.take("energy_j", nvml.energy_j)
        start_s = now()
        while (spent_s := now() - start_s) < pace.window_s or (
            0 < sampler.updates < UPDATES and spent_s < pace.most_s
        ):
            calls += loop_block()
        counter.take("energy_j", nvml.energy_j)
    energy = _Window(counter, spent_s, calls, sampler.updates).energy(idle_w)
    seen = sampler.result
    return Activity({**seen.samples, **energy.samples}, "; ".join(filter(None, (seen.reason, energy.reason))))


class _Window(NamedTuple):
    """The energy counter before and after a window, the calls in it, and how often the counter moved."""

    counter: _Readings
    window_s: float
    calls: int
    updates: int

    def energy(self, idle_w: float | None) -> Activity:
        """Return the energy of a call, as it is and without what the GPU draws anyway."""
        if self.counter.refused:
            return Activity({}, self.counter.reason)
        before_j, after_j = self.counter.samples["energy_j"]
        spent_j = after_j - before_j
        if doubt := self._doubt(spent_j):
            return Activity({}, f"no energy_j: the energy counter moved {doubt} in {self.window_s:.1f} s")
        samples = {"energy_j": (spent_j / self.calls,)}
        if idle_w is None:
            return Activity(samples, "no net_energy_j: the idle power is not known")
        net_j = spent_j - idle_w * self.window_s
        if net_j < 0:
            drawn_w = spent_j / self.window_s
            why = f"{drawn_w:.3g} W at work are less than the {idle_w:.3g} W of the idle GPU"
            return Activity(samples, f"no net_energy_j: {why}")
        return Activity({**samples, "net_energy_j": (net_j / self.calls,)})

    def _doubt(self, spent_j: float) -> str:
        """Return how the counter moved if that gives no figure, or an empty string."""
        if not 0 <= spent_j <= MOST_W * self.window_s:
            return f"by {spent_j:g} J"
        if spent_j and self.updates >= UPDATES:
            return ""
        return f"{self.updates} times, not {UPDATES}," if spent_j else "not at all"


def idle_power_w(
    nvml: Nvml, pause: Callable[[float], object] = time.sleep, interval_s: float = PACE.interval_s
) -> float:
    """Return the median power of the idle GPU over about a second.

    Raises:
        NvmlError: NVML does not tell the power.

    """
    readings = []
    for _ in range(round(IDLE_S / interval_s)):
        readings.append(nvml.power_w())
        pause(interval_s)
    return statistics.median(readings)


class ConditionsReader:
    """Reads clock, temperature, power and throttling after a visit; NVML stays open for the whole run.

    A call returns None if NVML reports nothing, and never raises.
    """

    def __init__(self, nvml: Nvml | None = None) -> None:
        """Open NVML, or use the one given; if that fails, ``reason`` says why and every reading is None."""
        self.reason = ""
        self._nvml: Nvml | None = None
        try:
            self._nvml = nvml or Nvml()
        except NvmlError as error:
            self.reason = str(error)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close NVML."""
        self.close()

    def close(self) -> None:
        """Close NVML; every later reading is None."""
        if self._nvml:
            self._nvml.close()
        self._nvml = None

    def __call__(self) -> Conditions | None:
        """Return what NVML tells now; what it refuses is None in it."""
        if self._nvml is None:
            return None
        found = Conditions(
            clock_hz=_or_none(self._nvml.clock_hz),
            temperature_c=_or_none(self._nvml.temperature_c),
            power_w=_or_none(self._nvml.power_w),
            throttled=_or_none(self._nvml.throttled) or (),
        )
        return None if found == Conditions() else found

    def process_bytes(self) -> int | None:
        """Return the bytes of device memory that this process holds, None where NVML does not tell."""
        nvml = self._nvml
        return _or_none(lambda: nvml.process_bytes(own_pids() or None)) if nvml else None


@functools.cache
def own_pids() -> frozenset[int]:
    """Return the ids by which NVML knows this process, none where it does not tell. Never fails.

    In a container they are the host's, not those that the process has itself; so who is new in NVML's list
    once torch has made its CUDA context is this process. Call it before anything else uses the GPU; later
    calls return the same.
    """
    try:
        with Nvml() as nvml:
            return newcomers(nvml, torch.cuda.synchronize)
    except (NvmlError, RuntimeError):  # the latter from a GPU that is broken or full
        return frozenset()


def newcomers(nvml: Nvml, enter: Callable[[], object]) -> frozenset[int]:
    """Return who is on the GPU since this process entered; itself if it was there before.

    Raises:
        NvmlError: NVML does not list processes.

    """
    before = {process.pid for process in nvml.processes()}
    enter()
    after = {process.pid for process in nvml.processes()}
    itself = {os.getpid()}
    new = after - before
    return frozenset((new & itself) or new or (after & itself))


def foreign_processes() -> tuple[str, ...]:
    """Return the other processes on the GPU now, none if NVML does not list them. Never fails."""
    own = own_pids()
    try:
        with Nvml() as nvml:
            return other_processes(nvml, own)
    except NvmlError:
        return ()


def other_processes(nvml: Nvml, own: Collection[int]) -> tuple[str, ...]:
    """Return the processes on the GPU other than ``own``; none if ``own`` is unknown.

    Raises:
        NvmlError: NVML does not list processes.

    """
    return tuple(str(process) for process in sorted(nvml.processes()) if own and process.pid not in own)


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except NvmlError:
        return None
