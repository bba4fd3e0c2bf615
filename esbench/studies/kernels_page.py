"""The page ``reports/kernels.md``: times of fused kernels, their goals, and what they compile to."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from esbench.report import captions
from esbench.report.analysis.pivot import LATENCY, TIMES, Grid, grids, headings, operators
from esbench.report.analysis.roofline import bound_ns
from esbench.report.analysis.run_selection import newest_whole
from esbench.report.formats import write
from esbench.report.formats.markdown import NOT_MET, join, table
from esbench.report.text import escape
from esbench.schema import Case, Measurement, Phase, Run, Skipped, Variant
from esbench.stats import median
from esbench.studies.compiled_kernels import Compilation, Compilations, read_compilations
from esbench.units import ABSENT, format_cell, format_multiplier, format_number, format_value

PAGE = "kernels.md"
SUITES = ("kernels", "unstored")
"""The suites whose runs are shown, in this order."""
FUSED = "Fused"
"""The prefix of a fused variant's name; the rest is the scheme that it computes."""
METHODS = ("graph", "eager", "host")
"""Only the first of these methods that was measured is shown."""
NO_RUN = "not measured: no GPU run yet"

_COMMIT_DIGITS = 7
_INTRODUCTION = (
    "Kernels that compute the forward or the update of a scheme in one launch. Times come from the "
    f"newest runs of the suites {' and '.join(f'`{one}`' for one in SUITES)} (`esbench run --suite "
    f"{SUITES[0]}` on a GPU). Goals are for an H200 in bfloat16 with CUDA graphs; a missed goal is "
    "reported and fails nothing. Tile sizes come from `impls/kernels/tuned` if the GPU is listed there, "
    "and are defaults otherwise. `nox -s kernels` compiles every kernel for GPUs that need not be "
    "present."
)


# Goals


SQUARE = "Linear(1024, 1024) members=8192 dtype=bfloat16"
WIDE = "Linear(8192, 8192) dtype=bfloat16"
LARGEST = "Linear(1024, 1024) members=1048576 dtype=bfloat16"
"""A case whose dense noise would take 2 TB."""
BITS = "BinarizedLinear(1024, 1024)"


@dataclass(frozen=True)
class KernelGoal:
    """The largest time of a variant on a case, in ns or as a multiple of base.

    Attributes:
        variant: its name.
        case: the label of the case.
        phase: the phase that is timed, of the variant and of base.
        most: the largest time(variant) / time(base).
        most_ns: the largest time, if ``most`` is not given.

    """

    variant: str
    case: str
    phase: Phase = "forward"
    most: float | None = None
    most_ns: float | None = None

    @property
    def text(self) -> str:
        """The goal as a cell of a table."""
        limit = format_multiplier(self.most) if self.most else format_value("most_ns", self.most_ns)
        return f"{limit} at most"

    def excess(self, ns: float | None, multiplier: float | None) -> float | None:
        """How far a measurement is above the goal, as a share of it; negative if met, None if unknown."""
        found, limit = (multiplier, self.most) if self.most else (ns, self.most_ns)
        return found / limit - 1 if found is not None and limit else None


FORWARD = {
    1.15: (
        "FusedHadamard",
        "FusedLowRank(rank=1, regenerated=True)",
        "FusedLowRankSign(regenerated=True)",
        "FusedSparsePerturbed(k=2)",
    ),
    1.10: ("FusedLowRank(rank=1)", "FusedLowRankSign", "FusedSparsePerturbed(k=1)"),
    2.10: ("FusedFlipped(side=both)", "FusedFlippedSign", "FusedPermuted"),
    1.20: ("FusedPermuted(in_sparsity=0.1)",),
    1.03: ("FusedDropoutMask",),
    0.65: ("FusedDropoutBlocks",),
    0.40: ("FusedDropoutBlocks(side=both, groups=8)",),
}
"""Largest multiple of base -> variants whose forward has this goal."""

INFERENCE = {
    0.97: ("FusedLowRank(rank=1)", "FusedLowRankSign"),
    0.95: ("FusedLowRank(rank=1, regenerated=True)", "FusedLowRankSign(regenerated=True)"),
}
"""Smallest share of the speed of plain inference, at width 8192 -> variants that have this goal."""

BINARY: dict[Phase, float] = {"forward": 39e3, "sample": 220e3, "update": 90e3}
"""Phase -> largest time in ns of a network of bits."""

UPDATE = 1.25
"""Largest multiple of base of an update that is a matrix product."""


def _goals() -> Iterator[KernelGoal]:
    for most, variants in FORWARD.items():
        yield from (KernelGoal(variant, SQUARE, most=most) for variant in variants)
    for most, variants in INFERENCE.items():
        yield from (KernelGoal(variant, WIDE, most=1 / most) for variant in variants)
    for variant in itertools.chain.from_iterable(FORWARD.values()):
        if not variant.startswith("FusedDropout"):
            yield KernelGoal(variant, SQUARE, "update", UPDATE)
    yield KernelGoal("FusedRegenerated", LARGEST, most_ns=2.5e9)
    yield from (KernelGoal("FusedBinary", BITS, phase, most_ns=ns) for phase, ns in BINARY.items())


GOALS = tuple(_goals())


def verdict(excess: float | None) -> str:
    """Whether a goal is met, as a cell of a table."""
    return "not shown" if excess is None else "met" if excess <= 0 else NOT_MET


# The page


