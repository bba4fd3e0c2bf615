"""The command that answers what to train with: recommend."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from esbench.cli import shapes
from esbench.cli.options import FAILED, Plugins, Results, Variants, app, load_entries, note, say
from esbench.cli.run import conclude, hold_to, measure, note_load, plan_of
from esbench.errors import UserError
from esbench.records import Case, Environment, Request, Run, Variant
from esbench.registry import Entry
from esbench.selection import DTYPES

if TYPE_CHECKING:
    from esbench.measure.ledger import Outcome
    from esbench.report.recommendation import Advice


class Question(NamedTuple):
    """What is to be trained: its name, its layers as cases by their names, and what to leave unperturbed."""

    name: str
    layers: dict[str, Case]
    excluded: tuple[str, ...] = ()

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases, each once."""
        return tuple(dict.fromkeys(self.layers.values()))


@app.command()
def recommend(
    linear: Annotated[
        str | None, typer.Option(help="A Linear layer: OUTxIN, such as 1024x1024.", metavar="SHAPE")
    ] = None,
    conv: Annotated[
        str | None,
        typer.Option(
            help="A Conv2d layer without padding: OUTxINxKERNEL@HEIGHTxWIDTH, such as 64x64x3@32x32.",
            metavar="SHAPE",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="module:factory, called without arguments; returns an nn.Module, or (module, rows).",
            metavar="FACTORY",
        ),
    ] = None,
    members: Annotated[int, typer.Option(help="Members of the population.")] = 1024,
    repeats: Annotated[int, typer.Option(help="Rows that each member sees.")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)}; float32, or the model's own, if not given.")
    ] = None,
    sigma: Annotated[float, typer.Option(help="Scale of the noise.")] = 0.02,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="No variant whose noise or peak is above this, such as 2GB.", metavar="SIZE"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    offline: Annotated[
        bool, typer.Option("--offline", help="Measure nothing: answer from stored runs of this device.")
    ] = False,
    variants: Variants = None,
    plugin: Plugins = None,
    seed: Annotated[int, typer.Option(help="Of weights, inputs, noise and order.", min=0, max=2**62)] = 0,
    results: Results = Path("results"),
) -> None:
    """Say which scheme trains a layer or a model best here: by effective members per millisecond.

    Measures the candidates at exactly that shape, stores the run like any other, and prints the ranking with
    its reasons and the line that applies it.

    Example: esbench recommend --linear 1024x1024 --members 4096 --memory-limit 2GB

    Example: esbench recommend --conv 64x64x3@32x32 --variants 'LowRank*' --variants 'Flipped*'

    Example: esbench recommend --model my_models:policy --members 512

    Example: esbench recommend --linear 1024x1024 --offline
    """
    from esbench.measure.environment import resolve_device
    from esbench.measure.surroundings import Surroundings

    surroundings = Surroundings()  # as they are before a model or a plugin is loaded
    template = shapes.template(members, repeats, dtype, sigma)
    limit_bytes = shapes.memory(memory_limit) if memory_limit is not None else None
    question = _question(linear, conv, model, template, dtype)
    entries = load_entries(variants, plugin)
    place = resolve_device(device)
    if offline:
        chosen = {entry.variant for entry in entries} if variants else None
        answers = _answers(question, *_stored(question, place, results), chosen, limit_bytes)
        if not _print(question, answers, entries):
            raise typer.Exit(FAILED)
        return
    request = Request(variants=tuple(variants or ()), plugins=tuple(plugin or ()), shapes=question.cases)
    hold_to(surroundings)
    path, outcome, run = _measured(question, request, place, seed, results)
    answered = _print(question, _answers(question, [run], None, None, limit_bytes), entries, run)
    conclude(path, outcome, run.end.invalid if run.end else ())
    if not answered:
        raise typer.Exit(FAILED)


