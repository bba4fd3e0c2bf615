"""The command ``run``: measure a suite and store the run."""

import json
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from esbench import store
from esbench.cli.options import (
    FAILED,
    INVALID,
    Forwards,
    Plugins,
    Seed,
    Variants,
    app,
    check_writable,
    combined_note,
    load_entries,
    note,
    print_problems,
    printing_to_stderr,
    seconds_option,
)
from esbench.errors import UserError
from esbench.registry import (
    DTYPES,
    REGISTRY,
    candidates,
    cases_of,
    entries_of_suite,
    load,
    parse_phases,
    split_names,
    suite_of_shapes,
    with_references,
)
from esbench.schema import PHASES, Environment, Request
from esbench.stats import BUSY
from esbench.store import Unfinished
from esbench.supervisor import TABLES, Child, supervise
from esbench.text import pluralize, short_path
from esbench.workload import WrongResultError

if TYPE_CHECKING:
    from esbench.measure.plan import Plan
    from esbench.measure.recorder import RunSummary
    from esbench.measure.validation import TorchState

CLOSING, CLOSING_MOST = 0.02, 0.1
"""Shares of a time budget that are reserved for the tables: the least, and the most for a slow start."""
RESULTS = Path("results")
CHOICES = ("suite", "variants", "cases", "phases", "methods", "dtype", "seed", "plugin")
"""Options that --resume reads from the header of the run."""


