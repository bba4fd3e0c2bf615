"""The page on fused kernels: what they compile to, and how near they come to their floors and goals."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from esbench.report import captions
from esbench.report.analysis import roofline
from esbench.report.analysis.pivot import LATENCY, TIMES, Grid, grids, headings, operators
from esbench.report.analysis.run_selection import newest_whole
from esbench.report.formats import Style, write_document
from esbench.report.kernel_goals import GOALS, KernelGoal, verdict
from esbench.report.passages import Document, table
from esbench.report.text import escape
from esbench.schema import Case, Measurement, Run, Skipped, Variant
from esbench.stats import median
from esbench.store import read_results
from esbench.studies.compiled_kernels import Compilation, Compilations, read_compilations
from esbench.units import ABSENT, format_cell, format_multiplier, format_number

PAGE = "kernels"
SUITES = ("kernels", "unstored")
"""The suites whose runs are shown, in this order."""
FUSED = "Fused"
"""What the names of fused variants begin with; the rest is the scheme that they accelerate."""
METHODS = ("graph", "eager", "host")
"""The method that is shown: the first of these by which anything was timed."""
NO_RUN = "not measured: no GPU run yet"

THREADS = 32
"""Of a warp."""
REGISTERS, WARPS = 65536, 64
"""Of a processor of any GPU from 8.0 on; those of less than data centres have fewer warps."""
SHARED = {80: 164 * 1024, 90: 228 * 1024}
"""Bytes of a processor, by capability."""
RESERVED = 1024
"""Bytes of shared memory that each program takes beside its own."""

_COMMIT_DIGITS = 7
_INTRODUCTION = (
    "Kernels that compute the forward or the update of a scheme at once, and what is known of them. To see "
    "what they compile to takes no GPU: `nox -s kernels` compiles each for GPUs that need not be there. "
    f"Times are of runs of the suites {' and '.join(f'`{one}`' for one in SUITES)} "
    f"(`esbench run --suite {SUITES[0]}` on a GPU). A goal that is missed is shown as missed: nothing here "
    "is a gate. Tiles are those that somebody tuned on the GPU, where there is a table of them in "
    "`impls/kernels/tuned`, and defaults that nobody has timed elsewhere. Two goals are of other tables: "
    "that noise which is drawn in kernels takes 1 % more memory than the layer alone, and that the best "
    "scheme has 150 times as many effective members per millisecond as stored dense noise."
)


def render_kernels(
    results: Path, out: Path, measured: Iterable[Run] | None = None, style: Style | None = None
) -> list[Path]:
    """Write ``<out>/kernels.md``, or the page in another format, from what was compiled and measured.

    Nothing where nobody has compiled or measured a kernel. The same results give the same bytes. ``measured``
    are the runs under ``results``, where they have been read already.

    Raises:
        UserError: what was compiled cannot be read.

    """
    compilations = read_compilations(results)
    if measured is None:
        measured = read_results(results)[0] if results.is_dir() else []
    runs = newest_runs(measured)
    if not (compilations or runs):
        return []
    return [write_document(out / PAGE, kernels_page(compilations, runs), style or Style())]


def newest_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the run of each device and suite to show, by the devices' folders."""
    rivals: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        if run.header.suite in SUITES and run.rows:
            key = run.header.environment.slug, SUITES.index(run.header.suite)
            rivals.setdefault(key, []).append(run)
    return [newest_whole(found)[0] for _, found in sorted(rivals.items())]


def kernels_page(compilations: Compilations | None, runs: Sequence[Run]) -> Document:
    """Return the page: times and goals first, then what kernels compile to."""
    parts = ["# Fused kernels", _INTRODUCTION]
    for _, found in itertools.groupby(runs, lambda run: run.header.environment.slug):
        parts += _measured(list(found))
    if not any(run.header.environment.device == "cuda" for run in runs):
        rows = [(one.variant, one.phase, one.case, one.words, NO_RUN) for one in GOALS]
        parts += ["## Goals", table(("variant", "phase", "case", "goal", "found"), rows)]
    if compilations:
        parts += _compiled(compilations)
    return Document(parts)


def _measured(runs: Sequence[Run]) -> list[str]:
    """A device's runs: a table for each operator and phase, and the goals that have no row in any."""
    environment = runs[0].header.environment
    parts = [f"## {escape(environment.device_name)}"]
    shown: set[KernelGoal] = set()
    on_gpu = environment.device == "cuda"
    for run in runs:
        parts.append(escape(captions.origin(run)))
        for grid in _timed(run):
            rows = [
                _row(grid, variant, case, _goal(variant, grid, case) if on_gpu else None)
                for variant in grid.variants
                if variant.scheme.startswith(FUSED)
                for case in grid.cases
                if grid.at(variant, case)
            ]
            shown |= {goal for v in grid.variants for c in grid.cases if (goal := _goal(v, grid, c))}
            if rows:
                title = f"### {grid.operator}, {grid.phase}: {grid.dtype}, method {grid.method}"
                parts += [escape(title).replace(r"\#", "#"), table(_HEADER, rows)]
    if on_gpu:
        rest = [goal for goal in GOALS if goal not in shown]
        without = [(one.variant, one.phase, one.case, one.words, "no row in any run") for one in rest]
        if without:
            parts += [
                "### Goals without a row",
                table(("variant", "phase", "case", "goal", "found"), without),
            ]
    return parts


