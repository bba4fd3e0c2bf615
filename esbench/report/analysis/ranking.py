"""What each variant of a run gives for its time: effective members per millisecond, on one case.

Time alone rewards schemes that throw the population away. Here a variant's worth is the number of
independent members that its gradient equals, over the time of everything that one update needs.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from esbench.report.analysis.pivot import LATENCY, PEAK, TIMES, UNMEASURED, Grid, grids
from esbench.report.analysis.quality import ALONE, EXACT, Estimate, Part, Qualities, Worth, kept
from esbench.report.analysis.run_selection import flaws
from esbench.report.text import listed
from esbench.schema import Case, Measurement, Run, Skipped, Variant
from esbench.stats import Interval, Ratio, interval, median, round_medians
from esbench.units import format_number

NOISE = "noise_bytes"


DENSE = "Perturbed"
"""The variant that others are compared with: an own Gaussian number for every weight of every member."""


_NS_PER_MS = 1e6


_FEWEST_ROUNDS = 2
"""On a single round no multiple rests that anybody should quote: the machine may have been busy in it."""


_LISTED = 4
"""Of more names than these only so many are said."""


@dataclass(frozen=True)
class RankedVariant:
    """What a variant gives on a case; ``None`` where the run has no such number.

    ``step_between`` is the 95 % interval of the time of a step, of so many ``rounds``; ``multiplier`` is that
    time over base's.
    ``peak_bytes`` is the most of any of its phases. ``skipped`` says why there is no rate.
    """

    variant: Variant
    case: Case
    step_ns: float | None = None
    step_between: Interval | None = None
    rounds: int = 0
    multiplier: Ratio | None = None
    effective: Worth | None = None
    kappa: Estimate | None = None
    noise_bytes: float | None = None
    peak_bytes: float | None = None
    skipped: Skipped | None = None

    @property
    def share(self) -> float | None:
        """Effective members as a part of all: 1 where none is lost."""
        return self.effective.value / self.case.members if self.effective else None

    @property
    def rate(self) -> float | None:
        """Effective members per millisecond of a step: what ranks variants; infinite if they are exact."""
        if self.effective is None or not self.step_ns or not (ms := self.step_ns / _NS_PER_MS):
            return None
        return self.effective.value / ms

    @property
    def is_exact(self) -> bool:
        """Whether it finds a linear fitness's gradient without error: it ranks before all that do not."""
        return self.rate is not None and math.isinf(self.rate)

    @property
    def rate_between(self) -> tuple[float, float] | None:
        """The ends of the rate, by those of n_eff and of the step; ``None`` where one is not known."""
        known = self.effective and (not self.effective.replicates or math.isfinite(self.effective.high))
        if self.effective is None or not known or self.step_between is None or self.is_exact:
            return None
        low, high = self.step_between.low, self.step_between.high
        if low <= 0:
            return None
        return self.effective.low / (high / _NS_PER_MS), self.effective.high / (low / _NS_PER_MS)

    @property
    def rate_in_words(self) -> str:
        """The rate as tables and sentences have it, with what is known of it where that is only a bound."""
        if self.is_exact:
            return EXACT
        least = "at least " if self.effective and self.effective.is_bound else ""
        between = self.rate_between
        half = max(between[1] - self.rate, self.rate - between[0]) if between and self.rate else None
        return f"{least}{format_number(self.rate, half)}"

    @property
    def kept(self) -> str:
        """The percentage of its members that it keeps, as far as it is known, in words."""
        return kept(self.effective, self.case.members) if self.effective else "an unknown number"

    def alike(self, others: Iterable["RankedVariant"]) -> str:
        """Which others may have the better rate, as far as intervals tell; nothing where none may."""
        here = self.reach
        met = [
            one.variant.label(one.case.operator)
            for one in others
            if one != self and here and (there := one.reach) and there[1] >= here[0]
        ]
        return f"not told apart from {listed(met)}" if met else ""

    @property
    def reach(self) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """The worst and the best that its rate may be, by all intervals; of equal rates time decides."""
        if self.effective is None or not self.step_ns:
            return None
        step = self.step_between
        fast, slow = (step.low, step.high) if step else (self.step_ns, self.step_ns)
        most = self.effective.high / fast if fast > 0 else math.inf
        return (self.effective.low / slow, -slow), (most, -fast)

    @property
    def is_single(self) -> bool:
        """Whether its time was taken in fewer rounds than a multiple needs."""
        return self.rounds < _FEWEST_ROUNDS

    def times(self, other: "RankedVariant | None") -> float | None:
        """How many times the other's rate this one's is, where both are finite and of more than one round."""
        if other is None or self.is_single or other.is_single:
            return None
        below = other.rate
        if self.rate is None or self.is_exact or not below or below < 0 or math.isinf(below):
            return None
        return self.rate / below


