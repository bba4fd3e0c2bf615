"""What replicates say of a quantity: their mean, and between which values the true one lies."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from esbench.report.analysis.pivot import Trace
from esbench.report.text import listed
from esbench.schema import QUALITY, Case, Measurement, Run, Skipped, Variant
from esbench.units import format_number

LARGEST_GAIN = 100.0
"""Members that are worth more than so many times their number give a cosine of 1 within its error."""


ROUNDING = 1e-9
"""Of d: what is left of a closed form that is 0."""


EXACT = "exact"
"""What is shown for the members that an estimate without any error equals."""


_HALVINGS = 60


LINEAR, CLOSED, CURVED = "linear fitness", "closed form", "at sigma"
"""How kappa and the effective members were found."""


UNSEEN = "unseen"
"""What pairs of members that were not met may add to a fitted kappa."""


KAPPA, EFFECTIVE = "kappa", "effective_members"


RELATIVE, ABSOLUTE = 0.05, 0.02
"""A fitted kappa may be off its closed form by the larger of the two: a share of it, and a number."""


CONTRADICTED = "NO"


_MEAN = "mean of the replicates; the interval is Student's"


@dataclass(frozen=True)
class Estimate:
    """The mean of independent replicates; ``half`` is half its 95 % interval, None for a single one."""

    mean: float
    half: float | None
    replicates: int

    @property
    def reach(self) -> float:
        """How far from the mean the true value may be: not at all where nothing is known about it."""
        return self.half or 0.0


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of replicates, its interval by Student's t; ``None`` of none and where one is not finite."""
    if not values or not np.isfinite(values).all():
        return None
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return Estimate(mean, None, count)
    if min(values) == max(values):
        return Estimate(values[0], 0.0, count)  # where a mean and a deviation would only have roundings
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(mean, students_t(count - 1) * error, count)


@dataclass(frozen=True)
class Worth:
    """The independent members that a population is worth, n_eff, and its 95 % interval.

    The interval is not symmetric, and ``high`` is infinite where the replicates set no upper end; of a
    single replicate nothing is known, and both ends are the value. A closed form has no ``replicates``, and
    both ends are the value as well. Where the cosine is 1 within its error the value is the lower end.
    """

    value: float
    low: float
    high: float
    replicates: int

    @property
    def is_exact(self) -> bool:
        """Whether the estimate is the gradient itself, for a linear fitness: no number equals it."""
        return math.isinf(self.value)

    @property
    def is_bound(self) -> bool:
        """Whether all that is known of it is what it is at least."""
        return math.isfinite(self.value) and self.value == self.low and math.isinf(self.high)


def by_law(kappa: float, members: int, size: float) -> Worth | None:
    """n_eff = n / (1 + kappa n / d), by a closed form; ``None`` where less than nothing is left of d.

    The law's 1 / cos^2 holds up to (1 + kappa) / n: so d + kappa n is 0 where it is no more than 1 + kappa.
    """
    left, error = size + kappa * members, max(1 + kappa, 0.0) + ROUNDING * size
    if left < -error:
        return None
    value = members * size / left if left > error else math.inf
    return Worth(value, value, value, 0)


def size_of(kappas: Sequence[float], worths: Sequence[float], members: int) -> float | None:
    """d, of replicates of kappa and n_eff: 1 / n_eff = 1 / n + kappa / d; ``None`` where they do not tell."""
    squares = sum(kappa**2 for kappa in kappas)
    if len(kappas) != len(worths) or not squares or 0.0 in worths:
        return None
    products = sum(kappa * (1 / value - 1 / members) for kappa, value in zip(kappas, worths, strict=True))
    return squares / products if products > 0 else None


