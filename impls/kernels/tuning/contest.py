"""The tiles of a kernel against each other: those that compute what the default computes, on the clock."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from impls.kernels.rows import Tiling
from impls.kernels.tuned import Configuration, bucket, type_name
from impls.kernels.tuning.choice import fastest, interleaved, survivors
from impls.kernels.tuning.tunable import Launch, Task, Tunable

Timer = Callable[[Tiling], float]
"""Nanoseconds of one launch with these tiles."""

SCREENED, FINAL = 3, 15
"""Rounds in which all are timed, and in which the fastest are timed again."""
FINALISTS = 8


class Contest(NamedTuple):
    """What came out for one task.

    Attributes:
        configuration: the tiles that were chosen.
        left_out: tiles that took no part, and why.
        wrong: tiles that computed something else, and by how much.

    """

    configuration: Configuration
    left_out: dict[Tiling, str]
    wrong: dict[Tiling, str]


def contest(tunable: Tunable, task: Task, device: torch.device, timer: Callable[[Launch], Timer]) -> Contest:
    """Time the candidates that are right, and choose.

    Args:
        tunable: the kernel.
        task: type and sizes.
        device: where.
        timer: makes a clock for launches.

    """
    launch, default = tunable.set_up(task, device), tunable.default(task.sizes)
    expected = launch(default).clone()
    right: list[Tiling] = [default]
    left_out, wrong = {}, {}
    for tiling in dict.fromkeys(tunable.candidates):
        if tiling == default:
            continue
        try:
            error = distance(launch(tiling), expected)
        except Exception as reason:  # noqa: BLE001  whatever the compiler or the driver raises is the reason
            left_out[tiling] = f"{type(reason).__name__}: {reason}".splitlines()[0]
            continue
        if error <= tolerance(task.dtype):
            right.append(tiling)
        else:
            wrong[tiling] = f"is off by {error:.2g} of the default's norm"
    clock = timer(launch)
    screened = interleaved(right, clock, SCREENED)
    times = interleaved(survivors(screened, default, FINALISTS), clock, FINAL)
    best = fastest(times, default)
    configuration = Configuration(
        kernel=tunable.kernel,
        dtype=type_name(task.dtype),
        sizes=bucket(task.sizes),
        time_ns=median(times[best]),
        default_ns=median(times[default]),
        **best._asdict(),
    )
    return Contest(configuration, left_out, wrong)


def distance(result: Tensor, expected: Tensor) -> float:
    """Return how far a result is off, as a share of what is expected; infinite where it is no number."""
    off = float((result.double() - expected.double()).norm() / expected.double().norm())
    return off if off == off else float("inf")  # noqa: PLR0124  NaN alone is not itself


def tolerance(dtype: torch.dtype) -> float:
    """Return by how much sums in another order may differ, rounded to this type."""
    wide = torch.promote_types(dtype, torch.float32)
    return 2 * torch.finfo(dtype).eps + 32 * torch.finfo(wide).eps


def tasks(tunables: Sequence[Tunable]) -> Iterator[tuple[Tunable, Task]]:
    """Yield each kernel with each of its tasks."""
    for tunable in tunables:
        for task in tunable.tasks:
            yield tunable, task
