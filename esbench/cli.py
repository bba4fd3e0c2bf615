"""The command line: list | run | report | readme | check | doctor.

Exit codes: 0 done; 1 a variant failed, or what was checked does not hold; 2 usage or environment;
130 interrupted. Commands import what they need, so that ``--help`` answers at once.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import esbench
from esbench.errors import UserError
from esbench.plugins import load, load_installed
from esbench.registry import REGISTRY, Entry
from esbench.selection import DTYPES, cases_of, phases_named, suited, with_references

if TYPE_CHECKING:
    from esbench.measure.ledger import Outcome

FAILED, USAGE, INTERRUPTED = 1, 2, 130
USAGE_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
"""What all usage errors derive from: click's own class, or typer's copy of it since 0.28."""

app = typer.Typer(
    name="esbench",
    help="Measure how a population of perturbed networks is evaluated fastest, and render what was measured.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variants",
        help="Glob over names (Permuted*) or labels (PermutedLinear*); repeatable.",
        metavar="GLOB",
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Module, or file ending in .py, that registers variants; repeatable."),
]
Results = Annotated[Path, typer.Option(help="Folder of measured runs.")]


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)
    ] = False,
) -> None:
    """Take what stands in front of the command."""
    if version:
        typer.echo(esbench.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("list")
def list_(
    variants: Variants = None,
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List the variants and the suites there are.

    Example: esbench list --variants 'Permuted*'
    """
    entries = _load(variants, plugin)
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
def run(
    suite: Annotated[
        str | None, typer.Option(help="Suite to measure; by default readme on a GPU and quick on a CPU.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    variants: Variants = None,
    cases: Annotated[
        str, typer.Option(help="Glob over case labels, such as 'Linear*'.", metavar="GLOB")
    ] = "*",
    phases: Annotated[str, typer.Option(help="Comma-separated: sample, forward, update, step.")] = "",
    dtype: Annotated[str | None, typer.Option(help=f"Measure in this type: {', '.join(DTYPES)}.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, inputs, noise and order.", min=0, max=2**62)] = 0,
    out: Annotated[Path, typer.Option(help="Folder to store the run in.")] = Path("results"),
    plugin: Plugins = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print {run, path, measured, ...} instead of tables.")
    ] = False,
) -> None:
    """Measure a suite, store the run and print its tables.

    Example: esbench run --suite quick --variants 'Flipped*' --variants Perturbed --phases forward
    """
    from esbench.measure import session
    from esbench.measure.environment import environment, resolve_device
    from esbench.measure.loop import Plan
    from esbench.progress import showing

    entries = _load(variants, plugin)
    place = resolve_device(device)
    chosen = REGISTRY.find_suite(suite or ("readme" if place == "cuda" else "quick"))
    plan = Plan(
        entries=with_references(entries)
        if variants
        else suited(entries, chosen, {load(name) for name in plugin or ()}),
        cases=cases_of(chosen, cases, dtype),
        phases=phases_named(phases) or chosen.phases,
        cell_s=chosen.cell_s,
        checks=REGISTRY.suites["check"].cases if "check" in REGISTRY.suites else (),
        device=place,
        seed=seed,
    )
    here = environment(place)
    reason = "" if place == "cuda" or device == "cpu" else "no CUDA GPU here: "
    typer.echo(f"{reason}measuring suite {chosen.name} on {place} ({here.device_name})", err=True)
    with session.begin(chosen.name, here, seed, out) as writer:
        typer.echo(f"every finished row is in {writer.path}", err=True)
        with showing() as progress:
            outcome = session.conduct(plan, writer, progress)
    _conclude(writer.path, outcome, as_json=as_json)


def _conclude(path: Path, outcome: "Outcome", *, as_json: bool) -> None:
    """Print what was measured, and end with 1 if a variant failed."""
    from esbench import store
    from esbench.report import console_tables

    read, problems = store.read_run(path)
    _say(problems)
    if as_json:
        found = {
            "run": read.header.run_id if read else None,
            "path": str(path),
            "measured": outcome.measured,
            "unavailable": outcome.unavailable,
            "failed": outcome.failed,
        }
        typer.echo(json.dumps(found))
    elif read:
        typer.echo(console_tables(read), nl=False)
    for note in outcome.notes:
        typer.echo(note, err=True)
    summary = (
        f"{outcome.measured} cells measured, {outcome.unavailable} rows unavailable, {outcome.failed} failed"
    )
    typer.echo(f"{summary}; stored in {path}", err=True)
    if outcome.failed:
        raise typer.Exit(FAILED)


@app.command()
def report(
    results: Results = Path("results"),
    out: Annotated[Path, typer.Option(help="Folder to write the reports to.")] = Path("reports"),
) -> None:
    """Render tables and plots from the stored runs: the same runs give the same bytes.

    Example: esbench report --results results --out reports
    """
    from esbench.report import render_reports

    if not results.is_dir():
        message = f"no folder {results}: measure with `esbench run`, or name another with --results"
        raise UserError(message)
    written, problems = render_reports(results, out)
    _say(problems)
    if not written:
        message = f"no runs in {results}: measure with `esbench run`"
        raise UserError(message)
    for path in written:
        typer.echo(path)


@app.command()
def readme(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 with a diff if it is behind.")
    ] = False,
    file: Annotated[Path, typer.Option(help="The file with cog markers.")] = Path("README.md"),
) -> None:
    """Write the README's generated parts again from the committed runs that it names.

    Example: esbench readme --check
    """
    from esbench.report.readme import render

    changes = render(file, check=check)
    if check and changes:
        typer.echo(changes, nl=False)
        typer.echo(f"{file} is behind the results it names: run `esbench readme`", err=True)
        raise typer.Exit(FAILED)
    typer.echo(f"{file} {'was behind and is' if changes else 'is'} up to date", err=True)


