"""Utilisation, power, clock and energy of a GPU while one call is looped, and the processes on it.

NVML's utilisation is the share of a window with a kernel running, not how much of the GPU that kernel uses.
It looks back over up to a second, as the power does, so reading starts after a lead-in. Energy is no sum of
powers: it is how far the board's own counter moved over the window.
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

MOST_W = PLAUSIBLE["mW"][1] / 1e3
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
class Readings:
    """The readings of a window: samples by metric, or the reason why a metric has none.

    ``updates`` counts how often the energy counter moved.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    updates: int = 0

    def take(self, metric: str, read: Callable[[], float]) -> None:
        """Read a metric; after a failure it is not read again, since part of a window is not enough."""
        if metric in self.missing:
            return
        try:
            self.samples.setdefault(metric, []).append(read())
        except NvmlError as error:
            self.samples.pop(metric, None)
            self.missing[metric] = str(error)


@contextlib.contextmanager
def sampling(nvml: Nvml, interval_s: float) -> Iterator[Readings]:
    """Read NVML at intervals on a thread while the context lasts, once at least."""
    readings, over = Readings(), threading.Event()

    def sample() -> None:
        last_j: float | None = None
        while True:
            readings.take("utilization_percent", nvml.utilization_percent)
            readings.take("power_w", nvml.power_w)
            readings.take("clock_hz", nvml.clock_hz)
            readings.take("temperature_c", nvml.temperature_c)
            readings.take("throttled_percent", lambda: 100.0 * bool(nvml.throttled()))
            with contextlib.suppress(NvmlError):  # the reading for the figure itself reports the reason
                now_j = nvml.energy_j()
                readings.updates += last_j is not None and now_j != last_j
                last_j = now_j
            if over.wait(interval_s):
                break

    thread = threading.Thread(target=sample, name="esbench-activity", daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        over.set()
        thread.join()


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

    lead_in_ends_s, calls = now() + pace.lead_in_s, 0
    while now() < lead_in_ends_s:
        loop_block()
    with sampling(nvml, pace.interval_s) as readings:
        readings.take("energy_j", nvml.energy_j)
        start_s = now()
        while (spent_s := now() - start_s) < pace.window_s or (
            0 < readings.updates < UPDATES and spent_s < pace.most_s
        ):
            calls += loop_block()
        readings.take("energy_j", nvml.energy_j)
    _spread_energy(readings, spent_s, calls, idle_w)
    samples = {metric: tuple(values) for metric, values in readings.samples.items()}
    if throttled := samples.get("throttled_percent"):
        samples["throttled_percent"] = (statistics.fmean(throttled),)
    return Activity(samples, "; ".join(f"no {metric}: {why}" for metric, why in readings.missing.items()))


def _spread_energy(readings: Readings, window_s: float, calls: int, idle_w: float | None) -> None:
    """Replace the counter's two values by a call's energy, with and without that of the idle GPU."""
    if "energy_j" in readings.missing:
        return
    before_j, after_j = readings.samples.pop("energy_j")
    spent_j = after_j - before_j
    doubt = ""
    if not 0 <= spent_j <= MOST_W * window_s:
        doubt = f"by {spent_j:g} J"
    elif not spent_j:
        doubt = "not at all"
    elif readings.updates < UPDATES:
        doubt = f"{readings.updates} times, not {UPDATES},"
    if doubt:
        readings.missing["energy_j"] = f"the energy counter moved {doubt} in {window_s:.1f} s"
        return
    readings.samples["energy_j"] = [spent_j / calls]
    if idle_w is None:
        readings.missing["net_energy_j"] = "the idle power is not known"
    elif (net_j := spent_j - idle_w * window_s) < 0:
        drawn_w = spent_j / window_s
        why = f"{drawn_w:.3g} W at work are less than the {idle_w:.3g} W of the idle GPU"
        readings.missing["net_energy_j"] = why
    else:
        readings.samples["net_energy_j"] = [net_j / calls]


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

    A reading is None if NVML does not answer; nothing is raised.
    """

    def __init__(self, nvml: Nvml | None = None) -> None:
        """Open NVML, or use the one given."""
        self._nvml = nvml
        if nvml is None:
            with contextlib.suppress(NvmlError):
                self._nvml = Nvml()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close NVML."""
        if self._nvml:
            self._nvml.close()

    def __call__(self) -> Conditions | None:
        """Return the current readings of NVML, None for those that it refuses."""
        found = Conditions(
            clock_hz=self._read(Nvml.clock_hz),
            temperature_c=self._read(Nvml.temperature_c),
            power_w=self._read(Nvml.power_w),
            throttled=self._read(Nvml.throttled) or (),
        )
        return None if found == Conditions() else found

    def process_bytes(self) -> int | None:
        """Return the bytes of device memory that this process uses, None if NVML does not report them."""
        return self._read(lambda nvml: nvml.process_bytes(own_pids() or {os.getpid()}))

    def _read(self, question: Callable[[Nvml], T]) -> T | None:
        try:
            return question(self._nvml) if self._nvml else None
        except NvmlError:
            return None


@functools.cache
def own_pids() -> frozenset[int]:
    """Return the ids that NVML lists for this process, none if it does not list them. Never fails.

    In a container they are the host's, not those that the process has itself; so who is new in NVML's list
    once torch has made its CUDA context is this process. Call it before anything else uses the GPU; later
    calls return the same.
    """
    try:
        with Nvml() as nvml:
            before = {process.pid for process in nvml.processes()}
            torch.cuda.synchronize()
            after = {process.pid for process in nvml.processes()}
    except (NvmlError, RuntimeError):  # the latter from a GPU that is broken or full
        return frozenset()
    new, itself = after - before, {os.getpid()}
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
