"""The page ``reports/kernels.md``: the goals of fused kernels, and what they compile to."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from esbench.report import captions
from esbench.report.analysis.pivot import LATENCY, TIMES, Grid, grids, operators
from esbench.report.analysis.run_selection import newest_whole
from esbench.report.formats import write
from esbench.report.formats.markdown import join, table
from esbench.report.text import escape
from esbench.schema import Measurement, Phase, Run, Skipped
from esbench.stats import Ratio, median
from esbench.studies.compiled_kernels import Compilation, Compilations, read_compilations
from esbench.units import ABSENT, format_multiplier, format_number, format_value

PAGE = "kernels.md"
SUITES = ("kernels", "unstored")
"""The suites whose runs are shown, in this order."""
METHODS = ("graph", "eager")
"""Only the first of these methods that was measured is shown."""
NO_RUN = "not measured: no GPU run yet"

_Cell = tuple[Measurement | Skipped, Ratio | None]
"""A row, and its time as a multiple of base."""

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
    def key(self) -> tuple[str, str, Phase]:
        """The variant, case and phase."""
        return self.variant, self.case, self.phase

    @property
    def limit(self) -> float:
        """The largest multiple of base, or the largest time in ns."""
        limit = self.most or self.most_ns
        assert limit  # noqa: S101  a goal has one of them
        return limit

    def format(self, value: float) -> str:
        """Return a value of this goal as the cell of a table."""
        return format_multiplier(value) if self.most else format_value("most_ns", value)

    def excess(self, value: float) -> float:
        """Return how far a value is above the goal, as a share of the goal; negative if it is met."""
        return value / self.limit - 1


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
    """Return the run of each GPU and suite to show, sorted by the devices' folders."""
    rivals: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        environment = run.header.environment
        if run.header.suite in SUITES and run.rows and environment.device == "cuda":
            rivals.setdefault((environment.slug, SUITES.index(run.header.suite)), []).append(run)
    return [newest_whole(found) for _, found in sorted(rivals.items())]


def page(compilations: Compilations | None, runs: Sequence[Run]) -> str:
    """Return the page as Markdown; the runs are those of :func:`newest_runs`."""
    parts = ["# Fused kernels", _INTRODUCTION]
    for _, group in itertools.groupby(runs, lambda run: run.header.environment.slug):
        found = list(group)
        cells = _cells(found)
        parts += [
            f"## Goals on {escape(found[0].header.environment.device_name)}",
            *(escape(captions.origin(run)) for run in found),
            _goals_table({goal: _found(goal, cells.get(goal.key)) for goal in GOALS}),
        ]
    if not runs:
        parts += ["## Goals", _goals_table(dict.fromkeys(GOALS, NO_RUN))]
    if compilations:
        parts += _compiled(compilations)
    return join(parts)


def _goals_table(found: Mapping[KernelGoal, str]) -> str:
    rows = [
        (goal.variant, goal.phase, goal.case, f"{goal.format(goal.limit)} at most", text)
        for goal, text in found.items()
    ]
    return table(("variant", "phase", "case", "goal", "found"), rows)


def _cells(runs: Iterable[Run]) -> dict[tuple[str, str, str], _Cell]:
    """Return the cell of each variant, case and phase: its graph timing if measured, else a reason."""
    found: dict[tuple[str, str, str], _Cell] = {}
    for run in runs:
        every = (grid for operator in operators(run) for grid in grids(run, operator, TIMES))
        for grid in sorted((one for one in every if one.metric == LATENCY), key=_place):
            for variant, case in itertools.product(grid.variants, grid.cases):
                if row := grid.at(variant, case):
                    key = (variant.name, case.label, grid.phase)
                    found.setdefault(key, (row, grid.multiplier(variant, case, "base")))
    return found


def _place(grid: Grid) -> tuple[bool, int]:
    return not grid.cells, METHODS.index(grid.method) if grid.method in METHODS else len(METHODS)


def _found(goal: KernelGoal, cell: _Cell | None) -> str:
    """Return the measured value for a goal, and whether it meets the goal."""
    if cell is None:
        return "no row in any run"
    row, ratio = cell
    if isinstance(row, Skipped):
        return f"{row.status}: {row.reason}"
    multiple = ratio.value if ratio else None
    found = multiple if goal.most else median(row)
    if found is None:
        return "no number"
    excess = goal.excess(found)
    return f"{goal.format(found)}: {f'missed by {format_number(100 * excess)} %' if excess > 0 else 'met'}"


def _compiled(compilations: Compilations) -> list[str]:
    """Return tables of the compiled kernels, one per capability, and the launches that do not compile."""
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
    """Return the number of programs that fit on a multiprocessor by registers, shared memory and warps."""
    registers, warps, reserved = 65536, 64, 1024
    shared = {80: 164 * 1024, 90: 228 * 1024}.get(one.capability)
    if shared is None:
        return ABSENT
    registers_each = -(-one.registers // 8) * 8 * 32 * one.warps  # allocated in steps of 8 per thread
    by_shared = shared // (one.shared_bytes + reserved)
    return str(min(registers // registers_each, by_shared, warps // one.warps))
