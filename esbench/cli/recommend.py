"""The command ``recommend``: the best scheme for a layer or a model on this device."""

import math
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from esbench.cli.options import (
    FAILED,
    Forwards,
    Json,
    Plugins,
    Results,
    Seed,
    Variants,
    app,
    check_writable,
    combined_note,
    load_usual,
    note,
    print_problems,
    printing_to_stderr,
    seconds_option,
)
from esbench.cli.run import check_unchanged, conclude, measure, note_load, plan_of, resume_command
from esbench.cli.screening import KEPT, SHARE, Screened, choose, screen, small_case
from esbench.errors import UserError
from esbench.registry import DTYPES, REGISTRY, Entry, candidates, scheme_docs
from esbench.schema import DENSE, Case, Environment, Request, Run, Variant
from esbench.supervisor import Child, supervise
from esbench.text import fill, first_names, printable, short_path
from esbench.workload import trainer

if TYPE_CHECKING:
    from esbench.measure.model_layers import Layers
    from esbench.measure.plan import Plan
    from esbench.measure.recorder import RunSummary
    from esbench.report.analysis.ranking import RankedVariant, Recommendation


_LARGEST = 2**31 - 1
_LINEAR = re.compile(r"(\d+)x(\d+)")
_CONV = re.compile(r"(\d+)x(\d+)x(\d+)(?:x(\d+))?@(\d+)x(\d+)")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?")
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Target(NamedTuple):
    """The layers to recommend a scheme for: one shape, or the layers of a model.

    Attributes:
        name: name of the run that measures it.
        layers: name of each layer -> its case.
        excluded: names of modules that are left unperturbed.
        parts: case of each layer -> number of its parameters, and of all perturbed parameters.
    """

    name: str
    layers: dict[str, Case]
    excluded: tuple[str, ...] = ()
    parts: Mapping[Case, tuple[int, int]] = {}

    @property
    def cases(self) -> tuple[Case, ...]:
        """The distinct cases."""
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
            help="module:factory, a function without arguments that returns a model or (model, inputs).",
            metavar="FACTORY",
        ),
    ] = None,
    members: Annotated[int, typer.Option(help="Number of members.", metavar="N", min=1, max=_LARGEST)] = 1024,
    repeats: Annotated[int, typer.Option(help="Inputs per member.", metavar="N", min=1, max=_LARGEST)] = 1,
    antithetic: Annotated[
        bool, typer.Option("--antithetic", help="Evaluate members with their noise and with its negative.")
    ] = False,
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
    budget: Annotated[
        float, seconds_option("Time limit in seconds; variants for which no time is left are named.")
    ] = 60,
    offline: Annotated[
        bool, typer.Option("--offline", help="Measure nothing; answer from stored runs of this device.")
    ] = False,
    tables: Annotated[
        bool, typer.Option("--tables", help="Print all variants with all columns, and the reasons.")
    ] = False,
    variants: Variants = None,
    plugin: Plugins = None,
    seed: Seed = 0,
    results: Results = Path("results"),
    forwards_per_step: Forwards = 1,
    as_json: Json = False,
) -> None:
    """Recommend a scheme for a layer or a model.

    It is the one with the highest n_eff per millisecond here. Screens the candidates at a small population,
    measures the best eight, dense noise and base at exactly that shape, stores the run like any other, and
    prints the best with the code that applies it and its figures. Layers of a model are ranked by the
    effective population of the whole model. Exit code 1 if nothing can be recommended.

    Example: esbench recommend --linear 1024x1024 --memory-limit 2GB

    Example: esbench recommend --conv 64x64x3@32x32 --variants 'LowRank*'

    Example: esbench recommend --model my_models:policy --members 512

    Example: esbench recommend --linear 64x64 --members 16384 --offline

    Example: esbench recommend --linear 64x17 --repeats 2 --antithetic --forwards-per-step 1000
    """
    child = Child() if offline else supervise(note)
    from esbench.measure.environment import resolve_device
    from esbench.measure.validation import TorchState

    torch_state = TorchState()  # before a model or a plug-in is loaded
    check_writable("--results", results)
    template = template_case(members, repeats, dtype, sigma, antithetic=antithetic)
    limit_bytes = size_bytes(memory_limit) if memory_limit is not None else None
    named = candidates(load_usual(variants, plugin), named=bool(variants))
    entries = [entry for entry in named if entry.variant.mode == "batched"]
    if not entries:
        raise UserError(
            f"--variants {' '.join(variants or ())}: none of these perturbs the weights of a layer: name "
            "schemes, `esbench list` shows them"
        )
    named_variants = {entry.variant for entry in entries} if variants else None
    target = target_of(linear, conv, model, template, dtype=dtype, entries=entries)
    device_type = resolve_device(device)
    if device_type == "cuda":
        child.use_all_cpus()
    answer = partial(_answer, target, results, tables=tables, as_json=as_json, forwards=forwards_per_step)
    if offline:
        recommendations = _answer_offline(
            target, device_type, results, named_variants, limit_bytes, forwards_per_step
        )
        if not answer(recommendations):
            raise typer.Exit(FAILED)
        return
    if variants:  # others are compared with dense noise
        variants = list(dict.fromkeys([*variants, DENSE]))
    request = Request(variants=tuple(variants or ()), plugins=tuple(plugin or ()), shapes=target.cases)
    check_unchanged(torch_state)
    entries = [entry for entry in entries if entry.variant not in child.announcement.excluded]
    if len(entries) > KEPT or child.announcement.excluded:  # these are screened
        names = dict.fromkeys([*(entry.variant.name for entry in entries), DENSE])
        request = msgspec.structs.replace(request, variants=tuple(names))
    path, outcome, run = _measure(
        request, target.name, device_type, seed, results, budget, limit_bytes, child, forwards_per_step
    )
    recommendations = _recommend(target, [run], named_variants, limit_bytes, forwards_per_step)
    has_winner = answer(recommendations, run)
    conclude(path, outcome, run.end.invalid if run.end else ())
    if not has_winner:
        raise typer.Exit(FAILED)


