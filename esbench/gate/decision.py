"""The decision of the gate: verdicts and an exit code from measured times and counts. No torch.

Counts, outputs and missing rows are compared exactly. Times are tested in two stages. The screen measures all
cells in a few replicates. The confirmation measures new replicates of the cells that look slower or are too
noisy to decide. A cell FAILs if it is slower than the margin; Holm's procedure over all confirmed cells and
their geometric mean gives the level of its test. A cell too noisy to show a regression is INCONCLUSIVE. If a
control misbehaves or a measurement is missing, the gate is invalid and its times are ignored.

A replicate is a pair of fresh processes and contributes one number, however many rounds it ran, because calls
within one process are correlated.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median

import msgspec
import numpy as np
from scipy import optimize, special, stats

from esbench.gate.records import (
    ARMS,
    CONTROLS,
    MORE,
    SAME,
    SCHEMA,
    Arm,
    Bounds,
    Cell,
    Decision,
    Metric,
    Opening,
    Replicate,
    Settings,
    Stage,
    Surveyed,
    Timed,
    Verdict,
    control_name,
    split_method,
)

MEAN = "geometric mean"
"""Name of the mean over all cells, which is tested like a cell."""

PASSED, FAILED, USAGE, INVALID = 0, 1, 2, 3
"""Exit codes of a decision; a command that fails before the decision also ends with 2."""

CONTROL_MARGIN = 0.005
"""The margin in the test of the control with more work, unless the margin of the gate is smaller."""

LogRatios = dict[str, list[float]]
"""Name of a cell or control -> log(head / base) of each replicate."""


@dataclass
class Evidence:
    """The measurements so far: counts of each cell in each arm, and the replicates."""

    surveys: list[Surveyed] = field(default_factory=list)
    replicates: list[Replicate] = field(default_factory=list)

    def log_ratios(self, stage: Stage, trim: float) -> LogRatios:
        """Return the log ratios of all cells and controls in the replicates of a stage."""
        log_ratios: LogRatios = {}
        for replicate in self.replicates:
            if replicate.stage == stage:
                for timed in replicate.cells:
                    log_ratios.setdefault(timed.cell, []).append(replicate_log_ratio(timed, trim))
        return log_ratios

    def timed_cells(self) -> list[Cell]:
        """Return the cells that exist in both arms and are computed correctly by both."""
        cells = dict.fromkeys(row.cell for row in self.surveys)
        correct = {(row.cell, row.arm) for row in self.surveys if row.status == "ok"}
        return [cell for cell in cells if all((cell, arm) in correct for arm in ARMS)]

    def cells_to_confirm(self, settings: Settings) -> list[Cell]:
        """Return the cells that the screen suspects; all cells if it suspects their mean."""
        cells = {cell.name: cell for cell in self.timed_cells()}
        log_ratios = self.log_ratios("screen", settings.trim)
        screened = screen({name: log_ratios[name] for name in cells}, settings)
        return [cells[name] for name in names_to_confirm(screened, settings)]


# Statistics: samples -> log ratio of a replicate -> bounds of a cell


def replicate_log_ratio(timed: Timed, trim: float) -> float:
    """Return log(head / base) of a replicate: the mean over rounds, a share ``trim`` dropped at each end."""
    return float(stats.trim_mean(round_log_ratios(timed), trim))


def round_log_ratios(timed: Timed) -> list[float]:
    """Return log(head / base) of each round: mean over the visits of head of log(median), minus that of base.

    The order of a round is ABBA or BAAB, so that linear drift cancels.
    """
    base, head = ([math.log(median(visit)) for visit in visits] for visits in (timed.base, timed.head))
    visits_in_rounds = zip(head[::2], head[1::2], base[::2], base[1::2], strict=True)
    return [(h1 + h2 - b1 - b2) / 2 for h1, h2, b1, b2 in visits_in_rounds]


@dataclass(frozen=True)
class VariancePrior:
    """An inverse chi-squared prior of a cell's variance, estimated from all cells (Smyth, 2004).

    Attributes:
        variance: the scale of the prior.
        freedom: degrees of freedom of the prior.
        pooled: degrees of freedom of all cells together, the upper limit for a posterior.
    """

    variance: float
    freedom: float
    pooled: float

    def shrink(self, variance: float, freedom: float) -> tuple[float, float]:
        """Return the posterior variance of a cell, and its degrees of freedom.

        The posterior is (d0 v0 + d v) / (d0 + d), with the prior's variance v0 and freedom d0.
        """
        share = freedom / (self.freedom + freedom)  # 0 if the prior has infinite freedom
        return (1 - share) * self.variance + share * variance, min(self.freedom + freedom, self.pooled)


def variance_prior(variances: Sequence[float], freedom: int) -> VariancePrior | None:
    """Fit the prior to the variances of cells, each with ``freedom`` degrees of freedom.

    The logs of the variances scatter by chance, with variance trigamma(freedom / 2); the rest of their
    scatter gives the freedom of the prior, and their mean gives its variance. Variances of exactly 0 are
    ignored; None if fewer than 3 variances remain. Source: Smyth, Linear models and empirical Bayes methods
    for assessing differential expression in microarray experiments, 2004, sections 6.2 and 10.
    """
    positive = [variance for variance in variances if variance > 0]
    if len(positive) < 3:  # noqa: PLR2004  # two variances do not show how much variances vary
        return None
    logs = np.log(positive)
    excess_scatter = float(np.var(logs, ddof=1) - special.polygamma(1, freedom / 2))
    prior_freedom = 2 * _inverse_trigamma(excess_scatter)
    log_variance = np.mean(logs) - _mean_log_chi_squared(freedom) + _mean_log_chi_squared(prior_freedom)
    return VariancePrior(float(np.exp(log_variance)), prior_freedom, float(len(positive) * freedom))


def _mean_log_chi_squared(freedom: float) -> float:
    """Return the mean of log(x / freedom) for a chi-squared variable x."""
    return float(special.digamma(freedom / 2) - np.log(freedom / 2)) if math.isfinite(freedom) else 0.0


def _inverse_trigamma(value: float) -> float:
    """Return x with trigamma(x) = value; infinity for a value below 1e-6."""
    if value <= 1e-6:  # noqa: PLR2004  # the variances vary no more than by chance
        return math.inf
    # trigamma falls from 1e12 at e^-14 to 8e-7 at e^14.
    log_x = optimize.brentq(lambda log_x: special.polygamma(1, np.exp(log_x)) - value, -14.0, 14.0)
    return math.exp(log_x)


def bounds(
    log_ratios: Sequence[float],
    *,
    null: float,
    alpha: float,
    power: float,
    prior: VariancePrior | None = None,
) -> Bounds:
    """Return the mean slowdown with one-sided bounds by Student's t.

    Args:
        log_ratios: log(head / base) of at least two replicates.
        null: the null hypothesis is a slowdown of at most ``null``; ``p`` is its p-value.
        alpha: level of each bound.
        power: the minimum detectable effect ``mde`` is found with this probability.
        prior: shrinks the variance towards the variance of the other cells.
    """
    count, mean = len(log_ratios), fmean(log_ratios)
    cell_variance, freedom = variance(log_ratios), float(count - 1)
    if prior is not None:
        cell_variance, freedom = prior.shrink(cell_variance, freedom)
    standard_error = math.sqrt(cell_variance / count)
    half_width = float(special.stdtrit(freedom, 1 - alpha)) * standard_error
    log_null = math.log1p(null)
    if standard_error > 0:
        p = float(special.stdtr(freedom, (log_null - mean) / standard_error))
    else:
        p = float(mean <= log_null)
    return Bounds(
        effect=_relative(mean),
        low=_relative(mean - half_width),
        high=_relative(mean + half_width),
        mde=_relative(log_null + half_width + float(special.stdtrit(freedom, power)) * standard_error),
        p=p,
        replicates=count,
    )


def variance(values: Sequence[float]) -> float:
    """Return the sample variance, exactly 0 for equal values; ten times as fast as statistics.variance."""
    if min(values) == max(values):
        return 0.0
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _relative(log_ratio: float) -> float:
    """Return exp(log_ratio) - 1, which is finite even for very large ratios."""
    return math.expm1(min(log_ratio, 100.0))


def geometric_mean(cells: Mapping[str, Sequence[float]]) -> list[float]:
    """Return for each replicate the mean over cells of the log ratios."""
    return [fmean(replicate) for replicate in zip(*cells.values(), strict=True)]


def screen(cells: Mapping[str, Sequence[float]], settings: Settings) -> dict[str, Bounds]:
    """Return the bounds of all cells and of their mean at the screen, with a null hypothesis of no slowdown.

    The variance of each cell is shrunk towards the variance of the others. These bounds only decide which
    cells are confirmed; a confirmation uses new replicates and no other cells.
    """
    bounds_of = partial(bounds, null=0.0, alpha=settings.screen_alpha, power=settings.power)
    mean_log_ratios = geometric_mean(cells)
    variances = [variance(log_ratios) for log_ratios in cells.values()]
    prior = variance_prior(variances, freedom=len(mean_log_ratios) - 1)
    screened = {name: bounds_of(log_ratios, prior=prior) for name, log_ratios in cells.items()}
    return {**screened, MEAN: bounds_of(mean_log_ratios)}


def suspects(screened: Mapping[str, Bounds], settings: Settings) -> set[str]:
    """Return the names of the cells, and of their mean, that look slower at the screen or are too noisy."""
    return {
        name
        for name, cell_bounds in screened.items()
        if cell_bounds.p < settings.screen_alpha or cell_bounds.mde > settings.worst_mde
    }


def names_to_confirm(screened: Mapping[str, Bounds], settings: Settings) -> list[str]:
    """Return the names of the cells that the screen suspects; of all cells if it suspects their mean."""
    suspected = suspects(screened, settings)
    return [name for name in screened if name != MEAN and (name in suspected or MEAN in suspected)]


def holm(p_values: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Return the level of each test by Holm's procedure; exactly the tests with p <= level are rejected.

    The k-th smallest of n p-values, from k = 0, has the level alpha / (n - k). After the first p-value above
    its level, all others get the same level (Holm, A Simple Sequentially Rejective Multiple Test Procedure,
    1979).
    """
    levels: dict[str, float] = {}
    level, stopped = 0.0, False
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if not stopped:
            level = alpha / (len(p_values) - rank)
            stopped = p > level
        levels[name] = level
    return levels


