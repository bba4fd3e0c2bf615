"""What each variant of a run gives for its time: effective members per millisecond, on one case.

Time alone rewards schemes that throw the population away. Here a variant's worth is the number of
independent members that its gradient equals, over the time of everything that one update needs.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import msgspec

from esbench.records import QUALITY, Case, Measurement, Run, Skipped, Variant
from esbench.report.estimates import Estimate, Worth, estimate, kept, worth
from esbench.report.grid import LATENCY, PEAK, TIMES, UNMEASURED, Grid, grids
from esbench.report.words import listed
from esbench.statistics import Interval, Ratio, interval, median, round_medians

LINEAR, CLOSED, CURVED = "linear fitness", "closed form", "at sigma"
"""How kappa and the effective members were found."""
UNSEEN = "unseen"
"""What pairs of members that were not met may add to a fitted kappa."""
KAPPA, EFFECTIVE, NOISE = "kappa", "effective_members", "noise_bytes"
DENSE = "Perturbed"
"""The variant that others are compared with: an own Gaussian number for every weight of every member."""

_NS_PER_MS = 1e6


@dataclass(frozen=True)
class Qualities:
    """What a run says of quality, by variant and case."""

    run: Run

    def estimate(self, variant: Variant, case: Case, metric: str, method: str) -> Estimate | None:
        """The mean of a quality over its replicates, ``None`` where it has no number."""
        row = self._rows.get((variant, case, metric, method))
        return estimate(_replicates(row)) if row else None

    def effective(self, variant: Variant, case: Case, method: str) -> Worth | Skipped | None:
        """What the replicates of n_eff say together, or why that is no number."""
        row = self._rows.get((variant, case, EFFECTIVE, method))
        if row is None:
            return self.reason(variant, case, {method})
        try:
            return effective(row)
        except ValueError as error:
            return Skipped(
                variant=variant,
                case=case,
                phase=QUALITY,
                method=method,
                status="unavailable",
                reason=str(error),
            )

    def methods(self, case: Case, metric: str) -> list[str]:
        """The methods by which a quality of a case was found, in the order of the run."""
        return list(dict.fromkeys(key[3] for key in self._rows if key[1:3] == (case, metric)))

    def reason(self, variant: Variant, case: Case, methods: Collection[str]) -> Skipped | None:
        """Why a variant has no quality on a case: none at all, or none by one of these methods."""
        found = self._reasons.get((variant, case), ())
        return next((row for row in found if row.method is None or row.method in methods), None)

    def remarks(self, case: Case) -> list[str]:
        """What must be said of the rows of a case: those that the run holds again, with other figures."""
        again = dict.fromkeys(
            f"{key[0].label(case.operator)} {key[2]} ({key[3]})"
            for key, row in self._said
            if key[1] == case and row.samples != self._rows[key].samples
        )
        text = "more than once in the run with other figures, of which the first count"
        return [f"{text}: {listed(list(again))}"] if again else []

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """The cases with a quality, in the order of the run."""
        return tuple(dict.fromkeys(row.case for row in self._rows.values()))

    def variants(self, case: Case) -> tuple[Variant, ...]:
        """All variants of a case, in the order of the run, baselines last."""
        known = dict.fromkeys(row.variant for row in self.run.rows if row.case == case)
        return tuple(sorted(known, key=lambda variant: variant.baseline))

    @cached_property
    def _rows(self) -> dict[tuple[Variant, Case, str, str], Measurement]:
        found: dict[tuple[Variant, Case, str, str], Measurement] = {}
        for key, row in self._said:
            found.setdefault(key, row)
        return found

    @cached_property
    def _said(self) -> list[tuple[tuple[Variant, Case, str, str], Measurement]]:
        failed = {key for key, rows in self._reasons.items() if rows[0].status == "failed"}
        return [
            ((row.variant, row.case, row.metric, row.method), row)
            for row in self.run.measurements
            if row.phase == QUALITY and (row.variant, row.case) not in failed
        ]

    @cached_property
    def _reasons(self) -> dict[tuple[Variant, Case], list[Skipped]]:
        """The reasons, a failure first, then those that hold for everything."""
        found: dict[tuple[Variant, Case], list[Skipped]] = {}
        skipped = [row for row in self.run.skipped if row.phase in {None, QUALITY}]
        for row in sorted(skipped, key=lambda row: (row.status != "failed", row.method is not None)):
            found.setdefault((row.variant, row.case), []).append(row)
        return found


@dataclass(frozen=True)
class Standing:
    """What a variant gives on a case; ``None`` where the run has no such number.

    ``step_between`` is the 95 % interval of the time of a step, ``multiplier`` that time over base's.
    ``peak_bytes`` is the most of any of its phases. ``skipped`` says why there is no rate.
    """

    variant: Variant
    case: Case
    step_ns: float | None = None
    step_between: Interval | None = None
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
        """Effective members per millisecond of a step: what ranks variants."""
        if self.effective is None or not self.step_ns:
            return None
        return self.effective.value / (self.step_ns / _NS_PER_MS)

    @property
    def kept(self) -> str:
        """The percentage of its members that it keeps, as far as it is known, in words."""
        return kept(self.effective, self.case.members) if self.effective else "an unknown number"

    @property
    def rate_between(self) -> tuple[float, float] | None:
        """Between what its rate lies, by the intervals of both, as far as there are any."""
        if self.effective is None or not self.step_ns:
            return None
        slow, fast = (
            (self.step_between.high, self.step_between.low)
            if self.step_between
            else (self.step_ns, self.step_ns)
        )
        most = self.effective.high / fast if fast > 0 else math.inf
        return self.effective.low / slow * _NS_PER_MS, most * _NS_PER_MS

    def alike(self, others: Iterable["Standing"]) -> str:
        """Which others may have the better rate, as far as intervals tell; nothing where none may."""
        here = self.rate_between
        met = [
            one.variant.label(one.case.operator)
            for one in others
            if one != self and here and (there := one.rate_between) and there[1] >= here[0]
        ]
        return f"not told apart from {listed(met)}" if met else ""

    def times(self, other: "Standing | None") -> float | None:
        """How many times the other's rate this one's is."""
        below = other.rate if other else None
        return self.rate / below if self.rate is not None and below and below > 0 else None


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

    def of(self, case: Case) -> list[Standing]:
        """The variants of a case, the best first; behind them those without a number."""
        found = [self._standing(variant, case) for variant in self.qualities.variants(case)]
        ranked = sorted((one for one in found if one.rate is not None), key=lambda one: -(one.rate or 0.0))
        return [*ranked, *(one for one in found if one.rate is None)]

    def _standing(self, variant: Variant, case: Case) -> Standing:
        step, found = self.grid.at(variant, case), self.qualities.effective(variant, case, LINEAR)
        return Standing(
            variant,
            case,
            step_ns=median(step) if isinstance(step, Measurement) else None,
            step_between=_between(step) if isinstance(step, Measurement) else None,
            multiplier=self.grid.multiplier(variant, case, "base"),
            effective=found if isinstance(found, Worth) else None,
            kappa=self.qualities.estimate(variant, case, KAPPA, LINEAR),
            noise_bytes=self._bytes.get((variant, case, NOISE)),
            peak_bytes=self._bytes.get((variant, case, PEAK)),
            skipped=next((one for one in (step, found) if isinstance(one, Skipped)), None),
        )

    @cached_property
    def _bytes(self) -> dict[tuple[Variant, Case, str], float]:
        """The most bytes of any phase."""
        found: dict[tuple[Variant, Case, str], float] = {}
        for row in self.grid.run.measurements:
            value = median(row) if row.metric in {NOISE, PEAK} else None
            if value is not None:
                key = (row.variant, row.case, row.metric)
                found[key] = max(value, found.get(key, 0.0))
        return found


def rankings(run: Run, operator: str) -> list[Rankings]:
    """The rankings of an operator that are not empty: for each number format and method of timing a step."""
    found = (
        Rankings(grid)
        for grid in grids(run, operator, TIMES)
        if (grid.phase, grid.metric) == ("step", LATENCY) and grid.method != UNMEASURED
    )
    return [one for one in found if one.cases]


def effective(row: Measurement) -> Worth:
    """n_eff and its interval, of a row with its replicates; by the mean of their reciprocals.

    Raises:
        ValueError: it is no number, see :func:`~esbench.report.estimates.worth`.

    """
    return worth(_replicates(row), row.case.members)


def _between(step: Measurement) -> Interval | None:
    return interval([value for value in round_medians(step) if value is not None])


def quality(row: Measurement) -> float | None:
    """The figure of a row of quality that pages show, ``None`` where there is none."""
    if row.metric == EFFECTIVE:
        try:
            return effective(row).value
        except ValueError:
            return None
    found = estimate(_replicates(row))
    return found.mean if found else None


def _replicates(row: Measurement) -> list[float]:
    return [sample for visit in row.samples for sample in visit]


def dense(standings: Iterable[Standing]) -> Standing | None:
    """The one that others are compared with, where the run holds it."""
    return next((one for one in standings if one.variant.name == DENSE), None)