@app.command()
def run(
    context: typer.Context,
    suite: Annotated[
        str | None, typer.Option(help="Suite to measure; by default readme on a GPU and quick on a CPU.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    variants: Variants = None,
    cases: Annotated[
        str, typer.Option(help="Glob over case labels, such as 'Linear*'.", metavar="GLOB")
    ] = "*",
    phases: Annotated[
        str, typer.Option(help="Comma-separated: sample, forward, update, step, quality.")
    ] = "",
    methods: Annotated[
        str, typer.Option(help="Timing methods; by default eager,graph on a GPU and host on a CPU.")
    ] = "",
    dtype: Annotated[str | None, typer.Option(help=f"Override the dtype: {', '.join(DTYPES)}.")] = None,
    seed: Seed = 0,
    results: Annotated[Path, typer.Option(help="Folder to store the run in.")] = RESULTS,
    plugin: Plugins = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the newest unfinished run on this device.")
    ] = False,
    wait: Annotated[
        bool, typer.Option(help="If another run uses the device, wait for it; --no-wait fails instead.")
    ] = True,
    budget: Annotated[
        float | None,
        seconds_option(
            "Time limit of this command in seconds, also with --resume: to keep it, fewer samples are "
            "taken, then the last variants are left out."
        ),
    ] = None,
    cell_limit: Annotated[
        float | None,
        seconds_option(
            "A variant that makes no progress for this many seconds is ended and gets a row with that "
            "reason; by default 60, more in suites with slow calls."
        ),
    ] = None,
    tables: Annotated[
        bool, typer.Option("--tables", help="Print all tables instead of the best variants of each shape.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print {run, path, measured, ...} instead of tables.")
    ] = False,
    forwards_per_step: Forwards = 1,
) -> None:
    """Measure a suite, store the run and print the best variants. Exit code 1 if a variant failed.

    Example: esbench run --variants 'Flipped*' --phases step,quality

    Example: esbench run --suite readme --budget 300

    Example: esbench run --resume
    """
    child = supervise(note)
    start_s = child.announcement.start_s
    from esbench.measure.device_lock import lock_device
    from esbench.measure.environment import environment, resolve_device
    from esbench.measure.timers import check_methods
    from esbench.measure.validation import TorchState

    check_writable("--results", results)
    torch_state = TorchState()  # before a plug-in is loaded
    device_type = resolve_device(device)
    if device_type == "cuda":
        child.use_all_cpus()
    name = suite or ("readme" if device_type == "cuda" else "quick")
    request = Request(
        variants=tuple(variants or ()),
        cases=cases,
        phases=phases,
        methods=methods,
        dtype=dtype,
        plugins=tuple(plugin or ()),
    )
    # An invalid request is reported before waiting for the device.
    plan = plan_of(request, name, device_type, seed)
    if forwards_per_step > 1 and not {"step", "forward"} <= set(plan.phases):
        measured = ", ".join(plan.phases)
        raise UserError(f"--forwards-per-step needs the phases step and forward, but this run has {measured}")
    check_methods(device_type, split_names(methods))
    check_unchanged(torch_state)
    waiting_since_s = time.monotonic()
    wait_s = None if wait or child.is_restarted else 0
    with lock_device(device_type, f"suite {name}", note, wait_s=wait_s):
        start_s += time.monotonic() - waiting_since_s  # waiting does not count
        here = environment(device_type)
        unfinished = child.unfinished() or (_find_unfinished(context, results, here) if resume else None)
        if unfinished:
            name, request = unfinished.run.header.suite, unfinished.run.header.request or Request()
            plan = plan_of(request, name, device_type, unfinished.run.header.seed)
        if not child.is_restarted:
            reason = "" if device_type == "cuda" or device == "cpu" else "no CUDA GPU here: "
            counts = f"{pluralize(len(plan.entries), 'variant')}, {pluralize(len(plan.cases), 'case')}"
            note(f"{reason}measuring suite {name} on {device_type} ({here.device_name}): {counts}")
            note_load(here)
        if budget is not None:
            # The tables take about as long as the start, because both import packages.
            closing_s = min(CLOSING * budget + time.monotonic() - start_s, CLOSING_MOST * budget)
            plan = replace(plan, end_s=child.announcement.end_s or start_s + budget - closing_s)
        if cell_limit is not None:
            plan = replace(plan, limit_s=cell_limit)
        hint = f"continue it with `{resume_command(results, device)}`"
        path, outcome = measure(plan, name, request, here, unfinished, results, child, hint)
    _conclude(path, outcome, as_json=as_json, tables=tables, forwards=forwards_per_step)


def measure(  # the parts of a run
    plan: "Plan",
    suite: str,
    request: Request,
    here: Environment,
    unfinished: Unfinished | None,
    results: Path,
    child: Child,
    hint: str,
) -> tuple[Path, "RunSummary"]:
    """Measure a new or an unfinished run; return its file, and what was measured.

    ``hint`` is printed if the run is interrupted and says how to continue it.

    Raises:
        UserError: the unfinished run was measured by different code or on a different machine.
    """
    from esbench.measure import runner
    from esbench.measure.environment import differences, source_hashes
    from esbench.measure.instruments import instruments
    from esbench.progress import showing

    code = source_hashes(plan.entries)
    if unfinished:
        if child.is_restarted:  # other files may change during a run: the code is compared by its hash
            at_begin = unfinished.run.header.environment
            here = msgspec.structs.replace(here, commit=at_begin.commit, dirty=at_begin.dirty)
        header = unfinished.run.header
        if changes := differences(header.environment, here, header.code, code):
            raise UserError(
                f"run {header.run_id} cannot be resumed, because these have changed: {'; '.join(changes)}; "
                "run without --resume"
            )
        opened_file = runner.resume(unfinished)
    else:
        opened_file = runner.begin(suite, here, plan.seed, results, request, code, plan.entries)
    with (
        opened_file as writer,
        printing_to_stderr(),
        instruments(plan.device, split_names(request.methods), here.idle_w) as tools,
        showing(end_s=plan.end_s, start_s=child.announcement.begun_s) as progress,
    ):
        if not child.is_restarted:
            note(f"rows are stored in {short_path(writer.path)}")
        past = unfinished.run if unfinished else None
        measured_s = past.checkpoints[-1].wall_s if past and past.checkpoints else 0.0
        child.announce(
            path=str(writer.path.absolute()),
            begun_s=child.announcement.begun_s or time.monotonic() - measured_s,
            end_s=plan.end_s if plan.end_s < math.inf else None,
            limit_s=plan.limit_s,
        )
        try:
            outcome = runner.run(
                plan,
                writer,
                progress,
                tools,
                past=past,
                begun_s=child.announcement.begun_s,
                watch=child.watch,
            )
        except KeyboardInterrupt:
            note(f"interrupted: the finished rows are in {short_path(writer.path)}\n{hint}")
            raise
    child.announce(variant=None, case=None, activity=TABLES)
    return writer.path, outcome  # the path has changed if a large file was compressed


def resume_command(results: Path, device: str) -> str:
    """Return the command that continues an interrupted run of this device in this folder."""
    on_device = () if device == "auto" else ("--device", device)
    return shlex.join(["esbench", "run", "--resume", *_in_folder(results), *on_device])


def _in_folder(results: Path) -> list[str]:
    """Return the option that names a folder of results, unless it is the default one."""
    return [] if results.resolve() == RESULTS.resolve() else ["--results", short_path(results)]


def note_load(here: Environment) -> None:
    """Print a warning if other programs use the processor."""
    if here.load is not None and here.load > BUSY * here.threads:
        threads = pluralize(here.threads, "thread")
        note(f"load {here.load:.1f} on {threads}: other programs disturb the times")


def plan_of(request: Request, suite_name: str, device: str, seed: int) -> "Plan":
    """Return the plan of a request.

    Raises:
        UnknownNameError: a name is unknown.
    """
    from esbench.measure.plan import Plan

    entries = load_entries(list(request.variants), list(request.plugins))
    packages = {load(name) for name in request.plugins}
    if request.shapes:
        suite = suite_of_shapes(suite_name, request.shapes)
        if not request.variants:
            entries = [entry for entry in entries if not entry.on_request]
        entries = candidates(entries, named=bool(request.variants))
    else:
        suite = REGISTRY.find_suite(suite_name)
        entries = with_references(entries) if request.variants else entries_of_suite(entries, suite, packages)
    cases = cases_of(suite, request.cases, request.dtype)
    phases = parse_phases(request.phases) or suite.phases
    on_gpu = device == "cuda"
    methods = suite.methods if on_gpu else {}
    if chosen_methods := split_names(request.methods):
        methods = dict.fromkeys(PHASES, chosen_methods)
    return Plan(
        entries=[entry for entry in entries if any(entry.supports(case) for case in cases)],
        cases=cases,
        phases=phases,
        cell_s=suite.cell_s,
        checks=REGISTRY.check_cases,
        device=device,
        seed=seed,
        sweep=suite.sweep,
        stop_s=suite.stop_s,
        limit_s=suite.limit_s,
        active=suite.active,
        active_variants=suite.active_variants,
        methods=methods,
        traced=[phase for phase in phases if on_gpu and phase in suite.traced] or phases,
        # The multiples of a recommendation are those of a step; the plain layer has only its forward.
        reference_phases=("forward", "step") if request.shapes else PHASES,
    )


def _find_unfinished(context: typer.Context, results: Path, here: Environment) -> Unfinished:
    """Return the newest unfinished run on this device; raise a UserError for options beside --resume."""
    # An enumeration of click, or of typer's copy of it.
    sources = {name: str(context.get_parameter_source(name)) for name in CHOICES}
    combined = [name for name, source in sources.items() if source.endswith("COMMANDLINE")]
    if combined:
        options = ", ".join(f"--{name}" for name in combined)
        raise UserError(f"--resume uses the options of the run that was cut off: leave out {options}")
    return store.read_unfinished(store.find_unfinished(results, here.slug))


def check_unchanged(torch_state: "TorchState") -> None:
    """Check that loading plugins or a model changed none of torch's global settings.

    Raises:
        UserError: a global setting was changed.
    """
    try:
        torch_state.check()
    except WrongResultError as error:
        raise UserError(f"cannot measure with the loaded variants or model: {error}") from error


def _conclude(path: Path, outcome: "RunSummary", *, as_json: bool, tables: bool, forwards: int) -> None:
    """Print the best variants of a run, all its tables, or a JSON summary."""
    read, problems = store.read_run(path)
    print_problems(problems)
    reasons = read.end.invalid if read and read.end else ()
    if as_json:
        summary = {
            "run": read.header.run_id if read else None,
            "path": str(path),
            "measured": outcome.measured,
            "unavailable": outcome.unavailable,
            "failed": outcome.failed,
            "invalid": reasons,
        }
        typer.echo(json.dumps(summary))
    elif read:
        try:
            from esbench.report.analysis.rollout import with_forwards_per_step
            from esbench.report.tables.console import run_summary, warnings

            history, _ = store.read_results(path.parent.parent)
            read, *history = (with_forwards_per_step(run, forwards) for run in (read, *history))
            shown = "" if tables else run_summary(read, history)
            if not shown:  # a second slower, because it imports the packages of plots
                from esbench.report.site import console_tables

                shown = console_tables(read, history)
        except ModuleNotFoundError as error:  # measuring needs fewer packages than reading
            note(f"no tables are printed: the package {error.name} is not installed")
        else:
            typer.echo(shown, nl=False)
            if forwards > 1:
                note(combined_note(forwards))
            for text in () if tables else warnings(read, history):
                note(text)
    report = shlex.join(["esbench", "report", *_in_folder(path.parent.parent)])
    hint = f"plots, page, all tables: `{report}`; for your layer: `esbench recommend --linear 512x512`"
    conclude(path, outcome, reasons, "" if as_json or not outcome.measured else hint)


def conclude(path: Path, outcome: "RunSummary", reasons: Sequence[str], hint: str = "") -> None:
    """Print counts, why a run is invalid, and a hint; exit with 1 if a variant failed, with 3 if invalid."""
    for text in outcome.notes:
        note(text)
    counts = f"{outcome.measured} measured, {outcome.unavailable} not applicable, {outcome.failed} failed"
    note(f"{counts}: {short_path(path)}")
    for reason in reasons:
        note(f"INVALID: {reason}")
    if hint:
        note(hint)
    if outcome.failed or reasons:
        raise typer.Exit(FAILED if outcome.failed else INVALID)
