"""The decision of the gate: verdicts and an exit code from measured times and counts. No torch.

Counts, outputs and missing rows are compared exactly. Times are tested in looks. A replicate, which is one
set-up of a cell in both arms, or a few in a pair of processes, gives the log of head / base. At each look,
all replicates of a cell so far give a trimmed mean and its standard error (Yuen, 1974). A cell FAILs at the
first look at which it is shown to be slower than the margin, and ends early if it is shown to be hardly
slower; the others get more replicates. The geometric mean over cells is tested at the first look.

The family-wise level is shared by Bonferroni's inequality, which holds for dependent tests: each cell and the
mean get the same part of it, and each look of a cell the same part of that, which is a constant spending of
the level over looks (Lan and DeMets, 1983). Ending early without a FAIL cannot raise a false alarm.

A cell that may still be much slower after the last look is INCONCLUSIVE. If a control misbehaves or a
measurement is missing, the gate is invalid and its times are ignored.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import msgspec
from scipy import special

from esbench.gate.records import (
    MEAN,
    MORE,
    SAME,
    Arm,
    Bounds,
    Decision,
    Metric,
    Opening,
    Replicate,
    Settings,
    Status,
    Surveyed,
    Verdict,
    control_of,
)
from esbench.gate.waivers import Waiver, accept, unused_waivers

PASSED, FAILED, USAGE, INVALID = 0, 1, 2, 3
"""Exit codes of a decision; a command that fails before the decision also ends with USAGE."""

CONTROL_MARGIN = 0.005
"""The margin in the test of the control with more work, unless the margin of the gate is smaller."""

ROUND_TRIM = 0.25
"""The share of rounds of a replicate dropped at either end."""

COUNTS: tuple[Metric, ...] = ("peak_bytes", "noise_bytes", "launches", "graphs")
"""What is counted exactly: bytes, launches (on a CPU, operators), and graphs that torch.compile makes."""

Looks = Sequence[Sequence[float]]
"""log(head / base) of the new replicates at each look."""
LogRatios = Mapping[str, Looks]
"""Name of each cell and control -> its looks so far."""


@dataclass
class Evidence:
    """What a gate measures: rows of both arms, and log ratios; ``invalid`` has reasons to ignore these."""

    opening: Opening
    surveys: Sequence[Surveyed]
    log_ratios: dict[str, list[list[float]]]
    invalid: list[str] = field(default_factory=list)


# Statistics: samples -> log ratio of a replicate -> bounds of a cell


def replicate_log_ratio(replicate: Replicate) -> float:
    """Return log(head / base) of a replicate: the trimmed mean over its rounds.

    A round is the mean of log(time) over calls of head, minus that of base, without the slowest call of each
    visit. The order of a round is ABBA or BAAB, so that linear drift cancels.

    With the fastest call alone, replicates vary less, but if a quarter of the calls are slower by 12 %, that
    is 3 % on average, it shows 1 % and the two fastest 2 %. The mean of all three calls shows 2.8 %, but
    varies four times as much as that of the two fastest if other programs interrupt calls.
    """
    base, head = (
        [fmean(map(math.log, sorted(visit)[: max(1, len(visit) - 1)])) for visit in visits]
        for visits in (replicate.base, replicate.head)
    )
    rounds = zip(head[::2], head[1::2], base[::2], base[1::2], strict=True)
    return trimmed([(h1 + h2 - b1 - b2) / 2 for h1, h2, b1, b2 in rounds], ROUND_TRIM).mean


def independent_log_ratios(set_ups: Sequence[Replicate], settings: Settings) -> list[float]:
    """Return log(head / base) of each set-up of a look, or the mean of those in each pair of processes."""
    if not settings.per_pair:
        return [replicate_log_ratio(set_up) for set_up in set_ups]
    by_process: dict[int, list[float]] = {}
    for set_up in sorted(set_ups, key=lambda set_up: set_up.process):
        by_process.setdefault(set_up.process, []).append(replicate_log_ratio(set_up))
    return [fmean(log_ratios) for log_ratios in by_process.values()]


class Estimate(NamedTuple):
    """A mean, the square of its standard error, and the degrees of freedom of that."""

    mean: float
    variance: float
    freedom: float


def trimmed(values: Sequence[float], trim: float) -> Estimate:
    """Return the trimmed mean; its error follows from the winsorized variance.

    Source: Yuen, The two-sample trimmed t for unequal population variances, 1974.
    """
    dropped = int(trim * len(values))
    ordered = sorted(values)
    kept = ordered[dropped : len(ordered) - dropped]
    winsorized = [kept[0]] * dropped + kept + [kept[-1]] * dropped
    center, freedom = fmean(winsorized), len(kept) - 1
    squares = math.fsum((value - center) ** 2 for value in winsorized) if kept[0] < kept[-1] else 0.0
    return Estimate(fmean(kept), squares / (len(kept) * freedom) if freedom else math.inf, freedom)


def mean_over_cells(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over cells, with the freedom of Welch and Satterthwaite (1946)."""
    variance = math.fsum(estimate.variance for estimate in estimates)
    by_freedom = math.fsum(estimate.variance**2 / estimate.freedom for estimate in estimates)
    freedom = variance**2 / by_freedom if by_freedom else float(len(estimates))
    return Estimate(fmean(estimate.mean for estimate in estimates), variance / len(estimates) ** 2, freedom)


