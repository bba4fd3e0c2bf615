"""Interleaved rounds: every call is visited in turn, there and back again.

Measured one after another, two equal variants differ by the drift of the machine. A round visits
all of them in a shuffled order and then in the reverse (ABBA), so that what drifts through a
round falls on all alike; a ratio taken inside a round is free of it.
"""

import random
from collections.abc import Callable, Sequence
from statistics import median

from esbench.measure.failure import Failure, explain
from esbench.measure.timers import Call, Clock, quiet
from esbench.measure.warming import Warm, warm_up
from esbench.schema import Conditions
from esbench.stats import interval

MOST_ROUNDS = 20
LEAST_ROUNDS = 3
"""A call whose budget ends sooner has so many rounds still, if they cost no more than OVERDRAFT budgets."""
OVERDRAFT = 4.0
NARROW = 0.01
"""A call leaves the rounds when the interval of its median is narrower than this share of it."""

LATENCY = "latency_ns"

ReadConditions = Callable[[], Conditions | None]


def nothing_to_read() -> None:
    """Conditions of a device that does not tell any."""


class TimedCall:
    """A call on its way through the rounds: its samples, and why they ended.

    ``rounds`` holds for each metric one tuple of nanoseconds a round, both visits in it; ``places`` how
    many were visited before this one on the way there, ``conditions`` what the device said beside each
    visit. ``stop`` is empty while the call takes part.
    """

    def __init__(
        self,
        call: Call,
        clock: Clock,
        budget_s: float,
        *,
        stays: bool = False,
        conditions: ReadConditions = nothing_to_read,
    ) -> None:
        """Measure nothing yet. One that ``stays`` is there for the others to be compared with.

        ``conditions`` is read behind each visit, and may raise where the call did what it must not.
        """
        self.rounds: dict[str, list[tuple[float, ...]]] = {}
        self.places: list[int] = []
        self.conditions: list[tuple[Conditions, ...]] = []
        self.stop = ""
        self.fault: Failure | None = None
        self.stays = stays
        self._call = call
        self._clock = clock
        self._budget_s = budget_s
        self._read_conditions = conditions
        self._warm = Warm(0.0, calls=1)
        self._spent_s = 0.0
        self._round: dict[str, tuple[float, ...]] = {}
        self._beside: tuple[Conditions, ...] = ()
        self._bound = self._samples = self._grown = 0

    @property
    def warm_up_state(self) -> str:
        """How the warm-up ended, in words."""
        return self._warm.state

    @property
    def spent_s(self) -> float:
        """The seconds that the visits took."""
        return self._spent_s

    def warm_up(self) -> None:
        """Warm the call up; one that takes longer than its budget ends here with that sample."""
        try:
            with quiet():
                self._warm = warm_up(self._call, self._clock, self._budget_s)
            self._read_conditions()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
            self._fail(error)
        if self._warm.slow:
            self.rounds = {LATENCY: [(self._warm.call_ns,)]}
            self.stop = f"one sample: a call takes longer than the budget of {self._budget_s:g} s"

    def visit(self) -> None:
        """Take the samples of one visit, after a call that takes back the caches, if that is cheap."""
        if self.stop:
            return
        start_s = self._clock.seconds()
        try:
            with quiet():
                if self._warm.calls > 1:
                    self._call()
                taken = self._clock.visit(self._call, self._warm.calls)
            beside = self._read_conditions()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
            self._fail(error)
        else:
            for metric, samples in taken.samples.items():
                self._round[metric] = self._round.get(metric, ()) + samples
            self._samples += len(taken.samples[LATENCY])
            self._bound += taken.dispatch_bound
            self._grown += taken.grown
            self._beside += (beside,) if beside else ()
        self._spent_s += self._clock.seconds() - start_s

    def close_round(self, place: int, *, may_leave: bool) -> None:
        """Keep the round; leave when the interval is narrow, or another would exceed a bound."""
        if self.stop:
            return
        for metric, samples in self._round.items():
            self.rounds.setdefault(metric, []).append(samples)
        self.places.append(place)
        if self._beside:
            self.conditions.append(self._beside)
        self._round, self._beside = {}, ()
        done = self.rounds[LATENCY]
        found = interval([median(samples) for samples in done])
        width = (found.high - found.low) / found.median if found and found.median > 0 else 1.0
        if len(done) == MOST_ROUNDS:
            self.stop = f"{MOST_ROUNDS} rounds"
        elif self._is_spent(len(done)):
            self.stop = f"budget of {self._budget_s:g} s"
        elif may_leave and width < NARROW:
            self.stop = f"interval of the median within {NARROW:.0%}"

    def _is_spent(self, rounds: int) -> bool:
        """Whether another round exceeds the budget; of one or two rounds nobody can tell how they vary."""
        most = OVERDRAFT if rounds < LEAST_ROUNDS else 1.0
        return self._spent_s / rounds * max(rounds + 1, LEAST_ROUNDS) > most * self._budget_s

    @property
    def labels(self) -> tuple[str, ...]:
        """What else must be said of the samples."""
        found = []
        if self._bound:
            found.append(f"dispatch-bound: in {self._bound} of {self._samples} samples the device waited")
        if self._grown:
            found.append(f"allocated device memory while timed, in {self._grown} visits")
        return tuple(found)

    def _fail(self, error: BaseException) -> None:
        self.fault = explain(error)
        self.stop = self.fault.reason


def interleave(tracks: Sequence[TimedCall], rng: random.Random) -> None:
    """Run rounds over calls that are warm until each has left them.

    Those that stay do so, within their budget, as long as another is there to be compared with them.
    """
    while active := [track for track in tracks if not track.stop]:
        rng.shuffle(active)
        for track in (*active, *reversed(active)):
            track.visit()
        places = {track: place for place, track in enumerate(active)}
        for track in sorted(active, key=lambda track: track.stays):
            compared = any(not other.stays and not other.stop for other in active)
            track.close_round(places[track], may_leave=not (track.stays and compared))
