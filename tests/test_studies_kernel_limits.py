"""Floors and estimates of kernels, from invented code and from the committed record."""

from pathlib import Path

import msgspec
import pytest

from esbench import compiled
from esbench.compiled import Code, CompiledKernel, Executed, Record, Work
from esbench.report.readme import Page
from esbench.studies import kernel_limits
from esbench.studies.kernel_limits import (
    CLOCK_HZ,
    GAP_NS,
    KERNELS,
    REACHED,
    START_NS,
    TORCH,
    base_limits,
    estimate_ns,
    floors,
    goal_limits,
    kernels_of,
)
from esbench.studies.kernels import GOALS, SQUARE, KernelGoal
from tests.test_studies_kernels import gpu_run

ROOT = Path(__file__).parents[1]
RECORD = compiled.read(ROOT / compiled.FILE)
FLOPS = 2 * 128 * 256 * 64 // 8
"""Of a warp of eight, in a step of a tile of 128 x 256 x 64."""
WORK = Work(
    tiles=256, programs=132, iterations=(0, 16), least_bytes=48_000_000, step_bytes=49_152, overlaps=True
)
KERNEL = CompiledKernel(
    title="low rank, rank 1, bfloat16",
    warps=8,
    registers=168,
    shared_bytes=200_000,
    code=Code(
        once=Executed(0, 0),
        tile=Executed(1755, 0),
        steps=(Executed(999, 0), Executed(100, FLOPS)),
        descriptor_loads=4,
    ),
    work=WORK,
)


def test_floors_follow_from_the_code_and_the_sizes() -> None:
    """Bytes move at 4.8 TB/s, and flops are those of the product; all warps' instructions are issued."""
    found = floors(KERNEL, WORK)
    assert found.bytes_ns == pytest.approx(10_000)
    assert found.flops_ns == pytest.approx(1e9 * 2 * 8192 * 1024 * 1024 / 989e12)
    instructions = 8 * 256 * (1755 + 16 * 100)
    assert found.issue_ns == pytest.approx(1e9 * instructions / (132 * 4 * CLOCK_HZ))


def test_an_estimate_adds_what_nothing_hides() -> None:
    """The slowest part of a step counts, then the end of a tile; other programs or the memory may hide it."""
    product_ns = floors(KERNEL, WORK).flops_ns * 264 / 256  # two rounds of 132 tiles
    alone = estimate_ns(KERNEL, WORK)
    assert alone == pytest.approx(product_ns + 2 * 1755 * 2 / CLOCK_HZ * 1e9)
    small = msgspec.structs.replace(KERNEL, shared_bytes=100_000, registers=128)
    twice = msgspec.structs.replace(WORK, programs=256)
    assert estimate_ns(small, twice) == pytest.approx(product_ns)  # two programs on each multiprocessor
    assert estimate_ns(small, WORK) == estimate_ns(KERNEL, twice) == alone  # not launched, or not fitting
    slow = msgspec.structs.replace(KERNEL.code, steps=(Executed(0, 0), Executed(2000, FLOPS)))
    assert estimate_ns(msgspec.structs.replace(KERNEL, code=slow), WORK) == pytest.approx(
        2 * (16 * 2000 + 1755) * 2 / CLOCK_HZ * 1e9
    )
    far = msgspec.structs.replace(WORK, step_bytes=2 * 49_152)
    assert estimate_ns(KERNEL, far) == pytest.approx(
        (2 * 16 * 2 * 49_152 / 64 + 2 * 1755 * 2) / CLOCK_HZ * 1e9
    )
    large = msgspec.structs.replace(WORK, least_bytes=480_000_000)
    assert estimate_ns(KERNEL, large) == pytest.approx(100_000 / REACHED)
    assert base_limits(SQUARE).estimate_ns == pytest.approx(START_NS + product_ns)


