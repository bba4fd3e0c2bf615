"""The command ``doctor``: print what this machine can measure."""

import json

import typer

from esbench.cli.options import Json, app


@app.command()
def doctor(*, as_json: Json = False) -> None:
    """Print what this machine can and cannot measure, with reasons.

    Example: esbench doctor
    """
    from esbench.measure.doctor import diagnose

    findings = diagnose()
    if as_json:
        typer.echo(json.dumps({"findings": [finding._asdict() for finding in findings]}, indent=2))
        return
    for finding in findings:
        typer.echo(f"{'yes' if finding.is_available else 'no':<4} {finding.subject}: {finding.reason}")
