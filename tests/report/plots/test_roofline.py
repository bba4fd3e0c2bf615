"""The roofline plot."""

import pytest

from esbench.report.plots.roofline import calls, roofline
from esbench.schema import Row
from tests.report.plots.figures import along, drawn, grid, legend, points
from tests.synthetic import BASE, DENSE, linear, skipped, time_row, variant, working

LOOKUP, NOWHERE = variant("Lookup"), variant("Nowhere")


def two() -> list[Row]:
    """Return the plain layer at half of peak arithmetic and dense noise at half of the bandwidth."""
    return [
        working(time_row(BASE, linear(), 2.0), 1e7, 1e4),
        working(time_row(DENSE, linear(), 4.0), 1e6, 2e6),
    ]


def test_calls_are_below_the_roof() -> None:
    """Points are arithmetic over intensity; the ridge is at peak arithmetic over bandwidth."""
    figure = drawn(roofline(grid(two(), peaks=True)))
    (axes,) = figure.axes
    assert points(axes) == [pytest.approx((0.5, 0.25)), pytest.approx((1000, 5))]
    assert axes.get_ylabel() == "GFLOP/s"
    assert axes.get_xlabel() == "arithmetic intensity (flop/byte), minimum"
    start, ridge, end = along(axes.lines[0])
    assert ridge == pytest.approx(10)  # 10 GFLOP/s over 1 GB/s
    assert along(axes.lines[0], "y") == pytest.approx([start, 10, 10])
    assert (start, end) == axes.get_xlim()
    assert sorted(legend(figure)) == ["Base", "Perturbed"]
    assert all("Above" not in note for note in figure.notes)


def test_calls_above_the_roof_or_without_a_point_are_explained() -> None:
    """Notes name calls above a peak or with data in caches, and calls without work or times."""
    fast = working(time_row(LOOKUP, linear(), 0.1), 1e7, 1e4)
    figure = drawn(roofline(grid([*two(), fast], peaks=True)))
    assert figure.notes[1].startswith("Above the roof: the peak was measured under a disturbance")
    assert figure.axes[0].get_ylim()[1] > 100
    cached = working(time_row(LOOKUP, linear(), 1.0), 1e6, 2e6)
    note = "Above the slope: data in caches moves faster than the copy"
    assert note in drawn(roofline(grid([*two(), cached], peaks=True))).notes
    idle = working(time_row(LOOKUP, linear(), 1.0), 0, 1e4)
    timed = grid([*two(), idle, skipped(NOWHERE, linear(), "out of memory: 9 GB")], peaks=True)
    assert calls(timed, linear())[0].variant == DENSE
    notes = drawn(roofline(timed)).notes
    assert notes[1:] == ["No number, no arithmetic declared: Lookup", "No number, out of memory: Nowhere"]


def test_a_roofline_needs_peaks_and_two_calls() -> None:
    """A single call has nothing to be compared with."""
    assert roofline(grid(two())) is None
    assert roofline(grid([two()[0], time_row(DENSE, linear(), 1.0)], peaks=True)) is None


def test_a_panel_per_shape_with_its_largest_population() -> None:
    """The population is the largest at which most calls have a number."""
    cases = [linear(width, members=members) for width in (64, 128) for members in (8, 16)]
    rows = [working(time_row(v, case, 2.0), 1e7, 1e4) for case in cases for v in (BASE, DENSE)]
    rows.append(working(time_row(BASE, linear(64, members=32), 2.0), 1e7, 1e4))
    figure = drawn(roofline(grid(rows, peaks=True)))
    assert [axes.get_title("left") for axes in figure.axes] == ["(64, 64)", "(128, 128)"]
    assert "16 x 1 (members x repeats)" in figure.origin
