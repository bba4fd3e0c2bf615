"""The command ``gate-study``: measure the false alarms and the power of the gate."""

from pathlib import Path
from typing import Annotated

import typer

from esbench.cli.gate import interruptible, orders_for, prepared
from esbench.cli.options import REPORTS, Plugins, Results, Seed, Variants, app, note


@app.command("gate-study")
def gate_study(
    processes: Annotated[int, typer.Option(help="Processes to measure in.", metavar="N", min=2)] = 8,
    replicates: Annotated[
        int,
        typer.Option(
            help="Replicates of a cell in each process; a gate makes at most 36.", metavar="N", min=2
        ),
    ] = 36,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    suite: Annotated[str | None, typer.Option(help="Suite to measure; by default that of the gate.")] = None,
    variants: Variants = None,
    threads: Annotated[int, typer.Option(help="Threads of each worker on a CPU.", metavar="N", min=1)] = 1,
    seed: Seed = 0,
    plugin: Plugins = None,
    results: Results = Path("results"),
    reports: Annotated[Path, typer.Option(help="Folder to write the page to.")] = REPORTS,
) -> None:
    """Measure the false-alarm rate and the power of the gate.

    This revision is compared with itself again and again, for about ten minutes, during which nothing else
    should run on the machine. The study is stored at its end.

    Example: esbench gate-study --processes 8
    """
    from esbench.errors import UserError
    from esbench.gate.revisions import repository, resolve
    from esbench.gate.worker_process import WorkerError
    from esbench.studies import gate_power

    top = repository(Path())
    tested = resolve(top, "HEAD", "head")
    orders = orders_for(suite, device, variants, threads, seed, plugin)
    with interruptible(), prepared(orders, top, {"base": tested, "head": tested}) as gate:
        try:
            path = gate_power.measure(gate, processes, replicates, results)
        except WorkerError as error:
            raise UserError(str(error)) from error
    note(f"stored in {path}")
    for written in gate_power.render(results, reports):
        note(f"written to {written}")
