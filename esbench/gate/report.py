"""A decision as text for a terminal and as Markdown for a pull request."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from tabulate import tabulate

from esbench.gate.decision import FAILED, INVALID, PASSED, USAGE
from esbench.gate.records import MORE, SAME, Decision, Status, Verdict, split_method
from esbench.text import escape, one_line
from esbench.units import format_value

HEADINGS = (
    *("verdict", "code", "cell", "metric"),
    *("slower by", "at least", "at most", "detectable", "replicates"),
    "",
)
WORDS = {PASSED: "PASS", FAILED: "FAIL", USAGE: "ERROR", INVALID: "INCONCLUSIVE"}
"""Exit code -> the first word of the headline."""
ORDER: dict[Status, int] = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2}
CONTROLS = {SAME: ("alike", "differs"), MORE: ("not found", "found")}
"""Control -> text shown instead of a verdict if it is not slower, and if it is slower."""
LEGEND = (
    "slower by: slowdown of head relative to base; at least: lower bound at the level of the test; at most: "
    "upper bound at the level of 1 %; detectable: the smallest slowdown that is found with a probability of "
    "80 %; replicates: set-ups of the cell in both revisions."
)


def headline(decision: Decision) -> str:
    """Return the decision in one line."""
    counts = Counter(verdict.status for verdict in decision.all_verdicts)
    accepted = sum(bool(verdict.accepted) for verdict in decision.all_verdicts)
    parts = [f"{counts[status]} {status}" for status in ORDER if counts[status]]
    parts += [f"{accepted} of these accepted"] if accepted else []
    detectable = [verdict.bounds.mde for verdict in decision.verdicts if verdict.bounds]
    parts += [f"median detectable slowdown {_percent(median(detectable))}"] if detectable else []
    revisions = decision.opening.revisions
    arms = f"{revisions['head'].commit[:12]} against {revisions['base'].commit[:12]}"
    is_invalid = decision.invalid and decision.exit_code != FAILED
    word = "INVALID" if is_invalid else WORDS[decision.exit_code]
    return f"{word}: {arms}: {', '.join(parts) or 'nothing was measured'}"


def text(decision: Decision) -> str:
    """Return the decision for a terminal, without cells that do not look slower."""
    rows = [list(map(one_line, _row(verdict))) for verdict in _notable(decision)]
    parts = [tabulate(rows, headers=HEADINGS, tablefmt="simple", disable_numparse=True)] if rows else []
    parts += [one_line(f"INVALID: {reason}") for reason in decision.invalid]
    parts += [one_line(f"ERROR: {reason}") for reason in decision.unused]
    parts += [LEGEND, headline(decision)] if rows else [headline(decision)]
    return "\n\n".join(parts) + "\n"


def markdown(decision: Decision) -> str:
    """Return the decision as Markdown for a pull request: notable rows, then all rows in a fold."""
    opening, settings = decision.opening, decision.settings
    machine = opening.environment
    notable = _notable(decision)
    unchanged = [verdict for verdict in decision.verdicts if verdict.code == "no-sign"]
    verdicts = [*_worst_first([*notable, *unchanged]), *decision.controls]
    parts = [f"### esbench gate: {escape(headline(decision))}"]
    parts += [f"**INVALID**: {escape(reason)}" for reason in decision.invalid]
    parts += [f"**ERROR**: {escape(reason)}" for reason in decision.unused]
    parts += [_table(notable), escape(LEGEND)] if notable else []
    if verdicts:
        table = _table(verdicts)
        parts.append(f"<details><summary>all {len(verdicts)} rows</summary>\n\n{table}\n\n</details>")
    parts.append(
        escape(
            f"On {machine.device_name}, {machine.threads} threads, torch {machine.torch}; suite "
            f"{opening.suite}, seed {opening.seed}, {decision.wall_s:.0f} s; a cell fails if it is shown to "
            f"be slower by more than {_percent(settings.margin)}, at a family-wise level of "
            f"{_percent(settings.alpha)}."
        )
    )
    return "\n\n".join(parts) + "\n"


def _notable(decision: Decision) -> list[Verdict]:
    """Return the verdicts without those on cells that do not look slower, the worst first."""
    notable = [verdict for verdict in decision.verdicts if verdict.code != "no-sign"]
    return _worst_first([*notable, decision.mean] if decision.mean else notable)


def _worst_first(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Sort by status, accepted failures last, then by slowdown; verdicts without a time come first."""

    def sort_key(verdict: Verdict) -> tuple[int, bool, float]:
        slowdown = verdict.bounds.effect if verdict.bounds else float("inf")
        return ORDER[verdict.status], bool(verdict.accepted), -slowdown

    return sorted(verdicts, key=sort_key)


def _row(verdict: Verdict) -> tuple[str, ...]:
    """Return the cells of a verdict's row, one for each of :data:`HEADINGS`."""
    bounds = verdict.bounds
    status, code = str(verdict.status), str(verdict.code)
    control, _ = split_method(verdict.cell)
    if control in CONTROLS:
        if_not_slower, if_slower = CONTROLS[control]
        status, code = "", if_slower if verdict.status == "FAIL" else if_not_slower
    if bounds:
        signed = [_percent(share, "+") for share in (bounds.effect, bounds.low, bounds.high)]
        numbers = (*signed, _percent(bounds.mde), str(bounds.replicates))
    else:
        numbers = (_counts(verdict), "", "", "", "")
    metric = "time" if bounds else verdict.metric
    remark = f"accepted: {verdict.accepted}" if verdict.accepted else verdict.reason
    return (status, code, verdict.cell, metric, *numbers, remark)


def _counts(verdict: Verdict) -> str:
    """Format a count of base and of head, and the difference, which may not be visible in three digits."""
    before, after = verdict.base, verdict.head
    if before is None or after is None:
        return "" if before is None else format_value(verdict.metric, before)
    first, second, difference = (
        format_value(verdict.metric, count) for count in (before, after, abs(after - before))
    )
    return f"{first} to {second} ({'-' if after < before else '+'}{difference})"


def _percent(share: float, sign: str = "") -> str:
    return f"{round(100 * share, 2) + 0.0:{sign}.2f} %"  # + 0.0: no minus sign before zero


def _table(verdicts: Sequence[Verdict]) -> str:
    rows = [list(map(escape, _row(verdict))) for verdict in verdicts]
    return tabulate(rows, headers=HEADINGS, tablefmt="pipe", disable_numparse=True)