def worth(values: Sequence[float], members: int, share: float = 1.0) -> Worth:
    """What replicates of n_eff say together: their mean and its interval, of the reciprocals.

    By the quality law 1 / n_eff = 1 / n + kappa / d: the reciprocal is linear in kappa, whose replicates have
    no bias. Its mean is the law at the mean kappa, where n_eff itself, averaged, would be too large: it is
    convex. So a replicate may be below 0, where the error of kappa leaves less than nothing of
    1 + kappa n / d, and only all of them together decide.

    Where the mean reciprocal is below that of :data:`LARGEST_GAIN` times the members the cosine is 1 within
    its error, and the lower end is all that is known.

    Args:
        values: the replicates, with their signs.
        members: of the population, n.
        share: of a network's d, that of the layer whose replicates they are.

    Raises:
        ValueError: there is no such number, and why: no replicate, one that is none, or a mean below 0 by
            more than its error.

    """
    if not values or not np.isfinite(values).all() or 0.0 in values:
        message = "n_eff has a replicate that is no number, which cannot be" if values else "no replicate"
        raise ValueError(message)
    found = estimate([1 / members + share * (1 / value - 1 / members) for value in values])
    least = 1 / (LARGEST_GAIN * members)
    if found is None or found.mean + found.reach < -least:
        message = "n_eff is below 0 by more than its error, which cannot be"
        raise ValueError(message)
    most = found.mean + found.reach
    if found.mean < least:
        low = 1 / max(most, least)
        return Worth(low, low, math.inf, found.replicates)
    below = found.mean - found.reach
    return Worth(1 / found.mean, 1 / most, 1 / below if below > 0 else math.inf, found.replicates)


def kept(found: Worth, members: int) -> str:
    """The percentage of its members that a population is worth: no more than the interval allows to say.

    Only members that share less than independent ones are worth more than their number: where the interval
    holds 100 %, more is not claimed. No percentage is that of an exact estimate.
    """
    if found.is_exact:
        return EXACT
    if found.low <= members < found.value:
        return "about 100 %"
    least = "" if math.isfinite(found.high) else "at least "
    return f"{least}{format_number(100 * (found.low if least else found.value) / members)} %"


@cache
def students_t(freedom: int, confidence: float = 0.95) -> float:
    """The t within which a Student variable lies with this probability, found by halving.

    For whole degrees of freedom the probability has a closed form in theta = arctan(t / sqrt(freedom))
    (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        theta = (low + high) / 2
        low, high = (theta, high) if _within(theta, freedom) < confidence else (low, theta)
    return math.tan(low) * math.sqrt(freedom)


def _within(theta: float, freedom: int) -> float:
    """P(|T| < sqrt(freedom) tan(theta))."""
    odd = freedom % 2
    term, total = (math.cos(theta) if odd else 1.0), 0.0
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(theta) ** 2 * (power - 1) / power
    total *= math.sin(theta)
    return (theta + total) * 2 / math.pi if odd else total


class Part(NamedTuple):
    """A layer in its network: how many of all perturbed numbers are its own; all are where it is alone."""

    own: int = 1
    whole: int = 1

    @property
    def share(self) -> float:
        """Its part of the network's d."""
        return self.own / self.whole


ALONE = Part()


class Law(NamedTuple):
    """The kappa that counts for a variant on a case, and what it leaves of the members."""

    kappa: Estimate | None
    effective: Worth | Skipped | None


