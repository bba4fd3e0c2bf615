"""The command ``export``: convert a stored run to the format of another tool."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from esbench.cli.options import FAILED, app, note, read_stored_run
from esbench.errors import UserError


@app.command("export")
def export_(
    run: Annotated[Path, typer.Argument(help="File of a stored run.", metavar="RUN")],
    form: Annotated[
        Literal["pytest-benchmark", "github-action", "csv"],
        typer.Option("--format", help="Format of the file."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write, replacing what it held; by default stdout.")
    ] = None,
) -> None:
    """Convert a stored run to the format of another tool.

    The same run gives the same bytes everywhere. pytest-benchmark: times, for `pytest-benchmark compare` and
    bencher. github-action: times and bytes, for github-action-benchmark with customSmallerIsBetter. csv: all
    rows, including those without a number, with their reason. What is left out is listed on stderr. Exit code
    1 if a line of the file cannot be read.

    Example: esbench export results/my-gpu/run.jsonl --format csv --out run.csv
    """
    from esbench.report.captions import invalid_note, unfinished_note
    from esbench.report.formats.exporters import export

    stored, problems = read_stored_run(run, "export takes a run's .jsonl file")
    text, summary = export(stored, form)
    if out is None:
        typer.echo(text, nl=False)
    elif out.exists() and out.samefile(run):
        raise UserError(f"--out {out} is the run itself: name another file")
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8", newline="\n")
    for warning in filter(None, (invalid_note(stored), unfinished_note(stored))):
        note(warning.strip())
    note(f"{summary}" + (f"; written to {out}" if out else ""))
    if any(problem.lost for problem in problems):
        raise typer.Exit(FAILED)
