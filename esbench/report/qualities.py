"""What a run says of quality, and which kappa counts: that of the closed form, or the one that was fitted."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from esbench.report.cells import Trace
from esbench.report.estimates import Estimate, Worth, by_law, estimate, size_of, worth
from esbench.report.words import listed
from esbench.schema import QUALITY, Case, Measurement, Run, Skipped, Variant

LINEAR, CLOSED, CURVED = "linear fitness", "closed form", "at sigma"
"""How kappa and the effective members were found."""
UNSEEN = "unseen"
"""What pairs of members that were not met may add to a fitted kappa."""
KAPPA, EFFECTIVE = "kappa", "effective_members"

RELATIVE, ABSOLUTE = 0.05, 0.02
"""A fitted kappa may be off its closed form by the larger of the two: a share of it, and a number."""
CONTRADICTED = "NO"


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


_MEAN = "mean of the replicates; the interval is Student's"


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
        ValueError: it is no number, see :func:`~esbench.report.estimates.worth`.

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