def bounds(estimate: Estimate, replicates: int, level: float, settings: Settings) -> Bounds:
    """Return the slowdown with its bounds by Student's t, tested at a level against the margin."""
    mean, error, log_null = estimate.mean, math.sqrt(estimate.variance), math.log1p(settings.margin)

    def relative(probability: float) -> float:
        shift = float(special.stdtrit(estimate.freedom, probability)) * error if error else 0.0
        return math.expm1(min(mean + shift, 100.0))  # finite even for very large ratios

    if error > 0:
        p = float(special.stdtr(estimate.freedom, (log_null - mean) / error))
    else:
        p = float(mean <= log_null)
    return Bounds(relative(0.5), relative(level), relative(1 - settings.beta), p, replicates)


def sequential_test(looks: Looks, level: float, settings: Settings) -> tuple[Status, Bounds]:
    """Test a cell look by look. It is INCONCLUSIVE before the last look if it needs more replicates."""
    log_ratios: list[float] = []
    for new in looks:
        log_ratios += new
        level_of_look = level / len(settings.looks)
        tested = bounds(trimmed(log_ratios, settings.trim), len(log_ratios), level_of_look, settings)
        if tested.p <= level_of_look:
            return "FAIL", tested
        if tested.high < settings.margin + settings.indifferent:
            return "PASS", tested
    is_clear = len(looks) == len(settings.looks) and tested.high <= settings.worst
    return "PASS" if is_clear else "INCONCLUSIVE", tested


def time_verdicts(log_ratios: LogRatios, settings: Settings) -> list[Verdict]:
    """Return the verdicts on all cells and controls that have replicates; see :func:`sequential_test`.

    The control with equal work FAILs also if head is faster.
    """
    verdicts = []
    level_of_cells = level_of_cell(log_ratios, settings)
    strict = msgspec.structs.replace(settings, margin=min(settings.margin, CONTROL_MARGIN))
    for name, looks in log_ratios.items():
        control = control_of(name)
        if looks:
            level = settings.alpha if control else level_of_cells
            rule = strict if control == MORE else settings
            status, tested = sequential_test(looks, level, rule)
            if control == SAME and status != "FAIL":
                faster, _ = sequential_test([[-log for log in new] for new in looks], level, rule)
                status = status if faster == "PASS" else faster
            verdicts.append(Verdict(name, "latency_ns", status, tested))
    return verdicts


def open_names(log_ratios: LogRatios, settings: Settings) -> list[str]:
    """Return the names of the cells and controls that need more replicates."""
    status = {verdict.cell: verdict.status for verdict in time_verdicts(log_ratios, settings)}
    return [
        name
        for name, looks in log_ratios.items()
        if len(looks) < len(settings.looks) and status.get(name, "INCONCLUSIVE") == "INCONCLUSIVE"
    ]


def mean_verdict(log_ratios: LogRatios, settings: Settings) -> Verdict:
    """Return the verdict on the mean over the cells, at their first look."""
    level = level_of_cell(log_ratios, settings)
    first = [looks[0] for name, looks in log_ratios.items() if not control_of(name)]
    if settings.per_pair:  # what differs between the processes of a pair shifts all of its cells
        mean = trimmed([fmean(pair) for pair in zip(*first, strict=True)], settings.trim)
    else:
        mean = mean_over_cells([trimmed(look, settings.trim) for look in first])
    tested = bounds(mean, settings.looks[0], level, settings)
    is_noisy = tested.high > settings.worst
    status: Status = "FAIL" if tested.p <= level else "INCONCLUSIVE" if is_noisy else "PASS"
    return Verdict(MEAN, "latency_ns", status, tested)


