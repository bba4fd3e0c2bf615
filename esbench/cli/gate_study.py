"""The command ``gate-study``: measure the false alarms and the power of the gate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esbench.cli.gate import GateRequest, interruptible, prepared
from esbench.cli.options import REPORTS, Plugins, Results, Seed, Variants, app, note

if TYPE_CHECKING:
    from esbench.gate.protocol import Arm
    from esbench.gate.worktree import Revision


@app.command("gate-study")
def gate_study(
    replicates: Annotated[
        int,
        typer.Option(help="Pairs of fresh processes to measure; resampling needs at least 13.", min=13),
    ] = 26,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    suite: Annotated[str | None, typer.Option(help="Suite to measure; by default that of the gate.")] = None,
    variants: Variants = None,
    threads: Annotated[int, typer.Option(help="Threads of each worker on a CPU.", min=1)] = 1,
    seed: Seed = 0,
    plugin: Plugins = None,
    results: Results = Path("results"),
    reports: Annotated[Path, typer.Option(help="Folder to write the page to.")] = REPORTS,
) -> None:
    """Compare this revision with itself repeatedly: the false-alarm rate and the power of the gate.

    A replicate takes about a minute, during which nothing else should run on the machine. Finished
    replicates are stored at once.

    Example: esbench gate-study --replicates 26
    """
    from esbench.errors import UserError
    from esbench.gate.worker_process import WorkerError
    from esbench.gate.worktree import repository, resolve
    from esbench.studies import gate_power

    top = repository(Path())
    revisions: dict[Arm, Revision] = {
        "base": resolve(top, "HEAD", "head"),
        "head": resolve(top, "HEAD", "head"),
    }
    request = GateRequest(suite, device, variants, "", threads, 0.005, seed, plugin, 120.0, wait=True)
    with interruptible(), prepared(request, top, revisions, "gate-study", results) as gate:
        gate.folder = results / gate.environment.slug / gate_power.FOLDER
        note(f"gate-study: every replicate is stored in {gate.folder}")
        try:
            raw = gate.study(replicates)
        except WorkerError as error:
            raise UserError(str(error)) from error
    note(f"stored in {gate_power.summarise(raw, gate.settings.trim)}")
    note(f"written to {gate_power.render(results, reports)}")