# Verdicts


def decide(
    opening: Opening, evidence: Evidence, settings: Settings, *, wall_s: float, invalid: Sequence[str]
) -> Decision:
    """Return the decision; ``invalid`` are reasons, found while measuring, to ignore the times."""
    cells = evidence.timed_cells()
    names = [cell.name for cell in cells]
    controls = {control_name(control, cell.method) for control in CONTROLS for cell in cells}
    of_screen = evidence.log_ratios("screen", settings.trim)
    of_confirmation = evidence.log_ratios("confirm", settings.trim)
    reasons = list(invalid)
    if not cells:
        reasons.append("no cell was measured in both arms")
    reasons += _missing_replicates(of_screen, [*names, *controls], settings.screen, "screen")
    verdicts = exact_verdicts(evidence.surveys)
    mean: Verdict | None = None
    control_results: list[Verdict] = []
    if cells and all(len(of_screen.get(name, ())) == settings.screen for name in names):
        screened = screen({name: of_screen[name] for name in names}, settings)
        to_confirm = names_to_confirm(screened, settings)
        confirmed = {name: of_confirmation.get(name, []) for name in to_confirm}
        expected = [*to_confirm, *controls]
        reasons += _missing_replicates(of_confirmation, expected, settings.confirm, "confirmation")
        cell_verdicts, mean = time_verdicts(screened, confirmed, settings)
        verdicts += cell_verdicts
        control_results, misbehavior = control_verdicts(of_confirmation, settings)
        reasons += misbehavior
    return Decision(
        schema=SCHEMA,
        gate_id=opening.gate_id,
        opening=opening,
        settings=settings,
        verdicts=tuple(verdicts),
        mean=mean,
        controls=tuple(control_results),
        invalid=tuple(reasons),
        exit_code=exit_code([*verdicts, *filter(None, [mean])], reasons),
        wall_s=wall_s,
    )