def _measure(  # the options of a measurement
    request: Request,
    name: str,
    device: str,
    seed: int,
    results: Path,
    budget_s: float,
    limit_bytes: float | None,
    child: Child,
    forwards: int,
) -> tuple[Path, "RunSummary", Run]:
    """Screen the candidates if there are many, measure the best of them, store the run, and return it."""
    from esbench import store
    from esbench.measure.device_lock import lock_device
    from esbench.measure.environment import environment

    plan = plan_of(request, name, device, seed)
    answer = shlex.join(["esbench", *sys.argv[1:], "--offline"])
    hint = f"`{resume_command(results, device)}` completes it, then `{answer}` answers"
    with lock_device(device, name, note):
        here = environment(device)
        end_s = child.announcement.end_s or time.monotonic() + budget_s
        child.announce(end_s=end_s, limit_s=plan.limit_s)
        unfinished = child.unfinished()
        if unfinished:
            request = unfinished.run.header.request or request
        else:
            note_load(here)
            if len(request.variants) > KEPT:
                screened = _screen(
                    plan, here, SHARE * (end_s - time.monotonic()), limit_bytes, child, forwards
                )
                names, notes = choose(screened, end_s - time.monotonic())
                for text in notes:
                    note(text)
                if not names:
                    raise UserError(
                        f"no variant could be screened within the budget of {budget_s:g} s: give a longer "
                        "--budget or fewer --variants, or stop other programs"
                    )
                request = msgspec.structs.replace(request, variants=tuple(names))
        plan = plan_of(request, name, device, seed)
        if not unfinished:
            cases = "; ".join(case.label for case in plan.cases)
            note(f"measuring {len(plan.entries)} variants on {device} ({here.device_name}): {cases}")
        plan = replace(plan, end_s=end_s)
        path, outcome = measure(plan, name, request, here, unfinished, results, child, hint)
    run, problems = store.read_run(path)
    print_problems(problems)
    if run is None:
        raise UserError(f"{path} was written but cannot be read, for the reasons above: run again")
    return path, outcome, run


