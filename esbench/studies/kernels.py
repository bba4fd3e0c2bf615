"""The page ``kernels.md`` of a report: the times of fused kernels on a GPU, and their goals."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from esbench.report import captions
from esbench.report.analysis.pivot import Grid, latency_grids, operators
from esbench.report.analysis.run_selection import select_newest
from esbench.report.formats import write
from esbench.report.formats.markdown import join, table
from esbench.schema import Measurement, Phase, Run, Skipped
from esbench.stats import Ratio, median
from esbench.text import escape
from esbench.units import format_multiplier, format_number, format_value

PAGE = "kernels.md"
SUITES = ("kernels", "unstored")
"""The suites whose runs are shown, in this order."""
METHODS = ("graph", "eager")
"""Only the first of these methods that was measured is shown."""


# Goals

SQUARE = "Linear(1024, 1024) members=8192 dtype=bfloat16"
WIDE = "Linear(8192, 8192) dtype=bfloat16"
LARGEST = "Linear(1024, 1024) members=1048576 dtype=bfloat16"
"""A case whose dense noise would take 2 TB."""
BITS = "BinarizedLinear(1024, 1024)"


class KernelGoal(NamedTuple):
    """The largest time of a phase of a variant on a case, as a multiple of base or in ns."""

    variant: str
    case: str
    phase: Phase
    limit: float
    in_ns: bool = False

    def format(self, value: float) -> str:
        """Return a value of this goal as the cell of a table."""
        return format_value("max_ns", value) if self.in_ns else format_multiplier(value)


FORWARD = {
    1.15: (
        "FusedHadamard",
        "FusedLowRank(rank=1, regenerated=True)",
        "FusedLowRank(rank=1, regenerated=True, values=uniform)",
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
    0.95: (
        "FusedLowRank(rank=1, regenerated=True)",
        "FusedLowRank(rank=1, regenerated=True, values=uniform)",
        "FusedLowRankSign(regenerated=True)",
    ),
}
"""Smallest share of the speed of plain inference, at width 8192 -> variants that have this goal."""
BINARY: dict[Phase, float] = {"forward": 39e3, "sample": 220e3, "update": 90e3}
"""Phase -> largest time in ns of a network of bits."""
UPDATE = 1.25
"""Largest multiple of base of an update that is a matrix product."""


def _goals() -> Iterator[KernelGoal]:
    """Yield the goals of the tables above, each for its case."""
    for limit, variants in FORWARD.items():
        yield from (KernelGoal(variant, SQUARE, "forward", limit) for variant in variants)
    for share, variants in INFERENCE.items():
        yield from (KernelGoal(variant, WIDE, "forward", 1 / share) for variant in variants)
    for variant in itertools.chain(*FORWARD.values()):
        if not variant.startswith("FusedDropout"):
            yield KernelGoal(variant, SQUARE, "update", UPDATE)
    for variant in ("FusedRegenerated", "FusedRegenerated(values=uniform)"):
        yield KernelGoal(variant, LARGEST, "forward", 2.5e9, in_ns=True)
    yield from (KernelGoal("FusedBinary", BITS, phase, ns, in_ns=True) for phase, ns in BINARY.items())


GOALS = tuple(_goals())


# The page

MeasuredCell = tuple[Measurement | Skipped, Ratio | None]
"""A row, and its time as a multiple of base."""
_INTRODUCTION = (
    "Kernels that compute the forward or the update of a scheme in one or two launches. Times come from the "
    f"newest runs of the suites {' and '.join(f'`{name}`' for name in SUITES)} (`esbench run --suite "
    f"{SUITES[0]}` on a GPU). Goals are for an H200 in bfloat16 with CUDA graphs; a missed goal is "
    "reported and fails nothing. Tile sizes come from `impls/kernels/tuned` if the GPU is listed there, "
    "and are defaults otherwise."
)


def render(out: Path, measured: Iterable[Run]) -> list[Path]:
    """Write ``<out>/kernels.md`` from all runs; nothing if none measured kernels on a GPU."""
    runs = newest_runs(measured)
    return [write(out / PAGE, page(runs))] if runs else []


def newest_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the run of each GPU and suite to show, sorted by the devices' folders."""
    candidates: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        environment = run.header.environment
        if run.header.suite in SUITES and run.rows and environment.device == "cuda":
            candidates.setdefault((environment.slug, SUITES.index(run.header.suite)), []).append(run)
    return [select_newest(same) for _, same in sorted(candidates.items())]


def page(runs: Sequence[Run]) -> str:
    """Return the page as Markdown; the runs are those of :func:`newest_runs`."""
    parts = ["# Fused kernels", _INTRODUCTION]
    for _, group in itertools.groupby(runs, lambda run: run.header.environment.slug):
        device_runs = list(group)
        cells = cells_of(device_runs)
        parts += [
            f"## Goals on {escape(device_runs[0].header.environment.device_name)}",
            *(escape(captions.origin(run)) for run in device_runs),
            table(("variant", "phase", "case", "goal", "found"), [_row(goal, cells) for goal in GOALS]),
        ]
    return join(parts)


def _row(goal: KernelGoal, cells: Mapping[tuple[str, str, Phase], MeasuredCell]) -> tuple[str, ...]:
    found = result(goal, cells.get((goal.variant, goal.case, goal.phase)))
    return goal.variant, goal.phase, goal.case, f"{goal.format(goal.limit)} at most", found


def cells_of(runs: Iterable[Run]) -> dict[tuple[str, str, Phase], MeasuredCell]:
    """Return the cell of each variant, case and phase: its graph timing if measured, else a reason."""
    cells: dict[tuple[str, str, Phase], MeasuredCell] = {}
    for run in runs:
        latencies = [grid for operator in operators(run) for grid in latency_grids(run, operator)]
        for grid in sorted(latencies, key=_preference):
            for variant, case in itertools.product(grid.variants, grid.cases):
                if row := grid.at(variant, case):
                    key = (variant.name, case.label, grid.phase)
                    cells.setdefault(key, (row, grid.multiplier(variant, case, "base")))
    return cells


def _preference(grid: Grid) -> tuple[bool, int]:
    """Return a sort key: grids with cells first, then in the order of METHODS."""
    return not grid.cells, METHODS.index(grid.method) if grid.method in METHODS else len(METHODS)


def result(goal: KernelGoal, cell: MeasuredCell | None) -> str:
    """Return the measured value for a goal, and whether it meets the goal."""
    if cell is None:
        return "no row in any run"
    row, ratio = cell
    if isinstance(row, Skipped):
        return f"{row.status}: {row.reason}"
    multiple = ratio.value if ratio else None
    value = median(row) if goal.in_ns else multiple
    if value is None:
        return "no number"
    excess = value / goal.limit - 1
    verdict = f"missed by {format_number(100 * excess)} %" if excess > 0 else "met"
    return f"{goal.format(value)}: {verdict}"
