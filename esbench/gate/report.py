"""A decision as text for a terminal, Markdown for a pull request, and annotations for GitHub."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from tabulate import tabulate

from esbench.gate.decision import PASSED
from esbench.gate.records import MORE, SAME, Bounds, Decision, Status, Verdict
from esbench.report.text import escape, one_line
from esbench.units import format_value

HEADINGS = (
    "verdict",
    "code",
    "cell",
    "metric",
    "slower by",
    "at least",
    "at most",
    "detectable",
    "replicates",
    "",
)
WORDS: dict[int, str] = {0: "PASS", 1: "FAIL", 2: "ERROR", 3: "INCONCLUSIVE"}
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
    counts = Counter(one.status for one in _every(decision))
    accepted = sum(bool(one.accepted) for one in _every(decision))
    parts = [f"{counts[status]} {status}" for status in ORDER if counts[status]]
    parts += [f"{accepted} of these accepted"] if accepted else []
    seen = [one.bounds.mde for one in decision.verdicts if one.bounds]
    parts += [f"median detectable slowdown {_share(median(seen), signed=False)}"] if seen else []
    arms = decision.opening.revisions
    revisions = f"{arms['head'].commit[:12]} against {arms['base'].commit[:12]}"
    verdict = "INVALID" if decision.invalid and decision.exit_code != 1 else WORDS[decision.exit_code]
    return one_line(f"{verdict}: {revisions}: {', '.join(parts) or 'nothing was measured'}")


def text(decision: Decision, *, everything: bool = False) -> str:
    """Return the decision for a terminal; without ``everything``, cells without a sign are left out."""
    rows = [list(map(one_line, _row(one))) for one in _shown(decision, everything=everything)]
    parts = [tabulate(rows, headers=HEADINGS, tablefmt="simple", disable_numparse=True)] if rows else []
    parts += [one_line(f"INVALID: {reason}") for reason in decision.invalid]
    parts += [one_line(f"ERROR: {reason}") for reason in decision.unused]
    parts += [LEGEND, headline(decision)] if rows else [headline(decision)]
    return "\n\n".join(parts) + "\n"


def markdown(decision: Decision) -> str:
    """Return the decision as Markdown for a pull request."""
    environment, settings = decision.opening.environment, decision.settings
    rows = [list(map(escape, _row(one))) for one in _shown(decision, everything=False)]
    rest = [list(map(escape, _row(one))) for one in _shown(decision, everything=True)]
    parts = [f"### esbench gate: {escape(headline(decision))}"]
    parts += [f"**INVALID**: {escape(reason)}" for reason in decision.invalid]
    parts += [f"**ERROR**: {escape(reason)}" for reason in decision.unused]
    parts += [_pipe(rows), escape(LEGEND)] if rows else []
    parts += (
        [f"<details><summary>all {len(rest)} rows</summary>\n\n{_pipe(rest)}\n\n</details>"] if rest else []
    )
    parts.append(
        escape(
            f"On {environment.device_name}, {environment.threads} threads, torch {environment.torch}; suite "
            f"{decision.opening.suite}, seed {decision.opening.seed}, {decision.wall_s:.0f} s; a cell "
            f"fails if it is shown to be slower by more than {_share(settings.margin, signed=False)}, at a "
            f"family-wise level of {_share(settings.alpha, signed=False)}."
        )
    )
    return "\n\n".join(parts) + "\n"


def annotations(decision: Decision) -> Iterator[str]:
    """Yield the commands by which a GitHub workflow annotates a pull request."""
    for one in _shown(decision, everything=False):
        level = {"FAIL": "error", "INCONCLUSIVE": "warning"}.get(one.status)
        if level and not one.accepted:
            yield f"::{level} title=esbench gate%3A {one.code}::{_message(_sentence(one))}"
    for reason in decision.invalid:
        yield f"::error title=esbench gate%3A invalid::{_message(reason)}"
    for reason in decision.unused:
        yield f"::error title=esbench gate%3A unused::{_message(reason)}"
    if decision.exit_code == PASSED:
        yield f"::notice title=esbench gate::{_message(headline(decision))}"


def _every(decision: Decision) -> list[Verdict]:
    return [*decision.verdicts, *([decision.mean] if decision.mean else [])]


def _shown(decision: Decision, *, everything: bool) -> list[Verdict]:
    """Return the rows, worst first, then the controls."""
    rows = [one for one in decision.verdicts if everything or one.code != "no-sign"]
    rows += [decision.mean] if decision.mean else []
    worst_first = sorted(rows, key=lambda one: (ORDER[one.status], bool(one.accepted), -_size(one)))
    return [*worst_first, *(decision.controls if everything else ())]


def _size(verdict: Verdict) -> float:
    return verdict.bounds.effect if verdict.bounds else float("inf")


def _row(verdict: Verdict) -> tuple[str, ...]:
    found = verdict.bounds
    if found and (outcomes := CONTROLS.get(verdict.cell.rpartition(" | ")[0])):
        return ("", outcomes[verdict.status == "FAIL"], verdict.cell, "time", *_figures(found), "")
    remark = f"accepted: {verdict.accepted}" if verdict.accepted else verdict.reason
    if verdict.metric in {"row", "output"}:
        return (verdict.status, verdict.code, verdict.cell, verdict.metric, "", "", "", "", "", remark)
    if found is None:
        return (
            verdict.status,
            verdict.code,
            verdict.cell,
            verdict.metric,
            _counts(verdict),
            "",
            "",
            "",
            "",
            remark,
        )
    return (verdict.status, verdict.code, verdict.cell, "time", *_figures(found), remark)


def _counts(verdict: Verdict) -> str:
    """Format a count in base and head with the difference, which three digits may not show."""
    before, after = verdict.base, verdict.head
    words = f"{format_value(verdict.metric, before)} to {format_value(verdict.metric, after)}"
    if before is None or after is None:
        return words
    return f"{words} ({'-' if after < before else '+'}{format_value(verdict.metric, abs(after - before))})"


def _sentence(verdict: Verdict) -> str:
    """Return a row as a sentence."""
    row = _row(verdict)
    figures = [f"{heading} {value}" for heading, value in zip(HEADINGS[5:9], row[5:9], strict=True) if value]
    times = [f"slower by {row[4]}", *figures] if verdict.bounds else [row[4]]
    return ", ".join(filter(None, (*row[2:4], *times, row[9])))


def _figures(found: Bounds) -> tuple[str, ...]:
    shares = (_share(found.effect), _share(found.low), _share(found.high), _share(found.mde, signed=False))
    return (*shares, str(found.replicates))


def _share(value: float, *, signed: bool = True) -> str:
    """Format a share in percent with two decimals."""
    percent = round(100 * value, 2) + 0.0  # no minus sign before zero
    return f"{percent:{'+' if signed else ''}.2f} %"


def _pipe(rows: Sequence[Sequence[str]]) -> str:
    return tabulate(rows, headers=HEADINGS, tablefmt="pipe", disable_numparse=True)


def _message(words: str) -> str:
    """Escape a message of a workflow command; GitHub unescapes nothing else."""
    return one_line(words).replace("%", "%25")
