"""The command ``list``: list variants and suites."""

import json
import re
import shutil
import sys
from typing import Annotated

import typer

from esbench.cli.options import Plugins, Variants, app, load_entries
from esbench.registry import REGISTRY, Entry
from esbench.report.analysis.families import family
from esbench.text import pluralize

_NAME = 24
"""The least width of a column of names."""
_FAMILIES = ("dense noise", "low rank", "sparse", "shared core", "dropout")
_OTHERS = ("other schemes", "baselines and controls", "workloads that are not layers")


@app.command("list")
def list_(
    variants: Variants = None,
    plugin: Plugins = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List schemes by family, and suites.

    Each scheme has one line; with --variants each variant that matches.

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
    schemes: dict[str, list[Entry]] = {}
    for entry in entries:
        schemes.setdefault(entry.variant.scheme.removeprefix("Fused"), []).append(entry)
    for group in (*_FAMILIES, *_OTHERS):
        lines = {
            scheme + _counts(of_scheme): _summary(of_scheme[0])
            for scheme, of_scheme in schemes.items()
            if _group(of_scheme) == group
        }
        if lines:
            _print_table(group, lines)
    _print_table(
        "suites of cases", {s.name: f"{s.description} ({pluralize(len(s.cases), 'case')})" for s in suites}
    )


def _print_table(title: str, lines: dict[str, str]) -> None:
    """Print names with descriptions, in a terminal cut to its width."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    width = max(_NAME, *map(len, lines))
    typer.echo(title)
    for name, description in lines.items():
        line = f"  {name:<{width}}  {description}"
        typer.echo(line if columns is None or len(line) <= columns else f"{line[: columns - 1]}…")


def _group(entries: list[Entry]) -> str:
    """Return the family of a scheme, or the name of its group outside of the families."""
    name, (schemes, baselines, workloads) = family(entries[0].variant.scheme), _OTHERS
    if name in _FAMILIES:
        return name
    if all(entry.variant.baseline or entry.variant.mode != "batched" for entry in entries):
        return baselines
    return workloads if ".benchmark." in type(entries[0].scheme).__module__ else schemes


def _counts(entries: list[Entry]) -> str:
    """Return the number of variants of a scheme, and of those in fused kernels: `` (5 + 3 fused)``."""
    fused = sum(entry.variant.scheme.startswith("Fused") for entry in entries)
    if len(entries) == 1:
        return ""
    return f" ({len(entries) - fused} + {fused} fused)" if fused else f" ({len(entries)})"


def _summary(entry: Entry) -> str:
    """Return the first line of a scheme's docstring without its markup."""
    line = (type(entry.scheme).__doc__ or "").partition("\n")[0]
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", line).replace("``", "")
