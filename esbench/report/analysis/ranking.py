"""Variants ranked by effective population per millisecond of a step.

Time alone rewards schemes that waste most of the population. The rate is n_eff, the number of independent
members that would give as good a gradient, over the time of everything that one update takes.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

import msgspec

from esbench.report.analysis import pivot
from esbench.report.analysis.load import reasons_unreliable
from esbench.report.analysis.pivot import PEAK, Grid, largest_populations, latency_grids, operators
from esbench.report.analysis.quality import ALONE, EffectiveSize, Estimate, Part, Qualities
from esbench.report.analysis.roofline import impossible_results
from esbench.report.analysis.run_selection import reasons_unusable
from esbench.schema import DENSE, WRONG_RESULT, Case, Measurement, Run, Skipped, Variant
from esbench.stats import Interval, Ratio, interval, median, round_medians
from esbench.units import format_value

NOISE = "noise_bytes"
_NS_PER_MS = 1e6
_SMALL_SHARE = 0.1
"""Variants that keep a smaller share of their members are named below tables."""
_FEWEST_ROUNDS = 2
"""Rounds that a multiple needs: a single round may have been disturbed."""


@dataclass(frozen=True)
class RankedVariant:
    """A variant on a case with the rows of its rate; None where the run has no such row or number.

    Attributes:
        effective, kappa: n_eff and kappa with their intervals.
        multiplier: the time of a step over that of base.
        step: the row with the times of a step.
        noise: the row with the noise of a step in bytes.
        peak: the row with the largest peak of any phase in bytes.
        rows_of_law: the rows that kappa and n_eff are computed from.
        skipped: the row with the reason for the missing rate.
    """

    variant: Variant
    case: Case
    effective: EffectiveSize | None = None
    kappa: Estimate | None = None
    multiplier: Ratio | None = None
    step: Measurement | None = None
    noise: Measurement | None = None
    peak: Measurement | None = None
    rows_of_law: tuple[Measurement, ...] = ()
    skipped: Skipped | None = None

    @property
    def label(self) -> str:
        """The variant with its operator."""
        return self.variant.label(self.case.operator)

    @cached_property
    def step_ns(self) -> float | None:
        """The median time of a step."""
        return median(self.step) if self.step else None

    @cached_property
    def step_interval(self) -> Interval | None:
        """The 95 % interval of the time of a step."""
        return interval(round_medians(self.step)) if self.step else None

    @property
    def peak_bytes(self) -> float | None:
        """The largest peak of any phase."""
        return median(self.peak) if self.peak else None

    @property
    def share(self) -> float | None:
        """n_eff / n."""
        return self.effective.value / self.case.members if self.effective else None

    @property
    def wastes_members(self) -> bool:
        """Whether n_eff / n is known to be below a tenth."""
        return self.share is not None and self.share < _SMALL_SHARE

    @property
    def rate(self) -> float | None:
        """n_eff per millisecond of a step; infinite for an exact estimate."""
        if self.skipped or self.effective is None or not self.step_ns:
            return None
        return self.effective.value / (self.step_ns / _NS_PER_MS)

    @property
    def evaluated_per_ms(self) -> float:
        """The members per millisecond of a step, 0 if its time is unknown."""
        return self.case.members / (self.step_ns / _NS_PER_MS) if self.step_ns else 0.0

    @property
    def is_candidate(self) -> bool:
        """Whether it has a rate and is no baseline."""
        return self.rate is not None and not self.variant.baseline

    @property
    def is_exact(self) -> bool:
        """Whether the gradient of a linear fitness is found without error: ranked before all others."""
        return self.rate is not None and math.isinf(self.rate)

    @property
    def rate_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the rate, from those of n_eff and the step; None if one is unknown."""
        n_eff, step = self.effective, self.step_interval
        if n_eff is None or step is None or step.low <= 0 or self.is_exact:
            return None
        if n_eff.replicates and math.isinf(n_eff.high):
            return None  # the replicates set no upper end
        return n_eff.low / (step.high / _NS_PER_MS), n_eff.high / (step.low / _NS_PER_MS)

    @property
    def bounds(self) -> "Bounds | None":
        """The lower and upper bounds of the sort key (n_eff per ns, -step time in ns), at 95 %.

        The time in the key sorts exact variants, whose n_eff per ns is infinite.
        """
        if self.rate is None or self.effective is None or self.step_ns is None:
            return None
        step = self.step_interval
        fast, slow = (step.low, step.high) if step else (self.step_ns, self.step_ns)
        highest_rate = self.effective.high / fast if fast > 0 else math.inf
        return (self.effective.low / slow, -slow), (highest_rate, -fast)

    @property
    def is_single(self) -> bool:
        """Whether the step has at most one round, too few to compare its rate with that of others."""
        return self.step is None or len(self.step.samples) < _FEWEST_ROUNDS

    def rate_over(self, reference: "RankedVariant | None") -> float | None:
        """Return this rate over that of a reference; None if one is not finite or from a single round."""
        if reference is None or self.is_single or reference.is_single:
            return None
        if self.rate is None or self.is_exact or reference.is_exact:
            return None
        return self.rate / reference.rate if reference.rate and reference.rate > 0 else None