@app.command()
def check(variants: Variants = None, plugin: Plugins = None) -> None:
    """Hold every variant on every operator to the slow truth.

    Example: esbench check --plugin my_scheme.py --variants MyScheme
    """
    from esbench.measure.oracle import Oracle

    entries = _load(variants, plugin)
    cases = REGISTRY.find_suite("check").cases
    oracle = Oracle(cases, "cpu", 0)
    failed = 0
    width = max(len(entry.variant.name) for entry in entries)
    for entry in entries:
        for operator in dict.fromkeys(case.operator for case in cases if entry.supports(case)):
            fault = oracle.verdict(entry, operator)
            failed += fault is not None and fault.status == "failed"
            verdict = f"{fault.status}: {fault.reason}" if fault else "ok"
            typer.echo(f"{entry.variant.name:<{width}}  {operator:<8}  {verdict}")
    typer.echo(f"{failed} failed" if failed else "all hold", err=True)
    if failed:
        raise typer.Exit(FAILED)


@app.command()
def doctor() -> None:
    """Say what this machine can and cannot measure, and why.

    Example: esbench doctor
    """
    from esbench.measure.diagnosis import diagnosis

    for finding in diagnosis():
        typer.echo(f"{'yes' if finding.able else 'no':<4} {finding.subject}: {finding.why}")


def main() -> None:
    """Run the command line; every error ends in one line and the documented exit code."""
    try:
        code = app(standalone_mode=False)
    except (USAGE_ERROR, UserError, OSError) as error:
        text = getattr(error, "format_message", error.__str__)()
        sys.stderr.write(f"esbench: {' '.join(text.split())}\n")
        code = USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    sys.exit(code)


def _load(variants: list[str] | None, plugin: list[str] | None) -> list[Entry]:
    """Load all packages and plugins, and select from what they registered."""
    load_installed()
    for name in plugin or ():
        load(name)
    return REGISTRY.select(variants or ["*"])


def _summary(entry: Entry) -> str:
    return (type(entry.scheme).__doc__ or "").partition("\n")[0]


def _say(problems: Iterable[object]) -> None:
    for problem in problems:
        typer.echo(f"esbench: {problem}", err=True)
