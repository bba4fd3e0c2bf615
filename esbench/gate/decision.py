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
    ARMS,
    CONTROLS,
    MORE,
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


@dataclass
class Evidence:
    """The measurements so far: counts of each cell in each arm, and log ratios.

    ``timed``: the cells that are timed if both arms compute them correctly; ``log_ratios``: name of a cell or
    control -> log(head / base) of each replicate by look.
    """

    surveys: list[Surveyed] = field(default_factory=list)
    timed: Sequence[Cell] = ()
    log_ratios: dict[str, list[list[float]]] = field(default_factory=dict)

    def add(self, replicate: Replicate) -> None:
        """Add a replicate, at its look."""
        looks = self.log_ratios.setdefault(replicate.cell, [])
        looks += [[] for _ in range(replicate.look + 1 - len(looks))]
        looks[replicate.look].append(replicate_log_ratio(replicate))

    def timed_cells(self) -> list[Cell]:
        """Return the cells to time: both arms have them and compute them correctly."""
        correct = {(row.cell, row.arm) for row in self.surveys if row.status == "ok"}
        return [cell for cell in self.timed if all((cell, arm) in correct for arm in ARMS)]

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

    A round is the mean of log(time) over all calls of head, minus that of base. The fastest call of each
    visit would vary less, but shows no slowdown of some calls only: a tenth of them slower by 30 % would look
    like 0.4 %. The order of a round is ABBA or BAAB, so that linear drift cancels.
    """
    base, head = (
        [fmean(map(math.log, visit)) for visit in visits] for visits in (replicate.base, replicate.head)
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


def sequential_test(looks: Looks, level: float, settings: Settings) -> tuple[Status | None, Bounds]:
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


def open_names(log_ratios: Mapping[str, Looks], settings: Settings) -> list[str]:
    """Return the names of the cells and controls that need more replicates."""
    level = level_of_cell(log_ratios, settings)

    def is_open(name: str, looks: Looks) -> bool:
        if not looks:
            return True
        control, _ = split_method(name)
        if control in CONTROLS:
            statuses = [status for status, _ in _control_tests(control, looks, settings)]
            return None in statuses and "FAIL" not in statuses
        return sequential_test(looks, level, settings)[0] is None

    return [name for name, looks in log_ratios.items() if is_open(name, looks)]


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
        cell_verdicts, mean = time_verdicts(log_ratios, settings)
        verdicts += cell_verdicts
        controls, misbehavior = control_verdicts(log_ratios, settings)
        reasons += misbehavior
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
    for row in surveys:
        rows.setdefault(row.cell.name, {})[row.arm] = row
    return [
        verdict for name, arms in rows.items() for verdict in _row_verdicts(name, arms["base"], arms["head"])
    ]


def _row_verdicts(name: str, base: Surveyed, head: Surveyed) -> Iterator[Verdict]:
    if head.status == "failed":
        yield Verdict(name, "output", "FAIL", reason=head.reason)
    elif base.status in {"absent", "unavailable"}:
        if head.status == "ok":
            yield Verdict(name, "row", "PASS", reason="added: base has no such row")
    elif head.status != "ok":
        yield Verdict(name, "row", "FAIL", reason=f"missing: {head.reason}")
    elif base.status == "failed":
        yield Verdict(name, "output", "PASS", reason=f"nothing to compare with: base has {base.reason}")
    else:
        for metric in COUNTS:
            before, after = base.figures.get(metric), head.figures.get(metric)
            if before is not None and before != after:
                is_fewer = after is not None and after < before
                yield Verdict(name, metric, "PASS" if is_fewer else "FAIL", base=before, head=after)


def time_verdicts(log_ratios: Mapping[str, Looks], settings: Settings) -> tuple[list[Verdict], Verdict]:
    """Return the verdicts on the times of all cells, and on their mean; controls are left out.

    A cell that still needs replicates is INCONCLUSIVE.
    """
    cells = {name: looks for name, looks in log_ratios.items() if split_method(name)[0] not in CONTROLS}
    level = level_of_cell(cells, settings)
    verdicts = [
        _time_verdict(name, *sequential_test(looks, level, settings)) for name, looks in cells.items()
    ]
    first_look = [trimmed(looks[0], settings.trim) for looks in cells.values()]
    tested = bounds(mean_over_cells(first_look), settings.looks[0], level, settings)
    is_noisy = tested.high > settings.worst
    status: Status = "FAIL" if tested.p <= level else "INCONCLUSIVE" if is_noisy else "PASS"
    return verdicts, _time_verdict(MEAN, status, tested)


def _time_verdict(name: str, status: Status | None, tested: Bounds) -> Verdict:
    return Verdict(name, "latency_ns", status or "INCONCLUSIVE", tested)


def _control_tests(control: str, looks: Looks, settings: Settings) -> list[tuple[Status | None, Bounds]]:
    """Test whether head is slower in a control; in the control of equal work, also whether it is faster."""
    if control == MORE:
        settings = msgspec.structs.replace(settings, margin=min(settings.margin, CONTROL_MARGIN))
        return [sequential_test(looks, settings.alpha, settings)]
    inverse = [[-log_ratio for log_ratio in log_ratios] for log_ratios in looks]
    return [sequential_test(directed, settings.alpha, settings) for directed in (looks, inverse)]


def control_verdicts(log_ratios: Mapping[str, Looks], settings: Settings) -> tuple[list[Verdict], list[str]]:
    """Return the verdicts on the controls, and an error for each control that misbehaves."""
    verdicts, reasons = [], []
    for name, looks in log_ratios.items():
        control, _ = split_method(name)
        if control not in CONTROLS:
            continue
        tests = _control_tests(control, looks, settings)
        verdicts.append(_time_verdict(name, *tests[0]))
        is_different = any(status == "FAIL" for status, _ in tests)
        effect = f"({100 * tests[0][1].effect:+.2f} %, at least {100 * tests[0][1].low:+.2f} %)"
        if control == MORE and not is_different:
            reasons.append(
                f"the control with 2 % more work was not found slower {effect}: the machine is too noisy"
            )
        elif control != MORE and is_different:
            reasons.append(
                f"the control with equal work differs between the arms {effect}: "
                "both arms do not run under the same conditions"
            )
    return verdicts, reasons
