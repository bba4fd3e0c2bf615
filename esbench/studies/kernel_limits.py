"""Floors and estimates of the times of fused kernels on an H200, from their compiled code."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from esbench.compiled import (
    PROCESSORS,
    REGISTERS,
    RESERVED_BYTES,
    SHARED_BYTES,
    CompiledKernel,
    Executed,
    Record,
    Work,
)
from esbench.report.formats.markdown import join, table
from esbench.schema import Phase, Run
from esbench.studies.kernels import GOALS, SQUARE, WIDE, KernelGoal, cells_of, result
from esbench.units import format_multiplier, format_number

# The GPU

CLOCK_HZ = 1.755e9
SCHEDULERS = 4
"""Schedulers of a multiprocessor, each of which issues an instruction of a warp in a cycle."""
TENSOR_FLOPS = 989e12
"""Dense flops of bfloat16 a second."""
MEMORY_BYTES = 4.8e12
"""Bytes a second that the memory reads and writes."""
CACHE_BYTES = 64
"""Bytes in a cycle that a multiprocessor loads from the L2 cache."""

# Assumptions of estimates

REACHED = 0.9
"""Share of the memory's rate that a kernel reaches."""
START_NS = 3000.0
"""The launch, the loads of the first tiles and the writes of the last ones; base takes them, too."""
GAP_NS = 1000.0
"""Between the end of a kernel and the beginning of the next one, unless that one may begin earlier."""


class Floors(NamedTuple):
    """Smallest times in ns: of moving bytes, of tensor cores' flops and of issuing instructions."""

    bytes_ns: float
    flops_ns: float
    issue_ns: float

    @classmethod
    def sum(cls, parts: Iterable["Floors"]) -> "Floors":
        """Return the floors of launches one after another."""
        return cls(*map(math.fsum, zip(*parts, strict=True)))


def floors(kernel: CompiledKernel, work: Work) -> Floors:
    """Return the floors of a launch."""
    code = kernel.code
    parts = [
        (code.once, work.programs),
        (code.tile, work.tiles),
        *((step, count * work.tiles) for step, count in zip(code.steps, work.iterations, strict=True)),
    ]
    flops = kernel.warps * sum(part.flops * count for part, count in parts)
    instructions = kernel.warps * sum(part.instructions * count for part, count in parts)
    return Floors(
        1e9 * work.least_bytes / MEMORY_BYTES,
        1e9 * flops / TENSOR_FLOPS,
        1e9 * instructions / (PROCESSORS * SCHEDULERS * CLOCK_HZ),
    )


def estimate_ns(kernel: CompiledKernel, work: Work) -> float:
    """Return the estimated time of a launch from its first loads to its last writes.

    A program multiplies while it issues the instructions of the next step and loads operands of later ones:
    the slowest of these counts. What it executes once for a tile is hidden only by other programs on the same
    multiprocessor. Multiprocessors without a further tile wait for the others.
    """
    smallest, code = floors(kernel, work), kernel.code
    memory_ns = smallest.bytes_ns / REACHED
    if not any(step.flops for step in code.steps):
        return max(memory_ns, smallest.issue_ns)
    rounds = math.ceil(work.tiles / PROCESSORS)
    imbalance = rounds * PROCESSORS / work.tiles
    load_ns = _load_ns(work)
    tile_ns = _issue_ns(kernel, code.tile) + _issue_ns(kernel, code.once) * work.programs / work.tiles
    tile_ns += math.fsum(_loops_ns(kernel, work))
    loads_ns = load_ns * sum(
        count for step, count in zip(code.steps, work.iterations, strict=True) if step.flops
    )
    one_after_another_ns = rounds * tile_ns / kernel.resident_programs(work)
    overlapped_ns = max(imbalance * max(smallest.flops_ns, smallest.issue_ns), rounds * loads_ns)
    return max(memory_ns, overlapped_ns, one_after_another_ns)


def _load_ns(work: Work) -> float:
    """Return the time in which a multiprocessor loads the operands of a step from the L2 cache."""
    return 1e9 * work.step_bytes / (CACHE_BYTES * CLOCK_HZ)


