"""The command that gates a change: gate."""

import datetime as dt
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import psutil
import typer

from esbench.cli.interrupts import interruptible
from esbench.cli.options import Plugins, Variants, app, note
from esbench.cli.run import note_load
from esbench.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from esbench.gate.proceedings import Proceedings
    from esbench.gate.protocol import Arm
    from esbench.gate.records import Decision
    from esbench.gate.worktree import Revision

JUDGEMENT, SUMMARY = "gate.json", "summary.md"


@app.command()
def gate(
    base: Annotated[
        str, typer.Option(help="Revision to compare with; by default where the work left the main branch.")
    ] = "",
    head: Annotated[
        str, typer.Option(help="Revision to judge, or `worktree`: what the folder holds now.")
    ] = "HEAD",
    suite: Annotated[
        str | None, typer.Option(help="Suite to compare; by default gate_cuda on a GPU and gate on a CPU.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    variants: Variants = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated, by default all of the device: eager, graph; host on a CPU.")
    ] = "",
    threads: Annotated[
        int, typer.Option(help="Threads of each worker on a CPU: one alone is disturbed least.", min=1)
    ] = 1,
    margin: Annotated[
        float, typer.Option(help="A cell may be slower by so much: 0.005 is half a percent.", min=0, max=0.04)
    ] = 0.005,
    seed: Annotated[int, typer.Option(help="Of weights, inputs, noise and order.", min=0, max=2**62)] = 0,
    plugin: Plugins = None,
    out: Annotated[Path, typer.Option(help=f"Folder for {JUDGEMENT}, {SUMMARY} and every sample.")] = Path(
        "reports/gate"
    ),
    silence: Annotated[
        float, typer.Option(help="Seconds after which a worker that says nothing hangs.", min=1, max=1e6)
    ] = 120.0,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every row, and not only what is remarkable.")
    ] = False,
    wait: Annotated[
        bool, typer.Option(help="Wait while another run holds the device, or end with an error.")
    ] = True,
) -> None:
    """Compare two revisions cell by cell, in the same minutes: is the later one slower, larger or wrong?

    Exit code 0: no regression; 1: one, or a row that is missing or wrong; 2: usage or environment, or an
    acceptance in gate.toml that expired or accepts nothing; 3: inconclusive or invalid; 130: interrupted.

    Example: esbench gate --base main --head worktree --variants 'Permuted*'
    """
    from esbench import documents
    from esbench.gate import report, waivers
    from esbench.gate.decision import USAGE
    from esbench.gate.worktree import default_base, repository, resolve

    for name in (JUDGEMENT, SUMMARY):  # an earlier gate's must not stand for this one's
        with _naming(out / name):
            (out / name).unlink(missing_ok=True)
    asked = Asked(suite, device, variants, methods, threads, margin, seed, plugin, silence, wait)
    with interruptible():
        top = repository(Path())
        judged = resolve(top, head, "head", aside=out)
        compared = resolve(top, base or default_base(top, judged.commit), "base")
        revisions: dict[Arm, Revision] = {"base": compared, "head": judged}
        if not base and compared.commit == judged.commit:
            message = f"nothing to compare: {head} is where it left the main branch; name one with --base"
            raise UserError(message)
        with prepared(asked, top, revisions, "gate") as proceedings:
            proceedings.folder = out
            accepted = waivers.read(
                Path(proceedings.referee.orders["head"].root), dt.datetime.now(dt.UTC).date()
            )
            note(f"gate: {head} against {base or 'the merge base'} on {proceedings.environment.device_name}")
            whole = not (variants or methods or suite)
            judgement = waivers.apply(proceedings.conduct(), accepted, whole=whole)
    _show(judgement, everything=everything)  # first: it is there even where no file can be written
    with _naming(out / JUDGEMENT):
        documents.write(judgement, out / JUDGEMENT)
    with _naming(out / SUMMARY):
        (out / SUMMARY).write_text(report.markdown(judgement), encoding="utf-8")
    note(f"written to {out}")
    if judgement.exit_code == USAGE:
        raise UserError("; ".join(judgement.unused))
    if judgement.exit_code:
        raise typer.Exit(judgement.exit_code)


