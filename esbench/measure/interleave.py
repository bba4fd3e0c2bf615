"""Interleaved rounds: all calls are timed in turn, forwards and backwards (ABBA).

If variants are timed one after another, the drift of the machine makes equal variants differ. A round visits
every call twice: in a shuffled order, then in the reverse order. A linear drift within the round then adds
the same time to all calls and cancels in their ratios.
"""

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median

from esbench.measure.failure import Failure, classify
from esbench.measure.timers import Call, Clock, keep_inputs, quiet
from esbench.schema import Conditions
from esbench.stats import interval

MAX_ROUNDS = 20
MIN_ROUNDS = 3
"""A call gets this many rounds even beyond its budget, unless they take more than OVERDRAFT budgets."""
OVERDRAFT = 4.0
"""The largest time of the first MIN_ROUNDS rounds in multiples of the budget."""
REFERENCE_ROUNDS, REFERENCE_CALL_S = 6, 2.0
"""A reference gets this many rounds, enough for an interval, unless one call takes more seconds than this."""
NARROW = 0.01
"""Sampling of a call ends when the interval of its median is narrower than this share of the median."""

VISIT_NS = 2e6
"""A visit lasts at least this long, so that switching between variants does not dominate it."""
UNTIMED_NS = 2e7
"""If a call is shorter than this, a visit begins with one that is not timed: caches hold the data of the
variant before, whose threads may still be waiting for more work."""
MAX_CALLS = 64
"""The most calls of a visit: every sample is stored."""
FLAT = 0.002
"""A call is warm when the slope of its block medians is less than this share of their median per block."""
BLOCKS = 5
"""The number of last blocks from which the slope is computed."""

LATENCY = "latency_ns"

ReadConditions = Callable[[], Conditions | None]


def no_conditions() -> None:
    """Return None, for a device that reports neither clock, temperature nor power."""


@dataclass(frozen=True)
class WarmUp:
    """The result of a warm-up.

    Attributes:
        call_ns: the latency at the end of the warm-up.
        calls: the number of calls in a visit.
        slow: whether the first call took longer than the budget, so that it stays the only one.
        state: how the warm-up ended, as stored with the samples.
    """

    call_ns: float
    calls: int
    slow: bool = False
    state: str = ""