def _loops_ns(kernel: CompiledKernel, work: Work) -> list[float]:
    """Return the time of each innermost loop for a tile."""
    load_ns = _load_ns(work)
    return [
        count
        * max(
            1e9 * step.flops * kernel.warps / (TENSOR_FLOPS / PROCESSORS),
            _issue_ns(kernel, step),
            load_ns if step.flops else 0.0,
        )
        for step, count in zip(kernel.code.steps, work.iterations, strict=True)
    ]


Launch = tuple[CompiledKernel, Work]


def overlapping_ns(first: Launch, product: Launch) -> float:
    """Return the estimated time of a launch and of one that begins with it, in most cases a product.

    If the programs of both fit on the multiprocessors together, they share memory and schedulers, and the
    product waits for the first launch after the first of its loops with tensor cores. Otherwise it waits for
    registers or shared memory at once.
    """
    kernel, work = product
    before_ns, product_ns = estimate_ns(*first), estimate_ns(*product)
    loops_ns = [
        time for step, time in zip(kernel.code.steps, _loops_ns(kernel, work), strict=True) if step.flops
    ]
    if not loops_ns or not _fit_together(first, product):
        return before_ns + product_ns
    both = Floors.sum((floors(*first), floors(*product)))
    rest_ns = product_ns - loops_ns[0] * kernel.resident_programs(work)
    return max(both.bytes_ns / REACHED, both.issue_ns, product_ns, before_ns + rest_ns)


def _fit_together(first: Launch, second: Launch) -> bool:
    """Return whether all programs of a launch and those of the next one are on multiprocessors together."""
    kernel, work = first
    if work.programs > PROCESSORS * kernel.resident_programs(work):
        return False
    counts = [(kernel, kernel.resident_programs(work)) for kernel, work in (first, second)]
    registers = sum(kernel.program_registers * count for kernel, count in counts)
    shared_bytes = sum((kernel.shared_bytes + RESERVED_BYTES) * count for kernel, count in counts)
    return registers <= REGISTERS and shared_bytes <= SHARED_BYTES


def _issue_ns(kernel: CompiledKernel, executed: Executed) -> float:
    """Return the time in which a multiprocessor issues what the warps of a program execute."""
    return 1e9 * executed.instructions * kernel.warps / (SCHEDULERS * CLOCK_HZ)


# Kernels of the goals

_LOW_RANK = ("low rank, down, rank 1, bfloat16", "low rank, rank 1, bfloat16")
_PARTS = "parts of a sum, bfloat16"
_FLIPS = ("flipped, side both, bfloat16",)
_FLIPS_UPDATE = ("weighted outer products, signs around a core, bfloat16", _PARTS)
_OUTER = ("weighted outer products, factors, bfloat16", _PARTS)


def _drawn(values: str, wide: str = "") -> tuple[str, ...]:
    return tuple(f"drawn low rank, {part}, rank 1, {values}{wide}, bfloat16" for part in ("down", "up"))


def _drawn_update(values: str) -> tuple[str, ...]:
    fill = f"drawn {values} of factors written out"
    outer = "signs" if values == "signs" else "factors"
    return fill, fill, f"weighted outer products, {outer}, bfloat16", _PARTS


