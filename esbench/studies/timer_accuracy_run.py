"""Run the timer study: compare the harness with other timers, with itself and with known lengths.

``python -m esbench.studies.timer_accuracy_run DEVICE SEED THREADS SECONDS`` measures a few kernels in a fresh
process and prints their samples as JSON.
"""

import importlib
import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial

import msgspec
import psutil
import torch
from torch.utils.benchmark import Timer as TorchTimer

from esbench.measure.interleave import LATENCY, TimedCall, interleave
from esbench.measure.timers import Call, Clock, Visit, clocks
from esbench.progress import Show
from esbench.schema import Environment, Sample
from esbench.store import new_run_id
from esbench.studies.timer_accuracy import (
    DO_BENCH,
    OURS,
    SCHEMA,
    TORCH,
    Missing,
    Question,
    Reading,
    Study,
)

PROCESS_TIMEOUT_S = 120.0
REPLICATED = {
    "cpu": ("add 2^20", "matmul 256", "matmul 512"),
    "cuda": ("spin 100 us", "add 2^26", "matmul 2048"),
}
"""The kernels that fresh processes measure, by device."""
_CALIBRATION_CYCLES = 20_000_000

Found = Iterator[Reading | Missing]
Replicate = dict[str, tuple[tuple[Sample, ...], ...]]
"""Kernel -> one tuple of nanoseconds per round."""


# Kernels


@dataclass(frozen=True)
class Kernel:
    """A call with a name, and its duration if known."""

    name: str
    call: Call
    expected_ns: float | None = None


def kernels(device: str, seed: int) -> list[Kernel]:
    """Return calls from 2 us to some 10 ms."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device)

    def add(power: int) -> Kernel:
        return Kernel(f"add 2^{power}", partial(torch.add, normal(1 << power), normal(1 << power)))

    def matmul(size: int) -> Kernel:
        return Kernel(f"matmul {size}", partial(torch.mm, normal(size, size), normal(size, size)))

    if device == "cuda":
        # Spins do not access memory, so the state of the cache does not matter.
        spins = [_spin(ns) for ns in (20_000, 100_000, 1_000_000, 10_000_000)]
        return [*spins, *map(add, (20, 24, 26, 28)), *map(matmul, (1024, 2048, 4096, 8192))]
    return [*map(add, (14, 20, 22)), *map(matmul, (64, 128, 256, 512, 1024))]


def waits(device: str) -> list[Kernel]:
    """Return waits of known length, of the device on CUDA and of the host elsewhere."""
    wait = _spin if device == "cuda" else _busy
    return [wait(ns) for ns in (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)]


def _busy(wait_ns: int) -> Kernel:
    def wait() -> None:
        end = time.perf_counter_ns() + wait_ns
        while time.perf_counter_ns() < end:
            pass

    return Kernel(f"busy wait {wait_ns // 1000} us", wait, float(wait_ns))


def _spin(wait_ns: int) -> Kernel:
    sleep = partial(torch.cuda._sleep, round(wait_ns * _cycles_per_ns()))  # noqa: SLF001  # there is no public function
    return Kernel(f"spin {wait_ns // 1000} us", sleep, float(wait_ns))


@cache
def _cycles_per_ns() -> float:
    """Return the approximate clock rate of the device; no goal depends on it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first wakes the device up
        start.record()
        torch.cuda._sleep(_CALIBRATION_CYCLES)  # noqa: SLF001  # there is no public function
        end.record()
        torch.cuda.synchronize()
    return _CALIBRATION_CYCLES / (start.elapsed_time(end) * 1e6)


# Other timers


@dataclass(frozen=True)
class Timer:
    """Another timer as a clock of the harness; ``read`` returns nanoseconds of a number of calls."""

    method: str
    read: Callable[[Call, int], Sequence[float]]
    warm_up_s: tuple[float, float] = (0.0, 0.1)

    def seconds(self) -> float:
        """Return the time in seconds."""
        return time.perf_counter()

    def prepare(self, call: Call, turns: int) -> Call:  # noqa: ARG002  # a clock's signature
        """Return the call unchanged."""
        return call

    def visit(self, call: Call, calls: int) -> Visit:
        """Time a number of calls."""
        return Visit({LATENCY: tuple(self.read(call, calls))})


