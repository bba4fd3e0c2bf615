"""The nightly form of the gate: multipliers that are measured now beside those of a stored run."""

from pathlib import Path

import typer
from msgspec.structs import replace

from esbench import store
from esbench.cli.options import INVALID, note, say
from esbench.cli.run import measure, plan_of
from esbench.errors import UserError
from esbench.schema import Request


def against(path: Path, device: str, out: Path, *, wait: bool) -> None:
    """Measure what a stored run measured, store it too, and show which multipliers moved: amber, never red.

    Raises:
        UserError: the stored run is another device's or method's, or cannot be read.

    """
    from esbench.measure.device_lock import holding
    from esbench.measure.environment import device_uuid, environment, resolve_device
    from esbench.measure.timers import check_methods
    from esbench.report import nightly

    stored, problems = store.read_run(path)
    say(problems)
    if stored is None:
        message = f"{path}: no run; --against takes the file of one, results/<device>/<run>.jsonl"
        raise UserError(message)
    if lost := [problem for problem in problems if problem.lost]:
        message = f"run {stored.header.run_id} cannot be compared with: it could not be read whole: {lost[0]}"
        raise UserError(message)
    nightly.hold_to_place(path, stored)
    request = stored.header.request or Request()
    place = resolve_device(device)
    methods = sorted({row.method for row in stored.measurements if row.metric == "latency_ns"})
    check_methods(place, methods)
    plan = plan_of(request, stored.header.suite, place, stored.header.seed)
    with holding(device_uuid(place) or place, "gate --against", note, wait_s=None if wait else 0):
        here = environment(place)
        nightly.hold_to_stored(stored, replace(stored.header, environment=here))
        fresh_path, _ = measure(plan, stored.header.suite, request, here, None, out)
    fresh, problems = store.read_run(fresh_path)
    say(problems)
    if fresh is None or (fresh.end and fresh.end.invalid):
        reasons = "; ".join(fresh.end.invalid) if fresh and fresh.end else "it could not be read back"
        note(f"INVALID: {reasons}")
        raise typer.Exit(INVALID)
    typer.echo(nightly.text(nightly.night(stored, fresh)), nl=False)
