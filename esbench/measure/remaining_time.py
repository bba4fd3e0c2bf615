"""The expected remaining time of a run, from the seconds that each stage of a case costs."""

from collections.abc import Callable, Mapping

from esbench.schema import Case

SET_UP = "set-up"
"""The first stage of a case, in which variants are set up and checked. Each phase is a stage too."""
TRACES = "launches"
"""The stage in which a GPU's launches are counted, after all cases were timed."""

Stage = tuple[Case, str]


class RemainingTime:
    """The expected seconds of the unfinished stages of all cases.

    A variant is expected to take as long in a stage as the mean of the variants before it. Before a stage is
    finished on any case, its guess is scaled by the ratio of measured to guessed seconds of all other stages.
    """

    def __init__(
        self, variants: Mapping[Stage, int], guesses_s: Mapping[str, float], now_s: Callable[[], float]
    ) -> None:
        """Start before the first stage.

        Args:
            variants: stage of a case -> number of variants that are measured in it.
            guesses_s: stage -> expected seconds of a variant, before any is measured.
            now_s: the clock.
        """
        self._variants = dict(variants)
        self._unfinished = dict(variants)
        self._guesses_s = guesses_s
        self._now_s = now_s
        self._spent_s = dict.fromkeys(guesses_s, 0.0)
        self._counts = dict.fromkeys(guesses_s, 0)
        self._current: Stage | None = None
        self._since_s = now_s()

    def begin(self, stage: Stage | None) -> None:
        """Note that a stage runs from now on, which finishes the stage before it."""
        if stage == self._current:
            return
        now_s = self._now_s()
        if self._current in self._unfinished:
            name = self._current[1]
            self._spent_s[name] += now_s - self._since_s
            self._counts[name] += self._unfinished.pop(self._current)
        self._current, self._since_s = stage, now_s

    def finish(self, case: Case) -> None:
        """Note that nothing more is timed on a case."""
        self.begin(None)
        for stage in [stage for stage in self._unfinished if stage[0] == case and stage[1] != TRACES]:
            del self._unfinished[stage]

    def left_s(self, case: Case | None = None) -> float:
        """Return the expected seconds of the unfinished stages of a case, by default of all cases."""
        total_s = 0.0
        for stage, count in self._unfinished.items():
            if case is None or case == stage[0]:
                running_s = self._now_s() - self._since_s if stage == self._current else 0.0
                total_s += max(count * self._expected_s(stage[1]) - running_s, 0.0)
        return total_s

    def share(self, case: Case) -> float:
        """Return the finished share of the expected time of a case, from 0 to 1."""
        stages = {stage: count for stage, count in self._variants.items() if stage[0] == case}
        total_s = sum(count * self._expected_s(name) for (_, name), count in stages.items())
        return 1 - self.left_s(case) / total_s if total_s else 1.0

    def _expected_s(self, name: str) -> float:
        """Return the expected seconds of a variant in a stage."""
        if self._counts[name]:
            return self._spent_s[name] / self._counts[name]
        guessed_s = sum(count * self._guesses_s[stage] for stage, count in self._counts.items())
        measured_to_guessed = sum(self._spent_s.values()) / guessed_s if guessed_s else 1.0
        return self._guesses_s[name] * measured_to_guessed
