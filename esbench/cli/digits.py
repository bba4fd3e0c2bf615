"""The command ``digits``: train small networks on handwritten digits with every variant."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from esbench.cli.options import FAILED, REPORTS, Plugins, Variants, app, load_usual, note, studying
from esbench.errors import UserError
from esbench.registry import REGISTRY, Entry
from esbench.schema import Recipe
from esbench.workload import trainer

DEFAULT = Recipe(network="DigitsMLP")


@app.command()
def digits(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    variants: Variants = None,
    network: Annotated[
        list[str] | None,
        typer.Option(help="DigitsMLP, the default, DigitsCNN or DigitsResNet; repeatable.", metavar="NAME"),
    ] = None,
    members: Annotated[
        int, typer.Option(help="Antithetic pairs of the population.", metavar="N", min=1)
    ] = DEFAULT.members,
    steps: Annotated[
        int, typer.Option(help="Updates of each training run.", metavar="N", min=1)
    ] = DEFAULT.steps,
    batch: Annotated[int, typer.Option(help="Images per step.", metavar="N", min=1)] = DEFAULT.batch,
    sigma: Annotated[float, typer.Option(help="Scale of the noise.")] = DEFAULT.sigma,
    learning_rate: Annotated[
        float, typer.Option(help="Initial learning rate of Adam.")
    ] = DEFAULT.learning_rate,
    seeds: Annotated[int, typer.Option(help="Training runs of each variant.", metavar="N", min=1)] = 3,
    results: Annotated[Path, typer.Option(help="Folder to store the study in.")] = Path("results"),
    reports: Annotated[Path, typer.Option(help="Folder to write the page to.")] = REPORTS,
    plugin: Plugins = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the newest study of this device.")
    ] = False,
) -> None:
    """Train small networks on handwritten digits.

    Compares every variant with dense noise. A variant that learns worse is reported and is not an error. Exit
    code 1 if one fails or is out of memory. Finished training runs are stored at once. Dense noise,
    Perturbed, always takes part; baselines take part only if --variants names them.

    Example: esbench digits --variants 'Flipped*' --seeds 1
    """
    from esbench.measure.environment import resolve_device
    from esbench.studies import digits_run
    from esbench.studies.digits import FILES, reasons, render, verdict

    entries = _entries(None if resume else variants, plugin, baselines=resume)
    device_type = resolve_device(device)
    recipes = _recipes(
        entries,
        network or [DEFAULT.network],
        {"members": members, "steps": steps, "batch": batch, "sigma": sigma, "learning_rate": learning_rate},
    )
    with studying(device_type, "digits", results, reports) as (here, progress):
        if resume:
            study = FILES.newest_of(here.slug, results)
            digits_run.check_resumable(study, entries, here)
        else:
            study = digits_run.begin(entries, recipes, range(seeds), here)
        path = FILES.path(study, results)
        note(f"training on {device_type} ({here.device_name}); finished training runs are in {path}")
        try:
            study = digits_run.conduct(study, entries, progress, results)
        except KeyboardInterrupt:
            if path.exists():
                note(f"interrupted: finished runs are in {path}; `esbench digits --resume` continues")
            raise
    for recipe in study.recipes:
        typer.echo(verdict(study, recipe.network))
        for reason in reasons(study.untrained, recipe.network):
            note(f"{recipe.network}: {reason}")
    for page in render(results, reports):
        note(f"written to {page}")
    if any(outcome.failed for outcome in study.untrained):
        raise typer.Exit(FAILED)


def _entries(variants: list[str] | None, plugin: list[str] | None, *, baselines: bool) -> list[Entry]:
    """Return the variants to be trained, and dense noise, which the others are compared with.

    Baselines draw dense noise, too, and are slow: they take part if ``baselines`` is set or they are named.

    Raises:
        UserError: none of the variants can train.
    """
    from esbench.studies.digits import DENSE

    chosen = [
        entry
        for entry in load_usual(variants, plugin)
        if entry.variant.mode == "batched" and entry.operators is None
    ]
    if not chosen:
        raise UserError(
            f"no variant of --variants {' '.join(variants or ())} perturbs weights: name one that does, see "
            "`esbench list`"
        )
    if not (variants or baselines):
        chosen = [entry for entry in chosen if not entry.variant.baseline]
    dense = REGISTRY.entries.get(DENSE.name)
    if dense and dense not in chosen:
        note(f"{DENSE.name} is trained as well: accuracies are shown relative to it")
        chosen = [dense, *chosen]
    return chosen


def _recipes(entries: Sequence[Entry], networks: Sequence[str], numbers: Mapping[str, float]) -> list[Recipe]:
    """Return a recipe per network; raise a UserError if training cannot start, for example without data."""
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: expected a finite number above 0")
    recipes = [msgspec.convert({"network": name, **numbers}, Recipe) for name in dict.fromkeys(networks)]
    for recipe, entry in itertools.product(recipes, entries):
        if scheme_trainer := trainer(entry.scheme):
            scheme_trainer.prepare(recipe)
    return recipes