def timers(device: str) -> tuple[list[Timer], dict[str, str]]:
    """Return the available timers, and the reason why each other one is not."""
    found = [Timer(TORCH, by_torch)]
    if device != "cuda":
        return found, {DO_BENCH: "it needs a CUDA GPU"}
    if importlib.util.find_spec("triton") is None:
        return found, {DO_BENCH: "triton is not installed"}
    return [*found, Timer(DO_BENCH, by_do_bench)], {}


def by_torch(call: Call, calls: int) -> list[float]:
    """Time one block of calls with as many threads as the harness uses; return the mean of a call."""
    timer = TorchTimer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return [timer.timeit(calls).mean * 1e9]


def by_do_bench(call: Call, calls: int) -> list[float]:
    """Time about this number of calls with CUDA events, each after a flush of the cache."""
    start_s = time.perf_counter()
    call()
    torch.cuda.synchronize()
    milliseconds = calls * (time.perf_counter() - start_s) * 1e3
    testing = importlib.import_module("triton.testing")  # only installed with CUDA
    found: list[float] = testing.do_bench(call, warmup=1, rep=max(1, milliseconds), return_mode="all")
    return [value * 1e6 for value in found]


# The study


@dataclass(frozen=True)
class Plan:
    """What a study measures, and for how long.

    Attributes:
        clock: the clock of the harness.
        kernels: the calls.
        waits: the calls of known length.
        timers: the other timers.
        reasons: why each other timer is not available.
        sittings: how often each kernel is measured.
        rounds: rounds of a comparison with other timers.
        agreement_s: budget of a comparison with other timers, per timer.
        twins_s: budget of other calls.
        processes: the number of fresh processes.
        seed: of inputs and orders.

    """

    clock: Clock
    kernels: Sequence[Kernel]
    waits: Sequence[Kernel]
    timers: Sequence[Timer]
    reasons: Mapping[str, str] = field(default_factory=dict)
    sittings: int = 3
    rounds: int = 20
    agreement_s: float = 3.0
    twins_s: float = 1.0
    processes: int = 10
    seed: int = 0


def plan_for(device: str, seed: int) -> Plan:
    """Return the plan for a device."""
    others, reasons = timers(device)
    return Plan(clocks(device)[0], kernels(device, seed), waits(device), others, reasons, seed=seed)


def study(plan: Plan, environment: Environment, progress: Show) -> Study:
    """Measure a plan."""
    now, start_s = datetime.now(UTC), time.monotonic()
    rng = random.Random(plan.seed)  # noqa: S311  # an order, not a secret
    steps = [
        *(
            (f"{take.__name__}: {kernel.name}", partial(take, plan, kernel, rng, sitting))
            for sitting in range(plan.sittings)
            for take in (agreement, twins)
            for kernel in plan.kernels
        ),
        ("known lengths", partial(lengths, plan, rng)),
        *(
            (f"fresh process {number}", partial(fresh, plan, environment.device, f"process {number}"))
            for number in range(1, plan.processes + 1)
        ),
    ]
    found: list[Reading | Missing] = []
    for done, (name, take) in enumerate(steps):
        progress(done, len(steps), name)
        found += take()
    found += [Missing(question="agreement", arm=arm, reason=reason) for arm, reason in plan.reasons.items()]
    return Study(
        schema=SCHEMA,
        study_id=new_run_id("accuracy", now),
        started=now.isoformat(timespec="seconds"),
        seed=plan.seed,
        wall_s=time.monotonic() - start_s,
        environment=environment,
        load_after=psutil.getloadavg()[0],
        readings=tuple(one for one in found if isinstance(one, Reading)),
        missing=tuple(one for one in found if isinstance(one, Missing)),
    )


