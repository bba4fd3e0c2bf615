"""The command ``list``: list variants and suites."""

import json
import re
import shutil
import sys

import typer

from esbench.cli.options import Json, Plugins, Variants, app, load_entries
from esbench.registry import REGISTRY, Entry
from esbench.report.analysis.families import FAMILIES, family
from esbench.text import cut, pluralize

_NAME = 24
"""The least width of a column of names."""
_OTHER_SCHEMES = "other schemes"
_BASELINES = "baselines and controls"
_WORKLOADS = "workloads that are not layers"


@app.command("list")
def list_(variants: Variants = None, plugin: Plugins = None, *, as_json: Json = False) -> None:
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
                {
                    "name": suite.name,
                    "description": suite.description,
                    "cases": [case.label for case in suite.cases],
                }
                for suite in suites
            ],
        }
        typer.echo(json.dumps(listing, indent=2))
        return
    if variants:
        _print_table("Variants", {entry.variant.name: _summary(entry) for entry in entries})
        return
    schemes: dict[str, list[Entry]] = {}
    for entry in entries:
        schemes.setdefault(entry.variant.unfused_scheme, []).append(entry)
    for group in (*FAMILIES, _OTHER_SCHEMES, _BASELINES, _WORKLOADS):
        lines = {
            scheme + _counts(entries_of_scheme): _summary(entries_of_scheme[0])
            for scheme, entries_of_scheme in schemes.items()
            if _group(entries_of_scheme) == group
        }
        if lines:
            _print_table(group, lines)
    suite_lines = {
        suite.name: f"{suite.description} ({pluralize(len(suite.cases), 'case')})" for suite in suites
    }
    _print_table("suites of cases", suite_lines)


def _print_table(title: str, lines: dict[str, str]) -> None:
    """Print names with descriptions, in a terminal cut to its width."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    width = max(_NAME, *map(len, lines))
    typer.echo(title)
    for name, description in lines.items():
        line = f"  {name:<{width}}  {description}"
        typer.echo(line if columns is None else cut(line, columns))


def _group(entries: list[Entry]) -> str:
    """Return the heading under which a scheme is listed: its family, or another group."""
    scheme_family = family(entries[0].variant.scheme)
    if scheme_family in FAMILIES:
        return scheme_family
    if all(entry.variant.baseline or entry.variant.mode != "batched" for entry in entries):
        return _BASELINES
    is_workload = ".benchmark." in type(entries[0].scheme).__module__  # not in a package of schemes
    return _WORKLOADS if is_workload else _OTHER_SCHEMES


def _counts(entries: list[Entry]) -> str:
    """Return the number of variants of a scheme, and of those in fused kernels: `` (5 + 3 fused)``."""
    if len(entries) == 1:
        return ""
    fused = sum(entry.variant.scheme.startswith("Fused") for entry in entries)
    return f" ({len(entries) - fused} + {fused} fused)" if fused else f" ({len(entries)})"


def _summary(entry: Entry) -> str:
    """Return the first line of a scheme's docstring without its markup."""
    line = (type(entry.scheme).__doc__ or "").partition("\n")[0]
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", line).replace("``", "")
