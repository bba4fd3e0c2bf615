"""The command ``gate``: compare two revisions of this repository."""

import datetime as dt
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn

import psutil
import typer

from esbench.cli.options import Plugins, Seed, Variants, app, note
from esbench.cli.run import note_load
from esbench.errors import UserError

if TYPE_CHECKING:
    from esbench.gate.gate import Gate
    from esbench.gate.protocol import Arm
    from esbench.gate.records import Decision
    from esbench.gate.worktree import Revision

DECISION, SUMMARY = "gate.json", "summary.md"
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""The signals by which a person, a CI runner or a closing terminal ends a program."""


@app.command()
def gate(
    base: Annotated[
        str, typer.Option(help="Revision to compare with; by default the merge base with the main branch.")
    ] = "",
    head: Annotated[
        str, typer.Option(help="Revision to test; `worktree` stands for the files in the folder.")
    ] = "HEAD",
    suite: Annotated[
        str | None, typer.Option(help="Suite to compare; by default gate_cuda on a GPU and gate on a CPU.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    variants: Variants = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated; by default eager and graph on a GPU, host on a CPU.")
    ] = "",
    threads: Annotated[
        int, typer.Option(help="Threads of each worker on a CPU; 1 is least sensitive to other load.", min=1)
    ] = 1,
    margin: Annotated[
        float, typer.Option(help="Slowdown of a cell that is tolerated: 0.005 is 0.5 %.", min=0, max=0.04)
    ] = 0.005,
    seed: Seed = 0,
    plugin: Plugins = None,
    out: Annotated[Path, typer.Option(help=f"Folder for {DECISION}, {SUMMARY} and every sample.")] = Path(
        "build/gate"
    ),
    silence: Annotated[
        float,
        typer.Option(help="Seconds without an answer after which a worker counts as hung.", min=1, max=1e6),
    ] = 120.0,
    everything: Annotated[
        bool, typer.Option("--all", help="Show all rows, including cells without a sign of a regression.")
    ] = False,
    wait: Annotated[
        bool, typer.Option(help="If another run uses the device, wait for it; --no-wait fails instead.")
    ] = True,
) -> None:
    """Compare two revisions cell by cell in interleaved rounds: is head slower, larger or wrong?

    Exit codes: 0 no regression; 1 a regression, or a row that is missing or wrong; 2 a usage error, or a
    waiver in gate.toml that expired or applies to nothing; 3 inconclusive or invalid; 130 interrupted.

    Example: esbench gate --base main --head worktree --variants 'Permuted*'
    """
    from esbench import store
    from esbench.gate import report, waivers
    from esbench.gate.decision import USAGE
    from esbench.gate.worktree import default_base, repository, resolve

    for name in (DECISION, SUMMARY):  # those of an earlier gate must not be taken for this one's
        with _name_file(out / name):
            (out / name).unlink(missing_ok=True)
    request = GateRequest(suite, device, variants, methods, threads, margin, seed, plugin, silence, wait)
    with interruptible():
        top = repository(Path())
        tested = resolve(top, head, "head", aside=out)
        compared = resolve(top, base or default_base(top, tested.commit), "base")
        revisions: dict[Arm, Revision] = {"base": compared, "head": tested}
        if not base and compared.commit == tested.commit:
            message = f"nothing to compare: {head} is the merge base with the main branch; name a --base"
            raise UserError(message)
        with prepared(request, top, revisions, "gate", out) as one:
            accepted = waivers.read(Path(one.orders["head"].root), dt.datetime.now(dt.UTC).date())
            note(f"gate: {head} against {base or 'the merge base'} on {one.environment.device_name}")
            whole = not (variants or methods or suite)
            decision = waivers.apply(one.run(), accepted, whole=whole)
    _show(decision, everything=everything)  # before the files, which may not be writable
    with _name_file(out / DECISION):
        store.write_document(decision, out / DECISION)
    with _name_file(out / SUMMARY):
        (out / SUMMARY).write_text(report.markdown(decision), encoding="utf-8")
    note(f"written to {out}")
    if decision.exit_code == USAGE:
        raise UserError("; ".join(decision.unused))
    if decision.exit_code:
        raise typer.Exit(decision.exit_code)


class GateRequest(NamedTuple):
    """The options of :func:`gate` that say what to compare."""

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
    request: GateRequest, top: Path, revisions: "dict[Arm, Revision]", purpose: str, folder: Path
) -> "Iterator[Gate]":
    """Lock the device, check the revisions out, and yield the gate; remove the work trees afterwards."""
    from esbench.gate.gate import Gate
    from esbench.gate.protocol import ARMS, Orders
    from esbench.gate.records import Settings
    from esbench.gate.worktree import trees
    from esbench.measure.device_lock import holding
    from esbench.measure.environment import device_uuid, environment, resolve_device
    from esbench.measure.timers import check_methods
    from esbench.progress import showing
    from esbench.registry import named

    place = resolve_device(request.device)
    check_methods(place, named(request.methods))
    suite = request.suite or ("gate_cuda" if place == "cuda" else "gate")
    wait_s = None if request.wait else 0
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
                threads=request.threads,
                core=_core() if place == "cpu" and request.threads == 1 else None,
                seed=request.seed,
                suite=suite,
                variants=tuple(request.variants or ()),
                plugins=tuple(_in_tree(name, top) for name in request.plugin or ()),
                methods=named(request.methods),
            )
            for arm in ARMS
        }
        yield Gate(
            orders=orders,
            revisions=revisions,
            environment=here,
            threads=request.threads,
            folder=folder,
            settings=Settings(margin=request.margin),
            seed=request.seed,
            suite=suite,
            silence_s=request.silence,
            progress=progress,
        )


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn every signal that ends a program into one KeyboardInterrupt, and ignore further ones.

    So an impatient second Ctrl-C does not interrupt the cleaning up. Signals that were ignored before, as
    under ``nohup``, stay ignored.
    """
    before = {one: signal.getsignal(one) for one in SIGNALS}
    handled = {one: handler for one, handler in before.items() if handler not in {signal.SIG_IGN, None}}

    def interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
        del signal_number, frame
        for one in handled:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for one in handled:
        signal.signal(one, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        note("interrupted: no decision; workers and work trees are removed")
        raise
    finally:
        for one, handler in handled.items():
            if signal.getsignal(one) is interrupt:
                signal.signal(one, handler)


def _in_tree(plugin: str, top: Path) -> str:
    """Return a plug-in's name as it is in a work tree: a file's path relative to the top, not to here."""
    path = Path(plugin).resolve()
    here = plugin.endswith(".py") and path.is_file() and path.is_relative_to(top.resolve())
    return str(path.relative_to(top.resolve())) if here else plugin


def _core() -> int | None:
    """Return the core that both workers are pinned to, so that neither has a better one; None for any."""
    try:
        cores = psutil.Process().cpu_affinity()
    except (AttributeError, psutil.Error):  # not on macOS
        return None
    return max(cores) if cores else None


def _show(decision: "Decision", *, everything: bool) -> None:
    """Print the decision; on GitHub also the annotations and the step summary."""
    from esbench.gate import report

    typer.echo(report.text(decision, everything=everything), nl=False)
    if os.environ.get("GITHUB_ACTIONS"):
        for line in report.annotations(decision):
            typer.echo(line)
    if page := os.environ.get("GITHUB_STEP_SUMMARY"):
        with _name_file(Path(page)), Path(page).open("a", encoding="utf-8") as file:
            file.write(report.markdown(decision))


@contextmanager
def _name_file(path: Path) -> Iterator[None]:
    """Name the file in errors of writing, which do not name it themselves.

    Raises:
        UserError: the file cannot be written.

    """
    try:
        yield
    except OSError as error:
        message = f"{path}: {error.strerror or error}"
        raise UserError(message) from error