def _missing_replicates(log_ratios: LogRatios, names: Sequence[str], count: int, stage: str) -> Iterator[str]:
    """Yield an error for each cell or control that was not measured in ``count`` replicates."""
    for name in names:
        measured = len(log_ratios.get(name, ()))
        if measured != count:
            yield f"{name}: {measured} instead of {count} replicates of the {stage} were measured"


def exit_code(verdicts: Sequence[Verdict], invalid: Sequence[str]) -> int:
    """Return the exit code; a slower cell counts only in a valid gate, any other failure always."""
    failed_metrics = {
        verdict.metric for verdict in verdicts if verdict.status == "FAIL" and not verdict.accepted
    }
    is_only_slower = failed_metrics == {"latency_ns"}
    if failed_metrics and not (is_only_slower and invalid):
        return FAILED
    if invalid or any(verdict.status == "INCONCLUSIVE" for verdict in verdicts):
        return INVALID
    return PASSED


def exact_verdicts(surveys: Sequence[Surveyed]) -> list[Verdict]:
    """Return the verdicts on new and missing rows, on outputs and on counts, which need no statistics."""
    rows: dict[str, dict[Arm, Surveyed]] = {}
    for row in surveys:
        rows.setdefault(row.cell.name, {})[row.arm] = row
    return [
        verdict for name, arms in rows.items() for verdict in _row_verdicts(name, arms["base"], arms["head"])
    ]


def _row_verdicts(name: str, base: Surveyed, head: Surveyed) -> Iterator[Verdict]:
    on_row = partial(Verdict, cell=name, metric="row")
    on_output = partial(Verdict, cell=name, metric="output")
    if head.status == "failed":
        yield on_output(status="FAIL", code="wrong", reason=head.reason)
    elif base.status in {"absent", "unavailable"}:
        if head.status == "ok":
            yield on_row(status="PASS", code="added", reason="base has no such row")
    elif head.status != "ok":
        yield on_row(status="FAIL", code="missing", reason=head.reason)
    elif base.status == "failed":
        yield on_output(status="PASS", code="wrong-base", reason=base.reason)
    else:
        yield from _count_verdicts(name, base.figures, head.figures)


