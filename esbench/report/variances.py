"""Where the variance of a replicate comes from: from the rounds inside it, or from the processes."""

from dataclasses import dataclass

import numpy as np

from esbench.report.gate_arrays import Logs


@dataclass(frozen=True)
class Split:
    """The variance of a cell's replicates, and the part that their rounds explain."""

    cell: str
    total: float
    within: float

    @property
    def between(self) -> float:
        """What is left for the processes; 0 where nothing is."""
        return max(0.0, self.total - self.within)

    @property
    def share(self) -> float:
        """The share of the processes; all of it where nothing varies inside, 0 where nothing does at all."""
        return self.between / self.total if self.total > 0 else 0.0


def splits(logs: Logs) -> list[Split]:
    """Split the variance of each cell; nothing where there are too few replicates or rounds to tell."""
    if logs.replicates < 2:  # noqa: PLR2004  # one value has no spread
        return []
    totals, within = np.var(logs.logs, axis=1, ddof=1), logs.variances.mean(axis=1)
    return [
        Split(name, float(total), float(inside))
        for name, total, inside in zip(logs.names, totals, within, strict=True)
        if np.isfinite(inside)
    ]


def pooled(found: list[Split]) -> float:
    """The share of the processes over all cells: what is left over counts where it is negative too."""
    total = sum(one.total for one in found)
    return 1 - sum(one.within for one in found) / total if total > 0 else 0.0