def _screen(
    plan: "Plan", here: Environment, budget_s: float, limit_bytes: float | None, child: Child, forwards: int
) -> dict[Case, list[Screened]]:
    """Measure all candidates for a moment at a small population."""
    from esbench.measure.instruments import instruments
    from esbench.progress import showing

    cases = "; ".join(small_case(case).label for case in plan.cases)
    note(f"screening {len(plan.entries)} variants on {plan.device} ({here.device_name}): {cases}")
    plan = replace(plan, end_s=time.monotonic() + budget_s)
    with printing_to_stderr(), instruments(plan.device) as tools, showing(end_s=plan.end_s) as progress:
        return screen(plan, here, progress, tools, limit_bytes, child.watch, forwards)


def _answer_offline(
    target: Target,
    device_type: str,
    results: Path,
    variants: Collection[Variant] | None,
    limit_bytes: float | None,
    forwards: int,
) -> "dict[Case, Recommendation]":
    """Recommend from the stored runs of this device, else of another CPU or GPU.

    Raises:
        UserError: no run ranks a case.
    """
    from esbench import store
    from esbench.measure.environment import environment
    from esbench.report.analysis.ranking import nearest
    from esbench.report.analysis.rollout import with_forwards_per_step
    from esbench.report.captions import layer_and_members

    here = environment(device_type)
    stored, problems = store.read_results(results) if results.is_dir() else ([], [])
    print_problems(problem for problem in problems if problem.path.parent.name == here.slug)
    runs = [run for run in stored if run.header.environment.slug == here.slug]
    remedy = f"leave --offline out to measure {'; '.join(layer_and_members(case) for case in target.cases)}"
    warning = ""
    if not runs:
        missing = f"no stored run of this device ({here.device_name}) in {short_path(results)}"
        same_kind = [run for run in stored if run.header.environment.device == device_type]
        if not same_kind:
            raise UserError(f"{missing}: {remedy}")
        other_device = max(same_kind, key=lambda run: run.header.run_id).header.environment
        runs = [run for run in same_kind if run.header.environment.slug == other_device.slug]
        warning = f"{missing}:\n  this is the answer for {other_device.device_name}; {remedy}"
    recommendations = _recommend(target, runs, variants, limit_bytes, forwards)
    for case in target.cases:
        if case not in recommendations:
            of_variants = f" for {first_names([variant.name for variant in variants])}" if variants else ""
            rollout = f" with {forwards} forwards per step" if forwards > 1 else ""
            ranked = nearest((with_forwards_per_step(run, forwards) for run in runs), case)
            hint = f"; nearest is {layer_and_members(ranked)}" if ranked else ""
            raise UserError(
                f"no stored run ranks {layer_and_members(case)}{rollout}{of_variants}; "
                f"leave --offline out to measure it{hint}"
            )
    if warning:
        note(warning)
    return recommendations


def _recommend(
    target: Target,
    runs: Sequence[Run],
    variants: Collection[Variant] | None,
    limit_bytes: float | None,
    forwards: int,
) -> "dict[Case, Recommendation]":
    """Rank the variants on each case of a target, by the run that measured the case best.

    Args:
        target: the layers; those of a model are ranked by n_eff of the whole model.
        runs: runs of one device.
        variants: the candidates, by default all.
        limit_bytes: the limit for the noise, and for the peak memory.
        forwards: forwards of a step.

    Returns:
        The ranking of each case that some run ranks.
    """
    from esbench.report.analysis.quality import ALONE, Part
    from esbench.report.analysis.ranking import recommend
    from esbench.report.analysis.rollout import with_forwards_per_step

    runs = [with_forwards_per_step(run, forwards) for run in runs]
    recommendations = {}
    for case in target.cases:
        part = Part(*target.parts[case]) if case in target.parts else ALONE
        recommendation = recommend(runs, case, variants=variants, limit_bytes=limit_bytes, part=part)
        if recommendation:
            recommendations[case] = recommendation
    return recommendations


