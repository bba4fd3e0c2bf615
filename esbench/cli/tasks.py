"""The command ``tasks``: train four tasks until a goal, and compare the time with n_eff per ms."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esbench.cli.options import FAILED, REPORTS, Plugins, Variants, app, load_entries, note, studying
from esbench.errors import UserError
from esbench.registry import Entry
from esbench.workload import trainer

if TYPE_CHECKING:
    from esbench.schema import Task


@app.command()
def tasks(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    variants: Variants = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="CartPole, Pendulum, DigitsCNN or Characters; repeatable.", metavar="NAME"),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Training runs of each variant.", metavar="N", min=1)] = 5,
    steps: Annotated[
        int | None, typer.Option(help="Most steps of a training run.", metavar="N", min=1)
    ] = None,
    processes: Annotated[
        int, typer.Option(help="Training runs at the same time, with one thread each.", metavar="N", min=1)
    ] = 1,
    results: Annotated[Path, typer.Option(help="Folder to store the study in.")] = Path("results"),
    reports: Annotated[Path, typer.Option(help="Folder to write the page to.")] = REPORTS,
    plugin: Plugins = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the newest study of this device.")
    ] = False,
) -> None:
    """Train real tasks until they reach a goal.

    Shows whether the variant with the largest n_eff per ms learns fastest: two environments of gymnasium,
    handwritten digits and a text, by default with one variant of each family of schemes. The steps of
    all variants are timed first, when nothing else should run. Finished training runs are stored at once.
    Exit code 1 if a variant fails.

    Example: esbench tasks --task DigitsCNN --seeds 1
    """
    import msgspec

    from esbench.measure.environment import resolve_device
    from esbench.studies import tasks_run
    from esbench.studies.digits import reasons
    from esbench.studies.digits_run import check_resumable
    from esbench.studies.tasks import FILES, VARIANTS, finding, render

    entries = load_entries(["*"] if resume else variants or list(VARIANTS), plugin)
    device_type = resolve_device(device)
    chosen = [] if resume else _tasks(entries, task, steps)
    with studying(device_type, "tasks", results, reports) as (machine, progress):
        here = msgspec.structs.replace(machine, threads=1)
        if resume:
            study = FILES.newest_of(here.slug, results)
            check_resumable(study, entries, here)
        else:
            study = tasks_run.begin(entries, chosen, range(seeds), here)
        path = FILES.path(study, results)
        note(f"training on {device_type} ({here.device_name}); finished training runs are in {path}")
        plan = tasks_run.Plan(device_type, tuple(plugin or ()), processes)
        try:
            study = tasks_run.conduct(study, plan, progress, results)
        except KeyboardInterrupt:
            if path.exists():
                note(f"interrupted: finished runs are in {path}; `esbench tasks --resume` continues")
            raise
    for learned in study.tasks:
        typer.echo(finding(study, learned))
        for reason in reasons(study.untrained, learned.name):
            note(f"{learned.name}: {reason}")
    for page in render(results, reports):
        note(f"written to {page}")
    if any(failure.failed for failure in study.untrained):
        raise typer.Exit(FAILED)


def _tasks(entries: Sequence[Entry], names: Sequence[str] | None, steps: int | None) -> "list[Task]":
    """Return the named tasks, by default all, with at most as many steps.

    Raises:
        UserError: no variant can be trained, a task is unknown, or a package that it needs is missing.
    """
    import msgspec

    trainers = [found for entry in entries if (found := trainer(entry.scheme))]
    if not trainers:
        raise UserError("none of these variants can be trained: name another with --variants")
    known = {task.name: task for task in trainers[0].tasks()}
    if unknown := [name for name in names or () if name not in known]:
        raise UserError(f"no task {unknown[0]!r}; available: {', '.join(known)}")
    chosen = [known[name] for name in dict.fromkeys(names or known)]
    for task in chosen:
        trainers[0].prepare_task(task)
    return [msgspec.structs.replace(task, steps=min(steps or task.steps, task.steps)) for task in chosen]
