"""The command ``gate``: compare two revisions of this repository."""

import datetime as dt
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import psutil
import typer

from esbench.cli.options import Plugins, Seed, Variants, app, note
from esbench.cli.run import note_load
from esbench.errors import UserError

if TYPE_CHECKING:
    from esbench.gate.gate import Gate
    from esbench.gate.protocol import Arm, Orders
    from esbench.gate.records import Decision
    from esbench.gate.worktree import Revision

DECISION, SUMMARY = "gate.json", "summary.md"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""The signals by which a person or a CI runner ends a program."""


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
        str, typer.Option(help="Timing methods; by default eager,graph on a GPU and host on a CPU.")
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
    from esbench.gate.records import Settings
    from esbench.gate.worktree import default_base, repository, resolve

    for name in (DECISION, SUMMARY):  # those of an earlier gate must not be taken for this one's
        (out / name).unlink(missing_ok=True)
    orders = orders_for(suite, device, variants, threads, seed, plugin, methods)
    with interruptible():
        top = repository(Path())
        tested = resolve(top, head, "head", aside=out)
        compared = resolve(top, base or default_base(top, tested.commit), "base")
        if not base and compared.commit == tested.commit:
            message = f"nothing to compare: {head} is the merge base with the main branch; pass --base"
            raise UserError(message)
        with prepared(orders, top, {"base": compared, "head": tested}, wait_s=None if wait else 0) as one:
            one.settings = Settings(margin=margin)
            accepted = waivers.read(one.folders["head"], dt.datetime.now(dt.UTC).date())
            note(f"gate: {head} against {base or 'the merge base'} on {one.environment.device_name}")
            is_whole = not (variants or methods or suite)
            decision = waivers.apply(one.run(out), accepted, whole=is_whole)
    _show(decision)  # before the files, which may not be writable
    store.write_document(decision, out / DECISION)
    (out / SUMMARY).write_text(report.markdown(decision), encoding="utf-8")
    note(f"written to {out}")
    if decision.exit_code == USAGE:
        raise UserError("; ".join(decision.unused))
    if decision.exit_code:
        raise typer.Exit(decision.exit_code)


def orders_for(  # options of two commands
    suite: str | None,
    device: str,
    variants: list[str] | None,
    threads: int,
    seed: int,
    plugins: list[str] | None,
    methods: str = "",
) -> "Orders":
    """Return what workers are told, from options of the command line."""
    from esbench.gate.protocol import Orders
    from esbench.measure.environment import resolve_device
    from esbench.measure.timers import check_methods
    from esbench.registry import named

    place = resolve_device(device)
    check_methods(place, named(methods))
    return Orders(
        device=place,
        threads=threads,
        core=_core() if place == "cpu" and threads == 1 else None,
        seed=seed,
        suite=suite or ("gate_cuda" if place == "cuda" else "gate"),
        variants=tuple(variants or ()),
        plugins=tuple(plugins or ()),
        methods=named(methods),
    )


@contextmanager
def prepared(
    orders: "Orders", top: Path, revisions: "dict[Arm, Revision]", *, wait_s: float | None = None
) -> "Iterator[Gate]":
    """Lock the device, check the revisions out, and yield the gate; remove the work trees afterwards."""
    from esbench.gate.gate import Gate
    from esbench.gate.worktree import trees
    from esbench.measure.device_lock import holding
    from esbench.measure.environment import device_uuid, environment
    from esbench.progress import showing

    lock = device_uuid(orders.device) or orders.device
    with (
        holding(lock, f"gate of suite {orders.suite}", note, wait_s=wait_s),
        trees(top, revisions) as folders,
        showing() as progress,
    ):
        here = environment(orders.device)
        note_load(here)
        in_tree = tuple(_in_tree(name, top) for name in orders.plugins)
        orders = msgspec.structs.replace(orders, plugins=in_tree)
        yield Gate(orders, folders, revisions, here, progress=progress)


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first signal that ends a program into a KeyboardInterrupt, and ignore further ones.

    So an impatient second Ctrl-C does not interrupt the cleaning up. A signal that is ignored stays ignored.
    """

    def interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
        del signal_number, frame
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {one: signal.getsignal(one) for one in SIGNALS}
    before = {one: handler for one, handler in before.items() if handler not in {signal.SIG_IGN, None}}
    for one in before:
        signal.signal(one, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        note("interrupted: no decision; workers and work trees are removed")
        raise
    finally:
        for one, handler in before.items():
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


def _show(decision: "Decision") -> None:
    """Print the decision; on GitHub also the annotations and the step summary."""
    from esbench.gate import report

    typer.echo(report.text(decision), nl=False)
    if os.environ.get("GITHUB_ACTIONS"):
        for line in report.annotations(decision):
            typer.echo(line)
    if page := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(page).open("a", encoding="utf-8") as file:
            file.write(report.markdown(decision))