def agreement(plan: Plan, kernel: Kernel, rng: random.Random, sitting: int) -> Found:
    """Measure a kernel with the harness and with the other timers in the same rounds."""
    every: dict[str, Clock] = {OURS: plan.clock, **{timer.method: timer for timer in plan.timers}}
    calls = {arm: _warm(kernel, clock, plan.agreement_s) for arm, clock in every.items()}
    for _ in range(plan.rounds):
        active = [call for call in calls.values() if not call.stop]
        rng.shuffle(active)
        for call in (*active, *reversed(active)):
            call.visit()
        for position, call in enumerate(active):
            call.close_round(position, may_leave=False)
    yield from _readings("agreement", kernel, calls, sitting)


def twins(plan: Plan, kernel: Kernel, rng: random.Random, sitting: int) -> Found:
    """Measure a kernel under two names in the same rounds."""
    calls = {arm: _warm(kernel, plan.clock, plan.twins_s) for arm in ("first name", "second name")}
    interleave(list(calls.values()), rng)
    yield from _readings("twins", kernel, calls, sitting)


def lengths(plan: Plan, rng: random.Random) -> Found:
    """Measure waits of known length in the same rounds."""
    calls = [(kernel, _warm(kernel, plan.clock, plan.twins_s)) for kernel in plan.waits]
    interleave([call for _, call in calls], rng)
    for kernel, call in calls:
        yield from _readings("length", kernel, {OURS: call})


def fresh(plan: Plan, device: str, arm: str) -> Found:
    """Measure some kernels in a fresh process."""
    told = map(str, (plan.seed, torch.get_num_threads(), plan.twins_s))
    command = [sys.executable, "-m", __name__, device, *told]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROCESS_TIMEOUT_S, check=True)  # noqa: S603  # this module
    except subprocess.TimeoutExpired:
        yield Missing(question="replicates", arm=arm, reason=f"it took longer than {PROCESS_TIMEOUT_S:g} s")
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        reason = f"exit code {error.returncode}: {last}"
        yield Missing(question="replicates", arm=arm, reason=reason)
    else:
        for kernel, samples in msgspec.json.decode(done.stdout, type=Replicate).items():
            yield Reading(question="replicates", kernel=kernel, arm=arm, samples=samples)


def replicate(device: str, seed: int, budget_s: float) -> Replicate:
    """Measure the replicated kernels one after another."""
    rng, found = random.Random(seed), {}  # noqa: S311  # an order, not a secret
    for kernel in kernels(device, seed):
        if kernel.name in REPLICATED[device]:
            call = _warm(kernel, clocks(device)[0], budget_s)
            interleave([call], rng)
            found[kernel.name] = tuple(call.rounds[LATENCY])
    return found


def _warm(kernel: Kernel, clock: Clock, budget_s: float) -> TimedCall:
    call = TimedCall(clock.prepare(kernel.call, 1), clock, budget_s)
    call.warm_up()
    return call


def _readings(question: Question, kernel: Kernel, calls: Mapping[str, TimedCall], sitting: int = 0) -> Found:
    for arm, call in calls.items():
        if call.failure:
            yield Missing(question=question, arm=arm, reason=call.failure.reason, kernel=kernel.name)
            continue
        for metric, rounds in call.rounds.items():
            yield Reading(
                question=question,
                kernel=kernel.name,
                arm=arm,
                metric=metric,
                sitting=sitting,
                samples=tuple(rounds),
                places=tuple(call.positions),
                expected_ns=kernel.expected_ns if question == "length" else None,
            )


if __name__ == "__main__":
    asked_device, asked_seed, asked_threads, asked_s = sys.argv[1:]
    torch.set_num_threads(int(asked_threads))
    sys.stdout.buffer.write(msgspec.json.encode(replicate(asked_device, int(asked_seed), float(asked_s))))
