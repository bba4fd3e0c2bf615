"""Run the timer study: compare the harness with another timer, with itself and with known lengths."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial

import torch
from torch.utils.benchmark import Timer

from esbench.measure.interleave import LATENCY, TimedCall, interleave
from esbench.measure.timers import Call, Clock, HostClock, Visit, clocks
from esbench.progress import Show
from esbench.schema import Environment
from esbench.store import new_run_id
from esbench.studies.timer_accuracy import AGREEMENT, ARMS, LENGTH, SCHEMA, TWINS, Missing, Reading, Study

_CALIBRATION_CYCLES = 20_000_000


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
        return [*map(add, (20, 24, 26, 28)), *map(matmul, (1024, 2048, 4096, 8192))]
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


class TorchClock(HostClock):
    """``torch.utils.benchmark`` as a clock of the harness: a visit is the mean of one block of calls."""

    method = ARMS[AGREEMENT][1]

    def visit(self, call: Call, calls: int) -> Visit:
        """Time one block of calls with as many threads as the harness uses."""
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return Visit({LATENCY: (timer.timeit(calls).mean * 1e9,)})


@dataclass(frozen=True)
class Plan:
    """What a study measures, and for how long.

    Attributes:
        clock: the clock of the harness.
        other: the timer that it is compared with.
        kernels: the calls.
        waits: the calls of known length.
        sittings: how often each kernel is measured.
        rounds: rounds of a comparison with the other timer.
        agreement_s: budget of a comparison with the other timer, per timer.
        twins_s: budget of other calls.
        seed: seed of inputs and orders.

    """

    clock: Clock
    other: Clock
    kernels: Sequence[Kernel]
    waits: Sequence[Kernel]
    sittings: int = 3
    rounds: int = 20
    agreement_s: float = 3.0
    twins_s: float = 1.0
    seed: int = 0


def plan_for(device: str, seed: int) -> Plan:
    """Return the plan for a device."""
    return Plan(clocks(device)[0], TorchClock(), kernels(device, seed), waits(device), seed=seed)


def study(plan: Plan, environment: Environment, progress: Show) -> Study:
    """Measure a plan."""
    start, start_s = datetime.now(UTC), time.monotonic()
    rng = random.Random(plan.seed)  # noqa: S311  # an order, not a secret
    steps = [
        (f"{measure.__name__}: {kernel.name}", partial(measure, plan, kernel, rng, sitting))
        for sitting in range(plan.sittings)
        for measure in (agreement, twins)
        for kernel in plan.kernels
    ]
    steps.append(("known lengths", partial(lengths, plan, rng)))
    results: list[Reading | Missing] = []
    for done, (name, step) in enumerate(steps):
        progress(done, len(steps), name)
        results += step()
    return Study(
        schema=SCHEMA,
        study_id=new_run_id("accuracy", start),
        started=start.isoformat(timespec="seconds"),
        seed=plan.seed,
        wall_s=time.monotonic() - start_s,
        environment=environment,
        readings=tuple(result for result in results if isinstance(result, Reading)),
        missing=tuple(result for result in results if isinstance(result, Missing)),
    )


def agreement(plan: Plan, kernel: Kernel, rng: random.Random, sitting: int) -> Iterator[Reading | Missing]:
    """Measure a kernel with the harness and with the other timer in the same rounds."""
    timers = zip(ARMS[AGREEMENT], (plan.clock, plan.other), strict=True)
    calls = {arm: _warm(kernel, clock, plan.agreement_s) for arm, clock in timers}
    for _ in range(plan.rounds):
        active = [call for call in calls.values() if not call.stop]
        rng.shuffle(active)
        for call in (*active, *reversed(active)):
            call.visit()
        for position, call in enumerate(active):
            call.end_round(position, may_stop=False)
    yield from _readings(AGREEMENT, kernel, calls, sitting)


def twins(plan: Plan, kernel: Kernel, rng: random.Random, sitting: int) -> Iterator[Reading | Missing]:
    """Measure a kernel under two names in the same rounds."""
    calls = {arm: _warm(kernel, plan.clock, plan.twins_s) for arm in ARMS[TWINS]}
    interleave(list(calls.values()), rng)
    yield from _readings(TWINS, kernel, calls, sitting)


def lengths(plan: Plan, rng: random.Random) -> Iterator[Reading | Missing]:
    """Measure waits of known length in the same rounds."""
    calls = [(kernel, _warm(kernel, plan.clock, plan.twins_s)) for kernel in plan.waits]
    interleave([call for _, call in calls], rng)
    for kernel, call in calls:
        yield from _readings(LENGTH, kernel, {"esbench": call}, 0)


def _warm(kernel: Kernel, clock: Clock, budget_s: float) -> TimedCall:
    call = TimedCall(clock.prepare(kernel.call, 1), clock, budget_s)
    call.warm_up()
    return call


def _readings(
    question: str, kernel: Kernel, calls: Mapping[str, TimedCall], sitting: int
) -> Iterator[Reading | Missing]:
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
                expected_ns=kernel.expected_ns,
            )
