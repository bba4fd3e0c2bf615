"""The plot of time multipliers."""

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from esbench.report.plots.multipliers import BOUNDS, INTERVALS, multipliers
from tests.report.plots.figures import SPARSE, drawn, grid, legend
from tests.synthetic import BASE, DENSE, NAIVE, linear, skipped, time_row, working

if TYPE_CHECKING:
    from esbench.schema import Row


def bars(axes: Axes) -> list[list[Rectangle]]:
    """Return the bars of each shape."""
    return [list(group.patches) for group in axes.containers if isinstance(group, BarContainer)]


def segments(axes: Axes, name: str) -> list[list[tuple[float, float]]]:
    """Return the ends of the lines of that name."""
    return [
        [(float(x), float(y)) for x, y in np.asarray(ends)]
        for one in axes.collections
        if isinstance(one, LineCollection) and one.get_label() == name
        for ends in one.get_segments()
    ]


def test_a_row_per_variant_and_a_bar_per_shape() -> None:
    """A bar goes from 1, the plain layer, to the multiplier; a reason replaces a missing number."""
    factors = {DENSE: 3.0, BASE: 1.0, NAIVE: 0.5}
    rows: list[Row] = [time_row(v, linear(w), w * f) for w in (256, 512) for v, f in factors.items()]
    rows[3] = skipped(DENSE, linear(512), "out of memory: 9 GB")
    figure = drawn(multipliers(grid(rows)))
    (axes,) = figure.axes
    assert [one.get_text() for one in axes.get_yticklabels()] == ["Perturbed", "Naive"]
    assert legend(figure) == ["(256, 256)", "(512, 512)"]
    small, large = bars(axes)
    assert [(one.get_x(), one.get_x() + one.get_width()) for one in small] == [(1, 3), (1, 0.5)]
    assert [one.get_x() + one.get_width() for one in large] == [0.5]
    assert small[1].get_y() < large[0].get_y()
    assert axes.get_xscale() == "log"
    (reason,) = axes.texts
    assert isinstance(reason, Annotation)
    assert reason.get_text() == "out of memory"
    assert reason.xy[0] == 1
    assert small[0].get_y() + small[0].get_height() < reason.xy[1] < small[1].get_y()


def test_intervals_and_roofline_bounds() -> None:
    """A line is the interval of a ratio; a tick is minimum time at the peaks over the plain layer's time."""
    rows = [
        working(time_row(BASE, linear(), *[1.0] * 6), 1e7, 1e3),
        working(time_row(DENSE, linear(), 1.5, 2, 2, 2, 2, 3), 4e6, 1e3),
    ]
    figure = drawn(multipliers(grid(rows, peaks=True)))
    (axes,) = figure.axes
    ((bar,),) = bars(axes)
    (((low, height), (high, _)),) = segments(axes, INTERVALS)
    assert (low, high) == (1.5, 3.0)
    assert bar.get_y() < height < bar.get_y() + bar.get_height()
    (((at, bottom), (also, top)),) = segments(axes, BOUNDS)
    assert at == also == pytest.approx(0.4)  # 4e6 flops at 1e7 per ms
    assert (bottom, top) == pytest.approx((bar.get_y(), bar.get_y() + bar.get_height()))
    assert axes.get_xlim()[0] < at
    assert legend(figure) == ["(256, 256)", "95 % interval", "roofline bound"]
    (note,) = figure.notes
    assert note.startswith("Roofline bound: time of the variant's minimum work / time(base)")
    faster = [working(time_row(one, linear(), 1.0), 4e7, 1e3) for one in (BASE, DENSE)]
    assert "some calls are faster" in drawn(multipliers(grid(faster, peaks=True))).notes[-1]


def test_missing_bounds_and_intervals_are_explained() -> None:
    """The reasons are too few rounds, no measured peaks of the dtype, or no declared work."""
    rows = [time_row(v, linear(), 1.0) for v in (BASE, DENSE)]
    assert drawn(multipliers(grid(rows))).notes == [
        "95 % interval: 0 of 1, the others share fewer than 6 rounds with base",
        "No roofline bound: the run did not measure the peaks of the device in float32",
    ]
    rows = [time_row(v, linear(), *[1.0] * 6) for v in (BASE, DENSE)]
    assert drawn(multipliers(grid(rows, peaks=True))).notes == [
        "No roofline bound: no variant declares its minimum work in this phase"
    ]


def test_a_shape_is_shown_at_its_largest_population_with_enough_numbers() -> None:
    """The last line names that population."""
    rows: list[Row] = [
        time_row(v, linear(members=members), 1.0) for members in (64, 128) for v in (SPARSE, BASE, NAIVE)
    ]
    figure = drawn(multipliers(grid(rows)))
    assert legend(figure) == ["(256, 256)"]
    assert "128 x 1 (members x repeats)" in figure.origin
    huge = linear(members=4096)
    rows += [time_row(BASE, huge, 1.0), *(skipped(v, huge, "out of memory") for v in (SPARSE, NAIVE))]
    assert "128 x 1 (members x repeats)" in drawn(multipliers(grid(rows))).origin


def test_of_many_shapes_some_are_shown() -> None:
    """The shown shapes are evenly spaced, from the first to the last."""
    rows = [time_row(v, linear(2**k), 1.0) for k in range(3, 14) for v in (BASE, DENSE)]
    figure = drawn(multipliers(grid(rows)))
    assert legend(figure) == [f"({2**k}, {2**k})" for k in (3, 5, 7, 9, 11, 13)]
    assert figure.notes[-1] == "6 of 11 shapes: the table has all"


def test_without_anything_to_compare_there_is_no_figure() -> None:
    """A figure needs the plain layer and another variant; unusable samples have a reason."""
    dead = msgspec.structs.replace(time_row(DENSE, linear(), 1.0), samples=((float("nan"),), ()))
    for rows in (
        [time_row(BASE, linear(), 1.0)],
        [time_row(DENSE, linear(), 1.0)],
        [skipped(DENSE, linear(), "no")],
        [time_row(BASE, linear(), 1.0), dead],
    ):
        assert multipliers(grid(rows)) is None
    figure = drawn(multipliers(grid([*(time_row(v, linear(), 1.0) for v in (BASE, NAIVE)), dead])))
    assert [one.get_text() for one in figure.axes[0].texts] == ["no usable samples"]


def test_published_figures_say_so() -> None:
    """Published figures name their source, and have neither commit nor run."""
    rows = [msgspec.structs.replace(time_row(v, linear(), 1.0), method="published") for v in (DENSE, BASE)]
    figure = drawn(multipliers(grid(rows)))
    assert figure.origin.startswith("Test CPU, published by others (quick), float32")
    assert "commit" not in figure.origin
    assert "run " not in figure.origin