@dataclass(frozen=True)
class Qualities:
    """What a run says of quality, by variant and case."""

    run: Run

    def law(self, variant: Variant, case: Case, part: Part = ALONE) -> Law:
        """Kappa and n_eff: by the closed form where there is one that the fit does not contradict.

        A fit has noise, which n / d multiplies, and of a shared core a bias; a form has neither. In a network
        a layer has n_eff = n / (1 + kappa n / d) with the d of the whole network. More members than there are
        are claimed only as far as the replicates bear out: a form near -d / n says many times n, of which
        they may tell no more than a lower end.
        """
        fitted, closed, unseen = (
            self.estimate(variant, case, KAPPA, method) for method in (LINEAR, CLOSED, UNSEEN)
        )
        size = self._size(variant, case)
        if fitted and closed and size:
            verdict = holds(fitted, closed.mean, unseen.mean if unseen else math.inf)
            exact = by_law(closed.mean, case.members, size / part.share)
            if exact and verdict != CONTRADICTED:
                return Law(closed, self._borne_out(exact, self.effective(variant, case, LINEAR, part), case))
        return Law(fitted, self.effective(variant, case, LINEAR, part))

    @staticmethod
    def _borne_out(form: Worth, found: Worth | Skipped | None, case: Case) -> Worth:
        gains = case.members < form.value < math.inf
        if gains and isinstance(found, Worth) and math.isinf(found.high):
            least = min(found.low, form.value)
            return Worth(least, least, math.inf, found.replicates)
        return form

    def estimate(self, variant: Variant, case: Case, metric: str, method: str) -> Estimate | None:
        """The mean of a quality over its replicates, ``None`` where it has no number."""
        row = self._rows.get((variant, case, metric, method))
        return estimate(_replicates(row)) if row else None

    def effective(
        self, variant: Variant, case: Case, method: str, part: Part = ALONE
    ) -> Worth | Skipped | None:
        """What the replicates of n_eff say together, or why that is no number."""
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

    def row(self, variant: Variant, case: Case, metric: str, method: str) -> Measurement | None:
        """The row with the replicates of a quality, where the run has one."""
        return self._rows.get((variant, case, metric, method))

    def trace(self, variant: Variant, case: Case, metric: str, method: str) -> Trace | None:
        """Where the mean of a quality comes from, where it has a row."""
        row = self.row(variant, case, metric, method)
        return Trace(self.run.header.run_id, _MEAN, (row,)) if row else None

    def behind(self, variant: Variant, case: Case) -> tuple[Measurement, ...]:
        """The rows that :meth:`law` looks at: kappa by each way, and the effective members."""
        keys = [(KAPPA, CLOSED), (KAPPA, LINEAR), (KAPPA, UNSEEN), (EFFECTIVE, LINEAR)]
        found = (self.row(variant, case, metric, method) for metric, method in keys)
        return tuple(row for row in found if row)

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

    def _size(self, variant: Variant, case: Case) -> float | None:
        """How many numbers are perturbed, d, as the fitted rows have it."""
        rows = (self._rows.get((variant, case, metric, LINEAR)) for metric in (KAPPA, EFFECTIVE))
        kappas, worths = (_replicates(row) if row else [] for row in rows)
        return size_of(kappas, worths, case.members)

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


def holds(fitted: Estimate, closed: float, unseen: float = math.inf) -> str:
    """Whether a fitted kappa is its closed form: unclear where the interval says neither.

    A fit above the closed form contradicts it. One below may lack what rare pairs of members add, of which
    none was met: up to ``unseen`` it contradicts nothing.
    """
    off, allowed = abs(fitted.mean - closed), max(RELATIVE * abs(closed), ABSOLUTE)
    if off <= allowed:
        return "yes"
    hidden = unseen if fitted.mean < closed else 0.0
    return CONTRADICTED if off - fitted.reach - hidden > allowed else "unclear"


def effective(row: Measurement, part: Part = ALONE) -> Worth:
    """n_eff and its interval, of a row with its replicates; by the mean of their reciprocals.

    Raises:
        ValueError: it is no number, see :func:`~worth`.

    """
    return worth(_replicates(row), row.case.members, part.share)


def quality(row: Measurement) -> float | None:
    """What the replicates of a row of quality say together, ``None`` where that is no number."""
    if row.metric == EFFECTIVE:
        try:
            found = effective(row)
        except ValueError:
            return None
        return None if found.is_bound else found.value
    mean = estimate(_replicates(row))
    return mean.mean if mean else None


def _replicates(row: Measurement) -> list[float]:
    return [sample for visit in row.samples for sample in visit]
