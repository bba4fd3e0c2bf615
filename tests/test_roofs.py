"""The picture of the roofline."""

import pytest

from esbench.records import Row
from esbench.report.grid import LATENCY, Grid, grids
from esbench.report.roofs import calls, roofs
from tests import synthetic
from tests.picture_cases import along, drawn, key
from tests.synthetic import BASE, DENSE, linear, skipped, time_row, variant, working

LOOKUP = variant("Lookup")
NOWHERE = variant("Nowhere")


def grid(*rows: Row, ceilings: bool = True) -> Grid:
    """The forward times of a run on a device with 1 GB/s and 10 GFLOP/s."""
    return grids(synthetic.run(rows, synthetic.ceilings() if ceilings else ()), "Linear", LATENCY)[0]


def two() -> list[Row]:
    """The plain layer at half of the product's rate, dense noise at half of the copy's."""
    return [
        working(time_row(BASE, linear(), 2.0), 1e7, 1e4),
        working(time_row(DENSE, linear(), 4.0), 1e6, 2e6),
    ]


def test_calls_stand_below_the_roof() -> None:
    """What a call does in a second stands over its flops for each byte, in the unit that the roof has."""
    rows = two()
    sheet = drawn(roofs(grid(*rows)))
    axes = sheet.axes[0]
    roof, *marks = axes.lines
    assert [(along(mark)[0], along(mark, "y")[0]) for mark in marks] == [
        pytest.approx((0.5, 0.25)),
        pytest.approx((1000, 5)),
    ]
    assert axes.get_ylabel() == "GFLOP/s"
    left, ridge, right = along(roof)
    assert ridge == pytest.approx(10)  # 10 GFLOP/s over 1 GB/s
    assert along(roof, "y") == pytest.approx([left, 10, 10])
    assert (left, right) == axes.get_xlim()
    assert sorted(key(sheet)) == ["Base", "Perturbed"]
    assert all("Above" not in note for note in sheet.notes)


def test_calls_without_a_place_are_named() -> None:
    """Who declares no arithmetic, or could not run, is named with the reason."""
    rows: list[Row] = [
        *two(),
        working(time_row(LOOKUP, linear(), 1.0), 0, 1e4),
        skipped(NOWHERE, linear(), "out of memory: 9 GB"),
    ]
    assert calls(grid(*rows), linear())[0].variant == DENSE
    notes = drawn(roofs(grid(*rows))).notes
    assert notes[1:] == ["No number, no arithmetic declared: Lookup", "No number, out of memory: Nowhere"]


def test_a_call_above_the_roof_is_said_to_be() -> None:
    """Arithmetic faster than the matrix product says that its ceiling was disturbed."""
    sheet = drawn(roofs(grid(*two(), working(time_row(LOOKUP, linear(), 0.1), 1e7, 1e4))))
    assert sheet.notes[1].startswith("Above the roof: that ceiling was measured while something disturbed it")
    assert sheet.axes[0].get_ylim()[1] > 100


def test_a_roof_needs_ceilings_and_work() -> None:
    """Without a ceiling of the number format, or anybody's work, there is no picture."""
    assert roofs(grid(*two(), ceilings=False)) is None
    assert roofs(grid(time_row(BASE, linear(), 1.0), time_row(DENSE, linear(), 1.0))) is None


def test_shapes_have_panels_with_their_largest_population() -> None:
    """A shape with several populations shows the largest at which most calls have a number."""
    rows = [
        working(time_row(one, linear(width, members=members), 2.0), 1e7, 1e4)
        for width in (64, 128)
        for members in (8, 16)
        for one in (BASE, DENSE)
    ]
    rows.append(working(time_row(BASE, linear(64, members=32), 2.0), 1e7, 1e4))
    sheet = drawn(roofs(grid(*rows)))
    assert [axes.get_title("left") for axes in sheet.axes] == ["(64, 64)", "(128, 128)"]
    assert "16 x 1 (members x repeats)" in sheet.origin
