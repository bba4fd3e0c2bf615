"""The command ``list``: list variants and suites."""

import json
import re
from typing import Annotated

import typer

from esbench.cli.options import Plugins, Variants, app, load_entries
from esbench.registry import REGISTRY, Entry

_COLUMNS, _NAME = 100, 24


@app.command("list")
def list_(
    variants: Variants = None,
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List schemes by family, one line each, and suites; with --variants all variants that match.

    Example: esbench list --variants 'Permuted*'
    """
    entries = load_entries(variants, plugin)
    suites = REGISTRY.suites.values()
    if as_json:
        listing = {
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
        typer.echo(json.dumps(listing, indent=2))
        return
    if variants:
        _print_table("Variants", {entry.variant.name: _summary(entry) for entry in entries})
        return
    families: dict[str, dict[str, list[Entry]]] = {}
    for entry in entries:
        schemes = families.setdefault(_family(entry), {})
        schemes.setdefault(entry.variant.scheme, []).append(entry)
    for family, schemes in families.items():
        lines = {
            scheme + (f" ({len(variants_of)})" if len(variants_of) > 1 else ""): _summary(variants_of[0])
            for scheme, variants_of in schemes.items()
        }
        _print_table(family, lines)
    _print_table("suites of cases", {s.name: f"{s.description} ({len(s.cases)} cases)" for s in suites})


def _print_table(title: str, lines: dict[str, str]) -> None:
    """Print names with descriptions, cut to 100 columns."""
    width = max(_NAME, *map(len, lines))
    typer.echo(title)
    for name, description in lines.items():
        line = f"  {name:<{width}}  {description}"
        typer.echo(line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 1]}…")


def _family(entry: Entry) -> str:
    """Return the name of the folder or file that defines a scheme: ``schemes``, ``kernels``."""
    modules = type(entry.scheme).__module__.split(".")
    return modules[1] if len(modules) > 1 else modules[0]


def _summary(entry: Entry) -> str:
    """Return the first line of a scheme's docstring without its markup."""
    line = (type(entry.scheme).__doc__ or "").partition("\n")[0]
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", line).replace("``", "")
