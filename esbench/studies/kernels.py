"""The page ``reports/kernels.md``: the goals of fused kernels, and their compiled code.

Records of compiled kernels are stored in ``<results>/compiled/kernels.json``.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from esbench import store
from esbench.report import captions
from esbench.report.analysis.pivot import LATENCY, TIMES, Grid, grids, operators
from esbench.report.analysis.run_selection import select_newest
from esbench.report.formats import write
from esbench.report.formats.markdown import join, table
from esbench.schema import Measurement, Phase, Run, Skipped
from esbench.stats import Ratio, median
from esbench.text import escape
from esbench.units import ABSENT, format_multiplier, format_number, format_value

SCHEMA = 2
FILE = Path("compiled", "kernels.json")
"""The path of the file in the folder of results."""
PAGE = "kernels.md"
SUITES = ("kernels", "unstored")
"""The suites whose runs are shown, in this order."""
METHODS = ("graph", "eager")
"""Only the first of these methods that was measured is shown."""
NO_RUN = "not measured: no GPU run yet"


# Records of compiled kernels

Amount = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record whose decoding rejects unknown fields."""


class Compilation(_Strict, frozen=True, kw_only=True):
    """The compiled code of one launch of a kernel.

    ``capability`` is 90 for 9.0. ``registers`` are per thread, ``shared_bytes`` per program.
    """

    title: str
    kernel: str
    capability: Positive
    warps: Positive
    stages: Positive
    registers: Positive
    shared_bytes: Amount
    spilled_bytes: Amount


class Refused(_Strict, frozen=True, kw_only=True):
    """A launch that does not compile, and why."""

    title: str
    kernel: str
    capability: Positive
    reason: str


class Compilations(_Strict, frozen=True, kw_only=True):
    """All compiled launches, with the compiler and the revision."""

    schema: int
    triton: str
    commit: str | None
    dirty: bool | None
    found: tuple[Compilation, ...]
    refused: tuple[Refused, ...] = ()


def read_compilations(results: Path) -> Compilations | None:
    """Read the records of compiled kernels; None if there is no file.

    Raises:
        UserError: the file is invalid; the message names the file and the field.

    """
    path = results / FILE
    what, again = "study of compiled kernels", "compile again with `nox -s kernels`"
    if not path.exists():
        return None
    return store.read_document(path, Compilations, what=what, schema=SCHEMA, again=again)


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
    for limit, variants in FORWARD.items():
        yield from (KernelGoal(variant, SQUARE, "forward", limit) for variant in variants)
    for share, variants in INFERENCE.items():
        yield from (KernelGoal(variant, WIDE, "forward", 1 / share) for variant in variants)
    for variant in itertools.chain(*FORWARD.values()):
        if not variant.startswith("FusedDropout"):
            yield KernelGoal(variant, SQUARE, "update", UPDATE)
    yield KernelGoal("FusedRegenerated", LARGEST, "forward", 2.5e9, in_ns=True)
    yield from (KernelGoal("FusedBinary", BITS, phase, ns, in_ns=True) for phase, ns in BINARY.items())


GOALS = tuple(_goals())


# The page

_Cell = tuple[Measurement | Skipped, Ratio | None]
"""A row, and its time as a multiple of base."""
_INTRODUCTION = (
    "Kernels that compute the forward or the update of a scheme in one launch. Times come from the "
    f"newest runs of the suites {' and '.join(f'`{name}`' for name in SUITES)} (`esbench run --suite "
    f"{SUITES[0]}` on a GPU). Goals are for an H200 in bfloat16 with CUDA graphs; a missed goal is "
    "reported and fails nothing. Tile sizes come from `impls/kernels/tuned` if the GPU is listed there, "
    "and are defaults otherwise. `nox -s kernels` compiles every kernel for GPUs that need not be "
    "present."
)


def render(results: Path, out: Path, measured: Iterable[Run] = ()) -> list[Path]:
    """Write ``<out>/kernels.md``; nothing if no kernel was compiled or measured.

    Args:
        results: the folder of results with the records of compiled kernels.
        out: the folder to write to.
        measured: all runs under ``results``.

    Raises:
        UserError: the records cannot be read.

    """
    compilations, runs = read_compilations(results), newest_runs(measured)
    if not (compilations or runs):
        return []
    return [write(out / PAGE, page(compilations, runs))]


def newest_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the run of each GPU and suite to show, sorted by the devices' folders."""
    candidates: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        environment = run.header.environment
        if run.header.suite in SUITES and run.rows and environment.device == "cuda":
            candidates.setdefault((environment.slug, SUITES.index(run.header.suite)), []).append(run)
    return [select_newest(same) for _, same in sorted(candidates.items())]


