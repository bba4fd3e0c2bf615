"""The command ``recommend``: the best scheme for a layer or a model on this device."""

import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esbench.cli.options import FAILED, Plugins, Results, Seed, Variants, app, load_usual, note, say
from esbench.cli.question import Question, size_bytes, template_case
from esbench.cli.question import question as ask
from esbench.cli.run import check_unchanged, conclude, measure, note_load, plan_of
from esbench.errors import UserError
from esbench.registry import DTYPES, REGISTRY, Entry, candidates, trainer
from esbench.schema import Case, Environment, Request, Run, Variant

if TYPE_CHECKING:
    from esbench.measure.recorder import RunSummary
    from esbench.report.tables.recommendation import Advice


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
            help="module:factory; the factory takes no arguments and returns an nn.Module or (module, rows).",
            metavar="FACTORY",
        ),
    ] = None,
    members: Annotated[int, typer.Option(help="Number of members.")] = 1024,
    repeats: Annotated[int, typer.Option(help="Rows per member.")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)}; by default float32, or that of the model.")
    ] = None,
    sigma: Annotated[float, typer.Option(help="Scale of the noise.")] = 0.02,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Exclude variants whose noise or peak memory is larger, such as 2GB.", metavar="SIZE"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    offline: Annotated[
        bool, typer.Option("--offline", help="Measure nothing; answer from stored runs of this device.")
    ] = False,
    variants: Variants = None,
    plugin: Plugins = None,
    seed: Seed = 0,
    results: Results = Path("results"),
) -> None:
    """Recommend a scheme for a layer or a model: the one with the highest n_eff per millisecond here.

    Measures the candidates at exactly that shape, stores the run like any other, and prints the ranking, the
    reasons and the code that applies the winner. Layers of a model are ranked by the effective population of
    the whole model. Exit code 1 if nothing can be recommended.

    Example: esbench recommend --linear 1024x1024 --members 4096 --memory-limit 2GB

    Example: esbench recommend --conv 64x64x3@32x32 --variants 'LowRank*' --variants 'Flipped*'

    Example: esbench recommend --model my_models:policy --members 512

    Example: esbench recommend --linear 1024x1024 --offline
    """
    from esbench.measure.environment import resolve_device
    from esbench.measure.validation import TorchState

    surroundings = TorchState()  # before a model or a plug-in is loaded
    _check_folder(results)
    template = template_case(members, repeats, dtype, sigma)
    limit_bytes = size_bytes(memory_limit) if memory_limit is not None else None
    entries = candidates(load_usual(variants, plugin), named=bool(variants))
    entries = [entry for entry in entries if entry.variant.mode == "batched"]
    if not entries:
        message = (
            f"--variants {' '.join(variants or ())}: nothing to train with: name a variant that perturbs"
        )
        raise UserError(message)
    question = ask(linear, conv, model, template, dtype=dtype, entries=entries)
    place = resolve_device(device)
    again = ["esbench", "run", "--resume", "--out", str(results), "--device", place]
    if offline:
        chosen = {entry.variant for entry in entries} if variants else None
        answers = _answers(question, *_stored(question, place, results), chosen, limit_bytes, again)
        if not _print(question, answers):
            raise typer.Exit(FAILED)
        return
    request = Request(variants=tuple(variants or ()), plugins=tuple(plugin or ()), shapes=question.cases)
    check_unchanged(surroundings)
    path, outcome, run = _measured(question, request, place, seed, results, again)
    answered = _print(question, _answers(question, [run], None, None, limit_bytes), run)
    conclude(path, outcome, run.end.invalid if run.end else ())
    if not answered:
        raise typer.Exit(FAILED)


def _check_folder(results: Path) -> None:
    """Check that results can be stored, before anything is measured.

    Raises:
        UserError: the folder, or one above it, is a file.

    """
    there = next((one for one in (results, *results.parents) if one.exists()), None)
    if there and not there.is_dir():
        message = f"--results {results}: {there} is not a folder"
        raise UserError(message)


