"""Measured multipliers beside published ones."""

import msgspec

from esbench.report.tables.published import beside
from esbench.schema import Measurement, Run
from tests import synthetic
from tests.synthetic import BASE, DENSE, linear, skipped, three, time_row

SMALL, LARGE = linear(256), linear(512)
SPARSE = synthetic.variant("SparsePerturbed", k=2)


def other_batch(run: Run) -> Run:
    """The same run with another batch and twice the time of everything but the baselines."""
    rows = [
        msgspec.structs.replace(
            row,
            case=msgspec.structs.replace(row.case, members=64, dtype="float16"),
            samples=tuple((2 * visit[0] if row.variant == DENSE else visit[0],) for visit in row.samples),
        )
        for row in run.rows
        if isinstance(row, Measurement)
    ]
    return msgspec.structs.replace(run, rows=tuple(rows))


def test_measured_beside_published() -> None:
    """Cells that both runs have stand side by side, whatever the batch; others are left out."""
    here = synthetic.run([*three(SMALL), *three(LARGE), time_row(SPARSE, SMALL, 1, 2)])
    there = other_batch(synthetic.run(three(SMALL)))
    (section,) = beside(here, there)
    speed, time = (block.frame for block in section.blocks)
    assert list(speed.columns) == ["(256, 256)"]
    assert list(speed.index) == ["PerturbedLinear", "Base", "Naive"]
    assert speed.loc["PerturbedLinear", "(256, 256)"] == "25.0x / 12.5x"
    assert time.loc["PerturbedLinear", "(256, 256)"] == "4.00x / 8.00x"
    assert "float32, 1024 x 1" in section.origin
    assert "float16, 64 x 1" in section.conditions


def test_another_batch_or_format_has_a_table_of_its_own() -> None:
    """Half precision or another population never shares a cell with like figures, and its table says so."""
    here = synthetic.run(three(SMALL))
    alike, unlike = synthetic.run(three(SMALL)), other_batch(synthetic.run(three(SMALL)))
    (section,) = beside(here, unlike, alike, alike)
    shown = [block.frame.loc["PerturbedLinear", "(256, 256)"] for block in section.blocks]
    assert shown == ["25.0x / 25.0x / 25.0x", "4.00x / 4.00x / 4.00x", "25.0x / 12.5x", "4.00x / 8.00x"]
    warned = [block.note for block in section.blocks if "Not the same batch or number format" in block.note]
    assert len(warned) == 2
    assert "measured with float32, 1024 x 1" in warned[0]
    assert "published with float16, 64 x 1" in warned[0]


def test_nothing_in_common_gives_no_section() -> None:
    """Runs that share no shape have nothing to show side by side."""
    assert beside(synthetic.run(three(SMALL)), synthetic.run(three(LARGE))) == []


def test_padding_tells_shapes_apart() -> None:
    """A convolution is compared with one of the same geometry, not only of the same heading."""
    case = synthetic.conv2d()
    padded = msgspec.structs.replace(case, padding=1)
    assert beside(synthetic.run(three(case)), synthetic.run(three(padded))) == []


def test_reason_stays_in_its_cell() -> None:
    """Where the measured side has no number, the cell says why."""
    here = synthetic.run([time_row(BASE, SMALL, 1.0), skipped(DENSE, SMALL, "out of memory")])
    (section,) = beside(here, synthetic.run(three(SMALL)))
    assert section.blocks[0].frame.loc["PerturbedLinear", "(256, 256)"] == "out of memory [1]"
    assert section.footnotes == ("[1] unavailable: out of memory",)


def test_one_sided_ratio_is_said() -> None:
    """Where only one side has a number, the other is shown as absent."""
    there = synthetic.run([*three(SMALL), *three(LARGE)])
    here = synthetic.run([*three(SMALL), time_row(DENSE, LARGE, 1.0)])
    (section,) = beside(here, there)
    assert section.blocks[0].frame.loc["PerturbedLinear", "(512, 512)"] == "n/a / 25.0x"


def test_antithetic_populations_are_compared_with_their_like() -> None:
    """A plain population never stands beside an antithetic one."""
    paired = msgspec.structs.replace(SMALL, antithetic=True)
    assert beside(synthetic.run(three(SMALL)), synthetic.run(three(paired))) == []
    (section,) = beside(synthetic.run([*three(SMALL), *three(paired)]), synthetic.run(three(paired)))
    assert "antithetic" in section.origin
