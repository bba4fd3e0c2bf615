"""The commands that measure: run | check | doctor."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esbench.cli.options import FAILED, Plugins, Variants, app, load_entries, say
from esbench.plugins import load
from esbench.registry import REGISTRY
from esbench.selection import DTYPES, cases_of, phases_named, suited, with_references

if TYPE_CHECKING:
    from esbench.measure.ledger import Outcome


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

    entries = load_entries(variants, plugin)
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
    say(problems)
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
def check(variants: Variants = None, plugin: Plugins = None) -> None:
    """Hold every variant on every operator to the slow truth.

    Example: esbench check --plugin my_scheme.py --variants MyScheme
    """
    from esbench.measure.oracle import Oracle

    entries = load_entries(variants, plugin)
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