_HEADER = (
    "variant",
    "case",
    "time (ms)",
    "x base",
    "± (%)",
    "floor (ms)",
    "of the floor (%)",
    "eager, x base",
    "compiled, x base",
    "goal",
    "above the goal (%)",
    "verdict",
)


def _timed(run: Run) -> Iterator[Grid]:
    """The grids of times of each operator, number format and phase by the method that is shown."""
    for operator in operators(run):
        found: dict[tuple[object, ...], list[Grid]] = {}
        for grid in grids(run, operator, TIMES):
            if grid.metric == LATENCY:
                found.setdefault((grid.dtype, grid.antithetic, grid.phase), []).append(grid)
        for rivals in found.values():
            yield min(rivals, key=_place)


def _place(grid: Grid) -> tuple[bool, int]:
    place = METHODS.index(grid.method) if grid.method in METHODS else len(METHODS)
    return not grid.cells, place


def _goal(variant: Variant, grid: Grid, case: Case) -> KernelGoal | None:
    key = (variant.name, case.label, grid.phase)
    return next((goal for goal in GOALS if (goal.variant, goal.case, goal.phase) == key), None)


def _row(grid: Grid, variant: Variant, case: Case, goal: KernelGoal | None) -> tuple[object, ...]:
    """One variant on one case: what was found, or why nothing was, and what it is held to."""
    row = grid.at(variant, case)
    eager = Variant(scheme=variant.scheme.removeprefix(FUSED), options=variant.options)
    compiled = Variant(scheme="Compiled", options=(("of", eager.name),))
    ratio = grid.multiplier(variant, case, "base")
    measured = row if isinstance(row, Measurement) else None
    ns = median(measured) if measured else None
    floor = roofline.bound_ns(grid.run, case.dtype, measured.work) if measured else None
    excess = goal.excess(ns, ratio.value if ratio else None) if goal else None
    return (
        variant.label(grid.operator),
        headings(grid.cases)[grid.cases.index(case)],
        f"{row.status}: {row.reason}" if isinstance(row, Skipped) else format_cell(LATENCY, ns),
        format_multiplier(ratio.value) if ratio else ABSENT,
        format_number(100 * ratio.relative) if ratio and ratio.relative is not None else ABSENT,
        format_cell(LATENCY, floor),
        format_number(100 * floor / ns) if floor and ns else ABSENT,
        _beside(grid, eager, case),
        _beside(grid, compiled, case),
        goal.words if goal else "",
        "" if excess is None else format_number(100 * excess),
        verdict(excess) if goal else "",
    )


def _beside(grid: Grid, variant: Variant, case: Case) -> str:
    ratio = grid.multiplier(variant, case, "base")
    return format_multiplier(ratio.value) if ratio else ABSENT


def _compiled(compilations: Compilations) -> list[str]:
    """What kernels compile to, a table for each capability, and what does not compile."""
    commit = compilations.commit
    which = f"commit {commit[:_COMMIT_DIGITS]}" if commit else "commit unknown"
    which += " with uncommitted changes" if compilations.dirty else ""
    parts = [
        "## What they compile to",
        escape(f"Compiled by triton {compilations.triton} at {which}.")
        + " Registers are of a thread, shared memory of a program, and `programs` how many of it a processor "
        "has room for at once. Instructions are counted where they stand in the assembly (PTX): what a loop "
        "holds counts once, however often it runs.",
    ]
    for capability in dict.fromkeys(one.capability for one in compilations.found):
        found = [one for one in compilations.found if one.capability == capability]
        kinds = [
            kind
            for kind in dict.fromkeys(kind for one in found for kind in one.instructions)
            if any(one.instructions.get(kind) for one in found)
        ]
        header = ("kernel", "warps", "stages", "registers", "shared (B)", "spilled (B)", "programs", *kinds)
        rows = [
            (
                one.title,
                one.warps,
                one.stages,
                one.registers,
                one.shared_bytes,
                one.spilled_bytes,
                _resident(one),
                *(one.instructions.get(kind, 0) for kind in kinds),
            )
            for one in found
        ]
        parts += [f"### Capability {capability / 10:.1f}", table(header, rows)]
    refused = [
        f"- {escape(f'{one.title}, {one.capability / 10:.1f}: {one.reason}')}" for one in compilations.refused
    ]
    return [*parts, *(["\n".join(["Not compiled:", "", *refused])] if refused else [])]


def _resident(one: Compilation) -> str:
    """How many programs a processor has room for: by registers, shared memory and warps, the least."""
    if one.capability not in SHARED:
        return ABSENT
    registers = -(-one.registers // 8) * 8 * THREADS * one.warps  # in steps of eight for each thread
    by_shared = SHARED[one.capability] // (one.shared_bytes + RESERVED)
    return str(min(REGISTERS // registers, by_shared, WARPS // one.warps))