@dataclass(frozen=True)
class Rankings:
    """The variants of a run by effective members per millisecond, for each case.

    Attributes:
        grid: the times of a step, by the method that is to count.

    """

    grid: Grid

    @cached_property
    def qualities(self) -> Qualities:
        """What the run says of quality."""
        return Qualities(self.grid.run)

    @cached_property
    def cases(self) -> list[Case]:
        """The columns of the grid on which anything has a rate."""
        known = set(self.qualities.cases)
        cases = (case for case in self.grid.cases if case in known)
        return [case for case in cases if any(one.rate is not None for one in self.of(case))]

    @cached_property
    def largest(self) -> list[Case]:
        """Of the cases that differ in nothing but the number of members, the largest that most could do."""
        families: dict[Case, list[Case]] = {}
        for case in self.cases:
            families.setdefault(msgspec.structs.replace(case, members=1), []).append(case)

        def worth(case: Case) -> tuple[int, int]:
            standings = self.of(case)
            numbers = sum(one.rate is not None for one in standings)
            return min(numbers, len(standings) // 2), case.members

        return [max(family, key=worth) for family in families.values()]

    def of(self, case: Case, part: Part = ALONE) -> list[RankedVariant]:
        """The variants of a case, the best first; behind them those without a number.

        Exact estimates, whose rate is infinite, stand in the order of their time. ``part`` is the case's in a
        network.
        """
        found = [self._standing(variant, case, part) for variant in self.qualities.variants(case)]
        ranked = sorted(
            (one for one in found if one.rate is not None),
            key=lambda one: (-(one.rate or 0.0), one.step_ns),
        )
        return [*ranked, *(one for one in found if one.rate is None)]

    def _standing(self, variant: Variant, case: Case, part: Part) -> RankedVariant:
        step, (kappa, found) = self.grid.at(variant, case), self.qualities.law(variant, case, part)
        return RankedVariant(
            variant,
            case,
            step_ns=median(step) if isinstance(step, Measurement) else None,
            step_between=_between(step) if isinstance(step, Measurement) else None,
            rounds=len(step.samples) if isinstance(step, Measurement) else 0,
            multiplier=self.grid.multiplier(variant, case, "base"),
            effective=found if isinstance(found, Worth) else None,
            kappa=kappa,
            noise_bytes=self._bytes(variant, case, NOISE),
            peak_bytes=self._bytes(variant, case, PEAK),
            skipped=next((one for one in (step, found) if isinstance(one, Skipped)), None),
        )

    def step(self, variant: Variant, case: Case) -> Measurement | None:
        """The row with the times of a step, where there is one."""
        found = self.grid.at(variant, case)
        return found if isinstance(found, Measurement) else None

    def most(self, variant: Variant, case: Case, metric: str) -> Measurement | None:
        """The row of the phase with the most bytes."""
        return self._most.get((variant, case, metric))

    def _bytes(self, variant: Variant, case: Case, metric: str) -> float | None:
        row = self.most(variant, case, metric)
        return median(row) if row else None

    @cached_property
    def _most(self) -> dict[tuple[Variant, Case, str], Measurement]:
        found: dict[tuple[Variant, Case, str], Measurement] = {}
        most: dict[tuple[Variant, Case, str], float] = {}
        for row in self.grid.run.measurements:
            value = median(row) if row.metric in {NOISE, PEAK} else None
            key = (row.variant, row.case, row.metric)
            if value is not None and (key not in most or value > most[key]):
                most[key], found[key] = value, row
        return found


def rankings(run: Run, operator: str) -> list[Rankings]:
    """The rankings of an operator that are not empty: for each number format and method of timing a step."""
    found = (
        Rankings(grid)
        for grid in grids(run, operator, TIMES)
        if (grid.phase, grid.metric) == ("step", LATENCY) and grid.method != UNMEASURED
    )
    return [one for one in found if one.cases]


def _between(step: Measurement) -> Interval | None:
    return interval([value for value in round_medians(step) if value is not None])


def dense(standings: Iterable[RankedVariant]) -> RankedVariant | None:
    """The one that others are compared with, where the run holds it."""
    return next((one for one in standings if one.variant.name == DENSE), None)


@dataclass(frozen=True)
class Holding:
    """What a run holds of a case: a ranking, and of it the variants that were asked for."""

    run: Run
    ranking: Rankings
    standings: tuple[RankedVariant, ...]

    @property
    def ranked(self) -> list[Variant]:
        """The variants with a rate."""
        return [one.variant for one in self.standings if one.rate is not None]

    @property
    def is_valid(self) -> bool:
        """Whether its figures may be used."""
        return not (self.run.end and self.run.end.invalid)

    def answers(self, variants: Collection[Variant] | None) -> bool:
        """Whether it says all that was asked: of these variants a number or a reason, or of a whole suite."""
        if variants is None:
            return not any(flaws(self.run))
        said = {one.variant for one in self.standings if one.rate is not None or one.skipped}
        return self.is_valid and said >= set(variants)


def holdings(
    runs: Sequence[Run], case: Case, variants: Collection[Variant] | None, part: Part = ALONE
) -> list[Holding]:
    """What the runs hold of a case, the newest first; a run that says nothing of the variants is left out.

    ``part`` is what the case is of a network.
    """
    found = []
    for run in sorted(runs, key=lambda run: run.header.run_id, reverse=True):
        ranking = next((one for one in rankings(run, case.operator) if case in one.cases), None)
        if ranking is None:
            continue
        wanted = tuple(one for one in ranking.of(case, part) if variants is None or one.variant in variants)
        if wanted:
            found.append(Holding(run, ranking, wanted))
    return found


def choose(found: Sequence[Holding], variants: Collection[Variant] | None) -> tuple[Holding, str]:
    """The holding to answer from, and a line on those that were passed over, empty where none was.

    It is the newest that answers all; where none does, the one with the most ranked variants, of these the
    newest. One that ranks something goes before all that rank nothing, and a valid one before invalid ones.

    Args:
        found: at least one, the newest first.
        variants: those that were asked for; without them a run of a whole suite answers all.

    """

    def worth(one: Holding) -> tuple[bool, bool, bool, int]:
        whole = one.answers(variants)
        return one.is_valid, bool(one.ranked), whole, 0 if whole else len(one.ranked)

    chosen = max(found, key=worth)  # of equals the first, which is the newest
    newer = found[: found.index(chosen)]
    older = [one for one in found[len(newer) + 1 :] if not set(one.ranked) <= set(chosen.ranked)]
    others = [f"newer {_holds(one)}" for one in newer] + [f"older {_holds(one)}" for one in older]
    shown = f"shows run {chosen.run.header.run_id}, which ranks {_count(chosen)}"
    return chosen, f"{shown}; passed over: {'; '.join(others)}" if others else ""


def names(variants: Collection[Variant]) -> str:
    """Names of variants, the first few of many."""
    listed = [variant.name for variant in variants]
    rest = len(listed) - _LISTED
    return ", ".join(listed[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _holds(one: Holding) -> str:
    why = " and ".join(flaws(one.run))
    return f"{one.run.header.run_id} ranks {_count(one)}" + (f", it {why}" if why else "")


def _count(one: Holding) -> str:
    return f"{len(one.ranked)} ({names(one.ranked)})" if one.ranked else "nothing"
