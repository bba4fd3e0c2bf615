"""The command ``doctor``: print what this machine can measure."""

import typer

from esbench.cli.options import app


@app.command()
def doctor() -> None:
    """Print what this machine can and cannot measure, with reasons.

    Example: esbench doctor
    """
    from esbench.measure.doctor import diagnose

    for finding in diagnose():
        typer.echo(f"{'yes' if finding.is_available else 'no':<4} {finding.subject}: {finding.reason}")
