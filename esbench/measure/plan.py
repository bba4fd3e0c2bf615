"""The plan of a run: its variants, cases and phases, their order, and the time limit."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from esbench.registry import Entry, is_reference
from esbench.schema import METHODS, OUT_OF_TIME, PHASES, QUALITY, Case, Phase, Skipped, Variant
from esbench.text import pluralize
from esbench.workload import UnavailableError

MONITORED_PHASE: Phase = "forward"
"""The only phase whose utilization and energy are read, because each reading takes seconds."""
MIN_S = 0.01
"""The least seconds for the samples of a cell: enough for several short calls or one long call."""
DEFAULT_S = 0.05
"""The expected seconds of the check of a phase, and of the overhead of a cell, until one was measured."""
MARGIN = 2.0
"""A variant is set up only if this many times its expected seconds are left, because a long call may exceed
the time of its cell."""
TRACES_SHARE = 0.1
"""The share of the time limit that is reserved for traces, which are taken after all timings."""


@dataclass(frozen=True)
class Plan:
    """The variants, cases and phases of a run, and how they are measured.

    Attributes:
        cell_s: the seconds for the samples of a cell: a variant and phase on a case, by one method.
        checks: the small float64 cases of the suite ``check``.
        sweep, stop_s, active, active_variants, traced: see :class:`esbench.registry.Suite`.
        methods: phase -> its timing methods; a phase that is missing has all methods of the device.
        reference_phases: the phases in which base, naive and dense noise get at least six rounds.
        is_screening: whether the times only choose what to measure: timed calls are not confirmed on new
            inputs, and base is not timed again to find variants that slow others down.
        limit_s: the seconds without progress after which a variant is ended.
        end_s: the time of :func:`time.monotonic` by which the run has to be over.
    """

    entries: Sequence[Entry]
    cases: Sequence[Case]
    phases: Sequence[Phase]
    cell_s: float
    checks: Sequence[Case] = ()
    device: str = "cpu"
    seed: int = 0
    sweep: str = ""
    stop_s: float = math.inf
    active: Sequence[str] = ("*",)
    active_variants: Sequence[str] = ("*",)
    methods: Mapping[Phase, Sequence[str]] = field(default_factory=dict)
    traced: Sequence[Phase] = PHASES
    reference_phases: Sequence[Phase] = PHASES
    is_screening: bool = False
    limit_s: float = math.inf
    end_s: float = math.inf

    @property
    def timed(self) -> list[Phase]:
        """The phases that are timed: all but quality."""
        return [phase for phase in self.phases if phase != QUALITY]

    @property
    def order(self) -> list[Case]:
        """The cases as they are measured: shuffled, or from small to large in a sweep."""
        cases = list(self.cases)
        random.Random(self.seed).shuffle(cases)  # noqa: S311  # an order, not a secret
        return sorted(cases, key=self.size) if self.sweep else cases

    def methods_of(self, phase: Phase) -> Sequence[str]:
        """Return the methods by which a phase is timed."""
        return self.methods.get(phase, METHODS[self.device])

    def is_timed(self, entry: Entry, phase: Phase, method: str) -> bool:
        """Return whether a variant is timed by a method in a phase.

        Base and naive have only the phase ``forward``, with which all phases of other variants are compared.
        It is therefore timed by the methods of all phases.
        """
        phases = self.timed if phase == "forward" and is_base_or_naive(entry) else [phase]
        return any(phase not in self.methods or method in self.methods[phase] for phase in phases)

    def cells_of(self, phases: Iterable[Phase]) -> int:
        """Return the number of cells of a variant on a case: one per phase and method, one for quality."""
        return sum(1 if phase == QUALITY else len(self.methods_of(phase)) for phase in phases)

    def is_monitored(self, case: Case, variant: Variant) -> bool:
        """Return whether utilization, power and energy of a variant are read on a case."""
        return any(fnmatchcase(case.label, glob) for glob in self.active) and any(
            fnmatchcase(variant.name, glob) for glob in self.active_variants
        )

    def size(self, case: Case) -> int:
        """Return the value of the field that a sweep varies."""
        return int(getattr(case, self.sweep))

    def entries_for(self, case: Case) -> list[Entry]:
        """Return the variants that support a case: base and naive, dense noise, then the others."""
        entries = [entry for entry in self.entries if entry.supports(case)]
        return sorted(
            entries, key=lambda entry: (not is_base_or_naive(entry), not is_reference(entry.variant))
        )


def is_base_or_naive(entry: Entry) -> bool:
    """Return whether a variant is base or naive, which each co-resident group contains."""
    return entry.variant.mode != "batched"


class Budget:
    """Divides the time until the end of a run equally among the cells that are not measured yet.

    If time is short, cells get fewer samples, and the last rows get :data:`OUT_OF_TIME` as their reason. The
    time of a case is proportional to the number of its cells. The references of all ratios, base, naive and
    dense noise, may also use the time of later cases.

    Attributes:
        cells: the cells of the current case that are not measured yet.
    """

    def __init__(self, plan: Plan, seconds: Callable[[], float], *, traces_last: bool = False) -> None:
        """Start before the first case.

        Args:
            plan: the plan of the run.
            seconds: returns the time in seconds, on the clock of ``plan.end_s``.
            traces_last: whether calls are traced after everything else.
        """
        self.cells = 0
        self._planned_s = plan.cell_s
        self._shortest_s = plan.cell_s  # the least seconds that a cell has got
        self._seconds = seconds
        self._end_s = plan.end_s
        if traces_last and plan.end_s < math.inf:
            self._end_s -= TRACES_SHARE * (plan.end_s - seconds())
        self._case_end_s = self._end_s
        self._checks_per_variant = len(plan.timed)
        self._cells_per_variant = plan.cells_of(plan.phases)
        self._overhead_s, self._measured_cells = 0.0, 0
        self._checks_s, self._checked_variants = 0.0, 0

    def begin(self, cells: int, later: int) -> None:
        """Begin a case with ``cells`` cells; the cases after it have ``later`` cells in all."""
        self.cells = cells
        if cells:
            now_s = self._seconds()
            self._case_end_s = now_s + cells / (cells + later) * (self._end_s - now_s)

    @property
    def spare_s(self) -> float:
        """The seconds of the case that its unmeasured cells do not need if each gets the fewest samples."""
        needed_s = self.cells * (MIN_S + self._mean_overhead_s)
        return self._case_end_s - self._seconds() - needed_s

    def check(self, entry: Entry, reserve_s: float = 0.0, *, is_timed: bool = False) -> None:
        """Check that time is left for a variant.

        Args:
            entry: the variant.
            reserve_s: the seconds that must be left in the case, unless the variant is a reference.
            is_timed: whether the call is timed already: it may then also use the time of later cases, and a
                reference may exceed the time limit.

        Raises:
            UnavailableError: no time is left.
        """
        is_ratio_reference = is_reference(entry.variant)
        if is_ratio_reference and is_timed:
            return
        end_s = self._end_s if is_ratio_reference or is_timed else self._case_end_s - reserve_s
        if self._seconds() >= end_s:
            raise UnavailableError(OUT_OF_TIME)

    @property
    def variant_s(self) -> float:
        """The seconds to reserve for the checks and cells of a variant, with the fewest samples."""
        default_s = DEFAULT_S * self._checks_per_variant
        checks_s = self._checks_s / self._checked_variants if self._checked_variants else default_s
        overhead_s = self._mean_overhead_s if self._measured_cells else DEFAULT_S
        return MARGIN * (checks_s + self._cells_per_variant * (overhead_s + MIN_S))

    def add_checks(self, variants: int, seconds: float) -> None:
        """Add the seconds that the checks of variants took before timing."""
        self._checked_variants += variants
        self._checks_s += seconds

    def cell_s(self, cells: int) -> float:
        """Begin ``cells`` cells; return the seconds for the samples of each, an equal share of the case's."""
        share_s = (self._case_end_s - self._seconds()) / max(self.cells, 1) - self._mean_overhead_s
        self.cells -= cells
        if share_s >= self._planned_s:
            return self._planned_s
        share_s = float(f"{max(share_s, MIN_S):.1e}")  # two digits: it is stored as a reason to stop
        self._shortest_s = min(self._shortest_s, share_s)
        return share_s

    def add_overhead(self, cells: int, seconds: float) -> None:
        """Add the seconds that cells took besides their samples; later cells are expected to take as long."""
        self._measured_cells += cells
        self._overhead_s += seconds

    def cut_notes(self, skipped: Sequence[Skipped]) -> Iterator[str]:
        """Yield a line for each way in which the time limit shortened the run."""
        if self._shortest_s < self._planned_s:
            yield f"{OUT_OF_TIME}: a cell got only {self._shortest_s:g} s instead of {self._planned_s:g} s"
        lost = [row for row in skipped if row.reason == OUT_OF_TIME]
        if lost:
            last = f"{lost[-1].variant.label(lost[-1].case.operator)} on {lost[-1].case.label}"
            yield f"{OUT_OF_TIME}: {pluralize(len(lost), 'row')} not measured; the last is {last}"

    @property
    def _mean_overhead_s(self) -> float:
        return self._overhead_s / max(self._measured_cells, 1)
