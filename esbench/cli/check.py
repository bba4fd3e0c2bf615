"""The command ``check``: compare variants with the reference implementation."""

import re
from collections import Counter

import typer

from esbench.cli.options import FAILED, Plugins, Variants, app, load_usual
from esbench.registry import REGISTRY
from esbench.text import fill, first_names, one_line, pluralize

NOT_CHECKED = "not checked"


@app.command()
def check(variants: Variants = None, plugin: Plugins = None) -> None:
    """Compare variants with the reference; nothing is timed.

    Every variant is checked on every operator. Prints one line per variant, and the variants that cannot run
    here once per reason. Exit code 1 if a variant fails or was not checked: it has no case to check, or
    stopped after its set-up had accepted one.

    Example: esbench check --plugin my_scheme.py --variants MyScheme
    """
    from esbench.measure.validation import NO_CASE, ExactChecks

    entries = load_usual(variants, plugin)
    cases = REGISTRY.find_suite("check").cases
    checks = ExactChecks(cases, "cpu", 0)
    counts = Counter[str]()
    unavailable: dict[str, dict[str, set[str]]] = {}  # reason -> variant -> operators
    width = max(len(entry.variant.name) for entry in entries)
    for entry in entries:
        name = entry.variant.name
        correct = []
        supported = Counter(case.operator for case in cases if entry.supports(case))
        if not supported:
            counts[NOT_CHECKED] += 1
            typer.echo(f"{name:<{width}}  {NOT_CHECKED}: {NO_CASE}")
        for operator, count in supported.items():
            failure, key = checks.outcome(entry, operator), (entry.variant, operator)
            missing = checks.not_compared.get(key)
            if missing and not (failure and failure.status == "failed"):
                counts[NOT_CHECKED] += 1
                typer.echo(f"{name:<{width}}  {NOT_CHECKED} on {operator}: {one_line(missing.reason)}")
                continue
            counts[failure.status if failure else "correct"] += 1
            if failure is None:
                compared = checks.compared[key]
                correct.append(operator if compared == count else f"{operator} ({compared} of {count} cases)")
            elif failure.status == "unavailable":
                reason = shared_reason(failure.reason, entry.variant.scheme, operator)
                unavailable.setdefault(reason, {}).setdefault(name, set()).add(operator)
            else:
                typer.echo(f"{name:<{width}}  failed on {operator}: {one_line(failure.reason)}")
        if correct:
            typer.echo(f"{name:<{width}}  correct: {', '.join(correct)}")
    for reason, operators in unavailable.items():
        names = sorted(set().union(*operators.values()))
        named = f"{pluralize(len(operators), 'variant')} ({first_names([*operators])})"
        line = f"unavailable on {', '.join(names)}: {named}: {reason}"
        typer.echo(fill(line))
    typer.echo(", ".join(f"{number} {status}" for status, number in counts.items()), err=True)
    if counts["failed"] or counts[NOT_CHECKED]:
        raise typer.Exit(FAILED)


def shared_reason(reason: str, scheme: str, operator: str) -> str:
    """Return the part of a reason that names neither the scheme with its options nor the operator."""
    reason = one_line(reason).partition(" (on ")[0]  # the case, which the check has chosen
    reason = re.sub(rf"^({re.escape(operator)}: )?({re.escape(scheme)}\([^)]*\))?:? ?", "", reason)
    return reason.replace(f"does not support {operator}: ", "")