def _count_verdicts(name: str, base: Mapping[str, float], head: Mapping[str, float]) -> Iterator[Verdict]:
    """Yield a verdict on each count of base that differs in head."""
    metrics: tuple[Metric, ...] = ("peak_bytes", "noise_bytes", "launches")
    for metric in metrics:
        before, after = base.get(metric), head.get(metric)
        verdict = partial(Verdict, cell=name, metric=metric, base=before, head=after)
        if before is None or before == after:
            continue
        if after is None:
            yield verdict(status="FAIL", code="missing", reason="head has no such count")
        elif after > before:
            yield verdict(status="FAIL", code="more-launches" if metric == "launches" else "more-bytes")
        else:
            yield verdict(status="PASS", code="fewer")


def time_verdicts(
    screened: Mapping[str, Bounds], confirmed: LogRatios, settings: Settings
) -> tuple[list[Verdict], Verdict]:
    """Return the verdicts on the times of all cells, and on their mean.

    ``screened`` has the bounds of all cells and of their mean at the screen, ``confirmed`` new log ratios of
    the suspected cells, or of all cells if their mean is suspected.
    """
    suspected = suspects(screened, settings)
    # Only a complete confirmation is tested; that of the mean needs all cells.
    complete = {
        name: log_ratios
        for name, log_ratios in confirmed.items()
        if name in suspected and len(log_ratios) == settings.confirm
    }
    if MEAN in suspected and all(len(log_ratios) == settings.confirm for log_ratios in confirmed.values()):
        complete[MEAN] = geometric_mean(confirmed)
    p_values = {
        name: _margin_test(log_ratios, settings.alpha, settings).p for name, log_ratios in complete.items()
    }
    levels = holm(p_values, settings.alpha)

    def verdict(name: str) -> Verdict:
        if name in complete:
            return _confirmation_verdict(name, complete[name], levels[name], settings)
        if name in suspected:  # the confirmation is incomplete
            return Verdict(name, "latency_ns", "INCONCLUSIVE", "noisy", screened[name])
        return Verdict(name, "latency_ns", "PASS", "no-sign", screened[name])

    return [verdict(name) for name in screened if name != MEAN], verdict(MEAN)


def _confirmation_verdict(
    name: str, log_ratios: Sequence[float], level: float, settings: Settings
) -> Verdict:
    """Return the verdict on a cell or a control from its new replicates, tested at a level of Holm's."""
    tested = _margin_test(log_ratios, level, settings)
    if tested.p <= level:
        return Verdict(name, "latency_ns", "FAIL", "slower", tested)
    # The level alpha, unlike Holm's, does not depend on the number of confirmed cells.
    mde = _margin_test(log_ratios, settings.alpha, settings).mde
    if mde > settings.worst_mde:
        return Verdict(name, "latency_ns", "INCONCLUSIVE", "noisy", tested)
    return Verdict(name, "latency_ns", "PASS", "not-confirmed", tested)


def _margin_test(log_ratios: Sequence[float], alpha: float, settings: Settings) -> Bounds:
    """Return the bounds of a cell with the margin as the null hypothesis."""
    return bounds(log_ratios, null=settings.margin, alpha=alpha, power=settings.power)


def control_verdicts(confirmed: LogRatios, settings: Settings) -> tuple[list[Verdict], list[str]]:
    """Test the controls like cells; return their verdicts, and an error for each control that misbehaves."""
    verdicts, reasons = [], []
    for name, log_ratios in sorted(confirmed.items()):
        control, _ = split_method(name)
        if control not in CONTROLS or len(log_ratios) != settings.confirm:
            continue
        margin = min(settings.margin, CONTROL_MARGIN) if control == MORE else settings.margin
        rule = msgspec.structs.replace(settings, margin=margin)
        inverse = [-log_ratio for log_ratio in log_ratios]
        slower = _confirmation_verdict(name, log_ratios, settings.alpha, rule)
        faster = _confirmation_verdict(name, inverse, settings.alpha, rule)
        verdicts.append(slower)
        tested = _margin_test(log_ratios, settings.alpha, rule)
        effect = f"({100 * tested.effect:+.2f} %, at least {100 * tested.low:+.2f} %)"
        if control == MORE and slower.status != "FAIL":
            reasons.append(
                f"the control with 2 % more work was not found slower {effect}: the machine is too noisy"
            )
        if control == SAME and "FAIL" in {slower.status, faster.status}:
            reasons.append(
                f"the control with equal work differs between the arms {effect}: "
                "the workers do not run under the same conditions"
            )
    return verdicts, reasons
