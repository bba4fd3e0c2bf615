"""The command ``plot``: one plot from stored runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from esbench.cli.options import (
    Device,
    Results,
    TimedPhase,
    Variants,
    app,
    note,
    read_runs_of_device,
    read_stored_run,
)
from esbench.errors import UserError


@app.command()
def plot(
    name: Annotated[
        str | None, typer.Argument(help="Name of the plot; without it all are listed.", metavar="NAME")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write; its name ends in .svg, .png or .pdf.")
    ] = None,
    results: Results = Path("results"),
    run: Annotated[
        Path | None, typer.Option(help="File of a run; by default the newest with the data of the plot.")
    ] = None,
    device: Device = None,
    cases: Annotated[
        str, typer.Option(help="Glob over case labels or shapes, such as 'Conv2d*' or '(256, 256)'.")
    ] = "*",
    variants: Variants = None,
    phase: Annotated[TimedPhase | None, typer.Option(help="Phase to plot.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Number format, such as float32.")] = None,
    method: Annotated[str | None, typer.Option(help="Timing method: host, eager or graph.")] = None,
    width: Annotated[
        Literal["column", "page"], typer.Option(help="Width: column (3.3 inches) or page (6.9 inches).")
    ] = "page",
) -> None:
    """Draw one plot from stored runs.

    The same runs give the same bytes. The last line of the plot names its run. `esbench history` draws
    several runs over time.

    Example: esbench plot multipliers --cases 'Linear*' --out multipliers.pdf
    """
    from esbench.report.plots.catalog import PLOTS, PlotRequest, draw, find
    from esbench.report.plots.style import WIDTHS

    if name is None:
        longest = max(map(len, PLOTS))
        for known, plot_of_name in PLOTS.items():
            typer.echo(f"{known:<{longest}}  {plot_of_name.description}")
        return
    find(name)
    if out is None:
        raise UserError(f"--out is missing: esbench plot {name} --out {name}.svg")
    request = PlotRequest(
        cases=cases,
        variants=variants or ["*"],
        phase=phase,
        dtype=dtype,
        method=method,
        width=WIDTHS[width],
    )
    if run:
        runs = [read_stored_run(run, "--run takes a file")[0]]
    else:
        runs, _ = read_runs_of_device(results, device)
    figure = draw(name, runs, request)
    figure.write(out)
    note(f"{out}: {figure.title}; {figure.origin}")
