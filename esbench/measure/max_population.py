"""The largest population that fits into memory, found by bisection."""

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from esbench.measure.case_runner import free_memory
from esbench.measure.memory import is_out_of_memory
from esbench.registry import Entry
from esbench.schema import Case, Phase
from esbench.workload import build

METHOD = "bisection"

BLOCK = 256
"""Larger populations are tried at multiples of this number only."""
RESOLUTION = 0.01
"""The search ends when the two bounds differ by at most this share."""

Fits = Callable[[int], bool]


class Capacity(NamedTuple):
    """The largest population that fitted, or 0, and the smallest that did not.

    ``stop`` is why the search ended: ``resolution`` if the two are close enough, otherwise ``budget``.
    """

    members: int
    too_many: int
    stop: str


def find_largest(fits: Fits, too_many: int, budget_s: float, seconds: Callable[[], float]) -> Capacity:
    """Search for the largest population that fits by bisection on a logarithmic scale.

    Args:
        fits: returns whether a population fits.
        too_many: a population that does not fit.
        budget_s: seconds after which no attempt is begun.
        seconds: the clock.

    """
    start_s, members = seconds(), 0
    while (middle := _between(members, too_many)) is not None:
        if seconds() - start_s >= budget_s:
            return Capacity(members, too_many, "budget")
        if fits(middle):
            members = middle
        else:
            too_many = middle
    return Capacity(members, too_many, "resolution")


def fit_test(entry: Entry, case: Case, phase: Phase, device: str, seed: int) -> Fits:
    """Return a function that sets a variant up with some members, calls it once in a phase and frees it.

    The function returns whether memory sufficed; any other error passes through.
    """

    def attempt(members: int) -> None:
        workload = build(entry.scheme, msgspec.structs.replace(case, members=members), device, seed)
        workload.enter(phase)
        workload.phases[phase]()
        if device == "cuda":
            torch.cuda.synchronize()

    def fits(members: int) -> bool:
        try:
            attempt(members)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return False
            raise
        finally:
            free_memory()
        return True

    return fits


def _between(members: int, too_many: int) -> int | None:
    """Return the next population to try, or None if the bounds are close enough."""
    if too_many <= members * (1 + RESOLUTION):
        return None
    middle = math.isqrt(max(members, 1) * too_many)
    if middle >= BLOCK:
        middle -= middle % BLOCK
    if middle <= members:
        middle = members + (1 if members < BLOCK else BLOCK)
    return middle if middle < too_many else None
