"""Figures published by other projects."""

import csv
from pathlib import Path

import pytest

from esbench.errors import UserError
from esbench.report.analysis.published import read_all_published, read_published
from esbench.report.site import all_sections
from esbench.report.tables.measured import time_sections
from esbench.schema import Measurement, Run
from esbench.stats import median

FOLDER = Path(__file__).parents[2] / "results" / "published"
GTX = FOLDER / "nesgpu_gtx1080ti.csv"
RTX = FOLDER / "nesgpu_rtx2070.csv"
HEAD = "source,device,dtype,batch_size,phase,layer,shape,variant,time_ms"
LINE = 'Somebody,Some GPU,float32,64,forward,Linear,"(8, 8)",{variant},{time}'


def by_label(run: Run, operator: str, shape: str, *, antithetic: bool = False) -> dict[str, Measurement]:
    """Return the forward times of one shape by row label."""
    wanted = (operator, shape, "forward", antithetic)
    return {
        row.variant.label(operator): row
        for row in run.measurements
        if (row.case.operator, row.case.shape, row.phase, row.case.antithetic) == wanted
    }


def test_every_figure_of_the_gtx_is_unchanged() -> None:
    """Each line is a measurement under our name; the tables have the multipliers of NESgpu's README."""
    run = read_published(GTX)
    with GTX.open(encoding="utf-8", newline="") as file:
        expected = [float(line["time_ms"]) for line in csv.DictReader(file)]
    assert [(median(row) or 0.0) / 1e6 for row in run.measurements] == pytest.approx(expected)
    assert list(by_label(run, "Linear", "(256, 256)")) == [
        "PerturbedLinear",
        "SparsePerturbedLinear(k=1)",
        "SparsePerturbedLinear(k=2)",
        "PermutedLinear(side=out)",
        "PermutedLinear(in_sparsity=0.5)",
        "PermutedLinear(in_sparsity=0.1)",
        "Base",
        "Naive",
    ]
    assert "PermutedConv2d(side=out, out_sparsity=0.1)" in by_label(
        run, "Conv2d", "(16, 16, (3, 3), (64, 64))"
    )
    (section,) = time_sections(run, "Linear", "forward")
    times, speeds, multiples = (
        dict(zip(block.table.labels, block.table.texts(), strict=True)) for block in section.blocks
    )
    wide = section.blocks[0].table.headings.index("(1024, 1024)")
    assert times["PerturbedLinear"][wide] == "13.0"
    assert speeds["PerturbedLinear"][0] == "26.1x"
    assert multiples["PerturbedLinear"][wide] == "44.9x"


def test_the_rtx_has_multiples_pairs_and_padding() -> None:
    """Multiples become times by Base; antithetic rows are separate cases; unknown sides match no variant."""
    run = read_published(RTX)
    rows = by_label(run, "Linear", "(256, 256)")
    assert median(rows["Base"]) == pytest.approx(0.141e6)
    assert median(rows["PermutedLinear(side=out)"]) == pytest.approx(3.28 * 0.141e6)
    assert "FlippedLinear(side=unknown)" in rows
    paired = by_label(run, "Linear", "(256, 256)", antithetic=True)
    case = paired["PerturbedLinear"].case
    assert (case.members, case.repeats, case.rows) == (4096, 2, 8192)
    assert median(paired["PerturbedLinear"]) == pytest.approx(14.82 * 0.141e6)
    assert median(paired["Base"]) == pytest.approx(0.141e6)
    paddings = [
        {row.case.padding for row in one.rows if row.case.kernel_size} for one in (read_published(GTX), run)
    ]
    assert paddings == [{0}, {1}]


def test_published_figures_are_labelled_so() -> None:
    """Every table names the source of its figures, and shows no rounds, suite or version of esbench."""
    runs, problems = read_all_published(FOLDER)
    assert not problems
    assert [run.header.run_id for run in runs] == ["nesgpu_gtx1080ti", "nesgpu_rtx2070"]
    for section in (section for run in runs for section in all_sections(run)):
        text = section.markdown()
        assert "published by others (NESgpu" in text
        assert "not measured by esbench" in text
        assert "inside rounds" not in text


def test_a_file_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    """The error is one line with the file and its line number."""
    good = LINE.format(variant="PerturbedLinear", time="2")
    path = tmp_path / "somebody.csv"
    for row, part in (
        (LINE.format(variant="Unheard", time="1"), "Unheard"),
        (LINE.format(variant="PerturbedLinear", time="fast"), "fast"),
        (LINE.format(variant="PerturbedLinear", time="nan"), "not a time"),
        (LINE.format(variant="PerturbedLinear", time=""), "multiple_of_base"),
        (LINE.replace("(8, 8)", "(8,").format(variant="Base", time="1"), "SyntaxError"),
        (LINE.replace("(8, 8)", "8").format(variant="Base", time="1"), "TypeError"),
        (LINE.replace("forward", "backward").format(variant="Base", time="1"), "backward"),
        ("Somebody", "Error"),
    ):
        path.write_text(f"{HEAD}\n{good}\n{row}\n{good}", encoding="utf-8")
        with pytest.raises(UserError) as raised:
            read_published(path)
        message = str(raised.value)
        assert message.startswith(f"{path}:3 is not a published figure: "), row
        assert part in message
        assert "\n" not in message
    for content in (b"", HEAD.encode(), HEAD.encode() + b"\n\xff\xfe", b'"' + b"x" * 200_000):
        path.write_bytes(content)
        runs, (problem,) = read_all_published(tmp_path)
        assert not runs
        assert "somebody.csv:1 is not" in str(problem)
