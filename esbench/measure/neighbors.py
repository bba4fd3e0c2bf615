"""Variants that slow others down: base is timed again after each variant is set up and after each phase.

A variant that leaves a hook, a thread or full memory behind slows all variants that are measured with it, and
a ratio within rounds does not show that. Other programs slow base down as well, so it counts only if every
visit is slower than before by more than :data:`SLOWER`, and after three pauses still is. Threads that keep
running slow down few of base's visits, so the CPU time that they use is read. The supervisor then tries the
variant once more in a new process. If another variant slows base down there, the times of this
machine vary: from then on the run only notes a slower base.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from esbench.errors import UserError
from esbench.measure.timers import Call, Clock, quiet

SLOWER = 1.5
"""On two busy cores, the times of a convolution were found to vary by up to 1.45x for several seconds."""
VISITS = 6
VISIT_S, LONGEST_S = 0.001, 0.008
"""The duration of a visit. Base is not timed again if a single call takes longer than the second."""
MAX_CALLS = 16
PAUSES_S = (0.3, 1.0, 2.0)
THREAD_PAUSES_S = (0.005, 0.05, 0.3, 0.1)
"""Pauses in which CPU time is read. Threads of OpenMP wait actively for the next call: GNU's for some
milliseconds, Intel's for 0.2 s."""
THREAD_SHARE = 0.1
"""The least share of a pause that running threads use; other programs may leave them little of a CPU."""

BaseTimes = Mapping[str, Sequence[float]]
"""Metric -> the mean of each visit in nanoseconds: a thread may slow down few of the calls by much."""


class SlowedDownError(UserError):
    """A variant slows the others down: the process ends, and a new one goes on."""


def time_base(call: Call, clock: Clock, *, after_pause: bool = False) -> BaseTimes:
    """Return the mean times of short visits to a call of base; of one call if it exceeds LONGEST_S.

    After a pause the clock rates of a GPU may be those of an idle one: base is called until they settle.
    """
    with quiet():
        settled_s = clock.seconds() + clock.warm_up_s[0] * after_pause
        while clock.seconds() < settled_s:
            clock.visit(call, 1)
        start_s = clock.seconds()
        visits = [clock.visit(call, 1).samples]
        visit_s = clock.seconds() - start_s
        if visit_s <= LONGEST_S:
            calls = max(1, min(MAX_CALLS, math.ceil(VISIT_S / max(visit_s, 1e-9))))
            visits = [clock.visit(call, calls).samples for _ in range(VISITS)]
    return {metric: [fmean(samples[metric]) for samples in visits] for metric in visits[0]}


def slowdown(before: BaseTimes, after: BaseTimes) -> float:
    """Return the largest ratio of the medians of a metric, after / before, or 1 if no metric is slower.

    A metric is slower if each of its times is longer than all before by more than a factor of SLOWER.
    """
    ratios = (
        median(after[metric]) / median(times)
        for metric, times in before.items()
        if metric in after and min(after[metric]) > SLOWER * max(times)
    )
    return max(ratios, default=1.0)


def lasting_slowdown(
    before: BaseTimes, measure: Callable[[], BaseTimes], measure_after_pause: Callable[[], BaseTimes]
) -> float:
    """Return the smallest slowdown now and after each pause, or 1 as soon as base is not slower."""
    ratio = slowdown(before, measure())
    for pause_s in PAUSES_S:
        if ratio > 1:
            time.sleep(pause_s)
            ratio = min(ratio, slowdown(before, measure_after_pause()))
    return ratio


def has_running_threads() -> bool:
    """Return whether other threads of this process use the CPU while this one sleeps, in every pause."""
    for pause_s in THREAD_PAUSES_S:
        start_s, used_s = time.monotonic(), time.process_time() - time.thread_time()
        time.sleep(pause_s)
        used_s = time.process_time() - time.thread_time() - used_s
        if used_s <= THREAD_SHARE * (time.monotonic() - start_s):
            return False
    return True
