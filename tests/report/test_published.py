"""Figures published by other projects, stored as runs."""

import csv
from pathlib import Path

import pytest

from esbench.report.site import all_sections
from esbench.report.tables.measured import time_sections
from esbench.schema import Measurement, Run
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


def by_label(run: Run, *, antithetic: bool = False) -> dict[str, Measurement]:
    """Return the forward times of Linear (256, 256) by row label."""
    wanted = ("Linear", "(256, 256)", "forward", antithetic)
    return {
        row.variant.label("Linear"): row
        for row in run.measurements
        if (row.case.operator, row.case.shape, row.phase, row.case.antithetic) == wanted
    }


def test_every_figure_of_the_gtx_is_unchanged() -> None:
    """Each line is a measurement under our name; the tables have the multipliers of NESgpu's README."""
    run, lines = published("nesgpu_gtx1080ti")
    expected = [float(line["time_ms"]) for line in lines]
    assert [(median(row) or 0.0) / 1e6 for row in run.measurements] == pytest.approx(expected)
    assert list(by_label(run)) == [
        "PerturbedLinear",
        "SparsePerturbedLinear(k=1)",
        "SparsePerturbedLinear(k=2)",
        "PermutedLinear(side=out)",
        "PermutedLinear(in_sparsity=0.5)",
        "PermutedLinear(in_sparsity=0.1)",
        "Base",
        "Naive",
    ]
    (section,) = time_sections(run, "Linear", "forward")
    times, speeds, multiples = (
        dict(zip(block.table.labels, block.table.texts(), strict=True)) for block in section.blocks
    )
    wide = section.blocks[0].table.headings.index("(1024, 1024)")
    assert times["PerturbedLinear"][wide] == "13.0"
    assert speeds["PerturbedLinear"][0] == "26.1x"
    assert multiples["PerturbedLinear"][wide] == "44.9x"


def test_the_rtx_has_multiples_pairs_and_padding() -> None:
    """Multiples are times of Base; antithetic rows are separate cases; unknown sides match no variant."""
    run, lines = published("nesgpu_rtx2070")
    rows, paired = by_label(run), by_label(run, antithetic=True)
    factor = next(float(one["multiple_of_base"]) for one in lines if one["variant"] == "Permutation")
    assert median(rows["Base"]) == median(paired["Base"]) == pytest.approx(0.141e6)
    assert median(rows["PermutedLinear(side=out)"]) == pytest.approx(factor * 0.141e6)
    assert "FlippedLinear(side=unknown)" in rows
    case = paired["PerturbedLinear"].case
    assert (case.members, case.repeats, case.rows) == (4096, 2, 8192)
    assert {row.case.padding for row in run.rows if row.case.kernel_size} == {1}


def test_published_figures_are_labelled_so() -> None:
    """Every table names the source of its figures, and shows no rounds, suite or version of esbench."""
    for section in all_sections(published("nesgpu_rtx2070")[0]):
        text = section.markdown()
        assert "published by others (NESgpu" in text
        assert "not measured by esbench" in text
        assert "inside rounds" not in text