class TimedCall:
    """A call with its samples, and the reason why sampling ended.

    Attributes:
        rounds: metric -> for each round, the nanoseconds of the calls of both visits.
        positions: for each round, the index of this call in its first half.
        conditions: for each round, the device's readings after each visit.
        stop: the reason why sampling ended; empty while it continues.
        failure: the failure of the call, if any.
        is_baseline: whether the call is sampled until all other calls have ended.
        is_reference: whether ratios are relative to it, so that it gets at least REFERENCE_ROUNDS rounds.
        spent_s: the seconds spent in visits.
        warmed: the result of the warm-up.
    """

    def __init__(  # noqa: PLR0913  # a call, its clock, its budget and its role in the rounds
        self,
        call: Call,
        clock: Clock,
        budget_s: float,
        *,
        is_baseline: bool = False,
        is_reference: bool = False,
        renew: Call = keep_inputs,
        conditions: ReadConditions = no_conditions,
        before: Callable[[], object] = lambda: None,
        failed: Callable[[Failure], object] = lambda _: None,
    ) -> None:
        """Prepare a call that is sampled for about ``budget_s`` seconds.

        ``renew`` is called before each timed call, ``before`` before each visit and ``conditions`` after it.
        An exception of the call, ``renew`` or ``conditions`` is stored as the failure of this call, and
        ``failed`` is called with it. An exception of ``failed`` is raised.
        """
        self.rounds: dict[str, list[tuple[float, ...]]] = {}
        self.positions: list[int] = []
        self.conditions: list[tuple[Conditions, ...]] = []
        self.stop = ""
        self.failure: Failure | None = None
        self.is_baseline = is_baseline
        self.is_reference = is_reference
        self.spent_s = 0.0
        self._call = call
        self._clock = clock
        self._budget_s = budget_s
        self._renew, self._read_conditions = renew, conditions
        self._before = before
        self._failed = failed
        self.warmed = WarmUp(0.0, calls=1)
        self._round: dict[str, tuple[float, ...]] = {}
        self._round_conditions: tuple[Conditions, ...] = ()
        self._dispatch_bound = self._samples = self._grown = 0

    def warm_up(self) -> None:
        """Warm the call up; a call that takes longer than its budget ends with that one sample."""
        try:
            with quiet():
                longest_s = max(self._budget_s, REFERENCE_CALL_S) if self.is_reference else self._budget_s
                self.warmed = warm_up(self._call, self._clock, self._budget_s, longest_s)
            self._read_conditions()
        except BaseException as error:  # noqa: BLE001  # any error of a variant is stored as its reason
            self._fail(error)
        if self.warmed.slow:
            self.rounds = {LATENCY: [(self.warmed.call_ns,)]}
            self.stop = f"one sample: a call takes longer than the budget of {self._budget_s:g} s"

    def visit(self) -> None:
        """Take the samples of one visit; before short calls, one is not timed."""
        if self.stop:
            return
        self._before()
        start_s = self._clock.seconds()
        try:
            with quiet():
                if self.warmed.call_ns < UNTIMED_NS:
                    self._renew()
                    self._call()
                visit = self._clock.visit(self._call, self.warmed.calls, self._renew)
            conditions = self._read_conditions()
        except BaseException as error:  # noqa: BLE001  # any error of a variant is stored as its reason
            self._fail(error)
        else:
            for metric, samples in visit.samples.items():
                self._round[metric] = self._round.get(metric, ()) + samples
            self._samples += len(visit.samples[LATENCY])
            self._dispatch_bound += visit.dispatch_bound
            self._grown += visit.grown
            self._round_conditions += (conditions,) if conditions else ()
        self.spent_s += self._clock.seconds() - start_s

    def end_round(self, position: int, *, may_stop: bool) -> None:
        """Store a round; end sampling at a bound, or if it ``may_stop`` and the interval is narrow."""
        if self.stop:
            return
        for metric, samples in self._round.items():
            self.rounds.setdefault(metric, []).append(samples)
        self.positions.append(position)
        if self._round_conditions:
            self.conditions.append(self._round_conditions)
        self._round, self._round_conditions = {}, ()
        self.stop = self._stop_reason(may_stop=may_stop)

    def _stop_reason(self, *, may_stop: bool) -> str:
        """Return why sampling ends after the last round, or an empty string if it continues."""
        rounds = self.rounds[LATENCY]
        count = len(rounds)
        if count == MAX_ROUNDS:
            return f"{MAX_ROUNDS} rounds"
        if self.is_reference and count < REFERENCE_ROUNDS:
            return ""
        # One or two rounds do not show how much rounds vary, so the first MIN_ROUNDS may exceed the budget.
        max_s = self._budget_s * (OVERDRAFT if count < MIN_ROUNDS else 1.0)
        next_count = max(count + 1, MIN_ROUNDS)
        if self.spent_s / count * next_count > max_s:
            return f"budget of {self._budget_s:g} s"
        latency = interval([median(samples) for samples in rounds])
        if may_stop and latency and latency.high - latency.low < NARROW * latency.median:
            return f"interval of the median within {NARROW:.0%}"
        return ""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels to be stored with the samples."""
        labels = []
        if self._dispatch_bound:
            labels.append(
                f"dispatch-bound: in {self._dispatch_bound} of {self._samples} samples the device waited"
            )
        if self._grown:
            labels.append(f"allocated device memory while timed, in {self._grown} visits")
        return tuple(labels)

    def _fail(self, error: BaseException) -> None:
        """Store the failure and report it."""
        self.failure = classify(error)
        self.stop = self.failure.reason
        with contextlib.suppress(Exception):
            self._read_conditions()  # also restores torch settings that the call changed before it raised
        self._failed(self.failure)


def interleave(calls: Sequence[TimedCall], rng: random.Random) -> None:
    """Run rounds over warmed-up calls until the sampling of each has ended.

    Baselines are sampled until all other calls have ended, or their budget is spent.
    """
    while active := [call for call in calls if not call.stop]:
        rng.shuffle(active)
        for call in (*active, *reversed(active)):
            call.visit()
        variants = [call for call in active if not call.is_baseline]
        # Baselines come last: whether they may stop depends on whether all others have.
        for call in sorted(active, key=lambda call: call.is_baseline):
            is_needed = call.is_baseline and any(not variant.stop for variant in variants)
            call.end_round(active.index(call), may_stop=not is_needed)


def warm_up(call: Call, clock: Clock, budget_s: float, longest_s: float | None = None) -> WarmUp:
    """Call in blocks until their median latencies are flat, within the clock's bounds and the budget.

    A call that takes more than ``longest_s`` seconds, by default the budget, is called only once.
    """
    min_s, max_s = clock.warm_up_s
    max_s = min(max_s, max(min_s, budget_s))
    start_s = clock.seconds()
    first_ns = median(clock.visit(call, 1).samples[LATENCY])
    if first_ns > (longest_s or budget_s) * 1e9:
        return WarmUp(first_ns, calls=1, slow=True, state="one call, longer than the budget")
    medians_ns, calls = [first_ns], 1
    costs_ns: list[float] = []  # of a call with all that a visit does around it, by block
    while (spent_s := clock.seconds() - start_s) < max_s and not (spent_s >= min_s and _is_flat(medians_ns)):
        before_s = clock.seconds()
        medians_ns.append(median(clock.visit(call, calls).samples[LATENCY]))
        costs_ns.append((clock.seconds() - before_s) * 1e9 / calls)
        calls = max(1, min(MAX_CALLS, math.ceil(VISIT_NS / max(median(costs_ns[-BLOCKS:]), 1.0))))
    state = f"flat after {len(medians_ns)} blocks," if _is_flat(medians_ns) else "not flat after"
    return WarmUp(medians_ns[-1], calls, state=f"{state} {spent_s:.2f} s")


def _is_flat(medians_ns: list[float]) -> bool:
    """Return whether the median latencies of the last BLOCKS blocks neither rise nor fall."""
    recent = medians_ns[-BLOCKS:]
    if len(recent) < BLOCKS:
        return False
    slope = linear_regression(range(BLOCKS), recent).slope
    return abs(slope) <= FLAT * median(recent)
