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
"""Populations of at least this many members are tried at multiples of it only."""
RESOLUTION = 0.01
"""The search ends when the two bounds differ by at most this share."""

Fits = Callable[[int], bool]
"""Returns whether a population of some members fits into memory."""


class Capacity(NamedTuple):
    """The result of a search.

    Attributes:
        members: the largest population that fitted, or 0.
        too_many: the smallest population that did not fit.
        stop: ``resolution`` if the search ended because the two are close enough, otherwise ``budget``.
    """

    members: int
    too_many: int
    stop: str


def find_largest(fits: Fits, too_many: int, budget_s: float, seconds: Callable[[], float]) -> Capacity:
    """Search for the largest population that fits by bisection on a logarithmic scale.

    Args:
        fits: returns whether a population fits.
        too_many: a population that does not fit.
        budget_s: the seconds after which no attempt is begun.
        seconds: returns the time in seconds.
    """
    start_s, members = seconds(), 0
    while (middle := _next_population(members, too_many)) is not None:
        if seconds() - start_s >= budget_s:
            return Capacity(members, too_many, "budget")
        if fits(middle):
            members = middle
        else:
            too_many = middle
    return Capacity(members, too_many, "resolution")


def fit_test(entry: Entry, case: Case, phase: Phase, device: str, seed: int) -> Fits:
    """Return a function that sets a variant up with some members, calls it once in a phase and frees it.

    The function returns whether memory sufficed, and raises any other error of the variant.
    """

    def call_once(members: int) -> None:
        workload = build(entry.scheme, msgspec.structs.replace(case, members=members), device, seed)
        workload.enter(phase)
        workload.phases[phase]()
        if device == "cuda":
            torch.cuda.synchronize()

    def fits(members: int) -> bool:
        try:
            call_once(members)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return False
            raise
        finally:
            free_memory()
        return True

    return fits


def _next_population(members: int, too_many: int) -> int | None:
    """Return a population between the two bounds, about sqrt(members * too_many); None if they are close.

    Populations of BLOCK members or more are rounded down to a multiple of it, but stay above ``members``.
    """
    if too_many <= members * (1 + RESOLUTION):
        return None
    middle = math.isqrt(max(members, 1) * too_many)
    if middle >= BLOCK:
        middle -= middle % BLOCK
    if middle <= members:
        middle = members + (1 if members < BLOCK else BLOCK)
    return middle if middle < too_many else None
