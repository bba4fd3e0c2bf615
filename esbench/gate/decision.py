"""The decision of the gate: verdicts and an exit code from measured times and counts. No torch.

Counts, outputs and missing rows are compared exactly. Times are tested in looks. A replicate, which is one
set-up of a cell in both arms, gives the log of head / base. At each look, all replicates of a cell so far
give a trimmed mean and its standard error (Yuen, 1974). A cell FAILs at the first look at which it is shown
to be slower than the margin, and ends early if it is shown to be hardly slower; the others get more
replicates. The geometric mean over cells is tested at the first look.

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
    CONTROLS,
    MORE,
    SAME,
    Arm,
    Bounds,
    Cell,
    Decision,
    Metric,
    Opening,
    Replicate,
    Settings,
    Status,
    Surveyed,
    Verdict,
    controls_of,
    split_method,
)
from esbench.text import first_names

MEAN = "geometric mean"
"""Name of the mean over all cells, which is tested like a cell."""

PASSED, FAILED, USAGE, INVALID = 0, 1, 2, 3
"""Exit codes of a decision; a command that fails before the decision also ends with 2."""

CONTROL_MARGIN = 0.005
"""The margin in the test of the control with more work, unless the margin of the gate is smaller."""

ROUND_TRIM = 0.25
"""The share of rounds of a replicate dropped at either end."""

COUNTS: tuple[Metric, ...] = ("peak_bytes", "noise_bytes", "launches", "graphs")
"""What is counted exactly: bytes, launches (on a CPU, operators), and graphs that torch.compile makes."""

Looks = Sequence[Sequence[float]]
"""log(head / base) of the new replicates at each look."""
Tested = tuple[Status | None, Bounds]
"""The status of a test, None if it needs more replicates, and its bounds."""


@dataclass
class Evidence:
    """The measurements so far: counts of each cell in each arm, and log ratios.

    ``log_ratios``: name of a cell or control -> log(head / base) of each replicate by look.
    """

    surveys: list[Surveyed] = field(default_factory=list)
    log_ratios: dict[str, list[list[float]]] = field(default_factory=dict)

    def add(self, replicate: Replicate) -> None:
        """Add a replicate, at its look."""
        looks = self.log_ratios.setdefault(replicate.cell, [])
        looks += [[] for _ in range(replicate.look + 1 - len(looks))]
        looks[replicate.look].append(replicate_log_ratio(replicate))

    def timed_cells(self) -> list[Cell]:
        """Return the cells to time: both arms have them and compute them correctly, and head times them."""
        in_base = {row.cell for row in self.surveys if row.status == "ok" and row.arm == "base"}
        rows = (row for row in self.surveys if row.status == "ok" and row.arm == "head" and row.timed)
        return sorted((row.cell for row in rows if row.cell in in_base), key=lambda cell: cell.name)

    def looks(self, settings: Settings) -> dict[str, Looks]:
        """Return the log ratios of all cells and controls, up to the first look with a missing replicate."""
        cells = self.timed_cells()
        complete: dict[str, Looks] = {}
        for name in (*(cell.name for cell in cells), *controls_of(cells)):
            measured = self.log_ratios.get(name, [])
            pairs = zip(measured, settings.new_replicates, strict=False)
            missing = (look for look, (new, count) in enumerate(pairs) if len(new) < count)
            complete[name] = measured[: next(missing, len(measured))]
        return complete


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


def sequential_test(looks: Looks, level: float, settings: Settings) -> Tested:
    """Test one cell look by look; return its status, None if it needs more replicates."""
    log_ratios: list[float] = []
    for new in looks:
        log_ratios += new
        level_of_look = level / len(settings.looks)
        tested = bounds(trimmed(log_ratios, settings.trim), len(log_ratios), level_of_look, settings)
        if tested.p <= level_of_look:
            return "FAIL", tested
        if tested.high < settings.margin + settings.indifferent:
            return "PASS", tested
    if len(looks) < len(settings.looks):
        return None, tested
    return "INCONCLUSIVE" if tested.high > settings.worst else "PASS", tested


def tests_of(log_ratios: Mapping[str, Looks], settings: Settings) -> dict[str, list[Tested]]:
    """Test whether head is slower in each cell and control; with equal work, also whether it is faster."""
    level = level_of_cell(log_ratios, settings)
    with_margin = msgspec.structs.replace(settings, margin=min(settings.margin, CONTROL_MARGIN))
    tests = {}
    for name, looks in log_ratios.items():
        control, _ = split_method(name)
        rule = with_margin if control == MORE else settings
        directions = (1, -1) if control == SAME else (1,)
        tests[name] = [
            sequential_test(
                [[sign * log for log in new] for new in looks],
                settings.alpha if control in CONTROLS else level,
                rule,
            )
            for sign in directions
            if looks
        ]
    return tests


def open_names(log_ratios: Mapping[str, Looks], settings: Settings) -> list[str]:
    """Return the names of the cells and controls that need more replicates."""
    tests = tests_of(log_ratios, settings)
    statuses = {name: {status for status, _ in of_name} for name, of_name in tests.items()}
    return [name for name, found in statuses.items() if not found or (None in found and "FAIL" not in found)]


def level_of_cell(log_ratios: Mapping[str, Looks], settings: Settings) -> float:
    """Return the level of each cell, and of their mean."""
    cells = [name for name in log_ratios if split_method(name)[0] not in CONTROLS]
    return settings.alpha / (len(cells) + 1)


# Verdicts


def decide(
    opening: Opening, evidence: Evidence, settings: Settings, *, wall_s: float, invalid: Sequence[str]
) -> Decision:
    """Return the decision; ``invalid`` are reasons, found while measuring, to ignore the times."""
    log_ratios = evidence.looks(settings)
    verdicts = exact_verdicts(evidence.surveys)
    reasons = list(invalid)
    mean: Verdict | None = None
    controls: list[Verdict] = []
    if not log_ratios:
        reasons.append("no cell was measured in both arms")
    elif missing := open_names(log_ratios, settings):
        reasons.append(f"not all replicates were measured: {first_names(missing)}")
    if log_ratios and all(log_ratios.values()):
        times, mean = time_verdicts(log_ratios, settings)
        controls = [verdict for verdict in times if split_method(verdict.cell)[0] in CONTROLS]
        verdicts += [verdict for verdict in times if verdict not in controls]
        reasons += misbehavior(log_ratios, settings)
    return Decision(
        opening=opening,
        settings=settings,
        verdicts=tuple(verdicts),
        mean=mean,
        controls=tuple(controls),
        invalid=tuple(reasons),
        exit_code=exit_code([*verdicts, *filter(None, [mean])], reasons),
        wall_s=wall_s,
    )


def exit_code(verdicts: Sequence[Verdict], invalid: Sequence[str]) -> int:
    """Return the exit code; a slower cell counts only in a valid gate, any other failure always."""
    failed = {verdict.metric for verdict in verdicts if verdict.status == "FAIL" and not verdict.accepted}
    if failed and not (invalid and failed == {"latency_ns"}):
        return FAILED
    if invalid or any(verdict.status == "INCONCLUSIVE" for verdict in verdicts):
        return INVALID
    return PASSED


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


def time_verdicts(log_ratios: Mapping[str, Looks], settings: Settings) -> tuple[list[Verdict], Verdict]:
    """Return the verdicts on the times of all cells and controls, and that on the mean over the cells.

    A cell that still needs replicates is INCONCLUSIVE.
    """
    verdicts = [
        Verdict(name, "latency_ns", status or "INCONCLUSIVE", tested)
        for name, ((status, tested), *_) in tests_of(log_ratios, settings).items()
    ]
    level = level_of_cell(log_ratios, settings)
    cells = [looks for name, looks in log_ratios.items() if split_method(name)[0] not in CONTROLS]
    mean = mean_over_cells([trimmed(looks[0], settings.trim) for looks in cells])
    tested = bounds(mean, settings.looks[0], level, settings)
    is_noisy = tested.high > settings.worst
    status: Status = "FAIL" if tested.p <= level else "INCONCLUSIVE" if is_noisy else "PASS"
    return verdicts, Verdict(MEAN, "latency_ns", status, tested)


def misbehavior(log_ratios: Mapping[str, Looks], settings: Settings) -> Iterator[str]:
    """Yield an error for each control that misbehaves."""
    for name, tests in tests_of(log_ratios, settings).items():
        control, _ = split_method(name)
        is_different = any(status == "FAIL" for status, _ in tests)
        effect = f"({100 * tests[0][1].effect:+.2f} %, at least {100 * tests[0][1].low:+.2f} %)"
        if control == MORE and not is_different:
            yield f"the control with 2 % more work was not found slower {effect}: the machine is too noisy"
        elif control == SAME and is_different:
            yield (
                f"the control with equal work differs between the arms {effect}: "
                "both arms do not run under the same conditions"
            )
