"""What a run measures, and in which order."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from esbench.records import QUALITY, Case, Phase
from esbench.registry import Entry


@dataclass(frozen=True)
class Plan:
    """What a run measures.

    ``cell_s`` is the budget in seconds of one variant and phase on one case. ``checks`` are the
    small exact cases of the suite named ``check``. ``sweep``, ``stop_s`` and ``active`` are those of
    :class:`esbench.registry.Suite`.
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

    def size(self, case: Case) -> int:
        """Return what grows in a sweep."""
        return int(getattr(case, self.sweep))

    def entries_for(self, case: Case) -> list[Entry]:
        """Return the variants that meet a case, those of every company first."""
        entries = [entry for entry in self.entries if entry.supports(case)]
        return sorted(entries, key=in_every_company, reverse=True)


def in_every_company(entry: Entry) -> bool:
    """Say whether a variant is one that others are compared with: base or naive."""
    return entry.variant.mode != "batched"
