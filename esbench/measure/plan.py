"""What a run measures, and in which order."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from esbench.registry import Entry
from esbench.schema import METHODS, PHASES, QUALITY, Case, Phase, Variant


@dataclass(frozen=True)
class Plan:
    """What a run measures.

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
        """Say whether a variant is timed by a method in a phase.

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
        """Return what grows in a sweep."""
        return int(getattr(case, self.sweep))

    def entries_for(self, case: Case) -> list[Entry]:
        """Return the variants that meet a case, those of every company first."""
        entries = [entry for entry in self.entries if entry.supports(case)]
        return sorted(entries, key=is_baseline, reverse=True)


def is_baseline(entry: Entry) -> bool:
    """Say whether a variant is one that others are compared with: base or naive."""
    return entry.variant.mode != "batched"
