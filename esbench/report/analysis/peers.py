"""Suite ``peers``: generations of esbench beside those of other libraries."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from esbench.report.analysis.pivot import Grid, latency_grids
from esbench.schema import QUALITY, Case, Measurement, Run, Skipped, Variant
from esbench.stats import Ratio, median, ratio

OPERATOR = "GenerationMLP"
"""The network of the summary and of the plot."""
NETWORKS = {
    OPERATOR: ("an MLP", "units"),
    "GenerationCNN": ("a CNN", "channels"),
    "GenerationTransformer": ("a transformer block", "features"),
}
"""The networks, with what their width counts."""
SCANNED = "generations"
"""The option with the number of generations in a call, by default one."""
OURS = "Esbench"
_LIBRARIES = {
    OURS: "esbench",
    "EvoTorch": "EvoTorch",
    "Evox": "EvoX",
    "Evosax": "evosax",
    "TorchEggroll": "torcheggroll",
    "VmapByHand": "torch.func.vmap",
    "BatchedProducts": "torch.baddbmm by hand",
    "LoopOverMembers": "plain loop",
    "Backpropagation": "backpropagation",
}


def library(variant: Variant) -> str:
    """Return the name of the library of a variant."""
    return _LIBRARIES.get(variant.scheme, variant.scheme)


def name(variant: Variant) -> str:
    """Return a short name: the library, its version, then other options: ``EvoX 1.4.0, compiled=True``."""
    options = dict(variant.options)
    words = [library(variant), *(str(options.pop(key)) for key in ("version", "scheme") if key in options)]
    return ", ".join([" ".join(words), *(f"{key}={value}" for key, value in options.items())])


def evaluations(case: Case) -> int:
    """Return the number of members that a generation evaluates: two for each antithetic pair."""
    return 2 * case.members


def heading(case: Case) -> str:
    """Return a short name of a case: evaluations, rows of the batch, and width."""
    width = f"{case.out_channels} {NETWORKS[case.operator][1]}"
    return f"{evaluations(case):,} x {case.repeats // 2}, {width}"


@dataclass(frozen=True)
class Generations:
    """The times of the generations of a run, and what its quality phase measured once."""

    grid: Grid

    @classmethod
    def of(cls, run: Run, operator: str = OPERATOR) -> "Generations | None":
        """Return the generations of a network in a run, None if it has none."""
        steps = [grid for grid in latency_grids(run, operator) if grid.phase == "step" and grid.cells]
        return cls(steps[0]) if steps else None

    @cached_property
    def cases(self) -> list[Case]:
        """The cases by width and rows, the most evaluations last."""
        return sorted(self.grid.cases, key=lambda case: (case.out_channels, -case.repeats, case.members))

    def at(self, variant: Variant, case: Case) -> Measurement | Skipped | None:
        """Return a row with the times of one generation, or the reason why there is none."""
        row, count = self.grid.at(variant, case), int(dict(variant.options).get(SCANNED, 1))
        if not isinstance(row, Measurement) or count == 1:
            return row
        samples = tuple(tuple(sample / count for sample in visits) for visits in row.samples)
        return msgspec.structs.replace(row, samples=samples)

    def time_ns(self, variant: Variant, case: Case) -> float | None:
        """Return the median time of a generation, None if it was not measured."""
        row = self.at(variant, case)
        return median(row) if isinstance(row, Measurement) else None

    def ratio(self, variant: Variant, other: Variant, case: Case) -> Ratio | None:
        """Return time(variant) / time(other) of a generation, None without both."""
        rows = self.at(variant, case), self.at(other, case)
        if not all(isinstance(row, Measurement) for row in rows):
            return None
        return ratio(*rows)  # type: ignore[arg-type]  # both are measurements

    def quality(self, variant: Variant, case: Case, metric: str, method: str) -> Measurement | None:
        """Return a metric of the quality phase."""
        wanted = (variant, case, QUALITY, metric, method)
        rows = (row for row in self.grid.run.measurements if row.phase == QUALITY)
        return next(
            (row for row in rows if (row.variant, row.case, row.phase, row.metric, row.method) == wanted),
            None,
        )

    def anywhere(self, variant: Variant, metric: str, method: str) -> Measurement | None:
        """Return a metric of the quality phase that is measured on one case only."""
        found = (self.quality(variant, case, metric, method) for case in self.cases)
        return next((row for row in found if row is not None), None)

    @property
    def searches(self) -> list[Variant]:
        """The variants that evaluate a population: all but backpropagation."""
        return [variant for variant in self.grid.variants if variant.mode != "base"]

    def fastest(self, case: Case) -> list[Variant]:
        """Return the searches that were measured on a case, the fastest first."""
        timed = [variant for variant in self.searches if self.time_ns(variant, case) is not None]
        return sorted(timed, key=lambda variant: self.time_ns(variant, case) or 0.0)

    @property
    def ours(self) -> Variant | None:
        """The variant of esbench that others are compared with: the first one that was measured."""
        return next((variant for variant in self.grid.variants if variant.scheme == OURS), None)

    @property
    def sweep(self) -> list[Case]:
        """The most cases that differ only in the population, which grows."""
        same: dict[Case, list[Case]] = {}
        for case in self.cases:
            same.setdefault(msgspec.structs.replace(case, members=1), []).append(case)
        return max(same.values(), key=len, default=[])

    def best_of_libraries(self, cases: Sequence[Case]) -> list[Variant]:
        """Return the variant of each library with the least time on the most of these cases, fastest first.

        The time is that on the largest case which the library was measured on.
        """
        best: dict[str, Variant] = {}
        for variant in sorted(self.searches, key=lambda variant: self._rank(variant, cases)):
            best.setdefault(library(variant), variant)
        return list(best.values())

    def _rank(self, variant: Variant, cases: Sequence[Case]) -> tuple[int, float]:
        times = [time for case in cases if (time := self.time_ns(variant, case)) is not None]
        return -len(times), times[-1] if times else 0.0