KERNELS: Mapping[tuple[str, Phase], tuple[str, ...]] = {
    ("FusedHadamard", "forward"): ("Hadamard, rows of 1024, bfloat16", "Hadamard, product, bfloat16"),
    ("FusedLowRank(rank=1)", "forward"): _LOW_RANK,
    ("FusedLowRankSign", "forward"): _LOW_RANK,
    ("FusedLowRank(rank=1, regenerated=True)", "forward"): _drawn("normals"),
    ("FusedLowRank(rank=1, regenerated=True, values=uniform)", "forward"): _drawn("levels"),
    ("FusedLowRankSign(regenerated=True)", "forward"): _drawn("signs"),
    ("FusedSparsePerturbed(k=1)", "forward"): ("sparse noise, k = 1, bfloat16",),
    ("FusedSparsePerturbed(k=2)", "forward"): ("sparse noise, k = 2, bfloat16",),
    ("FusedFlipped(side=both)", "forward"): _FLIPS,
    ("FusedFlippedSign", "forward"): _FLIPS,
    ("FusedPermuted", "forward"): ("picks, bfloat16", "two products, bfloat16"),
    ("FusedPermuted(in_sparsity=0.1)", "forward"): (
        "102 picks, bfloat16",
        "two products, 102 picks, bfloat16",
    ),
    ("FusedDropoutMask", "forward"): ("dropout of inputs, plain, bfloat16",),
    ("FusedDropoutBlocks", "forward"): ("dropout of blocks of inputs, plain, bfloat16",),
    ("FusedDropoutBlocks(side=both, groups=8)", "forward"): (
        "dropout of blocks of both sides, plain, bfloat16",
    ),
    ("FusedHadamard", "update"): (
        "weighted outer products, signs around a Hadamard matrix, bfloat16",
        _PARTS,
    ),
    ("FusedLowRank(rank=1)", "update"): _OUTER,
    ("FusedLowRankSign", "update"): _OUTER,
    ("FusedLowRank(rank=1, regenerated=True)", "update"): _drawn_update("normals"),
    ("FusedLowRank(rank=1, regenerated=True, values=uniform)", "update"): _drawn_update("levels"),
    ("FusedLowRankSign(regenerated=True)", "update"): _drawn_update("signs"),
    ("FusedSparsePerturbed(k=1)", "update"): ("sums of sparse noise, bfloat16",),
    ("FusedSparsePerturbed(k=2)", "update"): ("sums of sparse noise, k = 2, bfloat16",),
    ("FusedFlipped(side=both)", "update"): _FLIPS_UPDATE,
    ("FusedFlippedSign", "update"): _FLIPS_UPDATE,
    ("FusedRegenerated", "forward"): ("drawn dense normals, 1 row of 2^20 members, bfloat16",),
    ("FusedRegenerated(values=uniform)", "forward"): ("drawn dense levels, 1 row of 2^20 members, bfloat16",),
    ("FusedBinary", "forward"): ("bits, product of 1 row of 1024, float32",),
    ("FusedBinary", "sample"): ("bits, members drawn, 16,384 words",),
    ("FusedBinary", "update"): ("bits, sum about the mean, float32",),
}
"""Variant and phase -> compile checks of the kernels that it launches, in their order."""
WIDE_KERNELS: Mapping[str, tuple[str, ...]] = {
    "FusedLowRank(rank=1)": ("low rank, down, rank 1, wide, bfloat16", "low rank, rank 1, wide, bfloat16"),
    "FusedLowRankSign": ("low rank, down, rank 1, wide, bfloat16", "low rank, rank 1, wide, bfloat16"),
    "FusedLowRank(rank=1, regenerated=True)": _drawn("normals", ", wide"),
    "FusedLowRank(rank=1, regenerated=True, values=uniform)": _drawn("levels", ", wide"),
    "FusedLowRankSign(regenerated=True)": _drawn("signs", ", wide"),
}
"""The same for the forward of a wide layer."""
TORCH: Mapping[tuple[str, Phase], str] = {
    ("FusedPermuted", "update"): "torch alone: a scatter and a product",
    ("FusedPermuted(in_sparsity=0.1)", "update"): "torch alone: a scatter and a product",
    ("FusedSparsePerturbed(k=1)", "update"): "plus a sort by torch",
    ("FusedSparsePerturbed(k=2)", "update"): "plus a sort by torch",
    ("FusedLowRank(rank=1, regenerated=True)", "update"): "plus sums by torch",
    ("FusedLowRank(rank=1, regenerated=True, values=uniform)", "update"): "plus sums by torch",
    ("FusedLowRankSign(regenerated=True)", "update"): "plus sums by torch",
}
"""Variant and phase -> what torch computes, which no floor includes."""


def kernels_of(goal: KernelGoal) -> tuple[str, ...]:
    """Return the titles of the compile checks of a goal's kernels."""
    if goal.case == WIDE:
        return WIDE_KERNELS[goal.variant]
    return KERNELS.get((goal.variant, goal.phase), ())


