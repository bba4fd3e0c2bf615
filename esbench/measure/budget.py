"""How the time budget of a run is shared among its cases, and that of a case among its rows and cells.

A run with a time budget first samples less: the seconds of a cell shrink down to LEAST_CELL_S. Where that is
not enough, the last rows of a case get :data:`OUT_OF_TIME` as their reason.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from esbench.measure.plan import COSTS, LEAST_CELL_S, Plan, is_baseline
from esbench.registry import Entry, UnavailableError
from esbench.schema import OUT_OF_TIME, Skipped, Variant

MOST_SHARES = 2
"""A case may take this many times its share of the time if later cases lose no row by that."""
LENT = 0.25
"""The part of the time of later cases that may be used to measure variants that are set up already."""


class Known:
    """The seconds each variant took on its last case; for a new one the median of the others, or a guess."""

    def __init__(self, guess_s: float) -> None:
        """Start with a guess."""
        self._guess_s = guess_s
        self._last: dict[Variant, float] = {}
        self._current: dict[Variant, float] = {}

    def begin(self) -> None:
        """Begin a case."""
        self._last |= self._current
        self._current = {}

    def add(self, variant: Variant, seconds: float) -> None:
        """Add the seconds that a variant took on the current case."""
        self._current[variant] = self._current.get(variant, 0.0) + seconds

    def __getitem__(self, variant: Variant) -> float:
        """Return the seconds that a variant is expected to take."""
        if variant in self._last:
            return self._last[variant]
        return median(self._last.values()) if self._last else self._guess_s


class Budget:
    """Shares the time of a run among its cases, and that of a case among its rows and cells.

    It learns as the run goes what each variant takes on a case, to be set up and to be measured, beside its
    samples. ``least_cell_s`` is the shortest time that the samples of a cell got.
    """

    def __init__(self, plan: Plan, seconds: Callable[[], float], *, traces_last: bool = False) -> None:
        """Begin with the costs of the estimate.

        Args:
            plan: what is measured.
            seconds: tells the time.
            traces_last: whether calls are traced after everything else, with variants set up once more.

        """
        costs = COSTS[plan.device]
        phases = sum(phase in plan.traced for phase in plan.timed)
        rows = sum(len(plan.entries_for(case)) for case in plan.cases) if traces_last and phases else 0
        self._end_s = plan.end_s - rows * (costs.pair_s + phases * costs.trace_s)
        self.least_cell_s = plan.cell_s
        self._plan = plan
        self._seconds = seconds
        self._cells = plan.cells_of(plan.phases)
        self._until_s = self._latest_s = self._end_s
        self._waiting, self._waiting_s = 0, 0.0
        self._later, self._later_s = 0, 0.0
        self._set_up = Known(costs.check_s + costs.pair_s)
        self._measured = Known(self._cells * (costs.phase_s + costs.method_s))

    @property
    def spare_s(self) -> float:
        """The seconds that the case has left for optional measurements, which later cases do not need."""
        needed_s = self._later_s + self._later * LEAST_CELL_S
        return min(self._until_s, self._end_s - needed_s) - self._seconds()

    def begin(self, variants: Sequence[Variant], later: Sequence[Variant]) -> None:
        """Give a case its share of the time that is left.

        A case may take up to MOST_SHARES if later ones need less, each with the fewest samples.

        Args:
            variants: those to be measured on the case.
            later: those to be measured on all later cases.

        """
        self._set_up.begin()
        self._measured.begin()
        self._later = len(later) * self._cells
        self._later_s = sum(self._set_up[one] + self._measured[one] for one in later)
        if variants and math.isfinite(self._end_s):
            now_s, end_s = self._seconds(), self._end_s
            share_s = (end_s - now_s) * len(variants) / (len(variants) + len(later))
            self._until_s = end_s
            self._until_s = now_s + max(share_s, min(self.spare_s, MOST_SHARES * share_s))
            self._latest_s = self._until_s + LENT * (end_s - self._until_s)

    def learn(self, variant: Variant, seconds: float, *, is_set_up: bool) -> None:
        """Record the seconds that a variant took to be set up, or to be measured, apart from its samples."""
        (self._set_up if is_set_up else self._measured).add(variant, seconds)

    def has_room(self, entry: Entry, beside: Iterable[Variant]) -> bool:
        """Return whether a variant can be set up and measured with the others, with the fewest samples.

        Baselines may use time of later cases as well.
        """
        variants = (entry.variant, *beside)
        needed_s = self._set_up[entry.variant] + sum(self._measured[one] for one in variants)
        until_s = self._latest_s if is_baseline(entry) else self._until_s
        return until_s - self._seconds() >= needed_s + len(variants) * self._cells * LEAST_CELL_S

    def check(self) -> None:
        """Check that there is time for the variants that are set up, at the expense of later cases.

        Raises:
            UnavailableError: there is no time left.

        """
        if self._seconds() >= self._latest_s:
            raise UnavailableError(OUT_OF_TIME)

    def expect(self, variants: Sequence[Variant], cells: int) -> None:
        """Record which variants are set up, and how many of their cells are to be measured."""
        self._waiting, self._waiting_s = cells, sum(self._measured[one] for one in variants)

    def cell_s(self, cells: int) -> float:
        """Return the seconds for the samples of each of the next ``cells`` cells, an equal share."""
        waiting = max(self._waiting, cells, 1)
        spare_s = self._end_s - self._seconds() - self._waiting_s - self._later_s
        found_s = max(spare_s / (waiting + self._later), LEAST_CELL_S)
        self._waiting_s *= 1 - cells / waiting
        self._waiting = waiting - cells
        if found_s >= self._plan.cell_s:
            return self._plan.cell_s
        found_s = float(f"{found_s:.1e}")  # two digits: the row says why its sampling ended
        self.least_cell_s = min(self.least_cell_s, found_s)
        return found_s

    def cuts(self, skipped: Sequence[Skipped]) -> Iterator[str]:
        """Yield a line for each kind of cut that was made."""
        if self.least_cell_s < self._plan.cell_s:
            yield f"{OUT_OF_TIME}: a cell had as little as {self.least_cell_s:g} s of {self._plan.cell_s:g} s"
        lost = [row for row in skipped if row.reason == OUT_OF_TIME]
        if lost:
            whole = sum(row.phase is None for row in lost)
            in_part = len({(row.variant, row.case) for row in lost}) - whole
            last = f"{lost[-1].variant.label(lost[-1].case.operator)} on {lost[-1].case.label}"
            yield f"{OUT_OF_TIME}: {whole} rows not measured, {in_part} measured in part; the last is {last}"