def test_a_product_hides_the_kernel_before_it_if_both_fit() -> None:
    """A product waits after its first loop, and for memory and schedulers; without room it waits at once."""
    goal = KernelGoal("FusedLowRankSign", SQUARE, "forward", 1.1)
    alone, loop_ns = estimate_ns(KERNEL, WORK), 16 * 1e9 * FLOPS * 8 / (989e12 / 132)
    small = msgspec.structs.replace(
        KERNEL,
        title="low rank, down, rank 1, bfloat16",
        registers=88,
        shared_bytes=20_000,
        code=Code(once=Executed(1, 0), tile=Executed(0, 0), steps=(), descriptor_loads=0),
        work=msgspec.structs.replace(WORK, iterations=(), overlaps=False),
    )

    def time_ns(first: CompiledKernel, *, overlaps: bool = True, **work: int) -> float:
        assert first.work
        first_work = msgspec.structs.replace(first.work, **work)
        first = msgspec.structs.replace(first, work=first_work)
        product = msgspec.structs.replace(KERNEL, work=msgspec.structs.replace(WORK, overlaps=overlaps))
        limits = goal_limits(goal, Record(triton="3", kernels=(first, product)))
        assert limits
        assert limits.floors.bytes_ns == pytest.approx(10_000 + floors(first, first_work).bytes_ns)
        return limits.estimate_ns - START_NS

    assert time_ns(small, least_bytes=24_000_000) == pytest.approx(alone)
    bytes_ns = 10_000 / REACHED
    assert time_ns(small) == pytest.approx(max(alone, 2 * bytes_ns, bytes_ns + alone - loop_ns))
    assert time_ns(small, least_bytes=480_000_000) == pytest.approx(10 * bytes_ns + alone - loop_ns)
    busy = msgspec.structs.replace(small.code, once=Executed(60_000, 0))
    issue_ns = floors(KERNEL, WORK).issue_ns + 2 * 60_000 / CLOCK_HZ * 1e9
    assert time_ns(msgspec.structs.replace(small, code=busy)) == pytest.approx(
        max(issue_ns, 2 * 60_000 / CLOCK_HZ * 1e9 + alone - loop_ns)
    )
    # Too many registers, too much shared memory, or more programs than are there at a time.
    apart = bytes_ns + alone
    assert time_ns(msgspec.structs.replace(small, registers=96)) == pytest.approx(apart)
    assert time_ns(msgspec.structs.replace(small, shared_bytes=40_000)) == pytest.approx(apart)
    assert time_ns(small, programs=132 * 3) == pytest.approx(apart)
    assert time_ns(small, overlaps=False) == pytest.approx(apart + GAP_NS)


def test_each_goal_has_kernels_in_the_record_or_is_of_torch_alone() -> None:
    """The record has the work of each goal's kernels, and the tables name no goal that does not exist."""
    for goal in GOALS:
        limits = goal_limits(goal, RECORD)
        assert limits or TORCH[goal.variant, goal.phase].startswith("torch alone")
        if limits:
            assert limits.estimate_ns > max(limits.floors)
        assert bool(limits) == bool(kernels_of(goal))
    assert {(goal.variant, goal.phase) for goal in GOALS} >= {*KERNELS, *TORCH}
    with pytest.raises(LookupError, match="no work of 'low rank, down, rank 1, bfloat16'"):
        goal_limits(KernelGoal("FusedLowRankSign", SQUARE, "forward", 1.1), Record(triton="3", kernels=()))


def test_measured_times_come_from_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a run the reason is given, and a committed run of the device fills the column."""
    (tmp_path / compiled.FILE).parent.mkdir(parents=True)
    compiled.write(RECORD, tmp_path / compiled.FILE)
    page = Page(tmp_path)
    assert page.kernel_limits("gpu-1").count(kernel_limits.NOT_YET) == len(GOALS)
    monkeypatch.setattr(Page, "_run", lambda *_: gpu_run())
    folder = tmp_path / "results" / "gpu-1"
    folder.mkdir(parents=True)
    (folder / "20270101T000000Z-kernels-0001.jsonl").touch()
    text = page.kernel_limits("gpu-1")
    assert "1.05x: met" in next(line for line in text.splitlines() if line.startswith("| FusedLowRankSign "))
    assert kernel_limits.NOT_YET not in text
