"""Warming a call up: until it takes as long as it will, and how many calls then fill a visit."""

import math
from dataclasses import dataclass
from statistics import linear_regression, median

from esbench.measure.timers import Call, Clock

VISIT_NS = 2e6
"""A visit lasts at least this long, so that switching between variants does not fill it."""
MOST_CALLS = 64
"""A visit has at most so many calls: every sample is stored."""
FLAT = 0.002
"""Warm is when block medians change by less than this share from one block to the next."""
BLOCKS = 5
"""Over so many blocks the slope is taken."""


@dataclass(frozen=True)
class Warm:
    """A call that has been warmed up: nanoseconds it took at the end, and how it got there.

    ``calls`` is how many a visit holds. ``slow`` says that one call alone took longer than the
    budget; it has been called once and is not called again. ``state`` says in words how it ended.
    """

    call_ns: float
    calls: int
    slow: bool = False
    state: str = ""


def warm_up(call: Call, clock: Clock, budget_s: float) -> Warm:
    """Call until block medians are flat, within the clock's bounds and the budget in seconds."""
    least_s, most_s = clock.warm_up_s
    most_s = min(most_s, max(least_s, budget_s))
    start_s = clock.seconds()
    first_ns = median(clock.visit(call, 1).samples["latency_ns"])
    if first_ns > budget_s * 1e9:
        return Warm(first_ns, calls=1, slow=True, state="one call, longer than the budget")
    blocks, costs_ns, calls = [first_ns], [], 1
    while (spent_s := clock.seconds() - start_s) < most_s and not (spent_s >= least_s and _flat(blocks)):
        before_s = clock.seconds()
        blocks.append(median(clock.visit(call, calls).samples["latency_ns"]))
        costs_ns.append((clock.seconds() - before_s) * 1e9 / calls)
        calls = calls_per_visit(median(costs_ns[-BLOCKS:]))
    ended = f"flat after {len(blocks)} blocks," if _flat(blocks) else "not flat after"
    return Warm(blocks[-1], calls, state=f"{ended} {spent_s:.2f} s")


def calls_per_visit(call_ns: float) -> int:
    """Return how many calls of so many nanoseconds, with all that is done around them, fill a visit."""
    return max(1, min(MOST_CALLS, math.ceil(VISIT_NS / max(call_ns, 1.0))))


def _flat(blocks: list[float]) -> bool:
    recent = blocks[-BLOCKS:]
    if len(recent) < BLOCKS:
        return False
    slope = linear_regression(range(BLOCKS), recent).slope
    return abs(slope) <= FLAT * median(recent)
