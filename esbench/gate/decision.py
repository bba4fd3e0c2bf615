"""The decision of the gate: verdicts and an exit code from measured times and counts. No torch.

Counts, outputs and missing rows are compared exactly. Times are tested in looks. A replicate, which is one
set-up of a cell in both arms, gives the log of head / base. At each look, all replicates of a cell so far
give a trimmed mean and its standard error (Yuen, 1974). A cell FAILs at the first look at which it is shown
to be slower than the margin, and ends early if it is shown to be hardly slower; the others get more
replicates. The geometric mean over cells is tested at the first look.

The family-wise level is shared by Bonferroni's inequality, which holds for dependent tests: each cell and the
mean get the same part of it, and each look of a cell the same part of that, which is a constant spending of
the level over looks (Lan and DeMets, 1983). Ending early without a FAIL cannot raise a false alarm.

A cell too noisy to show a regression is INCONCLUSIVE. If a control misbehaves or a measurement is missing,
the gate is invalid and its times are ignored.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from statistics import fmean
from typing import NamedTuple

import msgspec
from scipy import special

from esbench.gate.records import (
    ARMS,
    CONTROLS,
    MORE,
    SAME,
    SCHEMA,
    Arm,
    Bounds,
    Cell,
    Code,
    Decision,
    Metric,
    Opening,
    Replicate,
    Settings,
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

    def complete_looks(self, settings: Settings) -> dict[str, Looks]:
        """Return the log ratios of all cells and controls at the looks with all their replicates."""
        cells = self.timed_cells()
        return {
            name: [
                log_ratios
                for log_ratios, _ in takewhile(
                    lambda pair: len(pair[0]) == pair[1],
                    zip(self.log_ratios.get(name, ()), settings.new_replicates, strict=False),
                )
            ]
            for name in (*(cell.name for cell in cells), *controls_of(cells))
        }

    def open_names(self, settings: Settings) -> list[str]:
        """Return the names of the cells and controls that need more replicates."""
        return open_names(self.complete_looks(settings), settings)


# Statistics: samples -> log ratio of a replicate -> bounds of a cell


def replicate_log_ratio(replicate: Replicate) -> float:
    """Return log(head / base) of a replicate: the trimmed mean over its rounds."""
    return trimmed(round_log_ratios(replicate), ROUND_TRIM).mean


def round_log_ratios(replicate: Replicate) -> list[float]:
    """Return log(head / base) of each round: mean over visits of head of log(minimum), minus that of base.

    Disturbances only make a call slower, so that the fastest call of a visit varies least (Chen and Revels,
    Robust benchmarking in noisy environments, 2016). The order of a round is ABBA or BAAB, so that linear
    drift cancels.
    """
    base, head = ([math.log(min(visit)) for visit in visits] for visits in (replicate.base, replicate.head))
    visits_in_rounds = zip(head[::2], head[1::2], base[::2], base[1::2], strict=True)
    return [(h1 + h2 - b1 - b2) / 2 for h1, h2, b1, b2 in visits_in_rounds]


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

    def t(probability: float) -> float:
        return float(special.stdtrit(estimate.freedom, probability))

    if error > 0:
        p = float(special.stdtr(estimate.freedom, (log_null - mean) / error))
    else:
        p = float(mean <= log_null)
    return Bounds(
        effect=_relative(mean),
        low=_relative(mean - t(1 - level) * error),
        high=_relative(mean + t(1 - settings.beta) * error),
        mde=_relative(log_null + (t(1 - level) + t(settings.power)) * error),
        p=p,
        replicates=replicates,
    )


def _relative(log_ratio: float) -> float:
    """Return exp(log_ratio) - 1, which is finite even for very large ratios."""
    return math.expm1(min(log_ratio, 100.0))


def sequential_test(looks: Looks, level: float, settings: Settings) -> tuple[Code | None, Bounds]:
    """Test one cell look by look; return the code of its verdict, None if it needs more replicates."""
    log_ratios: list[float] = []
    for look, new in enumerate(looks):
        log_ratios += new
        level_of_look = level / len(settings.looks)
        tested = bounds(trimmed(log_ratios, settings.trim), len(log_ratios), level_of_look, settings)
        if tested.p <= level_of_look:
            return "slower", tested
        if tested.high < settings.margin + settings.indifferent:
            return "not-confirmed" if look else "no-sign", tested
    if len(looks) < len(settings.looks):
        return None, tested
    return "noisy" if tested.mde > settings.worst_mde else "not-confirmed", tested


def open_names(log_ratios: Mapping[str, Looks], settings: Settings) -> list[str]:
    """Return the names of the cells and controls that need more replicates."""
    level = level_of_cell(log_ratios, settings)

    def is_open(name: str, looks: Looks) -> bool:
        if not looks:
            return True
        control, _ = split_method(name)
        if control in CONTROLS:
            codes = [code for code, _ in _control_tests(control, looks, settings)]
            return None in codes and "slower" not in codes
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
    log_ratios = evidence.complete_looks(settings)
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
        schema=SCHEMA,
        gate_id=opening.gate_id,
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
    is_noisy = tested.mde > settings.worst_mde
    code: Code = "slower" if tested.p <= level else "noisy" if is_noisy else "no-sign"
    return verdicts, _time_verdict(MEAN, code, tested)


def _time_verdict(name: str, code: Code | None, tested: Bounds) -> Verdict:
    status = {"slower": "FAIL", "noisy": "INCONCLUSIVE", None: "INCONCLUSIVE"}.get(code, "PASS")
    return Verdict(name, "latency_ns", status, code or "noisy", tested)  # type: ignore[arg-type]  # a status


def _control_tests(control: str, looks: Looks, settings: Settings) -> list[tuple[Code | None, Bounds]]:
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
        is_different = any(code == "slower" for code, _ in tests)
        effect = f"({100 * tests[0][1].effect:+.2f} %, at least {100 * tests[0][1].low:+.2f} %)"
        if control == MORE and not is_different:
            reasons.append(
                f"the control with 2 % more work was not found slower {effect}: the machine is too noisy"
            )
        if control == SAME and is_different:
            reasons.append(
                f"the control with equal work differs between the arms {effect}: "
                "both arms do not run under the same conditions"
            )
    return verdicts, reasons
