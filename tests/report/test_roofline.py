"""How near a call comes to what its device can do."""

import math

import msgspec
import pytest

from esbench.report.analysis import roofline
from esbench.report.site import all_sections
from esbench.report.tables import roofline as roofline_tables
from esbench.schema import DevicePeak, Row, Run, Work
from tests import synthetic
from tests.synthetic import BASE, DENSE, NAIVE, linear, skipped, time_row, working

SMALL = linear(256)
NO_WORK = Work(flops=0, moved_bytes=0, output_bytes=0)


def with_ceilings(*rows: Row) -> Run:
    """A run on a device that moves 1 GB/s and does 10 GFLOP/s."""
    return synthetic.run(rows, device_peaks=synthetic.peaks())


@pytest.mark.parametrize(
    ("flops", "moved_bytes", "floor_ms"), [(1e7, 1e5, 1.0), (1e6, 5e5, 0.5), (0, 1e6, 1.0), (1e6, 0, 0.1)]
)
def test_the_longer_of_arithmetic_and_traffic_is_the_floor(
    flops: float, moved_bytes: float, floor_ms: float
) -> None:
    """The floor is the time of the least work at the ceilings, whichever takes longer."""
    row = working(time_row(DENSE, SMALL, 2.0), flops, moved_bytes)
    assert roofline.bound_ns(with_ceilings(row), "float32", row.work) == pytest.approx(floor_ms * 1e6)


def test_best_of_several_ceilings_counts() -> None:
    """Of two copies the faster counts, each by its faster samples: neither a delay nor one slip decides."""
    slow = DevicePeak(kind="copy", dtype="float32", amount=1e6, samples=(9e6, 1.0, 2e6, 2e6, 2e6, 9e6))
    run = msgspec.structs.replace(with_ceilings(), device_peaks=(slow, *synthetic.peaks()))
    assert roofline.rate(run, "copy", "float32") == 1.0
    assert roofline.rate(msgspec.structs.replace(run, device_peaks=(slow,)), "copy", "float32") == 0.5


def test_a_type_has_its_own_matrix_product() -> None:
    """TF32 and float32 never share a ceiling; a copy counts for every type."""
    run = with_ceilings()
    assert roofline.rate(run, "matmul", "tfloat32") is None
    assert roofline.rate(run, "copy", "tfloat32") == 1.0
    work = Work(flops=1.0, moved_bytes=1.0, output_bytes=1.0)
    assert roofline.bound_ns(run, "tfloat32", work) is None


def test_percent_of_the_floor_beside_what_was_achieved() -> None:
    """A phase has its percentages, bandwidth and arithmetic, and the ceilings under them."""
    rows: list[Row] = [
        working(time_row(DENSE, SMALL, 2.0, 2.0), 1e7, 1e5),
        time_row(BASE, SMALL, 1.0),
        skipped(DENSE, linear(512), "out of memory"),
    ]
    (section,) = roofline_tables.sections(with_ceilings(*rows), "Linear")
    percent, bandwidth, arithmetic = (block.frame for block in section.blocks)
    assert percent.loc["PerturbedLinear", "(256, 256)"] == "50.0"
    assert percent.loc["PerturbedLinear", "(512, 512)"] == "out of memory [1]"
    assert percent.loc["Base", "(256, 256)"] == "n/a"
    assert bandwidth.loc["PerturbedLinear", "(256, 256)"] == "0.0500"
    assert arithmetic.loc["PerturbedLinear", "(256, 256)"] == "0.00500"
    assert [block.title for block in section.blocks] == [
        "Percent of the roofline bound (%)",
        "Achieved bandwidth (GB/s)",
        "Achieved arithmetic (TFLOP/s)",
    ]
    assert any("copy 1.00 GB/s, matrix product in float32 10.0 GFLOP/s" in n for n in section.footnotes)


def test_roofline_is_in_the_report() -> None:
    """The report of a run with ceilings holds the section, of one without none."""
    run = with_ceilings(working(time_row(DENSE, SMALL, 2.0), 1e7, 1e5))
    titles = [section.title for section in all_sections(run)]
    assert titles == ["Linear, forward: time", "Linear, forward: percent of the roofline bound"]
    assert len(all_sections(msgspec.structs.replace(run, device_peaks=()))) == 1


def test_more_than_the_ceiling_is_explained() -> None:
    """Arithmetic above its ceiling accuses the ceiling, traffic above a copy is the work of a cache."""
    rows = [
        working(time_row(DENSE, SMALL, 0.5), 1e7, 1e5),
        working(time_row(BASE, SMALL, 0.25), 0, 1e6),
        working(time_row(NAIVE, SMALL, 2.0), 1e7, 1e5),
    ]
    (section,) = roofline_tables.sections(with_ceilings(*rows), "Linear")
    above = [note for note in section.footnotes if note.startswith("above 100 %")]
    assert above == [
        (
            "above 100 % in 1 of 3 cells, at most 200 %, by arithmetic above the peak of the matrix "
            f"product: {roofline.DISTURBED}"
        ),
        (
            "above 100 % in 1 of 3 cells, at most 400 %, by traffic above that of a copy: "
            "a cache held some of it"
        ),
    ]
    (section,) = roofline_tables.sections(with_ceilings(rows[-1]), "Linear")
    assert not [note for note in section.footnotes if note.startswith("above 100 %")]


@pytest.mark.parametrize("work", [None, NO_WORK])
@pytest.mark.parametrize("samples", [(), (0.0,), (math.nan,)])
def test_nothing_to_divide_is_no_floor(work: Work | None, samples: tuple[float, ...]) -> None:
    """Rows without work and ceilings without usable samples give no section and no error."""
    row = msgspec.structs.replace(time_row(DENSE, SMALL, 2.0), work=work)
    run = with_ceilings(row)
    assert roofline_tables.sections(run, "Linear") == []
    dead = tuple(msgspec.structs.replace(ceiling, samples=samples) for ceiling in run.device_peaks)
    full = working(row, 1.0, 1.0)
    assert (
        roofline_tables.sections(msgspec.structs.replace(run, rows=(full,), device_peaks=dead), "Linear")
        == []
    )
    zero = msgspec.structs.replace(full, samples=((0.0,),))
    assert roofline_tables.sections(msgspec.structs.replace(run, rows=(zero,)), "Linear") == []
