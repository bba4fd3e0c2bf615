"""The page on fused kernels, from what was compiled and from runs that nobody measured."""

import re
from pathlib import Path

import msgspec
import pytest

from esbench.errors import UserError
from esbench.schema import Run, Variant
from esbench.studies.compiled_kernels import (
    FILE,
    SCHEMA,
    Compilation,
    Compilations,
    Refused,
    write_compilations,
)
from esbench.studies.kernels_page import GOALS, NO_RUN, SQUARE, KernelGoal, newest_runs, render, verdict
from esbench.studies.kernels_page import page as kernels_page
from tests import synthetic
from tests.synthetic import BASE, linear, time_row, variant, working

CASE = msgspec.structs.replace(linear(1024, 8192), dtype="bfloat16")
FUSED = Variant(scheme="FusedLowRankSign")
EAGER = Variant(scheme="LowRankSign")
COMPILED = variant("Compiled", of="LowRankSign")
MISSED = Variant(scheme="FusedHadamard")

ONE = Compilation(
    title="low rank | rank 1",
    kernel="low_rank_kernel",
    capability=90,
    warps=8,
    stages=3,
    registers=163,
    shared_bytes=81920,
    spilled_bytes=0,
)
BROKEN = Refused(title="another", kernel="another_kernel", capability=80, reason="CompilationError: no")
WHOLE = Compilations(
    schema=SCHEMA,
    triton="3.7.1",
    commit="0123456789",
    dirty=True,
    found=(ONE, msgspec.structs.replace(ONE, capability=80, registers=255, shared_bytes=0)),
    refused=(BROKEN,),
)


def gpu_run(*, device: str = "cuda", run_id: str = "20270101T000000Z-kernels-0001") -> Run:
    """Make a run of a GPU that does not exist: base takes 1 ms, fused 1.05, Hadamard 1.38 ms."""
    method = "graph" if device == "cuda" else "host"
    times = {BASE: 1.0, FUSED: 1.05, EAGER: 2.0, COMPILED: 1.5, MISSED: 1.38}
    rows = [working(time_row(one, CASE, *[ms] * 8, method=method), 1e6, 5e5) for one, ms in times.items()]
    if device == "cuda":
        rows += [time_row(one, CASE, *[3 * ms] * 8, method="eager") for one, ms in times.items()]
    refused = synthetic.skipped(Variant(scheme="FusedPermuted"), CASE, "its kernel | needs more")
    run = synthetic.run(
        [*rows, refused],
        synthetic.peaks("bfloat16"),
        run_id=run_id,
        suite="kernels",
        device_name="GPU 1",
    )
    here = msgspec.structs.replace(run.header.environment, device=device)
    return msgspec.structs.replace(run, header=msgspec.structs.replace(run.header, environment=here))


def line(page: str, start: str) -> list[str]:
    """Return the cells of the first row of a table that begins so."""
    found = next(one for one in page.splitlines() if one.startswith(f"| {start} "))
    return cells_of(found)