def _answer(
    target: Target,
    results: Path,
    recommendations: "dict[Case, Recommendation]",
    run: Run | None = None,
    *,
    tables: bool,
    as_json: bool,
    forwards: int,
) -> bool:
    """Print the recommended variant of each case, the code that applies them, and their figures.

    Returns whether anything is recommended. ``run`` has the reasons if a case has no ranking; ``results`` the
    studies of training.
    """
    winners = {
        name: recommendations[case].recommended[0]
        for name, case in target.layers.items()
        if case in recommendations and recommendations[case].recommended
    }
    code = _code(target, winners) if winners else ""
    if as_json:
        from esbench.report.formats.json import recommendation_document

        typer.echo(recommendation_document(target.layers, recommendations, code, forwards, run))
        return bool(winners)
    for text in _texts(target, results, recommendations, code, run):
        typer.echo(printable(text))
    if tables:
        from esbench.report.tables.recommendation import details

        for recommendation in recommendations.values():
            typer.echo(printable(f"\n{details(recommendation)}"))
    if forwards > 1:
        typer.echo(fill(combined_note(forwards), indent=""))
    return bool(winners)


def _texts(
    target: Target, results: Path, recommendations: "dict[Case, Recommendation]", code: str, run: Run | None
) -> Iterator[str]:
    """Yield the answer for each case, the code, reasons, and figures."""
    from esbench.report.captions import layer_and_members
    from esbench.report.tables.recommendation import answer, figures, reasons_without_rate
    from esbench.studies.digits import trained_with

    unexplained = {*target.cases} if run else set()
    for case, recommendation in recommendations.items():
        names = [name for name, layer_case in target.layers.items() if layer_case == case and name]
        if recommendation.ranked or case in recommendation.ranking.unreliable or not run:
            unexplained.discard(case)
            yield answer(recommendation, names)
    if code:
        yield code
    for case in target.cases:
        if run and case in unexplained:
            yield f"{layer_and_members(case)}: {reasons_without_rate(run, case)}"
    if recommendations:
        yield f"\n{figures(recommendations.values(), partial(trained_with, results))}"


def _code(target: Target, winners: "Mapping[str, RankedVariant]") -> str:
    """Return code that trains with the recommended variant of each layer."""
    from esbench.report.tables.recommendation import training_code

    known = REGISTRY.entries.values()
    docs = scheme_docs(known)
    modules = {entry.variant: docs[entry.variant.scheme].module for entry in known}
    from_rows = []
    for entry in known:
        scheme_trainer = trainer(entry.scheme)
        if scheme_trainer and scheme_trainer.learns_from_rows(entry.scheme):
            from_rows.append(entry.variant)
    return training_code(winners, modules, exclude=target.excluded, from_rows=from_rows)


def target_of(
    linear: str | None,
    conv: str | None,
    model: str | None,
    template: Case,
    *,
    dtype: str | None,
    entries: Sequence[Entry],
) -> Target:
    """Return the layers that the option --linear, --conv or --model names.

    ``template`` has members, repeats and sigma. Without a ``dtype`` each layer of a model keeps its own.

    Raises:
        UserError: not exactly one of the three is present, it is malformed, or none of the candidates
            ``entries`` can perturb the model.
    """
    if sum(option is not None for option in (linear, conv, model)) != 1:
        raise UserError(
            "recommend needs one of --linear, --conv and --model, such as --linear 1024x1024; see --help"
        )
    if linear is not None:
        return Target(f"recommend {linear}", {"": linear_case(linear, template)})
    if conv is not None:
        return Target(f"recommend {conv}", {"": conv2d_case(conv, template)})
    from esbench.measure.model_layers import layers, load_model

    name = str(model)
    made, rows = load_model(name)
    try:
        model_layers = layers(made, rows, template, dtype=dtype)
    except UserError as error:
        raise UserError(f"--model {name}: {error}") from error
    _check(name, made, model_layers, entries)
    for left_out in model_layers.others:
        note(f"{left_out.name}: {left_out.reason}")
    return Target(
        f"recommend {name}",
        {layer.name: layer.case for layer in model_layers.chosen},
        _excluded(model_layers),
        {layer.case: (layer.size, model_layers.size) for layer in model_layers.chosen},
    )


def _excluded(model_layers: "Layers") -> tuple[str, ...]:
    return tuple(left_out.name for left_out in model_layers.others if left_out.excluded)


