"""Interleaved rounds: all calls are timed in turn, forwards and backwards (ABBA).

Timed one after another, two equal variants differ by the drift of the machine. A round visits every call in a
shuffled order and then in the reverse order, so that drift within a round affects all of them alike: a ratio
taken within a round is free of it.
"""

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median

from esbench.measure.failure import Failure, classify
from esbench.measure.timers import Call, Clock, quiet
from esbench.schema import Conditions
from esbench.stats import interval

MAX_ROUNDS = 20
MIN_ROUNDS = 3
"""A call gets this many rounds even beyond its budget, unless they take more than OVERDRAFT budgets."""
OVERDRAFT = 4.0
REFERENCE_ROUNDS, REFERENCE_CALL_S = 6, 2.0
"""A reference gets this many rounds, enough for an interval, unless one call takes more seconds than this."""
NARROW = 0.01
"""Sampling of a call ends when the interval of its median is narrower than this share of the median."""

VISIT_NS = 2e6
"""A visit lasts at least this long, so that switching between variants does not dominate it."""
MAX_CALLS = 64
"""The most calls of a visit: every sample is stored."""
FLAT = 0.002
"""A call is warm when block medians change by less than this share per block."""
BLOCKS = 5
"""The number of blocks over which the slope is taken."""

LATENCY = "latency_ns"

ReadConditions = Callable[[], Conditions | None]


def nothing_to_read() -> None:
    """Return no conditions: the device reports none."""


@dataclass(frozen=True)
class Warm:
    """The result of a warm-up.

    Attributes:
        call_ns: the latency at the end of the warm-up.
        calls: the number of calls in a visit.
        slow: whether a single call took longer than the budget; it was called once and is not called again.
        state: how the warm-up ended, as stored with the samples.

    """

    call_ns: float
    calls: int
    slow: bool = False
    state: str = ""


