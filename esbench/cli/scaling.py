"""The command ``scaling``: time training steps of a population that is split over processes."""

import math
from pathlib import Path
from typing import Annotated

import typer

from esbench.cli.options import REPORTS, Plugins, app, load_entries, note, studying
from esbench.errors import UserError
from esbench.schema import Recipe

RANKS = (1, 2, 4)
BANDWIDTH = 50.0
"""GB/s of one 400 Gb/s port per GPU, as in NVIDIA's DGX H100."""
LATENCY = 14.0
"""Microseconds of a hop over the network by NCCL's model (src/graph/tuning.cc, protocol Simple)."""


@app.command()
def scaling(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    variant: Annotated[str, typer.Option(help="The variant that is trained.")] = "Perturbed",
    network: Annotated[
        str, typer.Option(help="DigitsMLP, DigitsCNN or DigitsResNet.", metavar="NAME")
    ] = "DigitsMLP",
    ranks: Annotated[
        list[int] | None,
        typer.Option(help="Processes, by default 1, 2 and 4; repeatable.", metavar="N", min=1),
    ] = None,
    members: Annotated[
        int, typer.Option(help="Antithetic pairs, a multiple of 256 for each rank.", metavar="N", min=1)
    ] = 1024,
    batch: Annotated[int, typer.Option(help="Images per step.", metavar="N", min=1)] = 32,
    rounds: Annotated[int, typer.Option(help="Visits to each cell.", metavar="N", min=1)] = 10,
    steps: Annotated[int, typer.Option(help="Steps of a visit.", metavar="N", min=1)] = 3,
    bandwidth: Annotated[
        float, typer.Option(help="GB/s between two GPUs, for the model of communication.")
    ] = BANDWIDTH,
    latency: Annotated[float, typer.Option(help="Microseconds between two GPUs.")] = LATENCY,
    results: Annotated[Path, typer.Option(help="Folder to store the study in.")] = Path("results"),
    reports: Annotated[Path, typer.Option(help="Folder to write the page to.")] = REPORTS,
    plugin: Plugins = None,
) -> None:
    """Measure how training scales over processes.

    A population of --members is split over each number of ranks, and one of the same members a rank; every
    rank has one thread, or one GPU. It takes a minute, in which nothing else should run on the machine. The
    page has a model of communication for up to 64 GPUs beside it. The study is stored at its end.

    Example: esbench scaling --device cpu --ranks 1 --ranks 2
    """
    from esbench.measure.environment import resolve_device
    from esbench.studies.scaling import FILES, Link, finding, render, sizes
    from esbench.studies.scaling_run import Plan, measure

    for name, value in (("bandwidth", bandwidth), ("latency", latency)):
        if not 0 < value < math.inf:
            raise UserError(f"--{name} {value:g}: expected a finite number above 0")
    entries = load_entries([variant], plugin)
    if len(entries) != 1:
        raise UserError(f"--variant {variant} matches {len(entries)} variants: name one, see `esbench list`")
    recipe = Recipe(network=network, members=members, batch=batch, steps=steps)
    link = Link(bytes_per_s=bandwidth * 1e9, latency_s=latency / 1e6)
    device = resolve_device(device)
    plan = Plan(
        device, tuple(plugin or ()), entries[0].variant.name, recipe, sizes(members, ranks or RANKS), rounds
    )
    try:
        with studying(device, "scaling", results, reports) as (here, progress):
            note(f"measuring scaling on {device} ({here.device_name})")
            study = measure(entries[0], plan, link, here, progress)
    except KeyboardInterrupt:
        note("interrupted: nothing is stored")
        raise
    path = FILES.write(study, results)
    typer.echo(finding(study))
    note(f"stored in {path}")
    for page in render(results, reports):
        note(f"written to {page}")
