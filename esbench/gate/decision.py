"""From measured times and counts to verdicts and an exit code. Pure functions; no torch.

Counts, outputs and missing rows are compared exactly. Times are tested in two stages: a few replicates
screen all cells, and new replicates confirm those that look slower or were too noisy to tell. A cell FAILs
when it is slower than the margin at the level that Holm's procedure gives it among all confirmed cells and
their geometric mean. A cell too noisy to show a regression is INCONCLUSIVE. If the controls misbehave or
something was not measured, the gate is invalid and its times decide nothing.

The unit of replication is a pair of fresh processes: calls within one process are correlated, so a replicate
contributes one number however many rounds it ran.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean, median

import msgspec
import numpy as np
from scipy import optimize, special, stats

from esbench.gate.protocol import ARMS, Arm, Cell
from esbench.gate.records import (
    MORE,
    SAME,
    SCHEMA,
    Bounds,
    Code,
    Decision,
    Metric,
    Opening,
    Replicate,
    Settings,
    Surveyed,
    Timed,
    Verdict,
    Visits,
)

MEAN = "geometric mean"
"""Name of the mean over all cells, which is tested like one more cell."""

PASSED, FAILED, USAGE, INVALID = 0, 1, 2, 3
"""Exit codes of a decision; 2 is also that of a command that could not decide."""

CONTROL_MARGIN = 0.005
"""The control with more work must be found to be slower by more than this, even if the margin is wider."""

LogRatios = dict[str, list[float]]
"""Cell or control -> log(head / base) of each replicate."""


@dataclass
class Evidence:
    """What was measured so far: the survey of each cell by each arm, and the replicates."""

    surveys: list[Surveyed] = field(default_factory=list)
    replicates: list[Replicate] = field(default_factory=list)

    def log_ratios(self, stage: str, trim: float) -> LogRatios:
        """Return the log ratios of all cells and controls in the replicates of a stage."""
        found: LogRatios = {}
        for replicate in self.replicates:
            for timed in replicate.cells if replicate.stage == stage else ():
                found.setdefault(timed.cell, []).append(replicate_log_ratio(timed, trim))
        return found


# Statistics: samples -> log ratio of a replicate -> bounds of a cell


def replicate_log_ratio(timed: Timed, trim: float) -> float:
    """Return log(head / base) of a replicate: the mean over rounds without a share ``trim`` at either end."""
    return float(stats.trim_mean(round_log_ratios(timed), trim))


def round_log_ratios(timed: Timed) -> list[float]:
    """Return log(head / base) of each round, from the median of each visit.

    A round is ABBA or BAAB, so linear drift cancels within it.
    """
    base, head = (_visit_logs(visits) for visits in (timed.base, timed.head))
    return [(h1 + h2 - b1 - b2) / 2 for (b1, b2), (h1, h2) in zip(base, head, strict=True)]


def _visit_logs(visits: Visits) -> list[tuple[float, float]]:
    """Return the logs of the medians of the two visits of each round."""
    logs = [math.log(median(visit)) for visit in visits]
    return list(zip(logs[::2], logs[1::2], strict=True))


@dataclass(frozen=True)
class VariancePrior:
    """What all cells say about the variance of one: an inverse chi-squared prior (Smyth, 2004).

    ``freedom`` is how many degrees of freedom the prior counts for; ``pooled`` are those of all cells
    together, an upper limit of what is known about any variance.
    """

    variance: float
    freedom: float
    pooled: float

    def shrink(self, variance: float, freedom: float) -> tuple[float, float]:
        """Return the posterior variance of a cell and its degrees of freedom."""
        share = freedom / (self.freedom + freedom)  # 0 if the prior has infinitely many
        return (1 - share) * self.variance + share * variance, min(self.freedom + freedom, self.pooled)


def variance_prior(variances: Sequence[float], freedom: int) -> VariancePrior | None:
    """Fit the prior to the variances of cells, each with ``freedom`` degrees of freedom; None for too few.

    Variances of exactly 0 are left out. Source: Smyth, Linear models and empirical Bayes methods for
    assessing differential expression in microarray experiments, 2004, sections 6.2 and 10.
    """
    positive = np.array([one for one in variances if one > 0])
    if len(positive) < 3:  # noqa: PLR2004  # the scatter of two variances says too little
        return None
    logs = np.log(positive) - special.digamma(freedom / 2) + np.log(freedom / 2)
    half = _inverse_trigamma(float(np.var(logs, ddof=1) - special.polygamma(1, freedom / 2)))
    centre = float(logs.mean())
    if np.isfinite(half):
        centre += float(special.digamma(half) - np.log(half))
    return VariancePrior(float(np.exp(centre)), 2 * half, float(len(positive) * freedom))


def _inverse_trigamma(value: float) -> float:
    """Return x in e^-14 .. e^14 with trigamma(x) = value; infinity for values of about 0 and less."""
    if value <= 1e-6:  # noqa: PLR2004  # the variances scatter no more than by chance
        return float("inf")
    value = min(value, 1e6)
    return float(np.exp(optimize.brentq(lambda log: special.polygamma(1, np.exp(log)) - value, -14.0, 14.0)))


def bounds(
    log_ratios: Sequence[float],
    *,
    null: float,
    alpha: float,
    power: float,
    prior: VariancePrior | None = None,
) -> Bounds:
    """Return the effect with one-sided bounds by Student's t.

    Args:
        log_ratios: log(head / base) of at least two replicates.
        null: the slowdown that is tested against; ``p`` is the p-value of a larger one.
        alpha: level of each bound.
        power: probability with which the minimum detectable effect ``mde`` would have been found.
        prior: shrinks the variance towards that of the other cells.

    """
    count, mean = len(log_ratios), fmean(log_ratios)
    spread, freedom = variance(log_ratios), float(count - 1)
    if prior is not None:
        spread, freedom = prior.shrink(spread, freedom)
    error = math.sqrt(spread / count)
    reach = _t_quantile(1 - alpha, freedom) * error
    distance = mean - math.log1p(null)
    return Bounds(
        effect=_relative(mean),
        low=_relative(mean - reach),
        high=_relative(mean + reach),
        mde=_relative(math.log1p(null) + reach + _t_quantile(power, freedom) * error),
        p=float(special.stdtr(freedom, -distance / error)) if error > 0 else float(distance <= 0),
        replicates=count,
    )


def variance(values: Sequence[float]) -> float:
    """Return the sample variance, exactly 0 for equal values. Ten times as fast as statistics.variance."""
    if min(values) == max(values):
        return 0.0
    mean = fmean(values)
    return math.fsum((one - mean) ** 2 for one in values) / (len(values) - 1)


@lru_cache(maxsize=4096)
def _t_quantile(level: float, freedom: float) -> float:
    return float(special.stdtrit(freedom, level))


def _relative(log_ratio: float) -> float:
    """Return exp(log_ratio) - 1, finite also for absurdly large ratios."""
    return math.expm1(min(log_ratio, 100.0))


def screen_bounds(
    log_ratios: Sequence[float], settings: Settings, prior: VariancePrior | None = None
) -> Bounds:
    """Return the bounds of a cell at the screen, tested against no slowdown at all."""
    return bounds(log_ratios, null=0.0, alpha=settings.screen_alpha, power=settings.power, prior=prior)


def screen_all(cells: Mapping[str, Sequence[float]], settings: Settings) -> dict[str, Bounds]:
    """Return the bounds of all cells at the screen, each variance shrunk towards that of the others.

    They only decide which cells are confirmed; the confirmation uses new replicates of the cell alone.
    """
    freedom = min(map(len, cells.values())) - 1
    prior = variance_prior([variance(log_ratios) for log_ratios in cells.values()], freedom)
    return {name: screen_bounds(log_ratios, settings, prior) for name, log_ratios in cells.items()}


def geometric_mean(cells: Mapping[str, Sequence[float]]) -> list[float]:
    """Return for each replicate the mean over cells of the log ratios."""
    return [fmean(one) for one in zip(*cells.values(), strict=True)]


def holm(p_values: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Return the level of each member of a family by Holm's step-down procedure.

    In the order of the p-values the level is alpha / (members left); after the first p-value above its level
    it stays where it is. So p <= level exactly for what is rejected (Holm, A Simple Sequentially Rejective
    Multiple Test Procedure, 1979).
    """
    levels: dict[str, float] = {}
    level, stopped = 0.0, False
    for place, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if not stopped:
            level = alpha / (len(p_values) - place)
            stopped = p > level
        levels[name] = level
    return levels


