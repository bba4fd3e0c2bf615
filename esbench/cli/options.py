"""What the commands share: the application, its exit codes, and options that several take."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esbench.errors import UserError
from esbench.registry import REGISTRY, Entry, load, load_installed

if TYPE_CHECKING:
    from esbench.schema import Run
    from esbench.store import Problem

FAILED, USAGE, INVALID, INTERRUPTED = 1, 2, 3, 130

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
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Only runs of this device, by its short name, that of its folder: amd-epyc.",
    ),
]


def load_entries(variants: list[str] | None, plugin: list[str] | None) -> list[Entry]:
    """Load all packages and plugins, and select from what they registered."""
    load_installed()
    for name in plugin or ():
        load(name)
    return REGISTRY.select(variants or ["*"])


def load_usual(variants: list[str] | None, plugin: list[str] | None) -> list[Entry]:
    """Load as :func:`load_entries`; what takes long to set up is left out where no variant was named."""
    return [entry for entry in load_entries(variants, plugin) if variants or not entry.on_request]


def say(problems: "Iterable[Problem]") -> None:
    """Print what could not be read, on stderr: one line each, and one for all bad lines of a file."""
    every = list(problems)
    bad = Counter(one.path for one in every if one.line and one.lost)
    for one in every:
        count = bad[one.path] if one.line and one.lost else 1
        if count == 1:
            typer.echo(f"esbench: {one}", err=True)
        elif count:
            typer.echo(
                f"esbench: {one.path}: {count} lines could not be read, the first: {one.within}", err=True
            )
            bad[one.path] = 0


def note(text: str) -> None:
    """Say something beside the result, on stderr."""
    typer.echo(text, err=True)


def no_such_device(device: str, known: Iterable[str], results: Path) -> str:
    """What is said where no run is of the device that was asked for."""
    return f"no device {device!r} has runs in {results}; there are: {', '.join(known) or 'none'}"


def of_device(device: str | None, known: "dict[str, list[Run]]", results: Path) -> "list[Run]":
    """The runs of a device, of the only one where none is named.

    Raises:
        UserError: there is none of that name, or there are several to choose from.

    """
    names = ", ".join(known)
    if not known:
        message = f"no runs in {results}: measure with `esbench run`"
    elif device in known:
        return known[device]
    elif device is not None:
        message = no_such_device(device, known, results)
    elif len(known) > 1:
        message = f"several devices have runs in {results}, name one with --device: {names}"
    else:
        return next(iter(known.values()))
    raise UserError(message)