@dataclass(frozen=True)
class Rankings:
    """The variants of a run ranked on each case.

    Attributes:
        grid: the times of a step by one method.
        history: stored runs, in which base was not much faster where the run is reliable.
    """

    grid: Grid
    history: tuple[Run, ...] = ()

    @cached_property
    def qualities(self) -> Qualities:
        """The quality rows of the run."""
        return Qualities(self.grid.run)

    @cached_property
    def cases(self) -> list[Case]:
        """The columns of the grid on which any variant has a rate, or would have one without load."""
        known = set(self.qualities.cases)
        cases = (case for case in self.grid.cases if case in known)
        return [
            case
            for case in cases
            if case in self.unreliable or any(ranked.rate is not None for ranked in self.of(case))
        ]

    @cached_property
    def unreliable(self) -> dict[Case, str]:
        """The cases on which nothing is ranked because of load -> the reason."""
        return reasons_unreliable(self.grid.run, self.history)

    @cached_property
    def largest(self) -> list[Case]:
        """One case of each shape: the largest population at which at least half the variants have a rate.

        If there is none, it is the population with the most rates.
        """

        def rates_up_to_half(case: Case) -> int:
            ranked = self.of(case)
            return min(sum(entry.rate is not None for entry in ranked), len(ranked) // 2)

        return largest_populations(self.cases, rates_up_to_half)

    @cached_property
    def main(self) -> Case | None:
        """The case for a single picture: the largest population at which dense noise has a rate, else any."""
        compared = [case for case in self.cases if (noise := dense(self.of(case))) and noise.rate is not None]
        return max(compared or self.largest, key=lambda case: case.members, default=None)

    def of(self, case: Case, part: Part = ALONE) -> list[RankedVariant]:
        """Return the variants of a case, best rate first, those without a rate last.

        Exact estimates, whose rate is infinite, are sorted by time. ``part`` is the case in its network.
        """
        if (case, part) not in self._ranked_cases:
            self._ranked_cases[case, part] = self._rank(case, part)
        return list(self._ranked_cases[case, part])

    @cached_property
    def _ranked_cases(self) -> dict[tuple[Case, Part], list[RankedVariant]]:
        """The cases ranked so far, because a report asks for each of them several times."""
        return {}

    def _rank(self, case: Case, part: Part) -> list[RankedVariant]:
        variants = [self._ranked(variant, case, part) for variant in self.qualities.variants(case)]
        ranked = sorted(
            (entry for entry in variants if entry.rate is not None),
            key=lambda entry: (-(entry.rate or 0.0), entry.step_ns),
        )
        return [*ranked, *(entry for entry in variants if entry.rate is None)]

    def _ranked(self, variant: Variant, case: Case, part: Part) -> RankedVariant:
        kappa, effective = self.qualities.law(variant, case, part)
        cell = self.grid.at(variant, case)
        return RankedVariant(
            variant,
            case,
            effective=effective if isinstance(effective, EffectiveSize) else None,
            kappa=kappa,
            multiplier=self.grid.multiplier(variant, case, "base"),
            step=cell if isinstance(cell, Measurement) else None,
            noise=self._largest_rows.get((variant, case, NOISE)),
            peak=self._largest_rows.get((variant, case, PEAK)),
            rows_of_law=self.qualities.rows_of_law(variant, case),
            skipped=next((row for row in (cell, effective) if isinstance(row, Skipped)), None)
            or self._failed.get((variant, case))
            or self._loaded(variant, case),
        )

    @cached_property
    def _failed(self) -> dict[tuple[Variant, Case], Skipped]:
        """The reasons of variants with an impossible number, or with a wrong result in any phase.

        Such a variant has no rank, even if its step is right.
        """
        run = self.grid.run
        failed = {
            (variant, case): Skipped(
                variant=variant, case=case, phase="step", status="failed", reason=f"impossible: {reason}"
            )
            for (variant, case), reason in impossible_results(run).items()
        }
        for row in run.skipped:
            if row.reason.startswith(WRONG_RESULT):
                reason = f"{row.phase}: {row.reason}"
                failed[row.variant, row.case] = msgspec.structs.replace(row, reason=reason)
        return failed

    def _loaded(self, variant: Variant, case: Case) -> Skipped | None:
        if not (reason := self.unreliable.get(case)):
            return None
        return Skipped(variant=variant, case=case, phase="step", status="unavailable", reason=reason)

    @cached_property
    def _largest_rows(self) -> dict[tuple[Variant, Case, str], Measurement]:
        """The rows of noise memory and peak memory; of several phases, the one with the most bytes."""
        rows = (row for row in self.grid.run.measurements if row.metric in {NOISE, PEAK})
        known = sorted((row for row in rows if median(row) is not None), key=lambda row: median(row) or 0.0)
        # The last of equal keys counts.
        return {(row.variant, row.case, row.metric): row for row in known}


def rankings(run: Run, operator: str, history: Iterable[Run] = ()) -> list[Rankings]:
    """Return the non-empty rankings of an operator, one per dtype and timing method of a step.

    ``history`` are stored runs, with which base is compared to find load.
    """
    stored = tuple(history)
    steps = (grid for grid in latency_grids(run, operator) if grid.phase == "step")
    all_rankings = (Rankings(grid, stored) for grid in steps if grid.method != pivot.UNMEASURED)
    return [ranking for ranking in all_rankings if ranking.cases]


def dense(ranked: Iterable[RankedVariant]) -> RankedVariant | None:
    """Return dense noise, the reference for the other variants, or None if it is absent."""
    return next((entry for entry in ranked if entry.variant.name == DENSE), None)


def best_of_each_scheme(ranked: Sequence[RankedVariant]) -> list[RankedVariant]:
    """Return the best variant of each scheme that has a rate, best first.

    A fused kernel counts as its scheme. Dense noise is represented by the variant without options.
    """
    best: dict[str, RankedVariant] = {}
    for entry in ranked:
        scheme = entry.variant.unfused_scheme
        if entry.is_candidate and (scheme != DENSE or entry.variant.name == DENSE):
            best.setdefault(scheme, entry)
    return list(best.values())


Bounds = tuple[tuple[float, float], tuple[float, float]]
"""The lower and the upper bound of a sort key (n_eff per ns, -step time in ns)."""


class _Candidate(Protocol):
    @property
    def is_exact(self) -> bool: ...
    @property
    def bounds(self) -> Bounds | None: ...


_C = TypeVar("_C", bound=_Candidate)


def recommended(candidates: Sequence[_C]) -> list[_C]:
    """Return the first of the sorted candidates, and if it is exact also the first that is not.

    ``recommend``, the report page and the README's table of the best schemes all name these.
    """
    finite = [candidate for candidate in candidates if not candidate.is_exact][:1]
    return [candidates[0], *finite] if candidates and candidates[0].is_exact else finite


def tied(best: _C, others: Iterable[_C]) -> list[_C]:
    """Return the others whose upper bound reaches the lower bound of the best.

    If the best is exact, only exact ones can be tied with it; otherwise only those that are not exact.
    ``recommend``, the report page, titles of figures and the README's table of the best schemes name these.
    """
    if best.bounds is None:
        return []
    lower_bound, _ = best.bounds
    return [
        candidate
        for candidate in others
        if candidate != best and candidate.is_exact == best.is_exact
        if candidate.bounds is not None and candidate.bounds[1] >= lower_bound
    ]


def tied_schemes(best: RankedVariant, others: Iterable[RankedVariant]) -> str:
    """Return ``"tied with Hadamard"`` or ``"tied with 3 other schemes"``, or ``""`` if no scheme is tied."""
    equals = [entry.variant for entry in tied(best, others) if not entry.variant.baseline]
    schemes = {variant.unfused_scheme: variant.name for variant in equals}
    schemes.pop(best.variant.unfused_scheme, None)
    if len(schemes) == 1:
        return f"tied with {schemes.popitem()[1]}"
    return f"tied with {len(schemes)} other schemes" if schemes else ""


@dataclass(frozen=True)
class Recommendation:
    """The ranking of a case in one run, to choose a variant from.

    Attributes:
        ranking: the rankings of the run.
        variants: the candidates, best rate first; those above the memory limit have no rate.
        part: the share of the case in the network that it is a layer of.
    """

    ranking: Rankings
    case: Case
    variants: tuple[RankedVariant, ...]
    part: Part = ALONE

    @property
    def run(self) -> Run:
        """The run that was chosen."""
        return self.ranking.grid.run

    @property
    def ranked(self) -> list[RankedVariant]:
        """The variants with a rate, best first."""
        return [entry for entry in self.variants if entry.rate is not None]

    @property
    def reference(self) -> RankedVariant | None:
        """Dense noise in the run, also if it is no candidate; None if it has no rate."""
        return dense(entry for entry in self.ranking.of(self.case, self.part) if entry.rate is not None)

    @property
    def recommended(self) -> list[RankedVariant]:
        """The best scheme and, if that is exact, the best other one; empty if no scheme has a rate."""
        return recommended([entry for entry in self.variants if entry.is_candidate])


def recommend(
    runs: Iterable[Run],
    case: Case,
    *,
    variants: Collection[Variant] | None = None,
    limit_bytes: float | None = None,
    part: Part = ALONE,
) -> Recommendation | None:
    """Rank the variants on a case by the run that measured it best.

    A run with any rate is preferred, then a usable run, then one with more rates, then a newer one.

    Args:
        runs: runs of one device.
        case: the case.
        variants: the candidates, by default all.
        limit_bytes: variants whose noise or peak memory is larger, or unknown, get no rate.
        part: the layer's share of its network; by default it is a network of its own.

    Returns:
        The ranking, or None if no run ranks any of the candidates on this case.
    """
    candidates, history = [], tuple(runs)
    for run in history:
        ranking = next(
            (by_method for by_method in rankings(run, case.operator, history) if case in by_method.cases),
            None,
        )
        all_ranked = ranking.of(case, part) if ranking else []
        chosen = tuple(ranked for ranked in all_ranked if variants is None or ranked.variant in variants)
        if ranking and chosen:
            candidates.append(Recommendation(ranking, case, chosen, part))

    def key(candidate: Recommendation) -> tuple[bool, bool, int, str]:
        is_usable = not any(reasons_unusable(candidate.run))
        return bool(candidate.ranked), is_usable, len(candidate.ranked), candidate.run.header.run_id

    best = max(candidates, key=key, default=None)
    if best is None or limit_bytes is None:
        return best
    limited = (_limited(ranked, limit_bytes) for ranked in best.variants)
    return replace(best, variants=tuple(sorted(limited, key=lambda ranked: ranked.rate is None)))


def _limited(ranked: RankedVariant, limit_bytes: float) -> RankedVariant:
    """Return the variant; without its rate if it exceeds the memory limit or its memory is unknown."""
    sizes = {"noise": median(ranked.noise) if ranked.noise else None, "peak": ranked.peak_bytes}
    refused = [
        f"{name} {'unknown' if size is None else format_value(NOISE, size)}"
        for name, size in sizes.items()
        if size is None or size > limit_bytes
    ]
    if ranked.rate is None or not refused:
        return ranked
    reason = f"memory limit {format_value(NOISE, limit_bytes)}: {' and '.join(refused)}"
    skipped = Skipped(
        variant=ranked.variant, case=ranked.case, phase=None, status="unavailable", reason=reason
    )
    return replace(ranked, skipped=skipped)


def nearest(runs: Iterable[Run], case: Case) -> Case | None:
    """Return the ranked case nearest in size to a case, of the same operator if there is one."""

    def distance(ranked: Case) -> tuple[bool, float, str]:
        sizes = [(sized.out_channels, sized.in_channels, sized.members) for sized in (case, ranked)]
        of_sizes = sum(abs(math.log(a / b)) for a, b in zip(*sizes, strict=True))
        return ranked.operator != case.operator, of_sizes, ranked.label

    found = (ranking for run in runs for operator in operators(run) for ranking in rankings(run, operator))
    known = {ranked_case for ranking in found for ranked_case in ranking.cases}
    return min(known, key=distance, default=None)
