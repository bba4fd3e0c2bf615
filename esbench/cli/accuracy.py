"""The command ``accuracy``: measure how accurate the harness is on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from esbench.cli.options import REPORTS, app, load_entries, note, studying


@app.command()
def accuracy(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    results: Annotated[Path, typer.Option(help="Folder to store the study in.")] = Path("results"),
    reports: Annotated[Path, typer.Option(help="Folder to write the page to.")] = REPORTS,
) -> None:
    """Compare the harness's times with those of other timers.

    The others are torch.utils.benchmark, the harness itself and calls of known length; it takes minutes. A
    missed goal is reported and is not an error. The study is stored at its end.

    Example: esbench accuracy --device cpu
    """
    from esbench.measure.environment import resolve_device
    from esbench.studies.timer_accuracy import FILES, goals, render
    from esbench.studies.timer_accuracy_run import default_plan, measure

    load_entries(None, None)
    device = resolve_device(device)
    try:
        with studying(device, "accuracy", results, reports) as (here, progress):
            note(f"measuring the harness on {device} ({here.device_name})")
            study = measure(default_plan(device), here, progress)
    except KeyboardInterrupt:
        note("interrupted: nothing is stored")
        raise
    path = FILES.write(study, results)
    for goal in goals(study):
        typer.echo(f"{goal.verdict.strip('*'):<9}  {goal.goal}: {goal.result}")
    note(f"stored in {path}")
    for page in render(results, reports):
        note(f"written to {page}")