def cells_of(row: str) -> list[str]:
    """Return the cells of a row of a table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def test_without_a_gpu_run_the_page_shows_what_was_compiled() -> None:
    """Registers, memory, room on a processor and what was refused; every goal says that there is no run."""
    page = kernels_page(WHOLE, [])
    assert page.count(NO_RUN) == len(GOALS)
    assert page.index("### Capability 9.0") < page.index("### Capability 8.0")
    assert "triton 3.7.1 at commit 0123456 with uncommitted changes" in page
    hopper, ampere = (cells_of(one) for one in page.splitlines() if one.startswith("| low rank"))
    assert hopper == [r"low rank \| rank 1", "8", "3", "163", "81920", "0", "1"]
    assert (ampere[3], ampere[4]) == ("255", "0")
    assert "- another, 8.0: CompilationError: no" in page
    on_cpu = kernels_page(None, [gpu_run(device="cpu")])
    assert on_cpu.count(NO_RUN) == len(GOALS)
    cells = line(on_cpu, "FusedHadamardLinear")
    assert (cells[3], cells[-3:]) == ("1.38x", ["", "", ""])  # goals are those of a GPU


def test_a_gpu_run_is_held_to_the_goals() -> None:
    """By replays of a graph: time, multiple of base, floor, the eager and compiled rows, and by how much."""
    page = kernels_page(None, [gpu_run()])
    cells = dict(zip(line(page, "variant"), line(page, "FusedLowRankSignLinear"), strict=True))
    assert cells == {
        "variant": "FusedLowRankSignLinear",
        "case": "(1024, 1024)",
        "time (ms)": "1.05",
        "x base": "1.05x",
        "± (%)": "0",
        "roofline bound (ms)": "0.500",
        "of the bound (%)": "47.6",
        "eager, x base": "2.00x",
        "compiled, x base": "1.50x",
        "goal": "1.10x at most",
        "above the goal (%)": "-4.55",
        "verdict": "met",
    }
    missed = line(page, "FusedHadamardLinear")
    assert missed[-2:] == ["20.0", "**not met**"]
    assert missed[7:9] == ["n/a", "n/a"]
    assert "method graph" in page
    assert "method eager" not in page
    # A row without a number has its reason, and a goal without a row is listed.
    without = line(page, "FusedPermutedLinear")
    assert without[2] == r"unavailable: its kernel \| needs more"
    assert without[-1] == "not shown"
    rest = page.partition("### Goals without a row")[2]
    assert "FusedSparsePerturbed(k=1)" in rest
    assert "FusedPermuted " not in rest.partition("update")[0]
    assert NO_RUN not in page


def test_goals_are_stated_once() -> None:
    """One for each variant, case and phase, each a multiple or a time; and a verdict says which way."""
    keys = [(goal.variant, goal.case, goal.phase) for goal in GOALS]
    assert len(set(keys)) == len(keys)
    assert all((goal.most is None) != (goal.most_ns is None) for goal in GOALS)
    assert CASE.label == SQUARE
    goal = KernelGoal("A", "case", most_ns=2e6)
    assert goal.text == "2.00 ms at most"
    assert goal.excess(3e6, None) == pytest.approx(0.5)
    assert goal.excess(None, 1.0) is None
    assert [verdict(one) for one in (0.0, 0.01, None)] == ["met", "**not met**", "not shown"]


def test_the_newest_whole_run_of_each_device_and_suite_counts() -> None:
    """Runs of other suites do not; a device's runs stand below one heading, with the goals of all."""
    older, newer = gpu_run(), gpu_run(run_id="20280101T000000Z-kernels-0002")
    other = synthetic.run(synthetic.three(linear()), run_id="20290101T000000Z-quick-0003")
    largest = msgspec.structs.replace(linear(1024, 2**20), dtype="bfloat16")
    drawn = time_row(Variant(scheme="FusedRegenerated"), largest, *[3000.0] * 8, method="graph")
    base = time_row(BASE, largest, *[3.0] * 8, method="graph")
    vast = synthetic.run([drawn, base], run_id="20270101T000000Z-unstored-0004", suite="unstored")
    here = msgspec.structs.replace(vast.header, environment=newer.header.environment)
    vast = msgspec.structs.replace(vast, header=here)
    found = newest_runs([older, vast, newer, other])
    assert found == [newer, vast]
    page = kernels_page(None, found)
    assert page.count("## GPU 1") == page.count("### Goals without a row") == 1
    rest = page.partition("### Goals without a row")[2]
    assert "FusedRegenerated" not in rest
    assert line(page, "FusedRegeneratedLinear")[-3:] == ["2500 ms at most", "20.0", "**not met**"]


def test_the_page_is_written_from_a_folder_of_results(tmp_path: Path) -> None:
    """The same results give the same bytes; a file that cannot be read is an error of one line."""
    (tmp_path / "results").mkdir()
    assert render(tmp_path / "results", tmp_path / "out") == []
    path = write_compilations(WHOLE, tmp_path / "results" / FILE)
    first, second = (render(tmp_path / "results", tmp_path / out, [gpu_run()])[0] for out in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert "GPU 1" in first.read_text(encoding="utf-8")
    assert "Capability 9.0" in first.read_text(encoding="utf-8")
    text = path.read_bytes()
    for content, words in (
        (text.replace(b'"warps"', b'"warp"'), "warp"),
        (text.replace(b'"schema":2', b'"schema":9'), "schema 9"),
        (text[:50], "not a study of compiled kernels"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=words) as error:
            render(tmp_path / "results", tmp_path / "out")
        assert path.name in str(error.value)
        assert "\n" not in str(error.value)
