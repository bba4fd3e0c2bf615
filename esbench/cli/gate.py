"""The commands ``gate``, which compares two revisions of this repository, and ``gate-study``."""

import datetime as dt
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import psutil
import typer

from esbench.cli.options import REPORTS, Plugins, Results, Variants, app, check_writable, note
from esbench.cli.run import note_load
from esbench.errors import UserError

if TYPE_CHECKING:
    from esbench.gate.gate import Gate
    from esbench.gate.records import Arm, Revision

DECISION, SUMMARY, OUT = "gate.json", "summary.md", Path("build/gate")


@app.command()
def gate(
    base: Annotated[
        str, typer.Option(help="Revision to compare with; by default the merge base with the main branch.")
    ] = "",
    head: Annotated[
        str, typer.Option(help="Revision to test; `worktree` stands for the files in the folder.")
    ] = "HEAD",
    suite: Annotated[
        str, typer.Option(help="Suite to compare; by default gate_cuda on a GPU and gate on a CPU.")
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    variants: Variants = None,
    margin: Annotated[
        float,
        typer.Option(
            help="Slowdown of a cell that is tolerated: 0.005 is 0.5 %.", metavar="SHARE", min=0, max=0.04
        ),
    ] = 0.005,
    plugin: Plugins = None,
    separate: Annotated[
        bool,
        typer.Option(
            "--separate", help="Import each revision into its own process, if one process cannot import both."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help=f"Folder for {DECISION}, {SUMMARY} and every sample.")] = OUT,
) -> None:
    """Compare two revisions: is head slower, larger or wrong?

    One process imports both and times cells in interleaved rounds. Exit codes: 0 no regression; 1 a
    regression, or a row that is missing or wrong; 2 a usage error, or a waiver in gate.toml that expired or
    applies to nothing; 3 inconclusive or invalid; 130 interrupted.

    Example: esbench gate --base main --head worktree --variants 'Permuted*'
    """
    from esbench import store
    from esbench.gate import report, waivers
    from esbench.gate.decision import decide
    from esbench.gate.records import Settings
    from esbench.gate.revisions import default_base, repository, resolve

    check_writable("--out", out)
    for name in (DECISION, SUMMARY):  # those of an earlier gate must not be taken for this one's
        (out / name).unlink(missing_ok=True)
    top = repository(Path())
    tested = resolve(top, head, "head")
    compared = resolve(top, base or default_base(top, tested.commit), "base")
    if not base and compared.commit == tested.commit:
        raise UserError(
            f"nothing to compare: {head} is the merge base with the main branch: name another with --base"
        )
    with prepared(top, {"base": compared, "head": tested}, device, suite) as run:
        chosen = {"variants": tuple(variants or ()), "plugins": tuple(plugin or ()), "separate": separate}
        run.orders = msgspec.structs.replace(run.orders, **chosen)
        run.settings = Settings.of(margin, separate=separate)
        accepted = waivers.read(Path(run.orders.roots["head"]), dt.datetime.now(dt.UTC).date())
        note(f"gate: {head} against {base or 'the merge base'} on {run.environment.device_name}")
        evidence = run.run(out)
    decision = decide(evidence, run.settings, accepted, whole=not (variants or suite))
    page = report.markdown(decision)
    typer.echo(report.text(decision), nl=False)  # before the files, which may not be writable
    if "GITHUB_ACTIONS" in os.environ:
        typer.echo(report.annotations(decision), nl=False)
    store.write_document(decision, out / DECISION)
    (out / SUMMARY).write_text(page, encoding="utf-8")
    if github := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(github).open("a", encoding="utf-8") as file:
            file.write(page)
    note(f"written to {out}")
    if decision.exit_code:
        raise typer.Exit(decision.exit_code)


@app.command("gate-study")
def gate_study(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    results: Results = Path("results"),
    reports: Annotated[Path, typer.Option(help="Folder to write the page to.")] = REPORTS,
) -> None:
    """Measure the false-alarm rate and the power of the gate.

    This revision is compared with itself again and again, for about ten minutes, during which nothing else
    should run on the machine. The study is stored at its end.

    Example: esbench gate-study
    """
    from esbench.gate.revisions import repository, resolve
    from esbench.studies import gate_power

    top = repository(Path())
    tested = resolve(top, "HEAD", "head")
    with prepared(top, {"base": tested, "head": tested}, device) as run:
        path = gate_power.measure(run, results)
    note(f"stored in {path}")
    for written in gate_power.render(results, reports):
        note(f"written to {written}")


@contextmanager
def prepared(top: Path, revisions: "dict[Arm, Revision]", device: str, suite: str = "") -> "Iterator[Gate]":
    """Lock the device, check the revisions out, and yield the gate; delete their files afterwards."""
    from esbench.gate.gate import Gate
    from esbench.gate.records import Orders
    from esbench.gate.revisions import check_out
    from esbench.measure.device_lock import lock_device
    from esbench.measure.environment import environment, resolve_device
    from esbench.progress import showing

    device_type = resolve_device(device)
    suite = suite or ("gate_cuda" if device_type == "cuda" else "gate")
    with (
        _interruptible(),
        lock_device(device_type, f"gate of suite {suite}", note),
        check_out(top, revisions) as folders,
        showing() as progress,
    ):
        machine = environment(device_type)
        note_load(machine)
        orders = Orders(roots=folders, device=device_type, suite=suite)
        cores = _cores() if device_type == "cpu" else (None,)
        yield Gate(orders, revisions, machine, cores=cores, progress=progress)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn the first signal that ends a program into a KeyboardInterrupt, and ignore further ones.

    So an impatient second Ctrl-C does not interrupt the cleaning up.
    """

    def interrupt(*_: object) -> NoReturn:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        note("interrupted: no decision; workers and their files are removed")
        raise KeyboardInterrupt

    ending = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        ending.append(signal.SIGHUP)  # the terminal was closed
    handlers = {number: signal.signal(number, interrupt) for number in ending}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _cores() -> tuple[int | None, ...]:
    """Return the cores of the workers that run at the same time, at most two; (None,) for any core."""
    try:
        return tuple(psutil.Process().cpu_affinity()[-2:]) or (None,)
    except (AttributeError, psutil.Error):  # not on macOS
        return (None,)
