"""The commands that read: list | report | readme | compare."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esbench.cli.options import (
    FAILED,
    Device,
    Plugins,
    Results,
    Variants,
    app,
    load_entries,
    no_such_device,
    note,
    say,
)
from esbench.errors import UserError
from esbench.registry import REGISTRY, Entry

if TYPE_CHECKING:
    from esbench.schema import Run
    from esbench.store import Problem


@app.command("list")
def list_(
    variants: Variants = None,
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List the variants and the suites there are.

    Example: esbench list --variants 'Permuted*'
    """
    entries = load_entries(variants, plugin)
    suites = REGISTRY.suites.values()
    if as_json:
        found = {
            "variants": [
                {
                    "name": entry.variant.name,
                    "mode": entry.variant.mode,
                    "package": entry.package,
                    "source": entry.source,
                    "summary": _summary(entry),
                }
                for entry in entries
            ],
            "suites": [
                {"name": s.name, "description": s.description, "cases": [case.label for case in s.cases]}
                for s in suites
            ],
        }
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(len(entry.variant.name) for entry in entries)
    typer.echo("Variants")
    for entry in entries:
        typer.echo(f"  {entry.variant.name:<{width}}  {_summary(entry)}")
    typer.echo("\nSuites")
    for s in suites:
        typer.echo(f"  {s.name:<{width}}  {s.description} ({len(s.cases)} cases)")


@app.command()
def report(
    results: Results = Path("results"),
    out: Annotated[Path, typer.Option(help="Folder to write the reports to.")] = Path("reports"),
    form: Annotated[
        str, typer.Option("--format", help="markdown, with all pictures; or latex, csv, html.")
    ] = "markdown",
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Show numbers with their 95 % intervals: 1.23 ± 0.04.")
    ] = False,
    device: Device = None,
) -> None:
    """Render tables and plots from the stored runs: the same runs give the same bytes.

    Each page shows the newest run that is complete, valid, of its whole suite and of committed code; which
    runs these are, and why others are left out, stands in the page `runs` and on stderr. latex writes tables
    with booktabs and references.bib with the works that the variants come from. Plots, index.html and the
    pages on a device's history are written with markdown alone: `esbench plot` and `esbench history --json`
    have them otherwise.
    Ends with exit code 1 where something could not be read, after the rest is written.

    Example: esbench report --results results --out reports
    """
    from esbench.documentation import catalogue
    from esbench.report.formats import Style, check_format
    from esbench.report.site import render, selection

    style = Style(check_format(form), intervals=intervals, catalogue=catalogue())

    if not results.is_dir():
        message = f"no folder {results}: measure with `esbench run`, or name another with --results"
        raise UserError(message)
    found = selection(results, out, device)
    if device is not None and device not in found.devices:
        raise UserError(no_such_device(device, found.devices, results))
    written, problems = render(found, results, out, style)
    say(problems)
    for line in found.summary():
        note(line)
    if not written:
        nothing = "no run with rows" if problems else "no runs"
        message = f"{nothing} in {results}: measure with `esbench run`"
        raise UserError(message)
    for path in written:
        typer.echo(path)
    if any(problem.lost for problem in problems):
        raise typer.Exit(FAILED)


@app.command()
def readme(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 with a diff if it is behind.")
    ] = False,
    file: Annotated[Path, typer.Option(help="The file with cog markers.")] = Path("README.md"),
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Show numbers with their 95 % intervals: 1.23 ± 0.04.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write to this file instead, and leave the README.")
    ] = None,
) -> None:
    """Write the README's generated parts again from the committed runs that it names.

    Example: esbench readme --check
    """
    from esbench.report.readme import render

    changes = render(file, check=check, intervals=intervals, out=out)
    if check and changes:
        typer.echo(changes, nl=False)
        typer.echo(f"{out or file} is behind the results it names: run `esbench readme`", err=True)
        raise typer.Exit(FAILED)
    typer.echo(f"{out or file} {'was behind and is' if changes else 'is'} up to date", err=True)


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(help="File of the run that is divided by.")],
    run_b: Annotated[Path, typer.Argument(help="File of the run that is divided.")],
    across_devices: Annotated[
        bool, typer.Option("--across-devices", help="Compare runs of different devices nevertheless.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show two runs side by side: the rows of both, counts that changed, and what only one has.

    A look, not a gate: each run is one process, and processes differ by more than the intervals say.
    Ends with exit code 1 where nothing is in both, or a line could not be read.

    Example: esbench compare results/my-gpu/before.jsonl results/my-gpu/after.jsonl
    """
    from esbench.report.analysis import comparison
    from esbench.report.tables import comparison as comparison_tables
    from esbench.report.text import one_line

    (a, a_problems), (b, b_problems) = _read(run_a), _read(run_b)
    found = comparison.compare(a, b, across_devices=across_devices)
    for warning, words in (
        ("INVALID, do not use these figures", comparison.invalid(a, b)),
        ("DIFFERENT DEVICES", comparison.different_devices(a, b)),
    ):
        if words:
            typer.secho(one_line(f"{warning}: {words}"), bold=True, err=as_json)
    if as_json:
        typer.echo(json.dumps(comparison_tables.as_json(found), indent=2, allow_nan=False))
    else:
        typer.echo(comparison_tables.text(found), nl=False)
    if not found.matched or a_problems or b_problems:
        raise typer.Exit(FAILED)


def _summary(entry: Entry) -> str:
    return (type(entry.scheme).__doc__ or "").partition("\n")[0]


def _read(path: Path) -> "tuple[Run, list[Problem]]":
    """The run in a file, and what of it cannot be read, which is said."""
    from esbench import store

    run, problems = store.read_run(path)
    if run is None:
        what = "compare takes two runs' .jsonl files, such as results/<device>/<run>.jsonl"
        message = f"{'; '.join(map(str, problems))}: {what}"
        raise UserError(message)
    say(problems)
    return run, problems
