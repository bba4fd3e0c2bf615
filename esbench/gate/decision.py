"""The rule of the gate: from what was measured to verdicts and an exit code. Pure, and never open by default.

Counts are exact and need no statistics. Times pass two stages: a screen of a few replicates keeps the cells
that look slower, and new replicates confirm those alone. A cell FAILs when its slowdown lies above the
margin at a level that Holm gives it in the family of all that are confirmed, the geometric mean over cells
among them. What could not have been seen is no PASS: a cell too noisy for that is INCONCLUSIVE. Where the
gate's own controls misbehave, or nothing was measured, its times decide nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from esbench.gate.evidence import bounds, estimate, geometric_mean, holm, screened, screened_alone
from esbench.gate.protocol import ARMS, Arm, Cell
from esbench.gate.records import (
    MORE,
    SAME,
    SCHEMA,
    Bounds,
    Decision,
    Metric,
    Opening,
    Replicate,
    Settings,
    Surveyed,
    Verdict,
)

MEAN = "geometric mean"
"""The name of the effect that all cells have in common, as a member of the family."""

PASSED, FAILED, USAGE, INVALID = 0, 1, 2, 3
"""The exit codes of a judgement; 2 is also that of a command that came to none, as is 130."""

FOUND_ABOVE = 0.005
"""The planted work is found where it lies above this, however much more the margin lets pass."""

Estimates = dict[str, list[float]]


@dataclass
class Evidence:
    """Everything that was measured, as far as it goes."""

    surveys: list[Surveyed] = field(default_factory=list)
    replicates: list[Replicate] = field(default_factory=list)

    def estimates(self, stage: str, trim: float) -> Estimates:
        """Cell or control -> the log of the ratio of each replicate of a stage."""
        found: Estimates = {}
        for replicate in self.replicates:
            for timed in replicate.cells if replicate.stage == stage else ():
                found.setdefault(timed.cell, []).append(estimate(timed, trim))
        return found


def timed_cells(surveys: Sequence[Surveyed]) -> list[Cell]:
    """The cells that both arms have and compute rightly: those to be timed."""
    right: dict[Arm, set[str]] = {arm: set() for arm in ARMS}
    cells: dict[str, Cell] = {}
    for row in surveys:
        cells[row.cell.name] = row.cell
        if row.status == "ok":
            right[row.arm].add(row.cell.name)
    return [cell for name, cell in cells.items() if all(name in right[arm] for arm in ARMS)]


def kept(evidence: Evidence, cells: Sequence[Cell], settings: Settings) -> list[Cell]:
    """The cells that new replicates must confirm: all of them where it is the mean that looks slower."""
    names = {cell.name for cell in cells}
    found = to_confirm(_of_cells(evidence.estimates("screen", settings.trim), names), settings)
    return [cell for cell in cells if cell.name in found or MEAN in found]


def to_confirm(screen: Estimates, settings: Settings) -> set[str]:
    """Return who looks slower at the screen, or is too noisy for it to have seen that.

    The mean stands among them by its name: then all cells are confirmed.
    """
    return _suspects(_screened(screen, settings), settings) if _whole(screen, settings.screen) else set()


def _screened(screen: Estimates, settings: Settings) -> dict[str, Bounds]:
    """Return what the screen sees of all cells, and of their mean."""
    return {**screened(screen, settings), MEAN: screened_alone(geometric_mean(screen), settings)}


def _suspects(found: Mapping[str, Bounds], settings: Settings) -> set[str]:
    return {
        name for name, one in found.items() if one.p < settings.screen_alpha or one.mde > settings.worst_mde
    }


def judge(
    opening: Opening, evidence: Evidence, settings: Settings, *, wall_s: float, invalid: Sequence[str] = ()
) -> Decision:
    """Judge all that was measured; ``invalid`` is what is known already to be wrong with its times."""
    cells = timed_cells(evidence.surveys)
    names = {cell.name for cell in cells}
    screen = evidence.estimates("screen", settings.trim)
    confirm = evidence.estimates("confirm", settings.trim)
    controls, misbehaved = control_verdicts(confirm, settings)
    exact = list(_exact(evidence.surveys))
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
    """A certain failure is never hidden by an invalid run; slower is not certain where it is invalid."""
    failed = [one for one in verdicts if one.status == "FAIL" and not one.accepted]
    if any(one.metric != "latency_ns" for one in failed) or (failed and not invalid):
        return FAILED
    if invalid or any(one.status == "INCONCLUSIVE" for one in verdicts):
        return INVALID
    return PASSED


def _exact(surveys: Sequence[Surveyed]) -> Iterator[Verdict]:
    """Yield what needs no statistics: rows that came or went, wrong outputs, counts."""
    rows: dict[str, dict[Arm, Surveyed]] = {}
    for row in surveys:
        rows.setdefault(row.cell.name, {})[row.arm] = row
    for name, arms in rows.items():
        base, head = arms.get("base"), arms.get("head")
        if head is not None and head.status == "failed":
            yield Verdict(cell=name, metric="output", status="FAIL", code="wrong", reason=head.reason)
        elif base is None or base.status in {"absent", "unavailable"}:
            if head is not None and head.status == "ok":
                yield Verdict(
                    cell=name, metric="row", status="PASS", code="added", reason="base has no such row"
                )
        elif head is None or head.status != "ok":
            reason = head.reason if head else "it was not asked"
            yield Verdict(cell=name, metric="row", status="FAIL", code="missing", reason=reason)
        elif base.status == "failed":
            yield Verdict(cell=name, metric="output", status="PASS", code="wrong-base", reason=base.reason)
        else:
            yield from _counts(name, base, head)


def _counts(name: str, base: Surveyed, head: Surveyed) -> Iterator[Verdict]:
    metrics: tuple[Metric, ...] = ("peak_bytes", "noise_bytes", "launches")
    for metric in metrics:
        before, after = base.figures.get(metric), head.figures.get(metric)
        if before is None and after is None:
            continue
        if after is None:
            yield Verdict(
                cell=name,
                metric=metric,
                status="FAIL",
                code="missing",
                base=before,
                reason="head counts none",
            )
        elif before is not None and after != before:
            more = after > before
            yield Verdict(
                cell=name,
                metric=metric,
                status="FAIL" if more else "PASS",
                code=("more-launches" if metric == "launches" else "more-bytes") if more else "fewer",
                base=before,
                head=after,
            )


def time_verdicts(
    screen: Estimates, confirm: Estimates, settings: Settings
) -> tuple[list[Verdict], Verdict | None]:
    """Judge the times of all cells, and of their mean."""
    if not _whole(screen, settings.screen):
        return [], None
    first = _screened(screen, settings)
    suspects = _suspects(first, settings)
    again = {
        name: found for name, found in confirm.items() if name in suspects and len(found) == settings.confirm
    }
    if MEAN in suspects and set(confirm) == set(screen) and _whole(confirm, settings.confirm):
        again[MEAN] = geometric_mean(confirm)
    family = {
        name: bounds(found, null=settings.margin, alpha=settings.alpha, power=settings.power).p
        for name, found in again.items()
    }
    levels = holm(family, settings.alpha)
    verdicts = {
        name: _confirmed(name, again[name], levels[name], settings)
        if name in again
        else _unconfirmed(name, found, suspect=name in suspects)
        for name, found in first.items()
    }
    return [verdicts[name] for name in screen], verdicts[MEAN]


def _confirmed(name: str, estimates: Sequence[float], level: float, settings: Settings) -> Verdict:
    found = bounds(estimates, null=settings.margin, alpha=level, power=settings.power)
    if found.p <= level:
        return Verdict(cell=name, metric="latency_ns", status="FAIL", code="slower", bounds=found)
    # Noise is the cell's own: how many others are confirmed beside it does not make it noisier.
    alone = bounds(estimates, null=settings.margin, alpha=settings.alpha, power=settings.power)
    if alone.mde > settings.worst_mde:
        return Verdict(cell=name, metric="latency_ns", status="INCONCLUSIVE", code="noisy", bounds=found)
    return Verdict(cell=name, metric="latency_ns", status="PASS", code="not-confirmed", bounds=found)


def _unconfirmed(name: str, found: Bounds, *, suspect: bool) -> Verdict:
    if suspect:  # it should have been confirmed, and was not
        return Verdict(cell=name, metric="latency_ns", status="INCONCLUSIVE", code="noisy", bounds=found)
    return Verdict(cell=name, metric="latency_ns", status="PASS", code="no-sign", bounds=found)


def control_verdicts(confirm: Estimates, settings: Settings) -> tuple[tuple[Verdict, ...], list[str]]:
    """Judge the gate's own controls by the rule for cells; return in words how they misbehave."""
    verdicts, reasons = [], []
    for name in sorted(confirm):
        kind = name.rpartition(" | ")[0]
        if kind not in {SAME, MORE} or len(confirm[name]) < settings.confirm:
            continue
        margin = min(settings.margin, FOUND_ABOVE) if kind == MORE else settings.margin
        rule = msgspec.structs.replace(settings, margin=margin)
        verdict = _confirmed(name, confirm[name], settings.alpha, rule)
        verdicts.append(verdict)
        if kind == MORE and verdict.status != "FAIL":
            reasons.append(f"the 2 % that were planted were not found ({_effect(verdict)}): too noisy here")
        faster = bounds(
            [-one for one in confirm[name]], null=settings.margin, alpha=settings.alpha, power=settings.power
        )
        if kind == SAME and (verdict.status == "FAIL" or faster.p <= settings.alpha):
            reasons.append(f"the same work differs between the arms ({_effect(verdict)}): they are not alike")
    return tuple(verdicts), reasons