class Asked(NamedTuple):
    """What a person asked to be compared, as :func:`gate` takes it."""

    suite: str | None
    device: str
    variants: list[str] | None
    methods: str
    threads: int
    margin: float
    seed: int
    plugin: list[str] | None
    silence: float
    wait: bool


@contextmanager
def prepared(
    asked: Asked, top: Path, revisions: "dict[Arm, Revision]", purpose: str
) -> "Iterator[Proceedings]":
    """Take the device, check the revisions out, and yield what compares them; clean up, whatever happens."""
    from esbench.gate.proceedings import Proceedings
    from esbench.gate.protocol import ARMS, Orders
    from esbench.gate.records import Settings
    from esbench.gate.referee import Referee
    from esbench.gate.worktree import trees
    from esbench.measure.device_lock import holding
    from esbench.measure.environment import device_uuid, environment, resolve_device
    from esbench.measure.timers import check_methods
    from esbench.progress import showing
    from esbench.selection import named

    place = resolve_device(asked.device)
    check_methods(place, named(asked.methods))
    suite = asked.suite or ("gate_cuda" if place == "cuda" else "gate")
    wait_s = None if asked.wait else 0
    with (
        holding(device_uuid(place) or place, f"{purpose} of suite {suite}", note, wait_s=wait_s),
        trees(top, revisions) as folders,
        showing() as progress,
    ):
        here = environment(place)
        note_load(here)
        orders = {
            arm: Orders(
                arm=arm,
                root=str(folders[arm]),
                device=place,
                threads=asked.threads,
                core=_core() if place == "cpu" and asked.threads == 1 else None,
                seed=asked.seed,
                suite=suite,
                variants=tuple(asked.variants or ()),
                plugins=tuple(_in_tree(name, top) for name in asked.plugin or ()),
                methods=named(asked.methods),
            )
            for arm in ARMS
        }
        yield Proceedings(
            referee=Referee(orders, asked.silence),
            revisions=revisions,
            environment=here,
            threads=asked.threads,
            folder=Path(),
            settings=Settings(margin=asked.margin),
            seed=asked.seed,
            suite=suite,
            progress=progress,
        )


def _in_tree(plugin: str, top: Path) -> str:
    """Return a plugin's name as it stands at the top of a tree: a file's is that from where one is."""
    path = Path(plugin).resolve()
    here = plugin.endswith(".py") and path.is_file() and path.is_relative_to(top.resolve())
    return str(path.relative_to(top.resolve())) if here else plugin


def _core() -> int | None:
    """Return the core on which both workers take turns: neither has a better one. None where any will do."""
    try:
        cores = psutil.Process().cpu_affinity()
    except (AttributeError, psutil.Error):  # macOS has no such thing
        return None
    return max(cores) if cores else None


def _show(judgement: "Decision", *, everything: bool) -> None:
    """Print the judgement, and for GitHub's runner what it shows beside a pull request."""
    from esbench.gate import report

    typer.echo(report.text(judgement, everything=everything), nl=False)
    if os.environ.get("GITHUB_ACTIONS"):
        for line in report.annotations(judgement):
            typer.echo(line)
    if page := os.environ.get("GITHUB_STEP_SUMMARY"):
        with _naming(Path(page)), Path(page).open("a", encoding="utf-8") as file:
            file.write(report.markdown(judgement))


@contextmanager
def _naming(path: Path) -> "Iterator[None]":
    """Name the file that cannot be written: an error that comes from writing does not know where.

    Raises:
        UserError: it cannot.

    """
    try:
        yield
    except OSError as error:
        message = f"{path}: {error.strerror or error}"
        raise UserError(message) from error
