"""A study of the gate as arrays: what each replicate says of each cell, and by which launches."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from esbench.errors import UserError
from esbench.gate.evidence import rounds
from esbench.gate.records import LONGER, Replicate, Stage, Timed
from esbench.gate.study import SURPLUS, Study

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Logs:
    """A row for each name and a column for each replicate: the log of by how many times head takes longer.

    ``variances`` holds beside each what the spread of the rounds inside the replicate makes of it; NaN where
    there are too few rounds to tell. ``screen`` is ``logs`` of so many rounds as a screen has.
    """

    names: tuple[str, ...]
    logs: Floats
    variances: Floats
    screen: Floats

    @property
    def replicates(self) -> int:
        """How many replicates there are."""
        return int(self.logs.shape[1])

    def of(self, stage: Stage) -> Floats:
        """Return the logs as a replicate of a stage has them."""
        return self.screen if stage == "screen" else self.logs


@dataclass(frozen=True)
class Arrays:
    """The cells of a study, and its controls by the share by which head has more work.

    A name is left out that does not stand once in every replicate.
    """

    cells: Logs
    controls: Mapping[float, Logs]
    left_out: tuple[str, ...]


class Pair(NamedTuple):
    """The launches of both arms on a cell in one replicate."""

    replicate: int
    base: Floats
    head: Floats


def arrays(study: Study, trim: float) -> Arrays:
    """Return what a study holds.

    Raises:
        UserError: a replicate is none.

    """
    found = replicates(study)
    counts = [Counter(timed.cell for timed in replicate.cells) for replicate in found]
    every = dict.fromkeys(name for count in counts for name in sorted(count))
    names = [name for name in every if all(count[name] == 1 for count in counts)]
    by_name: dict[str, list[Timed]] = {name: [] for name in names}
    for replicate in found:
        for timed in replicate.cells:
            if timed.cell in by_name:
                _hold(study, replicate, timed)
                by_name[timed.cell].append(timed)
    surplus = {name: SURPLUS.get(name.rpartition(" | ")[0]) for name in names}
    return Arrays(
        cells=_logs([name for name in names if surplus[name] is None], by_name, trim),
        controls={
            more: _logs([name for name in names if surplus[name] == more], by_name, trim)
            for more in sorted({more for more in surplus.values() if more is not None})
        },
        left_out=tuple(name for name in every if name not in by_name),
    )


def replicates(study: Study) -> list[Replicate]:
    """Return the replicates that were measured for a study, and not by a gate."""
    return [one for one in study.replicates if one.stage == "study"]


def pairs(study: Study, names: Sequence[str]) -> Iterator[Pair]:
    """Yield the launches of every replicate on the cells of these names."""
    wanted = set(names)
    for place, replicate in enumerate(replicates(study)):
        for timed in replicate.cells:
            if timed.cell in wanted:
                base, head = (
                    np.array([ns for visit in visits for ns in visit]) for visits in (timed.base, timed.head)
                )
                yield Pair(place, base, head)


def variance(values: Sequence[float], trim: float) -> float:
    """The variance of a trimmed mean as its values show it: that of the winsorised ones, by Yuen's formula.

    Yuen, The Two-Sample Trimmed t for Unequal Population Variances, 1974.
    """
    cut = int(trim * len(values))
    middle = len(values) - 2 * cut
    if middle < 2:  # noqa: PLR2004  # one value has no spread
        return float("nan")
    ordered = np.sort(values)
    return float(np.var(np.clip(ordered, ordered[cut], ordered[-1 - cut])) * len(values)) / (
        middle * (middle - 1)
    )


def _hold(study: Study, replicate: Replicate, timed: Timed) -> None:
    """Look whether both arms were visited twice a round, and launched each time.

    Raises:
        UserError: they were not.

    """
    visits = (*timed.base, *timed.head)
    if not len(timed.base) == len(timed.head) == 2 * len(timed.first) > 0 or not all(visits):
        message = (
            f"{study.path}: replicate {replicate.number} of {timed.cell}: an arm was not visited twice in "
            "each of its rounds"
        )
        raise UserError(message)


def _logs(names: Sequence[str], by_name: Mapping[str, Sequence[Timed]], trim: float) -> Logs:
    logs, variances, screen = [], [], []
    for name in names:
        every = [rounds(timed) for timed in by_name[name]]
        screen.append([float(stats.trim_mean(_screened(one), trim)) for one in every])
        logs.append([float(stats.trim_mean(one, trim)) for one in every])
        variances.append([variance(one, trim) for one in every])
    shape = (len(names), -1) if names else (0, 0)
    of_each, their, of_screen = (np.array(one).reshape(shape) for one in (logs, variances, screen))
    return Logs(tuple(names), of_each, their, of_screen)


def _screened(every: Sequence[float]) -> Sequence[float]:
    """Return the rounds that a screen would have had, of at least one."""
    return every[: max(1, len(every) * LONGER["screen"] // LONGER["study"])]
