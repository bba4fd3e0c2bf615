"""The command ``compare``: show two stored runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from esbench.cli.options import FAILED, app, read_stored_run
from esbench.text import printable


@app.command()
def compare(
    run_a: Annotated[
        Path, typer.Argument(help="File of the run to compare with: the denominator of ratios.")
    ],
    run_b: Annotated[Path, typer.Argument(help="File of the other run: the numerator.")],
    tables: Annotated[bool, typer.Option("--tables", help="Print all rows instead of a summary.")] = False,
) -> None:
    """Compare two runs: the median shift and the largest changes.

    Not a regression test: each run is one process, and processes differ by more than the intervals say;
    `esbench gate` is one. Exit code 1 if the runs have no row in common or a line could not be read.

    Example: esbench compare results/my-gpu/a.jsonl results/my-gpu/b.jsonl
    """
    from esbench.report.analysis import comparison
    from esbench.report.tables import comparison as comparison_tables
    from esbench.text import one_line

    (a, a_problems), (b, b_problems) = (
        read_stored_run(path, "compare takes two runs' .jsonl files") for path in (run_a, run_b)
    )
    compared = comparison.compare(a, b)
    for warning, words in (
        ("INVALID, do not use these figures", comparison.invalid(a, b)),
        ("UNRELIABLE", comparison.disturbed(compared)),
    ):
        if words:
            typer.secho(one_line(f"{warning}: {words}"), bold=True)
    shown = comparison_tables.text(compared) if tables else comparison_tables.summary(compared)
    typer.echo(printable(shown), nl=False)
    if not compared.matched or a_problems or b_problems:
        raise typer.Exit(FAILED)