def render(results: Path, out: Path, measured: Iterable[Run] = ()) -> list[Path]:
    """Write ``<out>/kernels.md``; nothing if no kernel was compiled or measured.

    Args:
        results: the folder of results with the study of compiled kernels.
        out: the folder to write to.
        measured: all runs under ``results``.

    Raises:
        UserError: the study cannot be read.

    """
    compilations, runs = read_compilations(results), newest_runs(measured)
    if not (compilations or runs):
        return []
    return [write(out / PAGE, page(compilations, runs))]


def newest_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the run of each device and suite to show, sorted by the devices' folders."""
    rivals: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        if run.header.suite in SUITES and run.rows:
            key = run.header.environment.slug, SUITES.index(run.header.suite)
            rivals.setdefault(key, []).append(run)
    return [newest_whole(found)[0] for _, found in sorted(rivals.items())]


def page(compilations: Compilations | None, runs: Sequence[Run]) -> str:
    """Return the page as Markdown."""
    parts = ["# Fused kernels", _INTRODUCTION]
    for _, found in itertools.groupby(runs, lambda run: run.header.environment.slug):
        parts += _measured(list(found))
    if not any(run.header.environment.device == "cuda" for run in runs):
        parts += ["## Goals", _unmeasured(GOALS, NO_RUN)]
    if compilations:
        parts += _compiled(compilations)
    return join(parts)


def _unmeasured(goals: Iterable[KernelGoal], why: str) -> str:
    rows = [(goal.variant, goal.phase, goal.case, goal.text, why) for goal in goals]
    return table(("variant", "phase", "case", "goal", "found"), rows)


def _measured(runs: Sequence[Run]) -> list[str]:
    """The runs of a device: one table per operator and phase, and the goals without a row."""
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
        parts += ["### Goals without a row", _unmeasured(rest, "no row in any run")] if rest else []
    return parts


_HEADER = (
    "variant",
    "case",
    "time (ms)",
    "x base",
    "± (%)",
    "roofline bound (ms)",
    "of the bound (%)",
    "eager, x base",
    "compiled, x base",
    "goal",
    "above the goal (%)",
    "verdict",
)


def _timed(run: Run) -> Iterator[Grid]:
    """Yield the times of each operator, number format and phase by the method that is shown."""
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
    """One variant on one case: its time or the reason why it is missing, and its goal."""
    row = grid.at(variant, case)
    eager = Variant(scheme=variant.scheme.removeprefix(FUSED), options=variant.options)
    compiled = Variant(scheme="Compiled", options=(("of", eager.name),))
    ratio = grid.multiplier(variant, case, "base")
    measured = row if isinstance(row, Measurement) else None
    ns = median(measured) if measured else None
    floor = bound_ns(grid.run, case.dtype, measured.work) if measured else None
    excess = goal.excess(ns, ratio.value if ratio else None) if goal else None
    return (
        variant.label(grid.operator),
        headings(grid.cases)[grid.cases.index(case)],
        f"{row.status}: {row.reason}" if isinstance(row, Skipped) else format_cell(LATENCY, ns),
        format_multiplier(ratio.value) if ratio else ABSENT,
        format_number(100 * ratio.relative) if ratio and ratio.relative is not None else ABSENT,
        format_cell(LATENCY, floor),
        format_number(100 * floor / ns) if floor and ns else ABSENT,
        _multiplier(grid, eager, case),
        _multiplier(grid, compiled, case),
        goal.text if goal else "",
        "" if excess is None else format_number(100 * excess),
        verdict(excess) if goal else "",
    )


def _multiplier(grid: Grid, variant: Variant, case: Case) -> str:
    ratio = grid.multiplier(variant, case, "base")
    return format_multiplier(ratio.value) if ratio else ABSENT


def _compiled(compilations: Compilations) -> list[str]:
    """What kernels compile to, one table per capability, and the launches that do not compile."""
    commit = compilations.commit
    which = f"commit {commit[:_COMMIT_DIGITS]}" if commit else "commit unknown"
    which += " with uncommitted changes" if compilations.dirty else ""
    parts = [
        "## What they compile to",
        escape(f"Compiled by triton {compilations.triton} at {which}.")
        + " Registers are per thread, shared memory is per program, and `programs` is the number of programs "
        "that fit on a multiprocessor.",
    ]
    header = ("kernel", "warps", "stages", "registers", "shared (B)", "spilled (B)", "programs")
    for capability in dict.fromkeys(one.capability for one in compilations.found):
        rows = [
            (
                one.title,
                one.warps,
                one.stages,
                one.registers,
                one.shared_bytes,
                one.spilled_bytes,
                _programs(one),
            )
            for one in compilations.found
            if one.capability == capability
        ]
        parts += [f"### Capability {capability / 10:.1f}", table(header, rows)]
    refused = [
        f"- {escape(f'{one.title}, {one.capability / 10:.1f}: {one.reason}')}" for one in compilations.refused
    ]
    return [*parts, *(["\n".join(["Not compiled:", "", *refused])] if refused else [])]


def _programs(one: Compilation) -> str:
    """The number of programs that fit on a multiprocessor by registers, shared memory and warps."""
    registers, warps, reserved = 65536, 64, 1024
    shared = {80: 164 * 1024, 90: 228 * 1024}.get(one.capability)
    if shared is None:
        return ABSENT
    registers_each = -(-one.registers // 8) * 8 * 32 * one.warps  # allocated in steps of 8 per thread
    by_shared = shared // (one.shared_bytes + reserved)
    return str(min(registers // registers_each, by_shared, warps // one.warps))
