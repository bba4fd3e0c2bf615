"""A decision as text for a terminal, as Markdown for a pull request, and as annotations of GitHub."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tabulate import tabulate

from esbench.gate.decision import FAILED, INVALID, PASSED, USAGE
from esbench.gate.records import MEAN, Decision, Status, Verdict, control_of
from esbench.text import escape, one_line, pluralize

HEADINGS = ("verdict", "cell", "metric", "slower by", "at least", "at most", "replicates", "")
WORDS = {PASSED: "PASS", FAILED: "FAIL", USAGE: "ERROR", INVALID: "INCONCLUSIVE"}
"""Exit code -> the first word of the headline."""
ORDER: dict[Status, int] = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2}
LEGEND = (
    "slower by: slowdown of head relative to base; at least: lower bound at the level of the test; at most: "
    "upper bound at the level of 1 %; replicates: set-ups of the cell in both revisions, or pairs of "
    "processes that set it up."
)


def headline(decision: Decision) -> str:
    """Return the decision in one line."""
    counts = Counter(verdict.status for verdict in decision.verdicts)
    accepted = sum(bool(verdict.accepted) for verdict in decision.verdicts)
    parts = [f"{counts[status]} {status}" for status in ORDER if counts[status]]
    parts += [f"{accepted} of these accepted"] if accepted else []
    revisions = decision.opening.revisions
    arms = f"{revisions['head'].commit[:12]} against {revisions['base'].commit[:12]}"
    is_invalid = decision.invalid and decision.exit_code != FAILED
    word = "INVALID" if is_invalid else WORDS[decision.exit_code]
    return f"{word}: {arms}: {', '.join(parts) or 'nothing was measured'}"


def text(decision: Decision) -> str:
    """Return the decision for a terminal, without cells whose time passes."""
    notable = notable_verdicts(decision)
    parts = [_table(notable, "simple", one_line), LEGEND] if notable else []
    parts += map(one_line, errors(decision))
    return "\n\n".join([*parts, headline(decision)]) + "\n"


def markdown(decision: Decision) -> str:
    """Return the decision as Markdown for a pull request: notable rows, then all rows in a fold."""
    opening, settings = decision.opening, decision.settings
    machine, notable = opening.environment, notable_verdicts(decision)
    everything = [*_worst_first(decision.verdicts), *decision.controls]
    parts = [f"### esbench gate: {escape(headline(decision))}"]
    parts += [f"**{escape(error)}**" for error in errors(decision)]
    parts += [_table(notable, "pipe", escape), escape(LEGEND)] if notable else []
    if everything:
        table = _table(everything, "pipe", escape)
        parts.append(f"<details><summary>all {len(everything)} rows</summary>\n\n{table}\n\n</details>")
    parts.append(
        escape(
            f"On {machine.device_name}, {pluralize(machine.threads, 'thread')}, torch {machine.torch}; suite "
            f"{opening.suite}, seed {opening.seed}; a cell fails if it is shown to "
            f"be slower by more than {_percent(settings.margin)}, at a family-wise level of "
            f"{_percent(settings.alpha)}."
        )
    )
    return "\n\n".join(parts) + "\n"


def annotations(decision: Decision) -> str:
    """Return a line for each error and failure, which GitHub shows beside the checks of a pull request."""
    failed = [verdict for verdict in notable_verdicts(decision) if verdict.status == "FAIL"]
    lines = [*errors(decision), *(": ".join(filter(None, _row(v))) for v in failed if not v.accepted)]
    return "".join(f"::error title=esbench gate::{one_line(line).replace('%', '%25')}\n" for line in lines)


def errors(decision: Decision) -> list[str]:
    """Return why the times are ignored, and the waivers that apply to nothing."""
    return [f"INVALID: {reason}" for reason in decision.invalid] + [f"ERROR: {w}" for w in decision.unused]


def notable_verdicts(decision: Decision) -> list[Verdict]:
    """Return the verdicts other than times that pass, the worst first; and always that on the mean."""
    return _worst_first(
        verdict
        for verdict in decision.verdicts
        if verdict.cell == MEAN or not (verdict.bounds and verdict.status == "PASS")
    )


def _worst_first(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Sort by status, accepted after other failures, then by slowdown; verdicts without a time come first."""

    def sort_key(verdict: Verdict) -> tuple[int, bool, float]:
        slowdown = verdict.bounds.effect if verdict.bounds else float("inf")
        return ORDER[verdict.status], bool(verdict.accepted), -slowdown

    return sorted(verdicts, key=sort_key)


def _row(verdict: Verdict) -> tuple[str, ...]:
    """Return the cells of a verdict's row, one for each of :data:`HEADINGS`."""
    bounds, status = verdict.bounds, str(verdict.status)
    if control_of(verdict.cell):
        status = "different" if status == "FAIL" else "alike"
    if bounds:
        signed = [_percent(share, "+") for share in (bounds.effect, bounds.low, bounds.high)]
        numbers = ["time", *signed, str(bounds.replicates)]
    else:
        counts = [format(count, ".15g") for count in (verdict.base, verdict.head) if count is not None]
        numbers = [verdict.metric, " to ".join(counts), "", "", ""]
    remark = f"accepted: {verdict.accepted}" if verdict.accepted else verdict.reason
    return (status, verdict.cell, *numbers, remark)


def _percent(share: float, sign: str = "") -> str:
    return f"{round(100 * share, 2) + 0.0:{sign}.2f} %"  # + 0.0: no minus sign before zero


def _table(verdicts: Sequence[Verdict], style: str, quote: Callable[[str], str]) -> str:
    rows = [list(map(quote, _row(verdict))) for verdict in verdicts]
    return tabulate(rows, headers=HEADINGS, tablefmt=style, disable_numparse=True)
