"""A decision as text for a terminal, Markdown for a pull request, and annotations for GitHub."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from tabulate import tabulate

from esbench.gate.decision import PASSED
from esbench.gate.records import MORE, SAME, Decision, Status, Verdict
from esbench.report.text import escape, one_line
from esbench.units import format_value

HEADINGS = (
    *("verdict", "code", "cell", "metric"),
    *("slower by", "at least", "at most", "detectable", "replicates"),
    "",
)
WORDS = {0: "PASS", 1: "FAIL", 2: "ERROR", 3: "INCONCLUSIVE"}
ORDER: dict[Status, int] = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2}
CONTROLS = {SAME: ("alike", "differs"), MORE: ("not found", "found")}
"""Shown for a control instead of a verdict: if it is not slower, and if it is."""
LEGEND = (
    "slower by: slowdown of head relative to base; at least, at most: its one-sided bounds at the level of "
    "the stage that decided; detectable: the smallest slowdown that would have been found with a "
    "probability of 80 %."
)


def headline(decision: Decision) -> str:
    """Return the decision in one line."""
    every = [*decision.verdicts, *filter(None, [decision.mean])]
    counts = Counter(one.status for one in every)
    accepted = sum(bool(one.accepted) for one in every)
    parts = [f"{counts[status]} {status}" for status in ORDER if counts[status]]
    parts += [f"{accepted} of these accepted"] if accepted else []
    detectable = [one.bounds.mde for one in decision.verdicts if one.bounds]
    parts += [f"median detectable slowdown {_percent(median(detectable))}"] if detectable else []
    arms = decision.opening.revisions
    revisions = f"{arms['head'].commit[:12]} against {arms['base'].commit[:12]}"
    word = "INVALID" if decision.invalid and decision.exit_code != 1 else WORDS[decision.exit_code]
    return f"{word}: {revisions}: {', '.join(parts) or 'nothing was measured'}"


def text(decision: Decision) -> str:
    """Return the decision for a terminal, without cells that show no sign of a regression."""
    rows = [list(map(one_line, _row(one))) for one in _remarkable(decision)]
    parts = [tabulate(rows, headers=HEADINGS, tablefmt="simple", disable_numparse=True)] if rows else []
    parts += [one_line(f"INVALID: {reason}") for reason in decision.invalid]
    parts += [one_line(f"ERROR: {reason}") for reason in decision.unused]
    parts += [LEGEND, headline(decision)] if rows else [headline(decision)]
    return "\n\n".join(parts) + "\n"


def markdown(decision: Decision) -> str:
    """Return the decision as Markdown for a pull request: notable rows, then all rows, folded."""
    opening, settings = decision.opening, decision.settings
    here = opening.environment
    remarkable = _remarkable(decision)
    rest = [one for one in decision.verdicts if one.code == "no-sign"]
    every = [*_worst_first([*remarkable, *rest]), *decision.controls]
    parts = [f"### esbench gate: {escape(headline(decision))}"]
    parts += [f"**INVALID**: {escape(reason)}" for reason in decision.invalid]
    parts += [f"**ERROR**: {escape(reason)}" for reason in decision.unused]
    parts += [_table(remarkable), escape(LEGEND)] if remarkable else []
    if every:
        parts.append(f"<details><summary>all {len(every)} rows</summary>\n\n{_table(every)}\n\n</details>")
    parts.append(
        escape(
            f"On {here.device_name}, {here.threads} threads, torch {here.torch}; suite {opening.suite}, seed "
            f"{opening.seed}, {decision.wall_s:.0f} s; a cell fails if it is shown to be slower by more than "
            f"{_percent(settings.margin)}, at a family-wise level of {_percent(settings.alpha)}."
        )
    )
    return "\n\n".join(parts) + "\n"


def annotations(decision: Decision) -> Iterator[str]:
    """Yield the commands by which a GitHub workflow annotates a pull request."""
    for one in _remarkable(decision):
        level = {"FAIL": "error", "INCONCLUSIVE": "warning"}.get(one.status)
        if level and not one.accepted:
            _, _, cell, metric, effect, low, high, *_, reason = _row(one)
            times = f"slower by {effect}, at least {low}, at most {high}" if one.bounds else effect
            yield _command(level, one.code, ", ".join(filter(None, (cell, metric, times, reason))))
    for reason in decision.invalid:
        yield _command("error", "invalid", reason)
    for reason in decision.unused:
        yield _command("error", "unused", reason)
    if decision.exit_code == PASSED:
        yield _command("notice", "passed", headline(decision))


def _remarkable(decision: Decision) -> list[Verdict]:
    """Return all verdicts but those on cells that show no sign of a regression."""
    rows = [one for one in decision.verdicts if one.code != "no-sign"]
    return _worst_first([*rows, *filter(None, [decision.mean])])


def _worst_first(rows: Sequence[Verdict]) -> list[Verdict]:
    def place(one: Verdict) -> tuple[int, bool, float]:
        return ORDER[one.status], bool(one.accepted), -one.bounds.effect if one.bounds else float("-inf")

    return sorted(rows, key=place)


def _row(verdict: Verdict) -> tuple[str, ...]:
    found = verdict.bounds
    status, code = str(verdict.status), str(verdict.code)
    if outcomes := CONTROLS.get(verdict.cell.rpartition(" | ")[0]):
        status, code = "", outcomes[verdict.status == "FAIL"]
    if found:
        signed = [_percent(share, "+") for share in (found.effect, found.low, found.high)]
        figures = (*signed, _percent(found.mde), str(found.replicates))
    else:
        figures = (_counts(verdict), "", "", "", "")
    metric = "time" if found else verdict.metric
    remark = f"accepted: {verdict.accepted}" if verdict.accepted else verdict.reason
    return (status, code, verdict.cell, metric, *figures, remark)


def _counts(verdict: Verdict) -> str:
    """Format a count in base and head with the difference, which three digits may not show."""
    before, after = verdict.base, verdict.head
    if before is None or after is None:
        return "" if before is None else format_value(verdict.metric, before)
    first, second, difference = (
        format_value(verdict.metric, count) for count in (before, after, abs(after - before))
    )
    return f"{first} to {second} ({'-' if after < before else '+'}{difference})"


def _percent(share: float, sign: str = "") -> str:
    """Format a share in percent with two decimals."""
    return f"{round(100 * share, 2) + 0.0:{sign}.2f} %"  # + 0.0: no minus sign before zero


def _table(verdicts: Sequence[Verdict]) -> str:
    rows = [list(map(escape, _row(one))) for one in verdicts]
    return tabulate(rows, headers=HEADINGS, tablefmt="pipe", disable_numparse=True)


def _command(level: str, title: str, message: str) -> str:
    """Return a workflow command; GitHub unescapes nothing but percent signs on a line."""
    return f"::{level} title=esbench gate%3A {title}::{one_line(message).replace('%', '%25')}"
