"""Figures that others published."""

import csv
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def read(path: Path) -> Run:
    """A file that is read without a problem."""
    run, problems = read_published(path)
    assert problems == []
    assert run is not None
    return run


def lines(path: Path) -> list[dict[str, str]]:
    """What the file itself says."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(tmp_path: Path, *rows: str, head: str = HEAD) -> Path:
    """A file of published figures."""
    path = tmp_path / "somebody.csv"
    path.write_text("\n".join([head, *rows]), encoding="utf-8")
    return path


def by_label(run: Run, operator: str, shape: str) -> dict[str, Measurement]:
    """The forward of one shape, by the label of the row."""
    return {
        row.variant.label(operator): row
        for row in run.measurements
        if (row.case.operator, row.case.shape, row.phase) == (operator, shape, "forward")
    }


def test_every_figure_of_the_gtx_arrives_untouched() -> None:
    """Each line becomes one measurement that holds exactly its figure."""
    times = [(median(row) or 0.0) / 1e6 for row in read(GTX).measurements]
    assert times == pytest.approx([float(line["time_ms"]) for line in lines(GTX)])


def test_names_are_translated_into_ours() -> None:
    """Rows have the labels of our variants; plain permutations were of outputs."""
    run = read(GTX)
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
    assert list(by_label(run, "Conv2d", "(16, 16, (3, 3), (64, 64))")) == [
        "PerturbedConv2d",
        "PermutedConv2d(side=out)",
        "PermutedConv2d(side=out, out_sparsity=0.5)",
        "PermutedConv2d(side=out, out_sparsity=0.1)",
        "Base",
        "Naive",
    ]


def test_the_same_tables_show_nesgpus_multipliers() -> None:
    """The three blocks come out of the table code, with the multipliers of NESgpu's README."""
    (section,) = time_sections(read(GTX), "Linear", "forward")
    times, speeds, multiples = (block.frame for block in section.blocks)
    assert times.loc["PerturbedLinear", "(1024, 1024)"] == "13.0"
    assert speeds.loc["PerturbedLinear", "(256, 256)"] == "26.1x"
    assert multiples.loc["PerturbedLinear", "(1024, 1024)"] == "44.9x"


def test_published_figures_are_labelled_so() -> None:
    """Every table says whose figures it shows, and claims no rounds, suite or version of ours."""
    for run in (read(GTX), read(RTX)):
        for section in all_sections(run):
            text = section.markdown()
            assert "published by others (NESgpu" in text
            assert "not measured by esbench" in text
            assert "inside rounds" not in text


def test_multiples_of_base_become_times() -> None:
    """Forward figures given as multiples are multiplied by the time of their Base."""
    times = {label: median(row) for label, row in by_label(read(RTX), "Linear", "(256, 256)").items()}
    assert times["Base"] == pytest.approx(0.141e6)
    assert times["PermutedLinear(side=out)"] == pytest.approx(3.28 * 0.141e6)


def test_antithetic_figures_are_cases_of_their_own() -> None:
    """Antithetic is the same scheme on as many rows, in pairs, beside the same plain layer."""
    run = read(RTX)
    paired = {
        row.variant.label("Linear"): row
        for row in run.measurements
        if row.case.antithetic and row.case.shape == "(256, 256)" and row.phase == "forward"
    }
    case = paired["PerturbedLinear"].case
    assert (case.members, case.repeats, case.rows) == (4096, 2, 8192)
    assert median(paired["PerturbedLinear"]) == pytest.approx(14.82 * 0.141e6)
    assert median(paired["Base"]) == pytest.approx(0.141e6)


def test_sign_flips_of_unknown_side_match_no_variant_of_ours() -> None:
    """The draft does not say which side it flips, and the row says that."""
    assert "FlippedLinear(side=unknown)" in by_label(read(RTX), "Linear", "(256, 256)")


def test_padding_is_theirs() -> None:
    """The draft padded its convolutions by one, the README did not."""
    paddings = {
        path.stem: {row.case.padding for row in read(path).measurements if row.case.operator == "Conv2d"}
        for path in (GTX, RTX)
    }
    assert paddings == {"nesgpu_gtx1080ti": {0}, "nesgpu_rtx2070": {1}}


def test_folder_is_read_in_order() -> None:
    """All files of the folder are read, sorted by name."""
    runs, problems = read_all_published(FOLDER)
    assert problems == []
    assert [run.header.run_id for run in runs] == ["nesgpu_gtx1080ti", "nesgpu_rtx2070"]


@pytest.mark.parametrize(
    ("row", "part"),
    [
        (LINE.format(variant="Unheard", time="1"), "unknown variant 'Unheard'"),
        (LINE.format(variant="PerturbedLinear", time="fast"), "fast"),
        (LINE.format(variant="PerturbedLinear", time="-1"), "not a time"),
        (LINE.format(variant="PerturbedLinear", time="nan"), "not a time"),
        (LINE.format(variant="PerturbedLinear", time=""), "a multiple of Base, which is not on"),
        (LINE.format(variant="PerturbedLinear(x=1)", time="1"), "no option 'x'"),
        (LINE.replace("(8, 8)", "(8,").format(variant="Base", time="1"), "shape"),
        (LINE.replace("(8, 8)", "8").format(variant="Base", time="1"), "shape"),
        (LINE.replace("(8, 8)", "(8, 'x')").format(variant="Base", time="1"), "int"),
        (LINE.replace("64", "many").format(variant="Base", time="1"), "many"),
        (LINE.replace("forward", "backward").format(variant="Base", time="1"), "backward"),
        ("Somebody", "columns"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(tmp_path: Path, row: str, part: str) -> None:
    """A malformed line is a problem with its number, and the lines around it are read."""
    good = LINE.format(variant="PerturbedLinear", time="2")
    run, problems = read_published(write(tmp_path, good, row, good))
    assert run is not None
    assert len(run.rows) == 2
    assert [problem.line for problem in problems] == [3]
    assert part in str(problems[0])
    assert "\n" not in str(problems[0])


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "lacks the columns source"),
        (b"a,b\n1,2\n", "lacks the columns source"),
        (HEAD.encode(), "holds no figures"),
        (HEAD.encode() + b"\n\xff\xfe", "cannot be read"),
        (HEAD.encode() + b'\n"' + b"x" * 200_000, "cannot be read"),
    ],
)
def test_a_file_without_figures_is_a_problem(tmp_path: Path, content: bytes, part: str) -> None:
    """A file that holds no figure gives no run and one problem in words."""
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    run, problems = read_published(path)
    assert run is None
    assert [part in str(problem) for problem in problems] == [True]


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    """A file that is not there is said."""
    run, problems = read_published(tmp_path / "nowhere.csv")
    assert run is None
    assert "cannot be read" in str(problems[0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cells=st.lists(
        st.sampled_from(["Base", "Linear", "(8, 8)", "forward", "1", '"', "", "\x00", "((((", "é"])
    )
)
def test_no_file_raises(tmp_path: Path, cells: list[str]) -> None:
    """Whatever cells a line holds, it is a figure or a problem."""
    run, problems = read_published(write(tmp_path, ",".join(cells)))
    assert run is not None or problems
