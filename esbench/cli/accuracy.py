"""The command ``accuracy``: measure how accurate the harness is on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from esbench.cli.options import REPORTS, app, load_entries, note


@app.command()
def accuracy(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of inputs and order.", min=0, max=2**62)] = 0,
    out: Annotated[Path, typer.Option(help="Folder to store the study in.")] = Path("results"),
    reports: Annotated[Path, typer.Option(help="Folder to write the page to.")] = REPORTS,
) -> None:
    """Compare the harness with other timers, with itself and with calls of known length; takes minutes.

    A missed goal is reported and is not an error. The study is stored at its end.

    Example: esbench accuracy --device cpu
    """
    from esbench.measure.device_lock import lock_device
    from esbench.measure.environment import device_uuid, environment, resolve_device
    from esbench.progress import showing
    from esbench.studies.timer_accuracy import goals, render, write_study
    from esbench.studies.timer_accuracy_run import plan_for, study

    load_entries(None, None)
    place = resolve_device(device)
    for folder in (out, reports):  # fails now rather than after minutes of measuring
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock_device(device_uuid(place) or place, "accuracy", note), showing() as progress:
            here = environment(place)
            note(f"measuring the harness on {place} ({here.device_name})")
            found = study(plan_for(place, seed), here, progress)
    except KeyboardInterrupt:
        note("interrupted: nothing is stored")
        raise
    path = write_study(found, out)
    for goal in goals(found):
        typer.echo(f"{goal.verdict.strip('*'):<9}  {goal.goal}: {goal.result}")
    note(f"stored in {path}")
    for page in render(out, reports):
        note(f"written to {page}")
