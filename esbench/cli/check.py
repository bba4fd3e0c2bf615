"""The command ``check``: compare variants with the reference implementation."""

from collections import Counter

import typer

from esbench.cli.options import FAILED, Plugins, Variants, app, load_usual
from esbench.registry import REGISTRY


@app.command()
def check(variants: Variants = None, plugin: Plugins = None) -> None:
    """Compare every variant with the reference implementation, on every operator; nothing is timed.

    Exit code 1 if a variant fails.

    Example: esbench check --plugin my_scheme.py --variants MyScheme
    """
    from esbench.measure.validation import ExactChecks

    entries = load_usual(variants, plugin)
    cases = REGISTRY.find_suite("check").cases
    checks = ExactChecks(cases, "cpu", 0)
    counts = Counter[str]()
    width = max(len(entry.variant.name) for entry in entries)
    for entry in entries:
        for operator in dict.fromkeys(case.operator for case in cases if entry.supports(case)):
            found = checks.outcome(entry, operator)
            counts[found.status if found else "correct"] += 1
            verdict = f"{found.status}: {found.reason}" if found else "correct"
            if found and found.status == "unavailable":
                verdict = verdict.partition(" (on ")[0]  # the same on every case
            typer.echo(f"{entry.variant.name:<{width}}  {operator:<8}  {verdict}")
    typer.echo(", ".join(f"{count} {status}" for status, count in counts.items()), err=True)
    if counts["failed"]:
        raise typer.Exit(FAILED)
