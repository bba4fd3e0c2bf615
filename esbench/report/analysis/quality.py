"""Quality of the gradient: kappa and n_eff of each variant, with intervals, from the replicates of a run.

The quality law: for a locally linear fitness the estimate of n members has cos^2 = 1 / (1 + kappa + d / n)
with the true gradient of d entries, the same as n_eff = n / (1 + kappa n / d) independent members. kappa
depends on the scheme alone.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from esbench.schema import DENSE, QUALITY, Case, Measurement, Run, Skipped, Variant
from esbench.units import format_number

LARGEST_GAIN = 100.0
"""Above this n_eff / n, the error of the cosine hides its distance to 1: n_eff is a lower bound."""
ROUNDING = 1e-9
"""Rounding error of d + kappa n, relative to d."""
_SHARE_ROUNDING = 0.0005
"""A share above 1 by less than this is shown as 100 %."""
EXACT = "exact"
"""The text for an infinite n_eff: an estimate without error for a linear fitness."""
ABOUT_ALL, MORE_THAN_DENSE = "about 100 %", "more than dense"
"""The texts for a share n_eff / n above 1: its interval includes 1, or is above it."""
LINEAR, CLOSED, CURVED = "linear fitness", "closed form", "at sigma"
"""The methods that kappa and n_eff are computed by."""
UNSEEN = "unseen"
"""The method of a bound: how much pairs of members that were not sampled may add to a fitted kappa."""
KAPPA, EFFECTIVE = "kappa", "effective_members"
LARGEST, ONE_WEIGHT = "largest_change", "one weight"
"""The metric, and its method, of the largest change of a weight in units of sigma: max |E_ij|."""
FAR = 3.0
"""A largest change counts as far if it is this multiple of dense noise's."""
RELATIVE, ABSOLUTE = 0.05, 0.02
"""A fitted kappa agrees with its closed form up to the larger of these tolerances."""
CONTRADICTED = "NO"


@dataclass(frozen=True)
class Estimate:
    """The mean of independent replicates; ``half`` is half its 95 % interval, None for a single replicate."""

    mean: float
    half: float | None
    replicates: int

    @property
    def reach(self) -> float:
        """Half the interval, 0 if it is unknown."""
        return self.half or 0.0


@dataclass(frozen=True)
class EffectiveSize:
    """An effective population size n_eff and its 95 % interval.

    The interval is not symmetric. ``high`` is infinite if the replicates set no upper end. For a single
    replicate, and for a closed form (0 ``replicates``), both ends equal the value. If the cosine is 1 within
    its error, the value is the lower end.
    """

    value: float
    low: float
    high: float
    replicates: int

    @property
    def is_exact(self) -> bool:
        """Whether the estimate equals the gradient of a linear fitness: n_eff is infinite."""
        return math.isinf(self.value)

    @property
    def is_bound(self) -> bool:
        """Whether the value is only a lower bound."""
        return math.isfinite(self.value) and self.value == self.low and math.isinf(self.high)


class KappaFit(NamedTuple):
    """A fitted kappa, its closed form, and how much pairs of members that were not sampled may add to it."""

    fitted: Estimate
    closed: Estimate
    unseen: float = math.inf

    @property
    def verdict(self) -> str:
        """Whether the fit agrees with the closed form, see :func:`agrees`."""
        return agrees(self.fitted, self.closed.mean, self.unseen)


class Part(NamedTuple):
    """The numbers of perturbed weights of a layer and of its network."""

    own: int = 1
    whole: int = 1

    @property
    def share(self) -> float:
        """The layer's share of the network's d."""
        return self.own / self.whole


ALONE = Part()
"""A layer that is the whole network."""


class Law(NamedTuple):
    """The most reliable kappa of a variant on a case, and its n_eff by the quality law."""

    kappa: Estimate | None
    effective: EffectiveSize | Skipped | None


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of replicates with Student's interval; None if empty or not finite."""
    if not values or not np.isfinite(values).all():
        return None
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return Estimate(mean, None, count)
    if min(values) == max(values):
        return Estimate(values[0], 0.0, count)  # exactly, without the rounding errors of mean and deviation
    from scipy.special import stdtrit  # noqa: PLC0415  # slow to import

    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(mean, float(stdtrit(count - 1, 0.975)) * error, count)


def n_eff_by_law(kappa: float, members: int, weights: float) -> EffectiveSize | None:
    """Return n_eff = n / (1 + kappa n / d) of a closed form; None if d + kappa n is below 0.

    ``weights`` is d. The law neglects (1 + kappa) / n in 1 / cos^2, which is an error of 1 + kappa in
    d + kappa n: a sum that is 0 within this error gives an infinite n_eff.
    """
    denominator, error = weights + kappa * members, max(1 + kappa, 0.0) + ROUNDING * weights
    if denominator < -error:
        return None
    value = members * weights / denominator if denominator > error else math.inf
    return EffectiveSize(value, value, value, 0)