def _measured(
    question: Question, request: Request, place: str, seed: int, results: Path, again: Sequence[str]
) -> tuple[Path, "RunSummary", Run]:
    """Measure the candidates, store the run, and return it."""
    from esbench import store
    from esbench.measure.device_lock import holding
    from esbench.measure.environment import device_uuid, environment

    plan = plan_of(request, question.name, place, seed)
    answer = shlex.join(["esbench", *sys.argv[1:], "--offline"])
    hint = f"`{shlex.join(again)}` completes it, then `{answer}` answers"
    with holding(device_uuid(place) or place, question.name, note):
        here = environment(place)
        cases = "; ".join(case.label for case in question.cases)
        note(f"measuring {len(plan.entries)} variants on {place} ({here.device_name}): {cases}")
        note_load(here)
        path, outcome = measure(plan, question.name, request, here, None, results, hint)
    run, problems = store.read_run(path)
    say(problems)
    if run is None:
        message = f"{path} was written but cannot be read: see the lines above, then run again"
        raise UserError(message)
    return path, outcome, run


def _stored(question: Question, place: str, results: Path) -> tuple[list[Run], Environment]:
    """Return the stored runs of this device, and the device.

    Raises:
        UserError: there are none.

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
    again: Sequence[str] = (),
) -> "dict[Case, Advice]":
    """Return the advice for each case that the runs rank.

    Args:
        question: what is asked.
        runs: the runs to answer from.
        here: the device if these are all its stored runs; then a case without a ranking is an error.
        variants: the candidates; by default all.
        limit_bytes: limit of noise and peak memory.
        again: the command that resumes the newest interrupted run.

    Raises:
        UserError: no stored run of the device ranks a case.

    """
    from esbench.report.analysis.quality import ALONE, Part
    from esbench.report.analysis.ranking import names
    from esbench.report.tables.recommendation import advise, ranked_labels

    found: dict[Case, Advice] = {}
    for case in question.cases:
        part = Part(*question.parts.get(case, ALONE))
        advice, passed_over = advise(runs, case, variants=variants, limit_bytes=limit_bytes, part=part)
        if here:
            for words in _cut_off(runs, case, advice, again):
                note(words)
        if advice is None and here:
            stored = "; ".join(ranked_labels(runs)) or "none"
            of = f" for {names(variants)}" if variants else ""
            message = (
                f"no stored run of this device ({here.device_name}) ranks {case.label}{of}; ranked are: "
                f"{stored}; leave --offline out to measure it"
            )
            raise UserError(message)
        if passed_over:
            note(passed_over)
        if advice:
            found[case] = advice
    return found


def _cut_off(runs: Sequence[Run], case: Case, advice: "Advice | None", again: Sequence[str]) -> Iterator[str]:
    """Yield the interrupted runs of exactly this shape that are newer than the answer, with what to do."""
    unfinished = [run for run in runs if run.end is None or run.end.status == "interrupted"]
    newest = max(unfinished, key=lambda run: run.header.run_id, default=None)
    answering = advice.ranking.grid.run.header.run_id if advice else ""
    for run in unfinished:
        asked = run.header.request.shapes if run.header.request else ()
        if case not in asked or run.header.run_id < answering:
            continue
        how = (
            f"`{shlex.join(again)}` completes it" if run is newest else "leave --offline out to measure again"
        )
        yield f"run {run.header.run_id} of {case.label} was interrupted: {how}"


def _print(question: Question, found: "dict[Case, Advice]", run: Run | None = None) -> bool:
    """Print the ranking of each case and the code that applies the winners; return whether there are any.

    ``run`` has the reasons if a case has no ranking.
    """
    from esbench.report.tables.recommendation import applied, without_numbers

    for case in question.cases:
        names = [name for name, one in question.layers.items() if one == case and name]
        heading = f"{case.label}{': ' if names else ''}{', '.join(names)}"
        typer.echo(f"{heading}\n{'=' * len(heading)}")
        if case in found:
            typer.echo(f"{found[case].origin}\n\n{found[case].text()}")
        elif run:
            typer.echo(without_numbers(run, case))
    best = {name: found[case].best for name, case in question.layers.items() if case in found}
    winners = {name: standing for name, standing in best.items() if standing}
    if winners:
        known = REGISTRY.entries.values()
        code = applied(
            winners,
            {entry.variant: _module(entry) for entry in known},
            exclude=question.excluded,
            first_run=question.first_run,
            from_rows=[
                entry.variant
                for entry in known
                if (how := trainer(entry.scheme)) and how.learns_from_rows(entry.scheme)
            ],
        )
        typer.echo(code)
    return bool(winners)


def _module(entry: Entry) -> str:
    """Return where to import a scheme from: its package if that exports it, otherwise its module."""
    kind = type(entry.scheme)
    package = sys.modules.get(entry.package)
    return entry.package if getattr(package, kind.__name__, None) is kind else kind.__module__
