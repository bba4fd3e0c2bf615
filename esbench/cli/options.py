"""What the commands share: the typer application, exit codes, common options, reading of stored runs."""

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
REPORTS = Path("build/reports")
"""Where commands write pages by default; git ignores ``build/``."""

app = typer.Typer(
    name="esbench",
    help="Benchmark layers that evaluate a population of perturbed networks, and render the results.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variants",
        help="Glob over variants: Permuted* or PermutedLinear*; repeatable.",
        metavar="GLOB",
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Module or .py file that registers variants; repeatable."),
]
Results = Annotated[Path, typer.Option(help="Folder of stored runs.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, inputs, noise and order.", min=0, max=2**62)]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Only runs of this device, by the name of its folder, such as amd-epyc.",
    ),
]


def load_entries(variants: list[str] | None, plugin: list[str] | None) -> list[Entry]:
    """Load all packages of variants and plug-ins; return the variants that match."""
    load_installed()
    for name in plugin or ():
        load(name)
    return REGISTRY.select(variants or ["*"])


def load_usual(variants: list[str] | None, plugin: list[str] | None) -> list[Entry]:
    """As :func:`load_entries`, without variants that take long to set up unless variants were named."""
    return [entry for entry in load_entries(variants, plugin) if variants or not entry.on_request]


def say(problems: "Iterable[Problem]") -> None:
    """Print problems of reading on stderr: one line each, and one line for all bad lines of a file."""
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
    """Print a message on stderr, beside the result on stdout."""
    typer.echo(text, err=True)


def no_such_device(device: str, known: Iterable[str], results: Path) -> str:
    """Return the error for a device without stored runs."""
    return f"no device {device!r} has runs in {results}; there are: {', '.join(known) or 'none'}"


def of_device(device: str | None, known: "dict[str, list[Run]]", results: Path) -> "list[Run]":
    """Return the runs of a device; without a name, those of the only device.

    Raises:
        UserError: the device has no runs, or no device was named and there are several.

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


def stored_run(path: Path, option: str) -> "tuple[Run, list[Problem]]":
    """Read the run in a file; print and return the problems.

    Raises:
        UserError: the file holds no run; the message begins with ``option``, what takes the file.

    """
    from esbench.store import read_run

    run, problems = read_run(path)
    if run is None:
        message = f"{'; '.join(map(str, problems))}: {option}, such as results/<device>/<run>.jsonl"
        raise UserError(message)
    say(problems)
    return run, problems


def stored_runs(results: Path) -> "tuple[list[Run], list[Problem]]":
    """Read the runs in a folder; print and return the problems.

    Raises:
        UserError: there is no such folder.

    """
    from esbench.store import read_results

    check_results(results)
    runs, problems = read_results(results)
    say(problems)
    return runs, problems


def check_writable(option: str, folder: Path) -> None:
    """Check that files can be stored in a folder, before anything is measured.

    Raises:
        UserError: the folder, or one above it, is a file.

    """
    there = next((one for one in (folder, *folder.parents) if one.exists()), None)
    if there and not there.is_dir():
        message = f"{option} {folder}: {there} is not a folder"
        raise UserError(message)


def prepare_file(option: str, path: Path) -> None:
    """Check that a file can be written, and create its folder.

    Raises:
        UserError: the path is a folder, or a folder above it is a file.

    """
    if path.is_dir():
        message = f"{option} {path} is a folder: name a file"
        raise UserError(message)
    check_writable(option, path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)


def check_results(results: Path) -> None:
    """Check that there is a folder of results.

    Raises:
        UserError: the folder does not exist.

    """
    if not results.is_dir():
        message = f"no folder {results}: measure with `esbench run`, or name another with --results"
        raise UserError(message)
