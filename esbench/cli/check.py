"""The command ``check``: compare variants with the reference implementation."""

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
    oracle = ExactChecks(cases, "cpu", 0)
    failed = 0
    width = max(len(entry.variant.name) for entry in entries)
    for entry in entries:
        for operator in dict.fromkeys(case.operator for case in cases if entry.supports(case)):
            fault = oracle.failure(entry, operator)
            failed += fault is not None and fault.status == "failed"
            verdict = f"{fault.status}: {fault.reason}" if fault else "ok"
            typer.echo(f"{entry.variant.name:<{width}}  {operator:<8}  {verdict}")
    typer.echo(f"{failed} failed" if failed else "all correct", err=True)
    if failed:
        raise typer.Exit(FAILED)
