"""The command ``history``: show the runs of a device over time."""

from pathlib import Path
from typing import Annotated

import typer

from esbench.cli.options import FAILED, Device, Results, TimedPhase, Variants, app, note, read_runs_of_device
from esbench.errors import UserError


@app.command()
def history(
    results: Results = Path("results"),
    device: Device = None,
    variants: Variants = None,
    cases: Annotated[str, typer.Option(help="Glob over case labels, such as 'Linear(128*'.")] = "*",
    phase: Annotated[TimedPhase, typer.Option(help="Phase of the figures.")] = "forward",
    out: Annotated[Path, typer.Option(help="Plot to write; its name ends in .svg, .png or .pdf.")] = Path(
        "build/history.svg"
    ),
) -> None:
    """Show the runs of a device over time, with change points.

    Each variant has one line. Only complete and valid runs are shown; stderr lists those that are left out.
    Multipliers are relative to base in the same run, so drift of the machine cancels. Exit code 1 if
    something could not be read, after the rest is shown.

    Example: esbench history --cases 'Linear(128*' --variants 'Flipped*'
    """
    from esbench.report.analysis.history import history as history_of
    from esbench.report.analysis.history import why_empty
    from esbench.report.plots.history import history as draw
    from esbench.report.plots.history import panels
    from esbench.report.tables.history import sections
    from esbench.text import one_line

    runs, problems = read_runs_of_device(results, device)
    device_history = history_of(runs, phase=phase, variants=variants or ["*"], cases=cases, fewest=2)
    if not device_history.series:
        raise UserError(one_line(why_empty(device_history)))
    for line in device_history.left_out:
        note(one_line(line))
    if shown := panels(device_history):
        note(f"{draw(device_history, shown).write(out)}")
    else:
        note("no plot: no variant was measured in two or more of these runs")
    typer.echo("\n".join(section.text() for section in sections(device_history)), nl=False)
    if any(problem.lost for problem in problems):
        raise typer.Exit(FAILED)
