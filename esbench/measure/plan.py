"""The plan of a run: variants, cases and phases, their order, and an estimate of the time."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from esbench.registry import Entry
from esbench.schema import METHODS, PHASES, QUALITY, Case, Phase, Variant

MONITORED_PHASE: Phase = "forward"
"""The phase whose utilisation and energy are read: reading four would double the time of a run."""
LEAST_CELL_S = 0.01
"""The least seconds that the samples of a cell get: some short calls, or a single long one."""


@dataclass(frozen=True)
class Plan:
    """The variants, cases and phases of a run, and how they are measured.

    ``cell_s`` is the budget in seconds of one variant and phase on one case. ``checks`` are the
    small exact cases of the suite named ``check``. ``sweep``, ``stop_s``, ``active``, ``active_variants`` and
    ``traced`` are those of :class:`esbench.registry.Suite`. ``methods`` are those by which a phase is timed;
    a phase that it does not name is timed by all methods of the device. ``end_s`` is the moment, by
    :func:`time.monotonic`, at which the run has to be over.
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

        Base and naive have no phase but the forward, and all phases are compared with it: their forward is
        timed by the methods of every phase.
        """
        phases = self.timed if phase == "forward" and is_baseline(entry) else [phase]
        return any(one not in self.methods or method in self.methods[one] for one in phases)

    def cells_of(self, phases: Iterable[Phase]) -> int:
        """Return how many cells a variant has on a case: one by each method of a phase, one for quality."""
        return sum(1 if phase == QUALITY else len(self.methods_of(phase)) for phase in phases)

    def is_active(self, case: Case, variant: Variant) -> bool:
        """Say whether utilisation, power and energy are read of a variant on a case."""
        return any(fnmatchcase(case.label, glob) for glob in self.active) and any(
            fnmatchcase(variant.name, glob) for glob in self.active_variants
        )

    def size(self, case: Case) -> int:
        """Return the value of the field that a sweep varies."""
        return int(getattr(case, self.sweep))

    def entries_for(self, case: Case) -> list[Entry]:
        """Return the variants that support a case, baselines first."""
        entries = [entry for entry in self.entries if entry.supports(case)]
        return sorted(entries, key=is_baseline, reverse=True)


def is_baseline(entry: Entry) -> bool:
    """Return whether a variant is a baseline: base or naive."""
    return entry.variant.mode != "batched"


@dataclass(frozen=True)
class Costs:
    """Typical seconds of the parts of a run on a device.

    ``start_s``: imports, the device's context, its ceilings. ``check_s``: the exact check of a variant on an
    operator. ``pair_s``: its set-up on a case, and the check there. ``phase_s``: rehearsing a phase of it,
    measuring its memory, checking its result at the end. ``trace_s``: the profiler. ``method_s``: preparing a
    call for a method and warming it up. ``sampling_s``: the rounds of a cell with enough time. ``active_s``:
    reading the meters of a GPU. ``quality_s``: the phase quality.
    """

    start_s: float
    check_s: float
    pair_s: float
    phase_s: float
    trace_s: float
    method_s: float
    sampling_s: float
    active_s: float
    quality_s: float


COSTS: Mapping[str, Costs] = {
    # Of a run of the suite quick on two cores.
    "cpu": Costs(
        start_s=6.0,
        check_s=0.1,
        pair_s=0.05,
        phase_s=0.03,
        trace_s=0.01,
        method_s=0.05,
        sampling_s=math.inf,
        active_s=0.0,
        quality_s=0.06,
    ),
    # Estimated for an H200, on which nothing has been measured yet.
    "cuda": Costs(
        start_s=20.0,
        check_s=0.5,
        pair_s=0.15,
        phase_s=0.1,
        trace_s=0.15,
        method_s=0.15,
        sampling_s=0.15,
        active_s=5.0,
        quality_s=0.3,
    ),
}


class Estimate(NamedTuple):
    """The number of rows and cells of a run, and about how long it takes.

    A row is a variant on a case, a cell one of its phases by one method. ``sampling_s`` is the part of the
    seconds that goes to samples, which a time budget can shorten.
    """

    rows: int
    cells: int
    seconds: float
    sampling_s: float = 0.0

    def within(self, budget_s: float) -> str:
        """Describe the effect of a time budget: none, fewer samples, or fewer rows."""
        least_s = self.seconds - self.sampling_s + self.cells * LEAST_CELL_S
        if self.seconds <= budget_s:
            return f"a budget of {budget_s:g} s suffices"
        if least_s <= budget_s:
            share = 1 - (self.seconds - budget_s) / self.sampling_s
            return f"a budget of {budget_s:g} s leaves about {share:.0%} of the samples"
        return f"a budget of {budget_s:g} s leaves rows out: it would take at least {least_s:.0f} s"


def estimate(plan: Plan) -> Estimate:
    """Return the number of rows and cells of a plan and an estimate of its time."""
    costs, phases = COSTS[plan.device], plan.timed
    sampling_s = min(costs.sampling_s, plan.cell_s) * plan.cells_of(phases)
    row_s = (
        costs.pair_s
        + costs.phase_s * len(phases)
        + costs.trace_s * sum(phase in plan.traced for phase in phases)
        + costs.method_s * plan.cells_of(phases)
        + sampling_s
        + costs.quality_s * (QUALITY in plan.phases)
    )
    pairs = [(case, entry.variant) for case in plan.cases for entry in plan.entries_for(case)]
    active = sum(plan.is_active(*pair) for pair in pairs) if MONITORED_PHASE in phases else 0
    checks = len({(variant, case.operator) for case, variant in pairs})
    seconds = costs.start_s + checks * costs.check_s + len(pairs) * row_s + active * costs.active_s
    cells = len(pairs) * plan.cells_of(plan.phases)
    return Estimate(len(pairs), cells, seconds, sampling_s=len(pairs) * sampling_s)
