"""The study: one step after another, each a few seconds long, every sample kept."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import msgspec
import psutil
import torch

from esbench.measure.accuracy import replicate
from esbench.measure.accuracy.kernels import Kernel, kernels, scheme, waits
from esbench.measure.accuracy.sampling import sampled
from esbench.measure.accuracy.timers import Timer, timers
from esbench.measure.interleave import TimedCall, interleave
from esbench.measure.timers import Clock, clocks
from esbench.progress import Show
from esbench.schema import Environment
from esbench.store import new_run_id
from esbench.studies.timer_accuracy import SCHEMA, Missing, Question, Reading, Study

OURS = "esbench"
FIRST, SECOND = "first name", "second name"
TWINS = (FIRST, SECOND)
WITH, WITHOUT = "sampled", "not sampled"
REPLICATE_S = 120.0
"""A process that takes longer is given up."""

Found = Iterator[Reading | Missing]


@dataclass(frozen=True)
class Pace:
    """How long it takes: seconds of one arm in one sitting, rounds of an agreement, fresh processes."""

    sittings: int = 3
    rounds: int = 20
    agreement_s: float = 3.0
    twins_s: float = 1.0
    length_s: float = 1.0
    sampler_s: float = 2.0
    processes: int = 10


@dataclass(frozen=True)
class Plan:
    """What a study times, and with what. ``sampled`` is the clock with the sampling thread beside it.

    ``reasons`` say of the timers that are not there why, ``unsampled`` why there is no ``sampled``.
    """

    clock: Clock
    kernels: Sequence[Kernel]
    waits: Sequence[Kernel]
    timers: Sequence[Timer]
    reasons: Mapping[str, str] = field(default_factory=dict)
    sampled: Clock | None = None
    unsampled: str = ""
    pace: Pace = Pace()
    seed: int = 0


def plan_for(device: str, seed: int) -> Plan:
    """Return the whole study of a device."""
    clock = clocks(device)[0]
    others, reasons = timers(device)
    beside, unsampled = sampled(clock, device)
    return Plan(
        clock=clock,
        kernels=[*kernels(device, seed), *scheme(device, seed)],
        waits=waits(device),
        timers=others,
        reasons=reasons,
        sampled=beside,
        unsampled=unsampled,
        seed=seed,
    )


def study(plan: Plan, environment: Environment, progress: Show) -> Study:
    """Take all readings of a plan, one step after another."""
    now, start_s = datetime.now(UTC), time.monotonic()
    rng = random.Random(plan.seed)  # noqa: S311  # an order, not a secret
    steps = [
        *(
            (f"{take.__name__}: {kernel.name}", partial(take, plan, kernel, rng, sitting))
            for sitting in range(plan.pace.sittings)
            for take in (agreement, twins)
            for kernel in plan.kernels
        ),
        ("known lengths", partial(lengths, plan, rng)),
        *(
            (f"fresh process {number}", partial(fresh, plan, environment.device, number))
            for number in range(1, plan.pace.processes + 1)
        ),
        ("sampler", partial(sampler, plan, rng)),
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
    """This harness and other timers take turns on a kernel, for the same number of rounds."""
    clocks: list[tuple[str, Clock]] = [(OURS, plan.clock), *((timer.method, timer) for timer in plan.timers)]
    tracks = {arm: _track(kernel, clock, plan.pace.agreement_s) for arm, clock in clocks}
    for _ in range(plan.pace.rounds):
        active = [track for track in tracks.values() if not track.stop]
        rng.shuffle(active)
        for track in (*active, *reversed(active)):
            track.visit()
        for place, track in enumerate(active):
            track.close_round(place, may_leave=False)
    yield from _readings("agreement", kernel, tracks, sitting)


def twins(plan: Plan, kernel: Kernel, rng: random.Random, sitting: int) -> Found:
    """One call under two names: in the harness's own rounds, and then one name after the other."""
    budget_s = plan.pace.twins_s
    together = {arm: _track(kernel, plan.clock, budget_s) for arm in TWINS}
    interleave(list(together.values()), rng)
    yield from _readings("twins", kernel, together, sitting)
    apart = {}
    for arm in TWINS:
        apart[arm] = _track(kernel, plan.clock, budget_s)
        interleave([apart[arm]], rng)
    yield from _readings("sequence", kernel, apart, sitting)


def lengths(plan: Plan, rng: random.Random) -> Found:
    """Waits of known length, all in the same rounds."""
    tracks = [(kernel, _track(kernel, plan.clock, plan.pace.length_s)) for kernel in plan.waits]
    interleave([track for _, track in tracks], rng)
    for kernel, track in tracks:
        yield from _readings("length", kernel, {OURS: track})


def fresh(plan: Plan, device: str, number: int) -> Found:
    """Some kernels timed in a process that nothing ran in before."""
    arm = f"process {number}"
    command = [sys.executable, "-m", replicate.__name__, device, str(plan.seed), str(torch.get_num_threads())]
    try:
        done = subprocess.run(command, capture_output=True, timeout=REPLICATE_S, check=False)  # noqa: S603  # this project's own program
    except subprocess.TimeoutExpired:
        yield Missing(question="replicates", arm=arm, reason=f"it took longer than {REPLICATE_S:g} s")
        return
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        yield Missing(question="replicates", arm=arm, reason=f"exit code {done.returncode}: {said[-1]}")
        return
    for kernel, samples in msgspec.json.decode(done.stdout, type=replicate.Found).items():
        yield Reading(question="replicates", kernel=kernel, arm=arm, samples=samples)


def sampler(plan: Plan, rng: random.Random) -> Found:
    """One kernel with and without the thread that samples the device, in the same rounds."""
    if plan.sampled is None:
        yield Missing(question="sampler", arm=WITH, reason=plan.unsampled)
        return
    kernel = plan.kernels[len(plan.kernels) // 2]
    clocks: dict[str, Clock] = {WITHOUT: plan.clock, WITH: plan.sampled}
    tracks = {arm: _track(kernel, clock, plan.pace.sampler_s) for arm, clock in clocks.items()}
    interleave(list(tracks.values()), rng)
    yield from _readings("sampler", kernel, tracks)


def _track(kernel: Kernel, clock: Clock, budget_s: float) -> TimedCall:
    """A kernel, warm."""
    track = TimedCall(clock.prepare(kernel.call, 1), clock, budget_s)
    track.warm_up()
    return track


def _readings(question: Question, kernel: Kernel, tracks: Mapping[str, TimedCall], sitting: int = 0) -> Found:
    for arm, track in tracks.items():
        if track.failure:
            yield Missing(question=question, arm=arm, reason=track.failure.reason, kernel=kernel.name)
            continue
        for metric, rounds in track.rounds.items():
            yield Reading(
                question=question,
                kernel=kernel.name,
                arm=arm,
                metric=metric,
                sitting=sitting,
                samples=tuple(rounds),
                places=tuple(track.positions),
                expected_ns=kernel.expected_ns if question == "length" else None,
            )
