"""The command that hands a stored run to other tools: export."""

from pathlib import Path
from typing import Annotated

import typer

from esbench.cli.options import FAILED, app, note, say
from esbench.errors import UserError


@app.command("export")
def export_(
    run: Annotated[Path, typer.Argument(help="File of a stored run.", metavar="RUN")],
    form: Annotated[str, typer.Option("--format", help="pytest-benchmark, github-action or csv.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write, in place of what it held; by default stdout.")
    ] = None,
) -> None:
    """Write a stored run as other tools read it; the same run gives the same bytes on every machine.

    pytest-benchmark: its times, for `pytest-benchmark compare` and bencher. github-action: times and bytes,
    for github-action-benchmark with customSmallerIsBetter. csv: all rows, also those without a number, with
    their reason. What was left out is said on stderr; exit code 1 where a line of the file cannot be read.

    Example: esbench export results/my-gpu/run.jsonl --format pytest-benchmark --out run.json
    """
    from esbench import store
    from esbench.report.formats.exporters import export

    found, problems = store.read_run(run)
    if found is None:
        what = "export takes a run's .jsonl file, such as results/<device>/<run>.jsonl"
        message = f"{'; '.join(map(str, problems))}: {what}"
        raise UserError(message)
    say(problems)
    content, summary = export(found, form)
    if out is None:
        typer.echo(content, nl=False)
    elif out.exists() and out.samefile(run):
        message = f"--out {out} is the run itself, which is never written over: name another file"
        raise UserError(message)
    else:
        out.write_bytes(content)
    if found.end is None:
        note("the run has no end: it was cut off, or is being written")
    elif found.end.invalid:
        note(f"INVALID, do not use these figures: {'; '.join(found.end.invalid)}")
    note(f"{summary}" + (f"; written to {out}" if out else ""))
    if any(problem.lost for problem in problems):
        raise typer.Exit(FAILED)
