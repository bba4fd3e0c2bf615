"""The command ``check``: compare variants with the reference implementation."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from esbench.cli.options import FAILED, Plugins, Variants, app, load_usual, note, printing_to_stderr
from esbench.registry import REGISTRY, Entry
from esbench.schema import Case
from esbench.supervisor import Child, supervise
from esbench.text import fill, first_names, one_line, pluralize

if TYPE_CHECKING:
    from esbench.measure.validation import ExactChecks

NOT_CHECKED = "not checked"

_Unavailable = dict[str, dict[str, set[str]]]
"""Reason -> variant -> operators."""


@app.command()
def check(variants: Variants = None, plugin: Plugins = None) -> None:
    """Compare variants with the reference; nothing is timed.

    Every variant is checked on every operator. Prints one line per variant, and the variants that cannot run
    here once per reason. Exit code 1 if a variant fails or was not checked: it has no case to check, or
    stopped after its set-up had accepted one. Also if nothing was compared.

    Example: esbench check --plugin my_scheme.py --variants MyScheme
    """
    child = supervise(note)
    from esbench.measure.validation import ExactChecks

    entries = load_usual(variants, plugin)
    cases = REGISTRY.find_suite("check").cases
    checks = ExactChecks(cases, "cpu", 0)
    counts = Counter[str]()
    unavailable: _Unavailable = {}
    width = max(len(entry.variant.name) for entry in entries)
    ended = child.announcement.excluded
    # A new process checks everything again, but an earlier one has printed the lines before the variant that
    # ended it.
    printed = max((index for index, entry in enumerate(entries) if entry.variant in ended), default=0)
    for index, entry in enumerate(entries):
        if entry.variant in ended:
            lines = ["failed: it ended the process"]
            counts["failed"] += 1
        else:
            with printing_to_stderr():
                lines = _check(entry, cases, checks, child, counts, unavailable)
        for line in lines if index >= printed else ():
            typer.echo(f"{entry.variant.name:<{width}}  {line}")
    child.announce(variant=None, case=None)
    for reason, operators_by_variant in unavailable.items():
        operators = sorted(set().union(*operators_by_variant.values()))
        count, names = pluralize(len(operators_by_variant), "variant"), first_names([*operators_by_variant])
        typer.echo(fill(f"unavailable on {', '.join(operators)}: {count} ({names}): {reason}"))
    note(", ".join(f"{number} {status}" for status, number in counts.items()))
    if not counts["correct"]:
        note("nothing was compared")
    if counts["failed"] or counts[NOT_CHECKED] or not counts["correct"]:
        raise typer.Exit(FAILED)


def _check(
    entry: Entry,
    cases: Sequence[Case],
    checks: "ExactChecks",
    child: Child,
    counts: Counter[str],
    unavailable: _Unavailable,
) -> list[str]:
    """Check a variant on each operator and return its lines; add to the counts and to ``unavailable``."""
    from esbench.measure.validation import NO_CASE

    name, lines, correct = entry.variant.name, [], []
    supported: dict[str, list[Case]] = {}
    for case in cases:
        if entry.supports(case):
            supported.setdefault(case.operator, []).append(case)
    if not supported:
        counts[NOT_CHECKED] += 1
        lines.append(f"{NOT_CHECKED}: {NO_CASE}")
    for operator, operator_cases in supported.items():
        child.watch(entry.variant, operator_cases[0], "check")
        failure = checks.outcome(entry, operator)
        key = (entry.variant, operator)
        if failure and failure.status == "failed":
            counts["failed"] += 1
            lines.append(f"failed on {operator}: {one_line(failure.reason)}")
        elif key in checks.not_compared:
            counts[NOT_CHECKED] += 1
            lines.append(f"{NOT_CHECKED} on {operator}: {one_line(checks.not_compared[key].reason)}")
        elif failure:
            counts["unavailable"] += 1
            reason = shared_reason(failure.reason, entry.variant.scheme, operator)
            unavailable.setdefault(reason, {}).setdefault(name, set()).add(operator)
        else:
            counts["correct"] += 1
            count, compared = len(operator_cases), checks.compared[key]
            correct.append(operator if compared == count else f"{operator} ({compared} of {count} cases)")
    return [*lines, f"correct: {', '.join(correct)}"] if correct else lines


def shared_reason(reason: str, scheme: str, operator: str) -> str:
    """Return a reason without scheme, operator and case, so that variants can share a line.

    "Linear: Flipped(side='in'): needs a GPU (on Linear(4, 4))" becomes "needs a GPU".
    """
    reason = one_line(reason).partition(" (on ")[0]
    reason = re.sub(rf"^({re.escape(operator)}: )?({re.escape(scheme)}\([^)]*\))?:? ?", "", reason)
    return reason.replace(f"does not support {operator}: ", "")