def page(compilations: Compilations | None, runs: Sequence[Run]) -> str:
    """Return the page as Markdown; the runs are those of :func:`newest_runs`."""
    parts = ["# Fused kernels", _INTRODUCTION]
    for _, group in itertools.groupby(runs, lambda run: run.header.environment.slug):
        device_runs = list(group)
        cells = _cells(device_runs)
        parts += [
            f"## Goals on {escape(device_runs[0].header.environment.device_name)}",
            *(escape(captions.origin(run)) for run in device_runs),
            _goals_table({goal: _result(goal, cells.get(goal[:3])) for goal in GOALS}),
        ]
    if not runs:
        parts += ["## Goals", _goals_table(dict.fromkeys(GOALS, NO_RUN))]
    return join([*parts, *(_compiled(compilations) if compilations else [])])


def _goals_table(results: Mapping[KernelGoal, str]) -> str:
    rows = [
        (goal.variant, goal.phase, goal.case, f"{goal.format(goal.limit)} at most", result)
        for goal, result in results.items()
    ]
    return table(("variant", "phase", "case", "goal", "found"), rows)


def _cells(runs: Iterable[Run]) -> dict[tuple[str, str, Phase], _Cell]:
    """Return the cell of each variant, case and phase: its graph timing if measured, else a reason."""
    cells: dict[tuple[str, str, Phase], _Cell] = {}
    for run in runs:
        all_grids = (grid for operator in operators(run) for grid in grids(run, operator, TIMES))
        for grid in sorted((grid for grid in all_grids if grid.metric == LATENCY), key=_preference):
            for variant, case in itertools.product(grid.variants, grid.cases):
                if row := grid.at(variant, case):
                    key = (variant.name, case.label, grid.phase)
                    cells.setdefault(key, (row, grid.multiplier(variant, case, "base")))
    return cells


def _preference(grid: Grid) -> tuple[bool, int]:
    """Return a sort key: grids with cells first, then in the order of METHODS."""
    return not grid.cells, METHODS.index(grid.method) if grid.method in METHODS else len(METHODS)


def _result(goal: KernelGoal, cell: _Cell | None) -> str:
    """Return the measured value for a goal, and whether it meets the goal."""
    if cell is None:
        return "no row in any run"
    row, ratio = cell
    if isinstance(row, Skipped):
        return f"{row.status}: {row.reason}"
    value = median(row) if goal.in_ns else ratio.value if ratio else None
    if value is None:
        return "no number"
    excess = value / goal.limit - 1
    return f"{goal.format(value)}: {f'missed by {format_number(100 * excess)} %' if excess > 0 else 'met'}"


def _compiled(compilations: Compilations) -> list[str]:
    """Return tables of the compiled kernels, one per capability, and the launches that do not compile."""
    commit = f"commit {compilations.commit[:7]}" if compilations.commit else "commit unknown"
    dirty = " with uncommitted changes" if compilations.dirty else ""
    parts = [
        "## What they compile to",
        escape(f"Compiled by triton {compilations.triton} at {commit}{dirty}.")
        + " Registers are per thread, shared memory is per program, and `programs` is the number of programs "
        "that fit on a multiprocessor.",
    ]
    header = ("kernel", "warps", "stages", "registers", "shared (B)", "spilled (B)", "programs")
    for capability in dict.fromkeys(launch.capability for launch in compilations.found):
        rows = [
            (
                *(launch.title, launch.warps, launch.stages, launch.registers),
                *(launch.shared_bytes, launch.spilled_bytes, _programs(launch)),
            )
            for launch in compilations.found
            if launch.capability == capability
        ]
        parts += [f"### Capability {capability / 10:.1f}", table(header, rows)]
    refused = [
        f"- {escape(f'{launch.title}, {launch.capability / 10:.1f}: {launch.reason}')}"
        for launch in compilations.refused
    ]
    return [*parts, *(["\n".join(["Not compiled:", "", *refused])] if refused else [])]


def _programs(launch: Compilation) -> str:
    """Return the number of programs that fit on a multiprocessor by registers, shared memory and warps."""
    registers, warps, reserved = 65536, 64, 1024
    shared = {80: 164 * 1024, 90: 228 * 1024}.get(launch.capability)
    if shared is None:
        return ABSENT
    # Registers are allocated in steps of 8 per thread.
    registers_each = -(-launch.registers // 8) * 8 * 32 * launch.warps
    by_shared = shared // (launch.shared_bytes + reserved)
    return str(min(registers // registers_each, by_shared, warps // launch.warps))
