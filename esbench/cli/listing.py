"""The command ``list``: list variants and suites."""

import json
from typing import Annotated

import typer

from esbench.cli.options import Plugins, Variants, app, load_entries
from esbench.registry import REGISTRY, Entry


@app.command("list")
def list_(
    variants: Variants = None,
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the registered variants and suites.

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


def _summary(entry: Entry) -> str:
    return (type(entry.scheme).__doc__ or "").partition("\n")[0]