class TimedCall:
    """A call with its samples, and the reason why sampling ended.

    Attributes:
        rounds: metric -> a tuple of nanoseconds per round, with the samples of both visits.
        positions: for each round, the number of calls visited before this one in the first half of the round.
        conditions: for each round, the device's readings after each visit.
        stop: the reason why sampling ended; empty before.
        failure: the failure of the call, if any.
        is_baseline: whether the call stays in the rounds until all other calls have ended.
        is_reference: whether ratios are relative to it, so that it gets at least REFERENCE_ROUNDS rounds.

    """

    def __init__(  # noqa: PLR0913  # a call, how it is timed, and what it is to the others
        self,
        call: Call,
        clock: Clock,
        budget_s: float,
        *,
        is_baseline: bool = False,
        is_reference: bool = False,
        conditions: ReadConditions = nothing_to_read,
    ) -> None:
        """Prepare a call that is sampled for about ``budget_s`` seconds.

        ``conditions`` is called after each visit; an exception that it raises is the failure of this call.
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
        self._read_conditions = conditions
        self._warm = Warm(0.0, calls=1)
        self._round: dict[str, tuple[float, ...]] = {}
        self._round_conditions: tuple[Conditions, ...] = ()
        self._dispatch_bound = self._samples = self._grown = 0

    @property
    def warm_up_state(self) -> str:
        """How the warm-up ended."""
        return self._warm.state

    def warm_up(self) -> None:
        """Warm the call up; a call that takes longer than its budget ends with that one sample."""
        try:
            with quiet():
                longest_s = max(self._budget_s, REFERENCE_CALL_S) if self.is_reference else self._budget_s
                self._warm = warm_up(self._call, self._clock, self._budget_s, longest_s)
            self._read_conditions()
        except BaseException as error:  # noqa: BLE001  # any error of a variant is stored as its reason
            self._fail(error)
        if self._warm.slow:
            self.rounds = {LATENCY: [(self._warm.call_ns,)]}
            self.stop = f"one sample: a call takes longer than the budget of {self._budget_s:g} s"

    def visit(self) -> None:
        """Take the samples of one visit, for a short call after one more call that refills the caches."""
        if self.stop:
            return
        start_s = self._clock.seconds()
        try:
            with quiet():
                if self._warm.calls > 1:
                    self._call()
                visit = self._clock.visit(self._call, self._warm.calls)
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

    def close_round(self, position: int, *, may_leave: bool) -> None:
        """Store the round, and end sampling if the interval is narrow or a bound is reached."""
        if self.stop:
            return
        for metric, samples in self._round.items():
            self.rounds.setdefault(metric, []).append(samples)
        self.positions.append(position)
        if self._round_conditions:
            self.conditions.append(self._round_conditions)
        self._round, self._round_conditions = {}, ()
        done = self.rounds[LATENCY]
        latency = interval([median(samples) for samples in done])
        width = (latency.high - latency.low) / latency.median if latency and latency.median > 0 else 1.0
        # The variation of one or two rounds is unknown, so these may exceed the budget.
        most = OVERDRAFT if len(done) < MIN_ROUNDS else 1.0
        is_needed = self.is_reference and len(done) < REFERENCE_ROUNDS
        if len(done) == MAX_ROUNDS:
            self.stop = f"{MAX_ROUNDS} rounds"
        elif (
            not is_needed
            and self.spent_s / len(done) * max(len(done) + 1, MIN_ROUNDS) > most * self._budget_s
        ):
            self.stop = f"budget of {self._budget_s:g} s"
        elif may_leave and width < NARROW and not is_needed:
            self.stop = f"interval of the median within {NARROW:.0%}"

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
        self.failure = classify(error)
        self.stop = self.failure.reason
        with contextlib.suppress(Exception):  # it restores settings that the call changed before it raised
            self._read_conditions()


def interleave(calls: Sequence[TimedCall], rng: random.Random) -> None:
    """Run rounds over warmed-up calls until the sampling of each has ended.

    Baselines stay, within their budget, until all other calls have ended.
    """
    while active := [call for call in calls if not call.stop]:
        rng.shuffle(active)
        for call in (*active, *reversed(active)):
            call.visit()
        positions = {call: position for position, call in enumerate(active)}
        for call in sorted(active, key=lambda call: call.is_baseline):
            compared = any(not rival.is_baseline and not rival.stop for rival in active)
            call.close_round(positions[call], may_leave=not (call.is_baseline and compared))


def warm_up(call: Call, clock: Clock, budget_s: float, longest_s: float | None = None) -> Warm:
    """Call until block medians are flat, within the clock's bounds and the budget in seconds.

    A call that takes more than ``longest_s`` seconds, by default the budget, is called only once.
    """
    min_s, max_s = clock.warm_up_s
    max_s = min(max_s, max(min_s, budget_s))
    start_s = clock.seconds()
    first_ns = median(clock.visit(call, 1).samples[LATENCY])
    if first_ns > (longest_s or budget_s) * 1e9:
        return Warm(first_ns, calls=1, slow=True, state="one call, longer than the budget")
    blocks, costs_ns, calls = [first_ns], [], 1
    while (spent_s := clock.seconds() - start_s) < max_s and not (spent_s >= min_s and _flat(blocks)):
        before_s = clock.seconds()
        blocks.append(median(clock.visit(call, calls).samples[LATENCY]))
        costs_ns.append((clock.seconds() - before_s) * 1e9 / calls)
        calls = calls_per_visit(median(costs_ns[-BLOCKS:]))
    ended = f"flat after {len(blocks)} blocks," if _flat(blocks) else "not flat after"
    return Warm(blocks[-1], calls, state=f"{ended} {spent_s:.2f} s")


def calls_per_visit(call_ns: float) -> int:
    """Return the number of calls that fill a visit if one call takes ``call_ns`` with its overhead."""
    return max(1, min(MAX_CALLS, math.ceil(VISIT_NS / max(call_ns, 1.0))))


def _flat(blocks: list[float]) -> bool:
    recent = blocks[-BLOCKS:]
    if len(recent) < BLOCKS:
        return False
    slope = linear_regression(range(BLOCKS), recent).slope
    return abs(slope) <= FLAT * median(recent)