def level_of_cell(log_ratios: LogRatios, settings: Settings) -> float:
    """Return the level of each cell, and of their mean."""
    cells = sum(not control_of(name) for name in log_ratios)
    return settings.alpha / (cells + 1)


# Verdicts


def decide(
    evidence: Evidence, settings: Settings, waivers: Sequence[Waiver] = (), *, whole: bool = True
) -> Decision:
    """Return the decision.

    A waiver that applies to nothing is an error, but not if only a part of the suite was measured, so that
    it is not ``whole``.
    """
    log_ratios, invalid = evidence.log_ratios, [*evidence.invalid]
    verdicts = exact_verdicts(evidence.surveys)
    controls: list[Verdict] = []
    if not log_ratios:
        invalid.append("no cell was measured in both arms")
    elif all(log_ratios.values()):
        for verdict in time_verdicts(log_ratios, settings):
            (controls if control_of(verdict.cell) else verdicts).append(verdict)
        verdicts.append(mean_verdict(log_ratios, settings))
        invalid += filter(None, map(misbehavior, controls))
    verdicts = [accept(verdict, waivers) for verdict in verdicts]
    unused = unused_waivers(waivers, verdicts, settings.margin) if whole else []
    return Decision(
        opening=evidence.opening,
        settings=settings,
        verdicts=tuple(verdicts),
        controls=tuple(controls),
        invalid=tuple(invalid),
        unused=tuple(unused),
        exit_code=exit_code(verdicts, invalid, unused),
    )


def exit_code(verdicts: Sequence[Verdict], invalid: Sequence[str], unused: Sequence[str]) -> int:
    """Return the exit code; a slower cell counts only in a valid gate, any other failure always."""
    failed = {verdict.metric for verdict in verdicts if verdict.status == "FAIL" and not verdict.accepted}
    if failed and not (invalid and failed == {"latency_ns"}):
        return FAILED
    if invalid or any(verdict.status == "INCONCLUSIVE" for verdict in verdicts):
        return INVALID
    return USAGE if unused else PASSED


def exact_verdicts(surveys: Sequence[Surveyed]) -> list[Verdict]:
    """Return the verdicts on new and missing rows, on outputs and on counts, which need no statistics."""
    rows: dict[str, dict[Arm, Surveyed]] = {}
    for row in sorted(surveys, key=lambda row: row.cell.name):
        rows.setdefault(row.cell.name, {})[row.arm] = row
    both = ((name, arms.get("base"), arms.get("head")) for name, arms in rows.items())
    return [verdict for name, base, head in both for verdict in _row_verdicts(name, base, head)]


def _row_verdicts(name: str, base: Surveyed | None, head: Surveyed | None) -> Iterator[Verdict]:
    if head and head.status == "failed":
        yield Verdict(name, "output", "FAIL", reason=head.reason)
    elif base is None or base.status == "unavailable":
        if head and head.status == "ok":
            yield Verdict(name, "row", "PASS", reason="added: base has no such row")
    elif head is None or head.status != "ok":
        reason = head.reason if head else "the suite of head does not have it"
        yield Verdict(name, "row", "FAIL", reason=f"missing: {reason}")
    elif base.status == "failed":
        yield Verdict(name, "output", "PASS", reason=f"nothing to compare with: base has {base.reason}")
    else:
        for metric in COUNTS:
            before, after = base.figures.get(metric), head.figures.get(metric)
            if before is not None and before != after:
                is_fewer = after is not None and after < before
                yield Verdict(name, metric, "PASS" if is_fewer else "FAIL", base=before, head=after)


def misbehavior(control: Verdict) -> str:
    """Return an error if a control misbehaves, otherwise an empty text."""
    assert control.bounds is not None  # noqa: S101  # every verdict on a time has bounds
    is_different = control.status == "FAIL"
    effect = f"({100 * control.bounds.effect:+.2f} %, at least {100 * control.bounds.low:+.2f} %)"
    if control_of(control.cell) == SAME and is_different:
        return (
            f"the control with equal work differs between the arms {effect}: "
            "both arms do not run under the same conditions"
        )
    if control_of(control.cell) == MORE and not is_different:
        return f"the control with 2 % more work was not found slower {effect}: the machine is too noisy"
    return ""