# The table

SIZES: Mapping[str, tuple[int, int, int]] = {SQUARE: (8192, 1024, 1024), WIDE: (1024, 8192, 8192)}
"""Case -> rows, outputs and inputs of the product that base computes in the forward and in the update."""
BASE_TILE = (128, 256)
"""Rows and outputs of a tile of base, of which each multiprocessor computes one after another."""
NOT_YET = "no run on a GPU yet"


class Limits(NamedTuple):
    """The floors of a call in ns, and its estimated time."""

    floors: Floors
    estimate_ns: float


def base_limits(case: str) -> Limits:
    """Return the limits of a plain product in bfloat16, which loses only the last round of tiles."""
    rows, outputs, inputs = SIZES[case]
    smallest = Floors(
        1e9 * 2 * (rows * inputs + outputs * inputs + rows * outputs) / MEMORY_BYTES,
        1e9 * 2 * rows * outputs * inputs / TENSOR_FLOPS,
        0.0,
    )
    tiles = math.ceil(rows / BASE_TILE[0]) * math.ceil(outputs / BASE_TILE[1])
    imbalance = math.ceil(tiles / PROCESSORS) * PROCESSORS / tiles
    time_ns = max(smallest.bytes_ns / REACHED, smallest.flops_ns * imbalance)
    return Limits(smallest, START_NS + time_ns)


def goal_limits(goal: KernelGoal, record: Record) -> Limits | None:
    """Return the limits of a goal's call; None if it launches no kernel.

    Raises:
        LookupError: the record has no such kernel, or not its work.
    """
    launches = [_launch(record, title) for title in kernels_of(goal)]
    if not launches:
        return None
    time_ns = START_NS + estimate_ns(*launches[0])
    for before, launch in itertools.pairwise(launches):
        if launch[1].overlaps:
            time_ns += overlapping_ns(before, launch) - estimate_ns(*before)
        else:
            time_ns += GAP_NS + estimate_ns(*launch)
    return Limits(Floors.sum(floors(*launch) for launch in launches), time_ns)


def _launch(record: Record, title: str) -> Launch:
    kernel = record.at(title)
    if kernel is None or kernel.work is None:
        raise LookupError(f"the record of compiled kernels has no work of {title!r}")
    return kernel, kernel.work


def tables(record: Record, runs: Sequence[Run]) -> str:
    """Return a table for each case and phase with goals; measured times are those of runs on an H200."""
    cells = cells_of(runs)
    groups: dict[tuple[str, Phase], list[KernelGoal]] = {}
    for goal in GOALS:
        groups.setdefault((goal.case, goal.phase), []).append(goal)
    parts = []
    for (case, phase), goals in groups.items():
        base = base_limits(case) if case in SIZES else None
        in_base = ("estimate / base",) if base else ()
        # Goals in ns are shown in ms, as their limits are.
        unit, unit_ns = ("us", 1e3) if base else ("ms", 1e6)
        times = (f"{name} ({unit})" for name in ("bytes", "flops", "issue", "estimate"))
        rows = [("base", "", *_numbers(base, base, unit_ns), "")] if base else []
        for goal in goals:
            found = result(goal, cells.get((goal.variant, goal.case, goal.phase))) if runs else NOT_YET
            limits = goal_limits(goal, record)
            numbers = _numbers(limits, base, unit_ns) if limits else [""] * (4 + len(in_base))
            note = TORCH.get((goal.variant, goal.phase), "")
            rows.append(
                (goal.variant, goal.format(goal.limit), *numbers, ", ".join(filter(None, (note, found))))
            )
        parts += [f"**{phase}**, {case}", table(("variant", "goal", *times, *in_base, "measured"), rows)]
    return join(parts)


def _numbers(limits: Limits, base: Limits | None, unit_ns: float) -> list[str]:
    times = (*limits.floors, limits.estimate_ns)
    multiple = [format_multiplier(limits.estimate_ns / base.estimate_ns)] if base else []
    return [*(format_number(time / unit_ns) if time else "" for time in times), *multiple]
