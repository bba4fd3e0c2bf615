"""The command that measures the gate itself: gate-study."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esbench.cli.gate import Asked, prepared
from esbench.cli.interrupts import interruptible
from esbench.cli.options import Plugins, Results, Variants, app, note

if TYPE_CHECKING:
    from esbench.gate.protocol import Arm
    from esbench.gate.worktree import Revision


@app.command("gate-study")
def gate_study(
    replicates: Annotated[
        int,
        typer.Option(
            help="Pairs of fresh processes; 13 are the least that a gate is resampled from.", min=13
        ),
    ] = 26,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    suite: Annotated[str | None, typer.Option(help="Suite to compare; by default that of the gate.")] = None,
    variants: Variants = None,
    threads: Annotated[int, typer.Option(help="Threads of each worker on a CPU.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of weights, inputs, noise and order.", min=0, max=2**62)] = 0,
    plugin: Plugins = None,
    results: Results = Path("results"),
    reports: Annotated[Path, typer.Option(help="Folder to write the page to.")] = Path("reports"),
) -> None:
    """Compare this revision with itself repeatedly: the gate's rate of false alarms, and its power.

    Each replicate takes a few minutes, during which nothing else should run; finished replicates are on disk.

    Example: esbench gate-study --replicates 26
    """
    from esbench.errors import UserError
    from esbench.gate.worker_process import WorkerError
    from esbench.gate.worktree import repository, resolve
    from esbench.studies import gate_power
    from esbench.studies.gate_power_page import render

    top = repository(Path())
    revisions: dict[Arm, Revision] = {
        "base": resolve(top, "HEAD", "head"),
        "head": resolve(top, "HEAD", "head"),
    }
    asked = Asked(suite, device, variants, "", threads, 0.005, seed, plugin, 120.0, wait=True)
    with interruptible(), prepared(asked, top, revisions, "gate-study") as proceedings:
        proceedings.folder = results / proceedings.environment.slug / gate_power.FOLDER
        note(f"gate-study: every replicate is stored in {proceedings.folder}")
        try:
            raw = proceedings.study(replicates)
        except WorkerError as error:
            raise UserError(str(error)) from error
    note(f"stored in {gate_power.summarise(raw, proceedings.settings.trim)}")
    note(f"written to {render(results, reports)}")
