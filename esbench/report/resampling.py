"""What the gate would have said: suites drawn from the replicates of a study, judged by the gate's own rule.

A suite takes as many replicates as a gate does, without replacement, and of those for confirmation only the
cells that the screen keeps. Where both arms are the same revision nothing tells them apart but their names:
a drawn replicate has them swapped with a probability of one half, in all cells together. All of it is
seeded, and the same suites are drawn for every question.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy import special

from esbench.gate.decision import (
    FAILED,
    INVALID,
    MEAN,
    control_verdicts,
    exit_code,
    time_verdicts,
    to_confirm,
)
from esbench.gate.evidence import bounds, screened
from esbench.gate.records import Bounds, Settings, Stage, Verdict
from esbench.report.gate_arrays import Floats, Logs

SEED = 20261122
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Draw:
    """The replicates of a suite, and of every replicate 1, or -1 where its arms are swapped."""

    screen: NDArray[np.intp]
    confirm: NDArray[np.intp]
    signs: Floats


@dataclass(frozen=True)
class Suite:
    """What the gate says of a suite: all verdicts, and how many cells its screen kept."""

    verdicts: tuple[Verdict, ...]
    mean: Verdict
    kept: int

    @property
    def failed(self) -> frozenset[str]:
        """Which cells FAIL, the mean not among them."""
        return frozenset(one.cell for one in self.verdicts if one.status == "FAIL")

    @property
    def exit_code(self) -> int:
        """How the gate would end."""
        return exit_code((*self.verdicts, self.mean), ())


@dataclass(frozen=True)
class Alarms:
    """What was said of suites in which nothing differs: counts of suites and of comparisons of a cell."""

    suites: int
    cells: int
    alarmed: int
    by_mean: int
    failed: int
    inconclusive: int
    unclear: int
    kept: float

    @property
    def comparisons(self) -> int:
        """How many times a cell was judged."""
        return self.suites * self.cells

    @property
    def rate(self) -> float:
        """The share of suites with a FAIL."""
        return self.alarmed / self.suites

    @property
    def most(self) -> float:
        """The upper bound of that share, were the suites independent."""
        return upper(self.alarmed, self.suites)


@dataclass(frozen=True)
class Power:
    """In how many suites what is slower by ``slower`` was found, and in how many something else was named."""

    slower: float
    suites: int
    found: int
    others: int
    by_mean: int

    @property
    def share(self) -> float:
        """The share of suites in which it was found."""
        return self.found / self.suites


@dataclass(frozen=True)
class Seen:
    """For each name the least slowdown that would have been found: the median over suites.

    ``screen``: by the screen; ``confirm``: by the confirmation of a single cell.
    """

    screen: tuple[float, ...]
    confirm: tuple[float, ...]


@dataclass(frozen=True)
class Misbehaved:
    """In how many suites the gate's own controls make it invalid."""

    suites: int
    deaf: int
    unlike: int


def enough(logs: Logs, settings: Settings) -> bool:
    """Whether there are cells, and replicates for a suite."""
    return bool(logs.names) and logs.replicates >= settings.screen + settings.confirm


def draws(count: int, replicates: int, settings: Settings, *, swapped: bool = True) -> Iterator[Draw]:
    """Yield suites, the same ones each time."""
    rng = np.random.default_rng(SEED)
    last = settings.screen + settings.confirm
    for _ in range(count):
        order = rng.permutation(replicates)
        signs = rng.choice((-1.0, 1.0), replicates)
        yield Draw(
            screen=order[: settings.screen],
            confirm=order[settings.screen : last],
            signs=signs if swapped else np.ones(replicates),
        )


def judged(
    draw: Draw,
    cells: Logs,
    settings: Settings,
    *,
    slower: Floats | float = 0.0,
    beside: Logs | None = None,
) -> Suite:
    """Judge a suite.

    Args:
        draw: which one.
        cells: the same work in both arms.
        settings: by which rule.
        slower: what is added to the logs of head once it is known which arm that is.
        beside: cells that differ between the arms, which are therefore not swapped.

    """

    def taken(stage: Stage, place: NDArray[np.intp]) -> dict[str, list[float]]:
        rows = (cells.of(stage)[:, place] * draw.signs[place] + slower).tolist()
        found = dict(zip(cells.names, rows, strict=True))
        return found | (
            dict(zip(beside.names, beside.of(stage)[:, place].tolist(), strict=True)) if beside else {}
        )

    screen = taken("screen", draw.screen)
    names = to_confirm(screen, settings)
    again = {
        name: logs for name, logs in taken("confirm", draw.confirm).items() if name in names or MEAN in names
    }
    verdicts, mean = time_verdicts(screen, again, settings)
    assert mean is not None  # noqa: S101  # a whole screen has one
    return Suite(tuple(verdicts), mean, len(again))


