"""The page on fused kernels, from compile results and invented runs."""

import re
from pathlib import Path

import msgspec
import pytest

from esbench import store
from esbench.errors import UserError
from esbench.schema import Run, Variant
from esbench.studies.kernels import (
    FILE,
    GOALS,
    NO_RUN,
    SCHEMA,
    SQUARE,
    Compilation,
    Compilations,
    Refused,
    newest_runs,
    page,
    render,
)
from tests import synthetic
from tests.synthetic import BASE, linear, time_row

CASE = msgspec.structs.replace(linear(1024, 8192), dtype="bfloat16")
LARGEST = msgspec.structs.replace(linear(1024, 2**20), dtype="bfloat16")

COMPILED = Compilation(
    title="low rank | rank 1",
    kernel="low_rank_kernel",
    capability=90,
    warps=8,
    stages=3,
    registers=163,
    shared_bytes=81920,
    spilled_bytes=0,
)
REFUSED = Refused(title="another", kernel="another_kernel", capability=80, reason="CompilationError: no")
STUDY = Compilations(
    schema=SCHEMA,
    triton="3.7.1",
    commit="0123456789",
    dirty=True,
    found=(COMPILED, msgspec.structs.replace(COMPILED, capability=80, registers=81, shared_bytes=0)),
    refused=(REFUSED,),
)


def gpu_run(*, run_id: str = "20270101T000000Z-kernels-0001", unstored_ms: float | None = None) -> Run:
    """Return a run on an invented GPU, of suite ``kernels`` or, with a time, of ``unstored``."""
    times = {BASE: 1.0, Variant(scheme="FusedLowRankSign"): 1.05, Variant(scheme="FusedHadamard"): 1.38}
    case, suite = CASE, "kernels"
    if unstored_ms:
        times, case, suite = {BASE: 3.0, Variant(scheme="FusedRegenerated"): unstored_ms}, LARGEST, "unstored"
    rows = [
        # Only replays of a graph are shown.
        time_row(variant, case, *[ms * factor] * 8, method=method)
        for method, factor in (("eager", 3), ("graph", 1))
        for variant, ms in times.items()
    ]
    refused = synthetic.skipped(Variant(scheme="FusedPermuted"), CASE, "its kernel | needs more")
    run = synthetic.run([*rows, refused], run_id=run_id, suite=suite, device_name="GPU 1")
    environment = msgspec.structs.replace(run.header.environment, device="cuda")
    return msgspec.structs.replace(run, header=msgspec.structs.replace(run.header, environment=environment))


def cells(line: str) -> list[str]:
    """Return the cells of a row of a Markdown table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def goal_and_result(page: str, variant: str, phase: str = "forward") -> list[str]:
    """Return the goal and the result in the first row of a variant and phase."""
    return next(row[3:] for row in map(cells, page.splitlines()) if row[:2] == [variant, phase])


def test_without_a_gpu_run_the_page_shows_what_was_compiled() -> None:
    """Tables have registers, memory, occupancy and refusals; every goal lacks a run."""
    text = page(STUDY, [])
    assert text.count(NO_RUN) == len(GOALS)
    assert text.index("### Capability 9.0") < text.index("### Capability 8.0")
    assert "triton 3.7.1 at commit 0123456 with uncommitted changes" in text
    hopper, ampere = (cells(line) for line in text.splitlines() if line.startswith("| low rank"))
    assert hopper == [r"low rank \| rank 1", "8", "3", "163", "81920", "0", "1"]
    assert ampere[3:] == ["81", "0", "0", "2"]  # 88 registers per thread are allocated
    assert "- another, 8.0: CompilationError: no" in text


def test_a_gpu_run_is_compared_with_the_goals() -> None:
    """Graph replays are compared as a multiple of base or a time; a row without a number has its reason."""
    text = page(None, [gpu_run(), gpu_run(unstored_ms=3000.0)])
    assert NO_RUN not in text
    assert text.count("## Goals on GPU 1") == 1
    assert goal_and_result(text, "FusedLowRankSign") == ["1.10x at most", "1.05x: met"]
    assert goal_and_result(text, "FusedHadamard") == ["1.15x at most", "1.38x: missed by 20.0 %"]
    assert goal_and_result(text, "FusedRegenerated") == ["2500 ms at most", "3000 ms: missed by 20.0 %"]
    assert goal_and_result(text, "FusedPermuted")[1] == r"unavailable: its kernel \| needs more"
    assert goal_and_result(text, "FusedSparsePerturbed(k=1)")[1] == "no row in any run"
    assert goal_and_result(text, "FusedHadamard", "update")[1] == "no row in any run"


def test_goals_are_stated_once() -> None:
    """Each variant, case and phase has at most one goal."""
    assert len({goal[:3] for goal in GOALS}) == len(GOALS)
    assert CASE.label == SQUARE


def test_the_newest_run_of_each_gpu_and_suite_counts() -> None:
    """Runs of other suites or on a CPU are ignored."""
    older, newer, vast = gpu_run(), gpu_run(run_id="20280101T000000Z-kernels-2"), gpu_run(unstored_ms=1.0)
    quick = synthetic.run(synthetic.three(linear()), run_id="20290101T000000Z-quick-0003")
    cpu = synthetic.run(synthetic.three(CASE), run_id="20290101T000000Z-kernels-0004", suite="kernels")
    assert newest_runs([older, vast, newer, quick, cpu]) == [newer, vast]


def test_the_page_is_written_from_a_folder_of_results(tmp_path: Path) -> None:
    """It has the goals of the runs and the compiled code; an invalid file is an error with file and field."""
    results = tmp_path / "results"
    assert render(results, tmp_path) == []
    path = store.write_document(STUDY, results / FILE)
    text = render(results, tmp_path, [gpu_run()])[0].read_text(encoding="utf-8")
    assert text == page(STUDY, [gpu_run()])
    path.write_bytes(path.read_bytes().replace(b'"warps"', b'"warp"'))
    with pytest.raises(UserError, match=r"kernels\.json: not a study of compiled kernels: .*warp"):
        render(results, tmp_path)
