"""The command that draws one plot."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esbench.cli.options import Device, Results, Variants, app, note, of_device, say
from esbench.errors import UserError

if TYPE_CHECKING:
    from esbench.schema import Run


@app.command()
def plot(
    name: Annotated[
        str | None, typer.Argument(help="Which plot; without it they are listed.", metavar="NAME")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write; its name ends in .svg, .png or .pdf.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List all plots.")] = False,
    results: Results = Path("results"),
    run: Annotated[
        Path | None, typer.Option(help="File of a run; by default the newest that has what is drawn.")
    ] = None,
    device: Device = None,
    suite: Annotated[str | None, typer.Option(help="Runs of this suite.")] = None,
    operator: Annotated[str | None, typer.Option(help="Linear, Conv2d, ...")] = None,
    cases: Annotated[
        str, typer.Option(help="Glob over the cases' labels or shapes, such as '(256, 256)'.")
    ] = "*",
    variants: Variants = None,
    phase: Annotated[str | None, typer.Option(help="sample, forward, update or step.")] = None,
    metric: Annotated[str | None, typer.Option(help="A stored metric: warm_latency_ns, ...")] = None,
    dtype: Annotated[str | None, typer.Option(help="Number format, such as float32.")] = None,
    method: Annotated[str | None, typer.Option(help="host, eager or graph.")] = None,
    width: Annotated[
        str, typer.Option(help="column: 3.3 inches; page: 6.9 inches.", metavar="column|page")
    ] = "page",
) -> None:
    """Draw one plot from stored runs; the same runs give the same bytes.

    Its last line says where its figures come from. Two globs over variants choose whose samples are compared.

    Example: esbench plot multipliers --operator Linear --width column --out multipliers.pdf
    """
    from esbench.report.analysis.history import phase_named
    from esbench.report.plots.catalog import PLOTS, PlotRequest, draw, find
    from esbench.report.plots.style import METADATA, WIDTHS

    if listed or name is None:
        longest = max(map(len, PLOTS))
        for known, one in PLOTS.items():
            typer.echo(f"{known:<{longest}}  {one.description}")
        return
    find(name)
    if out is None:
        message = f"name a file to write: esbench plot {name} --out {name}.svg"
        raise UserError(message)
    if out.suffix.lower() not in METADATA:
        message = f"--out {out}: name a file that ends in {', '.join(METADATA)}"
        raise UserError(message)
    if width not in WIDTHS:
        message = f"--width {width}: there are {' and '.join(WIDTHS)}"
        raise UserError(message)
    request = PlotRequest(
        operator=operator,
        cases=cases,
        variants=tuple(variants or ()),
        phase=phase_named(phase) if phase is not None else None,
        metric=metric,
        dtype=dtype,
        method=method,
        width=WIDTHS[width],
    )
    figure = draw(name, [_one(run)] if run else _stored(results, device, suite), request)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.write(out)
    note(f"{out}: {figure.title}; {figure.origin}")


def _one(path: Path) -> "Run":
    """The run in a file."""
    from esbench.store import read_run

    found, problems = read_run(path)
    if found is None:
        message = f"{'; '.join(map(str, problems))}: --run takes a file such as results/<device>/<run>.jsonl"
        raise UserError(message)
    say(problems)
    return found


def _stored(results: Path, device: str | None, suite: str | None) -> "list[Run]":
    """The runs of a device.

    Raises:
        UserError: there are none, or several devices to choose from.

    """
    from esbench.report.analysis.history import devices
    from esbench.store import read_results

    if not results.is_dir():
        message = f"no folder {results}: measure with `esbench run`, or name another with --results"
        raise UserError(message)
    runs, problems = read_results(results)
    say(problems)
    found = of_device(device, devices(run for run in runs if run.rows), results)
    suites = dict.fromkeys(run.header.suite for run in found)
    if suite is not None and suite not in suites:
        message = f"no run of suite {suite!r}; there are: {', '.join(suites)}"
        raise UserError(message)
    return [run for run in found if suite in {None, run.header.suite}]