def alarms(cells: Logs, settings: Settings, suites: int, *, swapped: bool = True) -> Alarms:
    """Judge suites in which nothing differs."""
    found = [
        judged(draw, cells, settings) for draw in draws(suites, cells.replicates, settings, swapped=swapped)
    ]
    return Alarms(
        suites=suites,
        cells=len(cells.names),
        alarmed=sum(one.exit_code == FAILED for one in found),
        by_mean=sum(one.mean.status == "FAIL" for one in found),
        failed=sum(len(one.failed) for one in found),
        inconclusive=sum(row.status == "INCONCLUSIVE" for one in found for row in one.verdicts),
        unclear=sum(one.exit_code == INVALID for one in found),
        kept=sum(one.kept for one in found) / suites,
    )


def shifted(cells: Logs, settings: Settings, slower: float, suites: int) -> Power:
    """Make one cell of each suite slower, chosen at random: is it found, and is another one named?"""
    rng = np.random.default_rng([SEED, 1])
    found = others = by_mean = 0
    for draw in draws(suites, cells.replicates, settings):
        place = int(rng.integers(len(cells.names)))
        shift = np.zeros((len(cells.names), 1))
        shift[place] = np.log1p(slower)
        suite = judged(draw, cells, settings, slower=shift)
        found += cells.names[place] in suite.failed
        others += bool(suite.failed - {cells.names[place]})
        by_mean += suite.mean.status == "FAIL"
    return Power(slower, suites, found, others, by_mean)


def everywhere(cells: Logs, settings: Settings, slower: float, suites: int) -> Power:
    """Make every cell slower: does the mean over cells find it, and is a cell named?"""
    found = named = 0
    for draw in draws(suites, cells.replicates, settings):
        suite = judged(draw, cells, settings, slower=float(np.log1p(slower)))
        found += suite.mean.status == "FAIL"
        named += bool(suite.failed)
    return Power(slower, suites, found, named, found)


def planted(cells: Logs, control: Logs, settings: Settings, more: float, suites: int) -> Power:
    """Judge work that really is more in head as one more cell: is it found, and is another one named?"""
    found = others = by_mean = 0
    for draw in draws(suites, cells.replicates, settings):
        suite = judged(draw, cells, settings, beside=control)
        found += control.names[0] in suite.failed
        others += bool(suite.failed - set(control.names))
        by_mean += suite.mean.status == "FAIL"
    return Power(more, suites, found, others, by_mean)


def misbehaved(controls: Sequence[Logs], settings: Settings, suites: int) -> Misbehaved:
    """Judge the controls as a gate judges its own: is it deaf, or are its arms unlike?"""
    deaf = unlike = 0
    for draw in draws(suites, controls[0].replicates, settings):
        confirm = {
            name: logs[draw.confirm].tolist()
            for one in controls
            for name, logs in zip(one.names, one.logs, strict=True)
        }
        _, reasons = control_verdicts(confirm, settings)
        missed = sum("planted" in reason for reason in reasons)
        deaf += bool(missed)
        unlike += len(reasons) > missed
    return Misbehaved(suites, deaf, unlike)


def seen(logs: Logs, settings: Settings, suites: int) -> Seen:
    """Return what could have been seen of each cell, were it judged alone, with its arms as measured."""
    every = list(draws(suites, logs.replicates, settings))
    first = [
        screened(dict(zip(logs.names, logs.screen[:, draw.screen].tolist(), strict=True)), settings)
        for draw in every
    ]
    return Seen(
        screen=tuple(median(found[name].mde for found in first) for name in logs.names),
        confirm=tuple(
            median(_alone(row[draw.confirm].tolist(), settings).mde for draw in every) for row in logs.logs
        ),
    )


def upper(count: int, total: int) -> float:
    """The upper end of a share at 95 %, exact for independent trials (Clopper and Pearson, 1934)."""
    return 1.0 if count == total else float(special.betaincinv(count + 1, total - count, CONFIDENCE))


def each(logs: Logs) -> Iterator[Logs]:
    """Yield every row by itself."""
    for place, name in enumerate(logs.names):
        yield Logs((name,), logs.logs[[place]], logs.variances[[place]], logs.screen[[place]])


def _alone(estimates: Sequence[float], settings: Settings) -> Bounds:
    return bounds(estimates, null=settings.margin, alpha=settings.alpha, power=settings.power)