def _check(name: str, model: object, model_layers: "Layers", entries: Sequence[Entry]) -> None:
    """Check that a model can be perturbed.

    Raises:
        UserError: a layer has an unsupported dtype, or every candidate refuses the model.
    """
    for layer in model_layers.chosen:
        if layer.case.dtype not in DTYPES:
            raise UserError(
                f"--model {name}: {layer.name} is {layer.case.dtype}; esbench measures {', '.join(DTYPES)}"
            )
    fitting = [entry for entry in entries if any(entry.supports(layer.case) for layer in model_layers.chosen)]
    refusals = Counter[str]()
    for entry in fitting:
        scheme_trainer = trainer(entry.scheme)
        if scheme_trainer and (
            reason := scheme_trainer.refusal(entry.scheme, model, _excluded(model_layers))
        ):
            refusals[reason] += 1
    if refusals and refusals.total() == len(fitting):
        # The most common reason: some schemes have another one, such as a kernel that needs a GPU.
        reason, _ = refusals.most_common(1)[0]
        raise UserError(
            f"--model {name}: {reason}; to leave a layer out, call requires_grad_(False) in the factory"
        )


def template_case(
    members: int, repeats: int, dtype: str | None, sigma: float, *, antithetic: bool = False
) -> Case:
    """Return a case with the given fields, whose operator and shape are filled in later.

    Raises:
        UserError: the dtype is unknown, sigma is not a positive number, or the repeats are odd with
            antithetic sampling.
    """
    if antithetic and repeats % 2:
        raise UserError(f"--antithetic needs an even number of --repeats, such as 2, got {repeats}")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"no dtype {dtype!r}; available: {', '.join(DTYPES)}")
    if not (math.isfinite(sigma) and sigma > 0):
        raise UserError(f"--sigma {sigma:g}: expected a finite number above 0")
    return Case(
        operator="",
        out_channels=1,
        in_channels=1,
        members=members,
        repeats=repeats,
        dtype=dtype or "float32",
        sigma=sigma,
        antithetic=antithetic,
    )


def linear_case(text: str, like: Case) -> Case:
    """Parse ``1024x512``: a Linear layer with 1024 outputs and 512 inputs; other texts raise a UserError."""
    out, inp = _numbers("linear", text, _LINEAR, "OUTxIN, such as 1024x1024")
    return msgspec.structs.replace(like, operator="Linear", out_channels=out, in_channels=inp)


def conv2d_case(text: str, like: Case) -> Case:
    """Parse ``64x32x3@28x28``: a Conv2d layer with 64 outputs, 32 inputs and a kernel of 3 on 28 x 28 inputs.

    A kernel that is not square has two numbers: ``64x32x3x5@28x28``. There is no padding.

    Raises:
        UserError: the text is malformed, or the kernel is larger than the input.
    """
    expected = "OUTxINxKERNEL@HEIGHTxWIDTH, such as 64x64x3@32x32"
    out, inp, *kernel, height, width = _numbers("conv", text, _CONV, expected)
    kernel_height, kernel_width = kernel[0], kernel[-1]
    if kernel_height > height or kernel_width > width:
        raise UserError(
            f"--conv {text}: a kernel of {kernel_height} x {kernel_width} is larger than an input of "
            f"{height} x {width}"
        )
    return msgspec.structs.replace(
        like,
        operator="Conv2d",
        out_channels=out,
        in_channels=inp,
        kernel_size=(kernel_height, kernel_width),
        input_size=(height, width),
    )


def size_bytes(text: str) -> float:
    """Parse ``2GB``, ``500 MB`` or ``1.5G``; a UserError for other texts, and for 0."""
    match = _BYTES.fullmatch(text.strip())
    size = float(match[1]) * _PREFIXES[match[2]] if match else 0.0
    if not 0 < size < math.inf:
        raise UserError(f"--memory-limit {text}: expected a size above 0, such as 2GB or 500MB")
    return size


def _numbers(option: str, text: str, pattern: re.Pattern[str], expected: str) -> list[int]:
    """Return the numbers in the value of an option; ``expected`` describes its form in the error message."""
    match = pattern.fullmatch(text.strip().lower())
    numbers = [int(number) for number in match.groups() if number is not None] if match else []
    if not numbers or not all(1 <= number <= _LARGEST for number in numbers):
        raise UserError(f"--{option} {text}: expected {expected}, each from 1 to {_LARGEST}")
    return numbers