# What is measured next


def timed_cells(surveys: Sequence[Surveyed]) -> list[Cell]:
    """Return the cells to be timed: those that both arms have and compute correctly."""
    correct: dict[Arm, set[str]] = {arm: set() for arm in ARMS}
    cells: dict[str, Cell] = {}
    for row in surveys:
        cells[row.cell.name] = row.cell
        if row.status == "ok":
            correct[row.arm].add(row.cell.name)
    return [cell for name, cell in cells.items() if all(name in correct[arm] for arm in ARMS)]


def cells_to_confirm(evidence: Evidence, cells: Sequence[Cell], settings: Settings) -> list[Cell]:
    """Return the cells that the screen passes on; all of them if their mean is among the suspects."""
    names = {cell.name for cell in cells}
    found = suspects(_of_cells(evidence.log_ratios("screen", settings.trim), names), settings)
    return [cell for cell in cells if cell.name in found or MEAN in found]


def suspects(screen: LogRatios, settings: Settings) -> set[str]:
    """Return which cells, and whether their mean, look slower at the screen or are too noisy to tell."""
    return _suspects(_screen(screen, settings), settings) if _is_complete(screen, settings.screen) else set()


def _screen(screen: LogRatios, settings: Settings) -> dict[str, Bounds]:
    """Return the bounds of all cells and of their mean at the screen."""
    return {**screen_all(screen, settings), MEAN: screen_bounds(geometric_mean(screen), settings)}


