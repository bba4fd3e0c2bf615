"""The command ``check``: compare variants with the reference implementation."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import typer

from esbench.cli.options import FAILED, Json, Plugins, Variants, app, load_usual, note, printing_to_stderr
from esbench.registry import DEFAULT, REGISTRY, Entry
from esbench.schema import Case
from esbench.supervisor import Child, supervise
from esbench.text import fill, first_names, one_line, pluralize

if TYPE_CHECKING:
    from esbench.measure.validation import ExactChecks

CORRECT, FAILED_CHECK, NOT_CHECKED, UNAVAILABLE = "correct", "failed", "not checked", "unavailable"
ENDED = "it ended the process"


class Outcome(NamedTuple):
    """The result of a check of a variant on an operator; "" for a reason that applies to all operators.

    ``status`` is correct, failed, not checked or unavailable. Of the operator's ``cases``, ``compared`` were
    compared with the reference.
    """

    variant: str
    operator: str
    status: str
    reason: str = ""
    compared: int = 0
    cases: int = 0


@app.command()
def check(variants: Variants = None, plugin: Plugins = None, *, as_json: Json = False) -> None:
    """Compare variants with the reference; nothing is timed.

    Every variant is checked on each operator that it supports, such as Linear and Conv2d; one of a plug-in on
    an operator of its own, on the cases of the plug-in's suites. Runs of training on data are left out unless
    they are named: `esbench run` compares them. Prints one line per variant, and the variants that cannot run
    here once per reason. Exit code 1 if a variant fails, if nothing was compared, or if a variant was not
    checked: it has no case to check, or stopped after its set-up had accepted one.

    Example: esbench check --plugin my_scheme.py --variants MyScheme
    """
    child = supervise(note)
    from esbench.measure.validation import ExactChecks

    entries, cases = load_usual(variants, plugin), REGISTRY.find_suite("check").cases
    if not variants:  # training on data has no case here
        entries = [e for e in entries if e.package != DEFAULT or any(map(e.supports, cases))]
    others = (case for suite in REGISTRY.suites.values() for case in suite.cases)
    checked = {case.operator for case in cases}
    own_cases = [case for case in dict.fromkeys(others) if case.operator not in checked]
    checks = ExactChecks((*cases, *own_cases), "cpu", 0)
    outcomes: list[Outcome] = []
    width = max(len(entry.variant.name) for entry in entries)
    ended = child.announcement.excluded
    # A new process checks everything again, but an earlier one has printed the lines before the variant that
    # ended it.
    printed = max((index for index, entry in enumerate(entries) if entry.variant in ended), default=0)
    for index, entry in enumerate(entries):
        if entry.variant in ended:
            of_variant = [Outcome(entry.variant.name, "", FAILED_CHECK, ENDED)]
        else:
            with printing_to_stderr():
                has_case = entry.package == DEFAULT or any(map(entry.supports, cases))
                of_variant = list(_check(entry, cases if has_case else own_cases, checks, child))
        outcomes += of_variant
        for line in _lines(of_variant) if index >= printed and not as_json else ():
            typer.echo(f"{entry.variant.name:<{width}}  {line}")
    child.announce(variant=None, case=None)
    counts = Counter(outcome.status for outcome in outcomes)
    if as_json:
        document = {"counts": counts, "outcomes": [outcome._asdict() for outcome in outcomes]}
        typer.echo(json.dumps(document, indent=2))
    else:
        for line in _unavailable_lines(outcomes, {entry.variant.name: entry for entry in entries}):
            typer.echo(line)
    note(", ".join(f"{number} {status}" for status, number in counts.items()))
    if not counts[CORRECT] and not counts[FAILED_CHECK]:
        note("nothing was compared")
    if counts[FAILED_CHECK] or counts[NOT_CHECKED] or not counts[CORRECT]:
        raise typer.Exit(FAILED)


def _check(entry: Entry, cases: Sequence[Case], checks: "ExactChecks", child: Child) -> Iterator[Outcome]:
    from esbench.measure.validation import NO_CASE

    name = entry.variant.name
    supported: dict[str, list[Case]] = {}
    for case in cases:
        if entry.supports(case):
            supported.setdefault(case.operator, []).append(case)
    if not supported:
        yield Outcome(
            name, "", NOT_CHECKED, f"{NO_CASE}; `esbench run` compares it, by its workload's verify()"
        )
    for operator, operator_cases in supported.items():
        child.watch(entry.variant, operator_cases[0], "check")
        failure = checks.outcome(entry, operator)
        key, count = (entry.variant, operator), len(operator_cases)
        if failure and failure.status == "failed":
            yield Outcome(name, operator, FAILED_CHECK, one_line(failure.reason), cases=count)
        elif key in checks.not_compared:
            reason = one_line(checks.not_compared[key].reason)
            yield Outcome(name, operator, NOT_CHECKED, reason, cases=count)
        elif failure:
            yield Outcome(name, operator, UNAVAILABLE, one_line(failure.reason), cases=count)
        else:
            yield Outcome(name, operator, CORRECT, compared=checks.compared[key], cases=count)


def _lines(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield the lines of a variant: its failures, then the operators on which it is correct."""
    correct = []
    for outcome in outcomes:
        operator, count = outcome.operator, outcome.cases
        if outcome.status == CORRECT:
            compared = outcome.compared
            correct.append(operator if compared == count else f"{operator} ({compared} of {count} cases)")
        elif outcome.status != UNAVAILABLE:
            yield f"{outcome.status}{f' on {operator}' if operator else ''}: {outcome.reason}"
    if correct:
        yield f"correct: {', '.join(correct)}"


def _unavailable_lines(outcomes: Iterable[Outcome], entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield a line for each reason why variants are unavailable."""
    by_reason: dict[str, dict[str, set[str]]] = {}
    for outcome in outcomes:
        if outcome.status == UNAVAILABLE:
            scheme = entries[outcome.variant].variant.scheme
            reason = shared_reason(outcome.reason, scheme, outcome.operator)
            by_reason.setdefault(reason, {}).setdefault(outcome.variant, set()).add(outcome.operator)
    for reason, operators_by_variant in by_reason.items():
        operators = sorted(set().union(*operators_by_variant.values()))
        count, names = pluralize(len(operators_by_variant), "variant"), first_names([*operators_by_variant])
        yield fill(f"unavailable on {', '.join(operators)}: {count} ({names}): {reason}")


def shared_reason(reason: str, scheme: str, operator: str) -> str:
    """Return a reason without scheme, operator and case, so that variants can share a line.

    "Linear: Flipped(side='in'): needs a GPU (on Linear(4, 4))" becomes "needs a GPU".
    """
    reason = one_line(reason).partition(" (on ")[0]
    reason = re.sub(rf"^({re.escape(operator)}: )?({re.escape(scheme)}\([^)]*\))?:? ?", "", reason)
    return reason.replace(f"does not support {operator}: ", "")
