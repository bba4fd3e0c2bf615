"""Interleaved rounds: every variant is visited in turn, there and back again.

Measured one after another, two equal variants differ by the drift of the machine. A round visits
all of them in a shuffled order and then in the reverse (ABBA), so that what drifts through a
round falls on all alike; a ratio taken inside a round is free of it.
"""

import random
from collections.abc import Sequence

from esbench.measure.fault import Fault, explain
from esbench.measure.timing import Clock, Warm, quiet, warm_up
from esbench.records import Phase
from esbench.registry import Workload

MOST_ROUNDS = 20


class Track:
    """A workload's phase on its way through the rounds: its samples, and why they ended.

    ``rounds`` holds one tuple of nanoseconds for each round, both visits in it. ``stop`` is empty
    while the call takes part.
    """

    def __init__(self, workload: Workload, phase: Phase, clock: Clock, budget_s: float) -> None:
        """Let the workload enter the phase; nothing is measured yet."""
        self.rounds: list[tuple[float, ...]] = []
        self.stop = ""
        self.fault: Fault | None = None
        self._call = workload.phases[phase]
        self._clock = clock
        self._budget_s = budget_s
        self._warm = Warm(0.0, calls=1)
        self._spent_s = 0.0
        self._round: tuple[float, ...] = ()
        try:
            workload.enter(phase)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
            self._fail(error)

    def warm_up(self) -> None:
        """Warm the call up; one that takes longer than its budget ends here with that sample."""
        if self.stop:
            return
        try:
            with quiet():
                self._warm = warm_up(self._call, self._clock, self._budget_s)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
            self._fail(error)
        if self._warm.slow:
            self.rounds.append((self._warm.call_ns,))
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
                self._round += self._clock.visit(self._call, self._warm.calls)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
            self._fail(error)
        self._spent_s += self._clock.seconds() - start_s

    def close_round(self) -> None:
        """Keep the round, and leave if another would exceed the budget or the most rounds."""
        if self.stop:
            return
        self.rounds.append(self._round)
        self._round = ()
        round_s = 2 * self._warm.calls * self._warm.call_ns / 1e9
        if len(self.rounds) == MOST_ROUNDS:
            self.stop = f"{MOST_ROUNDS} rounds"
        elif self._spent_s + round_s > self._budget_s:
            self.stop = f"budget of {self._budget_s:g} s"

    def _fail(self, error: BaseException) -> None:
        self.fault = explain(error)
        self.stop = self.fault.reason


def interleave(tracks: Sequence[Track], rng: random.Random) -> None:
    """Run rounds over calls that are warm until each has left them."""
    while active := [track for track in tracks if not track.stop]:
        rng.shuffle(active)
        for track in (*active, *reversed(active)):
            track.visit()
        for track in active:
            track.close_round()
