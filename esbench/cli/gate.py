"""The command ``gate``: compare two revisions of this repository."""

import datetime as dt
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import psutil
import typer

from esbench.cli.options import Plugins, Seed, Variants, app, check_writable, note
from esbench.cli.run import note_load
from esbench.errors import UserError

if TYPE_CHECKING:
    from esbench.gate.gate import Gate
    from esbench.gate.protocol import Orders
    from esbench.gate.records import Arm, Revision

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
        int,
        typer.Option(
            help="Threads of each worker on a CPU; 1 is least sensitive to other load.", metavar="N", min=1
        ),
    ] = 1,
    margin: Annotated[
        float,
        typer.Option(
            help="Slowdown of a cell that is tolerated: 0.005 is 0.5 %.", metavar="SHARE", min=0, max=0.04
        ),
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
    """Compare two revisions: is head slower, larger or wrong?

    One process imports both and times cells in interleaved rounds. Exit codes: 0 no regression; 1 a
    regression, or a row that is missing or wrong; 2 a usage error, or a waiver in gate.toml that expired or
    applies to nothing; 3 inconclusive or invalid; 130 interrupted.

    Example: esbench gate --base main --head worktree --variants 'Permuted*'
    """
    from esbench import store
    from esbench.gate import report, waivers
    from esbench.gate.decision import USAGE
    from esbench.gate.records import Settings
    from esbench.gate.revisions import default_base, repository, resolve

    check_writable("--out", out)
    for name in (DECISION, SUMMARY):  # those of an earlier gate must not be taken for this one's
        (out / name).unlink(missing_ok=True)
    orders = orders_for(suite, device, variants, threads, seed, plugin, methods)
    with interruptible():
        top = repository(Path())
        tested = resolve(top, head, "head", output=out)
        compared = resolve(top, base or default_base(top, tested.commit), "base")
        if not base and compared.commit == tested.commit:
            raise UserError(
                f"nothing to compare: {head} is the merge base with the main branch: name another with --base"
            )
        check_names(orders, top)
        revisions: dict[Arm, Revision] = {"base": compared, "head": tested}
        with prepared(orders, top, revisions, wait_s=None if wait else 0) as comparison:
            comparison.settings = Settings(margin=margin)
            accepted = waivers.read(comparison.folders["head"], dt.datetime.now(dt.UTC).date())
            note(f"gate: {head} against {base or 'the merge base'} on {comparison.environment.device_name}")
            is_whole = not (variants or methods or suite)
            decision = waivers.apply(comparison.run(out), accepted, whole=is_whole)
    page = report.markdown(decision)
    typer.echo(report.text(decision), nl=False)  # before the files, which may not be writable
    store.write_document(decision, out / DECISION)
    (out / SUMMARY).write_text(page, encoding="utf-8")
    if github := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(github).open("a", encoding="utf-8") as file:
            file.write(page)
    note(f"written to {out}")
    if decision.exit_code == USAGE:
        raise UserError("; ".join(decision.unused))
    if decision.exit_code:
        raise typer.Exit(decision.exit_code)


def orders_for(  # one parameter per command-line option
    suite: str | None,
    device: str,
    variants: list[str] | None,
    threads: int,
    seed: int,
    plugins: list[str] | None,
    methods: str = "",
) -> "Orders":
    """Return what the workers measure, from command-line options; ``methods`` are names of timing methods."""
    from esbench.gate.protocol import Orders
    from esbench.measure.environment import resolve_device
    from esbench.measure.timers import check_methods
    from esbench.registry import split_names

    device_type = resolve_device(device)
    check_methods(device_type, split_names(methods))
    return Orders(
        device=device_type,
        threads=threads,
        seed=seed,
        suite=suite or ("gate_cuda" if device_type == "cuda" else "gate"),
        variants=tuple(variants or ()),
        plugins=tuple(plugins or ()),
        methods=split_names(methods),
    )


def check_names(orders: "Orders", top: Path) -> None:
    """Check the names of suite and variants before anything is checked out, which takes a while.

    Variants of a plug-in, or that are not imported from the repository ``top``, may differ from those of its
    revisions; then only the workers can check the names.

    Raises:
        UnknownNameError: the repository has no suite or variant of that name.
    """
    from esbench.registry import DEFAULT, REGISTRY, load_installed

    for name in orders.plugins:  # a relative path is that of a file in each revision
        if Path(name).is_absolute() and not Path(name).is_file():
            raise UserError(f"--plugin {name}: no such file")
    load_installed()
    file = sys.modules[DEFAULT].__file__
    if not orders.plugins and file and Path(file).resolve().is_relative_to(top.resolve()):
        REGISTRY.find_suite(orders.suite)
        REGISTRY.select(orders.variants or ("*",))


@contextmanager
def prepared(
    orders: "Orders", top: Path, revisions: "dict[Arm, Revision]", *, wait_s: float | None = None
) -> "Iterator[Gate]":
    """Lock the device, check the revisions out, and yield the gate; delete their files afterwards."""
    from esbench.gate.gate import Gate
    from esbench.gate.revisions import check_out
    from esbench.measure.device_lock import lock_device
    from esbench.measure.environment import environment
    from esbench.progress import showing

    with (
        lock_device(orders.device, f"gate of suite {orders.suite}", note, wait_s=wait_s),
        check_out(top, revisions) as folders,
        showing() as progress,
    ):
        machine = environment(orders.device)
        note_load(machine)
        plugins = tuple(_relative_to_top(name, top) for name in orders.plugins)
        orders = msgspec.structs.replace(orders, plugins=plugins)
        cores = _cores() if orders.device == "cpu" and orders.threads == 1 else (None,)
        yield Gate(orders, folders, revisions, machine, cores=cores, progress=progress)


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first signal that ends a program into a KeyboardInterrupt, and ignore further ones.

    So an impatient second Ctrl-C does not interrupt the cleaning up.
    """

    def interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
        del signal_number, frame
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        note("interrupted: no decision; workers and their files are removed")
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _relative_to_top(plugin: str, top: Path) -> str:
    """Return a plug-in's file in the repository relative to its top folder; any other plug-in unchanged."""
    path = Path(plugin).resolve()
    is_inside = plugin.endswith(".py") and path.is_file() and path.is_relative_to(top.resolve())
    return str(path.relative_to(top.resolve())) if is_inside else plugin


def _cores() -> tuple[int | None, ...]:
    """Return the cores of the workers that run at the same time, at most two; (None,) for any core."""
    try:
        cores = psutil.Process().cpu_affinity()
    except (AttributeError, psutil.Error):  # not on macOS
        return (None,)
    return tuple(cores[-2:]) if cores else (None,)