def _question(
    linear: str | None, conv: str | None, model: str | None, template: Case, dtype: str | None
) -> Question:
    """Return what is asked.

    Raises:
        UserError: not exactly one thing is, or it cannot be read.

    """
    if sum(one is not None for one in (linear, conv, model)) != 1:
        message = (
            "recommend needs one of --linear, --conv and --model, such as --linear 1024x1024; see --help"
        )
        raise UserError(message)
    if linear is not None:
        return Question(f"recommend {linear}", {"": shapes.linear(linear, template)})
    if conv is not None:
        return Question(f"recommend {conv}", {"": shapes.conv2d(conv, template)})
    from esbench.measure.layers import layers, load_model

    found = layers(*load_model(str(model)), template, dtype=dtype)
    for other in found.others:
        note(f"{other.name}: {other.why}")
    excluded = tuple(other.name for other in found.others if other.excluded)
    return Question(f"recommend {model}", {layer.name: layer.case for layer in found.chosen}, excluded)


def _measured(
    question: Question, request: Request, place: str, seed: int, results: Path
) -> tuple[Path, "Outcome", Run]:
    """Measure the candidates, store the run, and return it."""
    from esbench import store
    from esbench.measure.environment import device_uuid, environment
    from esbench.measure.lock import holding

    plan = plan_of(request, question.name, place, seed)
    with holding(device_uuid(place) or place, question.name, note):
        here = environment(place)
        cases = "; ".join(case.label for case in question.cases)
        note(f"measuring {len(plan.entries)} variants on {place} ({here.device_name}): {cases}")
        note_load(here)
        path, outcome = measure(plan, question.name, request, here, None, results)
    run, problems = store.read_run(path)
    say(problems)
    if run is None:
        message = f"{path} cannot be read back"
        raise UserError(message)
    return path, outcome, run


def _stored(question: Question, place: str, results: Path) -> tuple[list[Run], Environment]:
    """Return the stored runs of this device.

    Raises:
        UserError: there is none.

    """
    from esbench import store
    from esbench.measure.environment import environment

    here = environment(place)
    found, problems = store.read_results(results) if results.is_dir() else ([], [])
    say(problem for problem in problems if problem.path.parent.name == here.slug)
    runs = [run for run in found if run.header.environment.slug == here.slug]
    if not runs:
        message = (
            f"no stored run of this device ({here.device_name}) in {results}: leave --offline out to measure "
            f"{'; '.join(case.label for case in question.cases)}"
        )
        raise UserError(message)
    return runs, here


def _answers(
    question: Question,
    runs: Sequence[Run],
    here: Environment | None,
    variants: Collection[Variant] | None,
    limit_bytes: float | None,
) -> "dict[Case, Advice]":
    """Return the advice for each case of which the runs hold a ranking.

    Raises:
        UserError: the runs were all stored by this device, and hold none of a case.

    """
    from esbench.report.recommendation import advise, ranked_labels

    found: dict[Case, Advice] = {}
    for case in question.cases:
        advice, passed_over = advise(runs, case, variants=variants, limit_bytes=limit_bytes)
        if advice is None and here:
            stored = "; ".join(ranked_labels(runs)) or "none"
            message = (
                f"no stored run of this device ({here.device_name}) ranks {case.label}; ranked are: "
                f"{stored}; leave --offline out to measure it"
            )
            raise UserError(message)
        for words in passed_over:
            note(words)
        if advice:
            found[case] = advice
    return found


def _print(
    question: Question, found: "dict[Case, Advice]", entries: Sequence[Entry], run: Run | None = None
) -> bool:
    """Print the ranking of each case, and the line that applies the winners; return whether there are any.

    ``run`` says why a case has no ranking.
    """
    from esbench.report.recommendation import applied, origin, without_numbers

    for case in question.cases:
        names = [name for name, one in question.layers.items() if one == case and name]
        heading = f"{case.label}{': ' if names else ''}{', '.join(names)}"
        typer.echo(f"{heading}\n{'=' * len(heading)}")
        if case in found:
            typer.echo(f"{origin(found[case])}\n\n{found[case].text()}")
        elif run:
            typer.echo(without_numbers(run, case))
    best = {name: found[case].best for name, case in question.layers.items() if case in found}
    winners = {name: standing for name, standing in best.items() if standing}
    if winners:
        packages = {entry.variant: entry.package for entry in entries}
        typer.echo(applied(winners, packages, question.excluded))
    return bool(winners)
