"""A judgement as people read it: on a terminal, in a pull request, and as GitHub's annotations."""

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
    "could see",
    "replicates",
    "",
)
WORDS: dict[int, str] = {0: "PASS", 1: "FAIL", 2: "ERROR", 3: "INCONCLUSIVE"}
ORDER: dict[Status, int] = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2}
CONTROLS = {SAME: ("alike", "differs"), MORE: ("not found", "found")}
"""What is said of a control in place of a verdict: where it does not look slower, and where it does."""
LEGEND = (
    "slower by: by how much head takes longer than base; at least, at most: its one-sided bounds, at the "
    "level of the stage that decided; could see: the least slowdown that would have been found with a "
    "probability of 80 %."
)


def headline(judgement: Decision) -> str:
    """The whole in one line."""
    counts = Counter(one.status for one in _every(judgement))
    accepted = sum(bool(one.accepted) for one in _every(judgement))
    parts = [f"{counts[status]} {status}" for status in ORDER if counts[status]]
    parts += [f"{accepted} of these accepted"] if accepted else []
    seen = [one.bounds.mde for one in judgement.verdicts if one.bounds]
    parts += [f"half of the cells could have shown {_share(median(seen), signed=False)}"] if seen else []
    arms = judgement.opening.revisions
    revisions = f"{arms['head'].commit[:12]} against {arms['base'].commit[:12]}"
    verdict = "INVALID" if judgement.invalid and judgement.exit_code != 1 else WORDS[judgement.exit_code]
    return one_line(f"{verdict}: {revisions}: {', '.join(parts) or 'nothing was judged'}")


def text(judgement: Decision, *, everything: bool = False) -> str:
    """The judgement for a terminal: what is remarkable, or all of it."""
    rows = [list(map(one_line, _row(one))) for one in _shown(judgement, everything=everything)]
    parts = [tabulate(rows, headers=HEADINGS, tablefmt="simple", disable_numparse=True)] if rows else []
    parts += [one_line(f"INVALID: {reason}") for reason in judgement.invalid]
    parts += [one_line(f"ERROR: {reason}") for reason in judgement.unused]
    parts += [LEGEND, headline(judgement)] if rows else [headline(judgement)]
    return "\n\n".join(parts) + "\n"


def markdown(judgement: Decision) -> str:
    """The judgement as a summary of a pull request."""
    environment, settings = judgement.opening.environment, judgement.settings
    rows = [list(map(escape, _row(one))) for one in _shown(judgement, everything=False)]
    rest = [list(map(escape, _row(one))) for one in _shown(judgement, everything=True)]
    parts = [f"### esbench gate: {escape(headline(judgement))}"]
    parts += [f"**INVALID**: {escape(reason)}" for reason in judgement.invalid]
    parts += [f"**ERROR**: {escape(reason)}" for reason in judgement.unused]
    parts += [_pipe(rows), escape(LEGEND)] if rows else []
    parts += (
        [f"<details><summary>all {len(rest)} rows</summary>\n\n{_pipe(rest)}\n\n</details>"] if rest else []
    )
    parts.append(
        escape(
            f"On {environment.device_name}, {environment.threads} threads, torch {environment.torch}; suite "
            f"{judgement.opening.suite}, seed {judgement.opening.seed}, {judgement.wall_s:.0f} s; a cell "
            f"fails when it is shown to be slower by more than {_share(settings.margin, signed=False)}, at a "
            f"family-wise level of {_share(settings.alpha, signed=False)}."
        )
    )
    return "\n\n".join(parts) + "\n"


def annotations(judgement: Decision) -> Iterator[str]:
    """What GitHub's runner shows beside a pull request: one command a line."""
    for one in _shown(judgement, everything=False):
        level = {"FAIL": "error", "INCONCLUSIVE": "warning"}.get(one.status)
        if level and not one.accepted:
            yield f"::{level} title=esbench gate%3A {one.code}::{_message(_sentence(one))}"
    for reason in judgement.invalid:
        yield f"::error title=esbench gate%3A invalid::{_message(reason)}"
    for reason in judgement.unused:
        yield f"::error title=esbench gate%3A unused::{_message(reason)}"
    if judgement.exit_code == PASSED:
        yield f"::notice title=esbench gate::{_message(headline(judgement))}"


def _every(judgement: Decision) -> list[Verdict]:
    return [*judgement.verdicts, *([judgement.mean] if judgement.mean else [])]


def _shown(judgement: Decision, *, everything: bool) -> list[Verdict]:
    """The rows, the worst first; the mean and the controls at the end of their kind."""
    rows = [one for one in judgement.verdicts if everything or one.code != "no-sign"]
    rows += [judgement.mean] if judgement.mean else []
    worst_first = sorted(rows, key=lambda one: (ORDER[one.status], bool(one.accepted), -_size(one)))
    return [*worst_first, *(judgement.controls if everything else ())]


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
    """A count then and now, and by how much it moved: a byte more would not show in three digits."""
    before, after = verdict.base, verdict.head
    words = f"{format_value(verdict.metric, before)} to {format_value(verdict.metric, after)}"
    if before is None or after is None:
        return words
    return f"{words} ({'-' if after < before else '+'}{format_value(verdict.metric, abs(after - before))})"


def _sentence(verdict: Verdict) -> str:
    """A row where no heading stands above it."""
    row = _row(verdict)
    figures = [f"{heading} {value}" for heading, value in zip(HEADINGS[5:9], row[5:9], strict=True) if value]
    times = [f"slower by {row[4]}", *figures] if verdict.bounds else [row[4]]
    return ", ".join(filter(None, (*row[2:4], *times, row[9])))


def _figures(found: Bounds) -> tuple[str, ...]:
    shares = (_share(found.effect), _share(found.low), _share(found.high), _share(found.mde, signed=False))
    return (*shares, str(found.replicates))


def _share(value: float, *, signed: bool = True) -> str:
    """A share in percent, to two digits behind the point: the margin is half a percent."""
    percent = round(100 * value, 2) + 0.0  # no minus before nothing
    return f"{percent:{'+' if signed else ''}.2f} %"


def _pipe(rows: Sequence[Sequence[str]]) -> str:
    return tabulate(rows, headers=HEADINGS, tablefmt="pipe", disable_numparse=True)


def _message(words: str) -> str:
    """Words as they can stand behind a command of GitHub's runner: there it takes back nothing else."""
    return one_line(words).replace("%", "%25")
