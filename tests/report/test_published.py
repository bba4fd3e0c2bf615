"""Values published by other projects, stored as runs."""

import csv
from pathlib import Path

import pytest

from esbench.report.site import all_sections
from esbench.report.tables.measured import time_sections
from esbench.schema import Run
from esbench.stats import median
from esbench.store import read_run

FOLDER = Path(__file__).parents[2] / "results" / "published"


def published(name: str) -> tuple[Run, list[dict[str, str]]]:
    """Return the stored run of a publication, and the lines of its source."""
    run, problems = read_run(FOLDER / f"{name}.jsonl")
    assert run
    assert not problems
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return run, list(csv.DictReader(file))


def test_times_and_multiples_are_those_of_the_source() -> None:
    """Each line of the source is a measurement under our name, and each table names the source."""
    run, lines = published("nesgpu_gtx1080ti")
    expected = [float(line["time_ms"]) for line in lines]
    assert [(median(row) or 0.0) / 1e6 for row in run.measurements] == pytest.approx(expected)
    (section,) = time_sections(run, "Linear", "forward")
    times, speeds, multiples = (
        dict(zip(block.table.labels, block.table.texts(), strict=True)) for block in section.blocks
    )
    wide = section.blocks[0].table.headings.index("(1024, 1024)")
    assert (times["PerturbedLinear"][wide], multiples["PerturbedLinear"][wide]) == ("13.0", "44.9x")
    assert speeds["PerturbedLinear"][0] == "26.1x"
    for text in (section.markdown() for section in all_sections(run)):
        assert "published by others (NESgpu" in text
        assert "not measured by esbench" in text
        assert "inside rounds" not in text


def test_the_rtx_has_multiples_pairs_and_padding() -> None:
    """Multiples are times of Base; antithetic rows are separate cases; inputs are flipped and permuted.

    Shapes are (out, in). Independent noise of convolutions was measured as stored weights, all with a bias.
    """
    run, lines = published("nesgpu_rtx2070")
    key = ("Linear", "(256, 256)", "forward")
    same = [row for row in run.measurements if (row.case.operator, row.case.shape, row.phase) == key]
    rows = {row.variant.label("Linear"): row for row in same if not row.case.antithetic}
    paired = {row.variant.label("Linear"): row for row in same if row.case.antithetic}
    factor = next(float(line["multiple_of_base"]) for line in lines if line["variant"] == "Permutation")
    assert median(rows["Base"]) == median(paired["Base"]) == pytest.approx(0.141e6)
    assert median(rows["PermutedLinear"]) == pytest.approx(factor * 0.141e6)
    assert "FlippedLinear" in rows
    case = paired["PerturbedLinear"].case
    assert (case.members, case.repeats, case.rows) == (4096, 2, 8192)
    assert {row.case.padding for row in run.rows if row.case.kernel_size} == {1}
    assert {row.case.bias for row in (*run.rows, *published("nesgpu_gtx1080ti")[0].rows)} == {True}
    linear_shapes = {row.case.shape for row in run.rows if row.case.operator == "Linear"}
    assert linear_shapes == {"(256, 256)", "(512, 512)", "(512, 10)"}
    dense = [row for row in run.rows if row.variant.scheme == "Perturbed"]
    assert {(row.case.operator, row.case.antithetic): row.variant.name for row in dense} == {
        ("Linear", False): "Perturbed",
        ("Linear", True): "Perturbed",
        ("Conv2d", False): "Perturbed(stored=weights)",
        ("Conv2d", True): "Perturbed",
    }
