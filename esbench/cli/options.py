"""Code shared by the commands: the typer application, exit codes, options, and reading of stored runs."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from esbench.errors import UserError
from esbench.registry import REGISTRY, Entry, load, load_installed
from esbench.store import summarize_problems
from esbench.text import fill, printable, short_path

if TYPE_CHECKING:
    from esbench.progress import Show
    from esbench.schema import Environment, Run
    from esbench.store import Problem

FAILED, USAGE, INVALID, INTERRUPTED = 1, 2, 3, 130
REPORTS = Path("build/reports")
"""Where commands write pages by default; git ignores ``build/``."""

app = typer.Typer(
    name="esbench",
    help="Benchmark layers that evaluate a population of perturbed networks, and render the results.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def seconds_option(text: str) -> Any:  # noqa: ANN401  # what typer returns
    """Return an option that takes a number of seconds; ``text`` is its help."""
    return typer.Option(help=text, metavar="SECONDS", min=1, max=10**8)


TimedPhase = Literal["sample", "forward", "update", "step"]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variants", help="Glob over variants: Permuted* or PermutedLinear*; repeatable.", metavar="GLOB"
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin", help="Module or .py file that registers variants; repeatable.", metavar="MODULE"
    ),
]
Results = Annotated[Path, typer.Option(help="Folder of stored runs.")]
Forwards = Annotated[
    int,
    typer.Option(
        "--forwards-per-step",
        help="Rank by the time of a step with N forwards of the same noise, as in a rollout: the measured "
        "step plus N - 1 times the measured forward.",
        metavar="N",
        min=1,
        max=10**6,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout; its keys are in docs/commands.md.")
]
Seed = Annotated[
    int, typer.Option(help="Seed of weights, inputs, noise and order.", metavar="N", min=0, max=2**62)
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="Only runs of this device, by the name of its folder, such as amd-epyc."),
]


def load_entries(variants: list[str] | None, plugin: list[str] | None) -> list[Entry]:
    """Load all packages of variants and plug-ins; return the variants that match."""
    load_installed()
    for name in plugin or ():
        load(name)
    return REGISTRY.select(variants or ["*"])


def load_usual(variants: list[str] | None, plugin: list[str] | None) -> list[Entry]:
    """Do the same as :func:`load_entries`, but leave ``on_request`` variants out unless they are named."""
    return [entry for entry in load_entries(variants, plugin) if variants or not entry.on_request]


def print_problems(problems: "Iterable[Problem]") -> None:
    """Print problems with stored runs on stderr, one line each; the bad lines of a file share one line."""
    shown = (replace(problem, path=Path(short_path(problem.path))) for problem in problems)
    for line in summarize_problems(shown):
        note(f"esbench: {line}")


@contextlib.contextmanager
def studying(device: str, name: str, *folders: Path) -> "Iterator[tuple[Environment, Show]]":
    """Lock a device for a study; yield the environment, and the function that shows progress.

    The folders of the study are created first: an error now is better than one after minutes.
    """
    from esbench.measure.device_lock import lock_device
    from esbench.measure.environment import environment
    from esbench.progress import showing

    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    with lock_device(device, name, note), showing() as progress:
        yield environment(device), progress


@contextlib.contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Send what variants print to stderr: they must not mix lines into the results, or close stdout."""
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        yield


def note(text: str) -> None:
    """Print a message on stderr, in lines of at most 100 columns; stdout is for results."""
    typer.echo("\n".join(map(fill, printable(text).split("\n"))), err=True)


def combined_note(forwards: int) -> str:
    """Return the note on the times of steps with several forwards."""
    return (
        f"A step here has {forwards} forwards with one draw of noise. Its time is combined: that of a "
        f"measured step plus {forwards - 1} times that of a measured population(x, noise=noise). Forwards of "
        "population.prepare() are faster, and of very small layers equally fast for all schemes."
    )


def read_stored_run(path: Path, option: str) -> "tuple[Run, list[Problem]]":
    """Read the run in a file; print and return the problems.

    Raises:
        UserError: the file holds no run; the message contains ``option``, which says where a run is expected.
    """
    from esbench.store import read_run

    run, problems = read_run(path)
    if run is None:
        raise UserError(f"{'; '.join(map(str, problems))}: {option}, such as results/<device>/<run>.jsonl")
    print_problems(problems)
    return run, problems


def read_runs_of_device(results: Path, device: str | None) -> "tuple[list[Run], list[Problem]]":
    """Read the runs of a device, or of the only device with runs; print and return the problems of all files.

    Raises:
        UserError: there is no such folder, the device has no runs, or none was named and there are several.
    """
    from esbench.report.analysis.history import devices
    from esbench.store import read_results

    check_results(results)
    runs, problems = read_results(results)
    print_problems(problems)
    known = devices(run for run in runs if run.rows)
    names = ", ".join(known)
    if not known:
        raise UserError(f"no run with rows in {results}: measure with `esbench run`")
    if device is None and len(known) > 1:
        raise UserError(f"several devices have runs in {results}, name one with --device: {names}")
    if device not in {None, *known}:
        raise UserError(f"no device {device!r} has runs in {results}; available: {names}")
    return known[device or names], problems


def check_writable(option: str, folder: Path) -> None:
    """Raise a UserError if a folder, or one above it, is a file: called before anything is measured."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if existing and not existing.is_dir():
        raise UserError(f"{option} {folder}: {existing} is not a folder")


def check_results(results: Path) -> None:
    """Raise a UserError if there is no such folder of results."""
    if not results.is_dir():
        raise UserError(f"no folder {results}: measure with `esbench run`, or name another with --results")