def _incomplete(
    screen: Estimates, confirm: Estimates, names: set[str], methods: Sequence[str], settings: Settings
) -> Iterator[str]:
    """Yield what was not measured and should have been."""
    if not names:
        yield "no cell was measured in both arms"
        return
    for control in (f"{kind} | {method}" for kind in (SAME, MORE) for method in methods):
        if len(confirm.get(control, ())) != settings.confirm:
            yield f"{control}: it was not measured"
    for stage, found, wanted, count in (
        ("screen", screen, names, settings.screen),
        ("confirm", confirm, to_confirm(_of_cells(screen, names), settings) - {MEAN}, settings.confirm),
    ):
        for name in sorted(wanted):
            if len(found.get(name, ())) != count:
                yield f"{name}: {len(found.get(name, ()))} of {count} replicates of the {stage}"


def _whole(estimates: Estimates, count: int) -> bool:
    return bool(estimates) and all(len(found) == count for found in estimates.values())


def _of_cells(estimates: Estimates, names: set[str]) -> Estimates:
    return {name: found for name, found in estimates.items() if name in names}


def _effect(verdict: Verdict) -> str:
    found = verdict.bounds
    return f"{100 * found.effect:+.2f} %, at least {100 * found.low:+.2f} %" if found else "not measured"