def weights_by_law(kappas: Sequence[float], n_effs: Sequence[float], members: int) -> float | None:
    """Solve 1 / n_eff = 1 / n + kappa / d for d, by least squares over replicates; None if undetermined."""
    squares = sum(kappa**2 for kappa in kappas)
    if len(kappas) != len(n_effs) or not squares or 0.0 in n_effs:
        return None
    products = sum(kappa * (1 / n_eff - 1 / members) for kappa, n_eff in zip(kappas, n_effs, strict=True))
    return squares / products if products > 0 else None


def n_eff_of_replicates(values: Sequence[float], members: int, share: float = 1.0) -> EffectiveSize:
    """Combine replicates of n_eff: one over the mean of their reciprocals, with its interval.

    The reciprocal 1 / n_eff = 1 / n + kappa / d is linear in kappa, whose replicates are unbiased; the mean
    of n_eff itself would be too large. Single replicates may be below 0, if the error of kappa exceeds
    1 + kappa n / d. If the mean reciprocal is below that of :data:`LARGEST_GAIN` times the members, the
    cosine is 1 within its error and only the lower end is known.

    Args:
        values: the replicates, with their signs.
        members: size of the population, n.
        share: of the network's d, that of the layer of these replicates.

    Raises:
        ValueError: there are no replicates, one is 0 or not finite, or the mean is significantly below 0.
    """
    if not values or not np.isfinite(values).all() or 0.0 in values:
        raise ValueError(f"n_eff has {'a replicate that is 0 or not finite' if values else 'no replicate'}")
    reciprocal = estimate([1 / members + share * (1 / value - 1 / members) for value in values])
    least = 1 / (LARGEST_GAIN * members)
    if reciprocal is None or reciprocal.mean + reciprocal.reach < -least:
        raise ValueError("n_eff is below 0 by more than its error, which is impossible")
    most = reciprocal.mean + reciprocal.reach
    if reciprocal.mean < least:
        low = 1 / max(most, least)
        return EffectiveSize(low, low, math.inf, reciprocal.replicates)
    below = reciprocal.mean - reciprocal.reach
    return EffectiveSize(
        1 / reciprocal.mean, 1 / most, 1 / below if below > 0 else math.inf, reciprocal.replicates
    )


def percent_of_members(n_eff: EffectiveSize, members: int) -> str:
    """Return n_eff as a percentage of the members, as precisely as its interval allows.

    No share is above 100 %: an n_eff above the members is :data:`ABOUT_ALL` if its interval includes the
    members, and :data:`MORE_THAN_DENSE` if it does not.
    """
    if n_eff.is_exact:
        return EXACT
    if n_eff.value > members * (1 + _SHARE_ROUNDING):
        return ABOUT_ALL if n_eff.low <= members else MORE_THAN_DENSE
    if math.isfinite(n_eff.high):
        return f"{format_number(100 * n_eff.value / members)} %"
    return f"at least {format_number(100 * n_eff.low / members)} %"


def agrees(fitted: Estimate, closed: float, unseen: float = math.inf) -> str:
    """Return whether a fitted kappa agrees with its closed form: "yes", :data:`CONTRADICTED`, or "unclear".

    A fit contradicts the closed form if it is off by more than the tolerance and its interval. Below the
    closed form it may also be off by ``unseen``, the bound on pairs of members that were not sampled.
    """
    difference, allowed = abs(fitted.mean - closed), max(RELATIVE * abs(closed), ABSOLUTE)
    if difference <= allowed:
        return "yes"
    allowed_below = unseen if fitted.mean < closed else 0.0
    return CONTRADICTED if difference - fitted.reach - allowed_below > allowed else "unclear"


def effective(row: Measurement, part: Part = ALONE) -> EffectiveSize:
    """Return n_eff and its interval from a row of replicates; see :func:`n_eff_of_replicates` for errors."""
    return n_eff_of_replicates(replicates(row), row.case.members, part.share)


def quality(row: Measurement) -> float | None:
    """Return the value of a row of replicates: n_eff, or the mean of another quality, or None."""
    if row.metric == EFFECTIVE:
        try:
            n_eff = effective(row)
        except ValueError:
            return None
        return None if n_eff.is_bound else n_eff.value
    mean = estimate(replicates(row))
    return mean.mean if mean else None


def replicates(row: Measurement) -> list[float]:
    """Return the samples of all visits of a row."""
    return [sample for visit in row.samples for sample in visit]


_Key = tuple[Variant, Case, str, str]  # metric and method


