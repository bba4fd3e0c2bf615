"""Run the timer study: compare the harness with another timer, with itself and with known lengths."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from esbench.measure.interleave import LATENCY, TimedCall, interleave
from esbench.measure.timers import Call, Clock, HostClock, Visit, clocks, keep_inputs
from esbench.progress import Show
from esbench.schema import Environment
from esbench.store import new_run_id
from esbench.studies.timer_accuracy import (
    AGREEMENT,
    FILES,
    LENGTH,
    QUESTIONS,
    TWINS,
    Missing,
    Reading,
    Study,
)

_CYCLES_PER_NS = 1.5
"""Approximate clock rate of a GPU; the longest wait defines the scale, so no goal depends on it."""


class Kernel(NamedTuple):
    """A call with a name, and its duration if known."""

    name: str
    call: Call
    expected_ns: float | None = None


def kernels(device: str) -> list[Kernel]:
    """Return calls that take from 2 us to some 10 ms."""
    normal = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    is_cuda = device == "cuda"
    return [
        *(
            Kernel(f"add 2^{power}", partial(torch.add, normal(1 << power), normal(1 << power)))
            for power in ((20, 24, 26, 28) if is_cuda else (14, 20, 22))
        ),
        *(
            Kernel(f"matmul {size}", partial(torch.mm, normal(size, size), normal(size, size)))
            for size in ((1024, 2048, 4096, 8192) if is_cuda else (64, 128, 256, 512, 1024))
        ),
    ]


def waits(device: str) -> list[Kernel]:
    """Return waits of known length: a spinning kernel on CUDA, a loop that reads the clock elsewhere."""
    lengths_ns = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
    if device != "cuda":
        return [Kernel(f"busy wait {ns // 1000} us", partial(_busy_wait, ns), ns) for ns in lengths_ns]
    spin = torch.cuda._sleep  # noqa: SLF001  # there is no public function that spins on the device
    return [
        Kernel(f"spin {ns // 1000} us", partial(spin, round(ns * _CYCLES_PER_NS)), ns) for ns in lengths_ns
    ]


def _busy_wait(wait_ns: int) -> None:
    end = time.perf_counter_ns() + wait_ns
    while time.perf_counter_ns() < end:
        pass


class TorchClock(HostClock):
    """``torch.utils.benchmark`` as a clock of the harness: a visit is the mean of one block of calls."""

    method = QUESTIONS[AGREEMENT].arms[1]

    def visit(self, call: Call, calls: int, renew: Call = keep_inputs) -> Visit:  # noqa: ARG002  a clock's interface
        """Time one block of calls with as many threads as the harness uses."""
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return Visit({LATENCY: (timer.timeit(calls).mean * 1e9,)})


@dataclass(frozen=True)
class Plan:
    """The calls to measure by two clocks, and the seconds per kernel, arm and repetition.

    ``clock`` is that of the harness, ``waits`` are calls of known length.
    """

    clock: Clock
    other: Clock
    kernels: Sequence[Kernel]
    waits: Sequence[Kernel]
    repetitions: int = 3
    budget_s: float = 1.0


def default_plan(device: str) -> Plan:
    """Return the plan that ``esbench accuracy`` measures, with the first clock of the device."""
    return Plan(clocks(device)[0], TorchClock(), kernels(device), waits(device))


def measure(plan: Plan, environment: Environment, progress: Show) -> Study:
    """Measure the kernels and waits of a plan."""
    start, start_s = datetime.now(UTC), time.monotonic()
    rng = random.Random(0)  # noqa: S311  # an order, not a secret
    steps = [
        (question, kernel, repetition)
        for repetition in range(plan.repetitions)
        for question in (AGREEMENT, TWINS)
        for kernel in plan.kernels
    ]
    steps += [(LENGTH, wait, 0) for wait in plan.waits]
    results: list[Reading | Missing] = []
    for index, (question, kernel, repetition) in enumerate(steps):
        progress(index, len(steps), f"{question}: {kernel.name}")
        results += _measure_kernel(plan, question, kernel, repetition, rng)
    return Study(
        schema=FILES.schema,
        study_id=new_run_id("accuracy", start),
        started=start.isoformat(timespec="seconds"),
        wall_s=time.monotonic() - start_s,
        environment=environment,
        readings=tuple(result for result in results if isinstance(result, Reading)),
        missing=tuple(result for result in results if isinstance(result, Missing)),
    )


def _measure_kernel(
    plan: Plan, question: str, kernel: Kernel, repetition: int, rng: random.Random
) -> Iterator[Reading | Missing]:
    """Measure a kernel by all arms of a question in the same rounds."""
    clocks_of = {AGREEMENT: (plan.clock, plan.other), TWINS: (plan.clock, plan.clock), LENGTH: (plan.clock,)}
    calls = [TimedCall(clock.prepare(kernel.call, 1), clock, plan.budget_s) for clock in clocks_of[question]]
    for call in calls:
        call.warm_up()
    interleave(calls, rng)
    # The second arm of LENGTH is the known length, which is not measured.
    for arm, call in zip(QUESTIONS[question].arms, calls, strict=False):
        if call.failure:
            yield Missing(question=question, arm=arm, reason=call.failure.reason, kernel=kernel.name)
            continue
        for metric, rounds in call.rounds.items():
            yield Reading(
                question=question,
                kernel=kernel.name,
                arm=arm,
                metric=metric,
                repetition=repetition,
                samples=tuple(rounds),
                expected_ns=kernel.expected_ns,
            )