def _suspects(screen: Mapping[str, Bounds], settings: Settings) -> set[str]:
    return {
        name for name, one in screen.items() if one.p < settings.screen_alpha or one.mde > settings.worst_mde
    }


# Verdicts


def decide(
    opening: Opening, evidence: Evidence, settings: Settings, *, wall_s: float, invalid: Sequence[str] = ()
) -> Decision:
    """Decide on everything that was measured; ``invalid`` are known reasons that invalidate the times."""
    cells = timed_cells(evidence.surveys)
    names = {cell.name for cell in cells}
    screen = evidence.log_ratios("screen", settings.trim)
    confirm = evidence.log_ratios("confirm", settings.trim)
    controls, misbehaved = control_verdicts(confirm, settings)
    exact = exact_verdicts(evidence.surveys)
    times, mean = time_verdicts(_of_cells(screen, names), _of_cells(confirm, names), settings)
    methods = sorted({cell.method for cell in cells})
    reasons = [*invalid, *misbehaved, *_incomplete(screen, confirm, names, methods, settings)]
    verdicts = (*exact, *times)
    return Decision(
        schema=SCHEMA,
        gate_id=opening.gate_id,
        opening=opening,
        settings=settings,
        verdicts=verdicts,
        mean=mean,
        controls=controls,
        invalid=tuple(reasons),
        exit_code=exit_code((*verdicts, *([mean] if mean else [])), reasons),
        wall_s=wall_s,
    )


def exit_code(verdicts: Sequence[Verdict], invalid: Sequence[str]) -> int:
    """Return the exit code: an exact failure always counts, a slower cell only if the gate is valid."""
    failed = [one for one in verdicts if one.status == "FAIL" and not one.accepted]
    if any(one.metric != "latency_ns" for one in failed) or (failed and not invalid):
        return FAILED
    if invalid or any(one.status == "INCONCLUSIVE" for one in verdicts):
        return INVALID
    return PASSED


def exact_verdicts(surveys: Sequence[Surveyed]) -> list[Verdict]:
    """Return the verdicts that need no statistics: rows that appeared or went, wrong outputs, counts."""
    rows: dict[str, dict[Arm, Surveyed]] = {}
    for row in surveys:
        rows.setdefault(row.cell.name, {})[row.arm] = row
    return [
        verdict
        for name, arms in rows.items()
        for verdict in _row_verdicts(name, arms.get("base"), arms.get("head"))
    ]


def _row_verdicts(name: str, base: Surveyed | None, head: Surveyed | None) -> Iterator[Verdict]:
    if head is not None and head.status == "failed":
        yield Verdict(cell=name, metric="output", status="FAIL", code="wrong", reason=head.reason)
    elif base is None or base.status in {"absent", "unavailable"}:
        if head is not None and head.status == "ok":
            reason = "base has no such row"
            yield Verdict(cell=name, metric="row", status="PASS", code="added", reason=reason)
    elif head is None or head.status != "ok":
        reason = head.reason if head else "it was not surveyed"
        yield Verdict(cell=name, metric="row", status="FAIL", code="missing", reason=reason)
    elif base.status == "failed":
        yield Verdict(cell=name, metric="output", status="PASS", code="wrong-base", reason=base.reason)
    else:
        yield from _count_verdicts(name, base, head)


def _count_verdicts(name: str, base: Surveyed, head: Surveyed) -> Iterator[Verdict]:
    metrics: tuple[Metric, ...] = ("peak_bytes", "noise_bytes", "launches")
    for metric in metrics:
        before, after = base.figures.get(metric), head.figures.get(metric)
        if after is None:
            if before is not None:
                reason = "head has no such count"
                yield Verdict(
                    cell=name, metric=metric, status="FAIL", code="missing", base=before, reason=reason
                )
        elif before is not None and after > before:
            more: Code = "more-launches" if metric == "launches" else "more-bytes"
            yield Verdict(cell=name, metric=metric, status="FAIL", code=more, base=before, head=after)
        elif before is not None and after < before:
            yield Verdict(cell=name, metric=metric, status="PASS", code="fewer", base=before, head=after)


