"""The command ``profile``: print the kernels of a call and write a trace."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from esbench.cli.options import FAILED, Plugins, Seed, app, check_writable, load_entries, note
from esbench.errors import UserError
from esbench.registry import DTYPES, REGISTRY, Entry, cases_of, parse_phases
from esbench.schema import PHASES, QUALITY, Case, Phase
from esbench.workload import UnavailableError, build

if TYPE_CHECKING:
    from esbench.measure.failure import Failure
    from esbench.measure.profiler import Profile
    from esbench.measure.validation import ExactChecks


class Cell(NamedTuple):
    """A call to be profiled."""

    entry: Entry
    case: Case
    phase: Phase
    device: str

    @property
    def title(self) -> str:
        """The heading of the table."""
        label = self.entry.variant.label(self.case.operator)
        return f"{label}, {self.case.label}, {self.phase} on {self.device}"

    def path(self, folder: Path) -> Path:
        """Return the file of the trace."""
        stem = re.sub(r"[^\w.=]+", "-", self.title).strip("-")
        return folder / f"{stem}.json"


@app.command()
def profile(
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variants", help="Glob over names or labels of variants; repeatable, required.", metavar="GLOB"
        ),
    ] = None,
    cases: Annotated[
        str, typer.Option(help="Glob over case labels, such as 'Linear*'.", metavar="GLOB")
    ] = "*",
    suite: Annotated[
        str | None, typer.Option(help="Suite of the cases; by default readme on a GPU and quick on a CPU.")
    ] = None,
    phases: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PHASES)}.")] = "forward",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help=f"Override the dtype: {', '.join(DTYPES)}.")] = None,
    seed: Seed = 0,
    plugin: Plugins = None,
    out: Annotated[Path, typer.Option(help="Folder for traces.")] = Path("profiles"),
) -> None:
    """Show which kernels or operators a call runs.

    On a CPU these are operators. Also writes a trace for ui.perfetto.dev.

    Example: esbench profile --variants 'Permuted*' --phases update
    """
    from esbench.measure.device_lock import lock_device
    from esbench.measure.environment import resolve_device
    from esbench.measure.failure import Failure
    from esbench.measure.validation import ExactChecks
    from esbench.progress import showing

    if not variants:
        raise UserError("name a variant, such as --variants Permuted; `esbench list` shows all of them")
    chosen = parse_phases(phases)
    if QUALITY in chosen:
        raise UserError(f"--phases {QUALITY}: only these phases can be profiled: {', '.join(PHASES)}")
    check_writable("--out", out)
    device_type = resolve_device(device)
    entries = load_entries(variants, plugin)
    named = REGISTRY.find_suite(suite or ("readme" if device_type == "cuda" else "quick"))
    chosen_cases = cases_of(named, cases, dtype)
    cells = [
        Cell(entry, case, phase, device_type)
        for case in chosen_cases
        for entry in entries
        if entry.supports(case)
        for phase in chosen
    ]
    if not cells:
        names = ", ".join(entry.variant.name for entry in entries)
        labels = "; ".join(case.label for case in chosen_cases)
        raise UserError(
            f"nothing to profile: none of the variants {names} supports any of the cases {labels}"
        )
    checks = ExactChecks(REGISTRY.check_cases, device_type, seed)
    texts, failed = [], 0
    with lock_device(device_type, "profile", note), showing() as progress:
        for number, cell in enumerate(cells):
            progress(number, len(cells), cell.title)
            profiled = _examine(cell, checks, seed, out)
            if isinstance(profiled, Failure):
                failed += profiled.status == "failed"
                texts.append(f"{cell.title}: {profiled.status}: {profiled.reason}")
            else:
                texts.append(_report(cell, profiled, out))
    typer.echo("\n\n".join(texts))
    if failed:
        note(f"{failed} of {len(cells)} failed")
        raise typer.Exit(FAILED)


def _examine(cell: Cell, checks: "ExactChecks", seed: int, out: Path) -> "Profile | Failure":
    """Profile a call if its variant passes its check; return the profile, or the failure."""
    from contextlib import nullcontext

    from esbench.measure import memory
    from esbench.measure.case_runner import free_memory
    from esbench.measure.failure import classify
    from esbench.measure.float32_precision import precision

    try:
        with memory.limit_memory() if cell.device == "cpu" else nullcontext(), precision(cell.case.dtype):
            return checks.failure(cell.entry, cell.case.operator) or _profile(cell, seed, out)
    except OSError:  # of writing the trace
        raise
    except BaseException as error:  # noqa: BLE001  # any error of a variant is reported
        return classify(error)
    finally:
        free_memory()


def _profile(cell: Cell, seed: int, out: Path) -> "Profile":
    """Set a variant up, verify it and profile the call of the cell's phase.

    Raises:
        UnavailableError: the variant has no such phase.
    """
    from esbench.measure import profiler
    from esbench.measure.case_runner import missing_phases

    workload = build(cell.entry.scheme, cell.case, cell.device, seed)
    workload.verify()
    if reason := missing_phases(workload).get(cell.phase):
        raise UnavailableError(reason)
    workload.enter(cell.phase)
    call = workload.phases[cell.phase]
    call()  # allocates what is allocated once, such as gradients
    return profiler.profile(call, cell.device, cell.path(out))


def _report(cell: Cell, profiled: "Profile", out: Path) -> str:
    launched = "kernels, copies and fills" if cell.device == "cuda" else "operators"
    lines = [cell.title, profiled.table, f"launches per call: {profiled.trace.launches} {launched}"]
    if profiled.trace.waits:
        lines.append(f"the host synchronizes with the device in: {', '.join(profiled.trace.waits)}")
    if profiled.trace.other_streams:
        lines.append(f"work on other streams: {', '.join(map(str, profiled.trace.other_streams))}")
    lines.append(f"trace, for ui.perfetto.dev: {cell.path(out)}")
    return "\n".join(lines)