@dataclass(frozen=True)
class Qualities:
    """The quality rows of a run, by variant and case."""

    run: Run

    def fit(self, variant: Variant, case: Case) -> KappaFit | None:
        """Return the fitted kappa with its closed form, None without both."""
        fitted, closed, unseen = (
            self.estimate(variant, case, KAPPA, method) for method in (LINEAR, CLOSED, UNSEEN)
        )
        if fitted is None or closed is None:
            return None
        return KappaFit(fitted, closed, unseen.mean if unseen else math.inf)

    def law(self, variant: Variant, case: Case, part: Part = ALONE) -> Law:
        """Return kappa and n_eff, from the closed form unless it is missing or the fit contradicts it.

        The closed form is preferred because n / d multiplies the noise of a fit. A layer of a network has
        n_eff = n / (1 + kappa n / d) with the d of the network. If the closed form gives n_eff above n and
        the replicates give a lower bound only, that bound is returned.
        """
        fit, replicated = self.fit(variant, case), self.effective(variant, case, LINEAR, part)
        rows = (self._rows.get((variant, case, metric, LINEAR)) for metric in (KAPPA, EFFECTIVE))
        kappas, n_effs = (replicates(row) if row else [] for row in rows)
        # d is not stored: it follows from the kappa and n_eff of the same replicates.
        weights = weights_by_law(kappas, n_effs, case.members)
        if not (fit and weights):
            return Law(self.estimate(variant, case, KAPPA, LINEAR), replicated)
        by_form = n_eff_by_law(fit.closed.mean, case.members, weights / part.share)
        if not by_form or fit.verdict == CONTRADICTED:
            return Law(fit.fitted, replicated)
        is_gain = case.members < by_form.value < math.inf
        if is_gain and isinstance(replicated, EffectiveSize) and math.isinf(replicated.high):
            bound = min(replicated.low, by_form.value)
            return Law(fit.closed, EffectiveSize(bound, bound, math.inf, replicated.replicates))
        return Law(fit.closed, by_form)

    def estimate(self, variant: Variant, case: Case, metric: str, method: str) -> Estimate | None:
        """Return the mean of a quality over its replicates, None if it has no number."""
        row = self._rows.get((variant, case, metric, method))
        return estimate(replicates(row)) if row else None

    def effective(
        self, variant: Variant, case: Case, method: str, part: Part = ALONE
    ) -> EffectiveSize | Skipped | None:
        """Return n_eff from its replicates, or the reason why it has no number."""
        row = self._rows.get((variant, case, EFFECTIVE, method))
        if row is None:
            return self.reason(variant, case, {method})
        try:
            return effective(row, part)
        except ValueError as error:
            return Skipped(
                variant=variant,
                case=case,
                phase=QUALITY,
                method=method,
                status="unavailable",
                reason=str(error),
            )

    def far_changes(self, variant: Variant, case: Case) -> tuple[Estimate, Estimate] | None:
        """Return the largest change of a weight by a variant and by dense noise, if the former is far larger.

        A fitness that is linear over the changes of dense noise may be curved over larger ones.
        """
        change = self.estimate(variant, case, LARGEST, ONE_WEIGHT)
        dense_change = self.estimate(Variant(scheme=DENSE), case, LARGEST, ONE_WEIGHT)
        if change is None or dense_change is None or change.mean <= FAR * dense_change.mean:
            return None
        return change, dense_change

    def rows(self, variant: Variant, case: Case, *keys: tuple[str, str]) -> tuple[Measurement, ...]:
        """Return the stored rows with these pairs of metric and method."""
        return tuple(row for key in keys if (row := self._rows.get((variant, case, *key))))

    def rows_of_law(self, variant: Variant, case: Case) -> tuple[Measurement, ...]:
        """Return the rows that :meth:`law` is computed from."""
        keys = ((KAPPA, CLOSED), (KAPPA, LINEAR), (KAPPA, UNSEEN), (EFFECTIVE, LINEAR))
        return self.rows(variant, case, *keys)

    def methods(self, case: Case, metric: str) -> list[str]:
        """Return the methods that found a quality of a case, in the order of the run."""
        found = (method for _, *key, method in self._rows if key == [case, metric])
        return list(dict.fromkeys(found))

    def reason(self, variant: Variant, case: Case, methods: Collection[str]) -> Skipped | None:
        """Return why a variant has no quality on a case by these methods, None without a reason."""
        reasons = self._reasons.get((variant, case), ())
        return next((row for row in reasons if row.method is None or row.method in methods), None)

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """The cases with a quality, in the order of the run."""
        return tuple(dict.fromkeys(row.case for row in self._rows.values()))

    def variants(self, case: Case) -> tuple[Variant, ...]:
        """Return all variants of a case, in the order of the run, baselines last."""
        known = dict.fromkeys(row.variant for row in self.run.rows if row.case == case)
        return tuple(sorted(known, key=lambda variant: variant.baseline))

    @cached_property
    def _rows(self) -> dict[_Key, Measurement]:
        """The rows of quality by variant, case, metric and method, without those of variants that failed."""
        failed = {key for key, rows in self._reasons.items() if rows[0].status == "failed"}
        return {
            (row.variant, row.case, row.metric, row.method): row
            for row in self.run.measurements
            if row.phase == QUALITY and (row.variant, row.case) not in failed
        }

    @cached_property
    def _reasons(self) -> dict[tuple[Variant, Case], list[Skipped]]:
        """The reasons for missing quality: failures first, then reasons for all methods."""
        reasons: dict[tuple[Variant, Case], list[Skipped]] = {}
        skipped = [row for row in self.run.skipped if row.phase in {None, QUALITY}]
        for row in sorted(skipped, key=lambda row: (row.status != "failed", row.method is not None)):
            reasons.setdefault((row.variant, row.case), []).append(row)
        return reasons
