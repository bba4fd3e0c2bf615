"""The commands that look without timing: check | doctor."""

import typer

from esbench.cli.options import FAILED, Plugins, Variants, app, load_usual
from esbench.registry import REGISTRY


@app.command()
def check(variants: Variants = None, plugin: Plugins = None) -> None:
    """Hold every variant on every operator to the slow truth.

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
    typer.echo(f"{failed} failed" if failed else "all hold", err=True)
    if failed:
        raise typer.Exit(FAILED)


@app.command()
def doctor() -> None:
    """Say what this machine can and cannot measure, and why.

    Example: esbench doctor
    """
    from esbench.measure.doctor import diagnosis

    for finding in diagnosis():
        typer.echo(f"{'yes' if finding.able else 'no':<4} {finding.subject}: {finding.why}")