def time_verdicts(
    screen: LogRatios, confirm: LogRatios, settings: Settings
) -> tuple[list[Verdict], Verdict | None]:
    """Return the verdicts on the times of all cells, and on their mean; none if the screen has gaps."""
    if not _is_complete(screen, settings.screen):
        return [], None
    first = _screen(screen, settings)
    suspected = _suspects(first, settings)
    again = {
        name: found for name, found in confirm.items() if name in suspected and len(found) == settings.confirm
    }
    if MEAN in suspected and set(confirm) == set(screen) and _is_complete(confirm, settings.confirm):
        again[MEAN] = geometric_mean(confirm)
    p_values = {
        name: bounds(found, null=settings.margin, alpha=settings.alpha, power=settings.power).p
        for name, found in again.items()
    }
    levels = holm(p_values, settings.alpha)

    def verdict(name: str) -> Verdict:
        if name in again:
            return _confirmed(name, again[name], levels[name], settings)
        if name in suspected:  # it should have been confirmed and was not
            return Verdict(
                cell=name, metric="latency_ns", status="INCONCLUSIVE", code="noisy", bounds=first[name]
            )
        return Verdict(cell=name, metric="latency_ns", status="PASS", code="no-sign", bounds=first[name])

    return [verdict(name) for name in screen], verdict(MEAN)


def _confirmed(name: str, log_ratios: Sequence[float], level: float, settings: Settings) -> Verdict:
    found = bounds(log_ratios, null=settings.margin, alpha=level, power=settings.power)
    if found.p <= level:
        return Verdict(cell=name, metric="latency_ns", status="FAIL", code="slower", bounds=found)
    # Whether a cell is too noisy does not depend on how many others are confirmed.
    alone = bounds(log_ratios, null=settings.margin, alpha=settings.alpha, power=settings.power)
    if alone.mde > settings.worst_mde:
        return Verdict(cell=name, metric="latency_ns", status="INCONCLUSIVE", code="noisy", bounds=found)
    return Verdict(cell=name, metric="latency_ns", status="PASS", code="not-confirmed", bounds=found)


def control_verdicts(confirm: LogRatios, settings: Settings) -> tuple[tuple[Verdict, ...], list[str]]:
    """Test the controls like cells; return the verdicts and how the controls misbehave, if they do."""
    verdicts, reasons = [], []
    for name in sorted(confirm):
        kind = name.rpartition(" | ")[0]
        if kind not in {SAME, MORE} or len(confirm[name]) < settings.confirm:
            continue
        margin = min(settings.margin, CONTROL_MARGIN) if kind == MORE else settings.margin
        verdict = _confirmed(
            name, confirm[name], settings.alpha, msgspec.structs.replace(settings, margin=margin)
        )
        verdicts.append(verdict)
        if kind == MORE and verdict.status != "FAIL":
            reasons.append(
                f"the control with 2 % more work was not found slower ({_effect(verdict)}): too noisy here"
            )
        faster = bounds(
            [-one for one in confirm[name]], null=settings.margin, alpha=settings.alpha, power=settings.power
        )
        if kind == SAME and (verdict.status == "FAIL" or faster.p <= settings.alpha):
            reasons.append(
                f"the control with equal work differs between the arms ({_effect(verdict)}): "
                "the workers do not run under the same conditions"
            )
    return tuple(verdicts), reasons


def _incomplete(
    screen: LogRatios, confirm: LogRatios, names: set[str], methods: Sequence[str], settings: Settings
) -> Iterator[str]:
    """Yield what should have been measured and was not."""
    if not names:
        yield "no cell was measured in both arms"
        return
    for control in (f"{kind} | {method}" for kind in (SAME, MORE) for method in methods):
        if len(confirm.get(control, ())) != settings.confirm:
            yield f"{control}: it was not measured"
    for stage, found, wanted, count in (
        ("screen", screen, names, settings.screen),
        ("confirm", confirm, suspects(_of_cells(screen, names), settings) - {MEAN}, settings.confirm),
    ):
        for name in sorted(wanted):
            if len(found.get(name, ())) != count:
                yield f"{name}: {len(found.get(name, ()))} of {count} replicates of the {stage}"


def _is_complete(log_ratios: LogRatios, count: int) -> bool:
    return bool(log_ratios) and all(len(found) == count for found in log_ratios.values())


def _of_cells(log_ratios: LogRatios, names: set[str]) -> LogRatios:
    return {name: found for name, found in log_ratios.items() if name in names}


def _effect(verdict: Verdict) -> str:
    found = verdict.bounds
    return f"{100 * found.effect:+.2f} %, at least {100 * found.low:+.2f} %" if found else "not measured"
