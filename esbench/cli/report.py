"""The commands ``report`` and ``readme``: render stored runs."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from esbench.cli.options import (
    FAILED,
    REPORTS,
    Results,
    app,
    check_results,
    check_writable,
    note,
    print_problems,
)
from esbench.errors import UserError
from esbench.git import git
from esbench.text import first_names, pluralize, short_path

Form = Literal["markdown", "latex", "csv"]
PUBLISHED = Path("reports")
"""The folder of the committed reports."""


@app.command()
def report(
    results: Results = Path("results"),
    out: Annotated[
        Path | None, typer.Option(help=f"Folder to write to; by default {REPORTS}, which git ignores.")
    ] = None,
    publish: Annotated[
        bool, typer.Option("--publish", help=f"Write the committed folder {PUBLISHED}, from committed runs.")
    ] = False,
    form: Annotated[Form, typer.Option("--format", help="Only markdown has plots.")] = "markdown",
    intervals: Annotated[bool, typer.Option("--intervals", help="Show 95 % intervals: 1.23 ± 0.04.")] = False,
    best: Annotated[
        int, typer.Option(min=1, metavar="N", help="Schemes in a table in LaTeX, besides dense noise.")
    ] = 8,
) -> None:
    """Render tables and plots from stored runs.

    The same runs give the same bytes. Each page shows the newest run that is complete, valid, of a whole
    suite and of committed code; stderr lists the others, with the reason. --format latex writes tables for a
    paper and references.bib. Plots, index.html and the pages of a device's history are written with markdown
    only; `esbench plot` and `esbench history` write them alone.

    New runs and build/ are ignored by git. To publish a run: `git add --force results/<device>/<run>.jsonl`,
    then `esbench report --publish` and, if the README names the run, `esbench readme`.

    Exit code 1 if something could not be read, after the rest is written.

    Example: esbench report --results results --out build/reports
    """
    from esbench.report.formats import Style
    from esbench.report.site import render, selection

    style = Style(form, intervals=intervals, best=best)
    check_results(results)
    check_writable("--out", out or REPORTS)
    if publish:
        if out is not None:
            raise UserError(f"--publish writes to {PUBLISHED}: leave out --out {out}")
        _check_committed(results)
    out = PUBLISHED if publish else out or REPORTS
    selected = selection(results, out)
    written, problems = render(selected, results, out, style)
    print_problems(problems)
    for line in selected.left_out:
        note(line)
    if not {path.name for path in written} - {"index.html"}:  # the page that says so
        raise UserError(f"no run with rows in {results}: measure with `esbench run`")
    typer.echo(_summarize_files(written, out))
    if any(problem.lost for problem in problems):
        raise typer.Exit(FAILED)


def _summarize_files(written: Sequence[Path], out: Path) -> str:
    """Return what was written, on one line, with the file to open."""
    counts = Counter("plot" if path.suffix == ".svg" else "page" for path in written)
    page = next((path for path in written if path.name == "index.html"), written[0])
    listed = " and ".join(pluralize(count, kind) for kind, count in counts.items())
    return f"{listed} in {short_path(out)}: open {short_path(page)}"


def _check_committed(results: Path) -> None:
    """Raise a UserError if git does not track a file of a folder: a clone would render other reports."""
    if uncommitted := git(results, "ls-files", "--others").splitlines():
        raise UserError(
            f"--publish renders files that git tracks, but {results} also holds {first_names(uncommitted)}: "
            "add and commit them (`git add --force`), or move them out of the folder"
        )


@app.command()
def readme(
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; exit code 1 with a diff if the file is out of date."),
    ] = False,
    file: Annotated[
        Path | None, typer.Option(help="Only this file with cog markers; by default README.md and docs/*.md.")
    ] = None,
) -> None:
    """Regenerate the marked parts of README.md and docs/*.md.

    They come from the committed runs that the pages name.

    Example: esbench readme --check
    """
    from esbench.report.readme import DOCS, render

    files = [file] if file else [Path("README.md"), *sorted(Path(DOCS).glob("*.md"))]
    changed = []
    for page in files:
        if changes := render(page, check=check):
            changed.append(str(page))
            typer.echo(changes if check else "", nl=False)
    if check and changed:
        names = ", ".join(changed)
        typer.echo(f"out of date with the runs they name: {names}: run `esbench readme`", err=True)
        raise typer.Exit(FAILED)
    typer.echo(f"{', '.join(changed)} updated" if changed else "all pages are up to date", err=True)
