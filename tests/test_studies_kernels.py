"""The page on fused kernels, from invented runs."""

import re
from pathlib import Path

import msgspec

from esbench.schema import Run, Variant
from esbench.studies.kernels import GOALS, SQUARE, newest_runs, render
from tests import synthetic
from tests.synthetic import BASE, linear, time_row

CASE = msgspec.structs.replace(linear(1024, 8192), dtype="bfloat16")
LARGEST = msgspec.structs.replace(linear(1024, 2**20), dtype="bfloat16")


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


def test_a_gpu_run_is_compared_with_the_goals(tmp_path: Path) -> None:
    """Graph replays are compared as a multiple of base or a time; a row without a number has its reason."""
    assert render(tmp_path, []) == []
    (path,) = render(tmp_path, [gpu_run(), gpu_run(unstored_ms=3000.0)])
    text = path.read_text(encoding="utf-8")
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
