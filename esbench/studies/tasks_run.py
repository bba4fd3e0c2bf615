"""Run the study of tasks: time the steps of all variants in turn, then train each until the goal."""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import torch

from esbench.errors import UserError
from esbench.measure.interleave import LATENCY, TimedCall, interleave
from esbench.measure.timers import clocks
from esbench.progress import Show
from esbench.registry import REGISTRY, Entry, load, load_installed
from esbench.schema import Environment, Task, Variant
from esbench.store import new_run_id
from esbench.studies.digits import Untrained
from esbench.studies.digits_run import code_of, trainer_of, why_untrained
from esbench.studies.tasks import FILES, IN_A_ROW, Learning, StepTime, Study

BUDGET_S = 4.0
"""The steps of a variant on a task are timed for about this long, in at least six rounds."""


@dataclass(frozen=True)
class Plan:
    """What a process needs to know.

    Attributes:
        device: ``cpu`` or ``cuda``.
        plugins: packages and files of variants to load.
        processes: training runs at the same time, each in a process with one thread.
    """

    device: str
    plugins: Sequence[str] = ()
    processes: int = 1


def begin(
    entries: Sequence[Entry], tasks: Sequence[Task], seeds: Sequence[int], environment: Environment
) -> Study:
    """Return a study without training runs."""
    start = datetime.now(UTC)
    return Study(
        schema=FILES.schema,
        study_id=new_run_id("tasks", start),
        started=start.isoformat(timespec="seconds"),
        tasks=tuple(tasks),
        seeds=tuple(seeds),
        variants=tuple(entry.variant for entry in entries),
        environment=environment,
        code=code_of(entries),
    )


def conduct(study: Study, plan: Plan, progress: Show, results: Path) -> Study:
    """Time the steps of a study, then run its remaining training runs; its file is written after each.

    A variant that cannot be trained is recorded with its reason.

    Raises:
        UserError: an environment failed or gave a reward that is not finite, or a package is missing.
    """

    def keep(**fields: object) -> None:
        nonlocal study
        study = msgspec.structs.replace(study, **fields)
        FILES.write(study, results)

    with one_thread():
        for task in study.untimed():
            progress(0, 1, f"timing the steps of {task.name}")
            times, untrained = time_steps(task, study.trainable(task), plan.device)
            others = tuple(step_time for step_time in study.times if step_time.task != task.name)
            keep(times=(*others, *times), untrained=(*study.untrained, *untrained))
        total = len(study.learnings) + len(study.remaining_runs())
        for result in _trained(study, plan):
            if isinstance(result, Learning):
                keep(learnings=(*study.learnings, result))
            elif (result.network, result.variant) not in {(u.network, u.variant) for u in study.untrained}:
                keep(untrained=(*study.untrained, result))
            left = len(study.remaining_runs())
            progress(total - left, total, f"{result.variant.name} on {_name(result)}")
    return study


def _name(result: Learning | Untrained) -> str:
    return result.task if isinstance(result, Learning) else result.network


def _trained(study: Study, plan: Plan) -> Iterator[Learning | Untrained]:
    """Yield the results of the remaining training runs of a study, as they finish."""
    failed: set[tuple[str, Variant]] = set()
    runs = study.remaining_runs()
    if plan.processes == 1:
        for seed, task, variant in runs:
            if (task.name, variant) not in failed:
                result = train(variant, task, seed, plan.device)
                if isinstance(result, Untrained):
                    failed.add((task.name, variant))
                yield result
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(plan.processes, context, initializer=_start, initargs=(plan.plugins,)) as pool:
        waiting: list[Future[Learning | Untrained]] = [
            pool.submit(train, variant, task, seed, plan.device) for seed, task, variant in runs
        ]
        try:
            for future in as_completed(waiting):
                yield future.result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def _start(plugins: Sequence[str]) -> None:
    """Prepare a process for training: it ends with its parent, which handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    load_installed()
    for name in plugins:
        load(name)


def _end_with(parent: BaseProcess) -> None:
    """End this process after its parent: it would wait for more training runs."""
    parent.join()
    os._exit(1)


def train(variant: Variant, task: Task, seed: int, device: str) -> Learning | Untrained:
    """Train a registered variant until the goal or the last step, and return the scores, or why it failed.

    Raises:
        UserError: what affects every variant: a package is missing, or an environment failed.
    """
    start_s = time.monotonic()
    scores: list[float] = []
    try:
        entry = REGISTRY.entries[variant.name]
        training = trainer_of(entry.scheme).begin(entry.scheme, task, seed, device)
        for number in range(task.steps + 1):
            if number % task.every == 0:
                scores.append(training.score())
                if len(scores) >= IN_A_ROW and all(map(task.reached, scores[-IN_A_ROW:])):
                    break
            if number < task.steps:
                training.step(number)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  any error of a variant is its reason
        return why_untrained(variant, task.name, error)
    wall_s = time.monotonic() - start_s
    return Learning(variant=variant, task=task.name, seed=seed, scores=tuple(scores), wall_s=wall_s)


def time_steps(
    task: Task, variants: Sequence[Variant], device: str
) -> tuple[list[StepTime], list[Untrained]]:
    """Time the steps of all variants on a task in the same rounds, from the initial weights of seed 0.

    Returns:
        The times, and the variants that cannot be trained.

    Raises:
        UserError: as for :func:`train`.
    """
    (clock, *_) = clocks(device, ("eager",) if device == "cuda" else ())
    calls, sizes, untrained = {}, {}, []
    for variant in variants:
        scheme = REGISTRY.entries[variant.name].scheme
        try:
            sizes[variant] = trainer_of(scheme).effective_members(scheme, task, device)
            step = trainer_of(scheme).begin(scheme, task, 0, device).step
            step(0)  # records the operations of a policy, which takes longer
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001  any error of a variant is its reason
            untrained.append(why_untrained(variant, task.name, error))
        else:
            calls[variant] = TimedCall(partial(_next, step, count(1)), clock, BUDGET_S, is_reference=True)
    for call in calls.values():
        call.warm_up()
    interleave(list(calls.values()), random.Random(0))  # noqa: S311  an order, not a secret
    times = []
    for variant, call in calls.items():
        if call.failure:
            reason = call.failure.reason
            untrained.append(Untrained(variant=variant, network=task.name, reason=reason, failed=True))
        else:
            rounds = tuple(call.rounds[LATENCY])
            size = sizes[variant]
            times.append(StepTime(variant=variant, task=task.name, rounds=rounds, effective_members=size))
    return times, untrained


def _next(step: Callable[[int], None], numbers: Iterator[int]) -> None:
    """Do the next step."""
    step(next(numbers))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread while the context lasts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
